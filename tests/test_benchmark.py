"""benchmark/: the experiments' commands, what a run stores, the gate that notices worse learning, tables, pictures."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import gymnasium_robotics  # noqa: F401  registers Fetch
import numpy as np
import pytest
import torch
from experiments import EXPERIMENTS, Experiment

import envs  # noqa: F401  registers its tasks
import pearl_htr_ec as pearl

curves, compare, report, run = map(pytest.importorskip, ("curves", "compare", "report", "run"))  # they need scipy
ROOT = Path(__file__).parents[1]
SEEDS = (101, 102, 103, 104, 105)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_commands_are_what_their_script_takes(name):
    for variant in EXPERIMENTS[name].variants:
        args = curves.args_now(name, variant)
        module = "envs" if re.match("Fetch.*-v0", args["env_id"]) else None
        assert args["env_id"] in gym.registry and args.get("env_module") == module


def test_runs_come_seed_by_seed():
    assert Experiment("", {"x": "", "y": ""}, seeds_of={"y": 1}).runs() == [("x", 1), ("y", 1), ("x", 2)]


def test_every_stored_curve_is_whole_and_belongs_to_a_variant():
    for place in (ROOT / "benchmark/curves").glob("*/*/seed-*"):
        name, variant, seed = place.parts[-3:]
        curve = curves.read(place)
        assert variant in EXPERIMENTS[name].variants and seed == f"seed-{curve.seed}"
        assert "env_id" in curve.args and curve.made.keys() == {"versions", "machine", "commit"}


def test_runs_go_on_where_they_stopped_are_stored_once_and_may_fail(tmp_path, monkeypatch, capsys):
    flags = "--n-bits 3 --total-timesteps 480 --eval-frequency 160 --eval-episodes 10"
    tiny = Experiment("", {"her": "her_dqn_bitflip.py", "broken": "README.md"}, flags, seeds=1)
    monkeypatch.setitem(EXPERIMENTS, "tiny", tiny)
    monkeypatch.setattr(run, "CHARTS", ("charts/SPS",))
    folder = tmp_path / "runs/tiny/her/seed-1"
    stopped = [sys.executable, *tiny.command("her"), "--total-timesteps", "160", "--run-dir", str(folder)]
    subprocess.run(stopped, cwd=ROOT, capture_output=True, check=True)
    (folder / "made.json").write_text(json.dumps({"commit": "0123456"}))
    args = run.Args("tiny", curves=tmp_path / "curves", runs=tmp_path / "runs")
    assert run.main(args) == 1 and f"tiny/broken/seed-1: see {tmp_path}" in capsys.readouterr().err
    (kept,) = (tmp_path / "curves/tiny").glob("*/seed-*")
    curve = curves.read(kept)
    assert curve.steps.tolist() == [0, 160, 320, 480] and len(list(folder.glob("*/eval.csv"))) == 1
    charts = curves.read(kept, "charts/SPS").steps
    assert charts[0] < 160 and charts[-1] > 400 and (np.diff(charts) > 0).all()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert curve.made["commit"].removesuffix("-dirty") == f"0123456, {head}" and "mujoco" in curve.made["versions"]
    assert run.main(dataclasses.replace(args, only="her")) == 0 and capsys.readouterr().err == ""


def write(folder, seed, values, total=2400, **changed):
    """A curve of bitflip-smoke: values (evaluations,), evenly over `total` steps, at the end also by episode."""
    folder.mkdir(parents=True)
    args = curves.args_now("bitflip-smoke", "her") | {"seed": seed, "total_timesteps": total} | changed
    made = {"versions": {"torch": "2.0"}, "machine": {"cores": 2}, "commit": "0123456789"}
    rows = ["seed,global_step,metric,value,n_episodes,wall_s"]
    for i, value in enumerate(values):
        step = total * i // (len(values) - 1)
        rows.append(f"{seed},{step},eval/success_rate,{value},100,{step / 10}")
        rows += [f"{seed},{step},eval/success_rate_ep{i},{each},100,0" for step, each in ((0, 0), (total, value))]
    for name, text in (("args.json", json.dumps(args)), ("made.json", json.dumps(made)), ("eval.csv", "\n".join(rows))):
        (folder / name).write_text(text)


def learning(seed, slower=1.0, best=1.0):
    """21 success rates: a logistic curve whose middle differs from seed to seed, 100 episodes an evaluation."""
    rng = np.random.default_rng(seed)
    middle = 0.35 * slower * np.exp(rng.normal(0, 0.05))
    return rng.binomial(100, best / (1 + np.exp(-(np.linspace(0, 1, 21) - middle) / 0.05))) / 100


@pytest.fixture
def gate(tmp_path, monkeypatch, capsys):
    """gate(what, **changed) judges 5 new seeds with the values what(seed): exit status, verdict, refusal."""
    monkeypatch.setattr(curves, "CURVES", tmp_path / "stored")
    for seed in range(1, 11):
        write(tmp_path / f"stored/bitflip-smoke/her/seed-{seed}", seed, learning(seed))

    def judge(what=learning, seeds=SEEDS, options=(), **changed):
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        for i, seed in enumerate(seeds):
            write(tmp_path / f"new/bitflip-smoke/her/seed-{i}", seed, what(seed), **changed)
        args = compare.Args("bitflip-smoke", candidate=tmp_path / "new", **dict(options))
        return compare.main(args), *capsys.readouterr()

    return judge


def test_honest_reruns_pass(gate):
    for first in range(1000, 1100, 10):
        status, out, err = gate(seeds=range(first, first + 5))
        assert (status, err) == (0, "") and out.startswith("bitflip-smoke her: PASS: learns as well as the stored")


@pytest.mark.parametrize(
    "what, status, said",
    [
        ({"run_dir": "elsewhere", "num_threads": 2}, 0, "her: PASS: learns as well"),
        ({"batch_size": 64, "options": {"despite": ("batch-size",)}}, 0, "her: PASS: learns as well"),
        ({"what": lambda seed: learning(seed, slower=1.5)}, 1, "her: REGRESSION: .*area under the curve"),
        ({"what": lambda seed: learning(seed, best=0.8)}, 1, "her: REGRESSION: .*final value 0.8"),
        ({"what": lambda seed: 0 * learning(seed)}, 1, "her: REGRESSION: .*5 of 5 seeds failed, .* 0 of 10"),
        ({"what": lambda seed: learning(seed) * (seed > 103)}, 1, "her: REGRESSION: .*3 of 5 seeds failed, .* 0 of 10"),
        ({"what": lambda seed: learning(seed, slower=1.8 - 0.9 * (seed % 2))}, 2, "her: INCONCLUSIVE: .*add seeds"),
        ({"what": lambda seed: learning(seed) * np.nan}, 2, "error: .* a value that is not a number"),
        ({"seeds": SEEDS[:4]}, 2, "error: .*her: could not judge: 4 new seeds, --min-seeds is 5"),
        ({"seeds": (1, 102, 103, 104, 105)}, 2, "error: .*her: could not judge: a seed is there twice"),
        ({"strategy": "none"}, 2, "error: .*seed 101 differs from stored seed 1: strategy future, now none"),
        ({"total": 2000, "options": {"despite": ("total-timesteps",)}}, 2, "error: .*not evaluated at the same steps"),
    ],
)
def test_verdicts_are_one_line_and_those_of_worse_learning_a_status(gate, what, status, said):
    found, out, err = gate(**what)
    assert (found, (out + err).count("\n"), bool(err)) == (status, 1, "error" in said) and re.search(said, out + err)


SEVERAL = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as e:
        assert not e.code
"""


@pytest.mark.parametrize(
    "name, variant, n",
    [("bitflip-smoke", "her", 3), pytest.param("bitflip", "n15-her", 5, marks=pytest.mark.regression)],
)
def test_relabelling_learns_as_it_did_and_nothing_else_does(name, variant, n, tmp_path, capsys):
    expected = {"future": "PASS", "none": "REGRESSION"}
    command = f"{' '.join(EXPERIMENTS[name].command(variant))} --quiet --run-dir {tmp_path}"
    runs = [f"{command}/{kind}/runs --strategy {kind} --seed {i}".split() for kind in expected for i in SEEDS[:n]]
    subprocess.run([sys.executable, "-c", SEVERAL, json.dumps(runs)], cwd=ROOT, capture_output=True, check=True)
    for strategy, verdict in expected.items():
        for path in (tmp_path / strategy / "runs").iterdir():
            run.write_made(path / "made.json", goes_on=False)
            shutil.move(path, tmp_path / strategy / name / variant / f"seed-{path.name}")
        args = compare.Args(name, variant, tmp_path / strategy, min_seeds=n, despite=("strategy",))
        assert compare.main(args) == (strategy == "none")
        assert capsys.readouterr().out.startswith(f"{name} {variant}: {verdict}: ")


def test_tables_by_hand_and_nothing_is_rerun_to_be_compared_with_stale_curves(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(curves, "CURVES", tmp_path)
    monkeypatch.setitem(EXPERIMENTS["bitflip-smoke"].variants, "b", "her_dqn_bitflip.py --k 3")
    # Finals 0, 0.5, 0.7, 0.9, 1: without the lowest and the highest, 0.7. Two reach 0.99, at 1,200 and 2,400 steps.
    for seed, values in enumerate(([0, 0, 0], [0, 0, 0.5], [0, 0.4, 0.7], [0, 0.99, 0.9], [0, 0.9, 1]), 1):
        write(tmp_path / f"bitflip-smoke/her/seed-{seed}", seed, values)
    text = report.section("bitflip-smoke")
    assert re.search(r"\n\| her \| 5 \| 0.700 \[0.*, .*\] \(0.000\) \| 1,800 \(2 of 5\) \| 3 \|  \|\n", text)
    assert "\n| b | 0 | not run yet |" in text and "Made by 0123456 with torch 2.0; 2 cores, at most 4.0 min" in text
    for seed in range(5):
        write(tmp_path / f"bitflip-smoke/b/seed-{seed}", seed, [0, 0.96])
    with pytest.raises(SystemExit):
        compare.main(compare.Args("bitflip-smoke", "b"))
    assert "the stored curves are stale: k 4, now 3.0" in capsys.readouterr().err
    row = report.row("bitflip-smoke", "b", curves.read_all("bitflip-smoke", "b")[:1], 0.99)
    assert row == "| b | 1 | 0.960 [0.902, 0.984] | not reached | - | **stale**: k 4, now 3.0 |\n"  # Wilson by hand


def test_the_page_is_what_the_stored_curves_give(tmp_path):
    report.tables(tmp_path / "page.md")
    page = ROOT / "docs/benchmark.md"
    assert page.read_text() == (tmp_path / "page.md").read_text(), "run: python benchmark/report.py tables"


def test_pictures_are_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(curves, "CURVES", tmp_path)
    for seed, values in ((1, [0.1, 0.5, 0.9]), (2, [0.2, 0.4, 0.6])):
        write(tmp_path / f"bitflip-smoke/her/seed-{seed}", seed, values, eval_episodes=3)
    a, b = report.by_episode("bitflip-smoke", "her", curves.SUCCESS)
    assert (a.steps.tolist(), a.values.tolist(), b.values.tolist()) == ([0, 1, 2], [0.1, 0.5, 0.9], [0.2, 0.4, 0.6])

    args = pearl.Args(num_test_tasks=5, eval_episodes=2, num_train_tasks=2)
    task = pearl.Task(args)
    agent = pearl.Agent(task, args).state_dict()
    saved = {"format": "pearl_htr_ec", "args": dataclasses.asdict(args), "counters": {"global_step": 7}, "agent": agent}
    torch.save(saved, tmp_path / "model.pt")
    report.learning_curves(report.Picture(tmp_path / "a.png", ("bitflip-smoke",)))
    report.paths(tmp_path / "b.png", tmp_path / "model.pt", tasks=2)
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in "ab")
