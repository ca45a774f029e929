"""What the tests of all scripts need of whole runs: start one, and compare what two of them left."""

import contextlib
import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

ROOT = Path(__file__).resolve().parents[1]


def command(script, arguments, run_dir, launcher=()):
    return [sys.executable, *launcher, str(ROOT / script), *arguments.split(), "--run-dir", str(run_dir)]


def result(status, expected, out, err):
    assert status == expected, err
    assert "Traceback" not in err
    return json.loads(out.splitlines()[-1]) if status in (0, 130) else err


def run(script, arguments, run_dir, launcher=(), status=0, **kwargs):
    """Run a script; returns the JSON of its last line (status 0 or 130) or what it says on standard error."""
    done = subprocess.run(
        command(script, arguments, run_dir, launcher), capture_output=True, text=True, cwd=ROOT, **kwargs
    )
    return result(done.returncode, status, done.stdout, done.stderr)


def called(main, arguments, run_dir, status=0):
    """What `run` does, in this process, which is quicker: nothing has to be imported again."""
    out, err, writers, code = io.StringIO(), io.StringIO(), [], None
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def writer(*args, **kwargs):
        writers.append(SummaryWriter(*args, **kwargs))
        return writers[-1]

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["script.py", *arguments.split(), "--run-dir", str(run_dir)])
        patch.setitem(main.__globals__, "SummaryWriter", writer)
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code
        finally:
            for opened in writers:
                opened.close()
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
    return result(code, status, out.getvalue(), err.getvalue())


def refused(main, arguments, run_dir, monkeypatch, capsys):
    """What a script's `main` says of bad input, in this process: status 2, nothing written."""
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments.split(), "--run-dir", str(run_dir)])
    before = set(os.listdir(run_dir))
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and set(os.listdir(run_dir)) == before
    return said


def curve(path):
    """eval.csv without its wall clock."""
    with open(f"{path}/eval.csv") as file:
        return [row[:-1] for row in csv.reader(file)]


def successes(path):
    """{step: success rate} of eval.csv, whose rows are in order and there once."""
    rows = [(int(row[1]), float(row[3])) for row in curve(path) if row[2] == "eval/success_rate"]
    assert rows == sorted(dict(rows).items())
    return dict(rows)


def scalars(path):
    """{tag: [(step, value), ...]} of TensorBoard as its reader sees it, without the clock."""
    events = EventAccumulator(str(path)).Reload()
    tags = set(events.Tags()["scalars"]) - {"charts/SPS"}
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def state(path):
    """The checkpoint's tensors and counters, without its clocks and arguments."""
    content = torch.load(f"{path}/checkpoint.pt", weights_only=True)
    counters = {key: value for key, value in content["counters"].items() if key not in ("train_s", "wall_s", "sps")}
    return {key: content[key] for key in content if key not in ("counters", "args")} | counters


def assert_equal(a, b):
    """Equal bit for bit: dicts of tensors and plain values."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


def assert_same_run(a, b):
    """Two folders hold the same curve, the same events and the same checkpoint, bit for bit."""
    assert curve(a) == curve(b)
    assert scalars(a) == scalars(b)
    assert_equal(state(a), state(b))


def contents(path):
    return {file.name: file.read_bytes() for file in Path(path).iterdir()}


def clocks(result):
    """What is different in the JSON of an equal run."""
    return {key: result[key] for key in ("run", "wall_s", "sps")}


class Promises:
    """What a script promises of its runs. A class of tests that derives from this says which script and what to train:

    module; arguments, of a short run with five evaluations, a checkpoint between the second and the third and between
    the fourth and the fifth of them, and one at the end; other_way, arguments of a run that is killed; networks and
    optimizers, by their names in checkpoints; refusals, pairs of arguments and what is said of them.
    """

    @pytest.fixture(scope="class")
    @classmethod
    def straight(cls, tmp_path_factory):
        """What a run from the command line that was never stopped says."""
        run_dir = tmp_path_factory.mktemp("runs")
        return run(f"{cls.module.__name__}.py", f"{cls.arguments} --save-model", run_dir)

    def call(self, arguments, run_dir, status=0):
        return called(self.module.main, arguments, run_dir, status)

    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
    def test_stopped_and_resumed_equals_never_stopped(self, signum, straight, tmp_path, monkeypatch):
        def log(run, *given):
            if run.cycle == 11:
                os.kill(os.getpid(), signum)
            logged(run, *given)

        logged = self.module.Run.log
        monkeypatch.setattr(self.module.Run, "log", log)
        folder = self.call(self.arguments, tmp_path, status=130)["run"]
        assert state(folder)["cycle"] in (11, 12) and state(folder)["global_step"] < straight["global_step"]
        monkeypatch.setattr(self.module.Run, "log", logged)
        path = {signal.SIGINT: folder, signal.SIGTERM: f"{folder}/checkpoint.pt"}[signum]
        assert self.call(f"--resume {path}", tmp_path)["run"] == folder
        assert os.listdir(tmp_path) == [os.path.basename(folder)]
        assert_same_run(folder, straight["run"])

    def test_a_killed_run_loses_what_came_after_its_checkpoint(self, tmp_path, tmp_path_factory, monkeypatch):
        class Killed(BaseException):
            pass

        def save(run, *given):
            if os.path.exists(f"{run.folder}/checkpoint.pt"):
                raise Killed
            saved(run, *given)

        arguments, saved = self.arguments + self.other_way, self.module.Run.save
        straight = self.call(arguments, tmp_path_factory.mktemp("straight"))
        grid = list(successes(straight["run"]))
        with pytest.raises(Killed), monkeypatch.context() as patch:
            patch.setattr(self.module.Run, "save", save)
            self.call(arguments, tmp_path)
        (folder,) = tmp_path.iterdir()
        rows = Path(folder, "eval.csv").read_text()
        assert list(successes(folder)) == grid[:4] and grid[1] < state(folder)["global_step"] < grid[2]
        self.call(f"--resume {folder} --total-timesteps 1", tmp_path)
        assert list(successes(folder)) == grid[:2] and rows.startswith(Path(folder, "eval.csv").read_text())
        self.call(f"--resume {folder}", tmp_path)
        assert_same_run(folder, straight["run"])

    def test_a_finished_run_goes_on_with_other_arguments(self, straight, tmp_path):
        folder, total = shutil.copytree(straight["run"], tmp_path / "run"), straight["global_step"] + 1
        assert self.call(f"--resume {folder}", tmp_path) | clocks(straight) == straight
        assert_same_run(folder, straight["run"])
        self.call(f"--resume {folder} --learning-rate 0.125 --total-timesteps {total}", tmp_path)
        content = torch.load(folder / "checkpoint.pt", weights_only=True)
        assert {group["lr"] for name in self.optimizers for group in content[name]["param_groups"]} == {0.125}
        assert content["counters"]["global_step"] >= total
        assert list(successes(folder)) == [*successes(straight["run"]), total]
        arguments = json.loads((folder / "args.json").read_text())
        assert arguments["total_timesteps"] == total and arguments["learning_rate"] == 0.125

    def test_seeds_and_evaluation_frequency(self, straight, tmp_path):
        grid = list(successes(straight["run"]))
        flags = f"--seed 2 --total-timesteps {grid[1]}", f"--eval-frequency {grid[-1]}"
        other, seldom = (self.call(f"{self.arguments} {flag}", tmp_path)["run"] for flag in flags)
        assert list(successes(seldom)) == [0, grid[-1]]
        of_straight, of_other, of_seldom = state(straight["run"]), state(other), state(seldom)
        for name in (*self.networks, "replay"):
            assert_equal(of_seldom[name], of_straight[name])  # evaluation leaves training alone
        weights = [(name, key) for name in self.networks for key in of_other[name] if key.endswith("weight")]
        for name, key in (*weights, ("replay", "desired_goal")):
            value = of_other[name][key]
            assert not torch.equal(value, of_straight[name][key][: len(value)])

    def test_evaluate_plays_what_was_saved_and_writes_nothing(self, straight, tmp_path):
        before = contents(straight["run"])
        for path in ("model.pt", "checkpoint.pt", ""):
            assert self.call(f"--evaluate {straight['run']}/{path}", tmp_path) | clocks(straight) == straight
        assert self.call(f"--evaluate {straight['run']} --eval-episodes 7", tmp_path)["n_episodes"] == 7
        assert os.listdir(tmp_path) == [] and contents(straight["run"]) == before

    def test_bad_input_is_one_clear_line_and_status_2(self, straight, tmp_path, monkeypatch, capsys):
        run, before = straight["run"], contents(straight["run"])
        whole = before["checkpoint.pt"]
        (tmp_path / "cut.pt").write_bytes(whole[:1000])
        (tmp_path / "moved.pt").write_bytes(whole)
        torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.pt")
        refusals = [
            ("--gamma 1", "--gamma must be from 0 to 0.999999, not 1"),
            ("--learning-rate nan", "--learning-rate must be from 0"),
            (f"--resume {run} --evaluate {run}", "--evaluate"),
            (f"--resume {run} --buffer-size 123456", "--buffer-size"),
            (f"--resume {run}/model.pt", " go"),
            (f"--resume {run} --hidden-size 9", "size"),
            (f"--evaluate {run} --hidden-size 9", "size"),
            ("--resume no_such.pt", "no_such.pt"),
            (f"--evaluate {tmp_path}/cut.pt", "cut.pt is not a whole"),
            (f"--resume {tmp_path}/foreign.pt", "foreign.pt is not a whole"),
            (f"--resume {tmp_path}/moved.pt", "eval.csv"),
        ]
        for arguments, message in (*refusals, *self.refusals):
            said = refused(self.module.main, arguments, tmp_path, monkeypatch, capsys)
            assert message in said, (arguments, said)
            assert said.startswith("error: ") and said.count("\n") == 1, (arguments, said)
        assert contents(run) == before
        assert "invalid choice" in refused(self.module.main, "--strategy past", tmp_path, monkeypatch, capsys)
        (tmp_path / "file").touch()
        said = self.call(self.arguments, tmp_path / "file", status=2)
        assert said.startswith("error: ") and str(tmp_path / "file") in said and said.count("\n") == 1

    def test_a_full_disk_keeps_the_earlier_checkpoint(self, tmp_path, monkeypatch):
        def full(content, file):
            if not list(tmp_path.glob("*/checkpoint.pt")):
                return saved(content, file)
            Path(file).write_bytes(b"half")
            raise OSError(28, "No space left on device")

        saved = torch.save
        monkeypatch.setattr(torch, "save", full)
        said = self.call(self.arguments, tmp_path, status=1)
        assert said.startswith("failed: ") and "No space left on device" in said and said.count("\n") == 1
        (folder,) = tmp_path.iterdir()
        assert state(folder)["cycle"] > 0  # it can be read

    def test_a_training_that_diverges_fails_with_status_1(self, tmp_path):
        said = self.call(self.arguments + " --learning-rate 1e30", tmp_path, status=1)
        assert said.startswith("failed: ") and "lower --learning-rate" in said and said.count("\n") == 1

    def test_help_explains_every_flag_in_words_of_its_own_without_warnings(self):
        command, wide = [sys.executable, f"{self.module.__name__}.py", "--help"], os.environ | {"COLUMNS": "1000"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=wide)
        assert done.returncode == 0 and done.stderr == ""
        texts = {}
        for line in done.stdout.splitlines():
            if flag := re.match("│ (-[^ ,]+)", line):
                texts[name := flag[1]] = ""
            if line.startswith("│") and line[22:24] == "  ":  # else what it is called leaves no room
                texts[name] += line[24:-1].split("(default: ")[0].strip()
        fields = self.module.Args.__dataclass_fields__
        assert list(texts) == ["-h", *("--" + field.replace("_", "-") for field in fields)]
        assert min(map(len, texts.values())) > 10 and len(set(texts.values())) == len(texts)
