"""Run an experiment of benchmark/experiments.py: every variant with every seed, and keep the curves.

    python benchmark/run.py bitflip
    python benchmark/run.py bitflip --only n50-her --seeds 1 2

A finished run leaves benchmark/curves/EXPERIMENT/VARIANT/seed-N/ and is not run again; one that was stopped goes on
from its checkpoint. Exit status: 0 all there; 1 a run failed; 130 stopped by Ctrl-C.
"""

import csv
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import tyro
from experiments import CURVES, EXPERIMENTS, ROOT, select
from tyro.conf import Positional

CHARTS = ("charts/hindsight_task_distance", "charts/hindsight_reward", "charts/real_reward")  # kept beside evaluations


@dataclass
class Args:
    experiment: Positional[str]  # name in benchmark/experiments.py
    only: str = "*"  # only variants whose names match this pattern
    seeds: tuple[int, ...] = ()  # these instead of the experiment's
    workers: int = 1  # runs at once; at most one a core, and a Fetch run takes a core and a half
    curves: Path = CURVES  # folder of the curves
    runs: Path = ROOT / "runs" / "benchmark"  # folder of the runs themselves, with checkpoints


def run(command, kept, folder):
    """Run a seed in `folder` to the end, from its checkpoint if there is one; returns what went wrong, or None."""
    folder.mkdir(parents=True, exist_ok=True)
    # Relative to the root, so that args.json does not tell where on the machine that is.
    command = [sys.executable, *command, "--run-dir", os.path.relpath(folder, ROOT)]
    stopped = next(folder.glob("*/checkpoint.pt"), None)
    if stopped:
        command += ["--resume", os.path.relpath(stopped.parent, ROOT)]
    write_made(folder / "made.json", goes_on=stopped is not None)
    with open(folder / "log", "a") as log:
        if subprocess.run(command, cwd=ROOT, stdout=log, stderr=log).returncode:
            return f"see {folder / 'log'}"
    finished = next(folder.glob("*/checkpoint.pt")).parent
    partial = kept.with_name(f".{kept.name}")  # a curve is kept whole or not at all
    partial.mkdir(parents=True, exist_ok=True)
    for path in (finished / "eval.csv", finished / "args.json", folder / "made.json"):
        shutil.copy(path, partial)
    keep_charts(finished, partial)
    partial.rename(kept)


def write_made(path, goes_on):
    """Write made.json: versions and machine of today, and the commit; all of them, if others made the run's start."""
    packages = ("torch", "numpy", "gymnasium", "gymnasium-robotics", "mujoco")
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
    machine = {"platform": platform.platform(), "cores": os.cpu_count()}
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]  # the hash, no tag
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    earlier = json.loads(path.read_text())["commit"].split(", ") if goes_on and path.exists() else []
    commits = ", ".join(dict.fromkeys([*earlier, commit]))
    path.write_text(json.dumps({"versions": versions, "machine": machine, "commit": commits}, indent=2))


def keep_charts(finished, kept, points=200):
    """Write charts.csv, in the columns of eval.csv, from a run's TensorBoard files: at most `points` rows a tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seed = json.loads((finished / "args.json").read_text())["seed"]
    events = EventAccumulator(str(finished), size_guidance={"scalars": 0}).Reload()  # 0: all of them
    rows = []
    for tag in [tag for tag in CHARTS if tag in events.Tags()["scalars"]]:
        scalars = events.Scalars(tag)
        for event in scalars[:: len(scalars) // points + 1]:
            seconds = round(event.wall_time - scalars[0].wall_time, 3)
            rows.append((seed, event.step, tag, f"{event.value:.6g}", "", seconds))
    if rows:
        with open(kept / "charts.csv", "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([("seed", "global_step", "metric", "value", "n_episodes", "wall_s"), *rows])


def run_all(name, variants, seeds, workers, curves, runs):
    """Run what is not in `curves` yet; prints each run's end. Returns the number of runs that failed."""
    experiment, wanted, failed = EXPERIMENTS[name], {}, 0
    for variant, seed in [(variant, seed) for seed in seeds for variant in variants] or experiment.runs():
        place = Path(name, variant, f"seed-{seed}")
        if variant in variants and not (curves / place).exists():
            wanted[place] = [*experiment.command(variant), "--seed", str(seed)]
    with ThreadPoolExecutor(max(1, workers)) as pool:
        running = {pool.submit(run, wanted[place], curves / place, runs / place): place for place in wanted}
        try:
            for i, future in enumerate(as_completed(running), 1):
                wrong = future.result()
                failed += wrong is not None
                print(f"{i} of {len(wanted)}: {running[future]}: {wrong or 'done'}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:  # which the scripts get too, and they save
            pool.shutdown(cancel_futures=True)
            sys.exit(130)
    return failed


def main(args: Args):
    variants = select(args.experiment, args.only)
    return 1 if run_all(args.experiment, variants, args.seeds, args.workers, args.curves, args.runs) else 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__, config=(tyro.conf.OmitArgPrefixes,)))
