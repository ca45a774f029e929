"""DDPG + Hindsight Experience Replay (HER) on the Fetch robot and on any goal-conditioned Gymnasium environment.

Andrychowicz et al., "Hindsight Experience Replay", NeurIPS 2017: Algorithm 1, Sec. 3 and 4, Appendix A. Try:

  python her_ddpg_fetch.py --env-id FetchReach-v4 --total-timesteps 10000 --eval-frequency 5000
  python her_ddpg_fetch.py --env-id FetchSlide-v2 --k 4
"""

import contextlib
import copy
import functools
import importlib
import io
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]  # name of the experiment, a part of the run's name
    seed: int = 1  # of networks, exploration, tasks and replay; evaluation tasks are drawn apart from training tasks
    torch_deterministic: bool = True  # deterministic torch kernels only (`--no-torch-deterministic` allows others)
    cuda: bool = True  # learn on a GPU if there is one, else on the CPU (`--no-cuda`: always on the CPU)
    num_threads: int = 1  # torch threads of the learner; 1 is best for small networks on a shared CPU
    track: bool = False  # log to Weights & Biases too (needs `pip install wandb`)
    wandb_project_name: str = "hindsight"  # W&B project
    wandb_entity: Optional[str] = None  # W&B team or user; None: your default one
    capture_video: bool = False  # film the first episode of each evaluation (needs `pip install moviepy`)
    save_model: bool = False  # write the trained policy to model.pt
    quiet: bool = False  # no progress on the terminal
    run_dir: str = "runs"  # folder that gets one new folder a run
    resume: Optional[str] = None  # folder of a run, or its checkpoint.pt, to go on with; its arguments hold by default
    evaluate: Optional[str] = None  # model.pt, checkpoint.pt or folder of a run to play `--eval-episodes` episodes with
    checkpoint_frequency: int = 100_000  # environment steps between checkpoints; 0: at the end and on Ctrl-C

    env_id: str = "FetchPush-v4"  # Gymnasium id of an environment with goals; a version that is gone runs as the newest
    env_module: Optional[str] = None  # module to import first, for environments of your own (here: `envs`, the paper's)
    max_episode_steps: Optional[int] = None  # time limit of an episode in steps; None: the environment's own
    total_timesteps: int = 700_000  # environment steps, all environments and ranks counted
    eval_frequency: int = 20_000  # environment steps between evaluations
    eval_episodes: int = 100  # episodes of an evaluation

    num_envs: int = 16  # environments of a rank; a cycle is one episode in each (App. A: 16)
    num_workers: int = 2  # processes of a rank that step its environments
    overlap: bool = True  # play while learning, with the policy of before (`--no-overlap`: in turn, as in the paper)
    buffer_size: int = 1_000_000  # transitions in a rank's replay buffer (App. A: 1e6)
    batch_size: int = 512  # transitions in a rank's minibatch (App. A: 128)
    learning_rate: float = 1e-3  # Adam's step size (App. A: 0.001)
    gamma: float = 0.98  # discount factor (App. A: 0.98)
    # achieved goals to relabel with (Sec. 4.5): later in the episode, its last, any of it, any in the buffer, none
    strategy: Literal["future", "final", "episode", "random", "none"] = "future"
    k: float = 4  # relabelled samples for each one with its own goal (Sec. 4.5); 0: no HER
    past_goals: float = 0.25  # share of the relabelled that take a desired goal of any stored episode (paper: 0)
    redraws: int = 8  # times that a hindsight goal met before the step is drawn again, step and all (paper: 0)
    train_frequency: int = 4  # environment steps of a rank for each update (App. A: 20, 16 episodes then 40 updates)
    tau: float = 0.05  # step of the target networks towards the networks (App. A: 0.05)
    target_network_frequency: int = 1  # updates between steps of the target networks (App. A: 40)
    hidden_size: int = 128  # units in a hidden layer (App. A: 64)
    num_layers: int = 3  # hidden layers of actor and critic (App. A: 3)
    input_scale: float = 3.0  # deviation of the networks' inputs; above 1, near positions differ more (App. A: 1)
    action_penalty: float = 2.0  # weight of the squared inputs of the actor's tanh in its loss (App. A gives none)
    exploration_noise: float = 0.2  # deviation of the normal noise on actions in [-1, 1] (App. A: 5% of the range, 0.1)
    random_action: float = 0.3  # probability of a uniform action (App. A: 0.2)
    count_bonus: float = 0.0  # alpha of the exploration bonus alpha / sqrt(visits) of Sec. 4.2 (paper: 1); 0: no bonus
    count_cell: float = 0.01  # edge of the bonus' grid over (achieved - desired goal), in the goal's unit (paper: 1 cm)


# ------------------------------------------------------------------------------------------------------- environments
def make_env(args, **kwargs):
    """Make a goal-conditioned environment; a version that is not registered (any more) runs as the newest one."""
    with contextlib.suppress(ImportError), contextlib.redirect_stderr(io.StringIO()):  # it prints news on import
        gym.register_envs(importlib.import_module("gymnasium_robotics"))
    if args.env_module:
        sys.path += [os.getcwd()]
        importlib.import_module(args.env_module)
    env_id, (name, _, version) = args.env_id, args.env_id.rpartition("-v")
    if env_id not in gym.registry and version.isdigit():
        newest = max((s.version or 0 for s in gym.registry.values() if s.id == f"{name}-v{s.version}"), default=-1)
        env_id = f"{name}-v{newest}" if newest >= int(version) else env_id
    env = gym.make(env_id, disable_env_checker=True, max_episode_steps=args.max_episode_steps, **kwargs)
    if hasattr(env.unwrapped, "_model_names") and "Fetch" in type(env.unwrapped).__name__:
        # Each Fetch step reads the state of all joints by name and keeps the last two: look up those alone.
        names = env.unwrapped._model_names
        names._joint_names = [name for name in names.joint_names if name.startswith("robot")][-2:]
    return env


def vectorized(goal_function, achieved, desired):
    """Have `compute_reward` or `compute_terminated` take batches of goals, (n, goal_dim) -> (n,): all at once, if that
    gives on trial rows what row after row gives."""

    def at_once(achieved, desired, info):
        return np.broadcast_to(np.float32(goal_function(achieved, desired, info)), len(achieved)).copy()

    def by_row(achieved, desired, info):
        infos = ({key: values[i] for key, values in info.items()} for i in range(len(achieved)))
        return np.array([goal_function(*row) for row in zip(achieved, desired, infos)], np.float32)

    goals = np.stack([achieved, desired, achieved, desired]), np.stack([desired, desired, desired, achieved])
    trial = *goals, {"previous_achieved_goal": goals[0]}
    with or_fail(f"{goal_function.__qualname__} is asked again, for stored goals alone, and fails"):
        expected = by_row(*trial)
    try:
        return at_once if np.allclose(at_once(*trial), expected) else by_row
    except Exception:
        return by_row


def probe(args):
    """Make the environment and play an episode: what HER cannot learn from is refused in one line.

    Returns it, and its compute_reward and compute_terminated (None if it has none) for batches.
    """
    try:
        env = make_env(args)
        spaces, core = getattr(env.observation_space, "spaces", {}), env.unwrapped
        if {"observation", "achieved_goal", "desired_goal"} - spaces.keys() or not hasattr(core, "compute_reward"):
            raise TypeError("it has no goals: HER needs observation, achieved_goal, desired_goal and compute_reward")
        if any(len(space.shape or ()) != 1 for space in (*spaces.values(), env.action_space)):
            raise TypeError("observations, goals and actions have to be vectors of numbers")
        if env.spec.max_episode_steps is None:
            raise TypeError("without a time limit an episode may never end: give one with --max-episode-steps")
        ENVS["probe"] = [env]
        (episode,) = play_episodes(args, "probe", MLP(env, args).state_dict(), False, [args.seed])
        goals = episode["achieved_goal"][0], episode["desired_goal"][0]
        functions = [getattr(core, name, None) for name in ("compute_reward", "compute_terminated")]
        functions = [function and vectorized(function, *goals) for function in functions]
    except Exception as e:
        bare = "mujoco 3.12 and newer break the Fetch tasks: pip install mujoco==3.11.0"  # says nothing else
        fail(f"--env-id {args.env_id} cannot be used: {type(e).__name__} {str(e) or bare}")
    if env.spec.id != args.env_id:
        print(f"{args.env_id} is not registered (any more): running {env.spec.id}", file=sys.stderr)
    return env, *functions


# ALGO LOGIC: networks ------------------------------------------------------------------------------------------------
class NetworkInput(nn.Module):
    """[s, g, g - achieved goal], scaled to mean 0 and deviation `scale` and clipped to 5 deviations (App. A: scale 1).

    The difference is there because the paper's networks see the target relative to the robot (Sec. 4.1, observations).
    """

    def __init__(self, obs_dim, goal_dim, scale):
        super().__init__()
        self.dim, self.scale = obs_dim + 2 * goal_dim, scale
        self.register_buffer("sums", torch.zeros(3, self.dim, dtype=torch.float64))  # of 1, x and x^2
        self.register_buffer("mean", torch.zeros(self.dim))
        self.register_buffer("std", torch.ones(self.dim))

    def forward(self, obs, achieved_goal, desired_goal):
        x = torch.cat([obs, desired_goal, desired_goal - achieved_goal], -1)
        return self.scale * ((x - self.mean) / self.std).clamp(-5, 5)

    def update(self, obs, achieved_goal, desired_goal):
        """Count in rows of arrays, (n, dim) each, those of all ranks of torchrun."""
        x = torch.from_numpy(np.concatenate([obs, desired_goal, desired_goal - achieved_goal], 1)).to(self.sums)
        new = torch.stack([torch.ones_like(x).sum(0), x.sum(0), x.square().sum(0)])
        if dist.is_initialized():
            dist.all_reduce(new)
        self.sums += new
        count, total, squares = self.sums
        self.mean.copy_(total / count)
        variance = squares / count - (total / count).square()
        self.std.copy_(variance.clamp(min=1e-4).sqrt())  # at least 0.01, so that nearly constant inputs stay small


class MLP(nn.Module):
    """Actor: (s, g) -> inputs of its tanh, (n, action_dim). Critic: (s, g, action) -> Q, (n, 1).

    Where the environment has an `actor_observation`, the actor sees that and the critic the rest (App. A, Sec. 4.6).
    """

    def __init__(self, env, args, critic=False):
        super().__init__()
        dims = {key: space.shape[0] for key, space in env.observation_space.items()}
        self.obs_key = "actor_observation" if "actor_observation" in dims and not critic else "observation"
        self.input = NetworkInput(dims[self.obs_key], dims["desired_goal"], args.input_scale)
        (action_dim,) = env.action_space.shape
        sizes = [self.input.dim + action_dim * critic] + [args.hidden_size] * args.num_layers
        hidden = [layer for i, o in zip(sizes, sizes[1:]) for layer in (nn.Linear(i, o), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(args.hidden_size, 1 if critic else action_dim))

    def forward(self, obs, achieved_goal, desired_goal, *action):
        return self.layers(torch.cat([self.input(obs, achieved_goal, desired_goal), *action], -1))


# ALGO LOGIC: playing episodes ----------------------------------------------------------------------------------------
ENVS = {}  # of this process, for each use: training and evaluation have environments of their own


def play_episodes(args, use, actor_state, explore, seeds):
    """Play an episode for each seed, all in step. Returns a dict of float32 arrays for each episode.

    Everything random follows from `seeds`, so that it does not matter which process plays what.
    """
    envs = ENVS.setdefault(use, [])
    envs += [make_env(args) for _ in range(len(seeds) - len(envs))]
    actor = MLP(envs[0], args)
    actor.load_state_dict({key: torch.as_tensor(value) for key, value in actor_state.items()})
    rng = np.random.default_rng(seeds)
    low, high = envs[0].action_space.low, envs[0].action_space.high
    episodes = [{key: [] for key in ("action", "reward", "terminated", "success")} for _ in seeds]
    for env, seed, episode in zip(envs, seeds, episodes):
        # Copies, here and below: an environment may change later what it returned.
        episode.update({key: [np.array(value, np.float32)] for key, value in env.reset(seed=seed)[0].items()})
    playing = range(len(seeds))
    while playing:
        keys = (actor.obs_key, "achieved_goal", "desired_goal")
        state = [np.array([episodes[i][key][-1] for i in playing]) for key in keys]
        assert np.isfinite(np.hstack(state)).all(), "the environment gave an observation that is not a number"
        with torch.no_grad():
            action = torch.tanh(actor(*map(torch.from_numpy, state))).numpy()
        assert np.isfinite(action).all(), "the policy gave an action that is not a number: lower --learning-rate"
        if explore:  # App. A, exploration
            noise = args.exploration_noise * rng.standard_normal(action.shape, np.float32)
            uniform = rng.uniform(-1, 1, action.shape).astype(np.float32)
            random_action = rng.random((len(action), 1)) < args.random_action
            action = np.where(random_action, uniform, np.clip(action + noise, -1, 1))
        ended = set()
        for i, a in zip(playing, action):
            next_obs, reward, terminated, truncated, info = envs[i].step(low + (a + 1) / 2 * (high - low))
            success = info.get("is_success", info.get("success"))
            if success is None:  # an environment that does not say: as rewarding as the goal itself
                goal = next_obs["desired_goal"]
                success = reward >= envs[i].unwrapped.compute_reward(goal, goal, info)
            step = dict(next_obs, action=a, reward=reward, terminated=terminated, success=success)
            for key, values in episodes[i].items():
                values.append(np.array(step[key], np.float32))
            if terminated or truncated:
                ended.add(i)
        playing = [i for i in playing if i not in ended]
    for episode in episodes:
        episode.update({key: np.array(values) for key, values in episode.items()})
        assert all(np.isfinite(values).all() for values in episode.values()), "a step gave what is not a number"
    return episodes


def summarize(episodes):
    """Means over episodes: success at the last step (the Fetch measure), return, success at any, object moved 1 cm."""
    of_each = {
        "success_rate": [e["success"][-1] for e in episodes],
        "episodic_return": [e["reward"].sum() for e in episodes],
        "success_any_rate": [e["success"].max() for e in episodes],
        "moved_fraction": [np.abs(e["achieved_goal"] - e["achieved_goal"][0]).max() > 0.01 for e in episodes],
    }
    return {key: float(np.mean(values, dtype=np.float64)) for key, values in of_each.items()}


# ALGO LOGIC: replay and hindsight ------------------------------------------------------------------------------------
class ReplayBuffer:
    """Ring of transitions. A step is known by its number since the start, `row = step % capacity`."""

    def __init__(self, capacity, dims):
        self.capacity, self.first, self.end = capacity, 0, 0  # steps first .. end - 1 are stored
        self.data = {key: np.zeros((capacity, *dim), np.float32) for key, dim in dims.items()}
        self.data |= {key: np.zeros(capacity, np.int64) for key in ("episode_start", "episode_end")}

    def add(self, episode):
        """Store an episode of T steps; the observations and achieved goals have T + 1 rows, the first before step 0."""
        length = len(episode["action"])
        bounds = {"episode_start": np.full(length, self.end), "episode_end": np.full(length, self.end + length)}
        rows = np.arange(self.end, self.end + length) % self.capacity
        for key, array in self.data.items():
            values = (episode | bounds)[key.removeprefix("next_")]
            array[rows] = values[1:] if key.startswith("next_") else values[:length]
        self.end += length
        self.first = max(0, self.end - self.capacity)

    def hindsight_steps(self, strategy, steps, rng):
        """The steps whose outcome becomes the goal of each of `steps` (Sec. 4.5)."""
        if strategy == "random":
            return rng.integers(self.first, self.end, len(steps))
        start, end = (self.data[key][steps % self.capacity] for key in ("episode_start", "episode_end"))
        # A step is in its own future: its outcome is achieved at t + 1. The ring may have overwritten the start.
        first = {"future": steps, "final": end - 1, "episode": np.maximum(start, self.first), "none": end - 1}
        return rng.integers(first[strategy], end)

    def sample(self, args, compute_reward, rng):
        """A minibatch (dict of arrays) with the goals of k / (k + 1) of it replaced, and which those are.

        That is the same as if k relabelled copies of each transition had been stored (Algorithm 1).
        """
        steps = rng.integers(self.first, self.end, args.batch_size)
        strategy = args.strategy if args.k else "none"
        k = 0 if strategy == "none" else args.k
        draw = rng.random(args.batch_size) * (k + 1)
        hindsight, past = draw < k, draw < k * args.past_goals
        outcomes = self.hindsight_steps(strategy, steps, rng)
        again = np.flatnonzero(hindsight & ~past)
        for _ in range(args.redraws):
            if not len(again):
                break
            before = self.data["achieved_goal"][steps[again] % self.capacity]
            goal = self.data["next_achieved_goal"][outcomes[again] % self.capacity]
            info = {"previous_achieved_goal": before}
            again = again[compute_reward(before, goal, info) >= compute_reward(goal, goal, info)]
            steps[again] = rng.integers(self.first, self.end, len(again))
            outcomes[again] = self.hindsight_steps(strategy, steps[again], rng)
        batch = {key: array[steps % self.capacity] for key, array in self.data.items() if array.dtype == np.float32}
        others = rng.integers(self.first, self.end, args.batch_size)
        batch["desired_goal"][hindsight] = self.data["next_achieved_goal"][outcomes[hindsight] % self.capacity]
        batch["desired_goal"][past] = self.data["desired_goal"][others[past] % self.capacity]
        return batch, hindsight

    def state_dict(self):
        used = slice(min(self.end, self.capacity))
        return {"end": self.end} | {key: torch.from_numpy(array[used]) for key, array in self.data.items()}

    def load_state_dict(self, state):
        self.end, self.first = state["end"], max(0, state["end"] - self.capacity)
        for key, array in self.data.items():
            array[: len(state[key])] = state[key].numpy()


# ALGO LOGIC: training ------------------------------------------------------------------------------------------------
TRAINING, EVALUATION, REPLAY = range(3)  # each use of random numbers has streams of its own, by seed, rank and cycle


def episode_seeds(args, use, n, rank=0, cycle=0):
    return np.random.SeedSequence([args.seed, use, rank, cycle]).generate_state(n).tolist()


def td_target(reward, terminated, next_q, gamma, reward_range):
    """r + gamma Q'(s', g, pi'(s', g)), clipped to the returns that rewards in this range can add up to (App. A)."""
    low, high = (bound / (1 - gamma) for bound in reward_range)
    return (reward + gamma * (1 - terminated) * next_q).clamp(low, high)  # a time limit does not terminate


def average_gradients(parameters):
    """Mean of the gradients over torchrun's ranks, so that all take the same step (App. A averages parameters)."""
    if dist.is_initialized():
        gradients = [parameter.grad for parameter in parameters]
        flat = nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / dist.get_world_size(), gradients)


def train(args, simulators, folder, rank=0, saved=None):
    """Algorithm 1 from the start, or on from the content of a checkpoint. Returns the finished `Run`."""
    env, compute_reward, compute_terminated = probe(args)
    gpu, world_size = args.cuda and torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", 1))  # of torchrun
    device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if gpu else "cpu")
    if world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
        names = [folder]  # all ranks take the first one's, whose name has the time of its start
        dist.broadcast_object_list(names)
        folder = f"{names[0]}/rank{rank}" if rank else folder
    torch.set_num_threads(args.num_threads)
    torch.set_flush_denormal(True)  # Adam's averages of units that died shrink for ever, and tiny numbers are slow
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic kernels need on a GPU
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.manual_seed(args.seed)
    actor, qf = MLP(env, args).to(device), MLP(env, args, critic=True).to(device)
    dims = {key: space.shape for key, space in env.observation_space.items()}
    next_dims = {f"next_{key}": dims[key] for key in ("achieved_goal", "observation", actor.obs_key)}
    with or_fail(f"--buffer-size {args.buffer_size} is too large"):
        rb = ReplayBuffer(args.buffer_size, dims | next_dims | {"action": env.action_space.shape, "terminated": ()})
    actor_target, qf_target = copy.deepcopy(actor), copy.deepcopy(qf)
    acting = copy.deepcopy(actor)  # plays the coming cycle, while the actor learns
    actor_target.input, qf_target.input = actor.input, qf.input
    actor_parameters, qf_parameters = list(actor.parameters()), list(qf.parameters())
    target_parameters = [*actor_target.parameters(), *qf_target.parameters()]
    actor_optimizer, qf_optimizer = (torch.optim.Adam(each, fused=True) for each in (actor_parameters, qf_parameters))
    bonus = CountBonus(args.count_bonus, args.count_cell, *dims["desired_goal"])
    parts = {"actor": actor, "qf": qf, "actor_target": actor_target, "qf_target": qf_target, "acting": acting}
    parts |= {"actor_optimizer": actor_optimizer, "qf_optimizer": qf_optimizer, "bonus": bonus, "replay": rb}
    run = Run(args, folder, parts, saved)
    for optimizer in (actor_optimizer, qf_optimizer):
        optimizer.param_groups[0]["lr"] = args.learning_rate  # not that of a checkpoint
    if rank == 0 and not saved:
        run.log_evaluation(evaluate(args, simulators, actor_target, folder, "step-0"))
    stop, playing = 0, start_playing(simulators, args, TRAINING, acting, args.num_envs, rank, run.cycle)
    while run.global_step < args.total_timesteps and not stop:
        # Play one episode in each environment, with exploration (Algorithm 1), a cycle
        cycle_started = time.time()
        episodes = finish_playing(args, playing)
        run.cycle += 1
        if args.overlap:  # the simulators go on with the policy as it is now, while it is improved below
            acting.load_state_dict(actor.state_dict())
            playing = start_playing(simulators, args, TRAINING, acting, args.num_envs, rank, run.cycle)

        # Store the episodes with their own goals (Algorithm 1); hindsight comes when they are sampled
        for episode in episodes:
            rb.add(episode)
            achieved = episode["achieved_goal"]
            if args.count_bonus:
                bonus.add(achieved[1:], episode["desired_goal"][1:])
            for network in (actor, qf):  # scaling: own and hindsight goals
                for goal in (episode["desired_goal"], np.broadcast_to(achieved[-1], achieved.shape)):
                    network.input.update(episode[network.obs_key], achieved, goal)
        tally = torch.tensor([sum(len(episode["action"]) for episode in episodes), run.stopped], device=device)
        if world_size > 1:
            dist.all_reduce(tally)
        run.steps, stop = tally.tolist()  # all ranks stop after the same cycle
        run.global_step += run.steps

        # Optimise on minibatches with hindsight goals (Algorithm 1)
        rng = np.random.default_rng([args.seed, REPLAY, rank, run.cycle])
        updates = run.global_step // (args.train_frequency * world_size) - run.updates
        relabelled = zero_rewards = 0
        for _ in range(updates):
            batch, hindsight = rb.sample(args, compute_reward, rng)
            goals = batch["next_achieved_goal"], batch["desired_goal"]
            info = {"previous_achieved_goal": batch["achieved_goal"]}
            batch["reward"] = compute_reward(*goals, info)  # of the state after the step (Algorithm 1)
            if compute_terminated:
                batch["terminated"] = compute_terminated(*goals, info)
            relabelled += hindsight.sum()
            zero_rewards += (batch["reward"][hindsight] == 0).sum()
            if args.count_bonus:
                batch["reward"] = batch["reward"] + bonus(*goals)
            low, high = run.reward_range
            run.reward_range = [min(low, float(batch["reward"].min())), max(high, float(batch["reward"].max()))]
            data = {key: torch.from_numpy(value).to(device) for key, value in batch.items()}
            goals, next_goals = ([data[f"{n}achieved_goal"], data["desired_goal"]] for n in ("", "next_"))

            with torch.no_grad():
                next_action = torch.tanh(actor_target(data[f"next_{actor.obs_key}"], *next_goals))
                next_q = qf_target(data["next_observation"], *next_goals, next_action).flatten()
                target = td_target(data["reward"], data["terminated"], next_q, args.gamma, run.reward_range)
            qf_values = qf(data["observation"], *goals, data["action"]).flatten()
            qf_loss = F.mse_loss(qf_values, target)
            qf_optimizer.zero_grad()
            qf_loss.backward()
            average_gradients(qf_parameters)
            qf_optimizer.step()

            preactivation = actor(data[actor.obs_key], *goals)
            penalty = preactivation.square().mean()  # keeps the tanh from saturating (App. A, network architecture)
            actor_q = qf(data["observation"], *goals, torch.tanh(preactivation)).mean()
            actor_loss = args.action_penalty * penalty - actor_q
            for parameter, gradient in zip(actor_parameters, torch.autograd.grad(actor_loss, actor_parameters)):
                parameter.grad = gradient
            average_gradients(actor_parameters)
            actor_optimizer.step()

            run.updates += 1
            if run.updates % args.target_network_frequency == 0:
                with torch.no_grad():
                    torch._foreach_lerp_(target_parameters, actor_parameters + qf_parameters, args.tau)
        if not args.overlap:
            acting.load_state_dict(actor.state_dict())
            playing = start_playing(simulators, args, TRAINING, acting, args.num_envs, rank, run.cycle)

        # Record
        scalars = {f"charts/{key}": value for key, value in summarize(episodes).items()}
        scalars["charts/buffer_size"] = rb.end - rb.first
        if updates:
            scalars |= {"losses/qf1_loss": qf_loss.item(), "losses/qf1_values": qf_values.mean().item()}
            scalars |= {"losses/actor_loss": actor_loss.item(), "losses/preactivation_penalty": penalty.item()}
            scalars["charts/relabel_fraction"] = relabelled / (updates * args.batch_size)
            scalars["charts/zero_reward_fraction"] = zero_rewards / max(1, relabelled)
        run.log(scalars, time.time() - cycle_started)
        if rank == 0 and run.passed(args.eval_frequency):  # the target network plays (App. A)
            run.log_evaluation(evaluate(args, simulators, actor_target, folder, f"step-{run.global_step}"))
        if stop or run.passed(args.checkpoint_frequency):
            run.save("checkpoint.pt", parts)
    if args.save_model and rank == 0:
        run.save("model.pt", {"actor_target": actor_target})
    return run


def evaluate(args, simulators, actor, folder, name):
    """Metrics of the policy without noise on tasks that training does not see; `--capture-video` films the first."""
    playing = start_playing(simulators, args, EVALUATION, actor, args.eval_episodes)
    if args.capture_video:
        if sys.platform == "linux" and not os.environ.get("DISPLAY"):
            os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen
        names = {"video_folder": f"{folder}/videos", "name_prefix": name, "disable_logger": True}
        with or_fail("--capture-video does not work here"):
            ENVS["film"] = [gym.wrappers.RecordVideo(make_env(args, render_mode="rgb_array"), **names)]
            play_episodes(args, "film", actor.state_dict(), False, episode_seeds(args, EVALUATION, 1))
            ENVS["film"][0].close()
    return summarize(finish_playing(args, playing))


def start_simulator():
    """What a process that plays does first."""
    os.setsid()  # Ctrl-C, and what `timeout` sends to all, are for the learner, which then lets us go
    threading.Thread(target=follow_the_learner, daemon=True).start()
    torch.set_num_threads(1)


def follow_the_learner():
    multiprocessing.parent_process().join()
    os._exit(1)


def start_playing(simulators, args, use, actor, n, rank=0, cycle=0):
    """Have simulators play n episodes, with exploration in training; returns what `finish_playing` takes."""
    actor_state = {key: value.cpu().numpy().copy() for key, value in actor.state_dict().items()}  # it learns on
    seeds, size = episode_seeds(args, use, n, rank, cycle), math.ceil(args.num_envs / args.num_workers)
    shares = (seeds[i :: args.num_workers] for i in range(args.num_workers))
    parts = [share[i : i + size] for share in shares for i in range(0, len(share), size)]
    return simulators.map(functools.partial(play_or_tell, args, use, actor_state, use == TRAINING), parts)


def play_or_tell(*given):
    """Play in another process; from there not every exception can be sent back as it is."""
    try:
        return play_episodes(*given)
    except Exception as e:
        raise RuntimeError(f"{type(e).__name__}: {e}") from None


def finish_playing(args, playing):
    """The episodes, when they are there."""
    with or_fail(f"an episode of {args.env_id} broke off", 1):
        return [episode for part in playing for episode in part]


class CountBonus(nn.Module):
    """Bonus alpha / sqrt(N) for the object being where it seldom was relative to its target (baseline of Sec. 4.2)."""

    def __init__(self, alpha, cell, goal_dim, size=2**20):
        super().__init__()
        self.alpha, self.cell = alpha, cell  # visits: a hash table, so large that few cells share an entry
        self.register_buffer("visits", torch.zeros(size if alpha else 0, dtype=torch.int64))
        self.multipliers = np.random.default_rng(0).integers(1, 2**31, goal_dim)

    def index(self, achieved, desired):
        return np.floor((achieved - desired) / self.cell).astype(np.int64) @ self.multipliers % len(self.visits)

    def add(self, achieved, desired):
        np.add.at(self.visits.numpy(), self.index(achieved, desired), 1)

    def forward(self, achieved, desired):
        visits = self.visits.numpy()[self.index(achieved, desired)]
        return self.alpha / np.sqrt(np.maximum(visits, 1)).astype(np.float32)


# PLUMBING: errors, checks, processes, files, logs, command line; nothing of the algorithm ----------------------------
def fail(message, status=2):
    """Leave with one line on standard error. Status 2: what was given cannot work; 1: a run broke off."""
    print("error:" if status == 2 else "failed:", " ".join(message.split())[:300], file=sys.stderr)
    sys.exit(status)


@contextlib.contextmanager
def or_fail(message, status=2):
    """Leave with this line and the reason if anything in the block goes wrong."""
    try:
        yield
    except Exception as e:
        fail(f"{message}: {type(e).__name__}: {e}", status)


def check(args):
    """Refuse what cannot work before anything is written. Numbers are at least 1, but for the ones named here."""
    zero = "seed checkpoint_frequency learning_rate k redraws action_penalty exploration_noise input_scale count_bonus"
    bounds = dict.fromkeys(zero.split(), (0, math.inf)) | dict.fromkeys(("past_goals", "tau", "random_action"), (0, 1))
    bounds |= {"gamma": (0, 0.999999), "count_cell": (1e-9, math.inf)}
    bounds |= {"num_workers": (1, args.num_envs), "batch_size": (1, args.buffer_size)}
    for name, value in vars(args).items():
        low, high = bounds.get(name, (1, math.inf))
        if type(value) in (int, float) and not low <= value <= high:
            fail(f"--{name.replace('_', '-')} must be from {low} to {high}, not {value}")


class Run:
    """Counters and files of a training: TensorBoard, eval.csv, checkpoints. Ctrl-C and SIGTERM set `stopped`."""

    def __init__(self, args, folder, parts, saved):
        self.args, self.folder, self.stopped, self.metrics = args, folder, 0, {}
        self.global_step = self.steps = self.cycle = self.updates = self.train_s = self.wall_s = self.sps = 0
        self.reward_range = [0.0, 0.0]  # lowest and highest reward seen
        rows, eval_csv = ["seed,global_step,metric,value,n_episodes,wall_s\n"], Path(folder, "eval.csv")
        if saved:  # go on in the same files, without what came after the checkpoint
            vars(self).update(saved["counters"])
            with or_fail(f"cannot go on in {folder}"), eval_csv.open() as file:
                rows += [row for row in list(file)[1:] if int(row.split(",")[1]) <= self.global_step]
                for name, part in parts.items():
                    part.load_state_dict(saved[name])
        with or_fail(f"cannot start in {folder}, see --run-dir and --track"):
            wandb = importlib.import_module("wandb") if args.track else None
            os.makedirs(folder, exist_ok=True)
            eval_csv.write_text("".join(rows))
            Path(folder, "args.json").write_text(json.dumps(vars(args), indent=2))
            if wandb:
                names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": Path(folder).name}
                wandb.init(**names, dir=folder, config=vars(args), sync_tensorboard=True)
        self.writer = SummaryWriter(folder, purge_step=self.global_step + 1 if saved else None)
        self.writer.add_text("hyperparameters", "\n".join(f"- {key}: {value}" for key, value in vars(args).items()))
        self.started = time.time() - self.wall_s
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.stop)

    def stop(self, signum, frame):
        self.stopped = 1
        signal.signal(signum, signal.SIG_DFL)  # a second one stops at once

    def passed(self, frequency):
        """Whether the last cycle went past a multiple of `frequency` (0: never) or reached the end."""
        done, every = self.global_step >= self.args.total_timesteps, frequency or math.inf
        return done or self.global_step // every > (self.global_step - self.steps) // every

    def log(self, scalars, seconds):
        """What a cycle gave, to TensorBoard, and how far training is, to the terminal."""
        self.train_s += seconds
        self.sps, total = self.global_step / self.train_s, self.args.total_timesteps
        for tag, value in (scalars | {"charts/SPS": self.sps}).items():
            if not math.isfinite(value):
                fail(f"{tag} is not a number at step {self.global_step}; lower --learning-rate", 1)
            self.writer.add_scalar(tag, value, self.global_step)
        if sys.stderr.isatty() and not self.args.quiet:
            left, success = max(0, total - self.global_step) / self.sps / 60, self.metrics["success_rate"]
            line = f"step {self.global_step} of {total}, {self.sps:.0f} steps/s, {left:.1f} min left"
            print(f"\r{line}, success {success:.2f} ", end="", file=sys.stderr)

    def log_evaluation(self, metrics):
        """To eval.csv and TensorBoard, at the step of the grid that is the same for all seeds."""
        self.metrics, self.wall_s, args = metrics, round(time.time() - self.started, 3), self.args
        step = args.total_timesteps if self.passed(0) else self.global_step // args.eval_frequency * args.eval_frequency
        with open(f"{self.folder}/eval.csv", "a") as file:
            for key, value in metrics.items():
                print(args.seed, step, f"eval/{key}", value, args.eval_episodes, self.wall_s, sep=",", file=file)
                self.writer.add_scalar(f"eval/{key}", value, step)

    def save(self, name, parts):
        """Write to a temporary name, then rename: the file is always whole, the earlier one or the new one."""
        self.wall_s, path = time.time() - self.started, f"{self.folder}/{name}"
        counters = {k: v for k, v in vars(self).items() if k not in ("args", "folder", "stopped", "started", "writer")}
        content = {"format": "her_ddpg_fetch", "args": vars(self.args), "counters": counters}
        with or_fail(f"cannot write {path}, an earlier one is kept", 1):
            torch.save(content | {name: part.state_dict() for name, part in parts.items()}, f"{path}.tmp")
            os.replace(f"{path}.tmp", path)


def main():
    args, saved, started = tyro.cli(Args, description=__doc__), None, time.time()
    rank = int(os.environ.get("RANK", 0))  # of torchrun
    if path := args.resume or args.evaluate:
        path = os.path.join(path, "checkpoint.pt") if os.path.isdir(path) else path
        path = path if rank == 0 else os.path.join(os.path.dirname(path), f"rank{rank}", "checkpoint.pt")
        with or_fail(f"{path} is not a whole checkpoint.pt or model.pt of this script"):
            saved = torch.load(path, map_location="cpu", weights_only=True)
            before = Args(**saved["args"] | {"resume": None, "evaluate": None})
        args = tyro.cli(Args, description=__doc__, default=before)
        if args.resume and (args.evaluate or args.buffer_size != before.buffer_size):
            fail("--resume takes neither --evaluate nor another --buffer-size")
    check(args)
    name = f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{int(1000 * started)}"
    folder = os.path.dirname(path) or "." if args.resume else os.path.join(args.run_dir, name)
    with ProcessPoolExecutor(args.num_workers, multiprocessing.get_context("spawn"), start_simulator) as simulators:
        if args.evaluate:
            actor = MLP(probe(args)[0], args)
            with or_fail(f"the policy in {path} does not fit --env-id {args.env_id} or these sizes"):
                actor.load_state_dict(saved["actor_target"])
            result = saved["counters"] | {"metrics": evaluate(args, simulators, actor, folder, "evaluate")}
            result["wall_s"] = time.time() - started
        else:
            result = vars(train(args, simulators, folder, rank, saved))
    line = {"run": args.evaluate or folder, "env_id": args.env_id, "seed": args.seed, "n_episodes": args.eval_episodes}
    line |= {"global_step": result["global_step"], "wall_s": round(result["wall_s"], 3), "sps": round(result["sps"], 1)}
    if rank == 0:
        print(json.dumps(line | result["metrics"]), flush=True)
    sys.exit(130 if result.get("stopped") else 0)


if __name__ == "__main__":
    main()
