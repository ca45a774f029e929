"""PEARL + Hindsight Task Relabelling (HTR) with episode clustering: meta-RL from sparse reward alone.

Packer et al., "Hindsight Task Relabelling", NeurIPS 2021, on top of Rakelly et al., "PEARL", ICML 2019. Try:

  python pearl_htr_ec.py --goal-distance 1 --horizon 20
  python pearl_htr_ec.py --goal-distance 1 --horizon 20 --relabel-prob 0
"""

import contextlib
import functools
import importlib
import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Optional

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter

from envs.goal_tasks import TEST, TRAIN, task_goals


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]  # name of the experiment, a part of the run's name
    seed: int = 1  # seed of networks, exploration, tasks and replay; test tasks are drawn apart from training tasks
    torch_deterministic: bool = True  # deterministic torch kernels only (`--no-torch-deterministic` allows others)
    cuda: bool = True  # learn on a GPU if there is one, else on the CPU (`--no-cuda`: always on the CPU)
    num_threads: int = 1  # torch threads; 1 is best for small networks on a shared CPU
    track: bool = False  # log to Weights & Biases too (needs `pip install wandb`)
    wandb_project_name: str = "hindsight"  # W&B project
    wandb_entity: Optional[str] = None  # W&B team or user; None: your default one
    capture_video: bool = False  # film the adaptation to one test task at each evaluation (needs `pip install moviepy`)
    save_model: bool = False  # write encoder and policy to model.pt
    quiet: bool = False  # no progress on the terminal
    run_dir: str = "runs"  # folder that gets one new folder a run
    resume: Optional[str] = None  # folder of a run, or its checkpoint.pt, to go on with; its arguments hold by default
    evaluate: Optional[str] = None  # model.pt, checkpoint.pt or folder of a run to adapt to the test tasks with
    checkpoint_frequency: int = 0  # environment steps between checkpoints; 0: at the end and on Ctrl-C

    env_id: str = "PointGoal-v0"  # batched goal task of envs/goal_tasks.py: PointGoal-v0, WheeledGoal-v0 or AntGoal-v0
    total_timesteps: int = 2_400_000  # environment steps of training, all tasks counted
    eval_frequency: int = 120_000  # environment steps between evaluations
    eval_episodes: int = 20  # adaptation episodes with each test task

    goal_distance: float = 2.0  # radius of the half circle of goals, in m
    goal_radius: Optional[float] = None  # distance from the goal within which there is reward, m; None: the task's own
    horizon: Optional[int] = None  # steps of an episode; None: the task's own
    reward: Literal["sparse", "dense"] = "sparse"  # reward of the RL batches; dense is the paper's oracle
    num_train_tasks: int = 100  # training tasks (paper: 100)
    num_test_tasks: int = 100  # test tasks (paper: 100)
    num_tasks_sample: int = 10  # training tasks that collect in an iteration (PEARL: 10)
    initial_episodes: int = 5  # episodes of each training task before training starts (PEARL: 200 steps)
    prior_episodes: int = 5  # episodes of an iteration with z from the prior (PEARL: 100 steps)
    posterior_episodes: int = 15  # and then with z from the posterior of those before (PEARL: 900 steps)
    exploration_episodes: int = 5  # first adaptation episodes of a test, with z from the prior (PEARL: 5)
    gradient_steps: int = 200  # updates of an iteration (PEARL: 1000)
    buffer_size: int = 20_000  # transitions in the replay buffer of a task
    meta_batch_size: int = 64  # tasks of an update (paper: 16); the encoder needs many tasks more than transitions
    batch_size: int = 16  # transitions of a task in an update's RL batch (PEARL: 256)
    context_size: int = 64  # transitions in a context, of an update and of a test (PEARL, in training: 1024)
    context: Literal["episode", "all"] = "episode"  # from one episode with reward, or all recent ones (PEARL)
    # z to explore with: from posteriors of training tasks, N(0, I) for those without reward; or all N(0, I) (PEARL)
    prior: Literal["tasks", "normal"] = "tasks"
    relabel_prob: float = 0.3  # K, probability of a hindsight task (Sec. 5; paper: 0.1 or 0.3); 0: plain PEARL
    relabel_per: Literal["slot", "update"] = "slot"  # what K is drawn for: a slot of the meta-batch, or an update
    cell_size: Optional[float] = None  # HTR: side of a cell of achieved positions, in m; None: the goal radius
    cell_choice: Literal["cell", "episode"] = "cell"  # HTR: any filled cell alike, or that of a random episode
    exploratory_share: float = 0.5  # HTR: share of hindsight batches that is of the slot's real task (Sec. 4: a mix)
    # state whose position becomes the hindsight task: one after a random transition of the episode, or the last
    hindsight: Literal["future", "final"] = "future"
    relabel_anneal: int = 0  # environment steps over which K goes to 0; 0: never
    relabel_unrewarded: bool = False  # relabel only tasks that never earned a reward
    learning_rate: float = 1e-3  # Adam's step size of all networks (paper: 3e-4)
    gamma: float = 0.95  # discount factor (PEARL, sparse point with 20 steps: 0.9)
    tau: float = 0.005  # step of the target value network towards the value network (PEARL: 0.005)
    reward_scale: float = 100.0  # factor of rewards in the Q target, inverse of SAC's temperature (PEARL, point: 100)
    kl_lambda: float = 1.0  # weight of the encoder's KL term (PEARL, sparse point: 1)
    kl_warmup: int = 3_000_000  # environment steps over which that weight grows from 0, so that z means something first
    latent_dim: int = 5  # dimensions of z (paper: 5)
    hidden_size: int = 128  # units in each of 3 hidden layers of policy, Q, V (paper: 300), encoder (paper: 200)


def make_envs(args, num_envs, mode="vector_entry_point", **kwargs):
    """`num_envs` episodes that advance in one call, see envs/goal_tasks.py; reward as in `args`."""
    names = ("goal_distance", "goal_radius", "horizon", "reward")
    kwargs |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    with or_fail(f"--env-id {args.env_id} cannot be made as a goal task"):
        return gym.make_vec(args.env_id, num_envs, mode, **kwargs)


class Task:
    """Sizes and rewards of the environment; actions are in [-1, 1], (..., action_dim), goals (..., 2)."""

    def __init__(self, args):
        self.envs = {kind: make_envs(replace(args, reward=kind), 1) for kind in ("sparse", args.reward)}
        env = self.envs["sparse"]
        with or_fail(f"{args.env_id} is no goal task like those of envs/goal_tasks.py"):
            self.goal_radius, self.horizon = env.goal_radius, env.horizon
            self.obs_dim, self.action_dim = *env.single_observation_space.shape, *env.single_action_space.shape
            self.action_scale = torch.from_numpy(env.single_action_space.high)

    def reward(self, kind, next_obs, action, goal):
        """Rewards of transitions under any goals: (...)."""
        with or_fail("the environment's compute_reward failed", 1):
            return self.envs[kind].compute_reward(next_obs, self.action_scale.to(action) * action, goal)

    def context(self, obs, action, next_obs, goal):
        """What the encoder sees of transitions: (s, a, r) with the sparse reward, (..., dim)."""
        return torch.cat([obs, action, self.reward("sparse", next_obs, action, goal)[..., None]], -1)

    def met(self, obs, goals):
        """Whether each episode, obs (tasks, episodes, T + 1, dim), met its goal at any step: (tasks, episodes)."""
        return ((obs[:, :, 1:, :2] - goals[:, None, None]).norm(dim=-1) < self.goal_radius).any(-1)


# ALGO LOGIC: networks ------------------------------------------------------------------------------------------------
def mlp(in_dim, out_dim, h):
    hidden = [nn.Linear(in_dim, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(h, out_dim))


class Agent(nn.Module):
    """Context encoder q(z | c), policy pi(a | s, z), two Q(s, a, z), V(s, z) and its target."""

    def __init__(self, task, args):
        super().__init__()
        obs_dim, action_dim, z, h = task.obs_dim, task.action_dim, args.latent_dim, args.hidden_size
        self.encoder = mlp(obs_dim + action_dim + 1, 2 * z, h)
        self.policy = mlp(obs_dim + z, 2 * action_dim, h)
        self.qf1, self.qf2 = mlp(obs_dim + action_dim + z, 1, h), mlp(obs_dim + action_dim + z, 1, h)
        self.vf, self.vf_target = mlp(obs_dim + z, 1, h), mlp(obs_dim + z, 1, h).requires_grad_(False)
        self.vf_target.load_state_dict(self.vf.state_dict())
        self.register_buffer("prior_mean", torch.zeros(args.num_train_tasks, z))  # of z, for each training task
        self.register_buffer("prior_std", torch.ones(args.num_train_tasks, z))

    def posterior(self, context):
        """Mean and variance of z: the product of a Gaussian for each row of (tasks, rows, dim) (PEARL, Sec. 4.1)."""
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
        noise = torch.randn(mean.shape, generator=generator, device=mean.device) * (not deterministic)
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


def td_target(reward, next_v, reward_scale, gamma):
    """Target of Q; the end of an episode is a time limit, so that every target bootstraps."""
    return reward_scale * reward + gamma * next_v


# ALGO LOGIC: playing episodes ----------------------------------------------------------------------------------------
TRAINING, EVALUATION, REPLAY = range(3)  # each use of random numbers has streams of its own


def stream(args, *numbers):
    """Seed for a use of random numbers in an iteration, an episode: no generator has a state that has to be saved."""
    return int(np.random.SeedSequence([args.seed, *numbers]).generate_state(1)[0])


def random(shape, generator):
    return torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)


@torch.no_grad()
def collect(args, agent, task, goals, prior_episodes, episodes, use, deterministic=False, **env_kwargs):
    """Play each goal's task: z is from the prior in the first episodes, then from the posterior of those before.

    All that is random follows from `use`, numbers. Returns obs (tasks, episodes, T + 1, dim), actions in [-1, 1].
    """
    envs = make_envs(args, len(goals), **env_kwargs)
    obs = goals.new_zeros(len(goals), episodes, task.horizon + 1, task.obs_dim)
    actions = goals.new_zeros(len(goals), episodes, task.horizon, task.action_dim)
    for episode in range(episodes):
        seed = stream(args, *use, episode)
        generator, noise = (torch.Generator(goals.device).manual_seed(seed) for _ in range(2))
        if episode < prior_episodes:
            z = agent.draw_prior(len(goals), generator)
        else:
            z = infer(args, agent, task, obs[:, :episode], actions[:, :episode], goals, generator)
        with or_fail(f"{args.env_id} failed in an episode", 1):
            obs[:, episode, 0] = torch.from_numpy(envs.reset(seed=seed, options={"goal": goals.cpu().numpy()})[0])
            for t in range(task.horizon):
                actions[:, episode, t] = action = agent.act(obs[:, episode, t], z, deterministic, noise)[0]
                obs[:, episode, t + 1] = torch.from_numpy(envs.step((action.cpu() * task.action_scale).numpy())[0])
        if not obs[:, episode].isfinite().all():
            fail(f"{args.env_id} gave an observation that is not a finite number", 1)
    envs.close()
    return obs, actions


def infer(args, agent, task, obs, actions, goals, generator):
    """A sample of z, (tasks, latent), from the posterior of episodes, obs (tasks, episodes, T + 1, dim).

    Its context has `--context-size` random transitions as in training, since a product of more Gaussians is narrower.
    With `--context episode` they are of the best episode that met the goal; without one z is from the prior.
    """
    rows = task.context(obs[:, :, :-1], actions, obs[:, :, 1:], goals[:, None, None])
    slot, found = torch.arange(len(rows), device=rows.device)[:, None], rows.new_ones(len(rows), 1, dtype=torch.bool)
    if args.context == "episode":
        met = task.met(obs, goals)
        best = rows[..., -1].sum(-1).masked_fill(~met, -math.inf).argmax(1, keepdim=True)
        rows, found = rows[slot, best], met.any(1, keepdim=True)
    rows = rows.flatten(1, 2)
    index = (random((len(rows), args.context_size), generator) * rows.shape[1]).long()
    mean, variance = agent.posterior(rows[slot, index])
    z = mean + variance.sqrt() * torch.randn(mean.shape, generator=generator, device=mean.device)
    return torch.where(found, z, agent.draw_prior(len(z), generator))


def evaluate(args, agent, task, folder, name):
    """Adapt to the test tasks from an empty context, without noise. Success is to meet the goal; returns are sparse."""
    goals = torch.from_numpy(task_goals(TEST, args.num_test_tasks, args.goal_distance, args.seed)).to(agent.prior_mean)
    how = args.exploration_episodes, args.eval_episodes, (EVALUATION,), True
    if args.capture_video:
        film = {"video_folder": f"{folder}/videos/{name}", "episode_trigger": range(args.eval_episodes).__contains__}
        film = functools.partial(gym.wrappers.RecordVideo, disable_logger=True, **film)
        collect(args, agent, task, goals[:1], *how, mode="sync", render_mode="rgb_array", wrappers=[film])
    obs, actions = collect(args, agent, task, goals, *how)
    success = task.met(obs, goals).float().mean(0).tolist()
    returns = task.reward("sparse", obs[:, :, 1:], actions, goals[:, None, None]).sum(-1).mean(0).tolist()
    metrics = {"success_rate": success[-1], "episodic_return": returns[-1]}
    return metrics | {"success_rate_by_episode": success, "return_by_episode": returns}


# ALGO LOGIC: replay and hindsight ------------------------------------------------------------------------------------
class ReplayBuffer:
    """The episodes of all tasks, on the device of training; rewards are computed when transitions are sampled.

    An episode of task i is known by its number since the start, `row = episode % capacity`. Those from
    `context_start[i]` on are the recent ones, PEARL's encoder buffer: for `--context all`, and if no goal was met.
    """

    def __init__(self, num_tasks, capacity, task, device):
        self.capacity, self.horizon = capacity, task.horizon
        self.obs = torch.zeros(num_tasks, capacity, task.horizon + 1, task.obs_dim, device=device)
        self.actions = torch.zeros(num_tasks, capacity, task.horizon, task.action_dim, device=device)
        self.met = torch.zeros(num_tasks, capacity, dtype=torch.bool, device=device)  # whether it met its task's goal
        self.ever_met = torch.zeros_like(self.met[:, :1])  # whether any episode of the task did, stored or not
        self.end, self.context_start = torch.zeros(2, num_tasks, 1, dtype=torch.long, device=device)

    def add(self, tasks, obs, actions, met):
        """An episode of each of these (different) tasks: obs (tasks, T + 1, dim), actions (tasks, T, dim), goal met."""
        index = tasks, self.end[tasks, 0] % self.capacity
        self.obs[index], self.actions[index], self.met[index] = obs, actions, met
        self.ever_met[tasks] |= met[:, None]
        self.end[tasks] += 1

    def transitions(self, tasks, episodes, steps):
        """obs, action and next obs, (slots, n, dim); tasks (slots, n) or (slots, 1), episodes and steps (slots, n)."""
        index = tasks, episodes % self.capacity
        return self.obs[(*index, steps)], self.actions[(*index, steps)], self.obs[(*index, steps + 1)]

    def draw_episodes(self, tasks, n, generator, recent=False):
        """n random episodes for each task, (tasks, n): of all that are stored, or of the recent ones."""
        end = self.end[tasks]
        first = torch.maximum(end - self.capacity, recent * self.context_start[tasks])
        return first + (random((len(tasks), n), generator) * (end - first)).long()

    def draw_met(self, tasks, generator):
        """A random episode that met the goal for each task, or a recent one if none did; and if so, (tasks, 1) each."""
        met = self.met[tasks]
        row = (met * random(met.shape, generator)).argmax(1, keepdim=True)
        found = met.any(1, keepdim=True)
        return torch.where(found, row, self.draw_episodes(tasks, 1, generator, recent=True)), found

    def state_dict(self):
        used = max(1, min(int(self.end.max()), self.capacity))  # a view would be saved with all memory behind it
        return {key: array[:, :used].clone() for key, array in vars(self).items() if torch.is_tensor(array)}

    def load_state_dict(self, state):
        for key, array in state.items():
            getattr(self, key)[:, : array.shape[1]] = array


def hindsight_goals(rb, tasks, episodes, strategy, generator):
    """Positions that these episodes, (tasks, n), achieved, (tasks, n, 2): the tasks that they solve in hindsight.

    `future`: the state after a random transition of the episode, at or after it as in HER; `final`: its last state.
    """
    steps = torch.full(episodes.shape, rb.horizon, device=episodes.device)
    if strategy == "future":
        anchor = (random(episodes.shape, generator) * rb.horizon).long()
        steps = anchor + 1 + (random(episodes.shape, generator) * (rb.horizon - anchor)).long()
    return rb.obs[tasks[:, None], episodes % rb.capacity, steps][..., :2]


@torch.no_grad()
def set_prior(args, agent, task, rb, goals, generator):
    """Have the agent explore with the posterior of an episode that met the goal, of each training task that has one."""
    tasks = torch.arange(len(goals), device=goals.device)
    episodes, found = rb.draw_met(tasks, generator)
    steps = (random((len(tasks), args.context_size), generator) * rb.horizon).long()
    rows = rb.transitions(tasks[:, None], episodes, steps)
    mean, variance = agent.posterior(task.context(*rows, goals[:, None]))
    agent.prior_mean.copy_(torch.where(found, mean, 0.0))
    agent.prior_std.copy_(torch.where(found, variance.sqrt(), 1.0))


# HTR: episode clustering ---------------------------------------------------------------------------------------------
RELABELLING, CELLS = 3, 4  # these uses of random numbers have streams of their own, too


def cell_of(goal, cell_size):
    """Cell of the grid in which goals (..., dim), in m, lie: integers (..., dim). Cell 0 is from 0 up to cell_size."""
    return (goal / cell_size).floor().long()


class ClusteredReplay(ReplayBuffer):
    """The replay, whose episodes are each relabelled once, when they are stored; `cells` has them sorted by that."""

    def __init__(self, *sizes_and_device):
        super().__init__(*sizes_and_device)
        self.hindsight = torch.zeros_like(self.obs[:, :, 0, :2])  # the task that the episode in this row achieved
        self.filed = torch.zeros_like(self.hindsight[..., 0], dtype=torch.long)  # 1, 2, ... by age; 0: no episode yet

    def file(self, tasks, strategy, generator):
        """Relabel the newest episode of each of these (different) tasks, (n,): a hindsight task in m, by `strategy`."""
        newest = self.end[tasks] - 1
        index = tasks[:, None], newest % self.capacity
        self.hindsight[index] = hindsight_goals(self, tasks, newest, strategy, generator)
        self.filed[index] = self.end.sum() - torch.arange(len(tasks), device=tasks.device)[:, None]


class Cells:
    """The hindsight buffers (Sec. 4): episodes, of all tasks, whose hindsight tasks are in the same cell of the grid.

    The one task of a buffer is the centre of its cell. A buffer holds pointers (task, row), one for each stored
    episode: there are never more pointers or cells than episodes, however fine the grid.
    """

    def __init__(self, rb, cell_size, recent, generator):
        tasks, rows = rb.filed.nonzero()[rb.filed[rb.filed > 0].argsort()].T  # the oldest episode first
        cells = cell_of(rb.hindsight[tasks, rows], cell_size)
        cells, cell, self.counts = torch.unique(cells, dim=0, return_inverse=True, return_counts=True)
        by_cell = cell.argsort(stable=True)  # cell after cell
        self.tasks, self.rows, self.ends = tasks[by_cell], rows[by_cell], self.counts.cumsum(0)
        self.centres = (cells + 0.5) * cell_size
        self.of_episode = torch.zeros_like(rb.filed)
        self.of_episode[tasks, rows] = cell
        self.recent, self.generator = recent, generator

    def draw(self, cell, n, recent=False):
        """n random episodes (or of the `recent` newest ones) of buffers, cell (slots, 1): tasks, rows, (slots, n)."""
        size = self.counts[cell].clamp(max=self.recent) if recent else self.counts[cell]
        place = self.ends[cell] - 1 - (random((len(cell), n), self.generator) * size).long()
        return self.tasks[place], self.rows[place]


def sample(rb, tasks, goals, relabel, args, generator):
    """Context and RL transitions of a meta-batch, each (obs, action, next_obs, goal) with a goal for each transition.

    `goals` (tasks, 2) are the real ones, `relabel` (tasks,) says which slots get a hindsight task. In episode
    clustering, such a slot has its real buffer swapped for a hindsight buffer: recent episodes of that for the context,
    all of them for the RL batch. A share of both stays with the real buffer, under the hindsight task as well.
    """
    parts = []
    one_episode = rb.draw_episodes(tasks, 1, generator)
    # The next line only draws the numbers that single episode relabelling draws here, so that K = 0 is the same PEARL.
    hindsight_goals(rb, tasks, one_episode, args.hindsight, generator)
    cell = rb.cells.of_episode[tasks[:, None], one_episode % rb.capacity]
    if args.cell_choice == "cell":
        cell = (random(cell.shape, rb.cells.generator) * len(rb.cells.centres)).long()
    relabel = relabel[:, None]
    for size, recent in ((args.context_size, True), (args.batch_size, False)):
        episodes = rb.draw_episodes(tasks, size, generator, recent)
        if recent and args.context == "episode":  # a real task's context is like a test's, see infer
            episodes = torch.where(relabel, episodes, rb.draw_met(tasks, generator)[0])
        cell_tasks, cell_rows = rb.cells.draw(cell, size, recent)
        swap = relabel & (torch.arange(size, device=relabel.device) >= args.exploratory_share * size)
        episodes, episode_tasks = torch.where(swap, cell_rows, episodes), torch.where(swap, cell_tasks, tasks[:, None])
        goal = torch.where(relabel[..., None], rb.cells.centres[cell], goals[:, None]).expand(-1, size, -1)
        steps = (random(episodes.shape, generator) * rb.horizon).long()
        parts.append((*rb.transitions(episode_tasks, episodes, steps), goal))
    return parts


def duplicate_share(obs, action):
    """Share of the transitions (slots, n, dim) of a batch that repeat another one of their slot; NaN without slots."""
    slot = torch.arange(len(obs), device=obs.device)[:, None, None].expand(*obs.shape[:2], 1)
    rows = torch.cat([slot, obs, action], -1).flatten(0, 1)
    return 1 - len(torch.unique(rows, dim=0)) / len(rows) if len(rows) else math.nan


# ALGO LOGIC: training ------------------------------------------------------------------------------------------------
def train(args, folder, saved=None):
    """Meta-train from the start, or on from the content of a checkpoint (PEARL, Algorithm 1). Returns the `Run`."""
    torch.set_num_threads(args.num_threads)
    torch.set_flush_denormal(True)  # Adam's averages of units that died shrink for ever, and tiny numbers are slow
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic kernels need on a GPU
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.manual_seed(args.seed)
    device, task = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu"), Task(args)
    goals = torch.from_numpy(task_goals(TRAIN, args.num_train_tasks, args.goal_distance, args.seed)).to(device)
    rb = ClusteredReplay(args.num_train_tasks, args.buffer_size // task.horizon, task, device)  # HTR
    agent = Agent(task, args).to(device)
    critic = [*agent.encoder.parameters(), *agent.qf1.parameters(), *agent.qf2.parameters()]
    policy, vf, vf_target = (list(net.parameters()) for net in (agent.policy, agent.vf, agent.vf_target))
    optimizer = torch.optim.Adam(critic + policy + vf, lr=args.learning_rate, fused=True)
    run = Run(args, folder, parts := {"agent": agent, "optimizer": optimizer, "replay": rb}, saved)
    optimizer.param_groups[0]["lr"] = args.learning_rate  # not that of the checkpoint
    if not saved:
        run.log_evaluation(evaluate(args, agent, task, folder, "step-0"))
        run.save("checkpoint.pt", parts)
    while run.global_step < args.total_timesteps and not run.stopped:
        # Collect, with z from the prior and then from the posterior (PEARL, Algorithm 1); at first in every task
        iteration_started, run.step_before, run.iteration = time.time(), run.global_step, run.iteration + 1
        rng = np.random.default_rng([args.seed, TRAINING, run.iteration])
        tasks = torch.from_numpy(rng.choice(args.num_train_tasks, args.num_tasks_sample, replace=False)).to(device)
        rounds = [(0, torch.arange(len(goals), device=device), args.initial_episodes, args.initial_episodes)]
        rounds.append((run.iteration, tasks, args.prior_episodes, args.prior_episodes + args.posterior_episodes))
        for number, tasks, prior_episodes, episodes in rounds[0 if run.iteration == 1 else 1 :]:
            obs, actions = collect(args, agent, task, goals[tasks], prior_episodes, episodes, (TRAINING, number))
            met = task.met(obs, goals[tasks])
            rb.context_start[tasks] = rb.end[tasks]
            relabelling = torch.Generator(device).manual_seed(stream(args, RELABELLING, number))  # HTR
            for episode in range(episodes):
                rb.add(tasks, obs[:, episode], actions[:, episode], met[:, episode])
                rb.file(tasks, args.hindsight, relabelling)  # HTR: the hindsight task of the episode
            run.global_step += actions.shape[:3].numel()
        returns = task.reward("sparse", obs[:, :, 1:], actions, goals[tasks, None, None]).sum(-1)

        # Learn from meta-batches, some slots of them with a hindsight task
        cells = torch.Generator(device).manual_seed(stream(args, CELLS, run.iteration))  # HTR
        rb.cells = Cells(rb, args.cell_size or task.goal_radius, episodes, cells)  # HTR: the hindsight buffers
        slots, generator = [], torch.Generator(device).manual_seed(stream(args, REPLAY, run.iteration))
        k = args.relabel_prob * (max(0, 1 - run.global_step / args.relabel_anneal) if args.relabel_anneal else 1)
        kl_lambda = args.kl_lambda * min(1, run.global_step / max(1, args.kl_warmup))
        for _ in range(args.gradient_steps):
            tasks = (random((args.meta_batch_size,), generator) * args.num_train_tasks).long()
            draws = random((args.meta_batch_size if args.relabel_per == "slot" else 1,), generator)
            relabel = (draws < k) & ~(rb.ever_met[tasks, 0] & args.relabel_unrewarded)
            context, (obs, action, next_obs, goal) = sample(rb, tasks, goals[tasks], relabel, args, generator)

            mean, variance = agent.posterior(task.context(*context))
            z = mean + variance.sqrt() * torch.randn(mean.shape, generator=generator, device=device)
            z = z[:, None].expand(-1, args.batch_size, -1)
            z_fixed = z.detach()  # the encoder learns from the Q losses and the KL term alone
            reward = task.reward(args.reward, next_obs, action, goal)
            next_v = agent.vf_target(torch.cat([next_obs, z_fixed], -1)).squeeze(-1)
            q_target = td_target(reward, next_v, args.reward_scale, args.gamma)
            qf1, qf2 = agent.q_values(obs, action, z)
            qf_loss = F.mse_loss(qf1, q_target) + F.mse_loss(qf2, q_target)
            kl_loss = kl_to_prior(mean, variance)
            optimizer.zero_grad()
            (qf_loss + kl_lambda * kl_loss).backward(inputs=critic)

            new_action, log_prob, action_mean, log_std = agent.act(obs, z_fixed, generator=generator)
            min_q = torch.min(*agent.q_values(obs, new_action, z_fixed))
            v = agent.vf(torch.cat([obs, z_fixed], -1)).squeeze(-1)
            vf_loss = F.mse_loss(v, (min_q - log_prob).detach())
            policy_loss = (log_prob - min_q).mean() + 1e-3 * (action_mean.square().mean() + log_std.square().mean())
            (vf_loss + policy_loss).backward(inputs=vf + policy)
            optimizer.step()
            torch._foreach_lerp_(vf_target, [parameter.data for parameter in vf], args.tau)
            slots.append(torch.stack([relabel.float(), goal.norm(dim=-1).mean(-1), reward.mean(-1)]))
        if not all(parameter.isfinite().all() for parameter in agent.parameters()):
            fail(f"networks are no longer numbers at step {run.global_step}; lower --learning-rate", 1)
        if args.prior == "tasks":
            set_prior(args, agent, task, rb, goals, generator)

        # Record
        relabelled, distance, reward = torch.cat(slots, 1)
        new = relabelled.bool()
        scalars = {"charts/success_rate": met.float().mean(), "charts/episodic_return": returns.mean()}
        scalars |= {"charts/rewarded_tasks": rb.ever_met.sum(), "charts/relabel_fraction": relabelled.mean()}
        scalars["charts/hindsight_task_distance"] = distance[new].mean()
        scalars |= {"charts/hindsight_reward": reward[new].mean(), "charts/real_reward": reward[~new].mean()}
        scalars |= {"losses/qf_loss": qf_loss, "losses/vf_loss": vf_loss, "losses/policy_loss": policy_loss}
        scalars |= {"losses/kl_loss": kl_loss, "losses/qf1_values": qf1.mean(), "losses/entropy": -log_prob.mean()}
        scalars["charts/cells"] = len(rb.cells.centres)  # HTR
        scalars["charts/duplicate_share"] = duplicate_share(obs[relabel], action[relabel])  # HTR: in the last update
        run.train_s += time.time() - iteration_started
        scalars["charts/updates_per_second"] = run.iteration * args.gradient_steps / run.train_s
        if run.passed(args.eval_frequency):
            run.log_evaluation(evaluate(args, agent, task, folder, f"step-{run.global_step}"))
        run.log(scalars)
        if run.stopped or run.passed(args.checkpoint_frequency):
            run.save("checkpoint.pt", parts)
    if args.save_model:
        run.save("model.pt", {"agent": agent})
    run.writer.close()
    return run


# PLUMBING: errors, files, logs, command line; nothing of the algorithm -----------------------------------------------
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
    """Refuse what cannot work. Whole numbers are at least 1 and others at least 0, but for the ones named here."""
    task, episodes = Task(args), max(args.initial_episodes, args.prior_episodes + args.posterior_episodes)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 // (task.obs_dim + task.action_dim)
    span = dict.fromkeys("seed checkpoint_frequency posterior_episodes relabel_anneal kl_warmup".split(), (0, math.inf))
    span |= dict.fromkeys(("relabel_prob", "gamma", "tau"), (0, 1)) | {"num_tasks_sample": (1, args.num_train_tasks)}
    span["buffer_size"] = episodes * task.horizon, memory // max(1, args.num_train_tasks)  # an iteration, the machine
    span |= {"exploratory_share": (0, 1), "cell_size": (1e-9, 2**0.5 * task.goal_radius)}  # HTR: corner to centre
    for name, value in vars(args).items():
        low, high = span.get(name, (int(type(value) is int), math.inf))
        if type(value) in (int, float) and not low <= value <= high:
            fail(f"--{name.replace('_', '-')} must be from {low} to {high}, not {value}")


class Run:
    """Counters and files of a training: TensorBoard, eval.csv, checkpoints. Ctrl-C and SIGTERM set `stopped`."""

    def __init__(self, args, folder, parts, saved):
        self.args, self.folder, self.stopped, self.metrics = args, folder, False, {}
        self.global_step = self.step_before = self.iteration = self.train_s = self.wall_s = self.sps = 0
        rows, eval_csv = ["seed,global_step,metric,value,n_episodes,wall_s\n"], Path(folder, "eval.csv")
        if saved:  # go on in the same files, without what came after the checkpoint
            vars(self).update(saved["counters"])
            with or_fail(f"cannot go on in {folder}"), eval_csv.open() as file:
                rows += [row for row in list(file)[1:] if int(row.split(",")[1]) <= self.global_step]
                for name, part in parts.items():
                    part.load_state_dict(saved[name])
        with or_fail(f"cannot start in {folder}, see --run-dir and --track"):
            wandb = importlib.import_module("wandb") if args.track else None
            os.makedirs(folder, exist_ok=bool(saved))
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
        self.stopped = True
        signal.signal(signum, signal.SIG_DFL)  # a second one stops at once

    def passed(self, frequency):
        """Whether the last iteration went past a multiple of `frequency` (0: never) or reached the end."""
        done, every = self.global_step >= self.args.total_timesteps, frequency or math.inf
        return done or self.global_step // every > self.step_before // every

    def log(self, scalars):
        """What an iteration gave, to TensorBoard, and how far training is, to the terminal."""
        self.sps, total = self.global_step / self.train_s, self.args.total_timesteps
        for tag, value in (scalars | {"charts/SPS": self.sps}).items():
            if value == value:  # no mean of nothing
                self.writer.add_scalar(tag, value, self.global_step)
        if sys.stderr.isatty() and not self.args.quiet:
            left = f"{self.sps:.0f} steps/s, {max(0, total - self.global_step) / self.sps / 60:.0f} min left"
            line = f"step {self.global_step} of {total}, {left}, success {self.metrics['success_rate']:.2f} "
            print(line, end="\r", file=sys.stderr, flush=True)

    def log_evaluation(self, metrics):
        """To eval.csv and TensorBoard, at the step of the grid that is the same for all seeds."""
        self.metrics, self.wall_s, every = metrics, round(time.time() - self.started, 3), self.args.eval_frequency
        step = self.args.total_timesteps if self.passed(0) else self.global_step // every * every
        with open(f"{self.folder}/eval.csv", "a") as file:
            for key, values in metrics.items():
                for i, value in enumerate(values if key.endswith("by_episode") else [values]):
                    tag = f"eval/{key.replace('by_episode', f'ep{i}')}"
                    print(self.args.seed, step, tag, value, self.args.num_test_tasks, self.wall_s, sep=",", file=file)
                    self.writer.add_scalar(tag, value, step)

    def save(self, name, parts):
        """Write to a temporary name, then rename: the file is always whole, the earlier one or the new one."""
        self.wall_s, path = time.time() - self.started, f"{self.folder}/{name}"
        counters = {key: value for key, value in vars(self).items() if type(value) in (int, float, dict)}
        content = {"format": Args.exp_name, "args": vars(self.args), "counters": counters}
        with or_fail(f"cannot write {path}, an earlier one is kept", 1):
            torch.save(content | {name: part.state_dict() for name, part in parts.items()}, f"{path}.tmp")
            os.replace(f"{path}.tmp", path)


def main():
    started, args, saved = time.time(), tyro.cli(Args, description=__doc__), None
    if path := args.resume or args.evaluate:
        path = os.path.join(path, "checkpoint.pt") if os.path.isdir(path) else path
        with or_fail(f"{path} is not a whole checkpoint.pt (or model.pt, for --evaluate alone) of {Args.exp_name}.py"):
            saved = torch.load(path, map_location="cpu", weights_only=True)
            if saved["format"] != Args.exp_name or args.resume and (args.evaluate or "replay" not in saved):
                raise ValueError(f"it is of {saved['format']}.py, with {', '.join(saved)}")
            old_args = Args(**saved["args"] | {"resume": None, "evaluate": None})
        args = tyro.cli(Args, description=__doc__, default=old_args)
        fixed = "env_id num_train_tasks latent_dim hidden_size"
        for name in (fixed + " seed goal_distance goal_radius horizon buffer_size" * bool(args.resume)).split():
            if getattr(args, name) != getattr(old_args, name):
                fail(f"--{name.replace('_', '-')} is that of {path} and cannot change: leave it out")
    check(args)
    name = f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{int(1000 * started)}"
    folder = (os.path.dirname(path) or ".") if args.resume else os.path.join(args.run_dir, name)
    if args.evaluate:
        agent, counts = Agent(task := Task(args), args), saved["counters"]
        agent.load_state_dict(saved["agent"])
        counts |= {"metrics": evaluate(args, agent, task, folder, "evaluate"), "wall_s": time.time() - started}
        counts["sps"] = args.num_test_tasks * args.eval_episodes * task.horizon / counts["wall_s"]
    else:
        counts = vars(train(args, folder, saved))
    line = {"run": args.evaluate or folder, "env_id": args.env_id, "seed": args.seed, "n_episodes": args.num_test_tasks}
    line |= {"global_step": counts["global_step"], "wall_s": round(counts["wall_s"], 3), "sps": round(counts["sps"], 1)}
    print(json.dumps(line | counts["metrics"]), flush=True)
    sys.exit(130 if counts.get("stopped") else 0)


if __name__ == "__main__":
    main()
