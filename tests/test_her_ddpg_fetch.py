"""her_ddpg_fetch.py against values worked out by hand, then whole runs of it from the command line."""

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
from torch import nn

import her_ddpg_fetch as her
from tests import whole_runs
from tests.whole_runs import ROOT, assert_equal, curve, state


# ------------------------------------------------------------------------------------------------ replay and hindsight
def episode(length, first=0.0, goal=100.0):
    """An episode on a line: achieved goals first, first + 1, ..., a desired goal that is never met."""
    line = np.arange(first, first + length + 1, dtype=np.float32)[:, None]
    desired = np.full_like(line, goal)
    zeros = np.zeros(length, np.float32)
    return {
        "observation": line,
        "achieved_goal": line,
        "desired_goal": desired,
        "action": line[1:],
        "terminated": zeros,
    }


def replay(*episodes, capacity=100):
    keys = ("observation", "next_observation", "achieved_goal", "next_achieved_goal", "desired_goal", "action")
    rb = her.ReplayBuffer(capacity, {key: (1,) for key in keys} | {"terminated": ()})
    for e in episodes:
        rb.add(e)
    return rb


def threshold(achieved, desired, info):
    return -(np.linalg.norm(achieved - desired, axis=-1) > 0.5).astype(np.float32)


def sample(rb, **changes):
    changes = {"past_goals": 0.0, "redraws": 0, "batch_size": 500} | changes
    return rb.sample(dataclasses.replace(her.Args(), **changes), threshold, np.random.default_rng(0))


def drawn(rb, strategy, step, n=400):
    steps = np.full(n, step)
    return set(rb.hindsight_steps(strategy, steps, np.random.default_rng(0)).tolist())


def test_hindsight_steps_at_both_ends_of_an_episode():
    rb = replay(episode(3), episode(4, first=10))  # steps 0 1 2 and 3 4 5 6
    assert drawn(rb, "future", 0) == {0, 1, 2}
    assert drawn(rb, "future", 2) == {2}  # the last step has its own outcome alone
    assert drawn(rb, "future", 3) == {3, 4, 5, 6}  # the first step of the second episode
    assert drawn(rb, "final", 0) == {2} and drawn(rb, "final", 4) == {6}
    assert drawn(rb, "episode", 2) == {0, 1, 2} and drawn(rb, "episode", 5) == {3, 4, 5, 6}
    assert drawn(rb, "random", 0) == {0, 1, 2, 3, 4, 5, 6}


def test_a_hindsight_goal_is_what_was_achieved_after_the_step():
    rb = replay(episode(3))
    batch, hindsight = sample(rb, strategy="future", k=1e9)
    assert hindsight.all()
    pairs = set(zip(batch["achieved_goal"][:, 0].tolist(), batch["desired_goal"][:, 0].tolist()))
    assert pairs == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}  # never the state before the step
    np.testing.assert_array_equal(batch["next_achieved_goal"], batch["achieved_goal"] + 1)
    np.testing.assert_array_equal(batch["next_observation"], batch["observation"] + 1)
    np.testing.assert_array_equal(batch["action"], batch["next_observation"])


@pytest.mark.parametrize("strategy, goal", [("final", {3.0}), ("none", {100.0})])
def test_goals_of_the_other_strategies(strategy, goal):
    batch, hindsight = sample(replay(episode(3)), strategy=strategy, k=1e9)
    assert set(batch["desired_goal"].flatten().tolist()) == goal
    assert hindsight.all() == (strategy != "none")


@pytest.mark.parametrize("k, past, shares", [(4, 0.5, (0.4, 0.4, 0.2)), (1, 0.0, (0.5, 0.0, 0.5)), (0, 0.5, (0, 0, 1))])
def test_shares_of_the_goals(k, past, shares):
    episodes = episode(2, goal=100), episode(2, first=10, goal=200)
    batch, hindsight = sample(replay(*episodes), k=k, past_goals=past, batch_size=20_000)
    goal, own = batch["desired_goal"][:, 0], np.where(batch["achieved_goal"][:, 0] < 10, 100, 200)
    achieved = (goal < 100).mean()
    other = (goal == 300 - own).mean()  # half of the past goals are of the other episode
    np.testing.assert_allclose((achieved, 2 * other, (~hindsight).mean()), shares, atol=0.015)
    assert (goal[~hindsight] == own[~hindsight]).all()


def test_goals_met_before_the_step_are_drawn_again():
    still = episode(3) | {"achieved_goal": np.full((4, 1), 7, np.float32)}  # the object does not move
    rb = replay(*[still] * 9, episode(3))

    def share_met_before(redraws):
        batch, hindsight = sample(rb, k=1e9, redraws=redraws, batch_size=20_000)
        assert hindsight.all()
        return (batch["achieved_goal"] == batch["desired_goal"]).mean()

    np.testing.assert_allclose([share_met_before(n) for n in (0, 1, 2)], [0.9, 0.9**2, 0.9**3], atol=0.01)


def test_ring_wraps_with_episodes_of_unequal_length():
    rb = replay(episode(3), episode(2, first=10), episode(4, first=20), capacity=8)
    assert (rb.first, rb.end) == (3, 9)  # step 8 took the row of step 0, so all of the first episode is gone
    assert drawn(rb, "future", 5) == {5, 6, 7, 8}  # over the edge of the ring
    assert drawn(rb, "random", 5) == {3, 4, 5, 6, 7, 8}
    batch, _ = sample(rb, strategy="none")
    assert set(batch["achieved_goal"][:, 0].tolist()) == {10, 11, 20, 21, 22, 23}
    np.testing.assert_array_equal(batch["next_achieved_goal"], batch["achieved_goal"] + 1)
    rb.add(episode(8, first=30))
    assert (rb.first, rb.end) == (9, 17)
    with pytest.raises(her.BadInput, match="episode of 9 steps does not fit"):
        rb.add(episode(9))


def test_replay_is_allocated_once_and_refuses_what_the_machine_does_not_have():
    rb = replay(capacity=1000)
    assert sum(array.nbytes for array in rb.data.values()) == 1000 * 4 * 7
    with pytest.raises(her.BadInput, match=r"takes 40978\.2 GiB"):
        her.ReplayBuffer(10**12, {"observation": (7,)})


# ------------------------------------------------------------------------------------------------- rewards and targets
def test_target_clips_bootstraps_at_the_time_limit_and_stops_at_a_termination():
    reward, terminated = torch.tensor([-1.0, -1, -1, 0, 0]), torch.tensor([0.0, 0, 1, 0, 0])
    next_q = torch.tensor([-10.0, -90, -10, 3, -10])
    target = her.td_target(reward, terminated, next_q, 0.98, [-1.0, 0.0])
    torch.testing.assert_close(target, torch.tensor([-10.8, -50, -1, 0, -9.8]))
    target = her.td_target(reward + 1, terminated, torch.full((5,), 90.0), 0.9, [0.0, 1.0])
    torch.testing.assert_close(target, torch.tensor([10.0, 10, 0, 10, 10]))  # rewards 0 and 1: at most 1 / (1 - 0.9)


def one_goal(achieved, desired, info):  # gives one number for a batch, silently
    return -float(np.linalg.norm(achieved - desired) > 0.5)


def one_goal_only(achieved, desired, info):  # fails on a batch
    return -1.0 if abs(achieved[0] - desired[0]) > 0.5 else 0.0


def moved(achieved, desired, info):  # Sec. 4.4's shaped rewards depend on the state before
    return np.abs(achieved - info["previous_achieved_goal"]).sum(-1)


def test_goal_functions_take_batches_whether_vectorised_or_not():
    trial = np.zeros(2), np.ones(2)
    achieved, desired = np.array([[0.0, 0], [1, 1], [0.2, 0]]), np.array([[0.0, 0], [0, 0], [1, 0]])
    names = []
    for function in (threshold, one_goal, one_goal_only):
        batched = her.vectorized(function, *trial)
        names.append(batched.__name__)
        np.testing.assert_array_equal(batched(achieved, desired, {}), [0, -1, -1])
    assert names == ["at_once", "by_row", "by_row"]
    info = {"previous_achieved_goal": np.array([[0.0, 0], [0, 0], [0.2, 0.1]])}
    np.testing.assert_allclose(her.vectorized(moved, *trial)(achieved, desired, info), [0, 2, 0.1])
    np.testing.assert_array_equal(her.vectorized(lambda a, d, i: False, *trial)(achieved, desired, {}), [0, 0, 0])


def test_count_bonus():
    bonus = her.CountBonus(alpha=2.0, cell=0.01, goal_dim=3)
    here, next_cell = np.array([[0.005, 0.015, -0.005]]), np.array([[0.005, 0.025, -0.005]])
    goal = np.zeros((1, 3))
    bonus.add(np.repeat(here, 4, 0), np.repeat(goal, 4, 0))
    assert bonus(here + 0.001, goal) == 1.0  # 2 / sqrt(4), anywhere in the cell
    assert bonus(here + 1, goal + 1) == 1.0  # relative to the goal
    assert bonus(next_cell, goal) == 2.0  # never seen


def test_summary_of_episodes():
    def played(success, moved):
        achieved = np.array([[1.0, 2], [1, 2 + moved], [1, 2]], np.float32)
        return {"success": np.float32(success), "reward": np.float32(success) - 1, "achieved_goal": achieved}

    episodes = played([0, 1], 0.02), played([1, 0], 0.005), played([1, 0], -1), played([0, 0], 0)
    summary = {"success_rate": 0.25, "success_any_rate": 0.75, "episodic_return": -1.25, "moved_fraction": 0.5}
    assert her.summarize(episodes) == summary


# ------------------------------------------------------------------------------------------------------------ networks
def test_network_input_is_scaled_by_the_statistics_of_everything_seen():
    rng = np.random.default_rng(0)
    obs, achieved, desired = (rng.normal(3, 5, (1000, n)).astype(np.float32) for n in (2, 1, 1))
    obs[:, 1] = 7  # never varies
    scaling = her.NetworkInput(2, 1, scale=1.0)
    for part in np.split(np.arange(1000), [100, 150, 700]):
        scaling.update(obs[part], achieved[part], desired[part])
    x = np.concatenate([obs, desired, desired - achieved], 1)
    np.testing.assert_allclose(scaling.mean, x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(scaling.std, [x[:, 0].std(), 0.01, x[:, 2].std(), x[:, 3].std()], rtol=1e-5)
    out = scaling(*map(torch.from_numpy, (obs, achieved, desired)))
    np.testing.assert_allclose(out, np.clip((x - x.mean(0)) / np.maximum(x.std(0), 0.01), -5, 5), atol=1e-4)
    far = scaling(torch.tensor([[1e6, 7.0]]), torch.zeros(1, 1), torch.tensor([[-1e6]]))
    assert far[0, 0] == 5 and far[0, 2] == -5
    scaling.scale = 3.0
    np.testing.assert_allclose(scaling(*map(torch.from_numpy, (obs, achieved, desired))), 3 * out)


def test_appendix_a_network():
    actor = her.MLP(25, 3, 0, 4, 64, 3, 1.0)
    linear = [m for m in actor.layers if isinstance(m, nn.Linear)]
    assert [tuple(m.weight.shape) for m in linear] == [(64, 31), (64, 64), (64, 64), (4, 64)]
    assert [type(m) for m in actor.layers[1::2]] == [nn.ReLU] * 3
    qf = her.MLP(25, 3, 4, 1, 64, 3, 1.0)
    assert qf(torch.zeros(5, 25), torch.zeros(5, 3), torch.zeros(5, 3), torch.zeros(5, 4)).shape == (5, 1)


# -------------------------------------------------------------------------------------------------------- environments
def test_a_version_that_is_gone_runs_as_the_newest_and_says_so(capsys):
    assert her.make_env("FetchSlide-v2").spec.id == "FetchSlide-v4"
    env = her.make_env("FetchPush-v3")
    assert env.spec.id == "FetchPush-v4"
    her.describe(env, her.Args(env_id="FetchPush-v3"))
    assert capsys.readouterr().err == "FetchPush-v3 is not registered (any more): running FetchPush-v4\n"


def test_the_policy_sees_actor_observation_where_there_is_one():
    env = her.make_env("FetchPushPaper-v0", "envs")
    dims, actor_key, sizes = her.describe(env, her.Args(env_id="FetchPushPaper-v0", hidden_size=8, num_layers=1))
    assert actor_key == "actor_observation" and dims["observation"] == (25,) and sizes == [14, 3, 0, 4, 8, 1, 3.0]
    (played,) = her.play_episodes([env], her.MLP(*sizes), [1])
    np.testing.assert_array_equal(played["actor_observation"], played["observation"][:, :14])


def test_fetch_observations_are_those_of_the_untouched_environment():
    import gymnasium as gym

    ours, theirs = her.make_env("FetchPickAndPlace-v4"), gym.make("FetchPickAndPlace-v4", disable_env_checker=True)
    assert len(ours.unwrapped._model_names.joint_names) == 2  # the shortcut is on
    rng = np.random.default_rng(0)
    for env in (ours, theirs):
        env.reset(seed=3)
    for _ in range(20):
        action = rng.uniform(-1, 1, 4).astype(np.float32)
        a, b = (env.step(action)[0]["observation"] for env in (ours, theirs))
        np.testing.assert_array_equal(a, b)


def test_episodes_follow_from_their_seeds_alone_and_may_end_early():
    envs = [her.make_env("PointTerminates-v0", "tests.point_env") for _ in range(3)]
    torch.manual_seed(0)
    actor = her.MLP(1, 1, 0, 1, 8, 1, 1.0)
    one = her.play_episodes(envs, actor, [1, 2, 3], (0.1, 0.5))
    her.play_episodes(envs, actor, [7, 8, 9], (0.1, 0.5))
    two = her.play_episodes(envs, actor, [1, 2, 3], (0.1, 0.5))
    for a, b in zip(one, two):
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])
        steps = len(a["action"])
        assert len(a["achieved_goal"]) == steps + 1 and len(a["reward"]) == steps <= 10
        np.testing.assert_array_equal(a["terminated"][:-1], 0)
        assert a["terminated"][-1] == (a["reward"][-1] == 0) == a["success"][-1]
        np.testing.assert_allclose(np.diff(a["achieved_goal"][:, 0]), 0.2 * a["action"][:, 0], atol=1e-6)
    assert min(len(e["action"]) for e in one) < max(len(e["action"]) for e in one)


def test_exploration_clips_its_noise_and_mixes_in_uniform_actions():
    envs = [her.make_env("Point-v3", "tests.point_env") for _ in range(40)]
    actor = her.MLP(1, 1, 0, 1, 8, 1, 1.0)
    nn.init.constant_(actor.layers[-1].bias, 20.0)  # tanh gives 1

    def actions(noise, random_action):
        episodes = her.play_episodes(envs, actor, range(40), (noise, random_action))
        return np.concatenate([episode["action"] for episode in episodes])

    noisy, mixed = actions(0.1, 0.0), actions(0.0, 0.3)
    assert noisy.shape == (400, 1) and noisy.max() == 1 and 0.6 < noisy.min()
    assert abs((noisy == 1).mean() - 0.5) < 0.1  # noise above 0 is clipped away
    assert abs((mixed < 1).mean() - 0.3) < 0.1
    assert abs(mixed[mixed < 1].mean()) < 0.3 and mixed.min() < -0.8  # uniform on [-1, 1]


def test_an_action_that_is_not_a_number_is_an_error():
    actor = her.MLP(1, 1, 0, 1, 8, 1, 1.0)
    nn.init.constant_(actor.layers[-1].bias, float("nan"))
    with pytest.raises(her.RunFailed, match="not a number"):
        her.play_episodes([her.make_env("Point-v3", "tests.point_env")], actor, [1])


# ---------------------------------------------------------------------------------------------------------- whole runs
POINT = """--env-id Point-v3 --env-module tests.point_env --total-timesteps 800 --eval-frequency 400 --eval-episodes 8
    --num-envs 4 --batch-size 32 --train-frequency 1 --hidden-size 16 --action-penalty 0.01 --no-cuda"""
run = functools.partial(whole_runs.run, "her_ddpg_fetch.py")
command = functools.partial(whole_runs.command, "her_ddpg_fetch.py")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that was never stopped."""
    return run(POINT + " --save-model", tmp_path_factory.mktemp("runs"))


def test_a_run_learns_and_leaves_what_the_interface_says(straight):
    assert straight["global_step"] == 800 and straight["n_episodes"] == 8 and straight["seed"] == 1
    assert straight["success_rate"] == 1.0
    rows = curve(straight["run"])
    assert rows[0] == ["seed", "global_step", "metric", "value", "n_episodes"]
    success = [(int(row[1]), float(row[3])) for row in rows if row[2] == "eval/success_rate"]
    assert [step for step, _ in success] == [0, 400, 800] and success[0][1] < 1
    content = state(straight["run"])
    assert content["updates"] == 800 and content["cycle"] == 20
    assert set(os.listdir(straight["run"])) >= {"args.json", "eval.csv", "checkpoint.pt", "model.pt"}
    with open(f"{straight['run']}/args.json") as file:
        about = json.load(file)
    assert about["args"]["batch_size"] == 32 and about["versions"]["torch"] == torch.__version__
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(straight["run"]).Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= {"charts/zero_reward_fraction", "charts/moved_fraction", "charts/SPS", "losses/qf1_loss"}
    shares = [event.value for event in events.Scalars("charts/relabel_fraction")]
    np.testing.assert_allclose(np.mean(shares), 0.8, atol=0.02)


def test_stopped_and_resumed_equals_never_stopped(straight, tmp_path):
    process = subprocess.Popen(command(POINT, tmp_path), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while not any("eval/" in file.read_text() for file in tmp_path.glob("*/eval.csv")):  # the first evaluation is done
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130
    stopped = json.loads(out.splitlines()[-1])
    assert 0 < stopped["global_step"] < 800
    resumed = run(f"--resume {stopped['run']}/checkpoint.pt", tmp_path)
    assert resumed["run"] != stopped["run"]
    assert curve(resumed["run"]) == curve(straight["run"])
    assert_equal(state(resumed["run"]), state(straight["run"]))


def test_a_run_resumed_at_its_end_reports_the_same_result(straight, tmp_path):
    whole_runs.assert_resumed_at_its_end_reports_the_same(run, straight, tmp_path)


def test_a_run_resumed_with_other_arguments(straight, tmp_path):
    whole_runs.assert_resumed_with(run, straight, tmp_path, ("actor_optimizer", "qf_optimizer"))


def test_seeds_and_evaluation_frequency(straight, tmp_path):
    other = run(POINT + " --seed 2", tmp_path)
    assert not torch.equal(state(other["run"])["replay"]["action"], state(straight["run"])["replay"]["action"])
    more = run(POINT + " --eval-frequency 200", tmp_path)
    assert_equal(state(more["run"])["qf"], state(straight["run"])["qf"])  # evaluation leaves training alone


def test_evaluate_plays_a_saved_policy(straight, tmp_path):
    for name in ("model.pt", "checkpoint.pt"):
        result = run(f"--evaluate {straight['run']}/{name}", tmp_path)
        assert result["success_rate"] == straight["success_rate"]
        assert result["episodic_return"] == straight["episodic_return"]
    assert os.listdir(tmp_path) == []


def test_torchrun_ranks_end_equal_and_count_all_steps(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = run(POINT + " --num-workers 1", tmp_path, launcher)
    ranks = [torch.load(f"{result['run']}/checkpoint{name}.pt", weights_only=True) for name in ("", "-rank1")]
    for name in ("actor", "qf", "actor_target", "qf_target"):
        assert_equal(ranks[0][name], ranks[1][name])
    assert not torch.equal(ranks[0]["replay"]["action"], ranks[1]["replay"]["action"])
    assert result["global_step"] == 800 and ranks[1]["progress"]["global_step"] == 800
    assert ranks[0]["replay"]["end"] == 400 and ranks[0]["progress"]["updates"] == 400


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--env-id FetchPuhs-v4", "did you mean: FetchPush-v4"),
        ("--env-id CartPole-v1", "CartPole-v1 has no goals"),
        ("--env-module no_such_module", "cannot import --env-module no_such_module"),
        ("--strategy past", "invalid choice"),
        ("--k -1", "--k must be at least 0"),
        ("--gamma 1", "--gamma must be below 1"),
        ("--batch-size 200 --buffer-size 100", "--batch-size 200 is more than --buffer-size 100 holds"),
        ("--buffer-size 1000000000000", "this machine has"),
        ("--num-envs 2 --num-workers 3", "--num-workers 3 is more than --num-envs 2"),
        ("--resume no_such.pt", "cannot read no_such.pt: No such file or directory"),
        ("--resume requirements.txt", "requirements.txt is not a whole"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_2(arguments, message, tmp_path):
    said = run(arguments, tmp_path, status=2)
    assert message in said
    assert "invalid choice" in said or said.startswith("error: ") and said.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_checkpoints_that_are_truncated_foreign_or_do_not_fit(straight, tmp_path):
    whole = Path(straight["run"], "checkpoint.pt")
    (tmp_path / "cut.pt").write_bytes(whole.read_bytes()[:1000])
    torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.pt")
    assert "is not a whole" in run(f"--resume {tmp_path}/cut.pt", tmp_path, status=2)
    assert "is not a whole" in run(f"--evaluate {tmp_path}/foreign.pt", tmp_path, status=2)
    assert "does not fit" in run(f"--evaluate {whole} --hidden-size 32", tmp_path, status=2)
    assert "needs a checkpoint.pt" in run(f"--resume {straight['run']}/model.pt", tmp_path, status=2)


def test_the_broken_pair_of_mujoco_and_gymnasium_robotics(monkeypatch):
    def make(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(her.gym, "make", make)
    with pytest.raises(her.BadInput, match=r"mujoco .* and gymnasium-robotics .* do not fit together; pip install"):
        her.make_env("FetchPush-v4")


def test_a_full_disk_keeps_the_earlier_checkpoint(tmp_path, monkeypatch):
    path = str(tmp_path / "checkpoint.pt")
    her.save(path, {"format": her.FORMAT, "args": dataclasses.asdict(her.Args()), "step": 1})

    def full(content, file):
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(her.RunFailed, match="No space left on device"):
        her.save(path, {"step": 2})
    assert her.load(path)["step"] == 1 and os.listdir(tmp_path) == ["checkpoint.pt"]


def test_a_loss_that_is_not_a_number_fails_with_status_1(tmp_path):
    said = run(POINT + " --learning-rate 1e30", tmp_path, status=1)
    assert said.startswith("failed: ") and "lower --learning-rate" in said


def test_help_names_every_flag_without_warnings(tmp_path):
    done = subprocess.run([sys.executable, "her_ddpg_fetch.py", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == ""
    for field in dataclasses.fields(her.Args):
        assert f"--{field.name.replace('_', '-')}" in done.stdout


def test_fetch_reach_is_learned(tmp_path):
    fetch = "--env-id FetchReach-v2 --total-timesteps 3000 --eval-frequency 3000 --eval-episodes 30 --num-envs 4"
    result = run(f"{fetch} --batch-size 256 --hidden-size 64 --no-cuda", tmp_path)
    assert result["success_rate"] >= 0.9
