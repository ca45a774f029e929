"""DDPG + Hindsight Experience Replay (HER) on the Fetch robot and on any goal-conditioned Gymnasium environment.

Andrychowicz et al., "Hindsight Experience Replay", NeurIPS 2017: Algorithm 1, Sec. 3 and 4, Appendix A. Try:

  python her_ddpg_fetch.py --env-id FetchReach-v4 --total-timesteps 10000 --eval-frequency 5000
  python her_ddpg_fetch.py --env-id FetchSlide-v2 --k 4
"""

import contextlib
import copy
import csv
import dataclasses
import difflib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, field
from typing import Literal, Optional

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """name of the experiment, a part of the run's name"""
    seed: int = 1
    """seed of networks, exploration, tasks and replay; evaluation tasks are drawn apart from training tasks"""
    torch_deterministic: bool = True
    """deterministic torch kernels only (`--no-torch-deterministic` allows others)"""
    cuda: bool = True
    """learn on a GPU if there is one, else on the CPU (`--no-cuda`: always on the CPU)"""
    num_threads: int = 1
    """torch threads of the learner; 1 is best for small networks on a shared CPU"""
    track: bool = False
    """log to Weights & Biases too (needs `pip install wandb`)"""
    wandb_project_name: str = "hindsight"
    """W&B project"""
    wandb_entity: Optional[str] = None
    """W&B team or user; None: your default one"""
    capture_video: bool = False
    """film the first episode of each evaluation (needs `pip install moviepy`)"""
    save_model: bool = False
    """write the trained policy to model.pt"""
    quiet: bool = False
    """no progress on the terminal"""
    run_dir: str = "runs"
    """folder that gets one new folder a run"""
    resume: Optional[str] = None
    """checkpoint.pt to continue from; its arguments hold wherever the command line gives no others"""
    evaluate: Optional[str] = None
    """model.pt or checkpoint.pt to play for `--eval-episodes` episodes instead of training"""
    checkpoint_frequency: int = 100_000
    """environment steps between checkpoints; 0: only on Ctrl-C or SIGTERM"""

    env_id: str = "FetchPush-v4"
    """Gymnasium id of a goal-conditioned environment; a version that is gone runs as the newest one"""
    env_module: Optional[str] = None
    """module to import first, for environments of your own (here: `envs`, the paper's task variants)"""
    total_timesteps: int = 700_000
    """environment steps, all environments and ranks counted"""
    eval_frequency: int = 20_000
    """environment steps between evaluations"""
    eval_episodes: int = 100
    """episodes of an evaluation"""

    num_envs: int = 16
    """environments of a rank; a cycle is one episode in each (App. A: 16)"""
    num_workers: int = 2
    """processes of a rank that step its environments"""
    overlap: bool = True
    """play the next cycle while learning, with the policy from before it (`--no-overlap`: in turn, as in the paper)"""
    buffer_size: int = 1_000_000
    """transitions in a rank's replay buffer (App. A: 1e6)"""
    batch_size: int = 512
    """transitions in a rank's minibatch (App. A: 128)"""
    learning_rate: float = 1e-3
    """Adam's step size (App. A: 0.001)"""
    gamma: float = 0.98
    """discount factor (App. A: 0.98)"""
    strategy: Literal["future", "final", "episode", "random", "none"] = "future"
    """achieved goals to relabel with (Sec. 4.5): later in the episode, its last, any of it, any in the buffer, none"""
    k: float = 4
    """relabelled samples for each one with its own goal (Sec. 4.5); 0: no HER"""
    past_goals: float = 0.25
    """share of the relabelled samples that take a desired goal of any stored episode instead (paper: 0)"""
    redraws: int = 8
    """times that a hindsight goal which was met before the step already is drawn again, step and all (paper: 0)"""
    train_frequency: int = 4
    """environment steps of a rank for each update (App. A: 20, 16 episodes of 50 steps then 40 updates)"""
    tau: float = 0.05
    """step of the target networks towards the networks (App. A: 0.05)"""
    target_network_frequency: int = 1
    """updates between steps of the target networks (App. A: 40)"""
    hidden_size: int = 128
    """units in a hidden layer (App. A: 64)"""
    num_layers: int = 3
    """hidden layers of actor and critic (App. A: 3)"""
    input_scale: float = 3.0
    """deviation of the networks' scaled inputs; above 1, networks tell near positions apart sooner (App. A: 1)"""
    action_penalty: float = 2.0
    """weight of the squared inputs of the actor's tanh in its loss (App. A does not give it; 1 in common use)"""
    exploration_noise: float = 0.2
    """deviation of the normal noise on actions in [-1, 1] (App. A: 5% of the range, 0.1)"""
    random_action: float = 0.3
    """probability of a uniform action (App. A: 0.2)"""
    count_bonus: float = 0.0
    """alpha of the exploration bonus alpha / sqrt(visits) of Sec. 4.2's baseline (paper: 1); 0: no bonus"""
    count_cell: float = 0.01
    """edge of the bonus' grid over (achieved - desired goal), in the goal's unit (paper: 1 cm)"""


class BadInput(Exception):
    """What the user gave cannot work; exit status 2."""


class RunFailed(Exception):
    """A run broke off; exit status 1."""


# ------------------------------------------------------------------------------------------------------ environments
def make_env(env_id, env_module=None, **kwargs):
    """Make a goal-conditioned environment; a version that is not registered (any more) runs as the newest one."""
    with contextlib.suppress(ImportError), contextlib.redirect_stderr(io.StringIO()):  # it prints news on import
        gym.register_envs(importlib.import_module("gymnasium_robotics"))
    if env_module:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(env_module)
        except ImportError as e:
            raise BadInput(f"cannot import --env-module {env_module}: {e}") from e
    if env_id not in gym.registry:
        name, version = re.fullmatch(r"(.*?)(?:-v(\d+))?", env_id).groups()
        newest = max((s.version or 0 for s in gym.registry.values() if f"{name}-v{s.version}" == s.id), default=-1)
        if newest < int(version or 0):
            close = ", ".join(difflib.get_close_matches(env_id, gym.registry, 3)) or "none is close"
            raise BadInput(f"unknown --env-id {env_id}; did you mean: {close}?")
        env_id = f"{name}-v{newest}"
    try:
        env = gym.make(env_id, disable_env_checker=True, **kwargs)
    except AssertionError as e:  # the bare assertion of a mujoco that this gymnasium-robotics cannot use
        pair = " and ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mujoco", "gymnasium-robotics"))
        raise BadInput(f"{env_id} cannot be made: {pair} do not fit together; pip install mujoco==3.11.0") from e
    except Exception as e:
        raise BadInput(f"{env_id} cannot be made: {e}") from e
    missing = {"observation", "achieved_goal", "desired_goal"} - set(getattr(env.observation_space, "spaces", {}))
    if missing or not hasattr(env.unwrapped, "compute_reward"):
        raise BadInput(f"{env_id} has no goals: HER needs observation, achieved_goal, desired_goal and compute_reward")
    if not isinstance(env.action_space, gym.spaces.Box):
        raise BadInput(f"{env_id} has actions of type {type(env.action_space).__name__}; DDPG needs a Box")
    if hasattr(env.unwrapped, "_model_names") and "Fetch" in type(env.unwrapped).__name__:
        # Each Fetch step reads the state of all joints by name and keeps the last two: look up those alone.
        names = env.unwrapped._model_names
        names._joint_names = [name for name in names.joint_names if name.startswith("robot")][-2:]
    return env


def describe(env, args):
    """Shapes of the observations, which of them the policy sees, and the sizes of the actor network.

    An environment whose policy is to see other than its critic offers `actor_observation` (App. A, Sec. 4.6).
    """
    if env.spec.id != args.env_id:
        print(f"{args.env_id} is not registered (any more): running {env.spec.id}", file=sys.stderr)
    dims = {key: space.shape for key, space in env.observation_space.spaces.items()}
    if any(len(shape) != 1 for shape in dims.values()):
        raise BadInput(f"{args.env_id} has observations that are not vectors: {dims}")
    actor_key = "actor_observation" if "actor_observation" in dims else "observation"
    sizes = [*dims[actor_key], *dims["desired_goal"], 0, *env.action_space.shape]
    return dims, actor_key, [*sizes, args.hidden_size, args.num_layers, args.input_scale]


def vectorized(goal_function, achieved, desired):
    """Wrap `compute_reward` or `compute_terminated` so that it takes batches of goals, (n, goal_dim) -> (n,).

    One call for the whole batch where that gives what row after row gives on the trial rows, else row after row.
    """

    def at_once(achieved, desired, info):
        return np.broadcast_to(np.float32(goal_function(achieved, desired, info)), len(achieved)).copy()

    def by_row(achieved, desired, info):
        rows = range(len(achieved))
        values = [goal_function(achieved[i], desired[i], {key: info[key][i] for key in info}) for i in rows]
        return np.array(values, np.float32)

    trial = np.stack([achieved, desired, achieved, desired]), np.stack([desired, desired, desired, achieved])
    trial += ({"previous_achieved_goal": trial[0]},)
    try:
        return at_once if np.allclose(at_once(*trial), by_row(*trial)) else by_row
    except Exception:
        return by_row


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
        variance = squares / count - (total / count).square()
        self.mean.copy_(total / count)
        self.std.copy_(variance.clamp(min=1e-4).sqrt())  # at least 0.01, so that nearly constant inputs stay small


class MLP(nn.Module):
    """Actor: (s, g) -> inputs of its tanh, (n, action_dim). Critic: (s, g, action) -> Q, (n, 1)."""

    def __init__(self, obs_dim, goal_dim, action_dim, out_dim, hidden_size, num_layers, input_scale):
        super().__init__()
        self.input = NetworkInput(obs_dim, goal_dim, input_scale)
        sizes = [self.input.dim + action_dim] + [hidden_size] * num_layers
        hidden = [layer for i, o in zip(sizes, sizes[1:]) for layer in (nn.Linear(i, o), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(hidden_size, out_dim))

    def forward(self, obs, achieved_goal, desired_goal, *action):
        return self.layers(torch.cat([self.input(obs, achieved_goal, desired_goal), *action], -1))


# ------------------------------------------------------------------------------------------------------- simulation
def play_episodes(envs, actor, seeds, exploration=None):
    """Play one episode in each environment, all in step. Returns a dict of float32 arrays for each episode.

    `exploration`: None for the policy itself, or (noise, random_action) as in App. A, exploration.
    Everything random follows from `seeds`, one for each environment, so that workers carry no state.
    """
    rng = np.random.default_rng(seeds)
    low, high = envs[0].action_space.low, envs[0].action_space.high
    episodes = [{key: [] for key in ("action", "reward", "terminated", "success")} for _ in envs]
    for env, seed, episode in zip(envs, seeds, episodes):
        episode.update({key: [value] for key, value in env.reset(seed=seed)[0].items()})
    obs_key = "actor_observation" if "actor_observation" in episodes[0] else "observation"  # App. A, Sec. 4.6
    playing = range(len(envs))
    while playing:
        keys = (obs_key, "achieved_goal", "desired_goal")
        state = [torch.from_numpy(np.array([episodes[i][key][-1] for i in playing], np.float32)) for key in keys]
        with torch.no_grad():
            action = torch.tanh(actor(*state)).numpy()
        if exploration is not None:
            noise, random_action = exploration
            action = np.clip(action + noise * rng.standard_normal(action.shape, np.float32), -1, 1)
            uniform = rng.uniform(-1, 1, action.shape).astype(np.float32)
            action = np.where(rng.random((len(action), 1)) < random_action, uniform, action)
        if not np.isfinite(action).all():  # the simulator would only warn
            raise RunFailed("the policy gave an action that is not a number; lower --learning-rate")
        ended = set()
        for i, a in zip(playing, action):
            next_obs, reward, terminated, truncated, info = envs[i].step(low + (a + 1) / 2 * (high - low))
            success = info.get("is_success", info.get("success"))
            if success is None:  # an environment that does not say: as rewarding as the goal itself
                goal = next_obs["desired_goal"]
                success = reward >= envs[i].unwrapped.compute_reward(goal, goal, info)
            step = dict(next_obs, action=a, reward=reward, terminated=terminated, success=success)
            for key, value in step.items():
                episodes[i][key].append(value)
            if terminated or truncated:
                ended.add(i)
        playing = [i for i in playing if i not in ended]
    return [{key: np.asarray(values, np.float32) for key, values in episode.items()} for episode in episodes]


def worker(connection, env_id, env_module, num_envs, actor_sizes):
    """A process that plays the episodes it is asked for; training and evaluation have environments of their own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the learner, which then lets us go
    torch.set_num_threads(1)
    actor = MLP(*actor_sizes)
    pools = {}
    with contextlib.suppress(EOFError, OSError):  # the learner is gone
        while True:
            pool, state, seeds, exploration = connection.recv()
            try:
                envs = pools.setdefault(pool, [])
                envs += [make_env(env_id, env_module) for _ in range(min(num_envs, len(seeds)) - len(envs))]
                actor.load_state_dict({key: torch.from_numpy(value) for key, value in state.items()})
                episodes = []
                for i in range(0, len(seeds), num_envs):
                    part = seeds[i : i + num_envs]
                    episodes += play_episodes(envs[: len(part)], actor, part, exploration)
                connection.send(episodes)
            except Exception as e:
                connection.send(e if isinstance(e, (BadInput, RunFailed)) else RunFailed(f"{type(e).__name__}: {e}"))


class Simulators:
    """`num_workers` processes that play episodes while the caller goes on: `start` some, `finish` to have them."""

    def __init__(self, args, actor_sizes):
        context = multiprocessing.get_context("spawn")
        self.connections, self.asked, self.done = [], [], {}
        for _ in range(args.num_workers):
            ours, theirs = context.Pipe()
            share = math.ceil(args.num_envs / args.num_workers)
            job = (theirs, args.env_id, args.env_module, share, actor_sizes)
            context.Process(target=worker, args=job, daemon=True).start()
            theirs.close()
            self.connections.append(ours)

    def start(self, pool, actor_state, seeds, exploration=None):
        """Ask for one episode for each seed in the environments of `pool`, with the actor of that state dict."""
        actor_state = {key: value.cpu().numpy() for key, value in actor_state.items()}
        for i, connection in enumerate(self.connections):
            connection.send((pool, actor_state, seeds[i :: len(self.connections)], exploration))
        self.asked.append(pool)

    def finish(self, pool):
        """The episodes last asked of `pool`. Raises what went wrong in a worker."""
        while pool not in self.done:
            try:
                results = [connection.recv() for connection in self.connections]
            except (EOFError, OSError) as e:
                raise RunFailed("a worker process died; was it out of memory?") from e
            for result in results:
                if isinstance(result, Exception):
                    raise result
            self.done[self.asked.pop(0)] = [episode for result in results for episode in result]
        return self.done.pop(pool)


# ALGO LOGIC: replay and hindsight ----------------------------------------------------------------------------------
class ReplayBuffer:
    """Ring of transitions. A step is known by its number since the start, `row = step % capacity`; all episodes are
    whole: when the ring overwrites the first steps of an episode, the rest of it is forgotten too."""

    def __init__(self, capacity, dims):
        need = capacity * (4 * sum(math.prod(dim) for dim in dims.values()) + 16) / 2**30
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        if need > have:
            raise BadInput(f"--buffer-size {capacity} takes {need:.1f} GiB, this machine has {have:.1f} GiB")
        self.capacity, self.first, self.end = capacity, 0, 0  # steps first .. end - 1 are stored
        self.data = {key: np.zeros((capacity, *dim), np.float32) for key, dim in dims.items()}
        self.episode_start, self.episode_end = np.zeros((2, capacity), np.int64)

    def add(self, episode):
        """Store an episode of T steps; the observations and achieved goals have T + 1 rows, the first before step 0."""
        length = len(episode["action"])
        if length > self.capacity:
            raise BadInput(f"an episode of {length} steps does not fit into --buffer-size {self.capacity}")
        while self.end + length - self.first > self.capacity:
            self.first = int(self.episode_end[self.first % self.capacity])
        rows = np.arange(self.end, self.end + length) % self.capacity
        for key, array in self.data.items():
            if key.startswith("next_"):
                array[rows] = episode[key.removeprefix("next_")][1:]
            else:
                array[rows] = episode[key][:length]
        self.episode_start[rows], self.episode_end[rows] = self.end, self.end + length
        self.end += length

    def hindsight_steps(self, strategy, steps, rng):
        """The steps whose outcome becomes the goal of each of `steps` (Sec. 4.5)."""
        rows = steps % self.capacity
        if strategy == "future":  # the step itself counts: its outcome is achieved at t + 1
            return rng.integers(steps, self.episode_end[rows])
        if strategy == "final":
            return self.episode_end[rows] - 1
        if strategy == "episode":
            return rng.integers(self.episode_start[rows], self.episode_end[rows])
        if strategy == "random":
            return rng.integers(self.first, self.end, len(steps))
        return steps  # none: nobody asks for them

    def sample(self, args, compute_reward, rng):
        """A minibatch (dict of arrays) with the goals of k / (k + 1) of it replaced, and which those are.

        To relabel while sampling is the same as to store k relabelled copies of each transition (Algorithm 1).
        """
        steps = rng.integers(self.first, self.end, args.batch_size)
        strategy = args.strategy if args.k else "none"
        k = 0 if strategy == "none" else args.k
        draw = rng.random(args.batch_size) * (k + 1)
        hindsight, past = draw < k, draw < k * args.past_goals
        outcomes = self.hindsight_steps(strategy, steps, rng)
        again = np.flatnonzero(hindsight & ~past)
        for _ in range(args.redraws):
            if len(again) == 0:
                break
            before = self.data["achieved_goal"][steps[again] % self.capacity]
            goal = self.data["next_achieved_goal"][outcomes[again] % self.capacity]
            info = {"previous_achieved_goal": before}
            again = again[compute_reward(before, goal, info) >= compute_reward(goal, goal, info)]
            steps[again] = rng.integers(self.first, self.end, len(again))
            outcomes[again] = self.hindsight_steps(strategy, steps[again], rng)
        batch = {key: array[steps % self.capacity] for key, array in self.data.items()}
        others = rng.integers(self.first, self.end, args.batch_size)
        batch["desired_goal"][hindsight] = self.data["next_achieved_goal"][outcomes[hindsight] % self.capacity]
        batch["desired_goal"][past] = self.data["desired_goal"][others[past] % self.capacity]
        return batch, hindsight

    def state_dict(self):
        used = slice(min(self.end, self.capacity))
        arrays = dict(self.data, episode_start=self.episode_start, episode_end=self.episode_end)
        return {"first": self.first, "end": self.end} | {k: torch.from_numpy(a[used]) for k, a in arrays.items()}

    def load_state_dict(self, state):
        self.first, self.end = state["first"], state["end"]
        for key, array in dict(self.data, episode_start=self.episode_start, episode_end=self.episode_end).items():
            array[: len(state[key])] = state[key].numpy()


class CountBonus:
    """Bonus alpha / sqrt(N) for the object being where it seldom was relative to its target (baseline of Sec. 4.2)."""

    def __init__(self, alpha, cell, goal_dim, size=2**20):
        self.alpha, self.cell = alpha, cell
        self.visits = np.zeros(size, np.int64)  # a hash table: of a million entries two cells seldom share one
        self.multipliers = np.random.default_rng(0).integers(1, 2**31, goal_dim)

    def index(self, achieved, desired):
        return np.floor((achieved - desired) / self.cell).astype(np.int64) @ self.multipliers % len(self.visits)

    def add(self, achieved, desired):
        np.add.at(self.visits, self.index(achieved, desired), 1)

    def __call__(self, achieved, desired):
        return self.alpha / np.sqrt(np.maximum(self.visits[self.index(achieved, desired)], 1)).astype(np.float32)


# ------------------------------------------------------------------------------------------------------------- files
FORMAT = "her_ddpg_fetch 1"


def save(path, content):
    """Write to a temporary name, then rename: `path` is always whole, the earlier one or the new one."""
    try:
        torch.save(content, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
    except (OSError, RuntimeError) as e:
        with contextlib.suppress(OSError):
            os.remove(f"{path}.tmp")
        raise RunFailed(f"cannot write {path} (disk full?), an earlier one is kept: {str(e).splitlines()[0]}") from e


def load(path):
    """Read a checkpoint.pt or model.pt: tensors and plain values, onto the CPU."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["format"] == FORMAT:
            content["args"] = Args(**content["args"] | {"resume": None, "evaluate": None})
            return content
    except OSError as e:
        raise BadInput(f"cannot read {path}: {e.strerror}") from e
    except Exception:
        pass
    raise BadInput(f"{path} is not a whole checkpoint.pt or model.pt of her_ddpg_fetch.py")


def load_modules(modules, saved):
    try:
        for name, module in modules.items():
            module.load_state_dict(saved[name])
    except (KeyError, RuntimeError, ValueError) as e:
        reason = str(e).splitlines()[-1].strip()
        raise BadInput(f"what was saved does not fit this environment and these network sizes: {reason}") from e


def rank_file(path, rank):
    """Each rank of torchrun has a checkpoint of its own: checkpoint.pt, checkpoint-rank1.pt, ..."""
    return path if rank == 0 else path.replace(".pt", f"-rank{rank}.pt")


def new_run_folder(args):
    """Make the run's folder and write args.json: arguments, versions, machine and commit."""
    name = f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{int(time.time())}"
    path = os.path.join(args.run_dir, name)
    try:
        os.makedirs(path)
    except FileExistsError:  # another run has this second's name
        time.sleep(0.2)
        return new_run_folder(args)
    except OSError as e:
        raise BadInput(f"cannot make {path}: {e.strerror}; choose another --run-dir") from e
    packages = ("torch", "numpy", "gymnasium", "gymnasium-robotics", "mujoco")
    installed = {each.name.lower(): each.version for each in importlib.metadata.distributions()}
    commit = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "rev-parse", "HEAD"]
    about = {
        "args": dataclasses.asdict(args),
        "versions": {"python": platform.python_version()} | {name: installed.get(name) for name in packages},
        "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
        "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip() if shutil.which("git") else "",
    }
    with open(f"{path}/args.json", "w") as file:
        json.dump(about, file, indent=2)
    return path


def open_writer(args, run):
    from torch.utils.tensorboard import SummaryWriter

    if args.track:
        import wandb

        names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": os.path.basename(run)}
        wandb.init(**names, config=vars(args), sync_tensorboard=True, dir=run)
    writer = SummaryWriter(run)
    rows = "\n".join(f"|{key}|{value}|" for key, value in vars(args).items())
    writer.add_text("hyperparameters", f"|argument|value|\n|-|-|\n{rows}")
    return writer


# ---------------------------------------------------------------------------------------------------------- training
TRAINING, EVALUATION, REPLAY = range(3)  # each use of random numbers has streams of its own


@dataclass
class Progress:
    """What changes as training goes on, besides networks, optimizers and replay; saved in checkpoints.

    No random generator is among it: all randomness follows from (seed, purpose, rank, cycle).
    """

    acting: dict  # state dict of the actor that plays the coming cycle
    global_step: int = 0  # environment steps of all ranks
    cycle: int = 0
    updates: int = 0
    wall_s: float = 0.0
    train_s: float = 0.0  # without evaluations
    reward_range: list = field(default_factory=lambda: [0.0, 0.0])  # lowest and highest reward seen
    metrics: dict = field(default_factory=dict)  # of the last evaluation
    eval_rows: list = field(default_factory=list)  # eval.csv


def frozen(module):
    """A copy of the module's state on the CPU, which later updates leave alone."""
    return {key: value.detach().cpu().clone() for key, value in module.state_dict().items()}


def episode_seeds(args, purpose, n, rank=0, cycle=0):
    return np.random.SeedSequence([args.seed, purpose, rank, cycle]).generate_state(n).tolist()


def average_gradients(parameters):
    """Mean of the gradients over torchrun's ranks, so that all take the same step (App. A averages parameters)."""
    if dist.is_initialized():
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        dist.all_reduce(flat)
        parts = flat.div_(dist.get_world_size()).split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts):
            parameter.grad.copy_(part.view_as(parameter))


def td_target(reward, terminated, next_q, gamma, reward_range):
    """r + gamma Q'(s', g, pi'(s', g)), clipped to the returns that rewards in this range can add up to (App. A).

    The last step before the time limit bootstraps like any other; only a termination does not.
    """
    low, high = (bound / (1 - gamma) for bound in reward_range)
    return (reward + gamma * (1 - terminated) * next_q).clamp(low, high)


def summarize(episodes):
    """Means over episodes: success at the last step (the Fetch measure), return, success at any, object moved 1 cm."""
    of_each = {
        "success_rate": [e["success"][-1] for e in episodes],
        "episodic_return": [e["reward"].sum() for e in episodes],
        "success_any_rate": [e["success"].max() for e in episodes],
        "moved_fraction": [np.abs(e["achieved_goal"] - e["achieved_goal"][0]).max() > 0.01 for e in episodes],
    }
    return {key: float(np.mean(values, dtype=np.float64)) for key, values in of_each.items()}


def film(args, actor, folder, name):
    """Record the first evaluation episode as folder/name-episode-0.mp4."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen
    try:
        env = make_env(args.env_id, args.env_module, render_mode="rgb_array")
        with warnings.catch_warnings(action="ignore"):  # the folder may hold earlier films
            env = gym.wrappers.RecordVideo(env, folder, lambda episode: True, name_prefix=name, disable_logger=True)
        play_episodes([env], copy.deepcopy(actor).cpu(), episode_seeds(args, EVALUATION, 1))
        env.close()
    except Exception as e:
        raise BadInput(f"--capture-video does not work here: {e}") from e


def train(args, saved):
    """Train from the start or on from the content of a checkpoint; returns the exit status."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if args.cuda and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.set_num_threads(args.num_threads)
    torch.set_flush_denormal(True)  # Adam's averages of units that died shrink for ever, and tiny numbers are slow
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic kernels need on a GPU
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.manual_seed(args.seed)

    env = make_env(args.env_id, args.env_module)
    dims, actor_key, actor_sizes = describe(env, args)
    first_obs, _ = env.reset(seed=args.seed)
    goals = first_obs["achieved_goal"], first_obs["desired_goal"]
    compute_reward = vectorized(env.unwrapped.compute_reward, *goals)
    compute_terminated = None
    if hasattr(env.unwrapped, "compute_terminated"):
        compute_terminated = vectorized(env.unwrapped.compute_terminated, *goals)

    # ALGO LOGIC: replay, networks, optimizers
    next_keys = {f"next_{key}": dims[key] for key in ("achieved_goal", "observation", actor_key)}
    rb = ReplayBuffer(args.buffer_size, dims | next_keys | {"action": env.action_space.shape, "terminated": ()})
    bonus = CountBonus(args.count_bonus, args.count_cell, *dims["desired_goal"]) if args.count_bonus else None
    actor = MLP(*actor_sizes).to(device)
    sizes = [*dims["observation"], *dims["desired_goal"], *env.action_space.shape, 1]
    qf = MLP(*sizes, args.hidden_size, args.num_layers, args.input_scale).to(device)
    actor_target, qf_target = copy.deepcopy(actor), copy.deepcopy(qf)
    actor_target.input, qf_target.input = actor.input, qf.input
    actor_parameters, qf_parameters = list(actor.parameters()), list(qf.parameters())
    target_parameters = [*actor_target.parameters(), *qf_target.parameters()]
    actor_optimizer = torch.optim.Adam(actor_parameters, lr=args.learning_rate, fused=True)
    qf_optimizer = torch.optim.Adam(qf_parameters, lr=args.learning_rate, fused=True)
    modules = {"actor": actor, "qf": qf, "actor_target": actor_target, "qf_target": qf_target}
    modules |= {"actor_optimizer": actor_optimizer, "qf_optimizer": qf_optimizer}

    progress = Progress(acting=frozen(actor))
    if saved:
        if "replay" not in saved:
            raise BadInput(f"{args.resume} is a policy alone: --resume needs a checkpoint.pt")
        if args.buffer_size != saved["args"].buffer_size:
            raise BadInput("--buffer-size cannot change on --resume: leave it out")
        load_modules(modules, saved)
        for group in actor_optimizer.param_groups + qf_optimizer.param_groups:
            group["lr"] = args.learning_rate  # not that of the saved optimizer
        rb.load_state_dict(saved["replay"])
        progress = Progress(**saved["progress"])
        if bonus:
            bonus.visits[:] = saved["visits"].numpy()

    # Under torchrun each rank has its own environments and replay; parameters and input statistics stay the same.
    simulators = Simulators(args, actor_sizes)
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    run = new_run_folder(args) if rank == 0 else None
    if world_size > 1:
        shared = [run]
        dist.broadcast_object_list(shared)
        run = shared[0]
    if rank == 0:
        writer = open_writer(args, run)
        eval_file = open(f"{run}/eval.csv", "w", newline="")
        eval_csv = csv.writer(eval_file)
        eval_csv.writerow(["seed", "global_step", "metric", "value", "n_episodes", "wall_s"])
        eval_csv.writerows(progress.eval_rows)
    signals = []  # Ctrl-C or SIGTERM: end the cycle, save, stop; a second one stops at once
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _: (signals.append(signum), signal.signal(signum, signal.SIG_DFL)))
    started = time.time() - progress.wall_s

    def start_cycle():
        seeds = episode_seeds(args, TRAINING, args.num_envs, rank, progress.cycle)
        simulators.start(TRAINING, progress.acting, seeds, (args.exploration_noise, args.random_action))

    def evaluate_policy(step):
        """The target network plays (App. A), without noise, tasks that training does not see."""
        simulators.start(EVALUATION, frozen(actor_target), episode_seeds(args, EVALUATION, args.eval_episodes))
        progress.metrics = summarize(simulators.finish(EVALUATION))
        wall_s = round(time.time() - started, 3)
        for key, value in progress.metrics.items():
            progress.eval_rows.append([args.seed, step, f"eval/{key}", value, args.eval_episodes, wall_s])
            eval_csv.writerow(progress.eval_rows[-1])
            writer.add_scalar(f"eval/{key}", value, step)
        eval_file.flush()
        if args.capture_video:
            film(args, actor_target, f"{run}/videos", f"step-{step}")

    def policy_file():
        content = {"format": FORMAT, "args": dataclasses.asdict(args), "global_step": progress.global_step}
        return content | {"actor_target": frozen(actor_target)}

    if rank == 0 and not progress.eval_rows:
        evaluate_policy(0)
    start_cycle()
    stop = 0
    while progress.global_step < args.total_timesteps and not stop:
        # ALGO LOGIC: play one episode in each environment (Algorithm 1), a cycle
        cycle_started = time.time()
        episodes = simulators.finish(TRAINING)
        progress.cycle += 1
        if args.overlap:  # the simulators go on with the policy as it is now, while it is improved below
            progress.acting = frozen(actor)
            start_cycle()

        # ALGO LOGIC: store the episodes, with their own goals; hindsight comes when they are sampled
        for episode in episodes:
            rb.add(episode)
            achieved = episode["achieved_goal"]
            if bonus:
                bonus.add(achieved[1:], episode["desired_goal"][1:])
            for network, key in ((actor, actor_key), (qf, "observation")):  # scaling: own and hindsight goals
                for goal in (episode["desired_goal"], np.broadcast_to(achieved[-1], achieved.shape)):
                    network.input.update(episode[key], achieved, goal)
        tally = torch.tensor([sum(len(episode["action"]) for episode in episodes), len(signals)])
        if world_size > 1:
            tally = tally.to(device)
            dist.all_reduce(tally)
        steps, stop = tally.tolist()
        progress.global_step += steps

        # ALGO LOGIC: learn from minibatches with hindsight goals
        rng = np.random.default_rng([args.seed, REPLAY, rank, progress.cycle])
        due = progress.global_step // (args.train_frequency * world_size)
        relabelled = zero_rewards = 0
        for update in range(progress.updates + 1, due + 1):
            batch, hindsight = rb.sample(args, compute_reward, rng)
            goals = batch["next_achieved_goal"], batch["desired_goal"]
            info = {"previous_achieved_goal": batch["achieved_goal"]}
            batch["reward"] = compute_reward(*goals, info)  # of the state after the step (Algorithm 1)
            if compute_terminated:
                batch["terminated"] = compute_terminated(*goals, info)
            relabelled += hindsight.sum()
            zero_rewards += (batch["reward"][hindsight] == 0).sum()
            if bonus:
                batch["reward"] = batch["reward"] + bonus(*goals)
            low, high = progress.reward_range
            progress.reward_range = [min(low, float(batch["reward"].min())), max(high, float(batch["reward"].max()))]
            data = {key: torch.from_numpy(value).to(device) for key, value in batch.items()}
            goals, next_goals = ([data[f"{n}achieved_goal"], data["desired_goal"]] for n in ("", "next_"))

            with torch.no_grad():
                next_action = torch.tanh(actor_target(data[f"next_{actor_key}"], *next_goals))
                next_q = qf_target(data["next_observation"], *next_goals, next_action).flatten()
                target = td_target(data["reward"], data["terminated"], next_q, args.gamma, progress.reward_range)
            qf_values = qf(data["observation"], *goals, data["action"]).flatten()
            qf_loss = F.mse_loss(qf_values, target)
            qf_optimizer.zero_grad()
            qf_loss.backward()
            average_gradients(qf_parameters)
            qf_optimizer.step()

            preactivation = actor(data[actor_key], *goals)
            penalty = preactivation.square().mean()  # keeps the tanh from saturating (App. A, network architecture)
            actor_q = qf(data["observation"], *goals, torch.tanh(preactivation)).mean()
            actor_loss = args.action_penalty * penalty - actor_q
            for parameter, gradient in zip(actor_parameters, torch.autograd.grad(actor_loss, actor_parameters)):
                parameter.grad = gradient
            average_gradients(actor_parameters)
            actor_optimizer.step()

            if update % args.target_network_frequency == 0:
                with torch.no_grad():
                    torch._foreach_lerp_(target_parameters, actor_parameters + qf_parameters, args.tau)
        updated, progress.updates = due - progress.updates, due
        if not args.overlap:
            progress.acting = frozen(actor)
            start_cycle()

        # Record: TensorBoard, evaluation, checkpoint, terminal
        if updated and not math.isfinite(qf_loss.item() + actor_loss.item()):
            raise RunFailed(f"a loss is not a number at step {progress.global_step}; lower --learning-rate")
        progress.train_s += time.time() - cycle_started
        sps = progress.global_step / progress.train_s
        done = progress.global_step >= args.total_timesteps
        if rank == 0:
            scalars = {f"charts/{key}": value for key, value in summarize(episodes).items()}
            scalars |= {"charts/SPS": sps, "charts/buffer_size": rb.end - rb.first}
            if updated:
                scalars |= {"losses/qf1_loss": qf_loss.item(), "losses/qf1_values": qf_values.mean().item()}
                scalars |= {"losses/actor_loss": actor_loss.item(), "losses/preactivation_penalty": penalty.item()}
                scalars["charts/relabel_fraction"] = relabelled / (updated * args.batch_size)
                scalars["charts/zero_reward_fraction"] = zero_rewards / max(1, relabelled)
            for key, value in scalars.items():
                writer.add_scalar(key, value, progress.global_step)
            grid_step = progress.global_step - progress.global_step % args.eval_frequency
            if done or grid_step > progress.global_step - steps:
                evaluate_policy(args.total_timesteps if done else grid_step)
            if sys.stderr.isatty() and not args.quiet:
                left = max(0, args.total_timesteps - progress.global_step) / sps / 60
                line = f"step {progress.global_step} of {args.total_timesteps}, {sps:.0f} steps/s, {left:.0f} min left"
                end = "\n" if done or stop else ""
                print(f"\r{line}, success {progress.metrics['success_rate']:.2f} ", end=end, file=sys.stderr)
        crossed = args.checkpoint_frequency and progress.global_step % args.checkpoint_frequency < steps
        if done or stop or crossed:
            progress.wall_s = time.time() - started
            content = policy_file() | {"progress": dataclasses.asdict(progress), "replay": rb.state_dict()}
            content |= {name: module.state_dict() for name, module in modules.items()}
            content |= {"visits": torch.from_numpy(bonus.visits)} if bonus else {}
            save(rank_file(f"{run}/checkpoint.pt", rank), content)

    if rank == 0:
        if args.save_model:
            save(f"{run}/model.pt", policy_file())
        sps = progress.global_step / max(progress.train_s, 1e-9)  # a run resumed at its end plays no cycle
        report(run, args, progress.global_step, time.time() - started, sps, progress.metrics)
        writer.close()
    return 130 if stop else 0


def report(run, args, global_step, wall_s, sps, metrics):
    """The last line on standard output, for programs; people read what is on standard error."""
    line = {"run": run, "env_id": args.env_id, "seed": args.seed, "global_step": global_step}
    line |= {"wall_s": round(wall_s, 3), "sps": round(sps, 1)} | metrics | {"n_episodes": args.eval_episodes}
    print(json.dumps(line), flush=True)


def evaluate(args, saved):
    """Play a saved policy and print its success with Wilson's 95% interval; returns the exit status."""
    started = time.time()
    env = make_env(args.env_id, args.env_module)
    _, _, actor_sizes = describe(env, args)
    actor = MLP(*actor_sizes)
    load_modules({"actor_target": actor}, saved)
    simulators = Simulators(args, actor_sizes)
    simulators.start(EVALUATION, actor.state_dict(), episode_seeds(args, EVALUATION, args.eval_episodes))
    episodes = simulators.finish(EVALUATION)
    metrics = summarize(episodes)
    n, p, z2 = args.eval_episodes, metrics["success_rate"], 1.959964**2
    middle, half = (p + z2 / 2 / n) / (1 + z2 / n), math.sqrt(z2 * (p * (1 - p) / n + z2 / 4 / n**2)) / (1 + z2 / n)
    print(f"success {p:.3f}, 95% interval [{middle - half:.3f}, {middle + half:.3f}], {n} episodes", file=sys.stderr)
    if args.capture_video:
        film(args, actor, f"{new_run_folder(args)}/videos", "evaluate")
    wall_s, steps = time.time() - started, sum(len(episode["action"]) for episode in episodes)
    report(args.evaluate, args, saved["global_step"], wall_s, steps / wall_s, metrics)
    return 0


def check(args):
    """Refuse what cannot work before anything is written."""
    counts = "num_threads total_timesteps eval_frequency eval_episodes num_envs num_workers buffer_size batch_size"
    counts += " train_frequency target_network_frequency hidden_size num_layers"
    amounts = "seed checkpoint_frequency learning_rate k redraws action_penalty exploration_noise"
    amounts += " input_scale count_bonus"
    shares = "gamma past_goals tau random_action"
    for names, low, high in ((counts, 1, math.inf), (amounts, 0, math.inf), (shares, 0, 1)):
        for name in names.split():
            if not low <= getattr(args, name) <= high:
                bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
                raise BadInput(f"--{name.replace('_', '-')} must be {bounds}, not {getattr(args, name)}")
    if args.gamma == 1:
        raise BadInput("--gamma must be below 1, targets are clipped to 1 / (1 - gamma) rewards")
    if args.count_cell <= 0:
        raise BadInput(f"--count-cell must be above 0, not {args.count_cell}")
    if args.num_workers > args.num_envs:
        raise BadInput(f"--num-workers {args.num_workers} is more than --num-envs {args.num_envs}: some would be idle")
    if args.batch_size > args.buffer_size:
        raise BadInput(f"--batch-size {args.batch_size} is more than --buffer-size {args.buffer_size} holds")
    if args.track and importlib.util.find_spec("wandb") is None:
        raise BadInput("--track needs Weights & Biases: pip install wandb")


def main():
    try:
        args = tyro.cli(Args, description=__doc__)
        if args.resume and args.evaluate:
            raise BadInput("--resume continues a training, --evaluate plays a policy: give one of them")
        saved = None
        if path := args.resume or args.evaluate:
            saved = load(rank_file(path, int(os.environ.get("RANK", 0))))
            args = tyro.cli(Args, description=__doc__, default=saved["args"])
        check(args)
        status = evaluate(args, saved) if args.evaluate else train(args, saved)
    except BadInput as e:
        print(f"error: {e}", file=sys.stderr)
        status = 2
    except (RunFailed, OSError) as e:
        print(f"failed: {e}", file=sys.stderr)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
