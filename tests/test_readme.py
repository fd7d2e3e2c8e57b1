"""The README's commands are true: each composes, the first run really runs, and what it names exists."""

import re
import shlex
from pathlib import Path

import pytest

from decisionllm.__main__ import COMMANDS
from tests.conftest import command

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = sorted(set(re.findall(rf"(?:^|`)decisionllm ((?:{'|'.join(COMMANDS)}) [^`\n<]+)", README, re.M)))


def test_there_are_commands():
    assert {line.split()[0] for line in COMMANDS} == set(COMMANDS) and len(COMMANDS) > 8


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_composes(line, capsys):
    verb, *overrides = shlex.split(line)
    assert (
        command(verb, *(o for o in overrides if o != "--multirun" and not re.search(r"seed=[0-4,]+$", o)), "--cfg", "job") == 0
    )


def test_the_first_run_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = README.split("## A first run")[1].split("```sh\n")[1].split("```")[0]
    for line in block.splitlines():
        verb, *overrides = shlex.split(line)[1:]
        assert command(verb, *overrides, *(["steps=20", "log.tracker=none"] if verb == "train" else [])) == 0
    assert (tmp_path / "runs" / "report.html").is_file() and (tmp_path / "runs" / "results.jsonl").is_file()


def test_what_the_tree_names_exists():
    tree = README.split("## The house")[1].split("```")[1]
    for line in tree.splitlines():
        for name in re.findall(r"^ {0,2}([\w./]+(?:/|\.py))", line):
            base = ROOT / "decisionllm" if line.startswith("  ") else ROOT
            assert (base / name).exists(), name


@pytest.mark.parametrize(
    "target", re.findall(r"`make (\w+)`|^make (\w+)", README + (ROOT / "CONTRIBUTING.md").read_text(), re.M)
)
def test_every_make_target_exists(target):
    assert re.search(rf"^{''.join(target)}:", (ROOT / "Makefile").read_text(), re.M)
