"""What the tests of all scripts need of whole runs: start one, and compare what two of them left."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def command(script, arguments, run_dir, launcher=()):
    return [sys.executable, *launcher, str(ROOT / script), *arguments.split(), "--run-dir", str(run_dir)]


def run(script, arguments, run_dir, launcher=(), status=0, **kwargs):
    """Run a script; returns the JSON of its last line (status 0 or 130) or what it says on standard error."""
    done = subprocess.run(
        command(script, arguments, run_dir, launcher), capture_output=True, text=True, cwd=ROOT, **kwargs
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if status in (0, 130) else done.stderr


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


def state(path):
    """The checkpoint's tensors and counters, without its clocks and arguments."""
    content = torch.load(f"{path}/checkpoint.pt", weights_only=True)
    progress = {key: value for key, value in content["progress"].items() if not key.endswith("_s")}
    progress["eval_rows"] = [row[:-1] for row in progress["eval_rows"]]
    return {key: content[key] for key in content if key not in ("progress", "args")} | progress


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


def assert_resumed_at_its_end_reports_the_same(run, straight, tmp_path):
    """`run` is the script's, `straight` the JSON of a finished run."""
    result = run(f"--resume {straight['run']}/checkpoint.pt", tmp_path)
    for key in ("global_step", "success_rate", "episodic_return"):
        assert result[key] == straight[key]


def assert_resumed_with(run, straight, tmp_path, optimizers, fixed=("--buffer-size 123456",)):
    """A run goes on with another learning rate, and refuses to go on with a replay of another size."""
    checkpoint = f"--resume {straight['run']}/checkpoint.pt --total-timesteps {straight['global_step'] + 1}"
    content = torch.load(f"{run(f'{checkpoint} --learning-rate 0.125', tmp_path)['run']}/checkpoint.pt")
    assert [group["lr"] for name in optimizers for group in content[name]["param_groups"]] == [0.125] * len(optimizers)
    for flag in fixed:
        said = run(f"{checkpoint} {flag}", tmp_path, status=2)
        assert said == f"error: {flag.split()[0]} cannot change on --resume: leave it out\n"
