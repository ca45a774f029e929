"""her_dqn_bitflip.py against values worked out by hand, then whole runs of it."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import her_dqn_bitflip as dqn
from tests import whole_runs
from tests.whole_runs import ROOT, assert_equal, curve, state


def bits(*texts):
    return np.array([[int(bit) for bit in text] for text in texts], np.int8)


# ------------------------------------------------------------------------------------------------ replay and hindsight
def episodes():
    """Two episodes of 3 bits with the goal 111: 000 -> 100 -> 110 -> 010, and 011 -> 111, which ends there."""
    first, second = bits("000", "100", "110", "010"), bits("011", "111", "111", "111")
    return {
        "observation": np.stack([first, second]),
        "desired_goal": bits("111", "111"),
        "action": np.array([[0, 1, 0], [0, 2, 2]]),
        "length": np.array([3, 1]),
    }


def replay(*batches, capacity=100):
    rb = dqn.ReplayBuffer(capacity, 3)
    for batch in batches:
        rb.add(batch)
    return rb


def drawn(rb, strategy, step):
    return set(rb.hindsight_steps(strategy, np.full(200, step), np.random.default_rng(0)).tolist())


def relabelled(strategy, k=1e9):
    """All (state, goal, action, reward) that sampling the two written-out episodes gives, as text."""
    rb = replay(episodes())
    batch, hindsight = rb.sample(1000, strategy, k, np.random.default_rng(0))
    assert hindsight.all() == (strategy != "none") and (hindsight.any() or strategy == "none")
    env = dqn.make_envs(dqn.Args(n_bits=3), 1)
    rewards = env.compute_reward(batch["next_observation"], batch["desired_goal"], {})
    rows = zip(batch["observation"], batch["desired_goal"], batch["action"], rewards)
    text = ["".join(map(str, s)) + " " + "".join(map(str, g)) + f" {a} {r:+.0f}" for s, g, a, r in rows]
    return {line.replace("+0", "0") for line in text}


def test_replay_holds_the_steps_that_were_played():
    rb = replay(episodes())
    assert (rb.first, rb.end) == (0, 4)
    np.testing.assert_array_equal(rb.data["observation"][:4], bits("000", "100", "110", "011"))
    np.testing.assert_array_equal(rb.data["next_observation"][:4], bits("100", "110", "010", "111"))
    np.testing.assert_array_equal(rb.data["action"][:4], [0, 1, 0, 0])
    np.testing.assert_array_equal(rb.data["episode_start"][:4], [0, 0, 0, 3])
    np.testing.assert_array_equal(rb.data["episode_end"][:4], [3, 3, 3, 4])


def test_relabelled_rewards_of_a_written_out_episode_under_each_strategy():
    last = "011 111 0 0"  # the one step of the second episode, whose only outcome is its own goal
    assert relabelled("none") == {"000 111 0 -1", "100 111 1 -1", "110 111 0 -1", last}
    assert relabelled("final") == {"000 010 0 -1", "100 010 1 -1", "110 010 0 0", last}
    assert relabelled("future") == {
        *("000 100 0 0", "000 110 0 -1", "000 010 0 -1"),
        *("100 110 1 0", "100 010 1 -1"),
        *("110 010 0 0", last),
    }
    outcomes = ("100", "110", "010")
    steps = (("000", 0, "100"), ("100", 1, "110"), ("110", 0, "010"))
    everything = {f"{s} {g} {a} {'0' if g == s2 else '-1'}" for s, a, s2 in steps for g in outcomes}
    assert relabelled("episode") == everything | {last}
    every_outcome = {f"{s} {g} {a} {'0' if g == s2 else '-1'}" for s, a, s2 in steps for g in (*outcomes, "111")}
    assert relabelled("random") == every_outcome | {f"011 {g} 0 -1" for g in outcomes} | {last}


@pytest.mark.parametrize("k, share", [(0, 0.0), (1, 0.5), (4, 0.8)])
def test_the_share_of_relabelled_samples_is_k_of_k_plus_1(k, share):
    _, hindsight = replay(episodes()).sample(20_000, "future", k, np.random.default_rng(0))
    assert abs(hindsight.mean() - share) < 0.01


def test_ring_wraps_and_forgets_whole_episodes():
    rb = replay(episodes(), episodes(), capacity=7)
    assert (rb.first, rb.end) == (3, 8)  # step 7 took the row of step 0, so all of the first episode is gone
    assert drawn(rb, "future", 5) == {5, 6} and drawn(rb, "future", 7) == {7}  # step 7 is in row 0
    assert drawn(rb, "random", 5) == {3, 4, 5, 6, 7}
    batch, _ = rb.sample(500, "none", 4, np.random.default_rng(0))
    seen = {"".join(map(str, s)) for s in batch["observation"]}
    assert seen == {"000", "100", "110", "011"}


def test_replay_refuses_what_the_machine_does_not_have():
    with pytest.raises(dqn.BadInput, match=r"takes 30733\.6 GiB"):
        dqn.ReplayBuffer(10**12, 3)


# ------------------------------------------------------------------------------------------------- network and target
def test_target_clips_bootstraps_at_the_time_limit_and_stops_at_a_termination():
    reward, terminated = torch.tensor([-1.0, -1, 0, -1]), torch.tensor([0.0, 0, 1, 0])
    next_q = torch.tensor([-10.0, -90, -10, 7])
    target = dqn.td_target(reward, terminated, next_q, 0.98, lowest_reward=-1)
    torch.testing.assert_close(target, torch.tensor([-10.8, -50, 0, 0]))
    torch.testing.assert_close(dqn.td_target(reward, terminated, next_q, 0.98, -15)[1], torch.tensor(-89.2))


def test_the_network_sees_bits_as_minus_1_and_1():
    network = dqn.QNetwork(2, 256)
    assert [tuple(p.shape) for p in network.parameters()] == [(256, 4), (256,), (2, 256), (2,)]  # App. A
    first, _, last = network.layers
    x = torch.tensor([[-1.0, 1, 1, -1]])
    expected = torch.relu(x @ first.weight.T + first.bias) @ last.weight.T + last.bias
    torch.testing.assert_close(network(torch.from_numpy(bits("01")), torch.from_numpy(bits("10"))), expected)


def test_loss_and_gradients_by_hand_and_against_autograd():
    network = dqn.QNetwork(1, 1)
    for parameter, value in zip(network.parameters(), ([[1.0, 2.0]], [0.5], [[3.0]], [-1.0])):
        parameter.data = torch.tensor(value)
    x, action = torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([0, 0])  # hidden 3.5 and 0: Q 9.5 and -1
    loss, gradients, q_values = dqn.td_loss(network, x, action, torch.tensor([9.0, -2.0]))  # errors 0.5 and 1
    assert (loss.item(), q_values.tolist()) == (0.625, [9.5, -1.0])
    assert [g.tolist() for g in gradients] == [[[1.5, 1.5]], [1.5], [[1.75]], [1.5]]

    torch.manual_seed(1)
    network, x, action = dqn.QNetwork(5, 16), torch.randn(64, 10), torch.randint(5, (64,))
    target = torch.randn(64)
    expected = torch.nn.functional.mse_loss(network.layers(x)[torch.arange(64), action], target)
    loss, gradients, _ = dqn.td_loss(network, x, action, target)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients, list(torch.autograd.grad(expected, list(network.parameters()))))


class FlipFirstWrong(torch.nn.Module):
    """The optimal policy, as a network: the value of a bit is 1 if it is wrong."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, observation, desired_goal):
        return (observation != desired_goal).float() + self.weight


def test_an_optimal_policy_needs_as_many_steps_as_bits_are_wrong():
    envs = dqn.make_envs(dqn.Args(n_bits=6), 200)
    obs, _ = envs.reset(seed=3)
    wrong = (obs["observation"] != obs["desired_goal"]).sum(-1)
    played = dqn.play_episodes(envs, FlipFirstWrong(), seed=3)
    met = wrong > 0  # an episode that starts at its goal has to leave it, and comes back
    np.testing.assert_array_equal(played["length"][met], wrong[met])
    np.testing.assert_array_equal(played["return"][met], 1 - wrong[met])
    assert played["success"].all()
    summary = dqn.summarize({key: value[met] for key, value in played.items()})
    assert summary == {"success_rate": 1.0, "episodic_return": float(1 - wrong[met].mean()), "right_flip_rate": 1.0}


def test_exploration_is_epsilon_greedy():
    envs = dqn.make_envs(dqn.Args(n_bits=50, terminate=False), 100)
    network = FlipFirstWrong()
    played = dqn.play_episodes(envs, network, seed=1, epsilon=0.5)
    # half of the actions are greedy and half uniform; of the latter fewer than half are right, as few bits are wrong
    uniform = dqn.summarize(dqn.play_episodes(envs, network, seed=1, epsilon=1.0))["right_flip_rate"]
    assert abs(uniform - 0.5) < 0.02
    assert 0.5 < dqn.summarize(played)["right_flip_rate"] < 0.5 + 0.5 * 0.5
    again = dqn.play_episodes(envs, network, seed=1, epsilon=0.5)
    np.testing.assert_array_equal(played["action"], again["action"])
    assert (played["action"] != dqn.play_episodes(envs, network, seed=2, epsilon=0.5)["action"]).any()


# ---------------------------------------------------------------------------------------------------------- whole runs
SMALL = """--n-bits 8 --total-timesteps 4000 --eval-frequency 1000 --eval-episodes 200 --batch-size 256
    --hidden-size 128 --no-cuda"""
run = functools.partial(whole_runs.run, "her_dqn_bitflip.py")
command = functools.partial(whole_runs.command, "her_dqn_bitflip.py")
refused = functools.partial(whole_runs.refused, dqn.main)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that was never stopped."""
    return run(SMALL + " --save-model", tmp_path_factory.mktemp("runs"))


def test_eight_bits_are_solved_and_the_run_leaves_what_the_interface_says(straight):
    assert straight["success_rate"] == 1.0
    assert 4000 <= straight["global_step"] < 4000 + 16 * 8 and straight["n_episodes"] == 200
    success = [(int(row[1]), float(row[3])) for row in curve(straight["run"]) if row[2] == "eval/success_rate"]
    assert [step for step, _ in success] == [0, 1000, 2000, 3000, 4000] and success[0][1] < 0.2
    content = state(straight["run"])
    assert content["updates"] == 20 * content["cycle"] > 600
    assert set(os.listdir(straight["run"])) >= {"args.json", "eval.csv", "checkpoint.pt", "model.pt"}
    with open(f"{straight['run']}/args.json") as file:
        about = json.load(file)
    assert about["args"]["n_bits"] == 8 and about["versions"]["torch"] == torch.__version__
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(straight["run"]).Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= {"charts/zero_reward_fraction", "charts/hindsight_distance", "charts/SPS", "losses/td_loss"}
    shares = [event.value for event in events.Scalars("charts/relabel_fraction")]
    np.testing.assert_allclose(np.mean(shares), 0.8, atol=0.01)


def test_the_learning_rate_goes_to_zero(tmp_path):
    result = run(SMALL + " --total-timesteps 1000 --anneal-lr --learning-rate 0.5", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rates = EventAccumulator(result["run"]).Reload().Scalars("charts/learning_rate")
    expected = [0.5 * max(0, 1 - rate.step / 1000) for rate in rates]
    np.testing.assert_allclose([rate.value for rate in rates], expected, rtol=1e-6)
    assert 0.4 < expected[0] < 0.5 and expected[-1] == 0


def test_the_shaped_reward_trains(tmp_path):
    result = run(SMALL + " --reward shaped", tmp_path)
    assert result["success_rate"] == 1.0 and result["episodic_return"] < -5  # not -1 a step: it starts 4 bits off


def test_without_hindsight_20_bits_are_not_found(tmp_path):
    arguments = "--n-bits 20 --total-timesteps 8000 --eval-frequency 8000 --batch-size 64 --no-cuda"
    result = run(arguments + " --strategy none", tmp_path)
    assert result["success_rate"] == 0.0


@pytest.mark.slow
def test_thirty_bits_are_solved(tmp_path):
    result = run("--n-bits 30 --total-timesteps 160000 --eval-frequency 160000 --no-cuda", tmp_path)
    assert result["success_rate"] >= 0.99


def test_stopped_and_resumed_equals_never_stopped(straight, tmp_path):
    process = subprocess.Popen(command(SMALL, tmp_path), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while not any("eval/" in file.read_text() for file in tmp_path.glob("*/eval.csv")):  # the first evaluation is done
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert process.returncode == 130
    stopped = json.loads(out.splitlines()[-1])
    assert 0 < stopped["global_step"] < 4000
    resumed = run(f"--resume {stopped['run']}/checkpoint.pt", tmp_path)
    assert resumed["run"] != stopped["run"]
    assert curve(resumed["run"]) == curve(straight["run"])
    assert_equal(state(resumed["run"]), state(straight["run"]))


def test_a_run_resumed_at_its_end_reports_the_same_result(straight, tmp_path):
    whole_runs.assert_resumed_at_its_end_reports_the_same(run, straight, tmp_path)


def test_a_run_resumed_with_other_arguments(straight, tmp_path):
    whole_runs.assert_resumed_with(run, straight, tmp_path, ("optimizer",))


def test_seeds_and_evaluation_frequency(straight, tmp_path):
    other = run(SMALL + " --seed 2", tmp_path)
    a, b = state(other["run"]), state(straight["run"])
    assert not torch.equal(a["replay"]["desired_goal"][:50], b["replay"]["desired_goal"][:50])
    assert not torch.equal(a["q_network"]["layers.0.weight"], b["q_network"]["layers.0.weight"])
    more = run(SMALL + " --eval-frequency 500", tmp_path)
    assert_equal(state(more["run"])["q_network"], b["q_network"])  # evaluation leaves training alone


def test_evaluate_plays_a_saved_network(straight, tmp_path):
    for name in ("model.pt", "checkpoint.pt"):
        result = run(f"--evaluate {straight['run']}/{name}", tmp_path)
        assert result["success_rate"] == straight["success_rate"]
        assert result["episodic_return"] == straight["episodic_return"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--env-id BitFlop-v0", "did you mean: BitFlip-v0"),
        ("--env-id CartPole-v1", "CartPole-v1 is not a batched task with n bits"),
        ("--n-bits 0", "--n-bits must be at least 1"),
        ("--k -1", "--k must be at least 0"),
        ("--gamma 1", "--gamma must be below 1"),
        ("--epsilon 1.5", "--epsilon must be from 0 to 1"),
        ("--buffer-size 100", "--buffer-size 100 does not hold a cycle of --num-envs 16 episodes of 15 steps"),
        ("--buffer-size 1000000000000", "this machine has"),
        ("--resume a.pt --evaluate b.pt", "give one of them"),
        ("--resume no_such.pt", "cannot read no_such.pt: No such file or directory"),
        ("--resume requirements.txt", "requirements.txt is not a whole"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_2(arguments, message, tmp_path, monkeypatch, capsys):
    said = refused(arguments, tmp_path, monkeypatch, capsys)
    assert message in said and said.startswith("error: ") and said.count("\n") == 1


def test_an_unknown_strategy_names_the_known_ones(tmp_path, monkeypatch, capsys):
    said = refused("--strategy past", tmp_path, monkeypatch, capsys)
    assert "invalid choice" in said and "future" in said


def test_checkpoints_that_are_truncated_foreign_or_do_not_fit(straight, tmp_path, monkeypatch, capsys):
    whole = Path(straight["run"], "checkpoint.pt")
    (tmp_path / "cut.pt").write_bytes(whole.read_bytes()[:1000])
    torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.pt")

    def says(arguments):
        return refused(arguments, tmp_path, monkeypatch, capsys)

    assert "is not a whole" in says(f"--resume {tmp_path}/cut.pt")
    assert "is not a whole" in says(f"--evaluate {tmp_path}/foreign.pt")
    assert "does not fit --n-bits" in says(f"--evaluate {whole} --n-bits 9")
    assert "needs a checkpoint.pt" in says(f"--resume {straight['run']}/model.pt")


def test_a_full_disk_keeps_the_earlier_checkpoint(tmp_path, monkeypatch):
    path = str(tmp_path / "checkpoint.pt")
    dqn.save(path, {"format": dqn.FORMAT, "args": dataclasses.asdict(dqn.Args()), "step": 1})

    def full(content, file):
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(dqn.RunFailed, match="No space left on device"):
        dqn.save(path, {"step": 2})
    assert dqn.load(path)["step"] == 1 and os.listdir(tmp_path) == ["checkpoint.pt"]


def test_a_loss_that_is_not_a_number_fails_with_status_1(tmp_path):
    said = run(SMALL + " --learning-rate 1e30", tmp_path, status=1)
    assert said.startswith("failed: ") and "lower --learning-rate" in said


def test_help_names_every_flag_without_warnings():
    done = subprocess.run([sys.executable, "her_dqn_bitflip.py", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == ""
    for field in dataclasses.fields(dqn.Args):
        assert f"--{field.name.replace('_', '-')}" in done.stdout
