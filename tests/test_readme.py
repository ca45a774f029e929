"""What README.md and docs/ say exists: flags, logged tags, files."""

import dataclasses
import re
from pathlib import Path

import pytest

import her_ddpg_fetch
import her_dqn_bitflip
import pearl_htr_ec
import pearl_htr_ser

ROOT = Path(__file__).parents[1]
SCRIPTS = {module.__name__: module for module in (her_ddpg_fetch, her_dqn_bitflip, pearl_htr_ec, pearl_htr_ser)}
PAGES = ["README.md", "benchmark/README.md", *(f"docs/{name}.md" for name in SCRIPTS)]
OTHER_FLAGS = {"--standalone", "--nproc-per-node", "--logdir", "--help", "--no"}  # torchrun, tensorboard, tyro


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_of_a_page_exists(page):
    scripts = [module for name, module in SCRIPTS.items() if page in ("README.md", f"docs/{name}.md")]
    fields = {field.name.replace("_", "-") for module in scripts for field in dataclasses.fields(module.Args)}
    if "README" in page:  # the commands in benchmark/ import what is not always installed: read their Args as text
        commands = "".join(path.read_text() for path in (ROOT / "benchmark").glob("*.py"))
        fields |= {name.replace("_", "-") for name in re.findall(r"^    (\w+): ", commands, re.M)}
    for flag in set(re.findall(r"--[a-z][a-z-]*[a-z]", (ROOT / page).read_text())) - OTHER_FLAGS:
        name = flag.removeprefix("--")
        assert name in fields or name.removeprefix("no-") in fields, flag


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_logged_tag_is_explained(name):
    tags = set(re.findall(r'"((?:charts|losses)/\w+)"', (ROOT / f"{name}.py").read_text()))
    assert len(tags) >= 7
    tags |= {f"{group}/{key}" for group in ("charts", "eval") for key in ("success_rate", "episodic_return")}
    assert tags <= set(re.findall(r"`((?:charts|losses|eval)/\w+)`", (ROOT / f"docs/{name}.md").read_text()))


@pytest.mark.parametrize("page", PAGES)
def test_every_file_linked_from_a_page_exists(page):
    for path in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
        assert ((ROOT / page).parent / path).exists(), path
