"""Run an experiment of benchmark/experiments.py: every variant with every seed, and keep the curves.

    python benchmark/run.py bitflip
    python benchmark/run.py bitflip --only n50-her --seeds 1 2

A finished run leaves benchmark/curves/EXPERIMENT/VARIANT/seed-N/ with eval.csv and args.json, and is not run again. One
that was stopped goes on from its checkpoint. Exit status 1 if a run failed.
"""

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import tyro
from experiments import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Args:
    experiment: tyro.conf.Positional[str]
    """name in benchmark/experiments.py"""
    only: str = ""
    """regular expression: only variants whose whole name matches"""
    seeds: tuple[int, ...] = ()
    """only these of the experiment's seeds"""
    workers: int = 1
    """runs at once; at most one a core, and a Fetch run takes a core and a half"""
    curves: Path = ROOT / "benchmark" / "curves"
    """folder of the curves"""
    runs: Path = ROOT / "runs" / "benchmark"
    """folder of the runs themselves, with checkpoints"""


def run(experiment, variant, seed, kept, runs):
    """Run to the end, from the newest checkpoint if there is one. Returns what went wrong, or None."""
    command = [sys.executable, *experiment.command(variant, seed), "--run-dir", str(runs)]
    checkpoints = sorted(runs.glob("*/checkpoint.pt"), key=lambda path: path.stat().st_mtime)
    if checkpoints:
        command += ["--resume", str(checkpoints[-1])]
    runs.mkdir(parents=True, exist_ok=True)
    with open(runs / "log", "w") as log:
        if subprocess.run(command, cwd=ROOT, stdout=log, stderr=log).returncode:
            return f"see {runs / 'log'}"
    newest = max(runs.glob("*/eval.csv"), key=lambda path: path.stat().st_mtime).parent
    kept.mkdir(parents=True)
    for name in ("args.json", "eval.csv"):
        shutil.copy(newest / name, kept / name)


def main(args):
    if args.experiment not in EXPERIMENTS:
        sys.exit(f"error: no experiment {args.experiment}; there are: {', '.join(EXPERIMENTS)}")
    experiment = EXPERIMENTS[args.experiment]
    wanted = []
    for variant, seed in experiment.runs():
        kept = args.curves / args.experiment / variant / f"seed-{seed}"
        if re.fullmatch(args.only or ".*", variant) and seed in (args.seeds or (seed,)) and not kept.exists():
            wanted.append((variant, seed, kept, args.runs / args.experiment / variant / f"seed-{seed}"))
    failed = 0
    with ThreadPoolExecutor(args.workers) as pool:
        running = {pool.submit(run, experiment, *each): each for each in wanted}
        for i, future in enumerate(as_completed(running), 1):
            variant, seed, *_ = running[future]
            wrong = future.result()
            failed += wrong is not None
            print(f"{i} of {len(wanted)}: {variant} seed {seed}: {wrong or 'done'}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
