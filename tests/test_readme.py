"""What README.md says exists: flags, logged tags, files."""

import dataclasses
import re
from pathlib import Path

import her_ddpg_fetch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
OTHER_FLAGS = {"--standalone", "--nproc-per-node", "--logdir", "--help", "--no"}  # torchrun, tensorboard, tyro


def test_every_flag_in_the_readme_exists():
    fields = {field.name.replace("_", "-") for field in dataclasses.fields(her_ddpg_fetch.Args)}
    for flag in set(re.findall(r"--[a-z][a-z-]*[a-z]", README)) - OTHER_FLAGS:
        name = flag.removeprefix("--")
        assert name in fields or name.removeprefix("no-") in fields, flag


def test_every_logged_tag_is_explained():
    source = (ROOT / "her_ddpg_fetch.py").read_text()
    tags = set(re.findall(r'"((?:charts|losses)/\w+)"', source))
    assert len(tags) >= 8
    tags |= {f"{group}/{key}" for group in ("charts", "eval") for key in ("success_rate", "moved_fraction")}
    assert tags <= set(re.findall(r"`((?:charts|losses|eval)/\w+)`", README))


def test_every_file_linked_from_the_readme_exists():
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).exists(), path
