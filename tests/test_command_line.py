"""What the command line answers to a word, without composing a config."""

import pytest

from decisionllm.checks import unknown_key_message, unknown_name_message
from decisionllm.command_line import (
    UsageError,
    convert_value,
    explain_dashes,
    explain_unquoted,
)

KEYS = ["dataset", "steps", "run", "optim.lr", "data.seed", "backbone.width", "backbone.lora_rank"]


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("stpes", "did you mean steps?"),
        ("rn", "did you mean run?"),
        ("datset", "did you mean dataset?"),
        ("backbone.lora_rnk", "did you mean backbone.lora_rank?"),
        ("lora_rank", "did you mean backbone.lora_rank?"),
        ("data.lr", "did you mean optim.lr?"),
        ("backbone.folder", "there are backbone.width, backbone.lora_rank"),
        ("nowhere.else", "--cfg job shows those there are"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(key, answer):
    assert unknown_key_message(key, KEYS) == f"no key {key!r} in the config; {answer}"


def test_an_unknown_name_is_answered_with_the_nearest_and_with_all():
    names = ["gaussian", "bins"]
    expected = "no head 'gausian'; did you mean gaussian? there are gaussian, bins"
    assert unknown_name_message("head", "gausian", names) == expected
    begins = unknown_name_message("env", "maze2d", ["tmaze", "maze2d-umaze", "maze2d-large"])
    assert begins.startswith("no env 'maze2d'; did you mean maze2d-umaze or maze2d-large? there")
    assert (
        unknown_name_message("head", "elsewhere", names)
        == "no head 'elsewhere'; there are gaussian, bins"
    )


@pytest.mark.parametrize(
    ("words", "write"),
    [
        (["--steps=10"], "steps=10"),
        (["seed=1", "--optim.lr", "1e-3"], "optim.lr=1e-3"),
        (["--batch-size", "--steps=1"], "batch_size=..."),
        (["--run=runs/x"], "run=runs/x"),
        (["--text", "goal in words"], "'text=goal in words'"),
    ],
)
def test_an_option_with_dashes_is_answered_with_how_to_write_it(words, write):
    assert explain_dashes(words).endswith(f": options have no dashes; write {write}")


@pytest.mark.parametrize(
    "word", ["--multirun", "--cfg", "--cfg=job", "--config-dir", "-m", "x=--y"]
)
def test_a_flag_of_hydra_is_no_option_with_dashes(word):
    assert explain_dashes(["seed=1", word, "job"]) is None


@pytest.mark.parametrize(
    ("key", "value", "default", "message"),
    [
        ("steps", "abc", 2, 'steps: expected a whole number, got "abc"'),
        ("steps", 1.5, 2, "steps: expected a whole number, got 1.5"),
        ("optim.lr", [1], 0.1, r"optim.lr: expected a number, got \[1\]"),
        ("fresh", 1, False, "fresh: expected true or false, got 1"),
        ("optim.clip", True, 1.0, "clip: expected a number, got true"),
        ("log.tracker", None, "none", "tracker: expected text, got null"),
        ("target_quantiles", 0.5, [0.9], "target_quantiles: expected a list, got 0.5"),
        ("data.seed", -2, 0, "data.seed: expected 0 or more, got -2"),
        ("seed", 2**64, 0, r"seed: expected less than 2\*\*63, got 18446744073709551616"),
    ],
)
def test_a_value_of_another_type_is_refused(key, value, default, message):
    with pytest.raises(UsageError, match=message):
        convert_value(key, value, default)


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("run=~/x", """run=~/x: Hydra reads a value with ~ in quotes alone; write 'run="~/x"'"""),
        ("run=runs/a(1)", """a value with ( in quotes alone; write 'run="runs/a(1)"'"""),
        ("dataset.task=To-{goal}", """with { in quotes alone; write 'dataset.task="To-{goal}"'"""),
        (
            "dataset.path=données.npz",
            """with é in quotes alone; write 'dataset.path="données.npz"'""",
        ),
        ("+env.arguments.a=b=c", """write '+env.arguments.a="b=c"'"""),
        ("run=[~/a,runs/b,x/lr=3]", """write 'run=["~/a",runs/b,"x/lr=3"]'"""),
        ("runs/first", "runs/first: expected KEY=VALUE, as in run=runs/first"),
    ],
)
def test_the_way_to_write_a_word_is_named(word, answer):
    assert answer in (explain_unquoted(["seed=3", word]) or "")
