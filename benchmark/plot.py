"""Learning curves of experiments from their stored curves: mean or interquartile mean of the seeds, 95% bootstrap band.

    python benchmark/plot.py fetchpush fetchpickandplace --only her-future --output docs/fetch_curves.png
    python benchmark/plot.py point --adaptation --output docs/point_adaptation.png
    python benchmark/plot.py point-k --metric charts/hindsight_task_distance --output docs/point_distance.png

Each seed is a thin line; crosses are numbers that peers published, and arrows those far beyond our steps.
Where seeds were stopped at different steps, mean and band end with the first of them.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

import matplotlib
import numpy as np
import tyro
from curves import CURVES, interval, iqm, read_all
from experiments import ROOT, Refused, command_line, select

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


@dataclass
class Args:
    experiments: tyro.conf.Positional[tuple[str, ...]]
    """names in benchmark/experiments.py"""
    output: Optional[Path] = None
    """PNG to write; None: docs/EXPERIMENT.png of the first"""
    only: str = ""
    """regular expression: only variants whose whole name matches"""
    metric: Optional[str] = None
    """metric of eval.csv or charts.csv; None: the experiment's"""
    center: Literal["iqm", "mean"] = "iqm"
    """what the line is: interquartile mean (of 3 seeds and fewer the plain mean) or mean of the seeds"""
    wall: bool = False
    """against minutes of wall clock instead of environment steps, without band and peers"""
    adaptation: bool = False
    """against the adaptation episode, at the last evaluation (PEARL)"""
    peers: bool = True
    """peers' published numbers as crosses, where it is one experiment alone (`--no-peers`: without)"""
    title: str = ""
    """title of the picture; empty: the experiments' names"""
    curves: Path = CURVES
    """folder of the stored curves"""


def lines(args, name, variant, metric):
    """What to draw of a variant: a list of (x, y), one pair of arrays a seed; empty if nothing is stored."""
    if args.adaptation:
        # Metrics eval/success_rate_ep0, _ep1, ...; of eval/episodic_return: eval/return_ep0, ...
        prefix = metric.replace("episodic_return", "return")
        folders = sorted((args.curves / name / variant).glob("seed-*/eval.csv"))
        text = "\n".join(path.read_text() for path in folders[:1])
        episodes = range(len(set(re.findall(rf",{re.escape(prefix)}_ep\d+,", text))))
        by_episode = [read_all(args.curves, name, variant, f"{prefix}_ep{i}") for i in episodes]
        return [(np.array(episodes), np.array([curve.values[-1] for curve in seed])) for seed in zip(*by_episode)]
    curves = read_all(args.curves, name, variant, metric)
    return [(curve.wall_s / 60 if args.wall else curve.steps, curve.values) for curve in curves]


def draw(args, axes):
    """Draw what is stored of the experiments. Returns the number of variants drawn."""
    center = iqm if args.center == "iqm" else np.mean
    drawn, peers = 0, ()
    for name in args.experiments:
        experiment, variants = select(name, args.only)
        metric = args.metric or experiment.metric
        for variant in variants:
            runs = lines(args, name, variant, metric)
            if not runs:
                continue
            color = f"C{drawn % 10}"
            label = f"{name} {variant}" if len(args.experiments) > 1 else variant
            label += f" ({len(runs)} seed{'s' * (len(runs) > 1)})"
            for x, y in runs:
                axes.plot(x, y, color=color, alpha=0.3, linewidth=0.8)
            shortest = min(len(x) for x, _ in runs)
            grids = np.array([x[:shortest] for x, _ in runs])
            if not args.wall and (grids != grids[0]).any():
                raise Refused(f"{name} {variant}: {metric} was not taken at the same steps in all seeds")
            x = grids.mean(0)
            y = np.array([y[:shortest] for _, y in runs])
            axes.plot(x, center(y, axis=0), color=color, label=label)
            if len(runs) > 1 and not args.wall:
                axes.fill_between(x, *interval(lambda y, axis: center(y, axis=axis), y), color=color, alpha=0.2)
            drawn += 1
        if metric == experiment.metric and len(args.experiments) == 1 and not (args.wall or args.adaptation):
            peers = experiment.peers
    if drawn and args.peers:
        right = 2 * axes.get_xlim()[1]
        for i, peer in enumerate(peers):
            x, marker = (right, ">") if peer.steps > right else (peer.steps, "x")
            label = f"{peer.name}, {peer.value:g} at {peer.steps:,}"
            axes.plot(x, peer.value, marker, color=plt.cm.Dark2(i), label=label)
    return drawn


def main(args: Args):
    if not args.experiments:
        raise Refused("which experiment? See benchmark/experiments.py")
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    if not draw(args, axes):
        raise Refused(f"nothing to draw; first run: python benchmark/run.py {args.experiments[0]}")
    metric = args.metric or select(args.experiments[0])[0].metric
    x = "minutes" if args.wall else "adaptation episode" if args.adaptation else "environment steps"
    axes.set(xlabel=x, ylabel=metric, title=args.title or ", ".join(args.experiments))
    if args.adaptation:
        axes.xaxis.get_major_locator().set_params(integer=True)
    if "success" in metric:
        axes.set(ylim=(-0.02, 1.05))
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    output = args.output or ROOT / "docs" / f"{args.experiments[0]}.png"
    try:
        figure.savefig(output, dpi=120)
    except (OSError, ValueError) as e:
        raise Refused(f"cannot write {output}: {e}") from e
    return 0


if __name__ == "__main__":
    command_line(main, __doc__)
