"""her_dqn_bitflip.py against values worked out by hand, then whole runs of it."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import her_dqn_bitflip as dqn
from tests import whole_runs as runs
from tests.whole_runs import scalars, state, successes


def bits(*texts):
    return np.array([[int(bit) for bit in text] for text in texts], np.int8)


# ------------------------------------------------------------------------------------------------ replay and hindsight
def episodes():
    """Two episodes of 3 bits with the goal 111: 000 -> 100 -> 110 -> 010, and 011 -> 111, which ends there."""
    first, second = bits("000", "100", "110", "010"), bits("011", "111", "111", "111")
    states, actions = np.stack([first, second]), np.array([[0, 1, 0], [0, 2, 2]])
    goals = bits("111", "111")
    return {"observation": states, "desired_goal": goals, "action": actions, "length": np.array([3, 1])}


def replay(*batches, capacity=100):
    rb = dqn.ReplayBuffer(capacity, 3)
    for batch in batches:
        rb.add(batch)
    return rb


def relabelled(rb, strategy, k=1e9):
    """All (state, goal, action, reward) that sampling gives, as text."""
    batch, hindsight = rb.sample(1000, strategy, k, np.random.default_rng(0))
    assert hindsight.all() == (strategy != "none") and (hindsight.any() or strategy == "none")
    env = dqn.make_envs(dqn.Args(n_bits=3), 1)
    rewards = env.compute_reward(batch["next_observation"], batch["desired_goal"], {})
    rows = zip(batch["observation"], batch["desired_goal"], batch["action"], rewards)
    text = ["".join(map(str, s)) + " " + "".join(map(str, g)) + f" {a} {r:+.0f}" for s, g, a, r in rows]
    return {line.replace("+0", "0") for line in text}


def test_relabelled_rewards_of_a_written_out_episode_under_each_strategy():
    rb, last = replay(episodes()), "011 111 0 0"  # the second episode's only outcome is its own goal
    assert relabelled(rb, "none") == {"000 111 0 -1", "100 111 1 -1", "110 111 0 -1", last}
    assert relabelled(rb, "final") == {"000 010 0 -1", "100 010 1 -1", "110 010 0 0", last}
    of_first, of_second = {"000 100 0 0", "000 110 0 -1", "000 010 0 -1"}, {"100 110 1 0", "100 010 1 -1"}
    assert relabelled(rb, "future") == of_first | of_second | {"110 010 0 0", last}
    steps, outcomes = (("000", 0, "100"), ("100", 1, "110"), ("110", 0, "010")), ("100", "110", "010")
    everything = {f"{s} {g} {a} {'0' if g == s2 else '-1'}" for s, a, s2 in steps for g in outcomes}
    assert relabelled(rb, "episode") == everything | {last}
    every_outcome = {f"{s} {g} {a} {'0' if g == s2 else '-1'}" for s, a, s2 in steps for g in (*outcomes, "111")}
    assert relabelled(rb, "random") == every_outcome | {f"011 {g} 0 -1" for g in outcomes} | {last}


@pytest.mark.parametrize("k, share", [(0, 0.0), (1, 0.5), (4, 0.8)])
def test_the_share_of_relabelled_samples_is_k_of_k_plus_1(k, share):
    _, hindsight = replay(episodes()).sample(20_000, "future", k, np.random.default_rng(0))
    assert abs(hindsight.mean() - share) < 0.01


def test_the_ring_overwrites_whole_episodes_and_each_stored_step_is_as_likely():
    rb = replay(episodes(), episodes(), capacity=3)  # the fourth episode, of one step, took the row of the first
    assert rb.end == 4 and rb.data["length"].tolist() == [1, 1, 3]
    drawn = list(zip(*rb.draw(10_000, np.random.default_rng(0))))
    shares = {step: drawn.count(step) / 10_000 for step in set(drawn)}
    assert shares == pytest.approx(dict.fromkeys([(0, 0), (1, 0), (2, 0), (2, 1), (2, 2)], 0.2), abs=0.02)
    assert relabelled(rb, "none") == {"000 111 0 -1", "100 111 1 -1", "110 111 0 -1", "011 111 0 0"}


# ------------------------------------------------------------------------------------------ network, target and playing
def test_target_clips_bootstraps_at_the_time_limit_and_stops_at_a_termination():
    reward, terminated = torch.tensor([-1.0, -1, 0, -1]), torch.tensor([0.0, 0, 1, 0])
    next_q = torch.tensor([-10.0, -90, -10, 7])
    target = dqn.td_target(reward, terminated, next_q, 0.98, lowest_reward=-1)
    torch.testing.assert_close(target, torch.tensor([-10.8, -50, 0, 0]))
    torch.testing.assert_close(dqn.td_target(reward, terminated, next_q, 0.98, -15)[1], torch.tensor(-89.2))


def test_the_network_sees_bits_as_minus_1_and_1():
    network = dqn.QNetwork(2, 256)
    assert [tuple(p.shape) for p in network.parameters()] == [(256, 4), (256,), (2, 256), (2,)]  # App. A
    expected = network.layers(torch.tensor([[-1.0, 1, 1, -1]]))
    assert torch.equal(network(torch.from_numpy(bits("01")), torch.from_numpy(bits("10"))), expected)


class FlipFirstWrong(torch.nn.Module):
    """The optimal policy, as a network: the value of a bit is 1 if it is wrong."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, observation, desired_goal):
        return (observation != desired_goal).float() + self.weight


def test_an_optimal_policy_needs_as_many_steps_as_bits_are_wrong():
    played, metrics = dqn.play_episodes(dqn.make_envs(dqn.Args(n_bits=6), 200), FlipFirstWrong(), [3])
    wrong = (played["observation"][:, 0] != played["desired_goal"]).sum(-1)
    steps = np.where(wrong > 0, wrong, 2)  # an episode that starts at its goal has to leave it, and comes back
    np.testing.assert_array_equal(played["length"], steps)
    assert metrics["success_rate"] == 1.0 and metrics["episodic_return"] == (1 - steps).mean()
    assert metrics["right_flip_rate"] == pytest.approx(1 - (wrong == 0).sum() / steps.sum())


def test_exploration_is_epsilon_greedy_and_follows_from_the_seed():
    envs = dqn.make_envs(dqn.Args(n_bits=50, terminate=False), 100)

    def play(seed, epsilon):
        played, metrics = dqn.play_episodes(envs, FlipFirstWrong(), [seed], epsilon)
        return played["action"], metrics["right_flip_rate"]

    assert abs(play(1, 1.0)[1] - 0.5) < 0.02  # all uniform
    greedy, mixed = (play(1, epsilon)[0][:, 0] for epsilon in (0.0, 0.4))
    assert abs((greedy != mixed).mean() - 0.4 * 0.98) < 0.1  # of the first steps; a uniform one may be the greedy one
    np.testing.assert_array_equal(play(1, 0.4)[0], play(1, 0.4)[0])
    assert (play(1, 0.4)[0] != play(2, 0.4)[0]).any()


# ---------------------------------------------------------------------------------------------------------- whole runs
SMALL = """--n-bits 8 --total-timesteps 4000 --eval-frequency 1000 --eval-episodes 200 --batch-size 256
    --hidden-size 128 --no-cuda --checkpoint-frequency 1500"""
call = functools.partial(runs.called, dqn.main)


class TestRuns(runs.Promises):
    module, arguments, other_way = dqn, SMALL, " --anneal-lr --reward shaped"
    networks, optimizers = ("q_network", "target_network"), ("optimizer",)
    refusals = [
        ("--env-id BitFlop-v0", "Did you mean: `BitFlip`"),
        ("--env-id CartPole-v1", "CartPole-v1 cannot be made as a batched task with n bits"),
        ("--n-bits 0", "--n-bits must be from 1"),
        ("--k -1", "--k must be from 0"),
        ("--epsilon 1.5", "--epsilon must be from 0 to 1"),
        ("--buffer-size 100", "--buffer-size must be from 240"),
        ("--buffer-size 1000000000000000000", "--buffer-size must be from 240 to "),
    ]

    def test_eight_bits_are_solved_and_the_run_leaves_what_the_interface_says(self, straight):
        assert straight["success_rate"] == 1.0 and straight["n_episodes"] == 200 and straight["seed"] == 1
        assert 4000 <= straight["global_step"] < 4000 + 16 * 8
        success = successes(straight["run"])
        assert list(success) == [0, 1000, 2000, 3000, 4000] and success[0] < 0.2 and success[4000] == 1
        left = {file.name.split(".")[0] for file in Path(straight["run"]).iterdir()}
        assert left == {"args", "eval", "checkpoint", "model", "events"}
        arguments = json.loads(Path(straight["run"], "args.json").read_text())
        assert arguments["n_bits"] == 8 and arguments.keys() == dqn.Args.__dataclass_fields__.keys()
        content, events = state(straight["run"]), scalars(straight["run"])
        assert content["updates"] == 20 * content["cycle"] > 600
        assert events.keys() >= {"charts/zero_reward_fraction", "charts/hindsight_distance", "losses/q_values"}
        assert [step for step, _ in events["eval/success_rate"]] == list(success)
        assert events["losses/td_loss"][-1][0] == straight["global_step"]
        np.testing.assert_allclose(np.mean([share for _, share in events["charts/relabel_fraction"]]), 0.8, atol=0.01)


def test_the_learning_rate_goes_to_zero(tmp_path):
    result = call(SMALL + " --total-timesteps 1000 --anneal-lr --learning-rate 0.5", tmp_path)
    steps, rates = zip(*scalars(result["run"])["charts/learning_rate"])
    np.testing.assert_allclose(rates, [0.5 * max(0, 1 - step / 1000) for step in steps], rtol=1e-6)
    assert 0.4 < rates[0] < 0.5 and rates[-1] == 0


def test_the_shaped_reward_trains(tmp_path):
    result = call(SMALL + " --reward shaped", tmp_path)
    assert result["success_rate"] == 1.0 and result["episodic_return"] < -5  # not -1 a step: it starts 4 bits off


def test_without_hindsight_20_bits_are_not_found(tmp_path):
    arguments = "--n-bits 20 --total-timesteps 8000 --eval-frequency 8000 --batch-size 64 --no-cuda"
    assert call(arguments + " --strategy none", tmp_path)["success_rate"] == 0.0


@pytest.mark.slow
def test_thirty_bits_are_solved(tmp_path):
    result = call("--n-bits 30 --total-timesteps 160000 --eval-frequency 160000 --no-cuda", tmp_path)
    assert result["success_rate"] >= 0.99
