"""Every file in configs/experiment composes, and what it says is what is trained."""

import re

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from decisionllm import registry
from decisionllm.command_line import config_folder, store_choices

pytestmark = pytest.mark.slow

EXPERIMENTS = sorted(path.stem for path in (config_folder() / "experiment").glob("*.yaml"))
TRAINING = re.compile(r"^#.*\bdecisionllm train ((?:--multirun )?experiment=[^;]*)", re.M)


@pytest.fixture(scope="module", autouse=True)
def choices():
    store_choices()


def compose_config(name):
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose(
            "train", [f"experiment={name}", "+hydra.runtime.choices={backbone: x, dataset: y}"]
        )
    return OmegaConf.to_container(config)


def differences(name):
    """Yield the options of an experiment file that the composed configuration does not have."""
    config = compose_config(name)
    options = yaml.safe_load(
        (config_folder() / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
    )
    for default in options.pop("defaults"):
        for group, choice in default.items() if isinstance(default, dict) else ():
            group = group.removeprefix("override /")
            nodes = {"none": {"_target_": "none"}} | registry.discover()[group]
            if config[group]["_target_"] != nodes[choice]["_target_"]:
                yield f"{name}: {group}={choice}, composed is {config[group]['_target_']}"
    for key, value in options.items():
        merged = config[key] | value if isinstance(value, dict) else value
        if merged != config[key]:
            yield f"{name}: {key}: {value}, composed is {config[key]}"


def test_an_experiment_says_what_is_trained():
    wrong = [line for name in EXPERIMENTS for line in differences(name)]
    assert not wrong, "\n".join(wrong)


def test_an_experiment_opens_with_its_lab_note():
    wrong = []
    for name in EXPERIMENTS:
        lines = (
            (config_folder() / "experiment" / f"{name}.yaml")
            .read_text(encoding="utf-8")
            .splitlines()
        )
        note = [line for line in lines[1:] if line.startswith("#")]
        commands = [
            line for line in note if "decisionllm train" in line and f"experiment={name}" in line
        ]
        if lines[0] != "# @package _global_" or len(note) < 2 or not commands:
            wrong.append(name)
    assert not wrong, wrong


def test_the_trainings_of_a_lab_note_compose():
    """Swept options with their first value."""
    wrong = []
    for name in EXPERIMENTS:
        note = (config_folder() / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
        for command in TRAINING.findall(note):
            words = [re.sub(r"^([\w.]+=[^\[,]+),.*", r"\1", word) for word in command.split()]
            overrides = [word for word in words if "=" in word]
            try:
                with initialize_config_dir(str(config_folder()), version_base="1.3"):
                    compose("train", overrides)
            except HydraException as error:
                wrong.append(f"{name}: {command}: {error}")
    assert not wrong, "\n".join(wrong)


def test_a_recipe_of_a_language_model_fits_models_of_any_depth():
    """How many blocks there are, and how many read texts, are shares, or all, or none."""
    wrong = []
    for name in EXPERIMENTS:
        backbone = compose_config(name)["backbone"]
        for option in ("text_layers", "layers"):
            if "text_summary" in backbone and backbone.get(option, 0) >= 1:
                wrong.append(f"{name}: {option}={backbone[option]}")
    assert not wrong, wrong
