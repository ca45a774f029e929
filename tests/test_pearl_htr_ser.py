"""pearl_htr_ser.py against values worked out by hand, then whole runs of it."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import pearl_htr_ser as pearl
from tests import whole_runs
from tests.whole_runs import ROOT, assert_equal, curve, state

CPU = torch.device("cpu")


def generator(seed=0):
    return torch.Generator(CPU).manual_seed(seed)


# ---------------------------------------------------------------------------------------------------------- posterior
def test_product_of_gaussians_in_closed_form():
    mean, variance = torch.tensor([[[0.0], [3.0]], [[1.0], [1.0]]]), torch.tensor([[[1.0], [0.5]], [[4.0], [4.0]]])
    product = pearl.product_of_gaussians(mean, variance)
    torch.testing.assert_close(product[0], torch.tensor([[2.0], [1.0]]))  # (0 / 1 + 3 / 0.5) / (1 / 1 + 1 / 0.5)
    torch.testing.assert_close(product[1], torch.tensor([[1 / 3], [2.0]]))


def test_kl_to_the_prior_in_closed_form():
    mean, variance = torch.tensor([[0.5, -1.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.25], [1.0, 1.0]])
    ours = pearl.kl_to_prior(mean, variance)
    torch.testing.assert_close(ours, torch.tensor(0.5 * 0.25 + 0.5 * (0.25 + 1 - 1 + np.log(4))).float())
    normal = torch.distributions.Normal(mean, variance.sqrt())
    theirs = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum()
    torch.testing.assert_close(ours, theirs)


def small_agent(**changes):
    torch.manual_seed(0)
    return pearl.Agent(2, 2, dataclasses.replace(pearl.Args(hidden_size=8, latent_dim=3), **changes))


def test_the_posterior_is_that_of_all_rows_in_any_order():
    agent, rows = small_agent(), torch.randn(4, 6, 5)
    mean, variance = agent.posterior(rows)
    assert mean.shape == variance.shape == (4, 3)
    again = agent.posterior(rows[:, [3, 1, 0, 2, 5, 4]])
    torch.testing.assert_close(again[0], mean)
    torch.testing.assert_close(agent.posterior(torch.cat([rows, rows], 1))[1], variance / 2)


def test_log_probability_of_squashed_actions():
    agent = small_agent()
    obs, z = torch.randn(50, 2), torch.randn(50, 3)
    action, log_prob, mean, log_std = agent.act(obs, z, generator=generator())
    normal = torch.distributions.Normal(mean, log_std.exp())
    squashed = torch.distributions.TransformedDistribution(normal, torch.distributions.transforms.TanhTransform())
    torch.testing.assert_close(log_prob, squashed.log_prob(action).sum(-1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(agent.act(obs, z, deterministic=True)[0], torch.tanh(mean))


def test_every_target_bootstraps():
    target = pearl.td_target(torch.tensor([0.0, 0.9]), torch.tensor([10.0, -2.0]), 100.0, 0.9)
    torch.testing.assert_close(target, torch.tensor([9.0, 88.2]))


# ------------------------------------------------------------------------------------------------ replay and hindsight
T = 4


def walk(task, episode):
    """An episode along a line of its own: at step t the point is at (t, 100 task + episode)."""
    obs = torch.stack([torch.arange(T + 1.0), torch.full((T + 1,), 100.0 * task + episode)], -1)
    return obs, obs[1:] / 1000


def replay(episodes=3, capacity=10):
    rb, tasks = pearl.ReplayBuffer(2, capacity, T, 2, 2, CPU), torch.tensor([0, 1])
    for episode in range(episodes):
        obs, actions = (torch.stack(column) for column in zip(*(walk(task, episode) for task in (0, 1))))
        rb.add(tasks, obs, actions, torch.tensor([episode == 1, False]))
    return rb


GOALS = torch.tensor([[-1.0, -1.0], [-2.0, -2.0]])


def draw(rb, relabel, **changes):
    args = dataclasses.replace(pearl.Args(context_size=200, batch_size=300), **changes)
    return pearl.sample(rb, torch.tensor([0, 1]), GOALS, torch.tensor(relabel), args, generator())


def test_transitions_are_whole_and_of_their_task():
    for obs, action, next_obs, goal in draw(replay(), [False, False], context="all"):
        assert (next_obs[..., 0] == obs[..., 0] + 1).all() and (next_obs[..., 1] == obs[..., 1]).all()
        torch.testing.assert_close(action, next_obs / 1000)
        assert set(obs[0, :, 0].tolist()) == {0, 1, 2, 3}
        assert set(obs[0, :, 1].tolist()) == {0, 1, 2} and set(obs[1, :, 1].tolist()) == {100, 101, 102}
        assert (goal == GOALS[:, None]).all()


def test_ser_takes_context_and_rl_batch_from_one_episode_under_one_task_that_it_achieved():
    context, batch = draw(replay(), [True, False])
    lines = {*context[0][0, :, 1].tolist(), *batch[0][0, :, 1].tolist()}
    assert len(lines) == 1  # one episode
    goals = torch.unique(torch.cat([context[3][0], batch[3][0]]), dim=0)
    assert len(goals) == 1 and goals[0, 1] == lines.pop() and goals[0, 0] in (1, 2, 3, 4)
    assert (context[3][1] == GOALS[1]).all() and len(set(batch[0][1, :, 1].tolist())) == 3  # the other slot is as ever


def test_hindsight_tasks_are_states_after_the_start_of_the_step():
    rb, tasks, episodes = replay(), torch.tensor([0, 1]), torch.ones(2, 4000, dtype=torch.long)
    final = pearl.hindsight_goals(rb, tasks, episodes, "final", generator())
    assert (final == torch.tensor([[[T, 1.0]], [[T, 101.0]]])).all()
    future = pearl.hindsight_goals(rb, tasks, episodes, "future", generator())[0, :, 0]
    # anchor t uniform in 0 .. 3, then a state of t + 1 .. 4: 1 with 1/4 * 1/4, 4 with 1/4 (1/4 + 1/3 + 1/2 + 1)
    shares = [(future == step).float().mean().item() for step in range(5)]
    np.testing.assert_allclose(shares, [0, 3 / 48, 7 / 48, 13 / 48, 25 / 48], atol=0.025)


def test_the_variants_that_the_paper_warns_of():
    context, batch = draw(replay(), [True, True], relabel_scope="transition")
    assert len(torch.unique(batch[3][0], dim=0)) == 12  # every state of every episode
    assert (batch[3][..., 1] == batch[0][..., 1]).all()  # of the transition's own episode
    context, batch = draw(replay(), [True, True], relabel_scope="buffer")
    assert len(torch.unique(torch.cat([context[3][0], batch[3][0]]), dim=0)) == 1
    assert len(torch.unique(batch[0][0, :, 1])) == len(torch.unique(context[0][0, :, 1])) == 3
    context, batch = draw(replay(), [True, True], relabel_scope="context")
    assert len(torch.unique(context[0][0, :, 1])) == 1 and len(torch.unique(batch[0][0, :, 1])) == 3
    assert len(torch.unique(torch.cat([context[3][0], batch[3][0]]), dim=0)) == 1


def test_contexts_are_of_the_recent_episodes_and_the_ring_forgets_the_oldest():
    rb = replay(episodes=7, capacity=5)
    rb.context_start[:] = torch.tensor([5, 6])
    context, batch = draw(rb, [False, False], context="all")
    assert set(context[0][0, :, 1].tolist()) == {5, 6} and set(context[0][1, :, 1].tolist()) == {106}
    assert set(batch[0][0, :, 1].tolist()) == {2, 3, 4, 5, 6}
    again = pearl.ReplayBuffer(2, 5, T, 2, 2, CPU)
    again.load_state_dict(rb.state_dict())
    for one, other in zip(draw(rb, [True, False]), draw(again, [True, False])):
        assert all(torch.equal(a, b) for a, b in zip(one, other))


def test_the_context_of_a_real_task_is_one_episode_that_met_the_goal_if_there_is_one():
    context, batch = draw(replay(), [False, False])
    assert set(context[0][0, :, 1].tolist()) == {1} and len(set(context[0][1, :, 1].tolist())) == 1
    assert set(context[0][0, :, 0].tolist()) == {0, 1, 2, 3}  # all its transitions
    assert set(batch[0][1, :, 1].tolist()) == {100, 101, 102}  # the RL batch is of all episodes
    rb = replay(episodes=7, capacity=5)  # episodes 2 to 6 are stored, in the rows 2, 3, 4, 0, 1
    rb.context_start[:] = torch.tensor([3, 5])
    rb.met[:] = torch.tensor([[False, True, False, False, True], [False] * 5])  # episodes 6 and 4 of task 0
    episodes, found = rb.draw_met(torch.tensor([0, 1]).repeat(4000), generator())
    assert found[::2].all() and not found[1::2].any()
    lines = rb.obs[torch.tensor([0, 1]).repeat(4000), episodes[:, 0] % 5, 0, 1]
    shares = [(lines[::2] == line).float().mean().item() for line in (4, 6)]
    np.testing.assert_allclose(shares, [0.5, 0.5], atol=0.025)
    shares = [(lines[1::2] == line).float().mean().item() for line in (105, 106)]
    np.testing.assert_allclose(shares, [0.5, 0.5], atol=0.025)  # none: one of the recent episodes


def test_rows_of_the_context_carry_the_sparse_reward():
    task = pearl.Task(pearl.Args(reward="dense", goal_radius=0.2))
    obs, action = torch.zeros(2, 2), torch.zeros(2, 2)
    next_obs, goal = torch.tensor([[0.1, 0.0], [0.5, 0.0]]), torch.zeros(2, 2)
    rows = pearl.context_rows(obs, action, next_obs, goal, task.sparse_reward)
    torch.testing.assert_close(rows[:, -1], torch.tensor([0.9, 0.0]))
    torch.testing.assert_close(task.reward(next_obs, action, goal), torch.tensor([-0.1, -0.5]))


def test_a_test_starts_from_an_empty_context_and_then_uses_its_own_episodes(monkeypatch):
    args = pearl.Args(eval_episodes=4, exploration_episodes=2, horizon=5, hidden_size=8)
    agent, task = pearl.Agent(2, 2, args), pearl.Task(args)
    goals = torch.from_numpy(pearl.task_goals(pearl.TEST, 3, 2.0))
    seen = []
    infer = pearl.infer
    monkeypatch.setattr(pearl, "infer", lambda agent, obs, *rest: seen.append(obs) or infer(agent, obs, *rest))
    drawn, draw_prior = [], agent.draw_prior
    monkeypatch.setattr(agent, "draw_prior", lambda *args: drawn.append(args) or draw_prior(*args))
    obs, actions = pearl.adapt(pearl.make_envs(args, 3), agent, task, args, goals)
    assert len(drawn) == 4  # to explore with in episodes 0 and 1, and where 2 and 3 still have nothing
    assert obs.shape == (3, 4, 6, 2) and actions.shape == (3, 4, 5, 2)
    assert [each.shape[1] for each in seen] == [2, 3]
    assert torch.equal(seen[0], obs[:, :2]) and torch.equal(seen[1], obs[:, :3])


def test_the_context_of_a_test_has_as_many_rows_as_in_training(monkeypatch):
    args = pearl.Args(horizon=5, hidden_size=8, context="all", context_size=400)
    agent, task, seen = pearl.Agent(2, 2, args), pearl.Task(args), []
    posterior = agent.posterior
    monkeypatch.setattr(agent, "posterior", lambda context: seen.append(context) or posterior(context))
    obs = torch.arange(2 * 3 * 6.0).reshape(2, 3, 6, 1).expand(-1, -1, -1, 2)  # each position is there once
    z = pearl.infer(agent, obs, torch.zeros(2, 3, 5, 2), torch.zeros(2, 2), task, args, generator())
    assert z.shape == (2, 5) and seen[0].shape == (2, 400, 5)
    positions = [{6.0 * e + t for e in range(3 * i, 3 * i + 3) for t in range(5)} for i in range(2)]
    assert [set(rows[:, 0].tolist()) for rows in seen[0]] == positions  # all of the task's own transitions, no end


def test_the_context_of_a_test_is_its_best_episode_and_z_is_from_the_prior_until_there_is_one(monkeypatch):
    args = pearl.Args(horizon=5, hidden_size=8, num_train_tasks=3)
    agent, task, seen = pearl.Agent(2, 2, args), pearl.Task(args), []
    agent.prior_mean[:], agent.prior_std[:] = torch.tensor([[100.0], [200.0], [300.0]]), 0.0
    posterior = agent.posterior
    monkeypatch.setattr(agent, "posterior", lambda context: seen.append(context) or posterior(context))
    obs = torch.arange(2 * 3 * 6.0).reshape(2, 3, 6, 1).expand(-1, -1, -1, 2)
    goals = torch.tensor([[10.0, 10.0], [-1.0, -1.0]])  # reached in episode 1 of the first task, never of the second
    actions = torch.zeros(2, 3, 5, 2)
    zs = [pearl.infer(agent, obs, actions, goals, task, args, generator(seed)) for seed in range(40)]
    assert all(set(rows[0, :, 0].tolist()) == {6, 7, 8, 9, 10} for rows in seen)
    assert all(z[0].abs().max() < 50 for z in zs)
    assert {z[1, 0].item() for z in zs} == {100, 200, 300}


def test_control_cost_does_not_hide_that_a_goal_was_met():
    args = pearl.Args(env_id="WheeledGoal-v0", horizon=5, hidden_size=8, num_train_tasks=1)
    agent, task = pearl.Agent(12, 2, args), pearl.Task(args)
    agent.prior_mean[:], agent.prior_std[:] = 100.0, 0.0
    obs, actions = torch.zeros(1, 2, 6, 12), torch.zeros(1, 2, 5, 2)
    obs[0, 1, 3, :2], actions[0, 1] = torch.tensor([0.3, 2.0]), 1.0  # 0.3 from the goal, at full torque
    goals = torch.tensor([[0.0, 2.0]])
    assert task.met(obs, goals).tolist() == [[False, True]]
    returns = task.sparse_reward(obs[:, :, 1:], actions, goals[:, None, None]).sum(-1)
    torch.testing.assert_close(returns, torch.tensor([[0.0, 0.7 - 5 * 0.05 * 8]]))
    seen, posterior = [], agent.posterior
    agent.posterior = lambda context: seen.append(context) or posterior(context)
    assert pearl.infer(agent, obs, actions, goals, task, args, generator()).abs().max() < 50  # not of the prior
    assert (seen[0][..., 12:14] == 1).all()  # the episode at full torque, though it has the lower return


def test_exploration_draws_the_posterior_of_a_random_training_task_or_the_normal_prior():
    agent = pearl.Agent(2, 2, pearl.Args(hidden_size=8, num_train_tasks=2, latent_dim=1))
    z = agent.draw_prior(10_000, generator())
    assert z.mean().item() == pytest.approx(0, abs=0.03) and z.std().item() == pytest.approx(1, abs=0.03)
    agent.prior_mean[1], agent.prior_std[1] = 50.0, 0.1  # the other has found nothing yet
    z = agent.draw_prior(10_000, generator())
    known = z > 25
    assert known.float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert z[known].mean().item() == pytest.approx(50, abs=0.01) and z[known].std().item() == pytest.approx(
        0.1, abs=0.01
    )
    assert z[~known].std().item() == pytest.approx(1, abs=0.03)


def test_the_weight_of_the_kl_term_grows():
    args = pearl.Args(kl_lambda=2.0, kl_warmup=100)
    assert [pearl.kl_weight(args, step) for step in (0, 25, 100, 300)] == [0, 0.5, 2, 2]
    assert pearl.kl_weight(pearl.Args(kl_lambda=2.0, kl_warmup=0), 0) == 2


def test_metrics_of_an_adaptation():
    task = pearl.Task(pearl.Args(goal_radius=0.2))
    obs = torch.zeros(2, 2, 3, 2)  # 2 tasks, 2 episodes, 2 steps
    obs[0, 1, 1] = torch.tensor([1.0, 0.1])  # passes the goal (1, 0) at 0.1
    goals = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    metrics = pearl.summarize(obs, torch.zeros(2, 2, 2, 2), goals, task)
    expected = {"success_rate": 0.5, "episodic_return": 0.45, "success_rate_ep0": 0.0, "success_rate_ep1": 0.5}
    assert metrics == pytest.approx(expected | {"return_ep0": 0.0, "return_ep1": 0.45})


# ---------------------------------------------------------------------------------------------------------- whole runs
SMALL = """--goal-distance 0.3 --horizon 6 --total-timesteps 3000 --eval-frequency 1000 --eval-episodes 3
    --num-train-tasks 8 --num-test-tasks 10 --num-tasks-sample 4 --initial-episodes 2 --prior-episodes 4
    --posterior-episodes 16 --gradient-steps 8 --meta-batch-size 4 --batch-size 32 --context-size 16
    --hidden-size 32 --relabel-prob 0.5 --no-cuda"""
run = functools.partial(whole_runs.run, "pearl_htr_ser.py")
command = functools.partial(whole_runs.command, "pearl_htr_ser.py")
refused = functools.partial(whole_runs.refused, pearl.main)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that was never stopped."""
    return run(SMALL + " --save-model", tmp_path_factory.mktemp("runs"))


def test_a_run_leaves_what_the_interface_says(straight):
    assert straight["n_episodes"] == 10 and len(straight["success_rate_by_episode"]) == 3
    assert straight["success_rate"] == straight["success_rate_by_episode"][-1]
    assert straight["episodic_return"] == straight["return_by_episode"][-1]
    rows = curve(straight["run"])
    assert {int(row[1]) for row in rows[1:]} == {0, 1000, 2000, 3000}
    assert {row[2] for row in rows[1:]} >= {"eval/success_rate", "eval/success_rate_ep0", "eval/return_ep2"}
    content = state(straight["run"])
    # 8 tasks x 2 episodes x 6 steps at first, then 4 x 20 x 6 an iteration
    assert content["iteration"] == 7 and straight["global_step"] == 96 + 7 * 480 and content["updates"] == 56
    assert set(os.listdir(straight["run"])) >= {"args.json", "eval.csv", "checkpoint.pt", "model.pt"}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(straight["run"]).Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= {"charts/hindsight_task_distance", "charts/real_reward", "losses/kl_loss", "eval/success_rate_ep2"}
    shares = [event.value for event in events.Scalars("charts/relabel_fraction")]
    assert len(shares) == 7 and abs(np.mean(shares) - 0.5) < 0.1
    distances = [event.value for event in events.Scalars("charts/hindsight_task_distance")]
    assert 0 < min(distances) and max(distances) < 6 * 0.1 * 2**0.5


def test_only_tasks_that_met_their_goal_are_explored_with():
    args = pearl.Args(hidden_size=8, num_train_tasks=2)
    agent, rb, seen = pearl.Agent(2, 2, args), replay(), []
    posterior = agent.posterior
    agent.posterior = lambda context: seen.append((context, *posterior(context))) or seen[-1][1:]
    pearl.set_prior(agent, rb, GOALS, pearl.Task(args), args, generator())
    context, mean, variance = seen[0]
    assert context.shape == (2, 64, 5) and (context[0, :, 1] == 1).all()  # of task 0's episode 1
    torch.testing.assert_close(agent.prior_mean, torch.stack([mean[0], torch.zeros(5)]))
    torch.testing.assert_close(agent.prior_std, torch.stack([variance[0].sqrt(), torch.ones(5)]))


def test_the_prior_of_a_run_has_the_posteriors_of_the_tasks_that_earned_reward(straight, tmp_path):
    content = state(straight["run"])
    found = content["replay"]["met"].any(1)
    assert found.any() and content["agent"]["prior_mean"][found].abs().min() > 0
    assert (content["agent"]["prior_std"][found] < 1).all()
    assert (content["agent"]["prior_mean"][~found] == 0).all() and (content["agent"]["prior_std"][~found] == 1).all()
    normal = state(run(SMALL + " --prior normal", tmp_path)["run"])["agent"]
    assert (normal["prior_mean"] == 0).all() and (normal["prior_std"] == 1).all()


def test_stopped_and_resumed_equals_never_stopped(straight, tmp_path):
    process = subprocess.Popen(command(SMALL, tmp_path), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while not any("eval/" in file.read_text() for file in tmp_path.glob("*/eval.csv")):  # the first evaluation is done
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert process.returncode == 130
    stopped = json.loads(out.splitlines()[-1])
    assert 0 < stopped["global_step"] < 3000
    resumed = run(f"--resume {stopped['run']}/checkpoint.pt", tmp_path)
    assert curve(resumed["run"]) == curve(straight["run"])
    assert_equal(state(resumed["run"]), state(straight["run"]))


def test_a_run_resumed_at_its_end_reports_the_same_result(straight, tmp_path):
    whole_runs.assert_resumed_at_its_end_reports_the_same(run, straight, tmp_path)


def test_a_run_resumed_with_other_arguments(straight, tmp_path):
    whole_runs.assert_resumed_with(run, straight, tmp_path, ("optimizer",), ("--buffer-size 123456", "--horizon 7"))


def test_seeds_and_evaluation_frequency(straight, tmp_path):
    other, plain = run(SMALL + " --seed 2", tmp_path), state(straight["run"])
    assert not torch.equal(state(other["run"])["replay"]["obs"], plain["replay"]["obs"])
    unwarmed = run(SMALL + " --kl-warmup 0", tmp_path)  # the weight that grows is the one that training uses
    assert not torch.equal(state(unwarmed["run"])["agent"]["encoder.0.weight"], plain["agent"]["encoder.0.weight"])
    more = run(SMALL + " --eval-frequency 500", tmp_path)
    assert_equal(state(more["run"])["agent"], plain["agent"])  # evaluation leaves training alone


def test_evaluate_adapts_a_saved_agent(straight, tmp_path):
    for name in ("model.pt", "checkpoint.pt"):
        result = run(f"--evaluate {straight['run']}/{name}", tmp_path)
        assert result["success_rate_by_episode"] == straight["success_rate_by_episode"]
        assert result["return_by_episode"] == pytest.approx(straight["return_by_episode"])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--env-id PointGaol-v0", "did you mean: PointGoal-v0"),
        ("--env-id BitFlip-v0", "BitFlip-v0 is not a goal task"),
        ("--relabel-prob 1.5", "--relabel-prob must be from 0 to 1"),
        ("--goal-radius 0", "goal_radius above 0"),
        ("--num-tasks-sample 200", "--num-tasks-sample 200 is more than --num-train-tasks 100"),
        ("--buffer-size 100", "--buffer-size 100 does not hold an iteration of 20 episodes of 60 steps"),
        ("--buffer-size 1000000000000", "this machine has"),
        ("--resume no_such.pt", "cannot read no_such.pt: No such file or directory"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_2(arguments, message, tmp_path, monkeypatch, capsys):
    said = refused(arguments, tmp_path, monkeypatch, capsys)
    assert message in said and said.startswith("error: ") and said.count("\n") == 1


def test_help_names_every_flag_without_warnings():
    done = subprocess.run([sys.executable, "pearl_htr_ser.py", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == ""
    for field in dataclasses.fields(pearl.Args):
        assert f"--{field.name.replace('_', '-')}" in done.stdout
