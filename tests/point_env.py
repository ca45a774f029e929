"""A point on a line: the smallest goal-conditioned environment, for fast tests of everything but learning on Fetch.

Below it the same point as other people's environments are: each does one thing that a learner has to cope with.
"""

import contextlib
import os
import signal

import gymnasium as gym
import numpy as np


class PointEnv(gym.Env):
    """Position in [-1, 1], action +-0.2 a step, goal uniform; success within 0.1; `terminate`: ends at the goal."""

    def __init__(self, terminate=False):
        self.terminate = terminate
        box = gym.spaces.Box(-2.0, 2.0, (1,))
        self.observation_space = gym.spaces.Dict({"observation": box, "achieved_goal": box, "desired_goal": box})
        self.action_space = gym.spaces.Box(-0.2, 0.2, (1,))
        self.episodes = self.steps = 0

    def compute_reward(self, achieved_goal, desired_goal, info):
        return -(np.linalg.norm(achieved_goal - desired_goal, axis=-1) > 0.1).astype(np.float32)

    def compute_terminated(self, achieved_goal, desired_goal, info):
        return bool(self.terminate and abs(float(achieved_goal[0] - desired_goal[0])) <= 0.1)  # one goal at a time

    def observe(self):
        position = self.position.astype(np.float32)
        return {"observation": position, "achieved_goal": position, "desired_goal": self.goal}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = np.zeros(1)
        self.goal = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        self.episodes, self.steps = self.episodes + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.position, self.steps = np.clip(self.position + action, -1, 1), self.steps + 1
        success = abs(float(self.position[0] - self.goal[0])) <= 0.1
        return self.observe(), float(success) - 1, self.terminate and success, False, {"is_success": success}


class SameArrays(PointEnv):
    """Returns the same arrays each time, changed in place, and leaves success to the reward."""

    arrays = None

    def observe(self):
        self.arrays = self.arrays or {key: np.zeros(1, np.float32) for key in self.observation_space}
        for key, value in super().observe().items():
            self.arrays[key][:] = value
        return self.arrays

    def step(self, action):
        return *super().step(action)[:4], {}


class VaryingLength(PointEnv):
    """An episode ends at the goal or after 7 to 17 steps."""

    def reset(self, **kwargs):
        returned = super().reset(**kwargs)
        self.limit = self.np_random.integers(7, 18)
        return returned

    def step(self, action):
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, self.steps >= self.limit, info


class VaryingLengthUnsaid(VaryingLength):
    """... and does not say which other goals would have ended it."""

    compute_terminated = None


class RewardOfInfo(PointEnv):
    def compute_reward(self, achieved_goal, desired_goal, info):
        return super().compute_reward(achieved_goal, desired_goal, info) - info["wind_speed"]


class RewardRaises(PointEnv):
    def compute_reward(self, achieved_goal, desired_goal, info):
        raise NotImplementedError("no rewards\non Sundays")


class DictGoals(PointEnv):
    def __init__(self):
        super().__init__()
        goal = gym.spaces.Dict({"kettle": gym.spaces.Box(-2.0, 2.0, (1,))})
        box = self.observation_space["observation"]
        self.observation_space = gym.spaces.Dict({"observation": box, "achieved_goal": goal, "desired_goal": goal})

    def observe(self):
        obs = super().observe()
        return {key: value if key == "observation" else {"kettle": value} for key, value in obs.items()}


class NoGoalAtReset(PointEnv):
    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        del obs["desired_goal"]
        return obs, info


class NoGoalAtStep(PointEnv):
    def step(self, action):
        obs, *others = super().step(action)
        del obs["achieved_goal"]
        return obs, *others


class TurnsNaN(PointEnv):
    """From the third step of an episode on; of its third one, if `late`."""

    def __init__(self, late=False):
        super().__init__()
        self.late = late

    def observe(self):
        wrong = self.steps >= 3 and (self.episodes >= 3 or not self.late)
        return super().observe() | ({"observation": np.full(1, np.nan, np.float32)} if wrong else {})


class Stuck(Exception):
    """Of a kind that cannot be sent from a process to another."""

    def __init__(self, joint, angle):
        super().__init__(f"{joint} is stuck\nat {angle}")


class GetsStuck(PointEnv):
    """In an episode, by default its third one."""

    def __init__(self, episode=3):
        super().__init__()
        self.episode = episode

    def step(self, action):
        if self.episodes == self.episode:
            raise Stuck("elbow", 0.5)
        return super().step(action)


class Signals(PointEnv):
    """In its third episode, once a run: kills the process that plays or the one that learns, or stops all of them."""

    def __init__(self, whom):
        super().__init__()
        self.whom = whom

    def reset(self, **kwargs):
        if self.episodes == 2:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.environ["HINDSIGHT_TEST"] + "/signalled")
                if self.whom == "all":
                    os.killpg(os.getpgid(os.getppid()), signal.SIGTERM)
                else:
                    os.kill(os.getpid() if self.whom == "player" else os.getppid(), signal.SIGKILL)
        return super().reset(**kwargs)


ENVIRONMENTS = {
    "Point-v3": (PointEnv, {}),
    "PointTerminates-v0": (PointEnv, {"terminate": True}),
    "SameArrays-v0": (SameArrays, {}),
    "VaryingLength-v0": (VaryingLength, {"terminate": True}),
    "VaryingLengthUnsaid-v0": (VaryingLengthUnsaid, {"terminate": True}),
    "RewardOfInfo-v0": (RewardOfInfo, {}),
    "RewardRaises-v0": (RewardRaises, {}),
    "DictGoals-v0": (DictGoals, {}),
    "NoGoalAtReset-v0": (NoGoalAtReset, {}),
    "NoGoalAtStep-v0": (NoGoalAtStep, {}),
    "TurnsNaN-v0": (TurnsNaN, {}),
    "TurnsNaNLate-v0": (TurnsNaN, {"late": True}),
    "StuckAtOnce-v0": (GetsStuck, {"episode": 1}),
    "GetsStuck-v0": (GetsStuck, {}),
    "SignalsPlayer-v0": (Signals, {"whom": "player"}),
    "SignalsLearner-v0": (Signals, {"whom": "learner"}),
    "SignalsAll-v0": (Signals, {"whom": "all"}),
}
for name, (entry_point, kwargs) in ENVIRONMENTS.items():
    steps = 17 if issubclass(entry_point, VaryingLength) else 10
    gym.register(name, entry_point, max_episode_steps=steps, kwargs=kwargs)
gym.register("NoTimeLimit-v0", PointEnv)
