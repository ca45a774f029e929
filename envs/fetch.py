"""The Fetch tasks of "Hindsight Experience Replay" (Andrychowicz et al., 2017) as variants of Gymnasium-Robotics' -v4.

A variant is one of the four small classes below on top of one of the four tasks, TASK = Reach, Push, Slide or
PickAndPlace. Import `envs` to register them; episodes have 50 steps.

    Fetch{TASK}FixedGoal-v0             one goal for all episodes                                     Sec. 4.3, Fig. 4
    Fetch{TASK}ShapedL{0,1}P{1,2}-v0    shaped instead of sparse reward                               Sec. 4.4, Fig. 5
    Fetch{TASK}Paper-v0                 tolerance, initial states and inputs of the paper             Sec. 4.1, App. A
    Fetch{TASK}Noisy-v0                 the policy sees the object with 1 cm noise (not for Reach)    Sec. 4.6

Paper and Noisy add the key `actor_observation` to the observation: give it to the actor, and `observation` to the
critic. Positions are in metres; velocities, as everywhere in Fetch, in metres or radians in one step of 0.04 s.
"""

import functools

import mujoco
import numpy as np
from gymnasium import spaces
from gymnasium_robotics.envs.fetch.pick_and_place import MujocoFetchPickAndPlaceEnv
from gymnasium_robotics.envs.fetch.push import MujocoFetchPushEnv
from gymnasium_robotics.envs.fetch.reach import MujocoFetchReachEnv
from gymnasium_robotics.envs.fetch.slide import MujocoFetchSlideEnv

FIXED_GOAL_SEED = 0  # gives PickAndPlace a goal well above the table, and Reach one away from the gripper's start
PHYSICS_STATE = mujoco.mjtState.mjSTATE_INTEGRATION  # all that the next steps depend on, mocap and controls too


class DiscardSolved:
    """Draws initial state and goal again while the goal is already satisfied (App. A)."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        while self._is_success(obs["achieved_goal"], obs["desired_goal"]):
            obs, info = super().reset(options=options)
        return obs, info


class FixedGoal(DiscardSolved):
    """The same goal in every episode, for every seed and in every process (Sec. 4.3).

    The goal comes from the task's own distribution, drawn with a fixed seed. The object's initial position varies as
    ever, except that no episode starts with the goal satisfied.
    """

    def _sample_goal(self):
        episode_rng, self._np_random = self._np_random, np.random.default_rng(FIXED_GOAL_SEED)
        goal = super()._sample_goal()
        self._np_random = episode_rng
        return goal


class Shaped:
    """Reward lam * |g - s_object|^power - |g - s'_object|^power, s before and s' after the action (Sec. 4.4).

    `is_success` keeps Fetch's tolerance of 5 cm. In Reach the gripper takes the object's place.
    """

    lam = 0
    power = 1

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        self._previous_achieved_goal = obs["achieved_goal"].copy()
        return obs, info

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        self._previous_achieved_goal = obs["achieved_goal"].copy()
        return obs, reward, terminated, truncated, info

    def compute_truncated(self, achieved_goal, desired_goal, info):
        # step() calls this with the info that it then hands to compute_reward and returns: the place to add our key.
        info.setdefault("previous_achieved_goal", self._previous_achieved_goal)
        return super().compute_truncated(achieved_goal, desired_goal, info)

    def compute_reward(self, achieved_goal, desired_goal, info):
        """Goals (..., 3) in metres -> rewards (...,).

        `info["previous_achieved_goal"]`, (..., 3): the object's position before the action.
        """
        before = np.linalg.norm(desired_goal - info["previous_achieved_goal"], axis=-1)
        after = np.linalg.norm(desired_goal - achieved_goal, axis=-1)
        return self.lam * before**self.power - after**self.power


class ActorObservation:
    """Adds `actor_observation`, what the policy may see, to the observation."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        shape = self._get_obs()["actor_observation"].shape
        self.observation_space["actor_observation"] = spaces.Box(-np.inf, np.inf, shape, np.float64)

    def _get_obs(self):
        obs = super()._get_obs()
        obs["actor_observation"] = self._actor_observation(obs["observation"])
        return obs


class Paper(DiscardSolved, ActorObservation):
    """The task as the paper describes it (Sec. 4.1, App. A), where Gymnasium-Robotics differs.

    - A goal is achieved within 7 cm (Slide: 20 cm), in reward and `is_success`.
    - No episode starts with the goal satisfied.
    - `actor_observation`, (14,) or (5,) in Reach, lacks the velocities of gripper, fingers and object.
    - PickAndPlace: the target is 10 to 45 cm above the object's height on the table, and half of the initial states
      drawn are one recorded state in which the gripper, at its usual start, holds the box. The paper trains like
      that; set `env.unwrapped.grasped_start = 0.0` to test from the table only.

    Not changed: 20 simulator steps for an action (paper: 10), object at least 10 cm from the gripper (paper: 0), no
    penalty for penetration (its weight is not given); `actor_observation` keeps the object's absolute position and
    rotation, and `desired_goal` is absolute (the paper's policy gets both positions relative to the gripper only).
    """

    grasped_start = 0.5  # probability, PickAndPlace only

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.distance_threshold = 0.20 if isinstance(self, MujocoFetchSlideEnv) else 0.07

    def _actor_observation(self, observation):
        # grip_pos 0:3, object_pos 3:6, object_rel_pos 6:9, gripper_state 9:11, object_rot 11:14, then velocities;
        # Reach: grip_pos 0:3, gripper_state 3:5, then velocities
        return observation[:14].copy() if self.has_object else observation[:5].copy()

    def _reset_sim(self):
        did_reset = super()._reset_sim()
        if isinstance(self, MujocoFetchPickAndPlaceEnv) and self.np_random.uniform() < self.grasped_start:
            mujoco.mj_setState(self.model, self.data, grasped_state(), PHYSICS_STATE)
            mujoco.mj_forward(self.model, self.data)
        return did_reset

    def _sample_goal(self):
        goal = super()._sample_goal()
        if isinstance(self, MujocoFetchPickAndPlaceEnv):
            goal[2] = self.height_offset + self.np_random.uniform(0.10, 0.45)
        return goal


@functools.cache
def grasped_state():
    """MuJoCo state (n,) in which the gripper, at its usual start, holds the box: played by a script, once a process.

    The box stays held as long as the actions close the gripper (last coordinate -1); 0 lets it fall.
    """
    env = MujocoFetchPickAndPlaceEnv()
    obs, _ = env.reset(seed=0)
    box, start = obs["achieved_goal"], env.initial_gripper_xpos
    above_box = box + [0, 0, 0.1]
    script = [(above_box, 1, 15), (box, 1, 15), (box, -1, 10), (above_box, -1, 10), (start, -1, 20)]
    for target, gripper, steps in script:  # gripper: 1 opens, -1 closes
        for _ in range(steps):
            displacement = target - obs["observation"][:3]  # an action of 1 is 5 cm; ask for half the way
            obs, *_ = env.step(np.append(0.5 * displacement / 0.05, gripper))
    state = np.empty(mujoco.mj_stateSize(env.model, PHYSICS_STATE))
    mujoco.mj_getState(env.model, env.data, state, PHYSICS_STATE)
    return state


class Noisy(ActorObservation):
    """`actor_observation`, (25,), has new normal noise of 1 cm on the object's position in each step (Sec. 4.6).

    The same noise is on the position relative to the gripper; the rest, and the other keys, are exact.
    """

    def _actor_observation(self, observation):
        noise = self.np_random.normal(scale=0.01, size=3)
        noisy = observation.copy()
        noisy[3:6] += noise  # object_pos
        noisy[6:9] += noise  # object_rel_pos
        return noisy


# One class for each registered id: FetchPushPaper is Paper on top of MujocoFetchPushEnv, and so on.
TASKS = {
    "Reach": MujocoFetchReachEnv,
    "Push": MujocoFetchPushEnv,
    "Slide": MujocoFetchSlideEnv,
    "PickAndPlace": MujocoFetchPickAndPlaceEnv,
}
VARIANTS = {"FixedGoal": (FixedGoal, {}), "Paper": (Paper, {}), "Noisy": (Noisy, {})} | {
    f"ShapedL{lam}P{power}": (Shaped, {"lam": lam, "power": power}) for lam in (0, 1) for power in (1, 2)
}
for task, base in TASKS.items():
    for variant, (mixin, attributes) in VARIANTS.items():
        if (task, variant) != ("Reach", "Noisy"):
            name = f"Fetch{task}{variant}"
            globals()[name] = type(name, (mixin, base), {"__doc__": mixin.__doc__, **attributes})
