"""Write docs/benchmark.md: what is stored of each experiment, and the numbers of papers and peers beside it.

python benchmark/table.py
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from curves import CURVES, interval, iqm, read_all, stale
from experiments import EXPERIMENTS, ROOT, Refused, command_line

HEAD = """# Results

Written by `python benchmark/table.py` from `benchmark/curves/`; do not edit. [How the curves are made and
compared](../benchmark/README.md).

At the end: the mean over the last seventh of the evaluations (3 of 21, at least the last one); of several seeds the
interquartile mean (the mean, where there are fewer than 4) with its 95% bootstrap interval, and the worst seed. Steps
and minutes: to the first evaluation at the threshold, median of the seeds that reached it; the wall clocks were taken
on machines that were shared, and are upper bounds. Papers and peers: as they published it, by their own protocols.
"""


@dataclass
class Args:
    output: Path = ROOT / "docs" / "benchmark.md"
    """file to write"""
    curves: Path = CURVES
    """folder of the stored curves"""


def number(value):
    """A result of about 1 with 3 decimals, larger ones with fewer."""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def final_cell(finals):
    """ "0.950 [0.900, 1.000] (0.900)" from the final values of the seeds: interquartile mean, interval, worst."""
    text = number(iqm(finals))
    if len(finals) > 1:
        low, high = interval(iqm, np.array(finals))
        text += f" [{number(low)}, {number(high)}]"
    return f"{text} ({number(min(finals))})"


def reached_cells(curves, threshold):
    """Steps and minutes to the threshold, each the median of the seeds that reached it, and how many did if not all."""
    hits = [(curve, i) for curve in curves if (i := curve.reached(threshold)) is not None]
    if not hits:
        return "not reached", "-"
    steps = f"{np.median([curve.steps[i] for curve, i in hits]):,.0f}"
    minutes = np.median([curve.wall_s[i] for curve, i in hits]) / 60
    few = f" ({len(hits)} of {len(curves)})" if len(hits) < len(curves) else ""
    return steps + few, f"{minutes:.2f}" if minutes < 1 else f"{minutes:.0f}"


def row(name, variant, curves):
    """A line of the table of an experiment."""
    experiment = EXPERIMENTS[name]
    if not curves:
        script = experiment.script_name(variant)
        note = "" if (ROOT / script).exists() else f"{script} is to come"
        return f"| {variant} | 0 | not run yet | | | {note} |"
    notes = [f"seed {c.seed} stopped at {c.steps[-1]:,.0f} steps" for c in curves if c.stopped]
    if why := stale(name, variant, curves):
        notes.append(f"**stale**: {', '.join(why)}")
    cells = final_cell([curve.final for curve in curves]), *reached_cells(curves, experiment.threshold)
    return f"| {variant} | {len(curves)} | {' | '.join(cells)} | {'; '.join(notes)} |"


def made_with(curves):
    """Commits, versions and machines that made the curves, in a line."""
    commits = sorted({(curve.about.get("commit") or "unknown")[:7] for curve in curves})
    versions, machines = {}, set()
    for curve in curves:
        for package, version in curve.about.get("versions", {}).items():
            if version:
                versions.setdefault(package, set()).add(version)
        machines.add(f"{curve.about.get('machine', {}).get('cores')} cores")
    packages = ", ".join(f"{package} {' and '.join(sorted(each))}" for package, each in versions.items())
    return (
        f"Made by commit{'s' * (len(commits) > 1)} {', '.join(commits)} with {packages}; {', '.join(sorted(machines))}."
    )


def section(name, folder):
    """Table of an experiment, from the curves in a folder, and a second one with its peers'; markdown."""
    experiment = EXPERIMENTS[name]
    stored = {variant: read_all(folder, name, variant) for variant in experiment.variants}
    text = f"\n## {name}\n\n{experiment.claim[0].upper()}{experiment.claim[1:]}. One run: {experiment.cost}.\n\n"
    if not any(stored.values()):
        return text + f"Not run yet: {', '.join(stored)}.\n" + others(experiment)
    reach = f"to {experiment.threshold:g}"
    text += (
        f"| variant | seeds | `{experiment.metric}` at the end (worst) | steps {reach} | minutes {reach} | notes |\n"
    )
    text += "|---|---|---|---|---|---|\n"
    text += "".join(row(name, variant, curves) + "\n" for variant, curves in stored.items())
    return (
        text + "\n" + made_with([curve for curves in stored.values() for curve in curves]) + "\n" + others(experiment)
    )


def others(experiment):
    """What paper and peers give, markdown."""
    text = f"\nThe paper: {experiment.paper}.\n" if experiment.paper else ""
    if experiment.peers:
        text += "\n| others | success | steps | |\n|---|---|---|---|\n"
        text += "".join(
            f"| {peer.name} | {peer.value:g} | {peer.steps:,} | {peer.note} |\n" for peer in experiment.peers
        )
        text += f"\nThe {experiment.peers_note}.\n" if experiment.peers_note else ""
    return text


def page(folder):
    """The whole page, markdown."""
    return HEAD + "".join(section(name, folder) for name in EXPERIMENTS)


def main(args: Args):
    if not args.curves.is_dir():
        raise Refused(f"{args.curves} is not a folder")
    try:
        args.output.write_text(page(args.curves))
    except OSError as e:
        raise Refused(f"cannot write {args.output}: {e.strerror}") from e
    return 0


if __name__ == "__main__":
    command_line(main, __doc__)
