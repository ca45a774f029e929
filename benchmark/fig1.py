"""Fig. 1 of the HER paper: success on bit flipping against the number of bits, with and without HER, and its table.

    python benchmark/run.py bitflip
    python benchmark/fig1.py docs/bitflip.png

Draws the mean over seeds of the last evaluation, with a bar from the worst seed to the best, and prints a table.
"""

import csv
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

SOLVED = 0.99


@dataclass
class Args:
    output: tyro.conf.Positional[Path]
    """PNG to write"""
    curves: Path = Path(__file__).resolve().parent / "curves" / "bitflip"
    """folder with nN-her/seed-*/eval.csv and nN-dqn/seed-*/eval.csv"""


def read(path):
    """The evaluations of a run: success rates, training episodes and seconds, three arrays."""
    with open(path) as file:
        rows = list(csv.DictReader(file))
    success = [(float(row["value"]), float(row["wall_s"])) for row in rows if row["metric"] == "eval/success_rate"]
    episodes = [float(row["value"]) for row in rows if row["metric"] == "eval/training_episodes"]
    rates, seconds = np.array(success).T
    return rates, np.array(episodes), seconds


def main(args):
    runs = defaultdict(list)
    for path in sorted(args.curves.glob("*/seed-*/eval.csv")):
        n, name = re.fullmatch(r"n(\d+)-(her|dqn)", path.parts[-3]).groups()
        runs[name, int(n)].append(read(path))
    if not runs:
        raise SystemExit(f"error: no curves in {args.curves}; first run: python benchmark/run.py bitflip")
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, label in (("her", "DQN + HER"), ("dqn", "DQN")):
        sizes = sorted(n for each, n in runs if each == name)
        last = [[rates[-1] for rates, _, _ in runs[name, n]] for n in sizes]
        mean = np.array([np.mean(values) for values in last])
        spread = [mean - [min(values) for values in last], [max(values) for values in last] - mean]
        axes.errorbar(sizes, mean, spread, marker="o", capsize=3, label=label)
    axes.set(xlabel="number of bits n", ylabel="success rate", ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.output, dpi=120)

    print(
        f"| n | HER: success (worst seed), seeds | episodes to {SOLVED} | seconds to {SOLVED} | DQN: success, seeds |"
    )
    print("|---|---|---|---|---|")
    for n in sorted({n for _, n in runs}):
        her, dqn = runs["her", n], runs["dqn", n]
        last = [rates[-1] for rates, _, _ in her]
        solved = [int(np.argmax(rates >= SOLVED)) for rates, _, _ in her if rates.max() >= SOLVED]
        cells = [f"{np.mean(last):.3f} ({min(last):.3f}), {len(last)}" if her else "-"]
        for column, digits in ((1, 0), (2, 0)):
            values = [run[column][i] for run, i in zip([r for r in her if r[0].max() >= SOLVED], solved)]
            cells.append(f"{np.median(values):,.{digits}f} (at most {max(values):,.{digits}f})" if values else "-")
        plain = [rates[-1] for rates, _, _ in dqn]
        cells.append(f"{np.mean(plain):.3f}, {len(plain)}" if dqn else "-")
        print(f"| {n} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
