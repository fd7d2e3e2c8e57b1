"""`decisionllm COMMAND --help`: what a user can choose and set, and nothing that is of another
command.
"""

import re
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
    assert {*re.findall(r"^  (\w+):", listed, re.M)} == GROUPS.get(name, set())
    assert "options and their defaults" in (options if choices else before)
    assert "hydra/" not in text and "defaults:\n" not in text


def test_options_are_shown_with_what_they_mean(capsys):
    text = printed(capsys, "serve", "-h")
    assert re.search(r"^  port=8080 +0: any free port$", text, re.M)
    assert re.search(r"^  act\.decode=null +mode, mean$", text, re.M)
    assert re.search(r"^  act\.stride=null +old steps that leave a full window", text, re.M)


def test_training_begins_with_examples_and_the_options_of_a_first_week(capsys):
    text = printed(capsys, "train", "dataset=synthetic", "--help")
    examples, first, rest = re.split("options of a first week:|choices, as", text)
    assert examples.count("\n  decisionllm train ") == 3
    options = re.findall(r"^  ([\w.]+)=", first, re.M)
    assert len(options) == 15 and {"dataset", "steps", "optim.lr", "run"} <= {*options}
    assert re.search(r"^  dataset=synthetic +the logged episodes", first, re.M)
    others = re.findall(r"^  ([\w.]+)=", rest, re.M)
    assert {"minutes", "optim.warmup", "dataset.episodes"} <= {*others}
    assert {*options}.isdisjoint(others)


def test_no_line_is_wider_than_a_terminal(capsys):
    lines = printed(capsys, "train", "dataset=synthetic", "--help").splitlines()
    assert [line for line in lines if len(line) > 100] == []


def test_options_of_a_choice_are_shown_where_it_is_made(capsys):
    text = printed(capsys, "data", "dataset=synthetic", "--help")
    assert re.search(r"^  dataset\.episodes=300 +number of episodes$", text, re.M)
    experiment = yaml.safe_load(
        (ROOT / "configs/experiment/umaze-llm.yaml").read_text(encoding="utf-8")
    )
    text = printed(capsys, "train", "experiment=umaze-llm", "--help")
    assert "\n  backbone.lora_rank=32 " in text
    assert f"\n  steps={experiment['steps']} " in text
    assert "\n  minutes=0.0 " in text


def test_actions_of_a_command_are_in_its_usage(capsys):
    usage = "usage: decisionllm journal report|verify|prune|restore [key=value ...]\n"
    assert usage in printed(capsys, "journal", "--help")
    assert usage in printed(capsys, "journal", "report", "--help")


def test_a_choice_that_does_not_exist_is_named_in_help_too(capsys):
    assert command("data", "dataset=synthetc", "--help") == 2
    assert "no dataset 'synthetc'; did you mean synthetic?" in capsys.readouterr().err
