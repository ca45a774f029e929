"""The bit-flipping task against values worked out by hand."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import envs  # noqa: F401  registers the id
from envs.bit_flip import BitFlipEnv, BitFlipVectorEnv


def start(env, state, goal):
    """Put an environment into a state that its reset could have drawn."""
    env.reset(seed=0)
    env._state[...], env._goal[...] = state, goal
    env._success = (env._state == env._goal).all(-1)
    return env


def bits(text):
    return np.array([int(bit) for bit in text], np.int8)


def test_gymnasium_knows_the_task_and_its_checker_passes():
    for n in (2, 15, 50):
        check_env(gym.make("BitFlip-v0", n=n, render_mode="rgb_array").unwrapped)
    assert isinstance(gym.make_vec("BitFlip-v0", num_envs=3, n=4), BitFlipVectorEnv)


def test_an_action_flips_its_bit_and_the_reward_is_that_of_the_state_reached():
    env = start(BitFlipEnv(n=4), bits("0110"), bits("0011"))
    obs, reward, terminated, truncated, info = env.step(1)
    np.testing.assert_array_equal(obs["observation"], bits("0010"))
    np.testing.assert_array_equal(obs["achieved_goal"], bits("0010"))
    np.testing.assert_array_equal(obs["desired_goal"], bits("0011"))
    assert (reward, terminated, truncated, info) == (-1.0, False, False, {"is_success": False})
    obs, reward, terminated, truncated, info = env.step(3)
    np.testing.assert_array_equal(obs["observation"], bits("0011"))
    assert (reward, terminated, truncated, info) == (0.0, True, False, {"is_success": True})


def test_without_termination_all_n_steps_are_played_and_success_is_kept():
    env = start(BitFlipEnv(n=3, terminate=False), bits("000"), bits("100"))
    outcomes = [env.step(action)[1:] for action in (0, 1, 1)]
    yes = {"is_success": True}
    assert outcomes == [(0.0, False, False, yes), (-1.0, False, False, yes), (0.0, False, True, yes)]


def test_one_bit():
    env = start(BitFlipEnv(n=1), bits("1"), bits("0"))
    assert env.step(0)[1:] == (0.0, True, True, {"is_success": True})
    env = start(BitFlipEnv(n=1), bits("1"), bits("1"))  # met at the start, left by the only action
    assert env.step(0)[1:] == (-1.0, False, True, {"is_success": True})


def test_shaped_reward_is_minus_the_squared_distance():
    env = start(BitFlipEnv(n=5, shaped=True), bits("00000"), bits("11011"))
    assert [env.step(action)[1] for action in (0, 2, 1)] == [-3.0, -4.0, -3.0]


def test_rewards_of_batches():
    achieved, desired = np.stack([bits("01"), bits("01"), bits("10")]), np.stack([bits("01"), bits("00"), bits("01")])
    for env in (BitFlipEnv(n=2), BitFlipVectorEnv(7, n=2)):
        np.testing.assert_array_equal(env.compute_reward(achieved, desired, {}), np.float32([0, -1, -1]))
        np.testing.assert_array_equal(env.compute_terminated(achieved, desired, {}), [True, False, False])
    for env in (BitFlipEnv(n=2, shaped=True), BitFlipVectorEnv(7, n=2, shaped=True)):
        shaped = env.compute_reward(achieved, desired, {})
        assert shaped.dtype == np.float32 and shaped.tolist() == [0, -1, -2]
    assert not BitFlipEnv(n=2, terminate=False).compute_terminated(achieved, desired, {}).any()


def test_start_and_goal_are_uniform_and_follow_from_the_seed():
    env = BitFlipVectorEnv(4000, n=3)
    obs, info = env.reset(seed=5)
    pairs = obs["observation"] @ [1, 2, 4] + 8 * (obs["desired_goal"] @ [1, 2, 4])
    counts = np.bincount(pairs, minlength=64)
    assert len(counts) == 64 and 30 <= counts.min() and counts.max() <= 100  # 62.5 on average, deviation 8
    np.testing.assert_array_equal(info["is_success"], (obs["observation"] == obs["desired_goal"]).all(-1))
    again, other = env.reset(seed=5)[0], env.reset(seed=6)[0]
    np.testing.assert_array_equal(obs["observation"], again["observation"])
    assert (obs["observation"] != other["observation"]).any()


@pytest.mark.parametrize("task", [{}, {"terminate": False}, {"shaped": True}])
def test_batched_episodes_equal_single_ones_until_they_end_and_then_stand_still(task):
    rng = np.random.default_rng(0)
    n, m = 3, 40
    batch, singles = BitFlipVectorEnv(m, n=n, **task), [BitFlipEnv(n=n, **task) for _ in range(m)]
    obs, info = batch.reset(seed=1)
    for i, env in enumerate(singles):
        start(env, obs["observation"][i], obs["desired_goal"][i])
    over = np.zeros(m, bool)
    for _ in range(n):
        actions = rng.integers(n, size=m)
        before, (obs, *outcomes) = obs["observation"], batch.step(actions)
        for i, env in enumerate(singles):
            if over[i]:
                assert outcomes[0][i] == 0 and (obs["observation"][i] == before[i]).all()
                continue
            single, reward, terminated, truncated, single_info = env.step(actions[i])
            np.testing.assert_array_equal(obs["observation"][i], single["observation"])
            assert [outcome[i] for outcome in outcomes[:3]] == [reward, terminated, truncated]
            assert outcomes[3]["is_success"][i] == single_info["is_success"]
            over[i] = terminated or truncated
    assert over.all()


def test_reset_mask_starts_only_some_episodes_anew():
    env = BitFlipVectorEnv(3, n=8)
    before, _ = env.reset(seed=1)
    env.step([0, 0, 0])
    after, _ = env.reset(seed=2, options={"reset_mask": np.array([False, True, False])})
    flipped = before["observation"] ^ bits("10000000")
    np.testing.assert_array_equal(after["observation"][[0, 2]], flipped[[0, 2]])
    assert (after["desired_goal"][1] != before["desired_goal"][1]).any()
    np.testing.assert_array_equal(env._steps, [1, 0, 1])


def test_an_episode_that_has_ended_stands_still_until_it_is_reset():
    env = start(BitFlipVectorEnv(2, n=2), bits("00"), np.stack([bits("10"), bits("11")]))
    env.step([0, 0])  # the first episode meets its goal
    env.step([1, 0])  # the second one is out of steps
    obs, reward, terminated, truncated, _ = env.step([1, 1])
    np.testing.assert_array_equal(obs["observation"], [[1, 0], [0, 0]])
    assert (reward.tolist(), terminated.tolist(), truncated.tolist()) == ([0, 0], [True, False], [False, True])
    before, _ = env.reset(seed=3, options={"reset_mask": np.array([False, True])})
    obs, _, _, truncated, _ = env.step([1, 1])
    np.testing.assert_array_equal(obs["observation"] ^ before["observation"], [[0, 0], [0, 1]])
    assert truncated.tolist() == [False, False]


def test_a_single_episode_starts_as_its_reset_says():
    env = BitFlipEnv(n=1)
    starts = [env.reset(seed=seed) for seed in range(20)]
    met = [bool(obs["observation"] == obs["desired_goal"]) for obs, _ in starts]
    assert [info["is_success"] for _, info in starts] == met and len(set(met)) == 2


def test_the_picture_shows_bits_goal_and_what_is_wrong():
    picture = start(BitFlipEnv(n=3, render_mode="rgb_array"), bits("010"), bits("011")).render()
    assert picture.shape == (48, 48, 3) and picture.dtype == np.uint8
    light, dark, red, green = [235] * 3, [60] * 3, [220, 50, 47], [110, 160, 60]
    assert picture[::16, ::16].tolist() == [[dark, light, dark], [dark, light, light], [green, green, red]]


@pytest.mark.parametrize("n", [0, -3, 2.5])
def test_bits_must_be_a_whole_number(n):
    with pytest.raises(ValueError, match="whole number n >= 1"):
        BitFlipEnv(n=n)
