"""Environment steps a second, training included: her_ddpg_fetch.py against Stable-Baselines3's DDPG + HerReplayBuffer.

Both train on FetchPush-v4 with the network, minibatch and updates of Appendix A (3 x 64, 128, one update for 20 steps),
in turn, several times, so that a machine that slows down slows down both. Stable-Baselines3 is first tried with each
number of environments, and its fastest goes on: `python benchmark/speed.py --only fetch`.
"""

import csv
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "her_ddpg_fetch.py"


@dataclass
class Args:
    steps: int = 8_000
    """environment steps of a measurement, a multiple of 800; what comes before is not counted"""
    num_workers: int = 2
    """processes of her_ddpg_fetch.py that step environments; as many as cores is fastest at these settings"""
    sb3_envs: tuple[int, ...] = (1, 2, 4, 8, 16)
    """numbers of environments to try Stable-Baselines3 with, each in a process of its own"""


def ours(args):
    """One run of the script: training steps a second in its second half, when all environments are made."""
    flags = "--env-id FetchPush-v4 --hidden-size 64 --batch-size 128 --train-frequency 20 --target-network-frequency 40"
    flags += f" --past-goals 0 --redraws 0 --no-cuda --num-workers {args.num_workers} --checkpoint-frequency 0"
    flags += f" --total-timesteps {2 * args.steps} --eval-frequency {args.steps} --eval-episodes 1"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPT), *flags.split(), "--run-dir", folder]
        subprocess.run(command, capture_output=True, text=True, check=True)
        with open(next(Path(folder).glob("*/eval.csv"))) as file:
            seconds = [float(row["wall_s"]) for row in csv.DictReader(file) if row["metric"] == "eval/success_rate"]
    return args.steps / (seconds[2] - seconds[1])


def sb3(args, num_envs):
    """Stable-Baselines3 in a process of its own, from after its first update to the end."""
    command = [sys.executable, __file__, str(num_envs), str(args.steps)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def train_sb3(num_envs, steps):
    import gymnasium as gym
    import gymnasium_robotics
    import torch
    from stable_baselines3 import DDPG, HerReplayBuffer
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    class Clock(BaseCallback):
        def _on_step(self):
            if self.num_timesteps <= 1600:  # start-up and the episodes before the first update are not counted
                self.first, self.started = self.num_timesteps, time.time()
            return True

    def make_env():
        gym.register_envs(gymnasium_robotics)  # in each process
        return gym.make("FetchPush-v4", disable_env_checker=True)

    torch.set_num_threads(1)
    vec_env = SubprocVecEnv if num_envs > 1 else DummyVecEnv
    env = make_vec_env(make_env, num_envs, vec_env_cls=vec_env)
    model = DDPG(
        "MultiInputPolicy",
        env,
        replay_buffer_class=HerReplayBuffer,
        replay_buffer_kwargs={"n_sampled_goal": 4, "goal_selection_strategy": "future"},
        policy_kwargs={"net_arch": [64, 64, 64]},
        batch_size=128,
        gamma=0.98,
        tau=0.05,
        learning_starts=max(800, 51 * num_envs),  # an episode has to end before its goals can be relabelled
        train_freq=(20, "step"),  # of each environment
        gradient_steps=num_envs,
        device="cpu",
    )
    clock = Clock()
    model.learn(steps + 1600, callback=clock)
    print((model.num_timesteps - clock.first) / (time.time() - clock.started))


if __name__ == "__main__":
    train_sb3(*map(int, sys.argv[1:]))
