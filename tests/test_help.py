"""`decisionllm COMMAND --help`: what a user can choose and set, and nothing that is of another
command.
"""

from pathlib import Path

import pytest
import yaml

from decisionllm.__main__ import COMMANDS
from tests.conftest import command

ROOT = Path(__file__).parent.parent
GROUPS = {
    "baseline": {"dataset", "env", "transform"},
    "compare": {"dataset"},
    "data": {"dataset", "env", "transform"},
    "evaluate": {"env"},
    "scale": {"study"},
    "train": {
        "augment",
        "backbone",
        "dataset",
        "env",
        "experiment",
        "fill_actions",
        "head",
        "objective",
        "planner",
        "text_encoder",
        "tokenizer",
        "transform",
    },
}


def printed(capsys, *words):
    assert command(*words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_lists_its_own_choices_alone(name, capsys):
    text = printed(capsys, name, "--help")
    before, choices, after = text.partition("choices, as group=choice:\n")
    listed, _, options = after.partition("\n\n")
    assert before.startswith(f"decisionllm {name}: {COMMANDS[name]}")
    assert {line.split(":")[0].strip() for line in listed.splitlines()} == GROUPS.get(name, set())
    assert "options and their defaults" in (options if choices else before)
    assert "hydra/" not in text and "defaults:\n" not in text


def test_options_are_shown_with_what_they_mean(capsys):
    text = printed(capsys, "serve", "-h")
    assert "\nport: 8080 # 0: any free port\n" in text
    assert "\n  decode: null # mode, mean\n" in text


def test_options_of_a_choice_are_shown_where_it_is_made(capsys):
    assert "episodes: 300" in printed(capsys, "data", "dataset=synthetic", "--help")
    experiment = yaml.safe_load(
        (ROOT / "configs/experiment/umaze-llm.yaml").read_text(encoding="utf-8")
    )
    text = printed(capsys, "train", "experiment=umaze-llm", "--help")
    assert "\n  lora_rank: 32\n" in text
    assert f"\nsteps: {experiment['steps']}\n" in text
    assert "\nminutes: 0.0\n" in text


def test_actions_of_a_command_are_in_its_usage(capsys):
    usage = "usage: decisionllm journal report|verify|prune|restore [key=value ...]\n"
    assert usage in printed(capsys, "journal", "--help")
    assert usage in printed(capsys, "journal", "report", "--help")


def test_a_choice_that_does_not_exist_is_named_in_help_too(capsys):
    assert command("data", "dataset=synthetc", "--help") == 2
    assert "no dataset 'synthetc'; did you mean synthetic?" in capsys.readouterr().err
