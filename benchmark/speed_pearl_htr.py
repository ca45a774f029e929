"""Updates a second of pearl_htr_ser.py and pearl_htr_ec.py: with HTR or without, and against a plain PEARL update.

The plain update has the networks, sizes and losses of the script, but samples each task of the meta-batch by itself
with numpy, has a module call, a backward pass and an optimizer for each loss, and `torch.distributions` for the policy.
All sides run in turn, several times, so that a machine that slows down slows down all: `python benchmark/speed.py
--only pearl`.
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT, EC = ROOT / "pearl_htr_ser.py", ROOT / "pearl_htr_ec.py"


@dataclass
class Args:
    updates: int = 400
    """updates of a measurement"""
    flags: str = "--env-id PointGoal-v0"
    """flags of the scripts that set the task and the sizes, for all sides"""


def script(args, relabel_prob, name=SCRIPT):
    """One run of the script with few episodes between many updates: updates a second, and its peak memory in MiB."""
    flags = f"{args.flags} --relabel-prob {relabel_prob} --no-cuda --num-train-tasks 100 --initial-episodes 20"
    flags += f" --num-tasks-sample 1 --prior-episodes 1 --posterior-episodes 0 --gradient-steps {args.updates}"
    flags += " --total-timesteps 1 --num-test-tasks 1 --eval-episodes 1 --eval-frequency 1000000"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(name), *flags.split(), "--run-dir", folder, "--quiet"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        last = process.stdout.read().splitlines()[-1]
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise subprocess.CalledProcessError(status, command)
    line = json.loads(last)
    return args.updates / (line["global_step"] / line["sps"]), usage.ru_maxrss / 1024


def plain(args):
    """The plain update in a process of its own: updates a second."""
    command = [sys.executable, __file__, str(args.updates), *args.flags.split()]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def train_plain(updates, flags):
    import numpy as np
    import torch
    import torch.nn.functional as F
    import tyro
    from torch import distributions

    sys.path.append(str(ROOT))
    import pearl_htr_ser as pearl

    args = tyro.cli(pearl.Args, args=flags)
    torch.set_num_threads(args.num_threads)
    torch.set_flush_denormal(True)
    task = pearl.Task(args)
    rng = np.random.default_rng(1)
    buffers = []
    for _ in range(args.num_train_tasks):
        size, shapes = 20 * task.horizon, {"obs": task.obs_dim, "action": task.action_dim, "next_obs": task.obs_dim}
        buffers.append({key: rng.standard_normal((size, dim), np.float32) for key, dim in shapes.items()})
        buffers[-1]["reward"] = np.zeros((size, 1), np.float32)
    inputs = task.obs_dim + args.latent_dim
    encoder = pearl.mlp(task.obs_dim + task.action_dim + 1, 2 * args.latent_dim, args.hidden_size)
    policy = pearl.mlp(inputs, 2 * task.action_dim, args.hidden_size)
    qf1, qf2 = (pearl.mlp(inputs + task.action_dim, 1, args.hidden_size) for _ in range(2))
    vf = pearl.mlp(inputs, 1, args.hidden_size)
    vf_target = copy.deepcopy(vf)
    adam = {net: torch.optim.Adam(net.parameters(), lr=args.learning_rate) for net in (encoder, policy, qf1, qf2, vf)}

    def draw(tasks, size, keys):
        batches = {key: [] for key in keys}
        for i in tasks:
            rows = rng.integers(len(buffers[i]["obs"]), size=size)
            for key in keys:
                batches[key].append(torch.from_numpy(buffers[i][key][rows]))
        return [torch.stack(batches[key]) for key in keys]

    def infer(context):
        mean, raw_variance = encoder(context).chunk(2, -1)
        return pearl.product_of_gaussians(mean, F.softplus(raw_variance).clamp(min=1e-7))

    def update():
        tasks = rng.choice(args.num_train_tasks, args.meta_batch_size)
        context = torch.cat(draw(tasks, args.context_size, ("obs", "action", "reward")), -1)
        mean, variance = infer(context)
        posterior = distributions.Normal(mean, variance.sqrt())
        z = posterior.rsample().repeat_interleave(args.batch_size, 0)
        batch = draw(tasks, args.batch_size, ("obs", "action", "reward", "next_obs"))
        obs, action, reward, next_obs = (column.flatten(0, 1) for column in batch)

        policy_mean, log_std = policy(torch.cat([obs, z.detach()], -1)).chunk(2, -1)
        gaussian = distributions.Normal(policy_mean, log_std.clamp(-20, 2).exp())
        squashed = distributions.TransformedDistribution(gaussian, distributions.TanhTransform(cache_size=1))
        new_action = squashed.rsample()
        log_prob = squashed.log_prob(new_action).sum(-1, keepdim=True)

        q1, q2 = (qf(torch.cat([obs, action, z], -1)) for qf in (qf1, qf2))
        v = vf(torch.cat([obs, z.detach()], -1))
        with torch.no_grad():
            target_v = vf_target(torch.cat([next_obs, z], -1))
        for net in (encoder, qf1, qf2):
            adam[net].zero_grad()
        kl = distributions.kl_divergence(posterior, distributions.Normal(0.0, 1.0)).sum()
        (args.kl_lambda * kl).backward(retain_graph=True)
        q_target = args.reward_scale * reward + args.gamma * target_v
        (F.mse_loss(q1, q_target) + F.mse_loss(q2, q_target)).backward()
        for net in (qf1, qf2, encoder):
            adam[net].step()

        min_q = torch.min(*(qf(torch.cat([obs, new_action, z.detach()], -1)) for qf in (qf1, qf2)))
        adam[vf].zero_grad()
        F.mse_loss(v, (min_q - log_prob).detach()).backward()
        adam[vf].step()
        for target, parameter in zip(vf_target.parameters(), vf.parameters()):
            target.data.copy_((1 - args.tau) * target.data + args.tau * parameter.data)
        adam[policy].zero_grad()
        loss = (log_prob - min_q).mean() + 1e-3 * (policy_mean.square().mean() + log_std.square().mean())
        loss.backward()
        adam[policy].step()

    update()
    started = time.time()
    for _ in range(updates):
        update()
    print(updates / (time.time() - started))


if __name__ == "__main__":
    train_plain(int(sys.argv[1]), sys.argv[2:])
