"""PEARL + Hindsight Task Relabelling (HTR) with single episode relabelling: meta-RL from sparse reward alone.

Packer et al., "Hindsight Task Relabelling", NeurIPS 2021, on top of Rakelly et al., "PEARL", ICML 2019. Try:

  python pearl_htr_ser.py --goal-distance 1 --horizon 20
  python pearl_htr_ser.py --goal-distance 1 --horizon 20 --relabel-prob 0
"""

import contextlib
import copy
import csv
import dataclasses
import difflib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
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
import torch.nn as nn
import torch.nn.functional as F
import tyro

from envs.goal_tasks import TEST, TRAIN, task_goals


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """name of the experiment, a part of the run's name"""
    seed: int = 1
    """seed of networks, exploration, tasks and replay; test tasks are drawn apart from training tasks"""
    torch_deterministic: bool = True
    """deterministic torch kernels only (`--no-torch-deterministic` allows others)"""
    cuda: bool = True
    """learn on a GPU if there is one, else on the CPU (`--no-cuda`: always on the CPU)"""
    num_threads: int = 1
    """torch threads; 1 is best for small networks on a shared CPU"""
    track: bool = False
    """log to Weights & Biases too (needs `pip install wandb`)"""
    wandb_project_name: str = "hindsight"
    """W&B project"""
    wandb_entity: Optional[str] = None
    """W&B team or user; None: your default one"""
    capture_video: bool = False
    """film the last adaptation episode of one test task at each evaluation (needs `pip install moviepy`)"""
    save_model: bool = False
    """write encoder and policy to model.pt"""
    quiet: bool = False
    """no progress on the terminal"""
    run_dir: str = "runs"
    """folder that gets one new folder a run"""
    resume: Optional[str] = None
    """checkpoint.pt to continue from; its arguments hold wherever the command line gives no others"""
    evaluate: Optional[str] = None
    """model.pt or checkpoint.pt to adapt to the test tasks instead of training"""
    checkpoint_frequency: int = 0
    """environment steps between checkpoints; 0: only at the end, on Ctrl-C and on SIGTERM"""

    env_id: str = "PointGoal-v0"
    """Gymnasium id of a batched goal task of envs/goal_tasks.py: PointGoal-v0, WheeledGoal-v0 or AntGoal-v0"""
    total_timesteps: int = 2_400_000
    """environment steps of training, all tasks counted"""
    eval_frequency: int = 120_000
    """environment steps between evaluations"""
    eval_episodes: int = 20
    """adaptation episodes with each test task"""

    goal_distance: float = 2.0
    """radius of the half circle of goals, in m"""
    goal_radius: Optional[float] = None
    """distance from the goal within which there is reward, in m; None: the task's own"""
    horizon: Optional[int] = None
    """steps of an episode; None: the task's own"""
    reward: Literal["sparse", "dense"] = "sparse"
    """reward of the RL batches; dense is the oracle of the paper, whose context is sparse all the same"""
    num_train_tasks: int = 100
    """training tasks (paper: 100)"""
    num_test_tasks: int = 100
    """test tasks (paper: 100)"""
    num_tasks_sample: int = 10
    """training tasks that collect in an iteration (PEARL: 10)"""
    initial_episodes: int = 5
    """episodes of each training task before training starts (PEARL: 200 steps)"""
    prior_episodes: int = 5
    """episodes of an iteration with z from the prior (PEARL: 100 steps)"""
    posterior_episodes: int = 15
    """episodes of an iteration with z from the posterior of the iteration's episodes so far (PEARL: 900 steps)"""
    exploration_episodes: int = 5
    """adaptation episodes of a test with z from the prior, before the posterior takes over (PEARL: 5)"""
    gradient_steps: int = 200
    """updates of an iteration (PEARL: 1000)"""
    buffer_size: int = 20_000
    """transitions in the replay buffer of a task"""
    meta_batch_size: int = 64
    """tasks of an update (paper: 16); the encoder learns from the number of tasks more than from that of transitions"""
    batch_size: int = 16
    """transitions of a task in an update's RL batch (PEARL: 256)"""
    context_size: int = 64
    """transitions in a context, of an update and of a test (PEARL, in training: 1024)"""
    context: Literal["episode", "all"] = "episode"
    """where these come from: one episode with reward, in a test the best so far; or all recent ones (PEARL)"""
    prior: Literal["tasks", "normal"] = "tasks"
    """where z to explore with comes from: the posteriors of the training tasks that earned a reward, and N(0, I) for
    the others; or N(0, I) alone (PEARL)"""
    relabel_prob: float = 0.3
    """K, probability of a hindsight task for a slot of the meta-batch (Sec. 5; paper: 0.1 or 0.3); 0: plain PEARL"""
    relabel_per: Literal["slot", "update"] = "slot"
    """what K is drawn for: each slot of the meta-batch, or all of an update together"""

    # HTR: what single episode relabelling takes a hindsight task for
    relabel_scope: Literal["episode", "transition", "buffer", "context"] = "episode"
    """SER relabels an episode; the others are what the paper warns of: a task for each transition, a task for the whole
    buffer, or context from the episode but RL batch from the whole buffer"""

    hindsight: Literal["future", "final"] = "future"
    """state whose position becomes the hindsight task: one after a random transition of the episode, or the last"""
    relabel_anneal: int = 0
    """environment steps over which K goes to 0; 0: never"""
    relabel_unrewarded: bool = False
    """relabel only tasks that never earned a reward"""
    learning_rate: float = 1e-3
    """Adam's step size of all networks (paper: 3e-4)"""
    gamma: float = 0.95
    """discount factor (PEARL, sparse point with 20 steps: 0.9)"""
    tau: float = 0.005
    """step of the target value network towards the value network (PEARL: 0.005)"""
    reward_scale: float = 100.0
    """factor of rewards in the Q target, the inverse of SAC's temperature (PEARL, sparse point: 100)"""
    kl_lambda: float = 1.0
    """weight of the encoder's KL term (PEARL, sparse point: 1)"""
    kl_warmup: int = 3_000_000
    """environment steps over which that weight grows from 0, so that z comes to mean something first (PEARL: 0)"""
    latent_dim: int = 5
    """dimensions of z (paper: 5)"""
    hidden_size: int = 128
    """units in each of 3 hidden layers of policy, Q and V (paper: 300), and of the encoder (paper: 200)"""


class BadInput(Exception):
    """What the user gave cannot work; exit status 2."""


class RunFailed(Exception):
    """A run broke off; exit status 1."""


def make_envs(args, num_envs, mode="vector_entry_point", **kwargs):
    """`num_envs` episodes that advance in one call, see envs/goal_tasks.py; reward as in `args`."""
    kwargs |= {"goal_distance": args.goal_distance, "reward": args.reward}
    kwargs |= {key: getattr(args, key) for key in ("goal_radius", "horizon") if getattr(args, key) is not None}
    try:
        return gym.make_vec(args.env_id, num_envs, mode, **kwargs)
    except gym.error.UnregisteredEnv as e:
        close = ", ".join(difflib.get_close_matches(args.env_id, gym.registry, 3)) or "none is close"
        raise BadInput(f"unknown --env-id {args.env_id}; did you mean: {close}?") from e
    except (gym.error.Error, TypeError, ValueError) as e:
        raise BadInput(f"{args.env_id} is not a goal task of envs/goal_tasks.py: {e}") from e


# ALGO LOGIC: networks ------------------------------------------------------------------------------------------------
def mlp(in_dim, out_dim, hidden_size):
    sizes = [in_dim, hidden_size, hidden_size, hidden_size]
    hidden = [layer for i, o in zip(sizes, sizes[1:]) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(hidden_size, out_dim))


class Agent(nn.Module):
    """Context encoder q(z | c), policy pi(a | s, z), two Q(s, a, z), V(s, z) and its target."""

    def __init__(self, obs_dim, action_dim, args):
        super().__init__()
        h, z = args.hidden_size, args.latent_dim
        self.encoder = mlp(obs_dim + action_dim + 1, 2 * z, h)
        self.policy = mlp(obs_dim + z, 2 * action_dim, h)
        self.qf1, self.qf2 = mlp(obs_dim + action_dim + z, 1, h), mlp(obs_dim + action_dim + z, 1, h)
        self.vf = mlp(obs_dim + z, 1, h)
        self.vf_target = copy.deepcopy(self.vf).requires_grad_(False)
        self.register_buffer("prior_mean", torch.zeros(args.num_train_tasks, z))  # of z, for each training task
        self.register_buffer("prior_std", torch.ones(args.num_train_tasks, z))

    def posterior(self, context):
        """Mean and variance of z, (tasks, z), from context rows (s, a, r), (tasks, rows, dim).

        Each row gives a Gaussian, and q(z | c) is their product (PEARL, Sec. 4.1).
        """
        mean, raw_variance = self.encoder(context).chunk(2, -1)
        return product_of_gaussians(mean, F.softplus(raw_variance).clamp(min=1e-7))

    def draw_prior(self, n, generator):
        """n samples of z to explore with, (n, z): each is meant for a random training task."""
        task = (random((n,), generator) * len(self.prior_mean)).long()
        noise = torch.randn((n, self.prior_mean.shape[1]), generator=generator, device=generator.device)
        return self.prior_mean[task] + self.prior_std[task] * noise

    def q_values(self, obs, action, z):
        """Both Q of (..., dim) inputs, each (...)."""
        x = torch.cat([obs, action, z], -1)
        return self.qf1(x).squeeze(-1), self.qf2(x).squeeze(-1)

    def act(self, obs, z, deterministic=False, generator=None):
        """Actions in [-1, 1] and their log probability, mean and log deviation of the Gaussian inside the tanh."""
        mean, log_std = self.policy(torch.cat([obs, z], -1)).chunk(2, -1)
        log_std = log_std.clamp(-20, 2)
        if deterministic:
            return torch.tanh(mean), None, mean, log_std
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        x = mean + log_std.exp() * noise
        # log N(x) - log |d tanh(x) / dx|, with 1 - tanh^2 = 4 / (e^x + e^-x)^2 in a form that does not overflow
        log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_prob = (log_prob - 2 * (math.log(2) - x - F.softplus(-2 * x))).sum(-1)
        return torch.tanh(x), log_prob, mean, log_std


def product_of_gaussians(mean, variance):
    """Mean and variance of the normalised product over the rows of (tasks, rows, z)."""
    precision = 1 / variance
    variance = 1 / precision.sum(-2)
    return variance * (precision * mean).sum(-2), variance


def kl_to_prior(mean, variance):
    """KL(N(mean, variance) || N(0, I)), summed over z and tasks."""
    return 0.5 * (variance + mean.square() - 1 - variance.log()).sum()


def kl_weight(args, global_step):
    """Weight of the KL term: it grows from 0 to `--kl-lambda` over `--kl-warmup` environment steps."""
    return args.kl_lambda * (min(1.0, global_step / args.kl_warmup) if args.kl_warmup else 1.0)


def td_target(reward, next_v, reward_scale, gamma):
    """Target of Q; the end of an episode is a time limit, so that every target bootstraps."""
    return reward_scale * reward + gamma * next_v


# ALGO LOGIC: replay and hindsight ------------------------------------------------------------------------------------
class ReplayBuffer:
    """The episodes of all tasks, on the device of training; rewards are computed when transitions are sampled.

    An episode of task i is known by its number since the start, `row = episode % capacity`. Those from
    `context_start[i]` on are the recent ones, PEARL's encoder buffer: contexts with `--context all`, and of tasks whose
    goal was never met.
    """

    def __init__(self, num_tasks, capacity, horizon, obs_dim, action_dim, device):
        need = 4 * num_tasks * capacity * ((horizon + 1) * obs_dim + horizon * action_dim) / 2**30
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        if device.type == "cpu" and need > have:
            raise BadInput(f"--buffer-size takes {need:.1f} GiB for {num_tasks} tasks, this machine has {have:.1f} GiB")
        self.capacity, self.horizon = capacity, horizon
        self.obs = torch.zeros(num_tasks, capacity, horizon + 1, obs_dim, device=device)
        self.actions = torch.zeros(num_tasks, capacity, horizon, action_dim, device=device)
        self.met = torch.zeros(num_tasks, capacity, dtype=torch.bool, device=device)  # whether it met its task's goal
        self.end, self.context_start = torch.zeros(2, num_tasks, dtype=torch.long, device=device)

    def add(self, tasks, obs, actions, met):
        """An episode of each of these (different) tasks: obs (tasks, T + 1, dim), actions (tasks, T, dim), goal met."""
        rows = self.end[tasks] % self.capacity
        self.obs[tasks, rows], self.actions[tasks, rows], self.met[tasks, rows] = obs, actions, met
        self.end[tasks] += 1

    def transitions(self, tasks, episodes, steps):
        """obs, action and next obs, (slots, n, dim); tasks (slots, n) or (slots, 1), episodes and steps (slots, n)."""
        index = tasks, episodes % self.capacity
        return self.obs[(*index, steps)], self.actions[(*index, steps)], self.obs[(*index, steps + 1)]

    def draw_episodes(self, tasks, n, generator, recent=False):
        """n random episodes for each task, (tasks, n): of all that are stored, or of the recent ones."""
        end = self.end[tasks, None]
        first = (end - self.capacity).clamp(min=0)
        if recent:
            first = torch.maximum(first, self.context_start[tasks, None])
        return first + (random((len(tasks), n), generator) * (end - first)).long()

    def draw_met(self, tasks, generator):
        """A random episode that met the goal for each task, or a recent one if none did; and if so, (tasks, 1) each."""
        met = self.met[tasks]
        row = (met * random(met.shape, generator)).argmax(1, keepdim=True)
        found = met.any(1, keepdim=True)
        return torch.where(found, row, self.draw_episodes(tasks, 1, generator, recent=True)), found

    def draw_steps(self, shape, generator):
        return (random(shape, generator) * self.horizon).long()

    def state_dict(self):
        used = min(int(self.end.max()), self.capacity)
        # A view would be saved with all of the memory behind it.
        state = {key: getattr(self, key)[:, :used].clone() for key in ("obs", "actions", "met")}
        return {"end": self.end, "context_start": self.context_start} | state

    def load_state_dict(self, state):
        for key, value in state.items():
            array = getattr(self, key)
            (array[:, : value.shape[1]] if value.ndim > 1 else array).copy_(value)


def random(shape, generator):
    return torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)


def hindsight_goals(rb, tasks, episodes, strategy, generator):
    """Positions that these episodes, (tasks, n), achieved, (tasks, n, 2): the tasks that they solve in hindsight.

    `future`: the state after a random transition of the episode, at or after it as in HER; `final`: its last state.
    """
    steps = torch.full(episodes.shape, rb.horizon, device=episodes.device)
    if strategy == "future":
        anchor = rb.draw_steps(episodes.shape, generator)
        steps = anchor + 1 + (random(episodes.shape, generator) * (rb.horizon - anchor)).long()
    return rb.obs[tasks[:, None], episodes % rb.capacity, steps][..., :2]


def context_rows(obs, action, next_obs, goal, sparse_reward):
    """What the encoder sees of transitions: (s, a, r) with the sparse reward, (..., dim)."""
    return torch.cat([obs, action, sparse_reward(next_obs, action, goal)[..., None]], -1)


# HTR: single episode relabelling -------------------------------------------------------------------------------------
def sample(rb, tasks, goals, relabel, args, generator):
    """Context and RL transitions of a meta-batch, each (obs, action, next_obs, goal) with a goal for each transition.

    `goals` (tasks, 2) are the real ones, `relabel` (tasks,) says which slots get a hindsight task. In single episode
    relabelling, such a slot has all its transitions from one episode and a task that this episode achieved.
    """
    parts = []
    one_episode = rb.draw_episodes(tasks, 1, generator)
    hindsight_goal = hindsight_goals(rb, tasks, one_episode, args.hindsight, generator)
    relabel = relabel[:, None]
    for size, recent in ((args.context_size, True), (args.batch_size, False)):
        episodes = rb.draw_episodes(tasks, size, generator, recent)
        if recent and args.context == "episode":  # a real task's context is like a test's, see infer
            episodes = torch.where(relabel, episodes, rb.draw_met(tasks, generator)[0])
        if args.relabel_scope == "episode" or args.relabel_scope == "context" and recent:
            episodes = torch.where(relabel, one_episode, episodes)
        new_goal = hindsight_goal
        if args.relabel_scope == "transition":
            new_goal = hindsight_goals(rb, tasks, episodes, args.hindsight, generator)
        goal = torch.where(relabel[..., None], new_goal, goals[:, None]).expand(-1, size, -1)
        parts.append((*rb.transitions(tasks[:, None], episodes, rb.draw_steps(episodes.shape, generator)), goal))
    return parts


# ------------------------------------------------------------------------------------------------------- collection
def play_episodes(envs, agent, z, goals, seed, deterministic=False):
    """An episode with each task's z, (tasks, latent), and goal: obs (tasks, T + 1, dim), actions (tasks, T, dim)."""
    device = z.device
    generator = torch.Generator(device).manual_seed(seed)
    obs, _ = envs.reset(seed=seed, options={"goal": goals.cpu().numpy()})
    observations, actions, over = [torch.from_numpy(obs).to(device)], [], False
    while not over:
        with torch.no_grad():
            action = agent.act(observations[-1], z, deterministic, generator)[0]
        obs, _, _, truncated, _ = envs.step(action.cpu().numpy() * envs.single_action_space.high)
        over = truncated.all()
        observations.append(torch.from_numpy(obs).to(device))
        actions.append(action)
    return torch.stack(observations, 1), torch.stack(actions, 1)


def infer(agent, obs, actions, goals, task, args, generator):
    """A sample of z, (tasks, latent), from the posterior of episodes, obs (tasks, episodes, T + 1, dim).

    Its context is as in training, with `--context-size` random transitions, as the width of a product of Gaussians
    depends on their number. With `--context episode` they are of the best episode that met the goal, and as long as
    there is none, z is still from the prior.
    """
    rows = context_rows(obs[:, :, :-1], actions, obs[:, :, 1:], goals[:, None, None], task.sparse_reward)
    found = torch.ones(len(rows), 1, dtype=torch.bool, device=rows.device)
    if args.context == "episode":
        met = task.met(obs, goals)
        best = rows[..., -1].sum(-1).masked_fill(~met, -math.inf).argmax(1, keepdim=True)
        rows, found = rows[torch.arange(len(rows), device=rows.device)[:, None], best], met.any(1, keepdim=True)
    rows = rows.flatten(1, 2)
    index = (random((len(rows), args.context_size), generator) * rows.shape[1]).long()
    with torch.no_grad():
        mean, variance = agent.posterior(rows[torch.arange(len(rows), device=rows.device)[:, None], index])
    z = mean + variance.sqrt() * torch.randn(mean.shape, generator=generator, device=mean.device)
    return torch.where(found, z, agent.draw_prior(len(z), generator))


def set_prior(agent, rb, goals, task, args, generator):
    """Have the agent explore with the posterior of an episode that met the goal, of each training task that has one."""
    tasks = torch.arange(len(goals), device=goals.device)
    episodes, found = rb.draw_met(tasks, generator)
    steps = rb.draw_steps((len(tasks), args.context_size), generator)
    rows = rb.transitions(tasks[:, None], episodes.expand_as(steps), steps)
    with torch.no_grad():
        mean, variance = agent.posterior(context_rows(*rows, goals[:, None], task.sparse_reward))
    agent.prior_mean.copy_(torch.where(found, mean, 0.0))
    agent.prior_std.copy_(torch.where(found, variance.sqrt(), 1.0))


# ------------------------------------------------------------------------------------------------------------- files
FORMAT = "pearl_htr_ser 2"  # HTR


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
    raise BadInput(f"{path} is not a whole checkpoint.pt or model.pt of {FORMAT.split()[0]}.py")


def load_modules(modules, saved):
    try:
        for name, module in modules.items():
            module.load_state_dict(saved[name])
    except (KeyError, RuntimeError, ValueError) as e:
        reason = str(e).splitlines()[-1].strip()
        raise BadInput(f"what was saved does not fit this environment and these sizes: {reason}") from e


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
    packages = ("torch", "numpy", "gymnasium", "mujoco")
    commit = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "rev-parse", "HEAD"]
    about = {
        "args": dataclasses.asdict(args),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
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
    """What changes as training goes on, besides networks, optimizer and replay; saved in checkpoints.

    No random generator is among it: all randomness follows from (seed, purpose, iteration, episode).
    """

    global_step: int = 0  # environment steps
    iteration: int = 0
    updates: int = 0
    wall_s: float = 0.0
    train_s: float = 0.0  # without evaluations
    rewarded: list = field(default_factory=list)  # whether each training task ever earned a reward
    metrics: dict = field(default_factory=dict)  # of the last evaluation
    eval_rows: list = field(default_factory=list)  # eval.csv


def stream(args, purpose, *numbers):
    return int(np.random.SeedSequence([args.seed, purpose, *numbers]).generate_state(1)[0])


def collect(envs, agent, task, args, goals, prior_episodes, seeds, deterministic=False):
    """Episodes with each goal's task, z from the prior in the first ones and then from the posterior of those before.

    One episode for each of `seeds`. Returns obs (tasks, episodes, T + 1, dim) and actions (tasks, episodes, T, dim),
    these in [-1, 1].
    """
    device = goals.device
    obs, actions = [], []
    for episode, seed in enumerate(seeds):
        generator = torch.Generator(device).manual_seed(seed)
        if episode < prior_episodes:
            z = agent.draw_prior(len(goals), generator)
        else:
            played = torch.stack(obs, 1), torch.stack(actions, 1)
            z = infer(agent, *played, goals, task, args, generator)
        played = play_episodes(envs, agent, z, goals, seed, deterministic)
        obs.append(played[0])
        actions.append(played[1])
    return torch.stack(obs, 1), torch.stack(actions, 1)


def summarize(obs, actions, goals, task):
    """Metrics of adaptation, means over tasks: success, the goal met at any step, and sparse return of each episode."""
    success = task.met(obs, goals).float().mean(0).tolist()
    returns = task.sparse_reward(obs[..., 1:, :], actions, goals[:, None, None]).sum(-1).mean(0).tolist()
    metrics = {"success_rate": success[-1], "episodic_return": returns[-1]}
    metrics |= {f"success_rate_ep{i}": value for i, value in enumerate(success)}
    return metrics | {f"return_ep{i}": value for i, value in enumerate(returns)}


class Task:
    """Sizes and rewards of the environment; actions in [-1, 1], (..., action_dim), goals (..., 2)."""

    def __init__(self, args):
        env = make_envs(args, 1)
        self.obs_dim, self.action_dim = *env.single_observation_space.shape, *env.single_action_space.shape
        self.action_scale = float(env.single_action_space.high[0])
        self.goal_radius, self.horizon = env.goal_radius, env.horizon
        rewards = {
            kind: make_envs(dataclasses.replace(args, reward=kind), 1).compute_reward
            for kind in ("sparse", args.reward)
        }

        def scaled(compute_reward):
            return lambda next_obs, action, goal: compute_reward(next_obs, self.action_scale * action, goal)

        self.reward, self.sparse_reward = scaled(rewards[args.reward]), scaled(rewards["sparse"])

    def met(self, obs, goals):
        """Whether each episode, obs (tasks, episodes, T + 1, dim), met its goal at any step: (tasks, episodes)."""
        return ((obs[:, :, 1:, :2] - goals[:, None, None]).norm(dim=-1) < self.goal_radius).any(-1)


def adapt(envs, agent, task, args, goals):
    """Meet each goal's task with an empty context, for `--eval-episodes` episodes of the policy without noise."""
    seeds = [stream(args, EVALUATION, episode) for episode in range(args.eval_episodes)]
    return collect(envs, agent, task, args, goals, args.exploration_episodes, seeds, deterministic=True)


def film(args, agent, task, goal, folder, name):
    """Record the adaptation to one task, episode after episode, as folder/name-episode-0.mp4 and so on."""

    def record(env):
        with warnings.catch_warnings(action="ignore"):  # the folder may hold earlier films
            return gym.wrappers.RecordVideo(env, folder, lambda episode: True, name_prefix=name, disable_logger=True)

    try:
        env = make_envs(args, 1, "sync", render_mode="rgb_array", wrappers=[record])
        adapt(env, agent, task, args, goal[None])
        env.close()
    except Exception as e:
        raise BadInput(f"--capture-video does not work here: {e}") from e


def train(args, saved):
    """Train from the start or on from the content of a checkpoint; returns the exit status."""
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(args.num_threads)
    torch.set_flush_denormal(True)  # Adam's averages of units that died shrink for ever, and tiny numbers are slow
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic kernels need on a GPU
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.manual_seed(args.seed)
    task, envs = Task(args), make_envs(args, args.num_tasks_sample)
    initial_envs, eval_envs = make_envs(args, args.num_train_tasks), make_envs(args, args.num_test_tasks)

    # ALGO LOGIC: tasks, replay, networks, optimizer
    goals = torch.from_numpy(task_goals(TRAIN, args.num_train_tasks, args.goal_distance, args.seed)).to(device)
    test_goals = torch.from_numpy(task_goals(TEST, args.num_test_tasks, args.goal_distance, args.seed)).to(device)
    cycle_episodes = args.prior_episodes + args.posterior_episodes
    capacity = args.buffer_size // task.horizon
    rb = ReplayBuffer(args.num_train_tasks, capacity, task.horizon, task.obs_dim, task.action_dim, device)  # HTR
    agent = Agent(task.obs_dim, task.action_dim, args).to(device)
    groups = {name: list(getattr(agent, name).parameters()) for name in ("encoder", "qf1", "qf2", "vf", "policy")}
    critic_parameters = groups["encoder"] + groups["qf1"] + groups["qf2"]
    parameters, target_parameters = sum(groups.values(), []), list(agent.vf_target.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.learning_rate, fused=True)
    modules = {"agent": agent, "optimizer": optimizer}
    progress = Progress(rewarded=[False] * args.num_train_tasks)
    if saved:
        if "replay" not in saved:
            raise BadInput(f"{args.resume} is a policy alone: --resume needs a checkpoint.pt")
        for name in ("buffer_size", "horizon"):
            if getattr(args, name) != getattr(saved["args"], name):
                raise BadInput(f"--{name.replace('_', '-')} cannot change on --resume: leave it out")
        load_modules(modules, saved)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate  # not that of the saved optimizer
        rb.load_state_dict(saved["replay"])
        progress = Progress(**saved["progress"])

    run = new_run_folder(args)
    writer = open_writer(args, run)
    eval_file = open(f"{run}/eval.csv", "w", newline="")
    eval_csv = csv.writer(eval_file)
    eval_csv.writerow(["seed", "global_step", "metric", "value", "n_episodes", "wall_s"])
    eval_csv.writerows(progress.eval_rows)
    signals = []  # Ctrl-C or SIGTERM: end the iteration, save, stop; a second one stops at once
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _: (signals.append(signum), signal.signal(signum, signal.SIG_DFL)))
    started = time.time() - progress.wall_s

    def store(tasks, obs, actions):
        """Add episodes of these tasks to the replay buffer; returns the share that met their goal, and mean return."""
        met = task.met(obs, goals[tasks])
        for episode in range(obs.shape[1]):
            rb.add(tasks, obs[:, episode], actions[:, episode], met[:, episode])
        for i, rewarded in zip(tasks.tolist(), met.any(-1).tolist()):
            progress.rewarded[i] |= rewarded
        progress.global_step += actions.shape[:3].numel()
        returns = task.sparse_reward(obs[:, :, 1:], actions, goals[tasks, None, None]).sum(-1)
        return met.float().mean().item(), returns.mean().item()

    def evaluate_policy(step):
        """Adapt to the test tasks. Their data train nothing."""
        played = adapt(eval_envs, agent, task, args, test_goals)
        progress.metrics = summarize(*played, test_goals, task)
        wall_s = round(time.time() - started, 3)
        for key, value in progress.metrics.items():
            progress.eval_rows.append([args.seed, step, f"eval/{key}", value, args.num_test_tasks, wall_s])
            eval_csv.writerow(progress.eval_rows[-1])
            writer.add_scalar(f"eval/{key}", value, step)
        eval_file.flush()
        if args.capture_video:
            film(args, agent, task, test_goals[0], f"{run}/videos", f"step-{step}")

    def policy_file():
        content = {"format": FORMAT, "args": dataclasses.asdict(args), "global_step": progress.global_step}
        return content | {"agent": agent.state_dict()}

    if not progress.eval_rows:
        evaluate_policy(0)
    while progress.global_step < args.total_timesteps and not signals:
        # ALGO LOGIC: collect, with z from the prior and then from the posterior (PEARL, Algorithm 1)
        iteration_started, steps_before = time.time(), progress.global_step
        if progress.iteration == 0:  # first, all tasks with z from the prior
            tasks, n = torch.arange(args.num_train_tasks, device=device), args.initial_episodes
            seeds = [stream(args, TRAINING, 0, episode) for episode in range(n)]
            store(tasks, *collect(initial_envs, agent, task, args, goals, n, seeds))
        progress.iteration += 1
        rng = np.random.default_rng([args.seed, TRAINING, progress.iteration])
        tasks = torch.from_numpy(rng.choice(args.num_train_tasks, args.num_tasks_sample, replace=False)).to(device)
        rb.context_start[tasks] = rb.end[tasks]
        seeds = [stream(args, TRAINING, progress.iteration, episode) for episode in range(cycle_episodes)]
        played = collect(envs, agent, task, args, goals[tasks], args.prior_episodes, seeds)
        success, episodic_return = store(tasks, *played)
        steps = progress.global_step - steps_before

        # ALGO LOGIC: learn from minibatches, some slots of them with a hindsight task
        generator = torch.Generator(device).manual_seed(stream(args, REPLAY, progress.iteration))
        k = args.relabel_prob
        if args.relabel_anneal:
            k *= max(0.0, 1 - progress.global_step / args.relabel_anneal)
        kl_lambda = kl_weight(args, progress.global_step)
        rewarded = torch.tensor(progress.rewarded, device=device)
        sums = torch.zeros(2, 3, device=device)  # of hindsight and real slots: goal distance, reward, number
        for _ in range(args.gradient_steps):
            tasks = (random((args.meta_batch_size,), generator) * args.num_train_tasks).long()
            draws = random((args.meta_batch_size if args.relabel_per == "slot" else 1,), generator)
            relabel = (draws < k).expand(args.meta_batch_size)
            if args.relabel_unrewarded:
                relabel = relabel & ~rewarded[tasks]
            context, (obs, action, next_obs, goal) = sample(rb, tasks, goals[tasks], relabel, args, generator)

            mean, variance = agent.posterior(context_rows(*context, task.sparse_reward))
            z = mean + variance.sqrt() * torch.randn(mean.shape, generator=generator, device=device)
            z = z[:, None].expand(-1, args.batch_size, -1)
            z_fixed = z.detach()  # the encoder learns from the Q losses and the KL term alone
            reward = task.reward(next_obs, action, goal)
            with torch.no_grad():
                next_v = agent.vf_target(torch.cat([next_obs, z_fixed], -1)).squeeze(-1)
                q_target = td_target(reward, next_v, args.reward_scale, args.gamma)
            qf1, qf2 = agent.q_values(obs, action, z)
            qf_loss = F.mse_loss(qf1, q_target) + F.mse_loss(qf2, q_target)
            kl_loss = kl_to_prior(mean, variance)
            gradients = torch.autograd.grad(qf_loss + kl_lambda * kl_loss, critic_parameters)

            new_action, log_prob, action_mean, log_std = agent.act(obs, z_fixed, generator=generator)
            min_q = torch.min(*agent.q_values(obs, new_action, z_fixed))
            vf = agent.vf(torch.cat([obs, z_fixed], -1)).squeeze(-1)
            vf_loss = F.mse_loss(vf, (min_q - log_prob).detach())
            gradients += torch.autograd.grad(vf_loss, groups["vf"])
            policy_loss = (log_prob - min_q).mean() + 1e-3 * (action_mean.square().mean() + log_std.square().mean())
            gradients += torch.autograd.grad(policy_loss, groups["policy"])
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient
            optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(target_parameters, groups["vf"], args.tau)
            progress.updates += 1

            slots = torch.stack([goal.norm(dim=-1).mean(-1), reward.mean(-1), torch.ones_like(reward[:, 0])], -1)
            sums += torch.stack([relabel, ~relabel]).float() @ slots

        if args.prior == "tasks":
            set_prior(agent, rb, goals, task, args, generator)

        # Record: TensorBoard, evaluation, checkpoint, terminal
        if not math.isfinite(qf_loss.item() + policy_loss.item()):
            raise RunFailed(f"a loss is not a number at step {progress.global_step}; lower --learning-rate")
        progress.train_s += time.time() - iteration_started
        sps = progress.global_step / progress.train_s
        scalars = {"charts/success_rate": success, "charts/episodic_return": episodic_return}
        scalars |= {"charts/rewarded_tasks": sum(progress.rewarded), "charts/SPS": sps}
        scalars |= {"charts/updates_per_second": progress.updates / progress.train_s}
        (distance, hindsight_reward, hindsight), (_, real_reward, real) = sums.tolist()
        scalars["charts/relabel_fraction"] = hindsight / (hindsight + real)
        if hindsight:
            scalars["charts/hindsight_task_distance"] = distance / hindsight
            scalars["charts/hindsight_reward"] = hindsight_reward / hindsight
        if real:
            scalars["charts/real_reward"] = real_reward / real
        scalars |= {"losses/qf_loss": qf_loss.item(), "losses/vf_loss": vf_loss.item()}
        scalars |= {"losses/policy_loss": policy_loss.item(), "losses/kl_loss": kl_loss.item()}
        scalars |= {"losses/qf1_values": qf1.mean().item(), "losses/entropy": -log_prob.mean().item()}
        for key, value in scalars.items():
            writer.add_scalar(key, value, progress.global_step)
        done = progress.global_step >= args.total_timesteps
        grid_step = progress.global_step - progress.global_step % args.eval_frequency
        if done or grid_step > steps_before:
            evaluate_policy(args.total_timesteps if done else grid_step)
        if sys.stderr.isatty() and not args.quiet:
            left = max(0, args.total_timesteps - progress.global_step) / sps / 60
            line = f"step {progress.global_step} of {args.total_timesteps}, {sps:.0f} steps/s, {left:.0f} min left"
            end = "\n" if done or signals else ""
            print(f"\r{line}, success {progress.metrics['success_rate']:.2f} ", end=end, file=sys.stderr)
        crossed = args.checkpoint_frequency and progress.global_step % args.checkpoint_frequency < steps
        if done or signals or crossed:
            progress.wall_s = time.time() - started
            content = policy_file() | {"progress": dataclasses.asdict(progress), "replay": rb.state_dict()}
            save(f"{run}/checkpoint.pt", content | {name: module.state_dict() for name, module in modules.items()})

    if args.save_model:
        save(f"{run}/model.pt", policy_file())
    sps = progress.global_step / max(progress.train_s, 1e-9)  # a run resumed at its end plays no cycle
    report(run, args, progress.global_step, time.time() - started, sps, progress.metrics)
    writer.close()
    return 130 if signals else 0


def report(run, args, global_step, wall_s, sps, metrics):
    """The last line on standard output, for programs; people read what is on standard error."""
    line = {"run": run, "env_id": args.env_id, "seed": args.seed, "global_step": global_step}
    line |= {"wall_s": round(wall_s, 3), "sps": round(sps, 1)}
    line |= {key: metrics[key] for key in ("success_rate", "episodic_return")} | {"n_episodes": args.num_test_tasks}
    for name in ("success_rate", "return"):
        line[f"{name}_by_episode"] = [metrics[f"{name}_ep{i}"] for i in range(args.eval_episodes)]
    print(json.dumps(line), flush=True)


def evaluate(args, saved):
    """Adapt a saved agent to the test tasks and print the last episode's success with Wilson's 95% interval."""
    started = time.time()
    task = Task(args)
    agent = Agent(task.obs_dim, task.action_dim, args)
    load_modules({"agent": agent}, saved)
    goals = torch.from_numpy(task_goals(TEST, args.num_test_tasks, args.goal_distance, args.seed))
    obs, actions = adapt(make_envs(args, args.num_test_tasks), agent, task, args, goals)
    metrics = summarize(obs, actions, goals, task)
    n, p, z2 = args.num_test_tasks, metrics["success_rate"], 1.959964**2
    middle, half = (p + z2 / 2 / n) / (1 + z2 / n), math.sqrt(z2 * (p * (1 - p) / n + z2 / 4 / n**2)) / (1 + z2 / n)
    print(f"success {p:.3f}, 95% interval [{middle - half:.3f}, {middle + half:.3f}], {n} tasks", file=sys.stderr)
    if args.capture_video:
        film(args, agent, task, goals[0], f"{new_run_folder(args)}/videos", "evaluate")
    wall_s = time.time() - started
    report(args.evaluate, args, saved["global_step"], wall_s, actions.shape[:3].numel() / wall_s, metrics)
    return 0


def check(args):
    """Refuse what cannot work before anything is written."""
    counts = "num_threads total_timesteps eval_frequency eval_episodes num_train_tasks num_test_tasks num_tasks_sample"
    counts += " initial_episodes prior_episodes gradient_steps buffer_size meta_batch_size batch_size context_size"
    counts += " latent_dim hidden_size exploration_episodes"
    amounts = (
        "seed checkpoint_frequency posterior_episodes relabel_anneal kl_warmup learning_rate reward_scale kl_lambda"
    )
    amounts += " goal_distance"
    for names, low, high in ((counts, 1, math.inf), (amounts, 0, math.inf), ("relabel_prob gamma tau", 0, 1)):
        for name in names.split():
            if not low <= getattr(args, name) <= high:
                bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
                raise BadInput(f"--{name.replace('_', '-')} must be {bounds}, not {getattr(args, name)}")
    if args.num_tasks_sample > args.num_train_tasks:
        raise BadInput(
            f"--num-tasks-sample {args.num_tasks_sample} is more than --num-train-tasks {args.num_train_tasks}"
        )
    episodes, horizon = args.prior_episodes + args.posterior_episodes, Task(args).horizon
    if args.buffer_size < max(episodes, args.initial_episodes) * horizon:
        raise BadInput(
            f"--buffer-size {args.buffer_size} does not hold an iteration of {episodes} episodes of {horizon} steps"
        )
    if args.track and importlib.util.find_spec("wandb") is None:
        raise BadInput("--track needs Weights & Biases: pip install wandb")


def main():
    try:
        args = tyro.cli(Args, description=__doc__)
        if args.resume and args.evaluate:
            raise BadInput("--resume continues a training, --evaluate plays a network: give one of them")
        saved = None
        if path := args.resume or args.evaluate:
            saved = load(path)
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
