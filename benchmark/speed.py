"""Speed of the scripts: HER against Stable-Baselines3 at equal settings, PEARL against a plain PEARL and with HTR.

    pip install -r benchmark/requirements.txt
    python benchmark/speed.py
    python benchmark/speed.py --only bitflip --bitflip.n-bits 50 --bitflip.steps 8000

What is equal is said in speed_her_dqn_bitflip.py, speed_her_ddpg_fetch.py and speed_pearl_htr.py. The sides run in
turn, so that a machine that slows down slows down all; nothing else should run beside them.
"""

import os
import statistics
from dataclasses import dataclass, field
from typing import Literal, Optional

import speed_her_ddpg_fetch
import speed_her_dqn_bitflip
import speed_pearl_htr
from experiments import Refused, command_line


@dataclass
class Args:
    only: Optional[Literal["bitflip", "fetch", "pearl"]] = None
    """one of them; None: all"""
    repeats: int = 3
    """measurements of each side"""
    bitflip: speed_her_dqn_bitflip.Args = field(default_factory=speed_her_dqn_bitflip.Args)
    fetch: speed_her_ddpg_fetch.Args = field(default_factory=speed_her_ddpg_fetch.Args)
    pearl: speed_pearl_htr.Args = field(default_factory=speed_pearl_htr.Args)


def measure(name, ours, sb3, args, repeats):
    """Print the ratio of each repeat and their median.

    `ours(args)` and `sb3(args, num_envs)` give environment steps a second; the latter is tried with each of
    `args.sb3_envs` environments first, and its fastest goes on.
    """
    print(f"{name}: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; environment steps a second", flush=True)
    tried = {num_envs: sb3(args, num_envs) for num_envs in args.sb3_envs}
    print("Stable-Baselines3 by number of environments:", {n: round(sps) for n, sps in tried.items()}, flush=True)
    fastest = max(tried, key=tried.get)
    ratios = []
    for i in range(repeats):
        a, b = ours(args), sb3(args, fastest)
        ratios.append(a / b)
        said = f"{i + 1}: {name} {a:.0f}, Stable-Baselines3 with {fastest} {b:.0f}, ratio {a / b:.2f}"
        print(said, flush=True)
    print(f"{name}: median ratio {statistics.median(ratios):.2f}", flush=True)


def measure_pearl(args, repeats):
    """Print updates a second of PEARL, of both ways of relabelling and of the plain update, and the ratios."""
    print(f"pearl_htr_*.py: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; updates a second", flush=True)
    ratios = {"K = 0 to plain": [], "time with SER to K = 0": [], "time with EC to SER": []}
    for i in range(repeats):
        sides = {
            "K = 0": speed_pearl_htr.script(args, 0),
            "SER, K = 0.3": speed_pearl_htr.script(args, 0.3),
            "EC, K = 0.3": speed_pearl_htr.script(args, 0.3, speed_pearl_htr.EC),
        }
        plain = speed_pearl_htr.plain(args)
        (pearl, _), (ser, _), (ec, _) = sides.values()
        for name, ratio in zip(ratios, (pearl / plain, pearl / ser, ser / ec)):
            ratios[name].append(ratio)
        said = ", ".join(f"{name} {speed:.1f} ({memory:.0f} MiB)" for name, (speed, memory) in sides.items())
        print(f"{i + 1}: {said}, plain {plain:.1f}", flush=True)
    for name, values in ratios.items():
        listed = ", ".join(f"{value:.2f}" for value in values)
        print(f"pearl_htr_*.py: {name} {listed}; median {statistics.median(values):.2f}", flush=True)


def main(args: Args):
    if args.repeats < 1:
        raise Refused(f"--repeats must be at least 1, not {args.repeats}")
    for name, module in (("bitflip", speed_her_dqn_bitflip), ("fetch", speed_her_ddpg_fetch)):
        if args.only in (None, name):
            measure(module.SCRIPT.name, module.ours, module.sb3, getattr(args, name), args.repeats)
    if args.only in (None, "pearl"):
        measure_pearl(args.pearl, args.repeats)
    return 0


if __name__ == "__main__":
    command_line(main, __doc__)
