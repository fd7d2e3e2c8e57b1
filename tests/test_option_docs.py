"""Every option has a meaning, read from the one place where it stands."""

import yaml

from decisionllm.__main__ import COMMANDS
from decisionllm.command_line import HYDRA_KEYS, config_folder
from decisionllm.config import default_options, flatten
from decisionllm.option_docs import (
    choice_meanings,
    command_meanings,
    format_value,
    training_meanings,
)
from decisionllm.registry import discover


def test_every_option_of_every_command_has_a_meaning():
    """See the comments of configs/COMMAND.yaml, and those of config.py."""
    missing = []
    for command in COMMANDS:
        source = (config_folder() / f"{command}.yaml").read_text(encoding="utf-8")
        meanings = command_meanings(source)
        options = yaml.safe_load(source)
        for key in HYDRA_KEYS:
            options.pop(key, None)
        missing += [f"{command}: {key}" for key in flatten(options) if not meanings.get(key)]
    assert missing == []


def test_every_option_of_training_has_a_meaning():
    own = [key for key in flatten(default_options()) if not key.endswith("_target_")]
    meanings = training_meanings()
    assert [key for key in own if key in meanings and len(meanings[key]) < 6] == []
    assert {key for key in own if "." not in key or key.startswith("optim.")} <= {*meanings}
    assert meanings["optim.clip"] == "largest norm of the gradient; 0: no clipping"
    assert meanings["init_from"].endswith("and of each embodiment of the data's space")
    assert meanings["optim.lr_backbone"].startswith("peak learning rate of the backbone")


def test_every_option_of_a_choice_has_a_meaning():
    """See the section Args of the docstring of its callable."""
    missing = []
    for group, nodes in discover().items():
        for name, node in nodes.items():
            for option, meaning in choice_meanings(node["_target_"]).items():
                if len(meaning) < 6 or meaning.startswith("see `"):
                    missing.append(f"{group}={name}: {option}: {meaning or 'nothing'}")
    assert missing == []


def test_a_reference_has_the_meaning_of_the_option_it_names():
    lora = choice_meanings("decisionllm.backbones.build.build_backbone")
    assert lora.keys() == {"lora", "adapter", "text_layers"}
    assert lora["text_layers"] == "how many of the lower blocks have no adapters"
    tune = choice_meanings("decisionllm.backbones.build.smollm2")["tune"]
    assert tune.startswith("`lora` trains adapters of a frozen model")


def test_defaults_are_shown_as_they_are_written():
    values = (True, None, "", 1e-3, [], "${oc.select:dataset.task,''}")
    assert [format_value(value) for value in values] == [
        "true",
        "null",
        '""',
        "0.001",
        "[]",
        "${dataset.task}",
    ]
    assert format_value("runs/${hydra:runtime.choices.dataset}/a") == "runs/${dataset}/a"
