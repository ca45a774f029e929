"""Speed of the scripts, training included: HER against Stable-Baselines3, PEARL against a plain PEARL and with HTR.

    python benchmark/speed.py
    python benchmark/speed.py bitflip --n-bits 50

The sides run in turn, so that a machine that slows down slows down all; nothing else should run beside them. HER has
the network, minibatch and updates of Appendix A; Stable-Baselines3 is first tried with several numbers of environments,
and its fastest goes on. The plain PEARL samples each task of the meta-batch by itself with numpy, has a backward pass
for each loss, an optimizer for each network, and `torch.distributions` for the policy.
"""

import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from curves import SUCCESS, read_rows
from experiments import DDPG, DQN, EC, ROOT, SER
from tyro.conf import Positional


@dataclass
class Args:
    what: Positional[tuple[Literal["bitflip", "fetch", "pearl"], ...]] = ("bitflip", "fetch", "pearl")  # scripts
    repeats: int = 3  # measurements of each side
    steps: int = 8_000  # environment steps of a measurement of HER, a multiple of 800; what comes before is not counted
    updates: int = 400  # of a measurement of PEARL
    n_bits: int = 15  # bits, and steps of an episode; a multiple of 5


def alone(function, *arguments):
    """What a function returns that runs in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), quiet) as pool:
        return pool.submit(function, *arguments).result()


def quiet():
    """Without the warnings of other people's packages."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def clock(script, flags):
    """Run a script; returns the seconds from its first evaluation to each of them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / script, *flags.split(), "--no-cuda", "--quiet", "--run-dir", folder]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        rows = read_rows(next(Path(folder).glob("*/eval.csv")), SUCCESS)
    return [float(row["wall_s"]) - float(rows[0]["wall_s"]) for row in rows]


def her(task, steps, n_bits):
    """Environment steps a second of our script in the second half of a run, when all environments are made."""
    if task == "bitflip":
        steps *= 4  # several times as fast
        script, flags = DQN, f"--n-bits {n_bits} --no-terminate --gradient-steps 40 --batch-size 128"
    else:
        script, flags = DDPG, "--hidden-size 64 --batch-size 128 --train-frequency 20 --target-network-frequency 40"
        flags += f" --env-id FetchPush-v4 --past-goals 0 --redraws 0 --num-workers {os.cpu_count()}"
    seconds = clock(script, f"{flags} --total-timesteps {2 * steps} --eval-frequency {steps} --eval-episodes 1")
    return steps / (seconds[2] - seconds[1])


def stable_baselines3(task, steps, n_bits, num_envs):
    """Environment steps a second of its DQN or DDPG with HerReplayBuffer, from the first update to the end."""
    import stable_baselines3 as sb3
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv

    from envs.bit_flip import BitFlipEnv

    if task == "bitflip":
        env = make_vec_env(BitFlipEnv, num_envs, env_kwargs={"n": n_bits, "terminate": False})
        agent, net_arch, warm_up, steps_an_update = sb3.DQN, [256], 16 * n_bits, 2 * n_bits // 5
        options = {"exploration_fraction": 1e-9, "exploration_final_eps": 0.2, "target_update_interval": 1}
    else:
        processes = {"env_kwargs": {"disable_env_checker": True}, "vec_env_cls": SubprocVecEnv}
        env = make_vec_env("gymnasium_robotics:FetchPush-v4", num_envs, **processes)
        agent, net_arch, warm_up, steps_an_update, options = sb3.DDPG, [64, 64, 64], 1600, 20, {}
    options |= {"batch_size": 128, "gamma": 0.98, "tau": 0.05, "learning_rate": 1e-3, "device": "cpu"}
    options |= {"learning_starts": warm_up, "train_freq": (steps_an_update, "step"), "gradient_steps": num_envs}
    options |= {"replay_buffer_class": sb3.HerReplayBuffer, "policy_kwargs": {"net_arch": net_arch}}
    options["replay_buffer_kwargs"] = {"n_sampled_goal": 4, "goal_selection_strategy": "future"}
    model = agent("MultiInputPolicy", env, **options)

    torch.set_num_threads(1)
    model.learn(warm_up)
    started, first = time.time(), model.num_timesteps
    model.learn(steps, reset_num_timesteps=False)
    return (model.num_timesteps - first) / (time.time() - started)


def pearl(script, relabel_prob, updates):
    """Updates a second of a PEARL script, with few episodes between many updates."""
    flags = f"--relabel-prob {relabel_prob} --gradient-steps {updates} --initial-episodes 20 --num-tasks-sample 1"
    flags += " --prior-episodes 1 --posterior-episodes 0 --total-timesteps 1 --num-test-tasks 1 --eval-episodes 1"
    return updates / clock(script, flags)[-1]


def plain_pearl(updates):
    """Updates a second of a plain PEARL with the defaults of pearl_htr_ser.py."""
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch.distributions import Normal, TanhTransform, TransformedDistribution, kl_divergence

    import pearl_htr_ser

    args = pearl_htr_ser.Args()
    torch.set_num_threads(args.num_threads)
    torch.set_flush_denormal(True)
    rng, task = np.random.default_rng(1), pearl_htr_ser.Task(args)
    columns = [task.obs_dim, task.action_dim, 1, task.obs_dim]  # observation, action, reward, next observation
    buffers = rng.standard_normal((args.num_train_tasks, 20 * task.horizon, sum(columns)), np.float32)
    agent = pearl_htr_ser.Agent(task, args)
    critic, qfs = (agent.encoder, agent.qf1, agent.qf2), (agent.qf1, agent.qf2)
    adam = {net: torch.optim.Adam(net.parameters(), lr=args.learning_rate) for net in (*critic, agent.policy, agent.vf)}

    def draw(tasks, size):
        rows = np.stack([rng.choice(buffers[i], size) for i in tasks])
        return torch.from_numpy(rows).split(columns, -1)

    def learn(nets, *losses):
        for net in nets:
            adam[net].zero_grad()
        for loss in losses:
            loss.backward(retain_graph=True)
        for net in nets:
            adam[net].step()

    def update():
        tasks = rng.choice(args.num_train_tasks, args.meta_batch_size)
        mean, variance = agent.posterior(torch.cat(draw(tasks, args.context_size)[:3], -1))
        posterior = Normal(mean, variance.sqrt())
        z = posterior.rsample().repeat_interleave(args.batch_size, 0)
        obs, action, reward, next_obs = (column.flatten(0, 1) for column in draw(tasks, args.batch_size))
        policy_mean, log_std = agent.policy(torch.cat([obs, z.detach()], -1)).chunk(2, -1)
        gaussian = Normal(policy_mean, log_std.clamp(-20, 2).exp())
        squashed = TransformedDistribution(gaussian, TanhTransform(cache_size=1))
        new_action = squashed.rsample()
        log_prob = squashed.log_prob(new_action).sum(-1, keepdim=True)
        with torch.no_grad():
            q_target = args.reward_scale * reward + args.gamma * agent.vf_target(torch.cat([next_obs, z], -1))
        q_loss = sum(F.mse_loss(qf(torch.cat([obs, action, z], -1)), q_target) for qf in qfs)
        learn(critic, args.kl_lambda * kl_divergence(posterior, Normal(0.0, 1.0)).sum(), q_loss)
        min_q = torch.min(*(qf(torch.cat([obs, new_action, z.detach()], -1)) for qf in qfs))
        learn([agent.vf], F.mse_loss(agent.vf(torch.cat([obs, z.detach()], -1)), (min_q - log_prob).detach()))
        for target, parameter in zip(agent.vf_target.parameters(), agent.vf.parameters()):
            target.data.copy_((1 - args.tau) * target.data + args.tau * parameter.data)
        size = policy_mean.square().mean() + log_std.square().mean()
        learn([agent.policy], (log_prob - min_q).mean() + 1e-3 * size)

    update()
    started = time.time()
    for _ in range(updates):
        update()
    return updates / (time.time() - started)


def in_turn(repeats, sides, *pairs):
    """Measure `sides`, by name a function and its arguments, and print their speeds and the ratios of pairs of them."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    speeds = []
    for _ in range(repeats):
        speeds.append({name: function(*arguments) for name, (function, *arguments) in sides.items()})
        print(", ".join(f"{name} {speed:.1f}/s" for name, speed in speeds[-1].items()), flush=True)
    for a, b in pairs:
        ratios = [speed[a] / speed[b] for speed in speeds]
        said = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{a} to {b}: {said}; median {statistics.median(ratios):.2f}", flush=True)


def main(args: Args):
    for task, tried in (("bitflip", (1, 4, 16)), ("fetch", (1, 2, 4, 8, 16))):
        if task in args.what:
            sizes = args.steps, args.n_bits
            speeds = {num_envs: alone(stable_baselines3, task, *sizes, num_envs) for num_envs in tried}
            print("Stable-Baselines3 by number of environments:", {n: round(s) for n, s in speeds.items()}, flush=True)
            theirs = alone, stable_baselines3, task, *sizes, max(speeds, key=speeds.get)
            in_turn(args.repeats, {task: (her, task, *sizes), "Stable-Baselines3": theirs}, (task, "Stable-Baselines3"))
    if "pearl" in args.what:
        sides = {"PEARL": (pearl, SER, 0, args.updates), "SER": (pearl, SER, 0.3, args.updates)}
        sides |= {"EC": (pearl, EC, 0.3, args.updates), "plain PEARL": (alone, plain_pearl, args.updates)}
        in_turn(args.repeats, sides, ("PEARL", "plain PEARL"), ("PEARL", "SER"), ("SER", "EC"))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
