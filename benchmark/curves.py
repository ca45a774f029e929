"""Stored curves: reading them, the statistics of several seeds, and whether they still fit the scripts."""

import contextlib
import csv
import dataclasses
import importlib
import io
import json
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
import tyro
from experiments import CURVES, EXPERIMENTS, fail
from scipy import stats

SUCCESS = "eval/success_rate"
# Arguments that do not change what is learned: names, places, logs, and who computes.
NEUTRAL = set(
    "exp_name seed torch_deterministic cuda num_threads num_workers track wandb_project_name wandb_entity "
    "capture_video save_model quiet run_dir resume evaluate checkpoint_frequency".split()
)


@dataclass
class Curve:
    """One seed's values of one metric."""

    seed: int
    steps: np.ndarray  # (evaluations,) environment steps
    values: np.ndarray  # (evaluations,) of the metric
    wall_s: np.ndarray  # (evaluations,) seconds since the start of the run
    episodes: int  # of an evaluation
    args: dict  # the script's arguments
    made: dict  # versions, machine, commit

    @property
    def auc(self):
        """Mean over the evaluations: the area under the curve on an even grid, in the metric's unit."""
        return self.values.mean()

    @property
    def final(self):
        """Mean over the last seventh of the evaluations, 3 of 21 and at least 1."""
        return self.values[-max(1, len(self.values) // 7) :].mean()

    def reached(self, threshold):
        """Index of the first evaluation at the threshold, or None."""
        hits = np.flatnonzero(self.values >= threshold)
        return int(hits[0]) if len(hits) else None


def read_rows(path, metric):
    """The rows of a metric in a file like eval.csv, dicts of strings."""
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if row["metric"] == metric]


def read(folder, metric=SUCCESS):
    """The curve in a folder."""
    args, made = (json.loads((folder / name).read_text()) for name in ("args.json", "made.json"))
    rows = read_rows(folder / ("charts.csv" if metric.startswith("charts/") else "eval.csv"), metric)
    columns = (np.array([float(row[key]) for row in rows]) for key in ("global_step", "value", "wall_s"))
    curve = Curve(args["seed"], *columns, int(rows[0]["n_episodes"] or 0) if rows else 0, args, made)
    if not rows or not np.isfinite(curve.values).all():
        fail(f"{folder} has {'a value that is not a number' if rows else 'no row'} of {metric}")
    return curve


def read_all(experiment, variant, metric=SUCCESS, curves=None):
    """The curves of a variant, by seed, stored or in the folder `curves`; none if there is nothing of it."""
    folders = ((curves or CURVES) / experiment / variant).glob("seed-*")
    return sorted((read(folder, metric) for folder in folders), key=attrgetter("seed"))


def iqm(values, axis=0):
    """Interquartile mean: without the lowest and the highest quarter. That cuts nothing from 3 values: their mean."""
    return stats.trim_mean(values, 0.25, axis=axis)


def interval(statistic, *samples):
    """95% bootstrap interval (percentiles, 10,000 resamples, always the same) of statistic(*samples, axis=...).

    Samples are arrays of seeds, (seeds,) or (seeds, points), at least 2 seeds each; the ends have the shape (points,).
    """
    options = {"vectorized": True, "paired": False, "method": "percentile", "confidence_level": 0.95}
    options |= {"n_resamples": 10_000, "rng": np.random.default_rng(0), "batch": 1000}
    found = stats.bootstrap(samples, statistic, axis=0, **options).confidence_interval
    return found.low, found.high


def wilson(rate, n):
    """Wilson's 95% interval of a success rate over n episodes."""
    return stats.binomtest(round(rate * n), n).proportion_ci(method="wilson")


def args_now(experiment, variant):
    """Arguments, a dict, that the experiment's command gives its script today; SystemExit if it does not take them."""
    script, *flags = EXPERIMENTS[experiment].command(variant)
    with contextlib.redirect_stderr(io.StringIO()):
        return dataclasses.asdict(tyro.cli(importlib.import_module(Path(script).stem).Args, args=flags))


def differences(had, has, despite=()):
    """Arguments in which two runs differ, as text ("k 4, now 8"), those that do not change learning left out."""
    names = sorted((had.keys() | has.keys()) - NEUTRAL - {name.replace("-", "_") for name in despite})
    pairs = {name: (had.get(name, "not there"), has.get(name, "not there")) for name in names}
    return [f"{name} {before}, now {after}" for name, (before, after) in pairs.items() if before != after]


def stale(experiment, variant, curves, despite=()):
    """Why curves no longer show what their command does today, as text; none if they do."""
    try:
        now = args_now(experiment, variant) if curves else {}
    except SystemExit:
        return ["the script does not take these arguments any more"]
    return sorted({each for curve in curves for each in differences(curve.args, now, despite)})
