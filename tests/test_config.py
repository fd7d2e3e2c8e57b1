"""Options as users write them."""

import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from decisionllm import choice
from decisionllm.checks import check_one_of, parse_ranges, split_list
from decisionllm.config import (
    NUMBERS,
    RULES,
    WORDS,
    TrainConfig,
    merge,
    to_plain_dicts,
    train_config,
)
from tests.conftest import LOOP, NANO, command


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("0-2,5", [0, 1, 2, 5]),
        (" 4 , 0-2,4", [4, 0, 1, 2]),
        (3, [3]),
        ([2, "4-5"], [2, 4, 5]),
        ("7-7", [7]),
    ],
)
def test_numbers_and_ranges_are_read_in_their_order_each_once(value, read):
    assert parse_ranges("env.agents", value) == read


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a", "env.x: expected such as 0-6 or 7,8, got 'a'"),
        ("1--2", "expected such as"),
        ("-1", "expected such as"),
        ("5-2", "expected ranges that go up, got '5-2'"),
    ],
)
def test_what_is_no_range_is_named(value, message):
    with pytest.raises(ValueError, match=message):
        parse_ranges("env.x", value)


def test_nothing_may_stand_for_something():
    assert parse_ranges("env.x", "", nothing="all") == []
    with pytest.raises(
        ValueError, match="env.x: expected such as 0-6 or 7,8, or nothing for all, got 'a'"
    ):
        parse_ranges("env.x", "a", nothing="all")
    for value in ("", "7,", "1,,2", " "):
        with pytest.raises(ValueError, match=f"env.x: expected such as 0-6 or 7,8, got '{value}'"):
            parse_ranges("env.x", value)


def test_numbers_are_of_those_that_there_are():
    assert parse_ranges("env.x", "2-3", within=range(2, 5)) == [2, 3]
    with pytest.raises(ValueError, match="env.x: expected 2 .. 4, got 5"):
        parse_ranges("env.x", "3-5", within=range(2, 5))


def test_a_list_may_be_words_with_commas():
    assert (
        split_list("a, b,c") == split_list(["a", "b", "c"]) == ["a", "b", "c"]
        and split_list("") == []
        and split_list("a,") == ["a", ""]
    )


def test_a_value_is_one_of_those_that_are_known():
    check_one_of("dataset.text", "goal", {"goal": 1})
    with pytest.raises(ValueError, match="dataset.text: expected one of none, goal, got 'gaol'"):
        check_one_of("dataset.text", "gaol", ("none", "goal"))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("backbone=nano", "nano"),
        ("backbone=nano backbone.width=64", "nano"),
        ("backbone=smollm2", "smollm2"),
        ("backbone=smollm2-summary", "smollm2-summary"),
        ("backbone._target_=mymodels.llama", "llama"),
        ("backbone=nano backbone._target_=mylab.nets.Mamba", "Mamba"),
        ("backbone=pretrained backbone.folder=/x/models/SmolLM", "SmolLM"),
        ("backbone=pretrained backbone.folder=models/SmolLM-2.1/", "SmolLM-2.1"),
        ("backbone=pretrained 'backbone.folder=\"/x/my models (new), 2/\"'", "my-models-new-2"),
        ("backbone=pretrained backbone.folder=/x/Qwen-Q4.gguf", "Qwen-Q4"),
        ("backbone=pretrained backbone.folder=/", "pretrained"),
        ("backbone=pretrained backbone.hub_id=Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("backbone=pretrained backbone.folder=/x/SmolLM name=mine", "mine"),
        ("backbone=smollm2 backbone.weights=shuffled", "smollm2-shuffled"),
        ("experiment=umaze-llm", "smollm2-summary"),
        ("experiment=umaze-llm backbone=pretrained-summary backbone.folder=/x/Qwen.gguf", "Qwen"),
        ("experiment=umaze-llm backbone=nano", "nano"),
        ("backbone=pretrained backbone.folder=/x/SmolLM experiment=auction", "nano"),
    ],
)
def test_a_policy_is_named_after_what_is_built(words, name, capsys):
    """The run directory follows, unless an experiment names it."""
    assert (
        command(
            "train", "dataset=synthetic", "seed=3", *shlex.split(words), "--cfg", "job", "--resolve"
        )
        == 0
    )
    composed = yaml.safe_load(capsys.readouterr().out)
    assert composed["name"] == name
    if "experiment" not in words:
        assert composed["run"] == f"runs/synthetic/{name}-auto-3"


# options that break each rule of a config, by what the message begins with
BROKEN = {
    "window: expected more than 0, got 0": {"window": 0},
    "steps: expected more than 0, got 0": {"steps": 0},
    "data.rows_per_text: expected more than 0, got 0": {"data": {"rows_per_text": 0}},
    "optim.batch_size: expected more than 0, got 0": {"optim": {"batch_size": 0}},
    "optim.accumulate: expected more than 0, got 0": {"optim": {"accumulate": 0}},
    "optim.lr: expected more than 0, got -0.1": {"optim": {"lr": -0.1}},
    "log.every: expected more than 0, got 0": {"log": {"every": 0}},
    "log.save_every: expected more than 0, got -1": {"log": {"save_every": -1}},
    "log.rollout_episodes: expected more than 0, got 0": {"log": {"rollout_episodes": 0}},
    "log.rollout_every: expected 0 or more, got -1": {"log": {"rollout_every": -1}},
    "log.validation_batches: expected 0 or more, got -1": {"log": {"validation_batches": -1}},
    "text_wordings: expected 0 or more, got -1": {"text_wordings": -1},
    "minutes: expected 0 or more, got -0.5": {"minutes": -0.5},
    "model.return_horizon: expected 0 or more, got -1": {"model": {"return_horizon": -1}},
    "optim.weight_decay: expected 0 or more, got -1": {"optim": {"weight_decay": -1}},
    "optim.lr_backbone: expected 0 or more, got -0.1": {"optim": {"lr_backbone": -0.1}},
    "optim.warmup: expected 0 or more, got -1": {"optim": {"warmup": -1}},
    "optim.clip: expected 0 or more, got -1": {"optim": {"clip": -1}},
    "act.stride: expected 0 or more, got -1": {"act": {"stride": -1}},
    "seed: expected 0 or more, got -1": {"seed": -1},
    "data.seed: expected 0 or more, got -1": {"data": {"seed": -1}},
    "act.target_quantile: expected a share within 0 .. 1, got 2": {"act": {"target_quantile": 2}},
    "data.held_out: expected a share within 0 .. 1, got 2": {"data": {"held_out": 2}},
    "data.min_return_quantile: expected a share within 0 .. 1, got 2": {
        "data": {"min_return_quantile": 2}
    },
    "data.step_discount: expected above 0 and at most 1, got 1.5": {"data": {"step_discount": 1.5}},
    "data.fraction: expected above 0 and at most 1, got 0": {"data": {"fraction": 0}},
    "act.decode: expected mode, mean, sample or unclipped, got best": {"act": {"decode": "best"}},
    "team.execution: expected per_agent, joint or both, got alone": {
        "team": {"execution": "alone"}
    },
    "model.condition_on: expected return_to_go or none, got reward": {
        "model": {"condition_on": "reward"}
    },
    "optim.precision: expected auto, no or bf16, got fp8": {"optim": {"precision": "fp8"}},
    "log.tracker: expected tensorboard, wandb, trackio or none, got paper": {
        "log": {"tracker": "paper"}
    },
    "device: expected auto, cpu or cuda, got gpu": {"device": "gpu"},
    "log.keep_best: expected nothing, loss or score, got best": {"log": {"keep_best": "best"}},
    "log.keep_best: expected with log.keep_best=score log.rollout_every above 0": {
        "log": {"keep_best": "score"}
    },
    "log.keep_best: expected with log.keep_best=loss data.held_out and": {
        "log": {"keep_best": "loss"},
        "data": {"held_out": 0.0},
    },
    "data.rows_per_text: expected data.rows_per_text=1 unless team.execution=per_agent": {
        "data": {"rows_per_text": 2},
        "team": {"execution": "joint"},
    },
    "text: expected team.execution=per_agent with text=paraphrased": {
        "text": "paraphrased",
        "team": {"execution": "both"},
    },
}


def test_a_seed_beyond_64_bits_is_refused():
    right = to_plain_dicts(TrainConfig({}, {}, {}))
    assert train_config(merge(right, {"seed": 2**63 - 1})).seed == 2**63 - 1
    for name, wrong in {"seed": {"seed": 2**64}, "data.seed": {"data": {"seed": 2**63}}}.items():
        with pytest.raises(ValueError, match=rf"^{name}: expected less than 2\*\*63, got \d+$"):
            train_config(merge(right, wrong))


def test_each_rule_of_a_config_is_broken_by_one_of_these():
    names = [*NUMBERS, *WORDS, *(rule.names[0] for rule in RULES)]
    right = to_plain_dicts(TrainConfig({}, {}, {}))
    assert to_plain_dicts(train_config(right)) == right
    for (message, wrong), name in zip(BROKEN.items(), names, strict=True):
        assert message.startswith(f"{name}: expected")
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            train_config(merge(right, wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stepz": 3}, "no key 'stepz' in the config; did you mean steps"),
        ({"optim": {"lrr": 0.1}}, "no key 'optim.lrr' in the config; did you mean optim.lr"),
        ({"steps": "many"}, "steps: Value 'many' of type 'str' could not be converted"),
        (
            {"dataset": "synthetic"},
            "dataset: expected a config node, got 'synthetic'; take choice(\"dataset\", 'synthetic')",
        ),
        ({"head": 3}, 'head: expected a config node, got int; choice("head", NAME, ...) makes one'),
        (
            {"backbone": Path()},
            "got PosixPath; decisionllm.save_backbone(model, tokenizer, folder)",
        ),
    ],
)
def test_in_python_a_wrong_option_is_one_clear_error(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        train_config(asdict(TrainConfig({}, {}, {})) | wrong)


def test_in_python_an_option_left_out_has_its_default_and_a_reference_its_value():
    options = {"dataset": choice("dataset", "synthetic"), "backbone": {}, "head": {}, "steps": "7"}
    config = train_config(options | {"optim": {"lr": 0.5}})
    assert config.dataset["text"] == config.text == "auto"
    assert (config.steps, config.optim.lr_backbone) == (7, 0.5)
    with pytest.raises(ValueError, match="missing mandatory value: head"):
        train_config({"dataset": {}, "backbone": {}})


def test_in_python_a_node_has_no_options_of_the_default_that_it_replaces():
    own = {"_target_": "mylab.Tokenizer", "size": 3}
    options = to_plain_dicts(TrainConfig({}, {}, {})) | {"tokenizer": own}
    assert train_config(options).tokenizer == own


def test_a_rule_is_kept_by_the_command_before_anything_is_written(tmp_path, capsys):
    assert command("train", *LOOP, *NANO, f"run={tmp_path}/run", "data.step_discount=0") == 1
    assert "data.step_discount: expected above 0 and at most 1, got 0" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
