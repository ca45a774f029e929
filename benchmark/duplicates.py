"""How often hindsight batches repeat a transition: single episode relabelling against episode clustering.

    python benchmark/duplicates.py runs/.../checkpoint.pt runs/.../checkpoint.pt

takes checkpoints of both scripts, with their replay, and draws meta-batches in which every slot has a hindsight task.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Tuple

import torch
import tyro
from curves import import_script, load_pearl
from experiments import Refused, command_line


@dataclass
class Args:
    checkpoints: tyro.conf.Positional[Tuple[Path, ...]]
    """checkpoint.pt of pearl_htr_ser.py or pearl_htr_ec.py"""
    batches: int = 100
    """meta-batches to draw"""


def shares(checkpoint, batches):
    """Name of the script, and the mean share of repeated transitions in contexts and in RL batches."""
    (script, saved), ec = load_pearl(checkpoint), import_script("pearl_htr_ec")
    if "replay" not in saved:
        raise Refused(f"{checkpoint} is a policy alone: a checkpoint.pt is needed")
    args, generator = saved["args"], torch.Generator().manual_seed(0)
    task = script.Task(args)
    sizes = args.num_train_tasks, args.buffer_size // task.horizon, task.horizon, task.obs_dim, task.action_dim
    if script is ec:
        rb = ec.ClusteredReplay(*sizes, torch.device("cpu"))
        rb.load_state_dict(saved["replay"])
        episodes = args.prior_episodes + args.posterior_episodes
        rb.group(args.cell_size or task.goal_radius, episodes, generator)
    else:
        rb = script.ReplayBuffer(*sizes, torch.device("cpu"))
        rb.load_state_dict(saved["replay"])
    goals = torch.zeros(args.num_train_tasks, 2)  # not used: every slot has a hindsight task
    total = torch.zeros(2)
    for _ in range(batches):
        tasks = (script.random((args.meta_batch_size,), generator) * args.num_train_tasks).long()
        everywhere = torch.ones(args.meta_batch_size, dtype=torch.bool)
        parts = script.sample(rb, tasks, goals[tasks], everywhere, args, generator)
        total += torch.tensor([ec.duplicate_share(obs, action) for obs, action, _, _ in parts])
    return script.__name__, *(total / batches).tolist()


def main(args: Args):
    for checkpoint in args.checkpoints:
        name, context, rl_batch = shares(checkpoint, args.batches)
        print(f"{name}: repeated transitions in contexts {context:.3f}, in RL batches {rl_batch:.3f}")
    return 0


if __name__ == "__main__":
    command_line(main, __doc__)
