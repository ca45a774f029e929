"""Has learning got worse? Reruns an experiment with new seeds and compares with its stored curves.

    python benchmark/compare.py bitflip --only 'n(10|30)-her' --workers 2
    python benchmark/compare.py fetchpush --candidate FOLDER    # EXPERIMENT/VARIANT/seed-N in it, as run.py keeps them
    python benchmark/compare.py --stale                         # stored curves whose commands do something else today
    python benchmark/compare.py fetchpush --candidate FOLDER --despite gamma --accept "why gamma was changed"

Exit status: 0 as good as the stored curves or better, accepted, or nothing stale; 1 worse, or stale; 2 could not
judge.
"""

import datetime
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np
import tyro
from curves import CURVES, differences, interval, iqm, read_all, stale
from experiments import EXPERIMENTS, ROOT, Refused, command_line, select
from run import run_all
from scipy import stats

MARGIN = 0.05  # loss, as a share of the stored value, that is no regression yet
SMALL = 0.01  # the margin is no less than this: where success is near 0 there is nothing to lose
BLIND = 0.20  # loss that must be ruled out for a PASS
DEAD = 0.5  # a seed failed whose final value is below this share of the stored median
ALPHA = 0.05


@dataclass
class Args:
    experiment: tyro.conf.Positional[str] = ""
    """name in benchmark/experiments.py"""
    only: str = ""
    """regular expression: only variants whose whole name matches"""
    candidate: Optional[Path] = None
    """folder of the curves to judge; None: rerun the experiment now"""
    seeds: tuple[int, ...] = (101, 102, 103, 104, 105)
    """seeds of the rerun, none of them stored"""
    workers: int = 1
    """runs at once"""
    min_seeds: int = 5
    """fewer seeds, rerun or stored, are not judged; with 3 the interquartile mean is the plain mean, and dead seeds are
    not told from chance"""
    despite: tuple[str, ...] = ()
    """arguments that may differ from the stored ones, to judge a change of defaults (example: batch_size)"""
    accept: str = ""
    """reason for which --candidate's curves replace the stored ones, whatever the verdict; it and the verdict
    are appended to CHANGELOG.md beside the curves, and the status is 0"""
    curves: Path = CURVES
    """folder of the stored curves"""
    stale: bool = False
    """list stale curves instead: those that their experiment's command would not make today, as its script's defaults
    have changed"""


def refuse_seeds(stored, new, min_seeds):
    """Refuse seeds, two lists, that are too few or not independent."""
    if not stored:
        raise Refused("nothing is stored")
    for what, seeds in (("stored", stored), ("new", new)):
        if len(seeds) < max(2, min_seeds):
            raise Refused(f"{len(seeds)} {what} seeds are too few, --min-seeds is {min_seeds} (2 at least)")
    both = [*stored, *new]
    if twice := sorted({seed for seed in both if both.count(seed) > 1}):
        raise Refused(f"seed {twice[0]} is there twice: stored and new seeds must differ to be independent")


def refuse_unequal(stored, candidate, despite=()):
    """Refuse curves that differ in more than their seeds: in what was set, or in the steps of their evaluations."""
    first = stored[0]
    for curve in (*stored, *candidate):
        if changed := differences(first.about["args"], curve.about["args"], despite):
            raise Refused(
                f"arguments of seed {curve.seed} are not those of stored seed {first.seed}: {'; '.join(changed)}"
            )
        if not np.array_equal(curve.steps, first.steps):
            raise Refused(f"seed {curve.seed} was stopped or not evaluated at the steps of stored seed {first.seed}")


def judge(stored, candidate):
    """Verdict on two lists of curves and a sentence that gives its reasons.

    REGRESSION: the bootstrap interval of the difference in interquartile mean, of the area under the curve or of the
    final value, lies below -5% of the stored value (one-sided, alpha / 2 each); or more seeds failed than by chance
    (Fisher's exact test). PASS: neither, and a loss of 20% is ruled out as well. INCONCLUSIVE: neither, but it is not.
    BETTER: a PASS whose area under the curve is higher by more than 5%.
    """
    worse, unsure, better, said = [], [], False, []
    for name in ("auc", "final"):
        new, old = (np.array([getattr(curve, name) for curve in curves]) for curves in (candidate, stored))
        # The two-sided 95% interval: each end is the one-sided bound at alpha / 2.
        low, high = interval(lambda new, old, axis: iqm(new, axis) - iqm(old, axis), new, old)
        margin = max(MARGIN * abs(iqm(old)), SMALL)
        text = f"{'area under the curve' if name == 'auc' else 'final value'} {iqm(new):.3f} against {iqm(old):.3f}"
        text += f" stored, difference [{low:.3f}, {high:.3f}]"
        said.append(text)
        worse += [text] if high < -margin else []
        unsure += [text] if low < -margin * BLIND / MARGIN else []
        better |= name == "auc" and low > margin
    limit = DEAD * np.median([curve.final for curve in stored])
    dead = [sum(curve.final < limit for curve in curves) for curves in (candidate, stored)]
    table = [[dead[0], len(candidate) - dead[0]], [dead[1], len(stored) - dead[1]]]
    if stats.fisher_exact(table, alternative="greater").pvalue < ALPHA:
        worse.append(f"{dead[0]} of {len(candidate)} seeds failed, of the stored ones {dead[1]} of {len(stored)}")
    if worse:
        return "REGRESSION", f"learns worse than the stored curves: {'; '.join(worse)}"
    if unsure:
        return "INCONCLUSIVE", f"a loss of {BLIND:.0%} is not ruled out, add seeds: {'; '.join(unsure)}"
    verdict, what = ("BETTER", "learns better than") if better else ("PASS", "learns as well as")
    return verdict, f"{what} the stored curves: {'; '.join(said)}; {dead[0]} of {len(candidate)} seeds failed"


def compare(name, variants, candidate, args):
    """Print a line for each variant, verdicts on standard output. Returns the exit status."""
    verdicts = []
    for variant in variants:
        try:
            stored, new = (read_all(folder, name, variant) for folder in (args.curves, candidate))
            refuse_seeds([curve.seed for curve in stored], [curve.seed for curve in new], args.min_seeds)
            refuse_unequal(stored, new, args.despite)
        except Refused as e:
            verdicts.append("REFUSED")
            judgement = f"could not judge: {e}"
        else:
            verdict, sentence = judge(stored, new)
            verdicts.append(verdict)
            judgement = f"{verdict}: {sentence}"
        refused = verdicts[-1] == "REFUSED"
        print(f"{name} {variant}: {judgement}", file=sys.stderr if refused else sys.stdout, flush=True)
        if args.accept:
            accept(name, variant, judgement, args)
    if args.accept:
        return 0
    return 1 if "REGRESSION" in verdicts else 2 if {"REFUSED", "INCONCLUSIVE"} & set(verdicts) else 0


def accept(name, variant, judgement, args):
    """Put the candidate's curves of a variant in place of the stored ones, and say so in the changelog."""
    place, new = args.curves / name / variant, args.curves / name / f"{variant}.new"
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(args.candidate / name / variant, new)
    shutil.rmtree(place, ignore_errors=True)
    os.replace(new, place)
    with open(args.curves / "CHANGELOG.md", "a") as file:
        file.write(f"- {datetime.date.today()}, {name} {variant}: {args.accept}. It was judged: {judgement}\n")


def list_stale(args):
    """Print the variants whose stored curves are stale, and why. Returns the exit status."""
    if args.only and not args.experiment:
        raise Refused("--only chooses variants of an experiment: which?")
    found = 0
    for name in [args.experiment] if args.experiment else EXPERIMENTS:
        for variant in select(name, args.only)[1]:
            if why := stale(name, variant, read_all(args.curves, name, variant)):
                found += 1
                print(f"{name} {variant}: STALE: {'; '.join(why)}")
    return 1 if found else 0


def main(args: Args):
    if args.stale:
        return list_stale(args)
    if not args.experiment:
        raise Refused(f"which experiment? There are: {', '.join(EXPERIMENTS)}")
    _, variants = select(args.experiment, args.only)
    if args.candidate and not args.candidate.is_dir():
        raise Refused(f"{args.candidate} is not a folder")
    if args.accept and not args.candidate:
        raise Refused("--accept needs the curves to accept: --candidate FOLDER")
    if args.accept and (missing := [v for v in variants if not read_all(args.candidate, args.experiment, v)]):
        raise Refused(f"{args.candidate} has no curves of {args.experiment} {missing[0]}: choose variants with --only")
    if args.workers < 1:
        raise Refused(f"--workers must be at least 1, not {args.workers}")
    if args.candidate:
        return compare(args.experiment, variants, args.candidate, args)
    for variant in variants:  # refuse before hours of training, not after
        stored = read_all(args.curves, args.experiment, variant)
        try:
            refuse_seeds([curve.seed for curve in stored], args.seeds, args.min_seeds)
            if why := stale(args.experiment, variant, stored, args.despite):
                raise Refused(f"the stored curves are stale: {'; '.join(why)}")
        except Refused as e:
            raise Refused(f"{args.experiment} {variant}: could not judge: {e}") from e
    # A new folder each time: curves of an earlier state of the script must not be taken for the rerun.
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="compare-", dir=ROOT / "runs"))
    print(f"rerun in {folder}; to judge it again: --candidate {folder / 'curves'}", file=sys.stderr)
    failed = run_all(args.experiment, variants, args.seeds, args.workers, folder / "curves", folder / "runs")
    if failed:
        raise Refused(f"{failed} runs failed, see above")
    return compare(args.experiment, variants, folder / "curves", args)


if __name__ == "__main__":
    command_line(main, __doc__)
