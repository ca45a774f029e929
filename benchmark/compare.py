"""Has learning got worse? Reruns an experiment with new seeds and compares with its stored curves.

    python benchmark/compare.py bitflip --only 'n?0-her' --workers 2
    python benchmark/compare.py fetchpush --candidate FOLDER                  # curves of `run.py ... --curves FOLDER`
    python benchmark/compare.py fetchpush --candidate FOLDER --despite gamma  # a change of defaults

Exit status: 0 as good as the stored curves; 1 worse; 2 could not judge.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np
import tyro
from curves import differences, interval, iqm, read_all, stale
from experiments import ROOT, fail, select
from run import run_all
from scipy import stats
from tyro.conf import Positional

MARGIN = 0.05  # loss, as a share of the stored value, that is no regression yet
SMALL = 0.01  # the margin is no less than this: where success is near 0 there is nothing to lose
BLIND = 0.20  # loss that must be ruled out for a PASS
DEAD = 0.5  # a seed failed whose final value is below this share of the stored median


@dataclass
class Args:
    experiment: Positional[str]  # name in benchmark/experiments.py
    only: str = "*"  # only variants whose names match this pattern
    candidate: Optional[Path] = None  # folder of the curves to judge; None: rerun the experiment now
    seeds: tuple[int, ...] = (101, 102, 103, 104, 105)  # of the rerun, none of them stored
    workers: int = 1  # runs at once
    min_seeds: int = 5  # fewer, stored or new, are not judged; with 3 dead seeds are not told from chance
    despite: tuple[str, ...] = ()  # arguments that may differ from the stored ones, to judge a change of defaults


def refuse_seeds(label, stored, new, min_seeds):
    """Refuse seeds, two lists, that are too few or not independent."""
    for what, seeds in (("stored", stored), ("new", new)):
        if len(seeds) < max(2, min_seeds):
            fail(f"{label}: could not judge: {len(seeds)} {what} seeds, --min-seeds is {min_seeds} (2 at least)")
    if len({*stored, *new}) < len(stored) + len(new):
        fail(f"{label}: could not judge: a seed is there twice, stored and new seeds must be independent")


def refuse_unequal(label, stored, new, despite=()):
    """Refuse curves that differ in more than their seeds: in what was set, or in the steps of their evaluations."""
    first = stored[0]
    for curve in (*stored, *new):
        differ = f"{label}: could not judge: seed {curve.seed} differs from stored seed {first.seed}"
        if changed := differences(first.args, curve.args, despite):
            fail(f"{differ}: {'; '.join(changed)}")
        if not np.array_equal(curve.steps, first.steps):
            fail(f"{differ}: it was stopped or not evaluated at the same steps")


def difference(new, old, axis):
    return iqm(new, axis) - iqm(old, axis)


def judge(stored, new):
    """Verdict on two lists of curves and a sentence that gives its reasons.

    REGRESSION: the 95% bootstrap interval of the difference in interquartile mean, of the area under the curve or of
    the final value, lies below -5% of the stored value; or more seeds failed than by chance (Fisher's exact test, 5%).
    PASS: neither, and a loss of 20% is ruled out as well. INCONCLUSIVE: neither, but it is not.
    """
    worse, unsure, said = [], [], []
    for name, what in (("auc", "area under the curve"), ("final", "final value")):
        ours, theirs = (np.array([getattr(curve, name) for curve in curves]) for curves in (new, stored))
        low, high = interval(difference, ours, theirs)
        margin = max(MARGIN * abs(iqm(theirs)), SMALL)
        said.append(f"{what} {iqm(ours):.3f} against {iqm(theirs):.3f} stored, difference [{low:.3f}, {high:.3f}]")
        worse += said[-1:] if high < -margin else []
        unsure += said[-1:] if low < -margin * BLIND / MARGIN else []
    limit = DEAD * np.median([curve.final for curve in stored])
    dead, before = (sum(curve.final < limit for curve in curves) for curves in (new, stored))
    failed = f"{dead} of {len(new)} seeds failed, of the stored ones {before} of {len(stored)}"
    table = [[dead, len(new) - dead], [before, len(stored) - before]]
    if stats.fisher_exact(table, alternative="greater").pvalue < 0.05:
        worse.append(failed)
    if worse:
        return "REGRESSION", f"learns worse than the stored curves: {'; '.join(worse)}"
    if unsure:
        return "INCONCLUSIVE", f"a loss of {BLIND:.0%} is not ruled out, add seeds: {'; '.join(unsure)}"
    return "PASS", f"learns as well as the stored curves: {'; '.join(said)}; {failed}"


def compare(name, variants, candidate, args):
    """Print a line for each variant, verdicts on standard output. Returns the exit status."""
    verdicts = set()
    for variant in variants:
        try:
            stored, new = read_all(name, variant), read_all(name, variant, curves=candidate)
            seeds = ([curve.seed for curve in curves] for curves in (stored, new))
            refuse_seeds(f"{name} {variant}", *seeds, args.min_seeds)
            refuse_unequal(f"{name} {variant}", stored, new, args.despite)
        except SystemExit:  # which has said why
            verdicts.add("REFUSED")
        else:
            verdict, sentence = judge(stored, new)
            verdicts.add(verdict)
            print(f"{name} {variant}: {verdict}: {sentence}", flush=True)
    return 1 if "REGRESSION" in verdicts else 2 if {"REFUSED", "INCONCLUSIVE"} & verdicts else 0


def main(args: Args):
    name, variants = args.experiment, select(args.experiment, args.only)
    if args.candidate:
        return compare(name, variants, args.candidate, args)
    for variant in variants:  # refuse before hours of training, not after
        stored = read_all(name, variant)
        refuse_seeds(f"{name} {variant}", [curve.seed for curve in stored], args.seeds, args.min_seeds)
        if why := stale(name, variant, stored, args.despite):
            fail(f"{name} {variant}: could not judge: the stored curves are stale: {'; '.join(why)}")
    # A new folder each time: curves of an earlier state of the script must not be taken for the rerun.
    folder = ROOT / "runs" / f"compare-{time.time_ns()}"
    print(f"rerun in {folder}; to judge it again: --candidate {folder / 'curves'}", file=sys.stderr)
    if failed := run_all(name, variants, args.seeds, args.workers, folder / "curves", folder / "runs"):
        fail(f"{failed} runs failed, see above")
    return compare(name, variants, folder / "curves", args)


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__, config=(tyro.conf.OmitArgPrefixes,)))
