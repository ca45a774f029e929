"""Stored curves: reading them, the statistics of several seeds, and whether they still fit the scripts.

A curve is a folder CURVES/EXPERIMENT/VARIANT/seed-N with eval.csv and args.json, as a run wrote them.
"""

import contextlib
import csv
import dataclasses
import importlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from experiments import EXPERIMENTS, ROOT, Refused
from scipy import stats

CURVES = ROOT / "benchmark" / "curves"
# Arguments that do not change what is learned: names, places, logs, and who computes.
NEUTRAL = set(
    "exp_name seed torch_deterministic cuda num_threads num_workers track wandb_project_name wandb_entity "
    "capture_video save_model quiet run_dir resume evaluate checkpoint_frequency".split()
)


# ------------------------------------------------------------------------------------------------------------ curves
@dataclass
class Curve:
    """One seed's evaluations of one metric."""

    seed: int
    steps: np.ndarray
    """(evaluations,) environment steps"""
    values: np.ndarray
    """(evaluations,) of the metric"""
    wall_s: np.ndarray
    """(evaluations,) seconds since the start of the run"""
    about: dict
    """args.json: args, versions, machine, commit"""

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

    @property
    def stopped(self):
        """Whether the run was ended before all of its steps."""
        return self.steps[-1] < self.about["args"]["total_timesteps"]


def rows(path, metric):
    """(steps, values, wall_s) of the rows of a metric in a file like eval.csv, three arrays."""
    with open(path, newline="") as file:
        found = [row for row in csv.DictReader(file) if row["metric"] == metric]
    columns = ("global_step", "value", "wall_s")
    return tuple(np.array([float(row[column]) for row in found]) for column in columns)


def read(folder, metric):
    """The curve in a folder."""
    try:
        about = json.loads((folder / "args.json").read_text())
        seed = about["args"]["seed"]
        steps, values, wall_s = rows(folder / ("charts.csv" if metric.startswith("charts/") else "eval.csv"), metric)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise Refused(f"{folder} is not a curve: {type(e).__name__} {e}") from e
    if not len(values) or not np.isfinite(values).all():
        raise Refused(f"{folder} has {'a value that is not a number' if len(values) else 'no row'} of {metric}")
    return Curve(seed, steps, values, wall_s, about)


def read_all(curves, experiment, variant, metric=None):
    """The curves of a variant, by seed; none if there is no such folder."""
    metric = metric or EXPERIMENTS[experiment].metric
    folders = (Path(curves) / experiment / variant).glob("seed-*")
    return sorted((read(folder, metric) for folder in folders), key=lambda curve: curve.seed)


# -------------------------------------------------------------------------------------------------------- statistics
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


# ------------------------------------------------------------------------------------------------------------- stale
def import_script(name):
    """A script of the repository's root as a module."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return importlib.import_module(name)


def args_now(experiment, variant):
    """Arguments, a dict, that the experiment's command gives its script today."""
    described = EXPERIMENTS[experiment]
    name, flags = described.script_name(variant), described.flags(variant)
    if not (ROOT / name).exists():
        raise Refused(f"{name} is not there")
    script = import_script(Path(name).stem)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return dataclasses.asdict(tyro.cli(script.Args, args=flags))
    except SystemExit as e:
        raise Refused(f"{name} does not take {' '.join(flags)} any more") from e


def differences(had, has, despite=()):
    """Arguments in which two runs differ, as text ("k 4, now 8"), those that do not change learning left out."""
    found = []
    allowed = NEUTRAL | {name.replace("-", "_") for name in despite}
    for name in sorted((had.keys() | has.keys()) - allowed):
        if name not in has:
            found.append(f"{name} {had[name]}, now gone")
        elif name not in had:
            found.append(f"{name} is new")
        elif had[name] != has[name]:
            found.append(f"{name} {had[name]}, now {has[name]}")
    return found


def stale(experiment, variant, curves, despite=()):
    """Why curves no longer show what their command does today, as text; none if they do."""
    if not curves:
        return []
    try:
        now = args_now(experiment, variant)
    except Refused as e:
        return [str(e)]
    return sorted({each for curve in curves for each in differences(curve.about["args"], now, despite)})


def load_pearl(path):
    """Which of the two PEARL scripts wrote this model.pt or checkpoint.pt, as a module, and the file's content."""
    for name in ("pearl_htr_ser", "pearl_htr_ec"):
        script = import_script(name)
        with contextlib.suppress(script.BadInput):
            return script, script.load(path)
    raise Refused(f"{path} is no whole, readable model.pt or checkpoint.pt of pearl_htr_ser.py or pearl_htr_ec.py")
