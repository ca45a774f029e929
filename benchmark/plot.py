"""Learning curves from eval.csv files: mean over runs, and each run as a thin line.

python benchmark/plot.py docs/push.png "DDPG + HER=benchmark/curves/FetchPush-v4__*/eval.csv"
"""

import glob
from dataclasses import dataclass
from typing import Annotated

import matplotlib
import numpy as np
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


@dataclass
class Args:
    output: tyro.conf.Positional[str]
    """PNG to write"""
    curves: Annotated[tuple[str, ...], tyro.conf.arg(name=""), tyro.conf.Positional]
    """LABEL=PATTERN for each curve; the pattern matches the eval.csv of its runs"""
    metric: str = "eval/success_rate"
    """which metric to draw"""
    title: str = ""
    """title of the picture"""
    wall: bool = False
    """against minutes of wall clock instead of environment steps"""


def read(path, metric, column):
    """The (x, value) pairs of one run, two arrays."""
    table = np.genfromtxt(path, delimiter=",", names=True, dtype=None, encoding="utf-8")
    rows = table[table["metric"] == metric]
    return rows[column], rows["value"]


def main(args):
    column, scale = ("wall_s", 60) if args.wall else ("global_step", 1)
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for i, curve in enumerate(args.curves):
        label, pattern = curve.split("=", 1)
        runs = [read(path, args.metric, column) for path in sorted(glob.glob(pattern))]
        if not runs:
            raise SystemExit(f"error: no file matches {pattern}")
        for x, y in runs:
            axes.plot(x / scale, y, color=f"C{i}", alpha=0.35, linewidth=1)
        shortest = min(len(x) for x, _ in runs)
        x, y = (np.mean([run[axis][:shortest] for run in runs], axis=0) for axis in (0, 1))
        axes.plot(x / scale, y, color=f"C{i}", label=f"{label} ({len(runs)} run{'s' * (len(runs) > 1)})")
    axes.set(
        xlabel="minutes" if args.wall else "environment steps", ylabel=args.metric, ylim=(-0.02, 1.02), title=args.title
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.output, dpi=120)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
