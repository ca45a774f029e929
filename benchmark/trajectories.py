"""Draw how a saved PEARL policy adapts to test tasks of PointGoal: a panel a task, the path of each episode in it.

python benchmark/trajectories.py runs/.../model.pt docs/point_adaptation.png
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from curves import load_pearl
from experiments import Refused, command_line


@dataclass
class Args:
    policy: tyro.conf.Positional[Path]
    """model.pt or checkpoint.pt of pearl_htr_ser.py or pearl_htr_ec.py"""
    output: tyro.conf.Positional[Path]
    """PNG to write"""
    tasks: int = 4
    """test tasks to show, spread evenly over the angles of the goals"""


def main(args: Args):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pearl, saved = load_pearl(args.policy)
    trained = saved["args"]
    if trained.env_id != "PointGoal-v0":
        raise Refused(f"{args.policy} was trained on {trained.env_id}: only paths of PointGoal-v0 can be drawn")
    if not 1 <= args.tasks <= trained.num_test_tasks:
        raise Refused(f"--tasks must be from 1 to {trained.num_test_tasks}, not {args.tasks}")
    task = pearl.Task(trained)
    agent = pearl.Agent(task.obs_dim, task.action_dim, trained)
    pearl.load_modules({"agent": agent}, saved)
    goals = torch.from_numpy(pearl.task_goals(pearl.TEST, trained.num_test_tasks, trained.goal_distance, trained.seed))
    obs, _ = pearl.adapt(pearl.make_envs(trained, len(goals)), agent, task, trained, goals)
    by_angle = torch.atan2(goals[:, 1], goals[:, 0]).argsort(descending=True)
    shown = by_angle[((torch.arange(args.tasks) + 0.5) * len(goals) / args.tasks).long()]
    figure, panels = plt.subplots(1, args.tasks, figsize=(3.2 * args.tasks, 3.6), sharex=True, sharey=True)
    colors = plt.get_cmap("viridis")
    angles = torch.linspace(0, torch.pi, 100)
    for panel, i in zip(figure.axes, shown.tolist()):
        panel.plot(trained.goal_distance * angles.cos(), trained.goal_distance * angles.sin(), ":", color="0.6", lw=1)
        panel.add_patch(plt.Circle(goals[i].tolist(), task.goal_radius, color="tab:red", alpha=0.4))
        for episode, path in enumerate(obs[i, :, :, :2]):
            panel.plot(*path.T, color=colors(episode / max(1, len(obs[i]) - 1)), lw=1)
        panel.set_aspect("equal")
        panel.set_xlabel("x (m)")
    figure.axes[0].set_ylabel("y (m)")
    last = plt.cm.ScalarMappable(plt.Normalize(1, trained.eval_episodes), colors)
    figure.colorbar(last, ax=panels, label="adaptation episode", fraction=0.02, pad=0.02)
    figure.savefig(args.output, dpi=100, bbox_inches="tight")
    print(f"{args.output}: adaptation after {saved['global_step']:,} environment steps of training")
    return 0


if __name__ == "__main__":
    command_line(main, __doc__)
