"""Environment steps a second, training included: her_dqn_bitflip.py against Stable-Baselines3's DQN + HerReplayBuffer.

Both play the same task, n bits and episodes of n steps, with the network, minibatch and updates of Appendix A (256
units, 128, 40 updates for 16 episodes), in turn, several times, so that a machine that slows down slows down both.
Stable-Baselines3 is first tried with each number of environments, and its fastest goes on: `python benchmark/speed.py
--only bitflip`.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "her_dqn_bitflip.py"


@dataclass
class Args:
    n_bits: int = 15
    """bits, and steps of an episode; a multiple of 5"""
    steps: int = 12_000
    """environment steps of a measurement of Stable-Baselines3; ours takes four times as many"""
    sb3_envs: tuple[int, ...] = (1, 4, 16)
    """numbers of environments to try Stable-Baselines3 with, all in its own process: they are too quick for others"""


def ours(args):
    """One run of the script, minus its start and evaluation: training steps a second."""
    flags = f"--n-bits {args.n_bits} --no-terminate --gradient-steps 40 --batch-size 128 --no-cuda"
    flags += f" --total-timesteps {4 * args.steps} --eval-episodes 1 --eval-frequency 1000000"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPT), *flags.split(), "--run-dir", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["sps"]


def sb3(args, num_envs):
    """Stable-Baselines3 in a process of its own, from its first update to the end."""
    command = [sys.executable, __file__, str(num_envs), str(args.n_bits), str(args.steps)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def train_sb3(num_envs, n_bits, steps):
    import torch
    from stable_baselines3 import DQN, HerReplayBuffer
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    sys.path.append(str(ROOT))
    from envs.bit_flip import BitFlipEnv

    warm_up = 16 * n_bits

    class Clock(BaseCallback):
        def _on_step(self):
            if self.num_timesteps <= warm_up:  # start-up and the episodes before the first update are not counted
                self.first, self.started = self.num_timesteps, time.time()
            return True

    torch.set_num_threads(1)
    model = DQN(
        "MultiInputPolicy",
        make_vec_env(BitFlipEnv, num_envs, env_kwargs={"n": n_bits, "terminate": False}),
        replay_buffer_class=HerReplayBuffer,
        replay_buffer_kwargs={"n_sampled_goal": 4, "goal_selection_strategy": "future"},
        policy_kwargs={"net_arch": [256]},
        learning_rate=1e-3,
        batch_size=128,
        gamma=0.98,
        tau=0.05,
        target_update_interval=1,
        exploration_fraction=1e-9,
        exploration_final_eps=0.2,
        learning_starts=warm_up,
        train_freq=(2 * n_bits // 5, "step"),  # of each environment: 16 n steps for 40 updates
        gradient_steps=num_envs,
        device="cpu",
    )
    clock = Clock()
    model.learn(steps + warm_up, callback=clock)
    print((model.num_timesteps - clock.first) / (time.time() - clock.started))


if __name__ == "__main__":
    train_sb3(*map(int, sys.argv[1:]))
