"""The sparse goal tasks against values worked out by hand, and against what the HTR paper needs of them."""

import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import envs  # noqa: F401  registers the ids
from envs.goal_tasks import (
    TEST,
    TRAIN,
    AntEnv,
    AntVectorEnv,
    PointEnv,
    PointVectorEnv,
    WheeledEnv,
    WheeledVectorEnv,
    task_goals,
)

ROOT = Path(__file__).parents[1]


@pytest.mark.filterwarnings("ignore:.*Box observation space:UserWarning", "ignore:.*symmetric and norm:UserWarning")
@pytest.mark.parametrize("name", ["Point", "Wheeled", "Ant"])
def test_gymnasium_knows_the_tasks_and_its_checker_passes(name):
    env = gym.make(f"{name}Goal-v0")
    check_env(env.unwrapped, skip_render_check=True)
    batch = gym.make_vec(f"{name}Goal-v0", num_envs=3, horizon=7)
    obs, info = batch.reset(seed=1)
    assert obs.shape == (3, *env.observation_space.shape) and info["goal"].shape == (3, 2)
    env.close()
    batch.close()


def test_goals_are_on_the_half_circle_and_the_two_sets_are_disjoint_and_fixed():
    train, test = task_goals(TRAIN, 100, 2.0), task_goals(TEST, 100, 2.0)
    for goals in (train, test):
        np.testing.assert_allclose(np.hypot(*goals.T), 2.0, rtol=1e-6)
        assert (goals[:, 1] >= 0).all()
        angles = np.arctan2(goals[:, 1], goals[:, 0])
        assert angles.min() < 0.2 and angles.max() > np.pi - 0.2 and abs(angles.mean() - np.pi / 2) < 0.25
    assert np.linalg.norm(train[:, None] - test[None], axis=-1).min() > 0
    np.testing.assert_array_equal(train, task_goals(TRAIN, 100, 2.0))
    assert (train != task_goals(TRAIN, 100, 2.0, seed=1)).any()
    np.testing.assert_allclose(task_goals(TRAIN, 100, 0.5), train / 4, rtol=1e-6)


def test_point_moves_by_the_clipped_action_and_is_rewarded_near_the_goal():
    env = PointEnv(goal_radius=0.2, horizon=3)
    obs, info = env.reset(options={"goal": [0.2, 0.05]})
    np.testing.assert_array_equal(obs, [0, 0])
    assert not info["is_success"]  # 0.206 away
    obs, reward, terminated, truncated, info = env.step([0.05, 0.05])
    np.testing.assert_allclose(obs, [0.05, 0.05])
    assert reward == pytest.approx(0.85) and info["is_success"] and not terminated and not truncated
    obs, reward, *_ = env.step([-7.0, 0.02])
    np.testing.assert_allclose(obs, [-0.05, 0.07], atol=1e-7)
    assert reward == 0.0  # 0.25 away
    _, _, terminated, truncated, _ = env.step([0, 0])
    assert truncated and not terminated


def test_each_episode_of_a_batch_has_its_goal_given_or_drawn_at_the_distance():
    env = PointVectorEnv(2)
    env.reset(options={"goal": [[0.05, 0], [0, 2]]})
    _, reward, _, _, info = env.step([[0, 0], [0, 0]])
    assert reward.tolist() == [pytest.approx(0.95), 0.0] and info["is_success"].tolist() == [True, False]
    env = PointVectorEnv(50, goal_distance=3.5)
    goals, again, others = (env.reset(seed=seed)[1]["goal"] for seed in (1, 1, 2))
    np.testing.assert_allclose(np.linalg.norm(goals, axis=-1), 3.5, rtol=1e-6)
    assert (goals == again).all() and (goals != others).any() and (goals[:, 1] > 0).all()


def test_rewards_of_a_batch_under_other_goals_in_numpy_and_torch():
    states = np.float32([[[0, 0], [3, 4]], [[1, 1], [1, 1.5]]])
    goals = np.float32([[[0, 0.1], [0, 0]], [[1, 1], [1, 1.25]]])
    actions = np.zeros_like(states)
    sparse, dense = [[0.9, 0], [1, 0]], [[-0.1, -5], [0, -0.25]]
    for reward, expected in (("sparse", sparse), ("dense", dense)):
        env = PointVectorEnv(4, goal_radius=0.2, reward=reward)
        np.testing.assert_allclose(env.compute_reward(states, actions, goals), expected, atol=1e-6)
        tensors = map(torch.from_numpy, (states, actions, goals))
        torch.testing.assert_close(env.compute_reward(*tensors), torch.tensor(expected, dtype=torch.float32))


def test_costs_of_wheeled_and_ant():
    wheeled, far = WheeledVectorEnv(1, goal_radius=0.8), np.float32([5, 5])
    obs = np.zeros(12, np.float32)
    assert wheeled.compute_reward(obs, np.float32([2, -1]), far) == pytest.approx(-0.25)
    assert wheeled.compute_reward(obs, np.float32([2, -1]), np.float32([0.6, 0])) == pytest.approx(0.4 - 0.25)
    ant, obs = AntVectorEnv(1), np.zeros(113, np.float32)
    obs[29:31] = 1, -0.5
    reward = ant.compute_reward(obs, np.full(8, 0.5, np.float32), far)
    assert reward == pytest.approx(0.05 - 0.005 * 2 - 5e-4 * 1.25)
    wheeled.close()


@pytest.mark.parametrize("batch_class, single_class", [(PointVectorEnv, PointEnv), (WheeledVectorEnv, WheeledEnv)])
def test_batched_trajectories_equal_single_ones(batch_class, single_class):
    batch, singles = batch_class(5), [single_class() for _ in range(5)]
    obs, info = batch.reset(seed=3)
    assert len(np.unique(info["goal"], axis=0)) == 5
    for i, env in enumerate(singles):
        np.testing.assert_array_equal(env.reset(options={"goal": info["goal"][i]})[0], obs[i])
    rng = np.random.default_rng(0)
    for _ in range(60):
        actions = rng.uniform(-1, 1, (5, 2)) * batch.action_scale
        obs, reward, _, truncated, _ = batch.step(actions)
        for i, env in enumerate(singles):
            single = env.step(actions[i])
            np.testing.assert_array_equal(single[0], obs[i])
            assert single[1] == reward[i] and single[3] == truncated[i]
    assert np.abs(obs[:, :2]).max() > 0.05
    for env in (batch, *singles):
        env.close()


def test_batched_ants_equal_single_ones():
    batch, singles = AntVectorEnv(3), [AntEnv() for _ in range(3)]
    batch.reset(seed=3)
    for data, env in zip(batch._data, singles):
        env.reset(seed=0)
        single = env._batch._data[0]
        single.qpos, single.qvel = data.qpos, data.qvel
        batch._mujoco.mj_forward(env._batch.model, single)
    rng = np.random.default_rng(0)
    for _ in range(20):
        actions = rng.uniform(-1, 1, (3, 8))
        obs = batch.step(actions)[0]
        np.testing.assert_array_equal(obs, [env.step(a)[0] for env, a in zip(singles, actions)])
    assert np.abs(obs[:, 29:]).max() == 1  # the contact forces are there, and clipped


def wheeled_controls(obs, goals):
    """Turn to the goal, then drive: torques (left, right), for observations (n, 12)."""
    to_goal = goals - obs[:, :2]
    error = np.arctan2(to_goal[:, 1], to_goal[:, 0]) - obs[:, 3]
    error = (error + np.pi) % (2 * np.pi) - np.pi
    turn = np.clip(4 * error - obs[:, 9], -2, 2)
    forward = np.where(np.abs(error) < 1, 2 * np.cos(error), 0)
    return np.clip(np.stack([forward - turn, forward + turn], -1), -2, 2)


def test_wheeled_goals_can_be_reached_at_every_angle_and_not_by_chance():
    angles = np.linspace(0, np.pi, 9)
    goals = 2 * np.stack([np.cos(angles), np.sin(angles)], -1)
    env = WheeledVectorEnv(9)
    obs, _ = env.reset(options={"goal": goals})
    nearest, returns = np.full(9, 9.0), np.zeros(9)
    for _ in range(200):
        obs, reward, _, truncated, _ = env.step(wheeled_controls(obs, goals))
        nearest = np.minimum(nearest, np.linalg.norm(obs[:, :2] - goals, axis=-1))
        returns += reward
    assert truncated.all() and nearest.max() < 0.4
    env.close()

    env, rng = WheeledVectorEnv(100), np.random.default_rng(0)
    obs, _ = env.reset(seed=0)
    furthest = np.zeros(100)
    for _ in range(200):
        obs, *_ = env.step(rng.uniform(-2, 2, (100, 2)))
        furthest = np.maximum(furthest, np.linalg.norm(obs[:, :2], axis=-1))
    assert 0.05 < furthest.max() < 1.2  # the nearest point of any goal's disc
    env.close()


def test_starts_of_wheeled_and_ant():
    cart, _ = WheeledVectorEnv(2).reset(seed=0)
    np.testing.assert_array_equal(cart, np.zeros((2, 12)))  # at rest, facing along x
    env = AntVectorEnv(50)
    ant, _ = env.reset(seed=0)
    assert (ant[:, :2] == 0).all()
    assert 0.08 < ant[:, 15:29].std() < 0.12 and 0.9 < ant[:, 7:15].std(0).max() / (0.2 / 12**0.5) < 1.2
    env.step(np.zeros((50, 8)))
    assert [data.time for data in env._data] == [pytest.approx(0.05)] * 50  # 5 steps of 0.01 s


def test_a_flailing_ant_stays_below_the_goals():
    env, rng = AntVectorEnv(8), np.random.default_rng(0)
    obs, _ = env.reset(seed=0)
    assert (obs[:, :2] == 0).all() and len(np.unique(obs[:, 7])) == 8
    for _ in range(60):
        obs, reward, *_ = env.step(rng.uniform(-1, 1, (8, 8)))
    assert 0.02 < np.linalg.norm(obs[:, :2], axis=-1).max() < 1.2
    assert (reward < 0.05).all()
    assert [actuator.gear[0] for actuator in env._spec().actuators] == [30] * 8


def test_the_picture_of_a_point_task_shows_the_goal_and_the_point():
    env = PointEnv(render_mode="rgb_array", goal_distance=2.0)
    env.reset(options={"goal": [1.6, 1.2]})
    for _ in range(5):
        env.step([-0.1, 0])
    picture = env.render()
    assert picture.shape == (256, 256, 3) and picture.dtype == np.uint8

    def color(x, y):  # 2.6 m to each side
        return picture[round(127.5 * (1 - y / 2.6)), round(127.5 * (1 + x / 2.6))].tolist()

    assert color(-0.5, 0) == [200, 60, 50] and color(0, 0) == [250, 250, 250]  # the point has left the middle
    assert color(1.6, 1.2) == [120, 190, 110] and color(-1.6, 1.2) == [180, 180, 180]  # goal; goals' half circle
    assert color(-1.6, -1.2) == [250, 250, 250]


@pytest.mark.parametrize("name", ["Wheeled", "Ant"])
def test_pictures_of_the_mujoco_tasks_show_the_goal_where_it_is(name, tmp_path):
    code = f"""
import numpy as np
from envs.goal_tasks import {name}Env
env = {name}Env(render_mode="rgb_array")
pictures = [(env.reset(seed=0, options={{"goal": goal}}), env.render())[1] for goal in ([-2, 0], [2, 0])]
env.close()
np.save({str(tmp_path / "pictures.npy")!r}, pictures)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    if done.returncode and "GL" in done.stderr:
        pytest.skip("this machine cannot render")
    assert done.returncode == 0, done.stderr
    pictures = np.load(tmp_path / "pictures.npy").astype(int)
    assert pictures.shape == (2, 480, 640, 3)
    changed = (np.abs(pictures[0] - pictures[1]).sum(-1) > 40).nonzero()[1]
    assert (changed < 250).any() and (changed > 390).any() and not ((changed > 300) & (changed < 340)).any()


@pytest.mark.parametrize("wrong", [{"reward": "shaped"}, {"goal_radius": 0}, {"horizon": 0}, {"goal_distance": -1}])
def test_arguments_that_make_no_task(wrong):
    with pytest.raises(ValueError, match="must be"):
        PointEnv(**wrong)
