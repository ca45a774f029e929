"""A point on a line: the smallest goal-conditioned environment, for fast tests of everything but learning on Fetch."""

import gymnasium as gym
import numpy as np


class PointEnv(gym.Env):
    """Position in [-1, 1], action +-0.2 a step, goal uniform; success within 0.1; `terminate`: ends at the goal."""

    def __init__(self, terminate=False):
        self.terminate = terminate
        box = gym.spaces.Box(-2.0, 2.0, (1,))
        self.observation_space = gym.spaces.Dict({"observation": box, "achieved_goal": box, "desired_goal": box})
        self.action_space = gym.spaces.Box(-0.2, 0.2, (1,))

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
        return self.observe(), {}

    def step(self, action):
        self.position = np.clip(self.position + action, -1, 1)
        obs = self.observe()
        goals = obs["achieved_goal"], obs["desired_goal"]
        reward = self.compute_reward(*goals, {})
        return obs, float(reward), self.compute_terminated(*goals, {}), False, {"is_success": reward == 0}


gym.register("Point-v3", PointEnv, max_episode_steps=10)
gym.register("PointTerminates-v0", PointEnv, max_episode_steps=10, kwargs={"terminate": True})
