"""Jobs of a sweep train in directories of their own."""

import pytest
from omegaconf import OmegaConf

from decisionllm.sweep import references, run_directory, safe_value, split_flags, swept_keys
from tests.conftest import LOOP, NANO, command, metrics

CONFIG = OmegaConf.create(
    {
        "name": "${hydra:runtime.choices.backbone}",
        "seed": 0,
        "text": "goal",
        "run": "runs/${name}-${seed}",
        "optim": {"lr": 0.001, "clip": 1.0},
        "data": {"seed": 3},
    }
)


def test_a_directory_depends_on_what_its_name_is_made_from():
    assert references(CONFIG, "run") == {"name", "seed", "backbone"}
    assert references(CONFIG, "optim.lr") == set()


@pytest.mark.parametrize(
    "swept, job, directory",
    [
        (["seed"], ["seed=0"], "runs/nano-0"),
        (["optim.lr"], ["optim.lr=0.001"], "runs/nano-0-lr-0.001"),
        (["seed", "optim.lr"], ["seed=0", "optim.lr=0.001"], "runs/nano-0-lr-0.001"),
        (
            ["optim.lr", "optim.clip"],
            ["optim.lr=0.001", "optim.clip=1"],
            "runs/nano-0-lr-0.001-clip-1",
        ),
        (
            ["data.seed", "+env.seed"],
            ["data.seed=3", "+env.seed=4"],
            "runs/nano-0-data.seed-3-env.seed-4",
        ),
    ],
)
def test_swept_options_that_are_not_in_the_name_are_added_to_it(swept, job, directory):
    config = CONFIG.copy()
    config.name = "nano"
    assert run_directory(config, [key.lstrip("+") for key in swept], job) == directory


def test_keys_with_several_values_are_swept():
    assert swept_keys(
        ["--multirun", "seed=0,1", "steps=4", "backbone=nano,tiny", "+env.k=1,2"]
    ) == [
        "seed",
        "backbone",
        "env.k",
    ]
    assert swept_keys(["dataset.low=[-1,-1]"]) == [], "a list is one value"
    assert swept_keys(["--config-dir", "/tmp/mine", "seed=0,1"]) == ["seed"]


def test_flags_stand_anywhere():
    words = ["--multirun", "train", "seed=0,1", "--config-dir", "mine", "steps=4", "--cfg=job"]
    others = ["train", "seed=0,1", "steps=4"]
    assert split_flags(words) == (others, ["--multirun", "--config-dir", "mine", "--cfg=job"])
    assert split_flags(["--info", "seed=0"]) == (["seed=0"], ["--info"])


def test_experiments_with_a_run_that_was_given_have_directories_of_their_own():
    config = CONFIG.copy()
    config.run = "runs/x"
    assert run_directory(config, ["experiment"], ["experiment=a", "run=runs/x"]) == (
        "runs/x-experiment-a"
    )
    assert run_directory(config, ["experiment"], ["experiment=a"]) == "runs/x"


def test_a_value_is_safe_in_a_path():
    assert [safe_value(x) for x in ("1e-3", "[0.5,1]", "a/b", "-1")] == [
        "1e-3",
        "0.5-1",
        "a-b",
        "-1",
    ]


@pytest.mark.slow
def test_every_job_of_a_sweep_has_its_own_run(tmp_path):
    words = (
        "--multirun",
        *LOOP,
        *NANO,
        f"hydra.sweep.dir={tmp_path}",
        f"run={tmp_path}/runs/goal-${{seed}}",
    )
    assert command("train", *words, "seed=0,1", "optim.lr=1e-3,2e-3") == 0
    rates = {path.name: metrics(path)[1]["lr"] for path in (tmp_path / "runs").iterdir()}
    assert rates.keys() == {f"goal-{seed}-lr-{lr}" for seed in (0, 1) for lr in ("0.001", "0.002")}
    assert rates["goal-0-lr-0.002"] == pytest.approx(2 * rates["goal-0-lr-0.001"])
