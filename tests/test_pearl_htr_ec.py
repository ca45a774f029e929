"""pearl_htr_ec.py: hindsight buffers against values worked out by hand, whole runs, and how it differs from SER."""

import re
import shutil
import signal

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import pearl_htr_ec as pearl
import pearl_htr_ser as ser
from tests.pearl_runs import GOALS, POINT, SMALL, draw, generator, lines, replay, run, state
from tests.whole_runs import ROOT, assert_equal, curve


def common_lines(name):
    """The script without its docstring and the strategy's own: lines that end with `# HTR` or `# HTR: why`, and the
    section with the header `# HTR: ... ---`."""
    text = (ROOT / name).read_text().split('"""', 2)[2]
    text = re.sub(r"(?ms)^# HTR: [^\n]*---\n.*?(?=^# [^\n]*---\n)", "", text)
    return [line for line in text.splitlines() if not re.search(r"# HTR(: .*)?$", line)]


def test_the_script_is_that_of_ser_outside_the_marked_places():
    ours, theirs = common_lines("pearl_htr_ec.py"), common_lines("pearl_htr_ser.py")
    assert ours == theirs and len(ours) > 530


# ---------------------------------------------------------------------------------------------------- grid and buffers
def test_cells_of_goals_at_across_and_below_borders():
    goals = torch.tensor([[0.0, 0.24], [0.25, 0.49], [0.5, -0.01], [-0.25, -0.26], [-0.5, 7.0]])
    assert pearl.cell_of(goals, 0.25).tolist() == [[0, 0], [1, 1], [2, -1], [-1, -2], [-2, 28]]


def clustered(hindsight=None, size=2.0, recent=20, file="final", **sizes):
    """A replay of episodes with these hindsight tasks instead of what they achieved, and its hindsight buffers."""
    rb = replay(pearl, "ClusteredReplay", file=file, **sizes)
    if hindsight:
        rb.hindsight[:, : len(hindsight[0])] = torch.tensor(hindsight)
    rb.cells = pearl.Cells(rb, size, recent, generator(1))
    return rb


def buffers(rb):
    """{centre of the cell: its (task, row), the oldest first}."""
    members = np.split(torch.stack([rb.cells.tasks, rb.cells.rows], -1), rb.cells.ends[:-1])
    return {tuple(centre): list(map(tuple, each.tolist())) for centre, each in zip(rb.cells.centres.tolist(), members)}


def test_an_episode_is_filed_under_the_position_that_it_achieved():
    rb = clustered()  # all end at x = 4, in the rows y = 0, 1, 2 and 100, 101, 102
    assert buffers(rb) == {(5, 1): [(0, 0), (0, 1)], (5, 3): [(0, 2)], (5, 101): [(1, 0), (1, 1)], (5, 103): [(1, 2)]}
    future = clustered(episodes=9, file="future").hindsight[:, :9]
    assert set(future[..., 0].flatten().tolist()) == {1, 2, 3, 4}
    assert (future[..., 1] == torch.arange(9.0) + torch.tensor([[0.0], [100.0]])).all()  # of the episode itself


def test_a_buffer_has_the_episodes_of_all_tasks_in_the_order_of_their_age():
    rb = clustered([[[-0.1, 0.3], [0.1, 0.3], [-0.2, 0.2]], [[-0.1, 0.3], [0.5, 0.3], [0.1, 0.2]]], 0.5)
    # of two episodes that were stored in one call, that of the later task counts as the older
    in_cells = {(-0.25, 0.25): [(1, 0), (0, 0), (0, 2)], (0.25, 0.25): [(0, 1), (1, 2)], (0.75, 0.25): [(1, 1)]}
    assert buffers(rb) == in_cells


def test_pointers_go_with_the_episodes_that_the_ring_overwrites():
    rb = clustered(episodes=17, capacity=5, size=0.5)  # so fine that each episode fills a cell of its own
    # episodes 12 .. 16 are left, with number 15 in row 0; their tasks are (4, episode) and (4, 100 + episode)
    left = [12, 13, 14, 15, 16, 112, 113, 114, 115, 116]
    assert buffers(rb) == {(4.25, line + 0.25): [(line // 100, line % 100 % 5)] for line in left}
    rb.cells = pearl.Cells(rb, 1000.0, 20, generator())  # so coarse that all are in one
    assert [row for task, row in buffers(rb)[500, 500] if task == 0] == [2, 3, 4, 0, 1]  # the oldest first
    tasks, rows = rb.cells.draw(torch.zeros(1, 1, dtype=torch.long), 400)
    assert len(set(zip(tasks[0].tolist(), rows[0].tolist()))) == 10
    again = replay(pearl, "ClusteredReplay", episodes=0, capacity=5)
    again.load_state_dict(rb.state_dict())
    again.cells = pearl.Cells(again, 0.5, 20, generator())
    assert len(buffers(again)) == 10 and torch.equal(again.filed, rb.filed)


def test_whatever_an_episode_achieves_earns_reward_under_the_task_of_its_cell():
    achieved = 4 * torch.rand(10_000, 2, generator=generator()) - 2
    for args in (pearl.Args(), pearl.Args(cell_size=0.282)):  # the default, and close to the largest that is allowed
        pearl.check(args)
        task = pearl.Task(args)
        size = args.cell_size or task.goal_radius
        centre = (pearl.cell_of(achieved, size) + 0.5) * size
        assert (task.reward("sparse", achieved, torch.zeros(2), centre) > 0.8 - 1e-6).all()


# ------------------------------------------------------------------------------------------------------------ sampling
# Episodes 1 and 2 of task 0 and 0 of task 1 in a cell with the centre (1, 1), the others in that with (3, 1)
TWO_CELLS = [[[3.0, 1.0], [1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [3.0, 1.0], [3.0, 1.0]]]
LINES = {1: {1, 2, 100}, 3: {0, 101, 102}}


@pytest.mark.parametrize("recent, newest", [(20, LINES), (1, {1: {2}, 3: {102}})])
def test_a_relabelled_slot_takes_all_its_transitions_from_one_buffer_under_its_task(recent, newest):
    for seed in range(5):
        rb = clustered(TWO_CELLS, recent=recent)
        context, batch = draw(pearl, rb, [True, False], seed, exploratory_share=0.0)
        goals = torch.unique(torch.cat([context[3][0], batch[3][0]]), dim=0)
        assert len(goals) == 1 and goals[0, 1] == 1
        assert lines(batch[0], 0) == LINES[goals[0, 0].item()] and lines(context[0], 0) == newest[goals[0, 0].item()]
        for obs, action, next_obs, goal in (context, batch):
            assert (next_obs[..., 0] == obs[..., 0] + 1).all() and (next_obs[..., 1] == obs[..., 1]).all()
            torch.testing.assert_close(action, next_obs / 1000)
            assert (goal[1] == GOALS[1]).all()  # the other slot is as ever
        assert len(lines(context[0], 1)) == 1 and lines(batch[0], 1) == {100, 101, 102}


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_the_exploratory_share_is_of_the_real_task_and_relabelled_too(share):
    rb = clustered(TWO_CELLS)
    rb.context_start[:] = 2  # so that the real task's recent episode is number 2
    for (obs, _, _, goal), real in zip(
        draw(pearl, rb, [False, True], exploratory_share=share), ({102}, {100, 101, 102})
    ):
        n = round(share * obs.shape[1])
        assert len(torch.unique(goal[1], dim=0)) == 1 and goal[1, 0, 1] == 1
        assert lines(obs[:, :n], 1) == real and lines(obs[:, n:], 1) == (
            LINES[goal[1, 0, 0].item()] if share < 1 else set()
        )


def test_how_a_buffer_is_chosen():
    rb = clustered([[[3.0, 1.0], [1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0]] * 3])  # 5 of 6 episodes in the cell at x = 1
    tasks, relabel = torch.arange(2).repeat(3000), torch.ones(6000, dtype=torch.bool)
    for choice, share in (("episode", 5 / 6), ("cell", 1 / 2)):
        args = pearl.Args(context_size=1, batch_size=1, cell_choice=choice)
        goal = pearl.sample(rb, tasks, torch.zeros(6000, 2), relabel, args, generator())[1][3]
        assert (goal[..., 0] == 1).float().mean().item() == pytest.approx(share, abs=0.03)


def test_rewards_of_a_stored_episode_under_the_task_of_its_cell():
    rb, task = pearl.ClusteredReplay(1, 3, POINT, torch.device("cpu")), pearl.Task(pearl.Args(goal_radius=0.2))
    obs = torch.tensor([[0.0, 0.0], [0.1, 0.0], [0.2, 0.0], [0.3, 0.05], [0.4, 0.05]])
    rb.add(torch.tensor([0]), obs[None], obs[None, 1:], torch.tensor([False]))
    rb.file(torch.tensor([0]), "final", generator())
    rb.cells, args = pearl.Cells(rb, 0.2, 20, generator()), pearl.Args(exploratory_share=0.0)
    torch.testing.assert_close(rb.cells.centres, torch.tensor([[0.5, 0.1]]))  # of [0.4, 0.6) x [0, 0.2)
    for rows in pearl.sample(rb, torch.tensor([0]), torch.ones(1, 2), torch.tensor([True]), args, generator()):
        # distances from (0.5, 0.1): 0.412, 0.316, (0.04 + 0.0025)^0.5 = 0.206, (0.01 + 0.0025)^0.5 = 0.1118
        expected = torch.tensor([0.0, 0.0, 0.0, 1 - 0.1118])[rows[0][0, :, 0].mul(10).round().long()]
        torch.testing.assert_close(task.context(*rows)[0, :, -1], expected, atol=1e-4, rtol=0)


def test_share_of_duplicate_transitions():
    obs = torch.tensor([[[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]]])
    action = torch.tensor([[[0.5], [0.5], [0.7]], [[0.5], [0.5], [0.5]]])
    assert pearl.duplicate_share(obs, action) == pytest.approx(2 / 6)  # one in each slot; across slots none counts
    assert np.isnan(pearl.duplicate_share(obs[:0], action[:0]))


# ---------------------------------------------------------------------------------------------------------- whole runs
@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that was never stopped, and a copy of its folder as it was in the middle."""
    folder, save = tmp_path_factory.mktemp("runs"), pearl.Run.save

    def keep(self, name, parts):
        save(self, name, parts)
        if self.iteration == 3:
            shutil.copytree(self.folder, folder / "middle")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pearl.Run, "save", keep)
        return run(pearl, SMALL + "--checkpoint-frequency 500", folder), folder / "middle/checkpoint.pt"


def test_a_run_makes_updates_and_files_its_episodes(straight):
    content = state(straight[0])
    assert content["format"] == "pearl_htr_ec" and straight[0]["global_step"] == 96 + 7 * 480
    assert {int(each["step"]) for each in content["optimizer"]["state"].values()} == {7 * 8}
    events = EventAccumulator(straight[0]["run"]).Reload()
    scalars = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert min(scalars["charts/cells"]) > 1 and max(scalars["charts/hindsight_reward"]) > 0
    assert 0 < np.mean(scalars["charts/duplicate_share"]) < 1
    # each stored episode was relabelled when it was collected, under a position that it reached, and all are known
    saved = content["replay"]
    stored = torch.arange(60) < saved["end"].clamp(max=60)
    assert torch.equal(saved["filed"] > 0, stored) and len(saved["filed"][stored].unique()) == stored.sum()
    distance = (saved["obs"][:, :, 1:, :2] - saved["hindsight"][:, :, None]).norm(dim=-1).min(-1).values
    assert (distance[stored] == 0).all() and saved["end"].sum() == 8 * 2 + 7 * 80 == saved["filed"].max()


def test_resumed_from_the_middle_equals_never_stopped_in_the_same_folder(straight, tmp_path):
    done, middle = straight
    shutil.copytree(done["run"], tmp_path / "run")
    shutil.copy(middle, tmp_path / "run")  # rows of eval.csv and events of what came later are there
    resumed = run(pearl, f"--resume {tmp_path}/run", tmp_path)
    assert resumed["run"] == f"{tmp_path}/run" and curve(tmp_path / "run") == curve(done["run"])
    assert_equal(state(resumed), state(done))
    events = [
        EventAccumulator(str(each)).Reload().Scalars("losses/qf_loss") for each in (tmp_path / "run", done["run"])
    ]
    assert [event.step for event in events[0]] == [event.step for event in events[1]]


def test_ctrl_c_ends_the_iteration_and_a_second_one_stops_at_once(tmp_path, monkeypatch):
    sample, calls = pearl.sample, []

    def stop_in_the_second_iteration(*args):
        calls.append(args)
        if len(calls) == 12:
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        return sample(*args)

    monkeypatch.setattr(pearl, "sample", stop_in_the_second_iteration)
    stopped = run(pearl, SMALL, tmp_path, status=130)
    assert stopped["global_step"] == state(stopped)["counters"]["global_step"] == 96 + 2 * 480 and len(calls) == 16


def test_with_k_0_it_is_the_same_plain_pearl_as_ser(tmp_path):
    ours, theirs = (run(module, SMALL + "--relabel-prob 0", tmp_path) for module in (pearl, ser))
    assert curve(ours["run"]) == curve(theirs["run"])
    for key in ("agent", "optimizer"):
        assert_equal(state(ours)[key], state(theirs)[key])
    said = run(ser, f"--resume {ours['run']}", tmp_path, status=2)
    assert "is not a whole checkpoint.pt" in said and "it is of pearl_htr_ec.py" in said


def test_every_choice_changes_the_run(tmp_path):
    choices = ("", "--cell-size 0.1", "--cell-choice episode", "--exploratory-share 0.2", "--hindsight final")
    states = [state(run(pearl, SMALL + "--total-timesteps 300 " + choice, tmp_path)) for choice in choices]
    assert len(torch.stack([each["agent"]["policy.0.weight"] for each in states]).unique(dim=0)) == len(choices)
    assert torch.equal(states[-1]["replay"]["hindsight"], states[-1]["replay"]["obs"][:, :, -1, :2])


@pytest.mark.parametrize("flag", ["--cell-size 0", "--cell-size 0.29", "--cell-size nan", "--exploratory-share 1.1"])
def test_bad_input_is_one_clear_line_and_status_2(flag, tmp_path):
    assert f"error: {flag.split()[0]} must be from" in run(pearl, flag, tmp_path, status=2)
