"""The sparse goal tasks of "Hindsight Task Relabelling" (Packer et al., 2021): point, wheeled robot and ant.

A task is a goal on the half circle of radius `goal_distance` around the start, at an angle uniform in [0, pi]. The goal
is not observed: a meta-learner has to find it by trying. The reward depends on the state reached, the action and the
goal alone, so that `compute_reward(next_obs, action, goal)` gives a batch of transitions another task in one call.
Episodes have `horizon` steps, and their end is a time limit: nothing ever terminates. Import `envs` to register

    gym.make("PointGoal-v0")      moves by the action, at most 0.1 along each axis; goal radius 0.2, 60 steps
    gym.make("WheeledGoal-v0")    two driven wheels; goal radius 0.8, 200 steps of 0.01 s
    gym.make("AntGoal-v0")        Gymnasium's ant with weak motors; goal radius 0.8, 200 steps of 0.05 s
    gym.make_vec("PointGoal-v0", num_envs=16)         many episodes, a step of all of them is one call

all with `goal_distance=2.0`, and `reset(options={"goal": ...})` to choose the task. Positions are in metres.
"""

import os

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

WHEELED = """
<mujoco model="wheeled">
  <compiler angle="degree"/>
  <option timestep="0.01"/>
  <visual><headlight ambient="0.4 0.4 0.4"/><global offwidth="640" offheight="480"/></visual>
  <default><geom friction="0.4 0.005 0.0001"/></default>
  <asset>
    <texture name="tiles" type="2d" builtin="checker" rgb1=".85 .87 .9" rgb2=".78 .8 .84" width="256" height="256"/>
    <material name="floor" texture="tiles" texrepeat="20 20"/>
  </asset>
  <worldbody>
    <light pos="0 0 5" diffuse="0.5 0.5 0.5" specular="0 0 0"/>
    <geom name="floor" type="plane" size="10 10 1" material="floor"/>
    <body name="chassis" pos="0 0 0.1">
      <joint name="x" type="slide" axis="1 0 0"/>
      <joint name="y" type="slide" axis="0 1 0"/>
      <joint name="z" type="slide" axis="0 0 1"/>
      <joint name="yaw" type="hinge" axis="0 0 1"/>
      <geom type="box" size="0.15 0.10 0.046" mass="5" rgba="0.9 0.4 0.2 1"/>
      <geom type="sphere" size="0.03" pos="0.13 0 0.05" mass="0" contype="0" conaffinity="0" rgba="0.1 0.1 0.1 1"/>
      <body pos="0 0.2 0">
        <joint name="left wheel" type="hinge" axis="0 1 0"/>
        <geom type="cylinder" size="0.10 0.046" euler="90 0 0" mass="2.6" rgba="0.2 0.2 0.3 1"/>
      </body>
      <body pos="0 -0.2 0">
        <joint name="right wheel" type="hinge" axis="0 1 0"/>
        <geom type="cylinder" size="0.10 0.046" euler="90 0 0" mass="2.6" rgba="0.2 0.2 0.3 1"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <motor joint="left wheel" gear="1" ctrllimited="true" ctrlrange="-2 2"/>
    <motor joint="right wheel" gear="1" ctrllimited="true" ctrlrange="-2 2"/>
  </actuator>
</mujoco>
"""
TRAIN, TEST = 0, 1


def half_circle(rng, n, goal_distance):
    """n goals at this distance from the origin and an angle of U(0, pi), (n, 2) float32."""
    angle = rng.uniform(0, np.pi, n)
    return (goal_distance * np.stack([np.cos(angle), np.sin(angle)], -1)).astype(np.float32)


def task_goals(purpose, n, goal_distance, seed=0):
    """The goals of n tasks for TRAIN or TEST, (n, 2): both sets follow from `seed`, and from streams of their own."""
    return half_circle(np.random.default_rng([seed, purpose]), n, goal_distance)


class GoalVectorEnv(VectorEnv):
    """`num_envs` episodes that advance together; all are over after `horizon` steps. There is no automatic reset.

    `reset(seed=..., options={"goal": goals})` starts them, goals (num_envs, 2) or one for all (2,); without goals they
    are drawn. `reward`: "sparse", 1 - distance within `goal_radius` of the goal and 0 elsewhere, or "dense", -distance;
    each task adds its costs of action to both. `info` has the goals and `is_success`, inside the radius now.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": ["rgb_array"], "render_fps": 20}
    action_scale, action_dim, obs_dim = 1.0, 2, 2

    def __init__(self, num_envs=1, goal_distance=2.0, goal_radius=0.2, horizon=60, reward="sparse", render_mode=None):
        if reward not in ("sparse", "dense"):
            raise ValueError(f"reward must be sparse or dense, not {reward}")
        if goal_distance < 0 or goal_radius <= 0 or horizon < 1:
            raise ValueError("goal_distance must be at least 0, goal_radius above 0, horizon at least 1")
        self.num_envs, self.goal_distance, self.goal_radius = num_envs, goal_distance, goal_radius
        self.horizon, self.reward, self.render_mode = horizon, reward, render_mode
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (self.obs_dim,), np.float32)
        self.single_action_space = gym.spaces.Box(-self.action_scale, self.action_scale, (self.action_dim,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def compute_reward(self, next_obs, action, goal):
        """Rewards of transitions to these states under these goals, (..., 2): numpy arrays or torch tensors, (...)."""
        distance = ((next_obs[..., :2] - goal) ** 2).sum(-1) ** 0.5
        return -distance if self.reward == "dense" else (1 - distance) * (distance < self.goal_radius)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        goal = (options or {}).get("goal")
        if goal is None:
            goal = half_circle(self.np_random, self.num_envs, self.goal_distance)
        self._goal = np.broadcast_to(np.asarray(goal, np.float32), (self.num_envs, 2)).copy()
        self._steps = 0
        self._obs = self._start().astype(np.float32)
        return self._obs.copy(), self._info()

    def step(self, actions):
        low, high = self.single_action_space.low, self.single_action_space.high
        actions = np.clip(np.asarray(actions, np.float32), low, high)
        self._obs = self._move(actions).astype(np.float32)
        self._steps += 1
        reward = self.compute_reward(self._obs, actions, self._goal).astype(np.float32)
        truncated = np.full(self.num_envs, self._steps >= self.horizon)
        return self._obs.copy(), reward, np.zeros(self.num_envs, bool), truncated, self._info()

    def _info(self):
        distance = np.linalg.norm(self._obs[:, :2] - self._goal, axis=-1)
        return {"goal": self._goal.copy(), "is_success": distance < self.goal_radius}


class PointVectorEnv(GoalVectorEnv):
    """A point in the plane that moves by the action. Observation: its position (x, y)."""

    action_scale = 0.1

    def _start(self):
        return np.zeros((self.num_envs, 2), np.float32)

    def _move(self, actions):
        return self._obs + actions

    def render(self):
        """The first episode from above, (256, 256, 3) uint8: half circle of the goals, the goal, the point."""
        half = 1.3 * max(self.goal_distance, self.goal_radius)
        axis = np.linspace(-half, half, 256)
        x, y = np.meshgrid(axis, -axis)
        picture = np.full((256, 256, 3), 250, np.uint8)
        picture[(np.abs(np.hypot(x, y) - self.goal_distance) < 0.008 * half) & (y >= 0)] = 180
        (goal_x, goal_y), (point_x, point_y) = self._goal[0], self._obs[0]
        picture[np.hypot(x - goal_x, y - goal_y) < self.goal_radius] = 120, 190, 110
        picture[np.hypot(x - point_x, y - point_y) < 0.03 * half] = 200, 60, 50
        return picture


class MujocoVectorEnv(GoalVectorEnv):
    """Episodes in MuJoCo. A model has a site `goal` that is drawn and touches nothing."""

    frame_skip = 1
    camera_distance = 7.0

    def __init__(self, num_envs=1, goal_radius=0.8, horizon=200, render_mode=None, **kwargs):
        if render_mode and not os.environ.get("DISPLAY"):
            os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen; read when mujoco is imported
        import mujoco

        self._mujoco, self._renderer = mujoco, None
        spec = self._spec()
        disc = {"type": mujoco.mjtGeom.mjGEOM_CYLINDER, "size": [goal_radius, 0.005, 0], "rgba": [0.3, 0.7, 0.3, 0.5]}
        spec.worldbody.add_site(name="goal", pos=[1, 1, 0], **disc)  # at the origin MuJoCo would take it for fixed
        self.model = spec.compile()
        super().__init__(num_envs, goal_radius=goal_radius, horizon=horizon, render_mode=render_mode, **kwargs)

    def render(self):
        """The first episode, (480, 640, 3) uint8, with its goal drawn on the floor."""
        mujoco = self._mujoco
        if self._renderer is None:
            self._renderer = mujoco.Renderer(self.model, 480, 640)
            self._camera = mujoco.MjvCamera()
            self._camera.distance, self._camera.elevation, self._camera.azimuth = self.camera_distance, -50, 90
            self._camera.lookat = 0, self.goal_distance / 2, 0
        self.model.site("goal").pos[:2] = self._goal[0]
        data = self._first_data()
        mujoco.mj_forward(self.model, data)
        self._renderer.update_scene(data, self._camera)
        return self._renderer.render()

    def close_extras(self, **kwargs):
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


class WheeledVectorEnv(MujocoVectorEnv):
    """A cart with two wheels, each driven by a torque in [-2, 2] N m; it always starts at rest, facing along x.

    Observation (12,): x, y, height and yaw of the chassis, angles of the left and the right wheel, and their
    velocities. Reward: minus 0.05 |action|^2. The physics of all episodes are stepped by MuJoCo's own threads.
    """

    action_scale, action_dim, obs_dim = 2.0, 2, 12

    def __init__(self, num_envs=1, **kwargs):
        super().__init__(num_envs, **kwargs)
        from mujoco import rollout

        threads = min(num_envs, os.cpu_count() or 1)
        self._data = [self._mujoco.MjData(self.model) for _ in range(threads)]
        self._rollout = rollout.Rollout(nthread=threads if threads > 1 else 0)

    def _spec(self):
        return self._mujoco.MjSpec.from_string(WHEELED)

    def compute_reward(self, next_obs, action, goal):
        return super().compute_reward(next_obs, action, goal) - 0.05 * (action**2).sum(-1)

    def _start(self):
        mujoco, data = self._mujoco, self._data[0]
        mujoco.mj_resetData(self.model, data)
        kind = mujoco.mjtState.mjSTATE_FULLPHYSICS  # time, positions, velocities
        state = np.empty(mujoco.mj_stateSize(self.model, kind))
        mujoco.mj_getState(self.model, data, state, kind)
        self._state = np.tile(state, (self.num_envs, 1))
        return self._state[:, 1:13]

    def _move(self, actions):
        controls = actions[:, None].astype(np.float64)
        self._state = self._rollout.rollout(self.model, self._data, self._state, controls)[0][:, -1]
        return self._state[:, 1:13]

    def _first_data(self):
        self._mujoco.mj_setState(self.model, self._data[0], self._state[0], self._mujoco.mjtState.mjSTATE_FULLPHYSICS)
        return self._data[0]

    def close_extras(self, **kwargs):
        super().close_extras(**kwargs)
        self._rollout.close()


class AntVectorEnv(MujocoVectorEnv):
    """Gymnasium's ant with gears of 30 instead of 150, so that flailing does not reach a goal; 5 steps an action.

    Observation (113,): the 15 positions and 14 velocities of the joints, the torso's first, and the external contact
    forces on all 14 bodies, clipped to [-1, 1]. Reward: 0.05 less 0.005 |action|^2 and 0.0005 |contact forces|^2.
    """

    action_scale, action_dim, obs_dim, frame_skip = 1.0, 8, 113, 5

    def __init__(self, num_envs=1, **kwargs):
        super().__init__(num_envs, **kwargs)
        self._data = [self._mujoco.MjData(self.model) for _ in range(num_envs)]

    def _spec(self):
        path = os.path.join(os.path.dirname(gym.__file__), "envs", "mujoco", "assets", "ant.xml")
        spec = self._mujoco.MjSpec.from_file(path)
        for actuator in spec.actuators:
            actuator.gear[0] = 30
        return spec

    def compute_reward(self, next_obs, action, goal):
        contact = (next_obs[..., 29:] ** 2).sum(-1)
        return super().compute_reward(next_obs, action, goal) - 0.005 * (action**2).sum(-1) - 5e-4 * contact + 0.05

    def _observe(self):
        rows = [np.concatenate([d.qpos, d.qvel, d.cfrc_ext.flat]) for d in self._data]
        obs = np.array(rows)
        obs[:, 29:] = obs[:, 29:].clip(-1, 1)
        return obs

    def _start(self):
        for data in self._data:  # Gymnasium's noise of the initial state
            self._mujoco.mj_resetData(self.model, data)
            data.qpos += self.np_random.uniform(-0.1, 0.1, self.model.nq)
            data.qvel += 0.1 * self.np_random.standard_normal(self.model.nv)
            data.qpos[:2] = 0
            self._mujoco.mj_forward(self.model, data)
        return self._observe()

    def _move(self, actions):
        for data, action in zip(self._data, actions):
            data.ctrl = action
            self._mujoco.mj_step(self.model, data, nstep=self.frame_skip)
            self._mujoco.mj_rnePostConstraint(self.model, data)  # without it cfrc_ext stays 0
        return self._observe()

    def _first_data(self):
        return self._data[0]


class GoalEnv(gym.Env):
    """One episode at a time: a batch of one of `batch_class`, with its arguments."""

    def __init__(self, render_mode=None, **kwargs):
        self._batch = self.batch_class(1, render_mode=render_mode, **kwargs)
        self.observation_space = self._batch.single_observation_space
        self.action_space = self._batch.single_action_space
        self.compute_reward, self.render_mode = self._batch.compute_reward, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        obs, info = self._batch.reset(seed=seed, options=options)
        return obs[0], {key: value[0] for key, value in info.items()}

    def step(self, action):
        obs, reward, terminated, truncated, info = self._batch.step(np.asarray(action)[None])
        info = {key: value[0] for key, value in info.items()}
        return obs[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), info

    def render(self):
        return self._batch.render()

    def close(self):
        self._batch.close()


class PointEnv(GoalEnv):
    batch_class = PointVectorEnv
    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}


class WheeledEnv(GoalEnv):
    batch_class = WheeledVectorEnv
    metadata = {"render_modes": ["rgb_array"], "render_fps": 100}


class AntEnv(GoalEnv):
    batch_class = AntVectorEnv
    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
