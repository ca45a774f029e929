"""Run an experiment of benchmark/experiments.py: every variant with every seed, and keep the curves.

    python benchmark/run.py bitflip
    python benchmark/run.py bitflip --only n50-her --seeds 1 2

A finished run leaves benchmark/curves/EXPERIMENT/VARIANT/seed-N/ with eval.csv, args.json and, where the experiment
names TensorBoard tags to keep, charts.csv; it is not run again. One that was stopped goes on from its checkpoint. Exit
status 1 if a run failed.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import tyro
from experiments import EXPERIMENTS, ROOT, Refused, command_line, select


@dataclass
class Args:
    experiment: tyro.conf.Positional[str]
    """name in benchmark/experiments.py"""
    only: str = ""
    """regular expression: only variants whose whole name matches"""
    seeds: tuple[int, ...] = ()
    """these seeds instead of the experiment's"""
    workers: int = 1
    """runs at once; at most one a core, and a Fetch run takes a core and a half"""
    curves: Path = ROOT / "benchmark" / "curves"
    """folder of the curves"""
    runs: Path = ROOT / "runs" / "benchmark"
    """folder of the runs themselves, with checkpoints"""


def run(experiment, variant, seed, kept, runs):
    """Run to the end, from the newest checkpoint if there is one. Returns what went wrong, or None."""
    if not (ROOT / experiment.script_name(variant)).exists():
        return f"{experiment.script_name(variant)} is not there"
    runs.mkdir(parents=True, exist_ok=True)
    inside = runs.resolve().is_relative_to(ROOT)  # then without the machine's own folders in what is kept
    command = [sys.executable, *experiment.command(variant, seed)]
    command += ["--run-dir", os.path.relpath(runs, ROOT) if inside else str(runs.resolve())]
    checkpoints = sorted(runs.glob("*/checkpoint.pt"), key=lambda path: path.stat().st_mtime)
    if checkpoints:
        command += ["--resume", os.path.relpath(checkpoints[-1], ROOT) if inside else str(checkpoints[-1].resolve())]
    with open(runs / "log", "w") as log:
        if subprocess.run(command, cwd=ROOT, stdout=log, stderr=log).returncode:
            return f"see {runs / 'log'}"
    newest = max(runs.glob("*/eval.csv"), key=lambda path: path.stat().st_mtime).parent
    partial = kept.with_name(f".{kept.name}")  # a curve is kept whole or not at all
    partial.mkdir(parents=True, exist_ok=True)
    for name in ("args.json", "eval.csv"):
        shutil.copy(newest / name, partial / name)
    if experiment.charts:
        keep_charts(runs, experiment.charts, partial)
    partial.rename(kept)


def keep_charts(runs, tags, kept, points=200):
    """Write charts.csv, in the columns of eval.csv, from the TensorBoard files of a run and its resumed parts.

    At most `points` rows a tag, evenly thinned.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seed = json.loads((kept / "args.json").read_text())["args"]["seed"]
    found = {tag: {} for tag in tags}
    for folder in sorted({path.parent for path in runs.glob("*/events.*")}, key=lambda path: path.stat().st_mtime):
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()  # 0: all of them
        for tag in set(tags) & set(events.Tags()["scalars"]):
            found[tag] |= {event.step: event for event in events.Scalars(tag)}
    with open(kept / "charts.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("seed", "global_step", "metric", "value", "n_episodes", "wall_s"))
        for tag, events in found.items():
            first = min((event.wall_time for event in events.values()), default=0)
            for step in sorted(events)[:: len(events) // points + 1]:
                seconds = round(events[step].wall_time - first, 3)
                writer.writerow((seed, step, tag, f"{events[step].value:.6g}", "", seconds))


def run_all(name, variants, seeds, workers, curves, runs):
    """Run what is not in `curves` yet; prints each run's end. Returns the number of runs that failed."""
    experiment = EXPERIMENTS[name]
    pairs = [(variant, seed) for seed in seeds for variant in variants] if seeds else experiment.runs()
    wanted = []
    for variant, seed in pairs:
        kept = curves / name / variant / f"seed-{seed}"
        if variant in variants and not kept.exists():
            wanted.append((variant, seed, kept, runs / name / variant / f"seed-{seed}"))
    failed = 0
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(run, experiment, *each): each for each in wanted}
        for i, future in enumerate(as_completed(running), 1):
            variant, seed, *_ = running[future]
            wrong = future.result()
            failed += wrong is not None
            print(f"{i} of {len(wanted)}: {name} {variant} seed {seed}: {wrong or 'done'}", file=sys.stderr, flush=True)
    return failed


def main(args: Args):
    _, variants = select(args.experiment, args.only)
    if args.workers < 1:
        raise Refused(f"--workers must be at least 1, not {args.workers}")
    return 1 if run_all(args.experiment, variants, args.seeds, args.workers, args.curves, args.runs) else 0


if __name__ == "__main__":
    command_line(main, __doc__)
