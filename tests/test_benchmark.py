"""benchmark/: the experiments' commands, the gate that notices worse learning, the table."""

import csv
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import gymnasium_robotics
import numpy as np
import pytest
import tyro
from experiments import EXPERIMENTS, Experiment, Peer

ROOT = Path(__file__).parents[1]
SEEDS = (101, 102, 103, 104, 105)


# -------------------------------------------------------------------------------------------------------- experiments
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_commands_are_what_their_script_takes(name):
    gym.register_envs(gymnasium_robotics)
    experiment = EXPERIMENTS[name]
    for variant in experiment.variants:
        assert re.fullmatch(r"[\w.-]+", variant)
        if not (ROOT / experiment.script_name(variant)).exists():
            continue
        script = importlib.import_module(Path(experiment.script_name(variant)).stem)
        args = tyro.cli(script.Args, args=experiment.flags(variant))
        script.check(args)
        if getattr(args, "env_module", None):
            importlib.import_module(args.env_module)
        assert args.env_id in gym.registry


def test_runs_come_seed_by_seed_and_a_command_ends_with_its_seed():
    experiment = Experiment("", "a.py", {"x": "--k 1", "y": ""}, (1, 2), arguments="--n 3", seeds_of={"y": (1,)})
    assert experiment.runs() == [("x", 1), ("y", 1), ("x", 2)]
    assert experiment.command("x", 2) == ["a.py", "--n", "3", "--k", "1", "--seed", "2"]
    experiment.processes_of, experiment.script_of = {"x": 2}, {"x": "b.py"}
    launched = "-m torch.distributed.run --standalone --nproc-per-node 2 b.py --n 3 --k 1 --seed 2"
    assert experiment.command("x", 2) == launched.split()


def test_every_stored_curve_belongs_to_a_variant():
    for path in (ROOT / "benchmark/curves").glob("*/*/seed-*"):
        name, variant, seed = path.parts[-3:]
        assert variant in EXPERIMENTS[name].variants
        assert json.loads((path / "args.json").read_text())["args"]["seed"] == int(seed.removeprefix("seed-"))


def test_run_keeps_curves_skips_them_and_reports_failures(tmp_path, monkeypatch, capsys):
    import run

    tiny = "--n-bits 3 --total-timesteps 200 --eval-frequency 100 --eval-episodes 10"
    broken = {"broken": "README.md", "absent": "no.py"}  # scripts; the first is no Python
    variants = {"fine": "", "broken": "", "absent": ""}
    tiny = Experiment("", "her_dqn_bitflip.py", variants, arguments=tiny, charts=("charts/SPS",), script_of=broken)
    monkeypatch.setitem(EXPERIMENTS, "tiny", tiny)
    places = {"curves": tmp_path / "curves", "runs": tmp_path / "runs"}
    assert run.main(run.Args("tiny", seeds=(7,), **places)) == 1
    said = capsys.readouterr().err
    assert "tiny fine seed 7: done" in said and "tiny absent seed 7: no.py is not there" in said
    assert f"tiny broken seed 7: see {tmp_path}" in said
    assert [path.parent.name for path in (tmp_path / "curves/tiny").glob("*/seed-7")] == ["fine"]
    kept = tmp_path / "curves/tiny/fine/seed-7"
    assert sorted(path.name for path in kept.iterdir()) == ["args.json", "charts.csv", "eval.csv"]
    with open(kept / "charts.csv") as file:
        rows = list(csv.DictReader(file))
    assert rows and {(row["seed"], row["metric"]) for row in rows} == {("7", "charts/SPS")}
    assert run.main(run.Args("tiny", only="fine", seeds=(7,), **places)) == 0
    assert "seed 7" not in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- the gate
def write(folder, seed, values, total=2000, **changed):
    """A stored curve of bitflip-smoke: values (evaluations,), evenly over `total` steps."""
    import curves

    folder.mkdir(parents=True)
    args = curves.args_now("bitflip-smoke", "her") | {"seed": seed, "total_timesteps": total} | changed
    about = {"args": args, "versions": {"torch": "2.0"}, "machine": {"cores": 2}, "commit": "0123456789"}
    (folder / "args.json").write_text(json.dumps(about))
    with open(folder / "eval.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("seed", "global_step", "metric", "value", "n_episodes", "wall_s"))
        for step, value in zip(np.linspace(0, total, len(values)).astype(int), values):
            writer.writerow((seed, step, "eval/success_rate", value, 100, step / 10))


def learning(seed, slower=1.0, best=1.0):
    """21 success rates: a logistic curve whose middle differs from seed to seed, 100 episodes an evaluation."""
    rng = np.random.default_rng(seed)
    middle = 0.35 * slower * np.exp(rng.normal(0, 0.05))
    return rng.binomial(100, best / (1 + np.exp(-(np.linspace(0, 1, 21) - middle) / 0.05))) / 100


@pytest.fixture
def stored(tmp_path):
    pytest.importorskip("scipy")
    for seed in range(1, 11):
        write(tmp_path / f"stored/bitflip-smoke/her/seed-{seed}", seed, learning(seed))
    return tmp_path / "stored"


@pytest.fixture
def gate(stored, tmp_path, capsys):
    """gate(what, **changed) judges 5 new seeds with the values what(seed): exit status, verdicts, refusals."""
    import compare

    def run(what=learning, seeds=SEEDS, options=None, **changed):
        candidate = tmp_path / "candidate"
        shutil.rmtree(candidate, ignore_errors=True)
        for i, seed in enumerate(seeds):
            write(candidate / f"bitflip-smoke/her/seed-{i}", seed, what(seed), **changed)
        candidate.mkdir(exist_ok=True)
        args = compare.Args("bitflip-smoke", candidate=candidate, curves=stored, **(options or {}))
        status = compare.main(args)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_honest_reruns_pass(gate):
    for first in range(1000, 1100, 10):
        status, out, err = gate(seeds=range(first, first + 5))
        assert (status, err) == (0, "")
        assert out.startswith("bitflip-smoke her: PASS: learns as well as the stored curves: area under the curve")


@pytest.mark.parametrize(
    "what, reason",
    [
        (lambda seed: learning(seed, slower=1.5), "area under the curve"),
        (lambda seed: learning(seed, best=0.8), "final value 0.8"),
        (lambda seed: 0 * learning(seed), "5 of 5 seeds failed, of the stored ones 0 of 10"),
        (lambda seed: learning(seed) * (seed > 103), "3 of 5 seeds failed, of the stored ones 0 of 10"),
    ],
    ids=["slower", "lower", "dead", "most dead"],
)
def test_worse_learning_is_a_regression(gate, what, reason):
    status, out, err = gate(what)
    assert (status, err) == (1, "")
    assert out.startswith("bitflip-smoke her: REGRESSION: learns worse than the stored curves: ") and reason in out
    assert out.count("\n") == 1


def test_faster_learning_is_better(gate):
    status, out, _ = gate(lambda seed: learning(seed, slower=0.6))
    assert status == 0 and "BETTER" in out


def test_seeds_that_scatter_are_inconclusive(gate):
    status, out, _ = gate(lambda seed: learning(seed, slower=1.8 if seed % 2 == 0 else 0.9))
    assert status == 2 and "INCONCLUSIVE: a loss of 20% is not ruled out, add seeds" in out


@pytest.mark.parametrize(
    "what, message",
    [
        ({"seeds": SEEDS[:4]}, "4 new seeds are too few, --min-seeds is 5"),
        ({"seeds": ()}, "0 new seeds are too few"),
        ({"seeds": (1, 102, 103, 104, 105)}, "seed 1 is there twice"),
        ({"seeds": (101, 101, 103, 104, 105)}, "seed 101 is there twice"),
        ({"strategy": "none"}, "arguments of seed 101 are not those of stored seed 1: strategy future, now none"),
        ({"new_flag": 1}, "new_flag is new"),
        ({"what": lambda seed: learning(seed)[:20]}, "seed 101 was stopped or not evaluated at the steps of stored"),
        ({"what": lambda seed: learning(seed) * np.nan}, "has a value that is not a number of eval/success_rate"),
        ({"options": {"min_seeds": 11}}, "10 stored seeds are too few"),
    ],
)
def test_what_cannot_be_judged_has_status_2_and_one_line(gate, what, message):
    status, out, err = gate(**what)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("bitflip-smoke her: could not judge: ") and message in err


def test_neutral_and_named_arguments_may_differ(gate):
    assert gate(run_dir="elsewhere", num_threads=2, save_model=True)[0] == 0
    assert gate(batch_size=64, options={"despite": ("batch-size",)})[0] == 0


def test_accepted_curves_replace_the_stored_ones_and_the_reason_is_kept(gate, stored):
    import compare
    from curves import read_all

    candidate = stored.parent / "candidate"
    assert gate(lambda seed: learning(seed, best=0.8), options={"accept": "a new task"})[0] == 0
    assert [curve.seed for curve in read_all(stored, "bitflip-smoke", "her")] == list(SEEDS)
    assert sorted(path.name for path in (stored / "bitflip-smoke").iterdir()) == ["her"]
    assert gate(seeds=(1, 2), options={"accept": "for lack of time"})[0] == 0  # too few to be judged
    lines = (stored / "CHANGELOG.md").read_text().splitlines()
    assert "bitflip-smoke her: a new task. It was judged: REGRESSION: learns worse" in lines[0]
    assert "for lack of time. It was judged: could not judge: 2 new seeds are too few" in lines[1] and len(lines) == 2
    for options, message in (({}, "--accept needs"), ({"candidate": stored / "bitflip-smoke"}, "has no curves of")):
        with pytest.raises(compare.Refused, match=message):
            compare.main(compare.Args("bitflip-smoke", accept="why", curves=stored, **options))
    assert [curve.seed for curve in read_all(stored, "bitflip-smoke", "her")] == [1, 2] and candidate.is_dir()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("bitflop",), "no experiment bitflop"),
        (("bitflip", "--only", "n11-her"), "matches no variant of bitflip"),
        (("bitflip", "--only", "("), "is not a regular expression"),
        (("bitflip", "--candidate", "nowhere"), "nowhere is not a folder"),
        (("bitflip", "--only", "n10-her", "--seeds", "1", "102", "103", "104", "105"), "seed 1 is there twice"),
        (("bitflip", "--only", "n10-her", "--seeds", "101"), "1 new seeds are too few"),
        (("bitflip-settings", "--only", "default", "--curves", "nowhere"), "nothing is stored"),
        ((), "which experiment?"),
        (("--stale", "--only", "her"), "--only chooses variants of an experiment"),
    ],
)
def test_bad_input_of_compare_is_one_line_and_status_2(arguments, message, monkeypatch, capsys):
    pytest.importorskip("scipy")
    import compare
    from experiments import command_line

    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    with pytest.raises(SystemExit) as exit:
        command_line(compare.main, compare.__doc__)
    out, err = capsys.readouterr()
    assert (exit.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and message in err


def test_curves_of_other_defaults_are_stale(tmp_path, monkeypatch, capsys):
    pytest.importorskip("scipy")
    import compare

    args = compare.Args("bitflip-smoke", curves=tmp_path, stale=True)
    write(tmp_path / "bitflip-smoke/her/seed-1", 1, learning(1), total=2400, run_dir="elsewhere")
    assert compare.main(args) == 0
    changed = {"total": 2400, "k": 8, "gone": True}
    write(tmp_path / "bitflip-smoke/her/seed-2", 2, learning(2), **changed)
    assert compare.main(args) == 1
    assert capsys.readouterr().out == "bitflip-smoke her: STALE: gone True, now gone; k 8, now 4\n"
    changed = Experiment("", "her_dqn_bitflip.py", {"her": "--removed 1"})
    monkeypatch.setitem(EXPERIMENTS, "bitflip-smoke", changed)
    assert compare.main(args) == 1
    assert capsys.readouterr().out.endswith("STALE: her_dqn_bitflip.py does not take --removed 1 any more\n")
    changed.script = "no.py"
    assert compare.main(args) == 1
    assert capsys.readouterr() == ("bitflip-smoke her: STALE: no.py is not there\n", "")


# ---------------------------------------------------------------------------------------------------------- the table
def test_a_curve_by_hand(tmp_path):
    pytest.importorskip("scipy")
    from curves import read

    write(tmp_path / "a", 3, [0, 0.2, 0.6, 0.9, 1.0], total=400)
    curve = read(tmp_path / "a", "eval/success_rate")
    assert (curve.seed, curve.auc, curve.final, curve.reached(0.9), curve.stopped) == (3, 0.54, 1.0, 3, False)
    write(tmp_path / "b", 3, [0.0] * 18 + [0.3, 0.6, 0.9])
    assert read(tmp_path / "b", "eval/success_rate").final == pytest.approx(0.6)


def test_the_table_by_hand(tmp_path, monkeypatch):
    pytest.importorskip("scipy")
    import table

    peers = (Peer("they", 5000, 0.9, "about"),)
    experiment = EXPERIMENTS["bitflip-smoke"]
    experiment = Experiment("works", experiment.script, {"her": "", "dqn": ""}, cost="2 s", peers=peers, threshold=0.5)
    experiment.arguments = EXPERIMENTS["bitflip-smoke"].arguments
    monkeypatch.setitem(EXPERIMENTS, "bitflip-smoke", experiment)
    # Finals 0, 0.5, 0.7, 0.9, 1.0: without the lowest and the highest, 0.7. Steps to 0.5 of the four that reach it:
    # 2400, 2400, 1200, 1200, wall_s a tenth of it.
    for seed, values in enumerate(([0, 0, 0], [0, 0, 0.5], [0, 0.4, 0.7], [0, 0.5, 0.9], [0, 0.9, 1]), 1):
        write(tmp_path / f"bitflip-smoke/her/seed-{seed}", seed, values, total=2400)
    text = table.section("bitflip-smoke", tmp_path)
    assert "Works. One run: 2 s." in text
    row = re.search(r"^\| her \| 5 \| (0.700) \[(.*), (.*)\] \((0.000)\) \| (.*) \| (.*) \|  \|$", text, re.M)
    assert row.group(1, 4, 5, 6) == ("0.700", "0.000", "1,800 (4 of 5)", "3")
    assert 0 <= float(row[2]) < 0.5 and 0.9 <= float(row[3]) <= 1
    assert "| dqn | 0 | not run yet | | |  |" in text
    assert "Made by commit 0123456 with torch 2.0; 2 cores." in text
    assert "| they | 0.9 | 5,000 | about |" in text
    write(tmp_path / "bitflip-smoke/dqn/seed-1", 1, [0, 0.1], total=2400, k=8)
    notes = "**stale**: k 8, now 4 |"
    assert f"| dqn | 1 | 0.100 (0.100) | not reached | - | {notes}" in table.section("bitflip-smoke", tmp_path)


def test_the_page_is_what_the_stored_curves_give():
    pytest.importorskip("scipy")
    import table

    assert table.page(table.CURVES) == (ROOT / "docs/benchmark.md").read_text(), "run: python benchmark/table.py"


def test_plots_are_drawn_and_nothing_to_draw_is_said(stored, tmp_path):
    pytest.importorskip("matplotlib")
    import plot

    args = plot.Args(("bitflip-smoke",), output=tmp_path / "a.png", curves=stored)
    assert plot.main(args) == 0 and (tmp_path / "a.png").stat().st_size > 10_000
    args.curves = tmp_path / "nowhere"
    with pytest.raises(plot.Refused, match="nothing to draw"):
        plot.main(args)


def test_adaptation_is_drawn_by_episode_at_the_last_evaluation(tmp_path):
    pytest.importorskip("scipy")
    pytest.importorskip("matplotlib")
    import plot

    for seed, values in ((1, (0.1, 0.5, 0.9)), (2, (0.2, 0.4, 0.6))):
        folder = tmp_path / f"bitflip-smoke/her/seed-{seed}"
        write(folder, seed, [0, 1])
        with open(folder / "eval.csv", "a") as file:
            for episode, value in enumerate(values):
                file.write(f"{seed},0,eval/success_rate_ep{episode},0,100,0\n")
                file.write(f"{seed},2000,eval/success_rate_ep{episode},{value},100,9\n")
    args = plot.Args(("bitflip-smoke",), output=tmp_path / "a.png", curves=tmp_path, adaptation=True)
    (x, y), (_, z) = plot.lines(args, "bitflip-smoke", "her", "eval/success_rate")
    assert (x.tolist(), y.tolist(), z.tolist()) == ([0, 1, 2], [0.1, 0.5, 0.9], [0.2, 0.4, 0.6])
    assert plot.main(args) == 0


# -------------------------------------------------------------------------------------------------- the gate, for real
def train(folder, name, variant, *commands):
    """Train seeds of a bit-flipping variant, all in one process, into folders of curves.

    A command is (folder's name, seeds, flags besides the variant's own); returns the folders.
    """
    code = """
import json, sys, tyro, her_dqn_bitflip as dqn
for flags in json.loads(sys.argv[1]):
    dqn.train(tyro.cli(dqn.Args, args=flags), None)
"""
    runs = [
        [*EXPERIMENTS[name].flags(variant), *flags, "--quiet", "--run-dir", str(folder / each), "--seed", str(seed)]
        for each, seeds, flags in commands
        for seed in seeds
    ]
    subprocess.run([sys.executable, "-c", code, json.dumps(runs)], cwd=ROOT, capture_output=True, check=True)
    for path in list(folder.glob("*/*/args.json")):
        seed = json.loads(path.read_text())["args"]["seed"]
        shutil.move(path.parent, path.parents[1] / name / variant / f"seed-{seed}")
    return [folder / each for each, *_ in commands]


def judged(folder, name, variant, capsys, **options):
    import compare

    status = compare.main(compare.Args(name, only=variant, candidate=folder, **options))
    return status, capsys.readouterr().out


def test_8_bits_learn_as_they_did_and_not_without_relabelling(tmp_path, capsys):
    pytest.importorskip("scipy")
    commands = ("her", SEEDS[:3], ()), ("none", SEEDS[:2], ("--strategy", "none"))
    her, none = train(tmp_path, "bitflip-smoke", "her", *commands)
    assert judged(her, "bitflip-smoke", "her", capsys, min_seeds=3)[0] == 0
    status, said = judged(none, "bitflip-smoke", "her", capsys, min_seeds=2, despite=("strategy",))
    assert status == 1 and "2 of 2 seeds failed" in said


@pytest.mark.regression
def test_10_bits_learn_as_the_stored_curves_do(capsys):
    pytest.importorskip("scipy")
    import compare

    status = compare.main(compare.Args("bitflip", only="n10-her"))
    assert status == 0, capsys.readouterr()


@pytest.mark.regression
def test_15_bits_without_relabelling_are_a_regression(tmp_path, capsys):
    pytest.importorskip("scipy")
    (none,) = train(tmp_path, "bitflip", "n15-her", ("none", SEEDS, ("--strategy", "none")))
    status, said = judged(none, "bitflip", "n15-her", capsys, despite=("strategy",))
    assert status == 1 and "5 of 5 seeds failed" in said
