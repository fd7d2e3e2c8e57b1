"""One language model for several spaces: what is shared is trained and saved once, what is not has
its own units; starting from a run.
"""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from decisionllm.config import train_config
from decisionllm.datasets import mixture_parts, sampling, store_cache, windows
from decisionllm.datasets.mixture import draw_embodiment
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.datasets.rng import Stream, make_step_rng
from decisionllm.models.generalist import Generalist
from decisionllm.policy import loading
from decisionllm.policy.policy import Policy
from decisionllm.runs import checkpoint, directory
from decisionllm.runs.model import make_model
from decisionllm.schema import History
from tests.conftest import LOOP, NANO, command, interrupt, metrics

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

PARTS = (
    "plane:{dataset:mixture,parts:{few:{dataset:synthetic,episodes:12,seed:1},many:{dataset:synthetic,episodes:20,seed:2}}},"
    "moves:{dataset:synthetic-discrete,episodes:16,head:discrete}"
)
LOOP = (*(option for option in LOOP if "dataset" not in option), "text=goal", "data.held_out=0.25")
GENERALIST = ("dataset=embodiments", f"dataset.parts={{{PARTS}}}", *LOOP, *NANO)
SINGLE = ("dataset=synthetic", "dataset.episodes=24", "dataset.seed=3", *LOOP, *NANO)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("generalist") / "run"
    assert (
        command(
            "train",
            *GENERALIST,
            f"run={path}",
            "steps=6",
            "log.every=3",
            "tokenizer.timesteps=none",
        )
        == 0
    )
    return path


def saved(path):
    return load_file(path / "checkpoint" / "model.safetensors")


def history(seed=0):
    rng = np.random.default_rng(seed)
    return History(
        rng.normal(size=(3, 2)),
        np.ones((2, 1)),
        rng.normal(size=2),
        task="Walk to the goal in the south.",
    )


def test_a_part_has_its_own_options_of_the_tokenizer(tmp_path, capsys):
    own = "tokenizer:{embedding:mlp,timesteps:none}"
    parts = f"deep:{{dataset:synthetic,{own}}},flat:{{dataset:synthetic-discrete,head:discrete}}"
    words = ("dataset=embodiments", f"dataset.parts={{{parts}}}", *LOOP, *NANO, "steps=1")
    assert command("train", *words, f"run={tmp_path}/run") == 0
    deep, flat = (
        loading.load(tmp_path / "run", part=part).model.tokenizer for part in ("deep", "flat")
    )
    assert isinstance(deep.observations, torch.nn.Sequential) and deep.timesteps is None
    assert isinstance(flat.observations, torch.nn.Linear) and flat.timesteps is not None
    wrong = [word.replace("embedding", "embeddings") for word in words]
    assert command("train", *wrong, f"run={tmp_path}/wrong") == 1
    assert "embeddings" in capsys.readouterr().err


def test_the_things_that_a_step_draws_are_independent():
    """What is drawn for one does not tell what is drawn for another."""
    drawn = np.array(
        [[make_step_rng(7, step, what).random() for what in Stream] for step in range(2000)]
    )
    among = np.corrcoef(drawn.T) - np.eye(len(Stream))
    assert np.abs(among).max() < 0.1


def test_the_embodiment_of_a_step_is_drawn_by_the_shares_of_its_parts():
    shares = {"plane": [1.0, 2.0], "moves": [1.0], "never": [0.0]}
    drawn = [draw_embodiment(shares, 7, step) for step in range(2000)]
    assert abs(drawn.count("plane") / 2000 - 0.75) < 0.03 and "never" not in drawn
    assert (
        drawn
        == [draw_embodiment(shares, 7, step) for step in range(2000)]
        != [draw_embodiment(shares, 8, step) for step in range(2000)]
    )
    assert draw_embodiment({ONLY: [1.0, 1.0]}, 7, 0) == ONLY


def test_the_backbone_is_saved_once_and_each_embodiment_has_its_own_units(run):
    weights, (config, info) = saved(run), directory.read(run)
    model = make_model(train_config(config), directory.read_specs(info))
    assert (
        isinstance(model, Generalist)
        and model.models["plane"].backbone is model.models["moves"].backbone is model.backbone
    )
    assert not [name for name in weights if name.startswith("models.") and ".backbone." in name]
    assert {name for name in weights if name.startswith("backbone.")} == {
        f"backbone.{n}" for n, _ in model.backbone.named_parameters()
    }
    for name, part in mixture_parts.parse_parts(config["dataset"]["parts"], {}, "goal").items():
        log = store_cache.prepare_store(part.dataset, config["cache_dir"])
        selected, _ = sampling.select(log, held_out=0.25)
        (rows,) = windows.load_steps(log).blocks(selected)
        assert np.allclose(
            weights[f"models.{name}.normalizer.observation_mean"],
            log.observations[rows].mean(0),
            atol=1e-5,
        )
        assert info["parts"].get(name, {"embodiment": "plane"})["embodiment"] == name


def test_each_part_has_a_held_out_loss_and_their_mean_says_which_weights_are_best(run):
    for row in metrics(run):
        each = [row[f"held_out_nll/{part}"] for part in ("few", "many", "moves")]
        assert row["held_out_nll"] == pytest.approx(np.mean(each)) and len(set(each)) == 3


def test_a_part_acts_as_it_does_in_the_generalist(run):
    config, info = directory.read(run)
    model = make_model(train_config(config), directory.read_specs(info))
    checkpoint.restore(run, model, info)
    whole = Policy(model.models["moves"], 5, 2, info["parts"]["moves"]["targets"]["0.9"])
    alone = loading.load(run, part="moves")
    of_part = alone.info
    assert (
        of_part["spec"]["num_actions"] == 5
        and of_part["dataset"]["name"] == "synthetic"
        and alone.model.spec.num_actions == 5
    )
    hidden, returns = whole.read([history()])
    same, alike = alone.read([history()])
    assert torch.equal(hidden, same) and np.array_equal(returns, alike)


def test_one_run_is_evaluated_in_the_spaces_of_all_its_parts(run, tmp_path, capsys):
    assert (
        command(
            "evaluate",
            f"run={run}",
            f"out={tmp_path}",
            "episodes=2",
            "report=false",
            "baselines=false",
        )
        == 0
    )
    rows = [
        json.loads(line)
        for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["part"] for row in rows] == ["few", "many", "moves"]
    assert command("serve", f"run={run}", "port=0") == 1
    assert (
        "its parts have spaces of their own; give part=, one of few, many, moves"
        in capsys.readouterr().err
    )


def test_a_resumed_generalist_is_the_same_to_the_bit(tmp_path, monkeypatch):
    words = (
        "train",
        *GENERALIST,
        "optim.accumulate=2",
        "model.condition_on=none",
        "objective=advantage",
        "objective.temperature=0.3",
    )
    assert command(*words, f"run={tmp_path}/straight") == 0
    with monkeypatch.context() as patch:
        interrupt(patch, step=1)
        assert command(*words, f"run={tmp_path}/resumed") == 130
        assert command(*words, f"run={tmp_path}/resumed") == 0
    straight = saved(tmp_path / "straight")
    resumed = saved(tmp_path / "resumed")
    assert straight.keys() == resumed.keys() and all(
        torch.equal(straight[name], resumed[name]) for name in straight
    )
    assert metrics(tmp_path / "straight") == metrics(tmp_path / "resumed")
    # or this says little
    assert (
        len({draw_embodiment({"plane": [1, 1], "moves": [1]}, 7, step) for step in range(4)}) == 2
    )


def test_embodiments_are_no_dataset_of_one_space(tmp_path, capsys):
    assert command("data", *GENERALIST[:2]) == 1
    assert "expected a dataset of one space here; name one of its parts" in capsys.readouterr().err
    twice = "dataset.parts={few:synthetic,plane:{dataset:mixture,parts:{few:synthetic}}}"
    assert command("train", "dataset=embodiments", twice, *LOOP, *NANO, f"run={tmp_path}/run") == 1
    assert "expected a label of its own for each part, got 'few' twice" in capsys.readouterr().err


# what a run starts with is what it saves
FROZEN = (
    "optim.lr=1e-30",
    "optim.weight_decay=0",
    "tokenizer.timesteps=none",
    "steps=1",
)


def test_a_task_of_a_known_space_starts_with_the_weights_and_units_of_the_run(run, tmp_path):
    assert command("train", *SINGLE, *FROZEN, f"init_from={run}", f"run={tmp_path}/new") == 0
    old, new = saved(run), saved(tmp_path / "new")
    assert new and all(
        torch.equal(new[n], old[n if n.startswith("backbone.") else f"models.plane.{n}"])
        for n in new
        if "range" not in n
    )
    low, high = old["models.plane.normalizer.return_range"].tolist()
    log = store_cache.prepare_store(
        directory.read(tmp_path / "new")[0]["dataset"],
        directory.read(tmp_path / "new")[0]["cache_dir"],
    )
    steps = windows.load_steps(log)
    mine = steps.returns_to_go[next(steps.blocks(sampling.select(log, held_out=0.25)[0]))]
    assert new["normalizer.return_range"].tolist() == [min(low, mine.min()), max(high, mine.max())]
    assert new["normalizer.return_range"].tolist() != [low, high] != [mine.min(), mine.max()]


def test_a_new_embodiment_beside_the_old_ones_is_new_alone(run, tmp_path):
    more = f"dataset.parts={{{PARTS},maze:{{dataset:maze2d-umaze,steps:600,source:regenerate}}}}"
    words = ("dataset=embodiments", more, *LOOP, *NANO, *FROZEN, "text=none", "data.held_out=0.5")
    assert command("train", *words, f"init_from={run}", f"run={tmp_path}/new") == 0
    old, new = saved(run), saved(tmp_path / "new")
    assert all(torch.equal(new[name], old[name]) for name in old if "range" not in name)
    assert {name.split(".")[1] for name in new.keys() - old.keys()} == {"maze"}
    assert set(directory.read(tmp_path / "new")[1]["parts"]) == {"few", "many", "moves", "maze"}


def test_new_adapters_on_the_frozen_backbone_of_a_run_begin_as_the_run(run, tmp_path):
    lora = (
        "backbone=pretrained",
        f"backbone.folder={run}",
        "backbone.tune=lora",
        f"init_from={run}",
        f"run={tmp_path}/new",
    )
    assert command("train", *SINGLE[: -len(NANO)], *FROZEN, *lora) == 0
    old = loading.load(run, part="few", target_return=1.0)
    new = loading.load(tmp_path / "new", target_return=1.0)
    seen = History(
        np.ones((2, 2)), np.zeros((1, 2)), np.zeros(1), task="Walk to the goal in the east."
    )
    assert (
        np.allclose(old.act([seen]), new.act([seen]), atol=1e-5)
        and new.model.backbone.tune == "lora"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("backbone.width=64",),
            "expected a run of the same backbone, head, embedding .*the backbone differs: ",
        ),
        (("backbone.tune=lora",), "the backbone differs: "),
        (("head=bins",), "the model differs: .*head"),
        (("tokenizer.embedding=mlp",), "the model differs: .*tokenizer"),
        (("tokenizer.timesteps=learned",), "the model differs: .*timesteps"),
        (
            ("dataset=maze2d-umaze", "dataset.steps=600", "dataset.source=regenerate"),
            "expected a run of the data's space, got the data: 4 numbers seen, 2 actions .* the "
            "run [(]plane[)]: 2 numbers seen",
        ),
        (("init_from=nowhere",), "nowhere: expected a run directory"),
    ],
)
def test_a_run_that_does_not_fit_is_no_start(run, options, message, tmp_path, capsys):
    data = [
        option
        for option in SINGLE
        if "dataset" not in option or "dataset=maze2d-umaze" not in options
    ]
    assert (
        command(
            "train",
            *data,
            "tokenizer.timesteps=none",
            f"init_from={run}",
            f"run={tmp_path}/new",
            *options,
        )
        == 1
    )
    assert re.search(message, capsys.readouterr().err) and not (tmp_path / "new").exists()


def test_a_continued_run_needs_its_start_no_more(run, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "start")
    words = (
        "train",
        *SINGLE,
        "tokenizer.timesteps=none",
        f"init_from={tmp_path}/start",
        f"run={tmp_path}/new",
    )
    with monkeypatch.context() as patch:
        interrupt(patch, step=1)
        assert command(*words) == 130
        shutil.rmtree(tmp_path / "start")
        assert command(*words) == 0
