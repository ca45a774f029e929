"""her_ddpg_fetch.py against values worked out by hand, then whole runs of it, then environments of other people."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import her_ddpg_fetch as her
from tests import whole_runs as runs
from tests.whole_runs import ROOT, assert_equal, assert_same_run, scalars, state, successes


# ------------------------------------------------------------------------------------------------ replay and hindsight
def episode(length, first=0.0, goal=100.0):
    """An episode on a line: achieved goals first, first + 1, ..., a desired goal that is never met."""
    line = np.arange(first, first + length + 1, dtype=np.float32)[:, None]
    states = {"observation": line, "achieved_goal": line, "desired_goal": np.full_like(line, goal)}
    return states | {"action": line[1:], "terminated": np.zeros(length, np.float32)}


def replay(*episodes, capacity=100):
    keys = ("observation", "next_observation", "achieved_goal", "next_achieved_goal", "desired_goal", "action")
    rb = her.ReplayBuffer(capacity, {key: (1,) for key in keys} | {"terminated": ()})
    for e in episodes:
        rb.add(e)
    return rb


def threshold(achieved, desired, info):
    return -(np.linalg.norm(achieved - desired, axis=-1) > 0.5).astype(np.float32)


def sample(rb, **changes):
    args = dataclasses.replace(her.Args(), **{"past_goals": 0.0, "redraws": 0, "batch_size": 500} | changes)
    return rb.sample(args, threshold, np.random.default_rng(0))


def drawn(rb, strategy, step):
    return set(rb.hindsight_steps(strategy, np.full(400, step), np.random.default_rng(0)).tolist())


def test_hindsight_steps_at_both_ends_of_an_episode():
    rb = replay(episode(3), episode(4, first=10))  # steps 0 1 2 and 3 4 5 6
    assert drawn(rb, "future", 0) == {0, 1, 2}
    assert drawn(rb, "future", 2) == {2}  # the last step has its own outcome alone
    assert drawn(rb, "future", 3) == {3, 4, 5, 6}  # the first step of the second episode
    assert drawn(rb, "final", 0) == {2} and drawn(rb, "final", 4) == {6}
    assert drawn(rb, "episode", 2) == {0, 1, 2} and drawn(rb, "episode", 5) == {3, 4, 5, 6}
    assert drawn(rb, "random", 0) == {0, 1, 2, 3, 4, 5, 6}


PAIRS = {(s, g) for s in range(3) for g in (1, 2, 3)}


@pytest.mark.parametrize(
    "strategy, pairs",
    [
        ("future", {pair for pair in PAIRS if pair[0] < pair[1]}),  # never the state before the step
        ("final", {(0, 3), (1, 3), (2, 3)}),
        ("episode", PAIRS),
        ("random", PAIRS),
        ("none", {(0, 100), (1, 100), (2, 100)}),
    ],
)
def test_a_hindsight_goal_is_what_was_achieved_after_a_step(strategy, pairs):
    batch, hindsight = sample(replay(episode(3)), strategy=strategy, k=1e9)
    assert hindsight.all() == (strategy != "none")
    assert set(zip(batch["achieved_goal"][:, 0].tolist(), batch["desired_goal"][:, 0].tolist())) == pairs
    for key in ("next_achieved_goal", "next_observation", "action"):
        np.testing.assert_array_equal(batch[key], batch["observation"] + 1)


@pytest.mark.parametrize("k, past, shares", [(4, 0.5, (0.4, 0.4, 0.2)), (1, 0.0, (0.5, 0.0, 0.5)), (0, 0.5, (0, 0, 1))])
def test_shares_of_the_goals(k, past, shares):
    episodes = episode(2, goal=100), episode(2, first=10, goal=200)
    batch, hindsight = sample(replay(*episodes), k=k, past_goals=past, batch_size=20_000)
    goal, own = batch["desired_goal"][:, 0], np.where(batch["achieved_goal"][:, 0] < 10, 100, 200)
    other = (goal == 300 - own).mean()  # half of the past goals are of the other episode
    np.testing.assert_allclose(((goal < 100).mean(), 2 * other, (~hindsight).mean()), shares, atol=0.015)
    assert (goal[~hindsight] == own[~hindsight]).all()


def test_goals_met_before_the_step_are_drawn_again():
    still = episode(3) | {"achieved_goal": np.full((4, 1), 7, np.float32)}  # the object does not move
    rb = replay(*[still] * 9, episode(3))

    def share_met_before(redraws):
        batch, hindsight = sample(rb, k=1e9, redraws=redraws, batch_size=20_000)
        return hindsight.all() * (batch["achieved_goal"] == batch["desired_goal"]).mean()

    np.testing.assert_allclose([share_met_before(n) for n in (0, 1, 2)], [0.9, 0.9**2, 0.9**3], atol=0.01)


def test_the_ring_keeps_the_tail_of_an_episode_that_is_partly_overwritten():
    rb = replay(episode(3), episode(2, first=10), episode(4, first=20), capacity=8)
    assert (rb.first, rb.end) == (1, 9)  # step 8 took the row of step 0
    assert drawn(rb, "future", 5) == {5, 6, 7, 8}  # over the edge of the ring
    assert drawn(rb, "future", 1) == {1, 2} == drawn(rb, "episode", 2) and drawn(rb, "final", 1) == {2}
    assert drawn(rb, "random", 5) == {1, 2, 3, 4, 5, 6, 7, 8}
    batch, _ = sample(rb, strategy="none")
    assert set(batch["achieved_goal"][:, 0].tolist()) == {1, 2, 10, 11, 20, 21, 22, 23}
    np.testing.assert_array_equal(batch["next_achieved_goal"], batch["achieved_goal"] + 1)
    rb.add(episode(11, first=30))  # longer than the ring
    assert (rb.first, rb.end) == (12, 20) and drawn(rb, "episode", 15) == set(range(12, 20))
    again = replay(capacity=8)
    again.load_state_dict(rb.state_dict())
    for ring in (rb, again):
        assert set(sample(ring, strategy="none")[0]["achieved_goal"][:, 0].tolist()) == set(range(33, 41))


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
    batched = [her.vectorized(function, *trial) for function in (threshold, one_goal, one_goal_only)]
    assert [function.__name__ for function in batched] == ["at_once", "by_row", "by_row"]
    for function in batched:
        np.testing.assert_array_equal(function(achieved, desired, {}), [0, -1, -1])
    info = {"previous_achieved_goal": np.array([[0.0, 0], [0, 0], [0.2, 0.1]])}
    np.testing.assert_allclose(her.vectorized(moved, *trial)(achieved, desired, info), [0, 2, 0.1])
    np.testing.assert_array_equal(her.vectorized(lambda a, d, i: False, *trial)(achieved, desired, {}), [0, 0, 0])


def test_count_bonus():
    bonus = her.CountBonus(alpha=2.0, cell=0.01, goal_dim=3)
    here, next_cell, goal = np.array([[0.005, 0.015, -0.005]]), np.array([[0.005, 0.025, -0.005]]), np.zeros((1, 3))
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


# ------------------------------------------------------------------------------------------- networks and environments
def test_network_input_is_scaled_by_the_statistics_of_everything_seen():
    rng = np.random.default_rng(0)
    obs, achieved, desired = (rng.normal(3, 5, (1000, n)).astype(np.float32) for n in (2, 1, 1))
    obs[:, 1] = 7  # never varies
    scaling = her.NetworkInput(2, 1, scale=1.0)
    for part in np.split(np.arange(1000), [100, 150, 700]):
        scaling.update(obs[part], achieved[part], desired[part])
    x = np.concatenate([obs, desired, desired - achieved], 1)
    np.testing.assert_allclose(scaling.mean, x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(scaling.std, np.maximum(x.std(0), 0.01), rtol=1e-5)
    out = scaling(*map(torch.from_numpy, (obs, achieved, desired)))
    np.testing.assert_allclose(out, np.clip((x - x.mean(0)) / np.maximum(x.std(0), 0.01), -5, 5), atol=1e-4)
    far = scaling(torch.tensor([[1e6, 7.0]]), torch.zeros(1, 1), torch.tensor([[-1e6]]))
    assert far[0, 0] == 5 and far[0, 2] == -5
    scaling.scale = 3.0
    np.testing.assert_allclose(scaling(*map(torch.from_numpy, (obs, achieved, desired))), 3 * out)


def test_fetch_slide_v2_runs_as_the_newest_version_and_says_so(capsys):
    args = her.Args(env_id="FetchSlide-v2", max_episode_steps=2)
    env = her.probe(args)[0]
    assert env.spec.id == "FetchSlide-v4" and her.make_env(args).spec.id == "FetchSlide-v4"
    assert capsys.readouterr().err == "FetchSlide-v2 is not registered (any more): running FetchSlide-v4\n"


def test_the_policy_alone_sees_actor_observation_and_the_networks_are_those_of_appendix_a():
    args = her.Args(env_id="FetchPushPaper-v0", env_module="envs", hidden_size=64, max_episode_steps=3)
    env = her.make_env(args)
    actor, qf = her.MLP(env, args), her.MLP(env, args, critic=True)
    for network, shapes in ((actor, (14 + 6, 64, 64, 64, 4)), (qf, (25 + 6 + 4, 64, 64, 64, 1))):
        layers = [layer.weight.shape for layer in network.layers if isinstance(layer, nn.Linear)]
        assert layers == list(zip(shapes[1:], shapes))
    (played,) = her.play_episodes(args, "paper", actor.state_dict(), False, [1])
    np.testing.assert_array_equal(played["actor_observation"], played["observation"][:, :14])


def test_fetch_observations_are_those_of_the_untouched_environment():
    ours, theirs = her.make_env(her.Args(env_id="FetchPickAndPlace-v4")), gym.make("FetchPickAndPlace-v4")
    assert len(ours.unwrapped._model_names.joint_names) == 2  # the shortcut is on
    rng = np.random.default_rng(0)
    for env in (ours, theirs):
        env.reset(seed=3)
    for _ in range(20):
        action = rng.uniform(-1, 1, 4).astype(np.float32)
        a, b = (env.step(action)[0]["observation"] for env in (ours, theirs))
        np.testing.assert_array_equal(a, b)


def play(env_id, seeds, exploration, bias=None):
    noise, uniform = exploration
    args = her.Args(env_id=env_id, env_module="tests.point_env", exploration_noise=noise, random_action=uniform)
    torch.manual_seed(0)
    actor = her.MLP(her.make_env(args), args)
    if bias is not None:
        nn.init.constant_(actor.layers[-1].bias, bias)
    return her.play_episodes(args, env_id, actor.state_dict(), True, seeds)


def test_episodes_follow_from_their_seeds_alone_and_may_end_early():
    one, _, two = (play("PointTerminates-v0", seeds, (0.1, 0.5)) for seeds in ([1, 2, 3], [7, 8, 9], [1, 2, 3]))
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
    def actions(*exploration):  # of a policy that gives 1
        return np.concatenate([e["action"] for e in play("Point-v3", range(40), exploration, bias=20.0)])

    noisy, mixed = actions(0.1, 0.0), actions(0.0, 0.3)
    assert noisy.shape == (400, 1) and noisy.max() == 1 and 0.6 < noisy.min()
    assert abs((noisy == 1).mean() - 0.5) < 0.1  # noise above 0 is clipped away
    assert abs((mixed < 1).mean() - 0.3) < 0.1
    assert abs(mixed[mixed < 1].mean()) < 0.3 and mixed.min() < -0.8  # uniform on [-1, 1]


# ---------------------------------------------------------------------------------------------------------- whole runs
SMALL = """--env-module tests.point_env --total-timesteps 800 --eval-frequency 200 --eval-episodes 8 --num-envs 4
    --checkpoint-frequency 300 --batch-size 32 --train-frequency 1 --hidden-size 16 --action-penalty 0.01 --no-cuda"""
POINT = SMALL + " --env-id Point-v3"
run = functools.partial(runs.run, "her_ddpg_fetch.py")
call = functools.partial(runs.called, her.main)


class PlayHere(contextlib.nullcontext):
    """Plays in this process what ProcessPoolExecutor has played in others."""

    def __init__(self, *args):
        super().__init__(self)

    def map(self, function, parts):
        futures = [concurrent.futures.Future() for _ in parts]
        for future, part in zip(futures, parts):
            try:
                future.set_result(function(part))
            except Exception as e:
                future.set_exception(e)
        return (future.result() for future in futures)


@pytest.fixture(autouse=True)
def play_here(monkeypatch):
    monkeypatch.setattr(her, "ProcessPoolExecutor", PlayHere)
    monkeypatch.setattr(her, "ENVS", {})


@pytest.fixture
def ended(tmp_path):
    """Starts a run in which an environment sends a signal, waits for its end and returns status, output and errors."""

    def left():
        found = 0
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                found += f"HINDSIGHT_TEST={tmp_path}\0".encode() in file.read_bytes()
        return found

    def start(arguments):
        command = runs.command("her_ddpg_fetch.py", f"{SMALL} {arguments}", tmp_path)
        given = {"cwd": ROOT, "env": os.environ | {"HINDSIGHT_TEST": str(tmp_path)}, "start_new_session": True}
        done = subprocess.run(command, capture_output=True, text=True, **given)
        deadline = time.monotonic() + 120  # what was killed takes its time
        while left() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left() == 0
        return done.returncode, done.stdout, done.stderr

    if not Path("/proc/self/environ").exists():
        pytest.skip("counts processes in /proc")
    return start


class TestRuns(runs.Promises):
    module, arguments, other_way = her, POINT, " --no-overlap --count-bonus 0.1"
    networks, optimizers = ("actor", "qf", "actor_target", "qf_target"), ("actor_optimizer", "qf_optimizer")
    refusals = [
        ("--env-id FetchPuhs-v4", "Did you mean: `FetchPush`"),
        ("--env-id CartPole-v1", "CartPole-v1 cannot be used: TypeError it has no goals"),
        ("--env-module no_such_module", "no_such_module"),
        ("--k -1", "--k must be from 0"),
        ("--batch-size 200 --buffer-size 100", "--batch-size must be from 1 to 100"),
        ("--num-envs 2 --num-workers 3", "--num-workers must be from 1 to 2"),
        (POINT + " --buffer-size 1000000000000000", "--buffer-size 1000000000000000"),
        (POINT + " --buffer-size 1000000000000000000", "--buffer-size 1000000000000000000"),
    ]

    def test_a_run_learns_and_leaves_what_the_interface_says(self, straight):
        assert straight["global_step"] == 800 and straight["n_episodes"] == 8 and straight["seed"] == 1
        success = successes(straight["run"])
        assert list(success) == [0, 200, 400, 600, 800] and success[0] < 0.5
        assert success[800] == straight["success_rate"] == 1
        left = {file.name.split(".")[0] for file in Path(straight["run"]).iterdir()}
        assert left == {"args", "eval", "checkpoint", "model", "events"}
        arguments = json.loads(Path(straight["run"], "args.json").read_text())
        assert arguments["batch_size"] == 32 and arguments.keys() == her.Args.__dataclass_fields__.keys()
        content, events = state(straight["run"]), scalars(straight["run"])
        assert content["updates"] == 800 and content["cycle"] == 20 and content["replay"]["end"] == 800
        assert events.keys() >= {"charts/zero_reward_fraction", "charts/moved_fraction", "losses/actor_loss"}
        assert events["eval/success_rate"] == list(success.items()) and events["losses/qf1_loss"][-1][0] == 800
        np.testing.assert_allclose(np.mean([share for _, share in events["charts/relabel_fraction"]]), 0.8, atol=0.02)

    def test_sigterm_to_all_processes_stops_a_run_and_what_it_saved_goes_on(self, ended, straight, tmp_path):
        status, out, err = ended("--env-id SignalsAll-v0")
        assert (status, err) == (130, "")
        folder = json.loads(out)["run"]
        assert 0 < state(folder)["global_step"] < 200
        call(f"--resume {folder} --env-id Point-v3", tmp_path)
        assert_same_run(folder, straight["run"])


def test_the_broken_pair_of_mujoco_and_gymnasium_robotics(monkeypatch, capsys):
    def make(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(gym, "make", make)
    with pytest.raises(SystemExit):
        her.probe(her.Args())
    assert "pip install mujoco==3.11.0" in capsys.readouterr().err


@pytest.mark.slow
def test_fetch_reach_is_learned(tmp_path):
    fetch = "--env-id FetchReach-v2 --total-timesteps 3000 --eval-frequency 3000 --eval-episodes 30 --num-envs 4"
    assert run(f"{fetch} --batch-size 256 --hidden-size 64 --no-cuda", tmp_path)["success_rate"] >= 0.9


# ----------------------------------------------------------------------------------------------------------- processes
def test_a_simulator_that_is_killed_ends_the_run(ended):
    status, out, err = ended("--env-id SignalsPlayer-v0 --num-workers 1")
    assert status == 1 and out == "" and err.startswith("failed: ") and err.count("\n") == 1
    assert "process" in err and "terminated" in err


def test_a_learner_that_is_killed_leaves_no_simulators_behind(ended):
    assert ended("--env-id SignalsLearner-v0")[0] == -signal.SIGKILL


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_torchrun_ranks_end_equal_and_count_all_steps(tmp_path):
    result = run(POINT + " --num-workers 1 --total-timesteps 400", tmp_path, TORCHRUN)
    ranks = [state(result["run"]), state(f"{result['run']}/rank1")]
    for name in ("actor", "qf", "actor_target", "qf_target", "actor_optimizer", "qf_optimizer"):
        assert_equal(ranks[0][name], ranks[1][name])
    assert not torch.equal(ranks[0]["replay"]["action"], ranks[1]["replay"]["action"])
    assert result["global_step"] == 400 == ranks[1]["global_step"]
    assert [(rank["replay"]["end"], rank["updates"]) for rank in ranks] == [(200, 200)] * 2
    assert list(successes(result["run"])) == [0, 200, 400] and successes(f"{result['run']}/rank1") == {}


@pytest.mark.slow
def test_torchrun_goes_on_where_it_was(tmp_path):
    straight, half = (run(f"{POINT} --num-workers 1 --total-timesteps {n}", tmp_path, TORCHRUN) for n in (800, 400))
    run(f"--resume {half['run']} --total-timesteps 800", tmp_path, TORCHRUN)
    for rank in ("", "/rank1"):
        assert_same_run(half["run"] + rank, straight["run"] + rank)


# ----------------------------------------------------------------------------------------- environments of other people
def test_an_environment_that_returns_the_same_arrays_each_time_is_learned(tmp_path):
    result = call(SMALL + " --env-id SameArrays-v0", tmp_path)
    assert result["success_rate"] == 1.0
    content = state(result["run"])["replay"]
    assert len(content["desired_goal"].unique()) == 80 and len(content["achieved_goal"].unique()) > 400


@pytest.mark.parametrize("env_id", ["VaryingLength-v0", "VaryingLengthUnsaid-v0"])
def test_episodes_of_varying_length_are_learned(env_id, tmp_path):
    result = call(f"{SMALL} --env-id {env_id} --eval-episodes 50 --total-timesteps 400 --seed 2", tmp_path)
    assert result["success_rate"] >= 0.9
    content = state(result["run"])["replay"]
    lengths = (content["episode_end"] - content["episode_start"]).unique().tolist()
    assert min(lengths) < 7 and max(lengths) > 12


def test_an_environment_without_a_time_limit_trains_once_it_is_given_one(tmp_path):
    said = call(SMALL + " --env-id NoTimeLimit-v0", tmp_path, status=2)
    assert said.startswith("error: ") and "--max-episode-steps" in said and said.count("\n") == 1
    result = call(SMALL + " --env-id NoTimeLimit-v0 --max-episode-steps 10 --total-timesteps 100", tmp_path)
    assert result["global_step"] == 120


@pytest.mark.parametrize(
    "env_id, what",
    [
        ("RewardOfInfo-v0", "asked again, for stored goals alone, and fails: KeyError: 'wind_speed'"),
        ("RewardRaises-v0", "NotImplementedError: no rewards on Sundays"),
        ("DictGoals-v0", "goals and actions have to be vectors"),
        ("NoGoalAtReset-v0", "desired_goal"),
        ("NoGoalAtStep-v0", "achieved_goal"),
        ("TurnsNaN-v0", "environment"),
        ("StuckAtOnce-v0", "elbow is stuck at 0.5"),
    ],
)
def test_what_an_environment_does_wrong_at_first_is_refused(env_id, what, tmp_path, monkeypatch, capsys):
    said = runs.refused(her.main, f"{SMALL} --env-id {env_id}", tmp_path, monkeypatch, capsys)
    assert said.startswith("error: ") and env_id.removesuffix("-v0") in said and what in said
    assert "policy" not in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "env_id, what, runner",
    [("TurnsNaNLate-v0", "environment", call), ("GetsStuck-v0", "elbow is stuck at 0.5", run)],
)
def test_what_an_environment_does_wrong_later_breaks_the_run_off(env_id, what, runner, tmp_path):
    said = runner(f"{SMALL} --env-id {env_id} --num-workers 1", tmp_path, status=1)
    assert said.startswith("failed: ") and env_id in said and what in said
    assert "policy" not in said and said.count("\n") == 1
