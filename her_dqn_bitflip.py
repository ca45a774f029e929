"""DQN + Hindsight Experience Replay (HER) on bit flipping: the smallest task that shows why hindsight helps.

Andrychowicz et al., "Hindsight Experience Replay", NeurIPS 2017: Sec. 3.1, Fig. 1, Algorithm 1, Appendix A. Try:

  python her_dqn_bitflip.py --n-bits 15
  python her_dqn_bitflip.py --n-bits 15 --strategy none
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
import tyro

from envs import bit_flip  # noqa: F401  registers BitFlip-v0


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """name of the experiment, a part of the run's name"""
    seed: int = 1
    """seed of network, exploration, tasks and replay; evaluation tasks are drawn apart from training tasks"""
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
    """film an episode at each evaluation (needs `pip install moviepy`)"""
    save_model: bool = False
    """write the trained network to model.pt"""
    quiet: bool = False
    """no progress on the terminal"""
    run_dir: str = "runs"
    """folder that gets one new folder a run"""
    resume: Optional[str] = None
    """checkpoint.pt to continue from; its arguments hold wherever the command line gives no others"""
    evaluate: Optional[str] = None
    """model.pt or checkpoint.pt to play for `--eval-episodes` episodes instead of training"""
    checkpoint_frequency: int = 0
    """environment steps between checkpoints; 0: only at the end, on Ctrl-C and on SIGTERM"""

    env_id: str = "BitFlip-v0"
    """Gymnasium id of a batched task (`gym.make_vec`) with discrete actions, goals and the argument n"""
    total_timesteps: int = 50_000
    """environment steps, all environments counted"""
    eval_frequency: int = 5_000
    """environment steps between evaluations"""
    eval_episodes: int = 1000
    """episodes of an evaluation"""

    n_bits: int = 15
    """bits of state and goal, actions, and steps of an episode at most (Sec. 3.1: n)"""
    terminate: bool = True
    """an episode ends at its goal, and its last target does not bootstrap (`--no-terminate`: n steps, all bootstrap)"""
    reward: Literal["sparse", "shaped"] = "sparse"
    """-[s != g], or -||s - g||^2 (Sec. 3.1)"""
    num_envs: int = 16
    """environments; a cycle is one episode in each, then `--gradient-steps` updates (App. A: 16)"""
    gradient_steps: int = 20
    """updates of a cycle (App. A: 40)"""
    buffer_size: int = 1_000_000
    """transitions in the replay buffer (App. A: 1e6)"""
    batch_size: int = 512
    """transitions in a minibatch (App. A: 128)"""
    learning_rate: float = 1e-3
    """Adam's step size (App. A: 0.001)"""
    anneal_lr: bool = False
    """lower it linearly to 0 at `--total-timesteps`: what 75 bits need, see docs/her_dqn_bitflip.md"""
    gamma: float = 0.98
    """discount factor (App. A: 0.98)"""
    strategy: Literal["future", "final", "episode", "random", "none"] = "future"
    """achieved goals to relabel with (Sec. 4.5): later in the episode, its last, any of it, any in the buffer, none"""
    k: float = 4
    """relabelled samples for each one with its own goal (Sec. 4.5); 0: no HER, plain DQN"""
    epsilon: float = 0.2
    """probability of a uniform action (App. A: 0.2)"""
    tau: float = 0.05
    """step of the target network towards the network (App. A: 0.05)"""
    target_network_frequency: int = 1
    """updates between steps of the target network (App. A: 40)"""
    hidden_size: int = 256
    """units in the one hidden layer (App. A: 256)"""


class BadInput(Exception):
    """What the user gave cannot work; exit status 2."""


class RunFailed(Exception):
    """A run broke off; exit status 1."""


def make_envs(args, num_envs, mode="vector_entry_point", **kwargs):
    """`num_envs` episodes that advance in one call, see envs/bit_flip.py."""
    kwargs |= {"n": args.n_bits, "terminate": args.terminate, "shaped": args.reward == "shaped"}
    try:
        return gym.make_vec(args.env_id, num_envs, mode, **kwargs)
    except gym.error.UnregisteredEnv as e:
        close = ", ".join(difflib.get_close_matches(args.env_id, gym.registry, 3)) or "none is close"
        raise BadInput(f"unknown --env-id {args.env_id}; did you mean: {close}?") from e
    except (gym.error.Error, TypeError) as e:
        raise BadInput(f"{args.env_id} is not a batched task with n bits, terminate and shaped: {e}") from e


# ALGO LOGIC: the network ---------------------------------------------------------------------------------------------
class QNetwork(nn.Module):
    """Q(s, g, a) of all actions: bits (batch, n) of state and goal -> (batch, n). One hidden layer (App. A)."""

    def __init__(self, n_bits, hidden_size):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * n_bits, hidden_size), nn.ReLU(), nn.Linear(hidden_size, n_bits))

    def inputs(self, observation, desired_goal):
        return torch.cat([observation, desired_goal], -1).float() * 2 - 1  # 0 and 1 as -1 and 1

    def forward(self, observation, desired_goal):
        return self.layers(self.inputs(observation, desired_goal))


def td_target(reward, terminated, next_q, gamma, lowest_reward):
    """r + gamma max_a Q'(s', g, a), (batch,), clipped to the possible returns [lowest / (1 - gamma), 0] (App. A).

    The last step before the time limit bootstraps like any other; only a termination does not.
    """
    return (reward + gamma * (1 - terminated) * next_q).clamp(lowest_reward / (1 - gamma), 0)


@torch.no_grad()
def td_loss(network, inputs, action, target):
    """Mean of (Q(s, g, a) - target)^2, its gradients in the order of `network.parameters()`, and Q(s, g, a), (batch,).

    The gradients are written out because each row has an error at one action alone, where autograd goes through the
    outputs of all n.
    """
    first, _, last = network.layers
    hidden = first(inputs).relu_()
    weight = last.weight.index_select(0, action)  # of the action taken, (batch, hidden_size)
    q_values = (hidden * weight).sum(-1) + last.bias[action]
    error = q_values - target
    dq = (2 / len(error)) * error
    d_weight = torch.zeros_like(last.weight).index_add_(0, action, dq[:, None] * hidden)
    d_bias = torch.zeros_like(last.bias).index_add_(0, action, dq)
    d_hidden = dq[:, None] * weight * hidden.sign()  # the ReLU's derivative is 1 where it lets through, else 0
    return error.square().mean(), [d_hidden.T @ inputs, d_hidden.sum(0), d_weight, d_bias], q_values


def play_episodes(envs, network, seed, epsilon=0.0):
    """Play one episode in each environment, epsilon-greedily. All that is random follows from `seed`.

    Returns a dict of arrays with one row an episode: observation (m, T + 1, n), desired_goal (m, n), action (m, T),
    return (m,), success (m,), and length (m,), the steps of the episode, of the T that are there.
    """
    device = next(network.parameters()).device
    rng = np.random.default_rng(seed)
    obs, info = envs.reset(seed=seed)
    ended = np.zeros(envs.num_envs, bool)
    length, returns = np.zeros(envs.num_envs, int), np.zeros(envs.num_envs)
    observations, actions = [obs["observation"]], []
    while not ended.all():
        state = (torch.from_numpy(obs[key]).to(device) for key in ("observation", "desired_goal"))
        with torch.no_grad():
            action = network(*state).argmax(-1).cpu().numpy()
        if epsilon:
            uniform = rng.integers(envs.single_action_space.n, size=envs.num_envs)
            action = np.where(rng.random(envs.num_envs) < epsilon, uniform, action)
        length += ~ended
        obs, reward, terminated, truncated, info = envs.step(action)
        returns += reward  # 0 for an episode that has ended
        ended = terminated | truncated
        observations.append(obs["observation"])
        actions.append(action)
    episodes = {"observation": np.stack(observations, 1), "desired_goal": obs["desired_goal"]}
    episodes |= {"action": np.stack(actions, 1), "length": length}
    return episodes | {"return": returns, "success": info["is_success"]}


# ALGO LOGIC: replay and hindsight ------------------------------------------------------------------------------------
class ReplayBuffer:
    """Ring of transitions. A step is known by its number since the start, `row = step % capacity`; all episodes are
    whole: when the ring overwrites the first steps of an episode, the rest of it is forgotten too."""

    def __init__(self, capacity, n_bits):
        need = capacity * (3 * n_bits + 24) / 2**30
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        if need > have:
            raise BadInput(f"--buffer-size {capacity} takes {need:.1f} GiB, this machine has {have:.1f} GiB")
        self.capacity, self.first, self.end = capacity, 0, 0  # steps first .. end - 1 are stored
        self.data = {key: np.zeros((capacity, n_bits), np.int8) for key in ("observation", "next_observation")}
        self.data |= {"desired_goal": np.zeros((capacity, n_bits), np.int8)}
        self.data |= {key: np.zeros(capacity, np.int64) for key in ("action", "episode_start", "episode_end")}

    def add(self, episodes):
        """Store what `play_episodes` returns, episode after episode."""
        length = episodes["length"]
        ends = self.end + np.cumsum(length)
        while ends[-1] - self.first > self.capacity:
            self.first = int(self.data["episode_end"][self.first % self.capacity])
        rows = np.arange(self.end, ends[-1]) % self.capacity
        played = np.arange(episodes["action"].shape[1]) < length[:, None]
        self.data["observation"][rows] = episodes["observation"][:, :-1][played]
        self.data["next_observation"][rows] = episodes["observation"][:, 1:][played]
        self.data["action"][rows] = episodes["action"][played]
        self.data["desired_goal"][rows] = episodes["desired_goal"].repeat(length, 0)
        self.data["episode_start"][rows] = (ends - length).repeat(length)
        self.data["episode_end"][rows] = ends.repeat(length)
        self.end = int(ends[-1])

    def hindsight_steps(self, strategy, steps, rng):
        """The steps whose outcome becomes the goal of each of `steps` (Sec. 4.5)."""
        start, end = (self.data[key][steps % self.capacity] for key in ("episode_start", "episode_end"))
        if strategy == "future":  # the step itself counts: its outcome is achieved at t + 1
            return rng.integers(steps, end)
        if strategy == "final":
            return end - 1
        if strategy == "episode":
            return rng.integers(start, end)
        return rng.integers(self.first, self.end, len(steps))  # random

    def sample(self, n, strategy, k, rng):
        """n transitions (dict of arrays) with the goals of k / (k + 1) of them replaced, and which those are.

        To relabel while sampling is the same as to store k relabelled copies of each transition (Algorithm 1).
        """
        steps = rng.integers(self.first, self.end, n)
        keys = ("observation", "next_observation", "desired_goal", "action")
        batch = {key: self.data[key][steps % self.capacity] for key in keys}
        hindsight = rng.random(n) * (k + 1) < (0 if strategy == "none" else k)
        outcomes = self.hindsight_steps(strategy, steps[hindsight], rng)
        batch["desired_goal"][hindsight] = self.data["next_observation"][outcomes % self.capacity]
        return batch, hindsight

    def state_dict(self):
        used = slice(min(self.end, self.capacity))
        return {"first": self.first, "end": self.end} | {k: torch.from_numpy(a[used]) for k, a in self.data.items()}

    def load_state_dict(self, state):
        self.first, self.end = state["first"], state["end"]
        for key, array in self.data.items():
            array[: len(state[key])] = state[key].numpy()


# ------------------------------------------------------------------------------------------------------------- files
FORMAT = "her_dqn_bitflip 1"


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
    raise BadInput(f"{path} is not a whole checkpoint.pt or model.pt of her_dqn_bitflip.py")


def load_modules(modules, saved):
    try:
        for name, module in modules.items():
            module.load_state_dict(saved[name])
    except (KeyError, RuntimeError, ValueError) as e:
        reason = str(e).splitlines()[-1].strip()
        raise BadInput(f"what was saved does not fit --n-bits and --hidden-size: {reason}") from e


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
    packages = ("torch", "numpy", "gymnasium")
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

    No random generator is among it: all randomness follows from (seed, purpose, cycle).
    """

    global_step: int = 0  # environment steps
    cycle: int = 0
    updates: int = 0
    wall_s: float = 0.0
    train_s: float = 0.0  # without evaluations
    metrics: dict = field(default_factory=dict)  # of the last evaluation
    eval_rows: list = field(default_factory=list)  # eval.csv


def stream(args, purpose, cycle=0):
    return int(np.random.SeedSequence([args.seed, purpose, cycle]).generate_state(1)[0])


def summarize(episodes):
    """Means over episodes: success at any step (App. A), return, and the share of actions that flip a wrong bit."""
    bits, goal, action = (episodes[key] for key in ("observation", "desired_goal", "action"))
    flipped = np.take_along_axis(bits[:, :-1], action[..., None], -1)[..., 0]
    right = flipped != np.take_along_axis(goal, action, -1)
    played = np.arange(action.shape[1]) < episodes["length"][:, None]
    metrics = {"success_rate": episodes["success"].mean(), "episodic_return": episodes["return"].mean()}
    return {key: float(value) for key, value in metrics.items()} | {"right_flip_rate": float(right[played].mean())}


def film(args, network, folder, name):
    """Record an episode as folder/name-episode-0.mp4: the state's bits, the goal's, and which are wrong."""

    def record(env):
        with warnings.catch_warnings(action="ignore"):  # the folder may hold earlier films
            return gym.wrappers.RecordVideo(env, folder, lambda episode: True, name_prefix=name, disable_logger=True)

    try:
        env = make_envs(args, 1, "sync", render_mode="rgb_array", wrappers=[record])
        play_episodes(env, network, stream(args, EVALUATION))
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
    envs, eval_envs = make_envs(args, args.num_envs), make_envs(args, args.eval_episodes)
    lowest_reward = -args.n_bits if args.reward == "shaped" else -1

    # ALGO LOGIC: replay, network, optimizer
    rb = ReplayBuffer(args.buffer_size, args.n_bits)
    q_network = QNetwork(args.n_bits, args.hidden_size).to(device)
    target_network = copy.deepcopy(q_network)
    parameters, target_parameters = list(q_network.parameters()), list(target_network.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.learning_rate, fused=True)
    modules = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer}
    progress = Progress()
    if saved:
        if "replay" not in saved:
            raise BadInput(f"{args.resume} is a network alone: --resume needs a checkpoint.pt")
        if args.buffer_size != saved["args"].buffer_size:
            raise BadInput("--buffer-size cannot change on --resume: leave it out")
        load_modules(modules, saved)
        rb.load_state_dict(saved["replay"])
        progress = Progress(**saved["progress"])

    run = new_run_folder(args)
    writer = open_writer(args, run)
    eval_file = open(f"{run}/eval.csv", "w", newline="")
    eval_csv = csv.writer(eval_file)
    eval_csv.writerow(["seed", "global_step", "metric", "value", "n_episodes", "wall_s"])
    eval_csv.writerows(progress.eval_rows)
    signals = []  # Ctrl-C or SIGTERM: end the cycle, save, stop; a second one stops at once
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _: (signals.append(signum), signal.signal(signum, signal.SIG_DFL)))
    started = time.time() - progress.wall_s

    def evaluate_policy(step):
        """The target network plays (App. A), without exploration, tasks that training does not see."""
        progress.metrics = summarize(play_episodes(eval_envs, target_network, stream(args, EVALUATION)))
        wall_s = round(time.time() - started, 3)
        for key, value in (progress.metrics | {"training_episodes": progress.cycle * args.num_envs}).items():
            progress.eval_rows.append([args.seed, step, f"eval/{key}", value, args.eval_episodes, wall_s])
            eval_csv.writerow(progress.eval_rows[-1])
            writer.add_scalar(f"eval/{key}", value, step)
        eval_file.flush()
        if args.capture_video:
            film(args, target_network, f"{run}/videos", f"step-{step}")

    def policy_file():
        content = {"format": FORMAT, "args": dataclasses.asdict(args), "global_step": progress.global_step}
        return content | {"target_network": target_network.state_dict()}

    if not progress.eval_rows:
        evaluate_policy(0)
    while progress.global_step < args.total_timesteps and not signals:
        # ALGO LOGIC: play one episode in each environment and store them with their own goals (Algorithm 1)
        cycle_started = time.time()
        episodes = play_episodes(envs, q_network, stream(args, TRAINING, progress.cycle), args.epsilon)
        rb.add(episodes)
        steps = int(episodes["length"].sum())
        progress.cycle += 1
        progress.global_step += steps

        # ALGO LOGIC: draw the cycle's minibatches, with hindsight goals and the rewards that these give
        rng = np.random.default_rng([args.seed, REPLAY, progress.cycle])
        batch, hindsight = rb.sample(args.gradient_steps * args.batch_size, args.strategy, args.k, rng)
        outcome = batch["next_observation"], batch["desired_goal"], {}  # the state after the step (Algorithm 1)
        batch["reward"] = envs.compute_reward(*outcome).astype(np.float32)
        batch["terminated"] = envs.compute_terminated(*outcome).astype(np.float32)
        data = {key: torch.from_numpy(value).to(device) for key, value in batch.items()}
        inputs = q_network.inputs(data["observation"], data["desired_goal"])
        next_inputs = q_network.inputs(data["next_observation"], data["desired_goal"])

        # ALGO LOGIC: learn
        left = max(0, 1 - progress.global_step / args.total_timesteps) if args.anneal_lr else 1
        for group in optimizer.param_groups:
            group["lr"] = left * args.learning_rate
        columns = inputs, data["action"], data["reward"], next_inputs, data["terminated"]
        for x, action, reward, next_x, terminated in zip(*(column.split(args.batch_size) for column in columns)):
            with torch.no_grad():
                next_q = target_network.layers(next_x).amax(-1)
            target = td_target(reward, terminated, next_q, args.gamma, lowest_reward)
            loss, gradients, q_values = td_loss(q_network, x, action, target)
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient
            optimizer.step()
            progress.updates += 1
            if progress.updates % args.target_network_frequency == 0:
                with torch.no_grad():
                    torch._foreach_lerp_(target_parameters, parameters, args.tau)

        # Record: TensorBoard, evaluation, checkpoint, terminal
        if not math.isfinite(loss.item()):
            raise RunFailed(f"the loss is not a number at step {progress.global_step}; lower --learning-rate")
        progress.train_s += time.time() - cycle_started
        sps = progress.global_step / progress.train_s
        relabelled = batch["desired_goal"][hindsight]
        scalars = {f"charts/{key}": value for key, value in summarize(episodes).items()}
        scalars |= {
            "charts/learning_rate": optimizer.param_groups[0]["lr"],
            "charts/SPS": sps,
            "charts/buffer_size": rb.end - rb.first,
        }
        scalars |= {"losses/td_loss": loss.item(), "losses/q_values": q_values.mean().item()}
        scalars["charts/relabel_fraction"] = hindsight.mean()
        if len(relabelled):
            scalars["charts/zero_reward_fraction"] = (batch["reward"][hindsight] == 0).mean()
            scalars["charts/hindsight_distance"] = (relabelled != batch["observation"][hindsight]).sum(-1).mean()
        for key, value in scalars.items():
            writer.add_scalar(key, value, progress.global_step)
        done = progress.global_step >= args.total_timesteps
        grid_step = progress.global_step - progress.global_step % args.eval_frequency
        if done or grid_step > progress.global_step - steps:
            evaluate_policy(args.total_timesteps if done else grid_step)
        if sys.stderr.isatty() and not args.quiet:
            left = max(0, args.total_timesteps - progress.global_step) / sps
            line = f"step {progress.global_step} of {args.total_timesteps}, {sps:.0f} steps/s, {left:.0f} s left"
            end = "\n" if done or signals else ""
            print(f"\r{line}, success {progress.metrics['success_rate']:.3f} ", end=end, file=sys.stderr)
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
    line |= {"wall_s": round(wall_s, 3), "sps": round(sps, 1)} | metrics | {"n_episodes": args.eval_episodes}
    print(json.dumps(line), flush=True)


def evaluate(args, saved):
    """Play a saved network and print its success with Wilson's 95% interval; returns the exit status."""
    started = time.time()
    envs, network = make_envs(args, args.eval_episodes), QNetwork(args.n_bits, args.hidden_size)
    load_modules({"target_network": network}, saved)
    episodes = play_episodes(envs, network, stream(args, EVALUATION))
    metrics = summarize(episodes)
    n, p, z2 = args.eval_episodes, metrics["success_rate"], 1.959964**2
    middle, half = (p + z2 / 2 / n) / (1 + z2 / n), math.sqrt(z2 * (p * (1 - p) / n + z2 / 4 / n**2)) / (1 + z2 / n)
    print(f"success {p:.3f}, 95% interval [{middle - half:.3f}, {middle + half:.3f}], {n} episodes", file=sys.stderr)
    if args.capture_video:
        film(args, network, f"{new_run_folder(args)}/videos", "evaluate")
    wall_s = time.time() - started
    report(args.evaluate, args, saved["global_step"], wall_s, episodes["length"].sum() / wall_s, metrics)
    return 0


def check(args):
    """Refuse what cannot work before anything is written."""
    counts = "num_threads total_timesteps eval_frequency eval_episodes n_bits num_envs gradient_steps buffer_size"
    counts += " batch_size target_network_frequency hidden_size"
    for names, low, high in (
        (counts, 1, math.inf),
        ("seed checkpoint_frequency learning_rate k", 0, math.inf),
        ("gamma epsilon tau", 0, 1),
    ):
        for name in names.split():
            if not low <= getattr(args, name) <= high:
                bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
                raise BadInput(f"--{name.replace('_', '-')} must be {bounds}, not {getattr(args, name)}")
    if args.gamma == 1:
        raise BadInput("--gamma must be below 1, targets are clipped to 1 / (1 - gamma) rewards")
    if args.buffer_size < args.num_envs * args.n_bits:
        cycle = f"--num-envs {args.num_envs} episodes of {args.n_bits} steps"
        raise BadInput(f"--buffer-size {args.buffer_size} does not hold a cycle of {cycle}")
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
