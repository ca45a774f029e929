"""The Fetch variants of envs/fetch.py: exact rewards, goals, initial states and actor observations."""

import functools
import pickle
import subprocess
import sys

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import envs  # noqa: F401  (registers the ids)
from envs import fetch

TASKS = ("Reach", "Push", "Slide", "PickAndPlace")
SHAPED = ("ShapedL0P1", "ShapedL0P2", "ShapedL1P1", "ShapedL1P2")
IDS = [f"Fetch{task}{variant}-v0" for task in TASKS for variant in ("FixedGoal", "Paper", *SHAPED)]
IDS += [f"Fetch{task}Noisy-v0" for task in TASKS[1:]]
HOLD = np.array([0, 0, 0, -1], np.float32)  # no displacement, gripper closed


@functools.cache
def make(env_id):
    return gym.make(env_id)


def play(env, seed, steps=50):
    """Everything that an episode with random actions returns, as one list."""
    actions = np.random.default_rng(seed).uniform(-1, 1, (steps, 4)).astype(np.float32)
    return [*env.reset(seed=seed), *(x for action in actions for x in env.step(action))]


def assert_bitwise_equal(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_bitwise_equal(a[key], b[key])
    else:
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# ---- all variants ---------------------------------------------------------------------------------------------------
def test_exactly_these_ids_are_registered():
    assert len(IDS) == 27
    registered = {i for i, spec in gym.registry.items() if str(spec.entry_point).startswith("envs.fetch:")}
    assert registered == set(IDS)


@pytest.mark.filterwarnings("ignore::UserWarning")  # unbounded observation spaces, no render mode: Fetch's own
@pytest.mark.parametrize("env_id", IDS)
def test_gymnasium_env_checker(env_id):
    check_env(make(env_id).unwrapped, skip_render_check=True)


@pytest.mark.parametrize("env_id", IDS)
def test_spaces_episode_length_and_rewards(env_id):
    env = make(env_id)
    has_actor_observation = "Paper" in env_id or "Noisy" in env_id
    obs, _ = env.reset(seed=5)
    for t in range(50):
        assert ("actor_observation" in obs) == has_actor_observation
        assert obs in env.observation_space and obs.keys() == env.observation_space.spaces.keys()
        obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert reward == env.unwrapped.compute_reward(obs["achieved_goal"], obs["desired_goal"], info)
        distance = np.linalg.norm(obs["achieved_goal"] - obs["desired_goal"])
        assert info["is_success"] == (distance < env.unwrapped.distance_threshold)
        assert not terminated and truncated == (t == 49)


@pytest.mark.parametrize("env_id", IDS)
def test_a_seed_gives_the_same_episode_whatever_was_played_before(env_id):
    fresh, used = gym.make(env_id), make(env_id)
    for seed in (1, 2):  # FetchPickAndPlacePaper: grasped, then from the table
        expected = play(fresh, seed, steps=8)
        play(used, seed=99, steps=4)
        used.reset()
        for a, b in zip(expected, play(used, seed, steps=8), strict=True):
            assert_bitwise_equal(a, b)


def test_environments_can_be_pickled():
    env = gym.make("FetchReachShapedL1P2-v0").unwrapped
    copy = pickle.loads(pickle.dumps(env))
    for a, b in zip(play(env, 0, steps=3), play(copy, 0, steps=3), strict=True):
        assert_bitwise_equal(a, b)


# ---- FixedGoal ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("task", "goal"),
    [
        ("Reach", (1.383, 0.680, 0.397)),
        ("Push", (1.404, 0.680, 0.425)),
        ("Slide", (1.495, 0.611, 0.420)),
        ("PickAndPlace", (1.383, 0.680, 0.791)),  # 37 cm above the box on the table
    ],
)
def test_fixed_goal(task, goal):
    env = make(f"Fetch{task}FixedGoal-v0")
    starts = []
    for seed in [*range(100), None]:
        obs, _ = env.reset(seed=seed)
        if seed == 0:
            first_goal = obs["desired_goal"]
        assert_bitwise_equal(obs["desired_goal"], first_goal)
        assert np.linalg.norm(obs["achieved_goal"] - obs["desired_goal"]) > 0.05
        starts.append(obs["achieved_goal"])
    np.testing.assert_allclose(first_goal, goal, atol=1e-3)
    assert len(np.unique(starts, axis=0)) == (1 if task == "Reach" else 101)


def test_fixed_goal_and_grasped_state_are_the_same_in_another_process():
    code = (
        "import gymnasium, envs.fetch\n"
        "goal = gymnasium.make('envs:FetchSlideFixedGoal-v0').reset(seed=8)[0]['desired_goal']\n"
        "print(goal.tobytes().hex() + envs.fetch.grasped_state().tobytes().hex())"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    goal = make("FetchSlideFixedGoal-v0").reset(seed=9)[0]["desired_goal"]
    assert output.split()[-1] == goal.tobytes().hex() + fetch.grasped_state().tobytes().hex()


# ---- Shaped ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("variant", "rewards"),
    [
        ("ShapedL0P1", (-0.2, -1.0)),
        ("ShapedL0P2", (-0.04, -1.0)),
        ("ShapedL1P1", (0.5 - 0.2, 0.1 - 1.0)),
        ("ShapedL1P2", (0.25 - 0.04, 0.01 - 1.0)),
    ],
)
def test_shaped_reward(task, variant, rewards):
    compute_reward = make(f"Fetch{task}{variant}-v0").unwrapped.compute_reward
    goals = np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    before = goals + [[0.3, -0.4, 0.0], [0.0, 0.0, 0.1]]  # 0.5 and 0.1 away
    after = goals + [[0.0, 0.0, 0.2], [0.0, 0.6, 0.8]]  # 0.2 and 1 away
    batch = compute_reward(after, goals, {"previous_achieved_goal": before})
    assert batch.shape == (2,)
    np.testing.assert_allclose(batch, rewards, atol=1e-12)
    for i in range(2):
        single = compute_reward(after[i], goals[i], {"previous_achieved_goal": before[i]})
        assert np.isclose(single, rewards[i], atol=1e-12)
    with pytest.raises(KeyError):  # a forgotten key must not become a reward
        compute_reward(after, goals, {})


@pytest.mark.parametrize("variant", SHAPED)
def test_shaped_step_gives_the_object_position_before_the_action(variant):
    env = make(f"FetchReach{variant}-v0")
    for seed in (0, 1):
        obs, _ = env.reset(seed=seed)
        for _ in range(5):
            previous = obs["achieved_goal"].copy()
            obs["achieved_goal"] += 1.0  # the caller's arrays are its own
            mujoco.mj_forward(env.unwrapped.model, env.unwrapped.data)  # as rendering does
            obs, reward, _, _, info = env.step(np.ones(4, np.float32))
            assert_bitwise_equal(info["previous_achieved_goal"], previous)
            assert reward == env.unwrapped.compute_reward(obs["achieved_goal"], obs["desired_goal"], info)
    assert env.unwrapped.distance_threshold == 0.05


# ---- Paper ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("task", "inside", "outside"),
    [("Reach", 0.069, 0.071), ("Push", 0.069, 0.071), ("PickAndPlace", 0.069, 0.071), ("Slide", 0.19, 0.21)],
)
def test_paper_tolerance(task, inside, outside):
    env = make(f"Fetch{task}Paper-v0")
    goals = np.zeros((2, 3))
    achieved = np.array([[0.0, inside, 0.0], [0.0, 0.0, -outside]])
    np.testing.assert_array_equal(env.unwrapped.compute_reward(achieved, goals, {}), [0.0, -1.0])
    for distance, reward in ((inside, 0.0), (outside, -1.0)):
        assert env.unwrapped.compute_reward(np.array([distance, 0.0, 0.0]), goals[0], {}) == reward
        obs, _ = env.reset(seed=0)
        env.unwrapped.goal = obs["achieved_goal"] + [0.0, distance, 0.0]
        _, step_reward, _, _, info = env.step(np.zeros(4, np.float32))
        assert step_reward == reward and info["is_success"] == (reward == 0.0)


@pytest.mark.parametrize("task", TASKS)
def test_paper_discards_initial_states_that_are_already_solved(task):
    env = make(f"Fetch{task}Paper-v0")
    tolerance = 0.20 if task == "Slide" else 0.07
    for seed in range(200):
        obs, _ = env.reset(seed=seed)
        assert np.linalg.norm(obs["achieved_goal"] - obs["desired_goal"]) >= tolerance


def test_paper_pick_and_place_starts_half_of_the_episodes_from_one_grasped_state():
    env = make("FetchPickAndPlacePaper-v0")
    table = env.unwrapped.height_offset
    grasped, heights = [], []
    for seed in range(200):
        obs, _ = env.reset(seed=seed)
        heights.append(obs["desired_goal"][2] - table)
        np.testing.assert_allclose(obs["observation"][:3], env.unwrapped.initial_gripper_xpos, atol=1e-3)
        if obs["achieved_goal"][2] > table + 0.05:
            grasped.append(obs["observation"])
            assert np.linalg.norm(obs["observation"][6:9]) < 0.01  # box at the gripper
            assert np.all(np.abs(obs["observation"][9:11] - 0.024) < 0.002)  # fingers at the box's sides
            assert np.all(np.abs(obs["observation"][14:]) < 0.005)  # at rest
        else:
            assert abs(obs["achieved_goal"][2] - table) < 1e-3
    assert 75 <= len(grasped) <= 125
    assert len(np.unique(grasped, axis=0)) == 1
    assert 0.10 <= min(heights) < 0.12 and 0.43 < max(heights) <= 0.45


def test_paper_pick_and_place_keeps_the_box_grasped():
    env = make("FetchPickAndPlacePaper-v0")
    table = env.unwrapped.height_offset
    env.unwrapped.grasped_start = 1.0
    obs, _ = env.reset(seed=0)
    model, data, everything = env.unwrapped.model, env.unwrapped.data, mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(model, everything))
    mujoco.mj_getState(model, data, state, everything)
    assert_bitwise_equal(state, fetch.grasped_state())  # nothing of the recorded state is lost
    assert fetch.grasped_state() is fetch.grasped_state()  # recorded once
    for _ in range(20):
        obs, *_ = env.step(HOLD)
        assert np.linalg.norm(obs["observation"][6:9]) < 0.01 and obs["achieved_goal"][2] > table + 0.08
    env.unwrapped.grasped_start = 0.0
    assert all(env.reset(seed=s)[0]["achieved_goal"][2] < table + 0.01 for s in range(20))
    del env.unwrapped.grasped_start
    assert env.unwrapped.grasped_start == 0.5


@pytest.mark.parametrize("task", TASKS)
def test_paper_actor_sees_no_velocities(task):
    env = make(f"Fetch{task}Paper-v0")
    env.reset(seed=0)
    for _ in range(10):
        obs, *_ = env.step(np.array([0.5, -0.5, -1, 1], np.float32))
    parts = [np.ravel(part) for part in env.unwrapped.generate_mujoco_observations()]
    np.testing.assert_array_equal(np.concatenate(parts), obs["observation"])
    velocities = np.concatenate(parts[5:])  # object_velp, object_velr, grip_velp, gripper_vel
    assert np.any(velocities != 0)
    # grip_pos, object_pos, object_rel_pos, gripper_state, object_rot
    np.testing.assert_array_equal(obs["actor_observation"], np.concatenate(parts[:5]))
    columns = [0, 1, 2, 3, 4] if task == "Reach" else [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    np.testing.assert_array_equal(obs["actor_observation"], obs["observation"][columns])
    obs["actor_observation"][0] += 1.0  # not a view of what the critic sees
    assert obs["actor_observation"][0] != obs["observation"][0]


# ---- Noisy ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("task", TASKS[1:])
def test_noise_is_on_the_object_position_of_the_actor_only(task):
    env = make(f"Fetch{task}Noisy-v0")
    noise = []
    for seed in range(4):
        observations = [x for x in play(env, seed) if isinstance(x, dict) and "observation" in x]
        assert len(observations) == 51
        for obs in observations:
            difference = obs["actor_observation"] - obs["observation"]
            assert not np.any(difference[[0, 1, 2, *range(9, 25)]])
            np.testing.assert_allclose(difference[3:6], difference[6:9], atol=1e-12)
            np.testing.assert_array_equal(obs["achieved_goal"], obs["observation"][3:6])
            noise.append(difference[3:6])
    noise = np.array(noise)  # (204, 3): four standard errors are 0.0028 for a mean, 0.0020 for a deviation
    assert len(np.unique(noise)) == noise.size  # new in each step and coordinate
    assert np.all(np.abs(noise.mean(0)) < 0.0028)
    assert np.all(np.abs(noise.std(0) - 0.01) < 0.0020)
    assert np.all(np.abs(np.corrcoef(noise.T)[np.triu_indices(3, 1)]) < 0.28)


def test_the_exact_keys_of_noisy_are_those_of_fetch():
    noisy, exact = make("FetchPushNoisy-v0"), gym.make("FetchPush-v4")
    obs, _ = noisy.reset(seed=11)
    expected, _ = exact.reset(seed=11)
    for _ in range(10):
        for key in expected:
            assert_bitwise_equal(obs[key], expected[key])
        obs, *_ = noisy.step(HOLD)
        expected, *_ = exact.step(HOLD)
