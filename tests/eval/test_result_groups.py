"""The options that identify the configuration of a run: few, and the same for all seeds."""

import pytest

from decisionllm.config import TrainConfig, to_plain_dicts
from decisionllm.eval.result_groups import effective_value, identifying_options
from decisionllm.registry import choice


def run_config(**options):
    nodes = {
        "dataset": choice("dataset", "synthetic"),
        "backbone": choice("backbone", "nano"),
        "head": choice("head", "gaussian"),
    }
    return to_plain_dicts(TrainConfig(**nodes | {"env": choice("env", "synthetic")} | options))


SEEDS = {"dataset.seed": 0, "data.seed": 0}
PLAIN = {"dataset": "synthetic", "backbone": "nano", "head": "gaussian"} | SEEDS


def test_options_at_their_defaults_are_left_out_and_those_that_refer_to_others():
    """dataset.text, env.text and optim.lr_backbone refer to other options."""
    assert identifying_options(run_config()) == PLAIN
    changed = run_config(text="goal")
    changed["optim"] |= {"lr": 0.25, "lr_backbone": 0.25}
    assert identifying_options(changed) == PLAIN | {"text": "goal", "optim.lr": 0.25}


def test_seeds_places_and_the_log_are_no_part_of_it():
    same = run_config(
        seed=3, run="runs/other", name="mine", device="cpu", cache_dir="/x", fresh=True
    )
    same["log"]["every"] = 7
    assert identifying_options(same) == PLAIN


def test_the_least_loss_is_of_the_losses_that_were_measured():
    config = run_config()
    config["log"] |= {"keep_best": "loss", "every": 7}
    assert identifying_options(config)["log.every"] == 7


def test_a_choice_is_named_by_what_was_built():
    """nano and tiny are one callable of other sizes."""
    tiny = choice("backbone", "tiny")
    assert identifying_options(run_config(backbone=tiny | {"layers": 5})) == PLAIN | {
        "backbone": "tiny",
        "backbone.layers": 5,
    }
    wide = choice("backbone", "nano", width=256, inner=1408, layers=4)
    assert identifying_options(run_config(backbone=wide))["backbone"] == "tiny", (
        "the same numbers are the same backbone"
    )
    assert identifying_options(run_config(backbone=wide, name="nano"))["backbone.width"] == 256
    own = identifying_options(run_config(backbone={"_target_": "mylab.Llama", "layers": 2}))
    assert own == PLAIN | {"backbone": "mylab.Llama", "backbone.layers": 2}


def test_an_environment_is_named_where_it_is_not_that_of_the_data():
    assert identifying_options(run_config(env={"_target_": "none"})) == PLAIN | {"env": "none"}
    assert identifying_options(
        run_config(env=choice("env", "synthetic", goal="south"))
    ) == PLAIN | {"env.goal": "south"}


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("objective", "likelihood"),
        ("tokenizer.embedding", "linear"),
        ("planner", "none"),
        ("env", "synthetic"),
        ("optim.lr_backbone", 0.001),
    ],
)
def test_an_option_that_a_row_leaves_out_has_its_default(key, default):
    assert effective_value(PLAIN, key) == default


def test_a_baseline_has_none_of_the_choices_of_a_model():
    assert effective_value({"dataset": "synthetic", "algorithm": "cql"}, "objective") == "none"
