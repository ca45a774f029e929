"""DQN + Hindsight Experience Replay (HER) on bit flipping: the smallest task that shows why hindsight helps.

Andrychowicz et al., "Hindsight Experience Replay", NeurIPS 2017: Sec. 3.1, Fig. 1, Algorithm 1, Appendix A. Try:

  python her_dqn_bitflip.py --n-bits 15
  python her_dqn_bitflip.py --n-bits 15 --strategy none
"""

import contextlib
import copy
import functools
import importlib
import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter

from envs import bit_flip  # noqa: F401  registers BitFlip-v0


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]  # name of the experiment, a part of the run's name
    seed: int = 1  # of network, exploration, tasks and replay; evaluation tasks are drawn apart from training tasks
    torch_deterministic: bool = True  # deterministic torch kernels only (`--no-torch-deterministic` allows others)
    cuda: bool = True  # learn on a GPU if there is one, else on the CPU (`--no-cuda`: always on the CPU)
    num_threads: int = 1  # torch threads; 1 is best for small networks on a shared CPU
    track: bool = False  # log to Weights & Biases too (needs `pip install wandb`)
    wandb_project_name: str = "hindsight"  # W&B project
    wandb_entity: Optional[str] = None  # W&B team or user; None: your default one
    capture_video: bool = False  # film an episode at each evaluation (needs `pip install moviepy`)
    save_model: bool = False  # write the trained network to model.pt
    quiet: bool = False  # no progress on the terminal
    run_dir: str = "runs"  # folder that gets one new folder a run
    resume: Optional[str] = None  # folder of a run, or its checkpoint.pt, to go on with; its arguments hold by default
    evaluate: Optional[str] = None  # model.pt, checkpoint.pt or folder of a run to play `--eval-episodes` episodes with
    checkpoint_frequency: int = 0  # environment steps between checkpoints; 0: at the end and on Ctrl-C

    env_id: str = "BitFlip-v0"  # Gymnasium id of a batched task (`gym.make_vec`) with discrete actions, goals and n
    total_timesteps: int = 50_000  # environment steps, all environments counted
    eval_frequency: int = 5_000  # environment steps between evaluations
    eval_episodes: int = 1000  # episodes of an evaluation

    n_bits: int = 15  # bits of state and goal, actions, and steps of an episode at most (Sec. 3.1: n)
    terminate: bool = True  # the goal ends an episode, its last target does not bootstrap (`--no-terminate`: n steps)
    reward: Literal["sparse", "shaped"] = "sparse"  # -[s != g], or -||s - g||^2 (Sec. 3.1)
    num_envs: int = 16  # environments; a cycle is one episode in each, then `--gradient-steps` updates (App. A: 16)
    gradient_steps: int = 20  # updates of a cycle (App. A: 40)
    buffer_size: int = 1_000_000  # transitions in the replay buffer (App. A: 1e6)
    batch_size: int = 512  # transitions in a minibatch (App. A: 128)
    learning_rate: float = 1e-3  # Adam's step size (App. A: 0.001)
    anneal_lr: bool = False  # lower it linearly to 0 at `--total-timesteps`, which 75 bits need
    gamma: float = 0.98  # discount factor (App. A: 0.98)
    # achieved goals to relabel with (Sec. 4.5): later in the episode, its last, any of it, any in the buffer, none
    strategy: Literal["future", "final", "episode", "random", "none"] = "future"
    k: float = 4  # relabelled samples for each one with its own goal (Sec. 4.5); 0: no HER, plain DQN
    epsilon: float = 0.2  # probability of a uniform action (App. A: 0.2)
    tau: float = 0.05  # step of the target network towards the network (App. A: 0.05)
    target_network_frequency: int = 1  # updates between steps of the target network (App. A: 40)
    hidden_size: int = 256  # units in the one hidden layer (App. A: 256)


# ------------------------------------------------------------------------------------------------------- environments
def make_envs(args, num_envs, mode="vector_entry_point", **kwargs):
    """`num_envs` episodes that advance in one call, see envs/bit_flip.py."""
    kwargs |= {"n": args.n_bits, "terminate": args.terminate, "shaped": args.reward == "shaped"}
    with or_fail(f"--env-id {args.env_id} cannot be made as a batched task with n bits, terminate and shaped"):
        return gym.make_vec(args.env_id, num_envs, mode, **kwargs)


# ALGO LOGIC: networks ------------------------------------------------------------------------------------------------
class QNetwork(nn.Module):
    """Q(s, g, a) of all actions: bits (batch, n) of state and goal -> (batch, n). One hidden layer (App. A)."""

    def __init__(self, n_bits, hidden_size):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * n_bits, hidden_size), nn.ReLU(), nn.Linear(hidden_size, n_bits))

    def forward(self, observation, desired_goal):
        return self.layers(torch.cat([observation, desired_goal], -1).float() * 2 - 1)  # 0 and 1 as -1 and 1


def td_target(reward, terminated, next_q, gamma, lowest_reward):
    """r + gamma max_a Q'(s', g, a), (batch,), clipped to possible returns (App. A); time limits do not terminate."""
    return (reward + gamma * (1 - terminated) * next_q).clamp(lowest_reward / (1 - gamma), 0)


# ALGO LOGIC: playing episodes ----------------------------------------------------------------------------------------
def play_episodes(envs, network, seed, epsilon=0.0):
    """Play one episode in each environment, epsilon-greedily; all that is random follows from `seed`, whole numbers.

    Returns a dict of arrays: observation (m, T + 1, n), desired_goal (m, n), action (m, T), length (m,), the steps of
    each episode of these T; and means: success at any step (App. A), return, share of actions that mend a bit.
    """
    rng, device = np.random.default_rng(seed), next(network.parameters()).device
    obs, info = envs.reset(seed=int(rng.integers(2**31)))
    observations, actions, ended = [obs["observation"].copy()], [], np.zeros(envs.num_envs, bool)
    returns, length, right_flips = np.zeros((3, envs.num_envs))
    while not ended.all():
        with torch.no_grad():
            q_values = network(*(torch.from_numpy(obs[key]).to(device) for key in ("observation", "desired_goal")))
        uniform = rng.integers(q_values.shape[1], size=envs.num_envs)
        action = np.where(rng.random(envs.num_envs) < epsilon, uniform, q_values.argmax(-1).cpu().numpy())
        wrong = np.take_along_axis(obs["observation"] != obs["desired_goal"], action[:, None], -1)[:, 0]
        length, right_flips = length + ~ended, right_flips + (wrong & ~ended)
        obs, reward, terminated, truncated, info = envs.step(action)
        returns, ended = returns + reward, terminated | truncated  # after its end an episode has reward 0
        observations.append(obs["observation"].copy())
        actions.append(action)
    episodes = {"observation": np.stack(observations, 1), "desired_goal": obs["desired_goal"].copy()}
    episodes |= {"action": np.stack(actions, 1), "length": length.astype(int)}
    rates = right_flips / length.mean()
    metrics = {"success_rate": info["is_success"], "episodic_return": returns, "right_flip_rate": rates}
    return episodes, {key: float(values.mean()) for key, values in metrics.items()}


# ALGO LOGIC: replay and hindsight ------------------------------------------------------------------------------------
class ReplayBuffer:
    """Ring of whole episodes, each of up to n steps, with the states before its steps and after its last one."""

    def __init__(self, capacity, n_bits):
        self.capacity, self.end = capacity, 0  # `end` episodes were ever stored; number i is in row i % capacity
        self.data = {"observation": np.zeros((capacity, n_bits + 1, n_bits), np.int8)}
        self.data |= {"desired_goal": np.zeros((capacity, n_bits), np.int8)}
        self.data |= {"action": np.zeros((capacity, n_bits), np.int64), "length": np.zeros(capacity, np.int64)}

    def add(self, episodes):
        """Store what `play_episodes` returns, with the goals that the episodes had."""
        rows = np.arange(self.end, self.end + len(episodes["length"])) % self.capacity
        played = episodes["action"].shape[1]
        self.data["observation"][rows, : played + 1] = episodes["observation"]
        self.data["action"][rows, :played] = episodes["action"]
        self.data["desired_goal"][rows], self.data["length"][rows] = episodes["desired_goal"], episodes["length"]
        self.end += len(rows)

    def draw(self, n, rng):
        """Row and step of n random transitions, (n,) each; every stored transition is as likely as any other."""
        last = self.data["length"].cumsum()  # of rows that are not filled yet the length is 0
        number = rng.integers(last[-1], size=n)
        row = np.searchsorted(last, number, side="right")
        return row, number - (last[row] - self.data["length"][row])

    def sample(self, n, strategy, k, rng):
        """n transitions (dict of arrays), the goals of k / (k + 1) of them replaced (Sec. 4.5), and which those are.

        That is the same as if k relabelled copies of each transition had been stored (Algorithm 1).
        """
        row, step = self.draw(n, rng)
        states, length = self.data["observation"], self.data["length"][row]
        if strategy == "random":
            outcome_row, outcome = self.draw(n, rng)
        else:  # a step belongs to its own future: what it achieved is the state after it
            first = {"future": step, "final": length - 1, "episode": 0, "none": 0}[strategy]
            outcome_row, outcome = row, rng.integers(first, length)
        hindsight = rng.random(n) * (k + 1) < (0 if strategy == "none" else k)
        goal = np.where(hindsight[:, None], states[outcome_row, outcome + 1], self.data["desired_goal"][row])
        batch = {"observation": states[row, step], "action": self.data["action"][row, step]}
        return batch | {"next_observation": states[row, step + 1], "desired_goal": goal}, hindsight

    def state_dict(self):
        return {"end": self.end} | {key: torch.from_numpy(array[: self.end]) for key, array in self.data.items()}

    def load_state_dict(self, state):
        self.end = state["end"]
        for key, array in self.data.items():
            array[: self.end] = state[key].numpy()


# ALGO LOGIC: training ------------------------------------------------------------------------------------------------
TRAINING, EVALUATION, REPLAY = range(3)  # each use of random numbers has streams of its own, [seed, use, cycle]


def train(args, folder, saved=None):
    """Algorithm 1 from the start, or on from the content of a checkpoint. Returns the finished `Run`."""
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_num_threads(args.num_threads)
    torch.set_flush_denormal(True)  # Adam's averages of units that died shrink for ever, and tiny numbers are slow
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic kernels need on a GPU
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.manual_seed(args.seed)
    envs, rb = make_envs(args, args.num_envs), ReplayBuffer(args.buffer_size // args.n_bits, args.n_bits)
    lowest_reward = -args.n_bits if args.reward == "shaped" else -1
    q_network = QNetwork(args.n_bits, args.hidden_size).to(device)
    target_network = copy.deepcopy(q_network)
    weights, target_weights = ([p.data for p in network.parameters()] for network in (q_network, target_network))
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True)
    parts = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer, "replay": rb}
    run = Run(args, folder, parts, saved)
    if not saved:
        run.log_evaluation(evaluate(args, target_network, folder, "step-0"))
    while run.global_step < args.total_timesteps and not (run.stopped and run.cycle):  # a cycle at least, to save
        # Play one episode in each environment and store them with their own goals (Algorithm 1)
        cycle_started = time.time()
        episodes, metrics = play_episodes(envs, q_network, [args.seed, TRAINING, run.cycle], args.epsilon)
        rb.add(episodes)
        run.cycle, run.steps = run.cycle + 1, int(episodes["length"].sum())
        run.global_step += run.steps

        # Draw the cycle's minibatches, with hindsight goals and the rewards that these give
        rng = np.random.default_rng([args.seed, REPLAY, run.cycle])
        batch, hindsight = rb.sample(args.gradient_steps * args.batch_size, args.strategy, args.k, rng)
        outcome = batch["next_observation"], batch["desired_goal"], {}  # the state after the step (Algorithm 1)
        batch["reward"] = envs.compute_reward(*outcome).astype(np.float32)
        batch["terminated"] = envs.compute_terminated(*outcome).astype(np.float32)
        data = {key: torch.from_numpy(value).to(device).split(args.batch_size) for key, value in batch.items()}

        # Learn from them
        left = max(0, 1 - run.global_step / args.total_timesteps) if args.anneal_lr else 1
        optimizer.param_groups[0]["lr"] = left * args.learning_rate
        for obs, action, next_obs, goal, reward, terminated in zip(*data.values()):
            with torch.no_grad():
                next_q = target_network(next_obs, goal).amax(-1)
                target = td_target(reward, terminated, next_q, args.gamma, lowest_reward)
            q_values = q_network(obs, goal).gather(-1, action[:, None])[:, 0]
            td_loss = F.mse_loss(q_values, target)
            optimizer.zero_grad()
            td_loss.backward()
            optimizer.step()
            run.updates += 1
            if run.updates % args.target_network_frequency == 0:
                torch._foreach_lerp_(target_weights, weights, args.tau)

        # Record
        scalars = {f"charts/{key}": value for key, value in metrics.items()}
        scalars |= {"losses/td_loss": td_loss.item(), "losses/q_values": q_values.mean().item()}
        scalars |= {"charts/learning_rate": left * args.learning_rate, "charts/buffer_size": rb.data["length"].sum()}
        scalars["charts/relabel_fraction"] = hindsight.mean()
        wrong = (batch["desired_goal"] != batch["observation"])[hindsight].sum(-1)
        scalars["charts/hindsight_distance"] = wrong.sum() / max(1, len(wrong))
        scalars["charts/zero_reward_fraction"] = (batch["reward"][hindsight] == 0).sum() / max(1, len(wrong))
        run.log(scalars, time.time() - cycle_started)
        if run.passed(args.eval_frequency):  # the target network plays (App. A)
            run.log_evaluation(evaluate(args, target_network, folder, f"step-{run.global_step}"))
        if run.stopped or run.passed(args.checkpoint_frequency):
            run.save("checkpoint.pt", parts)
    if args.save_model:
        run.save("model.pt", {"target_network": target_network})
    return run


def evaluate(args, network, folder, name):
    """Metrics of the network without exploration on tasks that training does not see; `--capture-video` films one."""
    if args.capture_video:
        names = {"video_folder": f"{folder}/videos", "name_prefix": name, "disable_logger": True}
        film = functools.partial(gym.wrappers.RecordVideo, **names)
        with or_fail("--capture-video does not work here"):
            filmed = make_envs(args, 1, "sync", render_mode="rgb_array", wrappers=[film])
            play_episodes(filmed, network, [args.seed, EVALUATION])
            filmed.close()
    return play_episodes(make_envs(args, args.eval_episodes), network, [args.seed, EVALUATION])[1]


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
    """Refuse what cannot work before anything is written. Numbers are at least 1, but for the ones named here."""
    bounds = dict.fromkeys(("seed", "checkpoint_frequency", "learning_rate", "k"), (0, math.inf))
    bounds |= {"gamma": (0, 0.999999), "epsilon": (0, 1), "tau": (0, 1)}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # of this machine, bytes
    bounds["buffer_size"] = args.num_envs * args.n_bits, memory // (args.n_bits + 10)  # from a cycle to what fits
    for name, value in vars(args).items():
        low, high = bounds.get(name, (1, math.inf))
        if type(value) in (int, float) and not low <= value <= high:
            fail(f"--{name.replace('_', '-')} must be from {low} to {high}, not {value}")


class Run:
    """Counters and files of a training: TensorBoard, eval.csv, checkpoints. Ctrl-C and SIGTERM set `stopped`."""

    def __init__(self, args, folder, parts, saved):
        self.args, self.folder, self.stopped, self.metrics = args, folder, 0, {}
        self.global_step = self.steps = self.cycle = self.updates = self.train_s = self.wall_s = self.sps = 0
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
            for key, value in (metrics | {"training_episodes": self.cycle * args.num_envs}).items():
                print(args.seed, step, f"eval/{key}", value, args.eval_episodes, self.wall_s, sep=",", file=file)
                self.writer.add_scalar(f"eval/{key}", value, step)

    def save(self, name, parts):
        """Write to a temporary name, then rename: the file is always whole, the earlier one or the new one."""
        self.wall_s, path = time.time() - self.started, f"{self.folder}/{name}"
        counters = {k: v for k, v in vars(self).items() if k not in ("args", "folder", "stopped", "started", "writer")}
        content = {"format": "her_dqn_bitflip", "args": vars(self.args), "counters": counters}
        with or_fail(f"cannot write {path}, an earlier one is kept", 1):
            torch.save(content | {name: part.state_dict() for name, part in parts.items()}, f"{path}.tmp")
            os.replace(f"{path}.tmp", path)


def main():
    args, saved, started = tyro.cli(Args, description=__doc__), None, time.time()
    if path := args.resume or args.evaluate:
        path = os.path.join(path, "checkpoint.pt") if os.path.isdir(path) else path
        with or_fail(f"{path} is not a whole checkpoint.pt or model.pt of this script"):
            saved = torch.load(path, map_location="cpu", weights_only=True)
            before = Args(**saved["args"] | {"resume": None, "evaluate": None})
        args = tyro.cli(Args, description=__doc__, default=before)
        if any(getattr(args, name) != getattr(before, name) for name in ("n_bits", "hidden_size", "buffer_size")):
            fail(f"--n-bits, --hidden-size and --buffer-size have to be those of {path}: leave them out")
        if args.resume and (args.evaluate or "replay" not in saved):
            fail("--resume goes on with a run's folder or checkpoint.pt, without --evaluate")
    check(args)
    name = f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{int(1000 * started)}"
    folder = os.path.dirname(path) or "." if args.resume else os.path.join(args.run_dir, name)
    if args.evaluate:
        network = QNetwork(args.n_bits, args.hidden_size)
        network.load_state_dict(saved["target_network"])
        result = saved["counters"] | {"metrics": evaluate(args, network, folder, "evaluate")}
        result["wall_s"] = time.time() - started
    else:
        result = vars(train(args, folder, saved))
    line = {"run": args.evaluate or folder, "env_id": args.env_id, "seed": args.seed, "n_episodes": args.eval_episodes}
    line |= {"global_step": result["global_step"], "wall_s": round(result["wall_s"], 3), "sps": round(result["sps"], 1)}
    print(json.dumps(line | result["metrics"]), flush=True)
    sys.exit(130 if result.get("stopped") else 0)


if __name__ == "__main__":
    main()
