"""Every file in configs/experiment composes, and what it says is what is trained."""

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from decisionllm import registry
from decisionllm.config import configs, store_choices

EXPERIMENTS = sorted(path.stem for path in (configs() / "experiment").glob("*.yaml"))


@pytest.fixture(scope="module", autouse=True)
def choices():
    store_choices()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_what_is_trained(name):
    with initialize_config_dir(str(configs()), version_base="1.3"):
        config = OmegaConf.to_container(
            compose("train", [f"experiment={name}", "+hydra.runtime.choices={backbone: x, dataset: y}"])
        )
    said = yaml.safe_load((configs() / "experiment" / f"{name}.yaml").read_text())
    defaults = said.pop("defaults")
    flat = {key: value for key, value in said.items() if not isinstance(value, dict)}
    assert {key: config[key] for key in flat} == flat
    for group in (key for key, value in said.items() if isinstance(value, dict)):
        assert config[group] | said[group] == config[group]
    for default in defaults:
        for group, choice in default.items() if isinstance(default, dict) else ():
            group = group.removeprefix("override /")
            assert config[group]["_target_"] == registry.discover()[group][choice]["_target_"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_opens_with_its_lab_note(name):
    lines = (configs() / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    note = [line for line in lines[1:] if line.startswith("#")]
    assert len(note) >= 2 and any("decisionllm train" in line and f"experiment={name}" in line for line in note)
