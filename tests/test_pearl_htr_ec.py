"""pearl_htr_ec.py: hindsight buffers against values worked out by hand, whole runs, and how it differs from SER."""

import ast
import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import pearl_htr_ec as pearl
import pearl_htr_ser as ser
from tests.whole_runs import assert_equal, curve, state

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


def generator(seed=0):
    return torch.Generator(CPU).manual_seed(seed)


# ------------------------------------------------------------------------------------------ the same as SER, but for EC
def common_lines(path):
    """The script without its docstring and what is marked as the strategy's own.

    Marked are: a line that ends with `# HTR` or `# HTR: why`; a comment `# HTR: ...` of its own and the lines after it,
    up to an empty one; a header `# HTR: ... ---` and the lines after it, up to the next header.
    """
    text = path.read_text()
    lines, kept, marked = text.splitlines()[ast.parse(text).body[0].end_lineno :], [], None
    for line in lines:
        header = re.match(r"# .*-----$|# -----", line)
        if header or marked == "paragraph" and not line.strip():
            marked = None
        if line.strip().startswith("# HTR"):
            marked = "section" if header else "paragraph"
        if not marked and not re.search(r"# HTR(: .*)?$", line):
            kept.append(line)
    return kept


def test_the_script_is_that_of_ser_outside_the_marked_places():
    ours, theirs = common_lines(ROOT / "pearl_htr_ec.py"), common_lines(ROOT / "pearl_htr_ser.py")
    assert ours == theirs
    assert len(ours) > 0.8 * len((ROOT / "pearl_htr_ec.py").read_text().splitlines())  # not all of it is marked


# ---------------------------------------------------------------------------------------------------- grid and clusters
def test_cells_of_goals_at_across_and_below_borders():
    goals = torch.tensor([[0.0, 0.24], [0.25, 0.49], [0.5, -0.01], [-0.25, -0.26], [-0.5, 7.0]])
    cells = pearl.cell_of(goals, 0.25)
    assert cells.tolist() == [[0, 0], [1, 1], [2, -1], [-1, -2], [-2, 28]]
    assert pearl.cell_of(torch.tensor([0.3, -0.3, 1.0]), 0.5).tolist() == [0, -1, 2]  # three dimensions


T = 4


def walk(task, episode):
    """An episode along a line of its own: at step t the point is at (t, 100 task + episode)."""
    obs = torch.stack([torch.arange(T + 1.0), torch.full((T + 1,), 100.0 * task + episode)], -1)
    return obs, obs[1:] / 1000


def replay(episodes=3, capacity=10, strategy="final"):
    rb = pearl.ClusteredReplay(2, capacity, T, 2, 2, CPU)
    for episode in range(episodes):
        both = [walk(task, episode) for task in (0, 1)]
        obs, actions = (torch.stack(column) for column in zip(*both))
        rb.add(torch.tensor([0, 1]), obs, actions, torch.zeros(2, dtype=torch.bool))
        rb.file(torch.tensor([0, 1]), strategy, generator(episode))
    return rb


def buffers(rb):
    """{centre of the cell: its (task, row), the oldest first}."""
    content, start = {}, 0
    for centre, end in zip(rb.centres.tolist(), rb.ends.tolist()):
        content[tuple(centre)] = list(zip(rb.member_tasks[start:end].tolist(), rb.member_rows[start:end].tolist()))
        start = end
    return content


def test_an_episode_is_filed_under_the_position_that_it_achieved():
    rb = replay()
    assert rb.hindsight[:, :3].tolist() == [[[4, 0], [4, 1], [4, 2]], [[4, 100], [4, 101], [4, 102]]]
    rb.group(2.0, 20, generator())
    assert buffers(rb) == {(5, 1): [(0, 0), (0, 1)], (5, 3): [(0, 2)], (5, 101): [(1, 0), (1, 1)], (5, 103): [(1, 2)]}
    future = replay(9, strategy="future").hindsight[:, :9]
    assert set(future[..., 0].flatten().tolist()) <= {1, 2, 3, 4} and len(future[..., 0].unique()) > 1
    assert (future[..., 1] == torch.arange(9.0) + torch.tensor([[0.0], [100.0]])).all()  # of the episode itself


def test_a_buffer_has_the_episodes_of_all_tasks_in_the_order_of_their_age():
    rb = replay()
    rb.hindsight[:, :3] = torch.tensor([[[-0.1, 0.3], [0.1, 0.3], [-0.2, 0.2]], [[-0.1, 0.3], [0.5, 0.3], [0.1, 0.2]]])
    rb.group(0.5, 20, generator())
    found = buffers(rb)
    assert found.keys() == {(-0.25, 0.25), (0.25, 0.25), (0.75, 0.25)}
    # of two episodes that were stored in one call, that of the later task counts as the older
    assert found[-0.25, 0.25] == [(1, 0), (0, 0), (0, 2)] and found[0.25, 0.25] == [(0, 1), (1, 2)]
    assert found[0.75, 0.25] == [(1, 1)]
    rb.hindsight = torch.cat([rb.hindsight, rb.hindsight[..., :1]], -1)  # three dimensions
    rb.group(0.5, 20, generator())
    assert buffers(rb).keys() == {(-0.25, 0.25, -0.25), (0.25, 0.25, 0.25), (0.75, 0.25, 0.75)}


def test_pointers_are_bounded_and_go_with_the_episodes_that_the_ring_overwrites():
    rb = replay(episodes=17, capacity=5)
    assert rb.filed.shape == (2, 5) and rb.hindsight.shape == (2, 5, 2)
    rb.group(0.5, 20, generator())  # so fine that each episode fills a cell of its own
    assert len(rb.centres) == len(rb.member_rows) == 2 * 5
    # episodes 12 .. 16 are left, with number 15 in row 0; their tasks are (4, episode) and (4, 100 + episode)
    lines = [12, 13, 14, 15, 16, 112, 113, 114, 115, 116]
    expected = {(4.25, line + 0.25): [(line // 100, line % 100 % 5)] for line in lines}
    assert buffers(rb) == expected
    rb.group(1000.0, 20, generator())  # so coarse that all are in one
    assert [row for task, row in buffers(rb)[500, 500] if task == 0] == [2, 3, 4, 0, 1]  # the oldest first
    tasks, rows = rb.draw_members(torch.zeros(1, 1, dtype=torch.long), 400)
    assert len(set(zip(tasks[0].tolist(), rows[0].tolist()))) == 10


# ------------------------------------------------------------------------------------------------------------- sampling
GOALS = torch.tensor([[-1.0, -1.0], [-2.0, -2.0]])


def clustered(recent=20):
    """3 episodes of 2 tasks: 1 and 2 of task 0 and 0 of task 1 in a cell with centre (1, 1), the others at (3, 1)."""
    rb = replay()
    rb.hindsight[:, :3] = torch.tensor([[[3.0, 1.0], [1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [3.0, 1.0], [3.0, 1.0]]])
    rb.group(2.0, recent, generator(1))
    return rb


def draw(rb, relabel, seed=0, **changes):
    args = dataclasses.replace(pearl.Args(context_size=200, batch_size=300), **changes)
    return pearl.sample(rb, torch.tensor([0, 1]), GOALS, torch.tensor(relabel), args, generator(seed))


def lines(obs, slot):
    return set(obs[slot, :, 1].tolist())


LINES = {1: {1, 2, 100}, 3: {0, 101, 102}}  # of the buffers with their centres at x = 1 and x = 3


def test_a_relabelled_slot_takes_all_its_transitions_from_one_buffer_under_its_task():
    for seed in range(5):
        context, batch = draw(clustered(), [True, False], seed, exploratory_share=0.0)
        goals = torch.unique(torch.cat([context[3][0], batch[3][0]]), dim=0)
        assert len(goals) == 1 and goals[0, 1] == 1
        assert lines(context[0], 0) == lines(batch[0], 0) == LINES[goals[0, 0].item()]
        for obs, action, next_obs, goal in (context, batch):
            assert (next_obs[..., 0] == obs[..., 0] + 1).all() and (next_obs[..., 1] == obs[..., 1]).all()
            torch.testing.assert_close(action, next_obs / 1000)
            assert (goal[1] == GOALS[1]).all()  # the other slot is as ever
        assert len(lines(context[0], 1)) == 1 and lines(batch[0], 1) == {100, 101, 102}


def test_contexts_are_of_the_newest_episodes_of_the_buffer():
    for seed in range(5):
        context, batch = draw(clustered(recent=1), [True, True], seed, exploratory_share=0.0)
        for slot in (0, 1):
            x = batch[3][slot, 0, 0].item()
            assert lines(context[0], slot) == {1: {2}, 3: {102}}[x] and lines(batch[0], slot) == LINES[x]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_exploratory_share_is_of_the_real_task_and_relabelled_too(share):
    rb = clustered()
    rb.context_start[:] = 2  # so that the real task's recent episode is number 2
    for obs, _, _, goal in draw(rb, [False, True], exploratory_share=share):
        n = round(share * obs.shape[1])
        assert len(torch.unique(goal[1], dim=0)) == 1 and goal[1, 0, 1] == 1
        if share > 0:
            real = {102} if obs.shape[1] == 200 else {100, 101, 102}
            assert set(obs[1, :n, 1].tolist()) == real
        if share < 1:
            assert set(obs[1, n:, 1].tolist()) == LINES[goal[1, 0, 0].item()]


def test_how_a_buffer_is_chosen():
    rb = replay()
    # task 0 has two episodes in the cell at x = 1 and one at 3; of 6 episodes 5 are in the cell at 1
    rb.hindsight[:, :3] = torch.tensor([[[3.0, 1.0], [1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0]] * 3])
    rb.group(2.0, 20, generator(1))
    args = pearl.Args(context_size=1, batch_size=1)
    tasks, real = torch.arange(2).repeat(3000), torch.zeros(6000, 2)
    for choice, share in (("episode", 5 / 6), ("cell", 1 / 2)):
        args.cell_choice = choice
        goal = pearl.sample(rb, tasks, real, torch.ones(6000, dtype=torch.bool), args, generator())[1][3]
        assert (goal[..., 0] == 1).float().mean().item() == pytest.approx(share, abs=0.03)


def test_rewards_of_a_stored_episode_under_the_task_of_its_cell():
    rb, task = pearl.ClusteredReplay(1, 3, T, 2, 2, CPU), pearl.Task(pearl.Args(goal_radius=0.2))
    obs = torch.tensor([[0.0, 0.0], [0.1, 0.0], [0.2, 0.0], [0.3, 0.05], [0.4, 0.05]])
    rb.add(torch.tensor([0]), obs[None], obs[None, 1:], torch.tensor([False]))
    rb.file(torch.tensor([0]), "final", generator())
    rb.group(0.2, 20, generator())
    torch.testing.assert_close(rb.centres, torch.tensor([[0.5, 0.1]]))  # of [0.4, 0.6) x [0, 0.2)
    args = pearl.Args(exploratory_share=0.0)
    for obs, action, next_obs, goal in pearl.sample(
        rb, torch.tensor([0]), torch.ones(1, 2), torch.tensor([True]), args, generator()
    ):
        reward = task.reward(next_obs, action, goal)[0]
        # distances from (0.5, 0.1): 0.412, 0.316, (0.04 + 0.0025)^0.5 = 0.206, (0.01 + 0.0025)^0.5 = 0.1118
        expected = torch.tensor([0.0, 0.0, 0.0, 1 - 0.1118])[obs[0, :, 0].mul(10).round().long()]
        torch.testing.assert_close(reward, expected, atol=1e-4, rtol=0)


def test_whatever_an_episode_achieves_earns_reward_under_the_task_of_its_cell():
    achieved = 4 * torch.rand(10_000, 2, generator=generator()) - 2
    for args in (pearl.Args(), pearl.Args(cell_size=0.282)):  # the default, and close to the largest that is allowed
        pearl.check(args)
        task = pearl.Task(args)
        size = args.cell_size or task.goal_radius
        centre = (pearl.cell_of(achieved, size) + 0.5) * size
        assert (task.reward(achieved, torch.zeros(2), centre) > 0.8 - 1e-6).all()


def test_share_of_duplicate_transitions():
    obs = torch.tensor([[[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]]])
    action = torch.tensor([[[0.5], [0.5], [0.7]], [[0.5], [0.5], [0.5]]])
    assert pearl.duplicate_share(obs, action) == pytest.approx(2 / 6)  # one in each slot; across slots none counts


def test_saved_clusters_give_the_same_draws():
    rb = replay(episodes=7, capacity=5, strategy="future")
    again = pearl.ClusteredReplay(2, 5, T, 2, 2, CPU)
    again.load_state_dict(rb.state_dict())
    for each in (rb, again):
        each.group(1.0, 2, generator(1))
    for one, other in zip(draw(rb, [True, True]), draw(again, [True, True])):
        assert all(torch.equal(a, b) for a, b in zip(one, other))


# ----------------------------------------------------------------------------------------------------------- whole runs
SMALL = """--goal-distance 0.3 --horizon 6 --total-timesteps 1500 --eval-frequency 500 --eval-episodes 3
    --num-train-tasks 8 --num-test-tasks 10 --num-tasks-sample 4 --initial-episodes 2 --prior-episodes 2
    --posterior-episodes 8 --gradient-steps 20 --meta-batch-size 4 --batch-size 32 --context-size 16
    --buffer-size 180 --hidden-size 32 --no-cuda --quiet"""


def run(module, arguments, run_dir, status=0):
    """Run a script in this process; returns the JSON of its last line (status 0 and 130) or what it says otherwise."""
    out, err, argv, handlers = io.StringIO(), io.StringIO(), sys.argv, {}
    for signum in (signal.SIGINT, signal.SIGTERM):
        handlers[signum] = signal.getsignal(signum)
    sys.argv = [f"{module.__name__}.py", *arguments.split(), "--run-dir", str(run_dir)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stopped:
            module.main()
    finally:
        sys.argv = argv
        torch.use_deterministic_algorithms(False)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    assert stopped.value.code == status, err.getvalue()
    return json.loads(out.getvalue().splitlines()[-1]) if status in (0, 130) else err.getvalue()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that was never stopped."""
    return run(pearl, SMALL + " --relabel-prob 0.5 --save-model", tmp_path_factory.mktemp("runs"))


def test_a_run_makes_updates_and_evaluates(straight):
    rows, content = curve(straight["run"]), state(straight["run"])
    assert {int(row[1]) for row in rows[1:]} == {0, 500, 1000, 1500}
    # 8 tasks x 2 episodes x 6 steps at first, then 4 x 10 x 6 an iteration, and 20 updates in each
    assert content["format"] == "pearl_htr_ec 2" and content["iteration"] == 6 and content["updates"] == 120
    assert straight["global_step"] == 96 + 6 * 240
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(straight["run"]).Reload()
    scalars = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert np.mean(scalars["charts/relabel_fraction"]) == pytest.approx(0.5, abs=0.08)  # K's share of 480 slots
    assert min(scalars["charts/cells"]) > 1 and max(scalars["charts/hindsight_reward"]) > 0
    assert 0 < np.mean(scalars["charts/duplicate_share"]) < 1
    # each stored episode was relabelled when it was collected, under a position that it reached, and all are known
    saved = content["replay"]
    stored = torch.arange(saved["obs"].shape[1]) < saved["end"].clamp(max=30)[:, None]
    assert torch.equal(saved["filed"] > 0, stored) and len(saved["filed"][stored].unique()) == stored.sum()
    distance = (saved["obs"][:, :, 1:, :2] - saved["hindsight"][:, :, None]).norm(dim=-1).min(-1).values
    assert (distance[stored] == 0).all() and saved["end"].sum() == 256 == saved["filed"].max()


def test_duplicates_of_both_strategies_by_one_command(straight, tmp_path, capsys):
    import duplicates

    theirs = run(ser, SMALL + " --relabel-prob 0.5 --save-model", tmp_path)
    checkpoints = [f"{line['run']}/checkpoint.pt" for line in (theirs, straight)]
    assert duplicates.main(duplicates.Args(checkpoints=checkpoints, batches=20)) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in said] == ["pearl_htr_ser:", "pearl_htr_ec:"]
    # SER draws n of the 6 transitions of one episode: 6 (1 - (5 / 6)^n) different ones
    for words, n in ((said[0][5], 16), (said[0][-1], 32)):
        assert float(words.strip(",")) == pytest.approx(1 - 6 * (1 - (5 / 6) ** n) / n, abs=0.01)
    assert float(said[1][5].strip(",")) < float(said[0][5].strip(",")) and float(said[1][-1]) < float(said[0][-1])
    with pytest.raises(duplicates.Refused, match="policy alone"):
        duplicates.shares(f"{straight['run']}/model.pt", 1)


def test_with_k_0_it_is_the_same_plain_pearl_as_ser(straight, tmp_path):
    plain = SMALL + " --relabel-prob 0"
    theirs = run(ser, plain, tmp_path)
    for choice in ("", " --cell-choice episode"):
        ours = run(pearl, plain + choice, tmp_path)
        assert curve(ours["run"]) == curve(theirs["run"]) != curve(straight["run"])
        for key in ("agent", "optimizer"):
            assert_equal(state(ours["run"])[key], state(theirs["run"])[key])
        assert torch.equal(state(ours["run"])["replay"]["obs"], state(theirs["run"])["replay"]["obs"])


def test_stopped_and_resumed_equals_never_stopped(straight, tmp_path, monkeypatch):
    sample, calls = pearl.sample, []

    def stop_in_the_second_iteration(*args):
        calls.append(args)
        if len(calls) == 25:
            signal.raise_signal(signal.SIGTERM)
        return sample(*args)

    monkeypatch.setattr(pearl, "sample", stop_in_the_second_iteration)
    stopped = run(pearl, SMALL + " --relabel-prob 0.5", tmp_path, status=130)
    assert stopped["global_step"] == 96 + 2 * 240 and len(calls) == 40
    resumed = run(pearl, f"--resume {stopped['run']}/checkpoint.pt", tmp_path)
    assert curve(resumed["run"]) == curve(straight["run"])
    assert_equal(state(resumed["run"]), state(straight["run"]))


def test_the_evaluation_leaves_training_alone_and_a_saved_agent_adapts(straight, tmp_path):
    more = run(pearl, SMALL + " --relabel-prob 0.5 --eval-frequency 250", tmp_path)
    assert_equal(state(more["run"])["agent"], state(straight["run"])["agent"])
    result = run(pearl, f"--evaluate {straight['run']}/model.pt", tmp_path)
    assert result["success_rate_by_episode"] == straight["success_rate_by_episode"]
    assert result["return_by_episode"] == pytest.approx(straight["return_by_episode"])


def test_every_choice_changes_the_run(tmp_path):
    """No flag of the strategy is without effect."""
    short = SMALL + " --relabel-prob 0.5 --total-timesteps 300 --eval-frequency 300 "
    choices = ("", "--cell-size 0.1", "--cell-choice episode", "--exploratory-share 0.2", "--hindsight final")
    states = [state(run(pearl, short + choice, tmp_path)["run"]) for choice in choices]
    policies = [each["agent"]["policy.0.weight"].flatten() for each in states]
    assert len(torch.stack(policies).unique(dim=0)) == len(choices)
    final = states[-1]["replay"]
    assert torch.equal(final["hindsight"], final["obs"][:, :, -1, :2])


# ------------------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--cell-size 0", "--cell-size must be above 0 and below 0.283, not 0.0: the corners of a cell"),
        ("--cell-size 0.3", "--cell-size must be above 0 and below 0.283, not 0.3"),
        ("--goal-radius 0.1 --cell-size 0.2", "--cell-size must be above 0 and below 0.141, not 0.2"),
        ("--cell-size nan", "--cell-size must be above 0"),
        ("--exploratory-share 1.1", "--exploratory-share must be from 0 to 1, not 1.1"),
        ("--exploratory-share nan", "--exploratory-share must be from 0 to 1"),
        ("--relabel-prob -0.1", "--relabel-prob must be from 0 to 1"),
        ("--buffer-size 100", "--buffer-size 100 does not hold an iteration of 20 episodes of 60 steps"),
        ("--resume no_such.pt", "cannot read no_such.pt: No such file or directory"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.setattr(pearl, "train", lambda args, saved: pytest.fail("training was started"))
    said = run(pearl, arguments, tmp_path, status=2)
    assert message in said and said.startswith("error: ") and said.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_of_the_other_strategy_is_refused(straight, tmp_path):
    said = run(ser, f"--resume {straight['run']}/checkpoint.pt", tmp_path, status=2)
    assert "is not a whole checkpoint.pt or model.pt of pearl_htr_ser.py" in said
    content = torch.load(f"{straight['run']}/model.pt", weights_only=True) | {"format": "pearl_htr_ser 2"}
    torch.save(content, tmp_path / "model.pt")
    said = run(pearl, f"--evaluate {tmp_path}/model.pt", tmp_path, status=2)
    assert "is not a whole checkpoint.pt or model.pt of pearl_htr_ec.py" in said


def test_help_names_every_flag_without_warnings():
    done = subprocess.run([sys.executable, "pearl_htr_ec.py", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == ""
    for field in dataclasses.fields(pearl.Args):
        assert f"--{field.name.replace('_', '-')}" in done.stdout
