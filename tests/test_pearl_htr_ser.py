"""pearl_htr_ser.py against values worked out by hand, then whole runs of it; much of this is shared with EC."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import pearl_htr_ec
import pearl_htr_ser as pearl
from envs.goal_tasks import PointVectorEnv
from tests.pearl_runs import GOALS, POINT, SMALL, T, draw, generator, lines, replay, run, state
from tests.whole_runs import ROOT, assert_equal, command, curve


# ----------------------------------------------------------------------------------------------------------- networks
def test_posterior_kl_and_target_in_closed_form():
    mean, variance = torch.tensor([[[0.0], [3.0]], [[1.0], [1.0]]]), torch.tensor([[[1.0], [0.5]], [[4.0], [4.0]]])
    product = pearl.product_of_gaussians(mean, variance)
    torch.testing.assert_close(product[0], torch.tensor([[2.0], [1.0]]))  # (0 / 1 + 3 / 0.5) / (1 / 1 + 1 / 0.5)
    torch.testing.assert_close(product[1], torch.tensor([[1 / 3], [2.0]]))
    mean, variance = torch.tensor([[0.5, -1.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.25], [1.0, 1.0]])
    expected = 0.5 * 0.25 + 0.5 * (0.25 + 1 - 1 + np.log(4))
    assert pearl.kl_to_prior(mean, variance).item() == pytest.approx(expected, rel=1e-6)
    target = pearl.td_target(torch.tensor([0.0, 0.9]), torch.tensor([10.0, -2.0]), 100.0, 0.9)
    torch.testing.assert_close(target, torch.tensor([9.0, 88.2]))  # both bootstrap


def test_log_probability_of_squashed_actions():
    torch.manual_seed(0)
    agent, obs, z = pearl.Agent(POINT, pearl.Args(hidden_size=8, latent_dim=3)), torch.randn(50, 2), torch.randn(50, 3)
    action, log_prob, mean, log_std = agent.act(obs, z, generator=generator())
    normal = torch.distributions.Normal(mean, log_std.exp())
    squashed = torch.distributions.TransformedDistribution(normal, torch.distributions.transforms.TanhTransform())
    torch.testing.assert_close(log_prob, squashed.log_prob(action).sum(-1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(agent.act(obs, z, deterministic=True)[0], torch.tanh(mean))


def test_exploration_draws_the_posterior_of_a_random_training_task_or_the_normal_prior():
    agent = pearl.Agent(POINT, pearl.Args(hidden_size=8, num_train_tasks=2, latent_dim=1))
    agent.prior_mean[1], agent.prior_std[1] = 50.0, 0.1  # the other has found nothing yet
    z = agent.draw_prior(10_000, generator())
    known = z > 25
    assert known.float().mean().item() == pytest.approx(0.5, abs=0.02)
    moments = [each(z[which]).item() for which in (known, ~known) for each in (torch.mean, torch.std)]
    assert moments == pytest.approx([50, 0.1, 0, 1], abs=0.04)


# ------------------------------------------------------------------------------------------------ replay and hindsight
def test_ser_takes_context_and_rl_batch_from_one_episode_under_one_task_that_it_achieved():
    context, batch = draw(pearl, replay(pearl), [True, False], context="all")
    for obs, action, next_obs, goal in (context, batch):  # whole transitions; the other slot is that of a real task
        assert (next_obs[..., 0] == obs[..., 0] + 1).all() and (next_obs[..., 1] == obs[..., 1]).all()
        torch.testing.assert_close(action, next_obs / 1000)
        assert set(obs[1, :, 0].tolist()) == {0, 1, 2, 3} and lines(obs, 1) == {100, 101, 102}
        assert (goal[1] == GOALS[1]).all()
    both = lines(context[0], 0) | lines(batch[0], 0)
    goals = torch.unique(torch.cat([context[3][0], batch[3][0]]), dim=0)
    assert len(both) == len(goals) == 1 and goals[0, 1] == both.pop() and goals[0, 0] in (1, 2, 3, 4)


def test_hindsight_tasks_are_states_after_the_start_of_the_step():
    rb, tasks, episodes = replay(pearl), torch.tensor([0, 1]), torch.ones(2, 4000, dtype=torch.long)
    final = pearl.hindsight_goals(rb, tasks, episodes, "final", generator())
    assert (final == torch.tensor([[[T, 1.0]], [[T, 101.0]]])).all()
    future = pearl.hindsight_goals(rb, tasks, episodes, "future", generator())[0, :, 0]
    # anchor t uniform in 0 .. 3, then a state of t + 1 .. 4: 1 with 1/4 * 1/4, 4 with 1/4 (1/4 + 1/3 + 1/2 + 1)
    shares = [(future == step).float().mean().item() for step in range(5)]
    np.testing.assert_allclose(shares, [0, 3 / 48, 7 / 48, 13 / 48, 25 / 48], atol=0.025)


def test_the_variants_that_the_paper_warns_of():
    context, batch = draw(pearl, replay(pearl), [True, True], relabel_scope="transition")
    assert len(torch.unique(batch[3][0], dim=0)) == 12  # every state of every episode
    assert (batch[3][..., 1] == batch[0][..., 1]).all()  # of the transition's own episode
    for scope, n in (("buffer", 3), ("context", 1)):
        context, batch = draw(pearl, replay(pearl), [True, True], relabel_scope=scope)
        assert len(lines(context[0], 0)) == n and len(lines(batch[0], 0)) == 3
        assert len(torch.unique(torch.cat([context[3][0], batch[3][0]]), dim=0)) == 1


def test_contexts_are_of_the_recent_episodes_and_the_ring_forgets_the_oldest():
    rb = replay(pearl, episodes=7, capacity=5)
    rb.context_start[:] = torch.tensor([[5], [6]])
    context, batch = draw(pearl, rb, [False, False], context="all")
    assert lines(context[0], 0) == {5, 6} and lines(context[0], 1) == {106} and lines(batch[0], 0) == {2, 3, 4, 5, 6}
    assert rb.ever_met.tolist() == [[True], [False]] and not rb.met.any()  # episode 1 did, and is forgotten
    again = replay(pearl, episodes=0, capacity=5)
    again.load_state_dict(rb.state_dict())
    assert_equal(again.state_dict(), rb.state_dict())
    assert_equal(
        dict(enumerate(draw(pearl, again, [True, False])[0])), dict(enumerate(draw(pearl, rb, [True, False])[0]))
    )


def test_the_context_of_a_real_task_is_one_episode_that_met_the_goal_or_a_recent_one():
    context, batch = draw(pearl, replay(pearl), [False, False])
    assert lines(context[0], 0) == {1} and set(context[0][0, :, 0].tolist()) == {0, 1, 2, 3}
    assert len(lines(context[0], 1)) == 1 and lines(batch[0], 1) == {100, 101, 102}
    rb, tasks = replay(pearl, episodes=7, capacity=5), torch.tensor([0, 1]).repeat(4000)
    rb.context_start[:] = torch.tensor([[3], [5]])
    rb.met[:] = torch.tensor([[False, True, False, False, True], [False] * 5])  # rows of the episodes 6 and 4 of task 0
    episodes, found = rb.draw_met(tasks, generator())
    assert found[::2].all() and not found[1::2].any()
    y = rb.obs[tasks, episodes[:, 0] % 5, 0, 1]
    shares = [(y[line > 99 :: 2] == line).float().mean().item() for line in (4, 6, 105, 106)]
    np.testing.assert_allclose(shares, [0.5] * 4, atol=0.025)


# --------------------------------------------------------------------------------------------------------- adaptation
def test_contexts_carry_the_sparse_reward_and_rl_batches_the_one_asked_for():
    task = pearl.Task(pearl.Args(reward="dense", goal_radius=0.2))
    rows = torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor([[0.1, 0.0], [0.5, 0.0]]), torch.zeros(2, 2)
    torch.testing.assert_close(task.context(*rows)[:, -1], torch.tensor([0.9, 0.0]))
    torch.testing.assert_close(task.reward("dense", *rows[2:0:-1], rows[3]), torch.tensor([-0.1, -0.5]))


def infer_from(obs, goals, draws=1, **changes):
    """z for each of `draws` seeds and the contexts seen, of an agent whose prior is far away: at 100, 200, 300."""
    args = pearl.Args(**{"horizon": 5, "hidden_size": 8, "num_train_tasks": 3} | changes)
    task, seen = pearl.Task(args), []
    agent = pearl.Agent(task, args)
    agent.prior_mean[:], agent.prior_std[:] = torch.tensor([[100.0], [200.0], [300.0]]), 0.0
    posterior = agent.posterior
    agent.posterior = lambda context: seen.append(context) or posterior(context)
    actions = torch.ones(*obs.shape[:2], 5, task.action_dim) * (torch.arange(obs.shape[1]) > 0)[:, None, None]
    return [pearl.infer(args, agent, task, obs, actions, goals, generator(seed)) for seed in range(draws)], seen


STEPS = torch.arange(2 * 3 * 6.0).reshape(2, 3, 6, 1).expand(-1, -1, -1, 2)  # 2 tasks, 3 episodes, each position once


def test_the_context_of_a_test_has_as_many_rows_as_in_training_of_all_its_own_episodes():
    (z,), seen = infer_from(STEPS, torch.zeros(2, 2), context="all", context_size=400)
    assert z.shape == (2, 5) and z.abs().max() < 50 and seen[0].shape == (2, 400, 5)
    positions = [{6.0 * e + t for e in range(3 * i, 3 * i + 3) for t in range(5)} for i in range(2)]
    assert [set(rows[:, 0].tolist()) for rows in seen[0]] == positions  # no end of an episode


def test_the_context_of_a_test_is_its_best_episode_and_z_is_from_the_prior_until_there_is_one():
    zs, seen = infer_from(STEPS, torch.tensor([[10.0, 10.0], [-1.0, -1.0]]), 40)  # met in episode 1 of task 0 alone
    assert all(set(rows[0, :, 0].tolist()) == {6, 7, 8, 9, 10} for rows in seen)
    assert all(z[0].abs().max() < 50 for z in zs) and {z[1, 0].item() for z in zs} == {100, 200, 300}


def test_control_cost_does_not_hide_that_a_goal_was_met():
    obs = torch.zeros(1, 2, 6, 12)
    obs[0, 1, 3, :2] = torch.tensor([0.3, 2.0])  # in episode 1, 0.3 from the goal, at full torque
    (z,), seen = infer_from(obs, torch.tensor([[0.0, 2.0]]), env_id="WheeledGoal-v0")
    assert z.abs().max() < 50 and (seen[0][..., 12:14] == 1).all()  # though its return is the lower one


def test_a_test_starts_from_an_empty_context_and_then_uses_its_own_episodes(monkeypatch):
    args = pearl.Args(eval_episodes=4, exploration_episodes=2, horizon=5, hidden_size=8, num_test_tasks=3)
    task, seen, infer, collect = pearl.Task(args), [], pearl.infer, pearl.collect
    agent, drawn = pearl.Agent(task, args), []
    monkeypatch.setattr(pearl, "infer", lambda *given: seen.append(given[3].clone()) or infer(*given))
    draw_prior = agent.draw_prior
    monkeypatch.setattr(agent, "draw_prior", lambda *given: drawn.append(given) or draw_prior(*given))
    monkeypatch.setattr(pearl, "collect", lambda *given: seen.append(collect(*given)) or seen[-1])
    pearl.evaluate(args, agent, task, "nowhere", "")
    first, second, (obs, actions) = seen
    assert obs.shape == (3, 4, 6, 2) and actions.shape == (3, 4, 5, 2)
    assert torch.equal(first, obs[:, :2]) and torch.equal(second, obs[:, :3])
    assert len(drawn) == 4  # to explore with in episodes 0 and 1, and where 2 and 3 still have nothing


def test_metrics_of_an_adaptation(monkeypatch):
    obs = torch.zeros(2, 2, 3, 2)  # 2 tasks, 2 episodes, 2 steps
    obs[0, 1, 1] = torch.tensor([1.0, 0.1])  # passes the goal (1, 0) at 0.1
    monkeypatch.setattr(pearl, "task_goals", lambda *given: np.array([[1.0, 0.0], [0.0, 1.0]], np.float32))
    monkeypatch.setattr(pearl, "collect", lambda *given: (obs, torch.zeros(2, 2, 2, 2)))
    args, expected = pearl.Args(goal_radius=0.2), {"success_rate": 0.5, "episodic_return": 0.45}
    metrics = pearl.evaluate(args, pearl.Agent(POINT, args), pearl.Task(args), "nowhere", "")
    assert metrics.pop("success_rate_by_episode") == [0, 0.5]
    assert metrics.pop("return_by_episode") == pytest.approx([0, 0.45]) and metrics == pytest.approx(expected)


# ---------------------------------------------------------------------------------------------------------- whole runs
@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that was never stopped."""
    return run(pearl, SMALL + "--save-model", tmp_path_factory.mktemp("runs"))


def test_a_run_leaves_what_the_interface_says(straight):
    assert straight["n_episodes"] == 10 and straight["success_rate"] == straight["success_rate_by_episode"][2]
    assert straight["episodic_return"] == straight["return_by_episode"][2] and straight["sps"] > 0
    header, *rows = curve(straight["run"])
    assert header == ["seed", "global_step", "metric", "value", "n_episodes"] and {row[0] for row in rows} == {"1"}
    assert [int(row[1]) for row in rows] == sorted([0, 1000, 2000, 3000] * 8)
    names = [f"eval/{name}_ep{i}" for name in ("success_rate", "return") for i in range(3)]
    assert [row[2] for row in rows[:8]] == ["eval/success_rate", "eval/episodic_return", *names]
    # 8 tasks x 2 episodes x 6 steps at first, then 4 x 20 x 6 an iteration
    content = state(straight)
    assert content["counters"]["iteration"] == 7 and straight["global_step"] == 96 + 7 * 480
    updates = {int(each["step"]) for each in content["optimizer"]["state"].values()}
    assert updates == {7 * 8} and len(content["optimizer"]["state"]) == 5 * 8  # of all five networks
    obs, agent = content["replay"]["obs"], content["agent"]
    torch.testing.assert_close(obs[:, :, 1:] - obs[:, :, :-1], 0.1 * content["replay"]["actions"])  # all T steps
    torch.manual_seed(1)
    first = pearl.Agent(POINT, pearl.Args(num_train_tasks=8, hidden_size=32)).vf[2].weight
    moved = [(agent[f"{name}.2.weight"] - first).norm().item() for name in ("vf_target", "vf")]
    assert 0 < moved[0] < 0.5 * moved[1]  # the target follows slowly
    assert json.load(open(f"{straight['run']}/args.json"))["num_train_tasks"] == 8
    assert set(torch.load(f"{straight['run']}/model.pt")) == {"format", "args", "counters", "agent"}
    events = EventAccumulator(straight["run"]).Reload()
    last = events.Scalars("eval/success_rate_ep2")[-1]
    assert (last.step, last.value) == (3000, pytest.approx(straight["success_rate"]))
    shares = [event.value for event in events.Scalars("charts/relabel_fraction")]
    assert len(shares) == 7 and abs(np.mean(shares) - 0.5) < 0.1
    distances = [event.value for event in events.Scalars("charts/hindsight_task_distance")]
    assert 0 < min(distances) and max(distances) < 6 * 0.1 * 2**0.5
    found = content["replay"]["met"].any(1)  # these tasks' posteriors are explored with
    assert found.any() and ((content["agent"]["prior_std"] < 1).all(1) == found).all()


def test_stopped_by_sigterm_and_resumed_equals_never_stopped(straight, tmp_path):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command("pearl_htr_ser.py", SMALL, tmp_path), cwd=ROOT, **pipes)
    while not any("eval/" in file.read_text() for file in tmp_path.glob("*/eval.csv")):  # the first evaluation is done
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 130 and err == ""
    stopped = json.loads(out.splitlines()[-1])
    assert stopped["global_step"] < 3000
    resumed = run(pearl, f"--resume {stopped['run']}", tmp_path)
    assert resumed["run"] == stopped["run"] and resumed["wall_s"] > stopped["wall_s"]
    assert curve(resumed["run"]) == curve(straight["run"])
    assert_equal(state(resumed), state(straight))


def test_resumed_at_its_end_and_with_other_arguments(straight, tmp_path):
    shutil.copytree(straight["run"], tmp_path / "run")
    for further, steps in (("", 3456), ("--learning-rate 0.125 --total-timesteps 3457", 3936)):
        result = run(pearl, f"--resume {tmp_path}/run/checkpoint.pt {further}", tmp_path)
        assert result["global_step"] == steps and curve(result["run"])[:33] == curve(straight["run"])
        assert (result["return_by_episode"] == straight["return_by_episode"]) == (not further)
    assert state(result)["optimizer"]["param_groups"][0]["lr"] == 0.125


def test_seeds_arguments_and_the_evaluation(straight, tmp_path):
    other, plain = run(pearl, SMALL + "--seed 2", tmp_path), state(straight)
    assert not torch.equal(state(other)["replay"]["obs"], plain["replay"]["obs"])
    policy, one = "policy.0.weight", SMALL + "--total-timesteps 500 "
    flags = (
        "",
        "--kl-warmup 0",
        "--relabel-per update",
        "--relabel-anneal 700",
        "--relabel-unrewarded",
        "--reward dense",
    )
    policies = [state(run(pearl, one + flag, tmp_path))["agent"][policy] for flag in flags]
    assert len(torch.stack(policies).unique(dim=0)) == len(flags)  # each has an effect
    normal = state(run(pearl, SMALL + "--prior normal --eval-frequency 500", tmp_path))["agent"]
    assert (normal["prior_mean"] == 0).all() and (normal["prior_std"] == 1).all()
    more = run(pearl, SMALL + "--eval-frequency 500", tmp_path)
    assert_equal(state(more)["agent"], plain["agent"])  # evaluation leaves training alone


def test_evaluate_adapts_a_saved_agent(straight, tmp_path):
    for path in ("", "/model.pt", "/checkpoint.pt"):
        result = run(pearl, f"--evaluate {straight['run']}{path}", tmp_path)
        for key in ("global_step", "success_rate_by_episode", "n_episodes"):
            assert result[key] == straight[key]
        assert result["return_by_episode"] == pytest.approx(straight["return_by_episode"])
    assert os.listdir(tmp_path) == []
    pytest.importorskip("moviepy")
    run(pearl, f"--evaluate {straight['run']}/model.pt --capture-video", tmp_path)
    assert len(list(tmp_path.glob("*/videos/evaluate/*.mp4"))) == 3


def test_checkpoints_are_whole_or_the_earlier_one(tmp_path, monkeypatch):
    save, steps = torch.save, []

    def full_disk_at_the_third(content, path):
        steps.append(content["counters"]["global_step"])
        save(content, path) if len(steps) < 3 else open(path, "w").write("half")
        if len(steps) == 3:
            raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full_disk_at_the_third)
    said = run(pearl, SMALL + "--checkpoint-frequency 1000", tmp_path, status=1)
    assert "checkpoint.pt, an earlier one is kept: OSError: No space left" in said and steps == [0, 1056, 2016]
    (path,) = tmp_path.glob("*/checkpoint.pt")
    assert torch.load(path)["counters"]["global_step"] == 1056


BAD_INPUT = """
    --env-id PointGaol-v0 | Did you mean: `PointGoal`?
    --env-id BitFlip-v0 | --env-id BitFlip-v0 cannot be made as a goal task
    --relabel-prob 1.5 | --relabel-prob must be from 0 to 1, not 1.5
    --learning-rate nan | --learning-rate must be from 0 to inf
    --batch-size 0 | --batch-size must be from 1 to inf
    --goal-radius 0 | goal_radius above 0
    --num-tasks-sample 200 | --num-tasks-sample must be from 1 to 100, not 200
    --buffer-size 100 | --buffer-size must be from 1200 to
    --buffer-size 1000000000000 | --buffer-size must be from 1200 to
    --track | import of wandb halted
    --resume no_such.pt | No such file or directory: 'no_such.pt'
    --evaluate README.md | README.md is not a whole checkpoint.pt
    --resume {run}/model.pt | model.pt is not a whole checkpoint.pt
    --resume {run} --evaluate {run} | checkpoint.pt (or model.pt, for --evaluate alone)
    --resume {run} --buffer-size 720 | --buffer-size is that of {run}/checkpoint.pt and cannot change: leave it out
    --resume {run} --horizon 7 | --horizon is that of
    --evaluate {run} --hidden-size 16 | --hidden-size is that of"""


@pytest.mark.parametrize("case", BAD_INPUT.strip().splitlines())
def test_bad_input_is_one_clear_line_and_status_2(case, straight, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    arguments, message = case.format(run=straight["run"]).split(" | ")
    assert message in run(pearl, arguments, tmp_path, status=2) and os.listdir(tmp_path) == []


def test_a_run_whose_networks_leave_the_numbers_says_so(tmp_path):
    assert "lower --learning-rate" in run(pearl, SMALL + "--learning-rate 1e38", tmp_path, status=1)


class OddPoint(PointVectorEnv):
    """A point that returns the same array each time and never truncates; with `odd` it does something wrong."""

    odd = None

    def reset(self, **kwargs):
        self.same, info = super().reset(**kwargs)
        return self.same, info

    def step(self, actions):
        self.same[:] = np.nan if self.odd == "nan" else super().step(actions)[0]
        return self.same if self.odd != "step" else {}["wheel"], None, None, np.zeros(self.num_envs, bool), {}

    def compute_reward(self, next_obs, action, goal):
        if self.odd == "reward" and torch.is_tensor(next_obs):  # not within step
            raise ValueError("no goal")
        return super().compute_reward(next_obs, action, goal)


gym.register("OddPoint-v0", vector_entry_point=OddPoint)


def test_an_environment_that_reuses_its_arrays_and_never_ends_gives_the_same_run(straight, tmp_path):
    odd = run(pearl, SMALL + "--env-id OddPoint-v0", tmp_path)
    assert_equal(state(odd), state(straight))


@pytest.mark.parametrize(
    "odd, message",
    [
        ("nan", "OddPoint-v0 gave an observation that is not a finite number"),
        ("step", "OddPoint-v0 failed in an episode: KeyError: 'wheel'"),
        ("reward", "the environment's compute_reward failed: ValueError: no goal"),
    ],
)
def test_what_an_environment_does_wrong_is_one_clear_line(odd, message, tmp_path, monkeypatch):
    monkeypatch.setattr(OddPoint, "odd", odd)
    assert message in run(pearl, SMALL + "--env-id OddPoint-v0", tmp_path, status=1)


@pytest.mark.parametrize("module", [pearl, pearl_htr_ec])
def test_help_names_every_flag_without_warnings(module, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py", "--help"])
    with pytest.raises(SystemExit):
        module.main()
    said = capsys.readouterr()
    assert said.err == ""
    assert all(f"--{field.name.replace('_', '-')}" in said.out for field in dataclasses.fields(module.Args))
