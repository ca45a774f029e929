"""The bit-flipping task of "Hindsight Experience Replay" (Andrychowicz et al., 2017), Sec. 3.1 and Fig. 1.

State and goal are n bits, both uniform at random; action i flips bit i of the state. The reward is -1 as long as the
state reached is not the goal and 0 when it is, an episode has at most n steps, and it is a success if the goal was
met at any time, the start included (App. A). Import `envs` to register the id:

    gym.make("BitFlip-v0", n=50)                          one episode at a time
    gym.make_vec("BitFlip-v0", num_envs=16, n=50)         many episodes, a step of all of them is one numpy call

The paper does not say whether an episode ends at the goal. Here it does (`terminate=True`), as in a task that is done
when it is done: the last step terminates and its target does not bootstrap. With `terminate=False` all n steps are
played, every target bootstraps, and as each action flips a bit the agent has to leave the goal again.
"""

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class BitFlip:
    """What the single and the batched environment share: spaces and rewards. Bits are int8 arrays of 0 and 1."""

    def _set_task(self, n, terminate, shaped):
        if n != int(n) or n < 1:
            raise ValueError(f"bit flipping needs a whole number n >= 1 of bits, not {n}")
        self.n, self.terminate, self.shaped = int(n), terminate, shaped
        bits = gym.spaces.MultiBinary(self.n)
        keys = ("observation", "achieved_goal", "desired_goal")
        return gym.spaces.Dict({key: bits for key in keys}), gym.spaces.Discrete(self.n)

    def _observe(self):
        state = self._state
        return {"observation": state.copy(), "achieved_goal": state.copy(), "desired_goal": self._goal.copy()}

    def compute_reward(self, achieved_goal, desired_goal, info):
        """-[s != g] of the state after the step, or -||s - g||^2 if shaped (Sec. 3.1). (..., n) -> (...)."""
        wrong = np.count_nonzero(np.not_equal(achieved_goal, desired_goal), axis=-1)
        return np.float32(0) - np.float32(wrong if self.shaped else wrong > 0)

    def compute_terminated(self, achieved_goal, desired_goal, info):
        """Whether a step to this state ends the episode. (..., n) -> (...)."""
        return np.equal(achieved_goal, desired_goal).all(-1) & self.terminate


class BitFlipEnv(BitFlip, gym.Env):
    """One episode at a time. `shaped`: reward -||s - g||^2; `terminate`: the episode ends at the goal."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(self, n=15, terminate=True, shaped=False, render_mode=None):
        self.observation_space, self.action_space = self._set_task(n, terminate, shaped)
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._state, self._goal = self.np_random.integers(0, 2, (2, self.n), np.int8)
        self._steps, self._success = 0, bool((self._state == self._goal).all())
        return self._observe(), {"is_success": self._success}

    def step(self, action):
        self._state[action] ^= 1
        self._steps += 1
        self._success |= bool((self._state == self._goal).all())
        reward = float(self.compute_reward(self._state, self._goal, {}))
        terminated = bool(self.compute_terminated(self._state, self._goal, {}))
        return self._observe(), reward, terminated, self._steps >= self.n, {"is_success": self._success}

    def render(self):
        """The bits above those of the goal, (48, 16 n, 3) uint8: light is 1, dark 0, and red beneath is still wrong."""
        wrong = self._state != self._goal
        light = np.stack([self._state, self._goal, np.zeros(self.n, np.int8)])[..., None]
        colors = np.where(light, np.uint8([235, 235, 235]), np.uint8([60, 60, 60]))
        colors[2] = np.where(wrong[:, None], np.uint8([220, 50, 47]), np.uint8([110, 160, 60]))
        return colors.repeat(16, 0).repeat(16, 1)


class BitFlipVectorEnv(BitFlip, VectorEnv):
    """`num_envs` episodes at once. There is no automatic reset: an episode that has ended stands still, with reward 0.

    `reset(seed=...)` starts all of them, or those in `options["reset_mask"]`, a bool array (num_envs,).
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, num_envs=1, n=15, terminate=True, shaped=False, render_mode=None):
        self.num_envs, self.render_mode = num_envs, render_mode
        self.single_observation_space, self.single_action_space = self._set_task(n, terminate, shaped)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._state, self._goal = np.zeros((2, num_envs, self.n), np.int8)
        self._steps, self._success, self._ended = np.zeros(num_envs, int), *np.zeros((2, num_envs), bool)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        new = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self._state[new], self._goal[new] = self.np_random.integers(0, 2, (2, new.sum(), self.n), np.int8)
        self._steps[new], self._ended[new] = 0, False
        self._success[new] = (self._state[new] == self._goal[new]).all(-1)
        return self._observe(), {"is_success": self._success.copy()}

    def step(self, actions):
        playing = np.flatnonzero(~self._ended)
        self._state[playing, np.asarray(actions)[playing]] ^= 1
        self._steps[playing] += 1
        self._success |= (self._state == self._goal).all(-1)
        reward = np.where(self._ended, 0, self.compute_reward(self._state, self._goal, {}))
        terminated = self.compute_terminated(self._state, self._goal, {})
        truncated = self._steps >= self.n
        self._ended = terminated | truncated
        return self._observe(), reward, terminated, truncated, {"is_success": self._success.copy()}
