"""Tables and pictures of the docs, from stored curves, a saved policy or a video.

python benchmark/report.py tables
python benchmark/report.py curves docs/fetch_curves.png fetchpush fetchpickandplace --only her-future
python benchmark/report.py adaptation docs/point_easy_adaptation.png point-easy
python benchmark/report.py fig1 docs/bitflip.png
python benchmark/report.py paths docs/point_adaptation.png runs/.../model.pt
python benchmark/report.py frames docs/push_frames.png runs/.../videos/evaluate-episode-0.mp4
"""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from curves import SUCCESS, interval, iqm, read_all, stale, wilson
from experiments import DDPG, DQN, EXPERIMENTS, HER_STEPS, PEERS, ROOT, SER, fail, select
from tyro.conf import Positional

# ------------------------------------------------------------------------------------------------------------ tables
HEAD = """# Results

Written by `python benchmark/report.py tables` from `benchmark/curves/`; do not edit. [How the curves are made and
compared](../benchmark/README.md).

At the end: the mean over the last seventh of the evaluations (3 of 21, at least the last one); of several seeds the
interquartile mean (of 3 and fewer the mean) with its 95% bootstrap interval and the worst seed; of a single seed with
Wilson's 95% interval over the episodes of one evaluation, which says nothing of other seeds. Steps and minutes: to the
first evaluation at the threshold, median of the seeds that reached it. Minutes are upper bounds: machines were shared.
"""
SOLVED = {DQN: 0.99, DDPG: 0.9, SER: 0.5}  # success rate from which a seed counts as having learned


def tables(output: Path = ROOT / "docs" / "benchmark.md"):
    """Write docs/benchmark.md: what is stored of each experiment, and what others published."""
    output.write_text(HEAD + "".join(map(section, EXPERIMENTS)) + f"\n## What others published of Fetch\n{PEERS}")


def section(name):
    """Table of an experiment, from its stored curves; markdown."""
    experiment = EXPERIMENTS[name]
    stored = {variant: read_all(name, variant) for variant in experiment.variants}
    solved = SOLVED[experiment.command(next(iter(stored)))[0]]
    text = f"\n## {name}\n\n{experiment.claim[0].upper()}{experiment.claim[1:]}.\n\n"
    if not any(stored.values()):
        return text + f"Not run yet: {', '.join(stored)}.\n"
    text += f"| variant | seeds | `{SUCCESS}` at the end (worst) | steps to {solved} | minutes to {solved} | notes |\n"
    text += "|---|---|---|---|---|---|\n"
    text += "".join(row(name, variant, curves, solved) for variant, curves in stored.items())
    curves = [curve for seeds in stored.values() for curve in seeds]
    commits = {commit[:7] + commit[40:] for curve in curves for commit in curve.made["commit"].split(", ")}  # "-dirty"
    versions = {f"{package} {version}" for curve in curves for package, version in curve.made["versions"].items()}
    cores = {f"{curve.made['machine']['cores']} cores" for curve in curves}
    commits, versions, cores = (", ".join(sorted(each)) for each in (commits, versions, cores))
    minutes = max(curve.wall_s[-1] for curve in curves) / 60
    return text + f"\nMade by {commits} with {versions}; {cores}, at most {minutes:.1f} minutes a run.\n"


def row(name, variant, curves, solved):
    """A line of the table of an experiment."""
    if not curves:
        return f"| {variant} | 0 | not run yet | | |  |\n"
    finals = np.array([curve.final for curve in curves])
    low, high = interval(iqm, finals) if len(finals) > 1 else wilson(finals[0], curves[0].episodes)
    final = f"{iqm(finals):.3f} [{low:.3f}, {high:.3f}]" + (f" ({min(finals):.3f})" if len(finals) > 1 else "")
    steps, minutes = "not reached", "-"
    hits = [(curve, i) for curve in curves if (i := curve.reached(solved)) is not None]
    if hits:
        steps = f"{np.median([curve.steps[i] for curve, i in hits]):,.0f}"
        steps += f" ({len(hits)} of {len(curves)})" if len(hits) < len(curves) else ""
        minutes = np.median([curve.wall_s[i] for curve, i in hits]) / 60
        minutes = f"{minutes:.2f}" if minutes < 1 else f"{minutes:.0f}"
    early = [curve for curve in curves if curve.steps[-1] < curve.args["total_timesteps"]]
    notes = [f"seed {curve.seed} stopped at {curve.steps[-1]:,.0f} steps" for curve in early]
    if why := stale(name, variant, curves):
        notes.append(f"**stale**: {', '.join(why)}")
    return f"| {variant} | {len(curves)} | {final} | {steps} | {minutes} | {'; '.join(notes)} |\n"


# ---------------------------------------------------------------------------------------------------------- pictures
@dataclass
class Picture:
    output: Positional[Path]  # PNG to write
    experiments: Positional[tuple[str, ...]]  # names in benchmark/experiments.py
    only: str = "*"  # only variants whose names match this pattern
    metric: str = SUCCESS  # of eval.csv or charts.csv
    title: str = ""  # empty: the experiments' names


def learning_curves(args: Picture):
    """Learning curves: each seed a thin line, (interquartile) mean and 95% bootstrap band as far as all seeds went."""
    draw(args, "environment steps", read_all)


def adaptation(args: Picture):
    """The same of a PEARL script's metric by adaptation episode, at the last evaluation."""
    draw(args, "adaptation episode", by_episode)


def by_episode(name, variant, metric):
    """Like read_all, with adaptation episodes in the place of steps."""
    seeds = read_all(name, variant)
    for i, seed in enumerate(seeds):
        seed.steps = np.arange(seed.args["eval_episodes"])
        last = [read_all(name, variant, f"{metric}_ep{episode}")[i] for episode in seed.steps]
        seed.values = np.array([curve.values[-1] for curve in last])
    return seeds


def draw(args, xlabel, read):
    """Draw the curves of each variant, read(name, variant, metric)."""
    from matplotlib.figure import Figure  # not needed for the tables

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    variants = [(name, variant) for name in args.experiments for variant in select(name, args.only)]
    for name, variant in variants:
        if not (seeds := read(name, variant, args.metric)):
            continue
        x = min((seed.steps for seed in seeds), key=len)
        if any((seed.steps[: len(x)] != x).any() for seed in seeds):
            fail(f"{name} {variant}: {args.metric} was not taken at the same steps in all seeds")
        y = np.array([seed.values[: len(x)] for seed in seeds])
        label = (f"{name} " if len(args.experiments) > 1 else "") + f"{variant} ({len(y)} seed{'s' * (len(y) > 1)})"
        color = axes.plot(x, iqm(y), label=label)[0].get_color()
        for seed in seeds:
            axes.plot(seed.steps, seed.values, color=color, alpha=0.3, linewidth=0.8)
        if len(y) > 1:
            axes.fill_between(x, *interval(iqm, y), color=color, alpha=0.2)
    if not axes.lines:
        fail("nothing is stored of that; first: python benchmark/run.py EXPERIMENT")
    axes.set(xlabel=xlabel, ylabel=args.metric, title=args.title or ", ".join(args.experiments))
    if "success" in args.metric:
        axes.set(ylim=(-0.02, 1.05))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    figure.savefig(args.output, dpi=120)


def fig1(output: Positional[Path]):
    """Fig. 1 of the HER paper: success on bit flipping by number of bits, mean and range of the seeds at the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for kind, label in (("her", "DQN + HER"), ("dqn", "DQN")):
        last = {n: [curve.values[-1] for curve in read_all("bitflip", f"n{n}-{kind}")] for n in HER_STEPS}
        mean, low, high = (np.array([of(values) for values in last.values()]) for of in (np.mean, min, max))
        axes.errorbar(list(last), mean, [mean - low, high - mean], marker="o", capsize=3, label=label)
    axes.set(xlabel="number of bits n", ylabel="success rate", ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=120)


def paths(output: Positional[Path], policy: Positional[Path], tasks: int = 4):
    """How a model.pt or checkpoint.pt of PEARL adapts to test tasks: a panel a task, the path of each episode in it."""
    import torch
    from matplotlib import cm, colormaps, colors, figure, patches

    saved = torch.load(policy, map_location="cpu", weights_only=True)
    script = importlib.import_module(saved["format"])
    args = script.Args(**saved["args"])
    task = script.Task(args)
    agent = script.Agent(task, args)
    agent.load_state_dict(saved["agent"])
    goals = torch.from_numpy(script.task_goals(script.TEST, args.num_test_tasks, args.goal_distance, args.seed))
    how = args.exploration_episodes, args.eval_episodes, (script.EVALUATION,), True  # as in its evaluation
    obs, _ = script.collect(args, agent, task, goals, *how)
    by_angle = torch.atan2(goals[:, 1], goals[:, 0]).argsort(descending=True)
    shown = by_angle[((torch.arange(tasks) + 0.5) * len(goals) / tasks).long()]

    picture, angles = figure.Figure(figsize=(3.2 * tasks, 3.6)), torch.linspace(0, torch.pi, 100)
    panels = picture.subplots(1, tasks, sharex=True, sharey=True, squeeze=False)[0]
    episodes = cm.ScalarMappable(colors.Normalize(1, args.eval_episodes), colormaps["viridis"])
    for panel, i in zip(panels, shown.tolist()):
        panel.plot(args.goal_distance * angles.cos(), args.goal_distance * angles.sin(), ":", color="0.6", lw=1)
        panel.add_patch(patches.Circle(goals[i].tolist(), task.goal_radius, color="tab:red", alpha=0.4))
        for episode, path in enumerate(obs[i, :, :, :2], 1):
            panel.plot(*path.T, color=episodes.to_rgba(episode), lw=1)
        panel.set(aspect="equal", xlabel="x (m)")
    panels[0].set_ylabel("y (m)")
    picture.colorbar(episodes, ax=list(panels), label="adaptation episode", fraction=0.02, pad=0.02)
    picture.savefig(output, dpi=100, bbox_inches="tight")
    print(f"{output}: adaptation after {saved['counters']['global_step']:,} environment steps of training")


def frames(output: Positional[Path], video: Positional[Path], count: int = 5):
    """A strip of frames of a Fetch task's video, evenly spaced from first to last, as a PNG."""
    from moviepy import VideoFileClip
    from PIL import Image

    with VideoFileClip(str(video)) as clip:
        every = np.stack(list(clip.iter_frames()))
    _, rows, columns, _ = every.shape
    table = every[:, rows // 5 : 3 * rows // 4, 7 * columns // 20 : 9 * columns // 10]  # the part of the picture
    strip = table[np.linspace(0, len(table) - 1, count).round().astype(int)]
    image = Image.fromarray(np.concatenate(list(strip), axis=1))
    image.resize((image.width * 240 // image.height, 240)).save(output)


if __name__ == "__main__":
    commands = {"tables": tables, "curves": learning_curves, "adaptation": adaptation}
    commands |= {"fig1": fig1, "paths": paths, "frames": frames}
    run = tyro.extras.subcommand_cli_from_dict
    sys.exit(run(commands, description=__doc__, config=(tyro.conf.OmitArgPrefixes,)))
