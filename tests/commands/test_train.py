"""Training: a resumed run is the same run, every parameter and every step counts once, and what was
learned can be measured.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from hashlib import blake2b
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from decisionllm import hardware
from decisionllm.bidding.serve import model_info
from decisionllm.commands import training
from decisionllm.commands.train_schedule import due_after
from decisionllm.commands.training import tracker_options
from decisionllm.config import LogOptions, OptimOptions, train_config
from decisionllm.datasets import sampling, store_cache, store_writer
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.datasets.synthetic import load
from decisionllm.files import read_lines
from decisionllm.policy import loading
from decisionllm.registry import choice
from decisionllm.runs import checkpoint, directory
from decisionllm.runs import model as runs_model
from decisionllm.runs.optimizer import parameter_groups
from decisionllm.scaling.held_out_loss import measure_losses
from decisionllm.schema import Spec
from decisionllm.trust import trust_modules
from tests.backbones.test_backbones import write
from tests.conftest import (
    BACKBONES,
    DT,
    LOOP,
    NANO,
    PATIENCE,
    command,
    episode,
    interrupt,
    make_model,
    make_store,
    metrics,
)

pytestmark = [pytest.mark.numeric, pytest.mark.slow]


def saved(path):
    """Every tensor of a run's checkpoint: weights, adapters, the optimiser's moments."""
    files = sorted((path / "checkpoint").rglob("*.safetensors"))
    return {
        f"{file.stem}/{name}": tensor for file in files for name, tensor in load_file(file).items()
    }


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "model",
    [
        DT,
        (*DT, "backbone.tune=lora", "head=bins"),
        (*NANO, "model.condition_on=none", "objective=advantage", "objective.temperature=0.3"),
    ],
    ids=" ".join,
)
def test_two_steps_and_two_resumed_equal_four_to_the_bit(model, tmp_path, monkeypatch, capsys):
    assert command("train", *LOOP, *model, f"run={tmp_path}/straight") == 0
    resumed = ("train", *LOOP, *model, f"run={tmp_path}/resumed")
    with monkeypatch.context() as patch:
        drawn = interrupt(patch, step=1)
        assert command(*resumed) == 130
        assert "stopped at step 2 and saved; the same command continues" in capsys.readouterr().err
        assert len(metrics(tmp_path / "resumed")) == 2
        assert command(*resumed) == 0
    assert drawn == [0, 1, 2, 3]  # each batch once: a pure function of (seed, step)
    assert same_bits(saved(tmp_path / "straight"), saved(tmp_path / "resumed"))
    assert metrics(tmp_path / "straight") == metrics(tmp_path / "resumed")
    # products with denormal numbers are as before the training
    assert np.float32(1e-30) * np.float32(1e-10) > 0 and torch.tensor(1e-30) * 1e-10 > 0


def test_the_weights_of_the_lowest_held_out_loss_are_those_that_act_and_outlast_an_interruption(
    tmp_path, monkeypatch
):
    worse = (
        "train",
        *LOOP,
        *NANO,
        "log.keep_best=loss",
        "data.held_out=0.2",
        "log.every=1",
        "head=bins",  # its loss has no upper bound
        "optim.lr=1",
        "optim.warmup=8",  # of which four are done: each step is larger than the one before
        "optim.clip=0",
        "steps=4",
    )
    assert command(*worse, f"run={tmp_path}/straight") == 0
    losses = {row["step"]: row["held_out_nll"] for row in metrics(tmp_path / "straight")}
    lowest = min(losses, key=losses.get)
    assert 0 < lowest < 4  # or this test says nothing
    assert (
        json.loads(
            (tmp_path / "straight/best/checkpoint/trainer.json").read_text(encoding="utf-8")
        )["step"]
        == lowest
    )
    loaded = loading.load(tmp_path / "straight")
    acting = loaded.model.state_dict()
    weights = (tmp_path / "straight/best/checkpoint/model.safetensors").read_bytes()
    assert (
        model_info(tmp_path / "straight", loaded, loaded.config, loaded.info)["weights"]
        == blake2b(weights, digest_size=6).hexdigest()
    )
    best = load_file(tmp_path / "straight/best/checkpoint/model.safetensors")
    assert all(torch.equal(acting[name], tensor) for name, tensor in best.items())
    assert not same_bits(best, load_file(tmp_path / "straight/checkpoint/model.safetensors"))
    with monkeypatch.context() as patch:
        interrupt(patch, step=2)
        assert command(*worse, f"run={tmp_path}/resumed") == 130
    assert command(*worse, f"run={tmp_path}/resumed") == 0
    assert same_bits(best, load_file(tmp_path / "resumed/best/checkpoint/model.safetensors"))
    assert command(*worse, f"run={tmp_path}/resumed", "log.keep_best=", "fresh=true") == 0
    assert not (tmp_path / "resumed/best").exists()


def test_an_interruption_is_no_reason_to_look_at_held_out_windows(tmp_path, monkeypatch):
    """Else a run that was continued could keep the weights of a step that no other looks at."""
    seldom = (
        "train",
        *LOOP,
        *NANO,
        "log.keep_best=loss",
        "data.held_out=0.2",
        "log.every=4",
        "steps=4",
    )
    with monkeypatch.context() as patch:
        interrupt(patch, step=2)
        assert command(*seldom, f"run={tmp_path}/run") == 130
    (row,) = metrics(tmp_path / "run")
    assert "nll" in row and "held_out_nll" not in row
    assert not (tmp_path / "run/best").exists()
    assert command(*seldom, f"run={tmp_path}/run") == 0
    assert [row["step"] for row in metrics(tmp_path / "run") if "held_out_nll" in row] == [4]


@pytest.mark.parametrize(
    ("step", "progress", "stopped", "expected"),
    [
        (1, 0.1, False, set()),
        (4, 0.4, False, {"log", "held_out"}),
        (5, 0.5, False, {"log", "held_out", "save"}),
        (6, 0.6, False, {"log", "held_out", "roll_out"}),
        (7, 0.7, True, {"log", "save", "say"}),
        (8, 0.8, True, {"log", "held_out", "save", "say"}),
        (7, 1.0, False, {"log", "held_out", "roll_out", "save", "say"}),
        (7, 1.0, True, {"log", "held_out", "roll_out", "save", "say"}),
    ],
)
def test_what_is_due_after_a_step(step, progress, stopped, expected):
    log = LogOptions(every=4, save_every=5, rollout_every=6)
    due = due_after(log, step, progress, stopped=stopped)
    assert {name for name, is_due in vars(due).items() if is_due} == expected


def test_a_silent_training_says_how_much_time_is_left(tmp_path, capsys, monkeypatch):
    words = ("train", *LOOP, *NANO, "steps=3", "log.every=100", "log.save_every=100")
    assert command(*words, f"run={tmp_path}/short") == 0
    assert "min left" not in capsys.readouterr().out
    monkeypatch.setattr(training, "MOST_SILENCE", 0)
    assert command(*words, f"run={tmp_path}/long") == 0
    printed = capsys.readouterr().out
    assert re.findall(r"long: step +(\d)  +\d+ %  +\d+ s  about 0 min left", printed) == ["1", "2"]


def test_a_window_that_no_episode_fills_is_noted(tmp_path, capsys):
    longest = 20  # of the synthetic world
    for window in (longest, longest + 10):
        words = ("train", *LOOP, *NANO, "steps=1", f"window={window}", f"run={tmp_path}/{window}")
        assert command(*words) == 0
        note = "note: no episode has more than 20 steps, and windows have 30"
        assert (note in capsys.readouterr().out) == (window > longest)


def test_a_stride_beyond_the_window_is_refused(tmp_path, capsys):
    assert command("train", *LOOP, *NANO, "act.stride=9", f"run={tmp_path}/run") == 1
    message = "decisionllm: window: expected act.stride=9 steps or more, got 5 for data"
    assert message in capsys.readouterr().err


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_a_tracker_that_is_not_installed_is_refused(tmp_path, capsys):
    assert command("train", *LOOP, *NANO, f"run={tmp_path}/a", "log.tracker=wandb") == 1
    printed = capsys.readouterr().err
    assert "log.tracker=wandb: expected the package wandb, found none; pip install wandb" in printed
    assert not (tmp_path / "a").exists()


def test_trackers_are_told_the_name_and_the_config_of_a_run(tmp_path):
    choices = {"dataset": "synthetic", "backbone": "nano", "head": "gaussian"}
    nodes = {group: choice(group, name) for group, name in choices.items()}
    options = tracker_options(train_config(nodes | {"run": str(tmp_path / "first")}), 40)
    assert options["tensorboard"] == {"purge_step": 41}
    for tracker in ("wandb", "trackio"):
        assert options[tracker]["name"] == "first"
        assert options[tracker]["config"]["optim"]["lr"] == 1e-3
        assert options[tracker]["config"]["dataset"]["_target_"].endswith("synthetic.load")
    assert options["wandb"]["dir"] == str(tmp_path / "first")


def test_a_run_is_tracked_by_wandb_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = (*LOOP, *NANO, "log.tracker=wandb", f"run={tmp_path}/first")
    assert command("train", *words) == 0
    (file,) = (tmp_path / "first" / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"held_out_nll" in file.read_bytes()


def test_the_best_of_nothing_held_out_is_refused(tmp_path, capsys):
    assert (
        command(
            "train", *LOOP, *NANO, "log.keep_best=loss", "data.held_out=0", f"run={tmp_path}/run"
        )
        == 1
    )
    assert (
        "log.keep_best: expected with log.keep_best=loss data.held_out" in capsys.readouterr().err
        and not (tmp_path / "run").exists()
    )


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A run of LOOP and NANO."""
    path = tmp_path_factory.mktemp("finished") / "run"
    assert command("train", *LOOP, *NANO, f"run={path}") == 0
    return path


def test_a_finished_run_is_left_as_it_is_and_another_is_refused(finished_run, tmp_path, capsys):
    shutil.copytree(finished_run, tmp_path / "run")
    run = ("train", *LOOP, *NANO, f"run={tmp_path}/run")
    before = saved(tmp_path / "run")
    assert command(*run, "log.every=2") == 0  # how often to log is not what a run is
    assert same_bits(before, saved(tmp_path / "run"))
    assert command(*run, "optim.lr=0.5") == 1
    assert "holds another run (optim.lr was 0.001, is 0.5" in capsys.readouterr().err
    assert same_bits(before, saved(tmp_path / "run"))
    assert command(*run, "optim.lr=0.5", "fresh=true") == 0
    assert not same_bits(before, saved(tmp_path / "run"))


def test_a_longer_training_of_a_finished_run_is_told_how_to_begin(finished_run, tmp_path, capsys):
    shutil.copytree(finished_run, tmp_path / "run")
    words = ("train", *LOOP, *NANO)
    assert command(*words, "steps=8", f"run={tmp_path / 'run'}") == 1
    message = " ".join(capsys.readouterr().err.split())
    assert (
        "run was begun for steps=4, not steps=8: the schedule of its learning rate ends there"
        in message
    )
    option = re.search(r"by (init_from=\S+) run=", message)
    assert command(*words, "steps=8", option[1], f"run={tmp_path / 'longer'}") == 0
    assert len(metrics(tmp_path / "longer")) == 8


def test_a_second_training_in_one_directory_is_refused(tmp_path, capsys):
    with directory.lock_run(tmp_path / "run"):
        assert command("train", *LOOP, *NANO, f"run={tmp_path}/run") == 1
    assert "another training is running in this directory" in capsys.readouterr().err
    assert command("train", *LOOP, *NANO, f"run={tmp_path}/run") == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("photo.jpg", ()),
        ("config.yaml", ("fresh=true",)),
        ("checkpoint/model.bin", ("fresh=true",)),
        ("best/of.txt", ()),
        (".env", ()),
    ],
)
def test_a_folder_with_other_files_is_refused_and_left_as_it_is(name, words, tmp_path, capsys):
    (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "mine" / name).write_text("dataset: mine\n", encoding="utf-8")
    assert command("train", *LOOP, *NANO, *words, f"run={tmp_path}/mine") == 1
    printed = capsys.readouterr().err
    assert (
        f"{tmp_path}/mine: expected a new or empty folder or a run (with run.json), found "
        f"{name.partition('/')[0]}" in printed
    )
    assert printed.count("\n") == 1 and not (tmp_path / "data" / "stores").exists(), (
        "before any work"
    )
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [name.partition("/")[0]]
    assert (tmp_path / "mine" / name).read_text(encoding="utf-8") == "dataset: mine\n"


def test_a_date_and_time_is_a_seed(tmp_path):
    """torch takes seeds of 64 bits, and a step's own is a million times that of the run."""
    words = (*LOOP, *NANO, "steps=1", "seed=20261126120000")
    assert command("train", *words, f"run={tmp_path}/run") == 0


def test_what_an_earlier_start_left_is_no_hindrance(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    run = ("train", *LOOP, *NANO, "steps=1", f"run={tmp_path}/run")
    for path in (tmp_path / "run").iterdir():
        if path.name != "config.yaml":  # killed before run.json
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in (".lock", "multirun.yaml", ".partial-0123456789ab-run.json"):
        (tmp_path / "run" / name).touch()
    (tmp_path / "run" / ".hydra").mkdir()
    assert command(*run) == 0
    (tmp_path / "run" / "notes.txt").write_text("mine", encoding="utf-8")
    assert (
        command(*run, "fresh=true") == 0
        and (tmp_path / "run" / "notes.txt").read_text(encoding="utf-8") == "mine"
    )


def test_a_horizon_that_makes_a_huge_table_of_time_steps_is_refused(tmp_path, capsys):
    """Two episodes of 3 steps; the table would have 1e9 x 32 weights."""
    steps = np.linspace(0, 1, 6, dtype=np.float32)
    ends = np.array([0, 0, 1, 0, 0, 1], bool)
    np.savez(
        tmp_path / "log.npz",
        observations=steps[:, None],
        actions=steps[:, None],
        rewards=steps,
        terminals=ends,
    )
    loop = [word for word in LOOP if not word.startswith("dataset")]
    words = (
        "dataset=arrays",
        f"dataset.path={tmp_path}/log.npz",
        "dataset.horizon=1e9",
        "data.held_out=0",
        f"run={tmp_path}/run",
    )
    assert command("train", *loop, *NANO, *words) == 1
    printed = capsys.readouterr().err
    assert (
        printed.count("\n") == 1
        and "tokenizer.timesteps=learned: expected a horizon of at most 1,000,000 steps" in printed
    )
    assert "got 1,000,000,000" in printed and "take tokenizer.timesteps=none" in printed
    assert command("train", *loop, *NANO, *words, "tokenizer.timesteps=none", "steps=1") == 0


def test_other_data_is_another_run(tmp_path, capsys):
    run = ("train", *LOOP, *NANO, f"run={tmp_path}/run")
    assert command(*run) == 0
    place = next((tmp_path / "data" / "stores").iterdir())
    store_writer.write_store(
        place, load(episodes=12)
    )  # the file behind the same options has changed
    assert command(*run) == 1
    assert "was begun on data" in capsys.readouterr().err


@pytest.mark.parametrize("tune", ["full", "lora", "frozen"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_each_trained_parameter_is_in_exactly_one_group(backbone, tune):
    spec = Spec(2, 1, 5, (-1.0,), (1.0,))
    model = make_model(
        spec,
        backbone=backbone,
        head="bins",
        backbone_options={"tune": tune},
    )
    groups = parameter_groups(model, OptimOptions(lr=0.1, lr_backbone=0.02, weight_decay=0.3))
    grouped = [id(weight) for group in groups for weight in group["params"]]
    assert sorted(grouped) == sorted(
        id(weight) for weight in model.parameters() if weight.requires_grad
    )
    for group in groups:
        names = [
            name
            for name, weight in model.named_parameters()
            if any(weight is w for w in group["params"])
        ]
        assert {1.0 if name.startswith(("head.", "tokenizer.")) else 0.2 for name in names} == {
            round(group["scale"], 9)
        }
        assert {0.3 if weight.ndim > 1 else 0.0 for weight in group["params"]} == {
            group["weight_decay"]
        }


def test_the_rate_warms_up_and_falls_as_a_cosine_to_a_twentieth(tmp_path):
    command("train", *LOOP, *NANO, f"run={tmp_path}", "optim.lr=0.01", "steps=4", "optim.warmup=2")
    cosine = [1, 0.85355339, 0.5, 0.14644661]  # (1 + cos(pi x)) / 2 at 0, 1/4, 1/2, 3/4
    expected = [
        0.01 * warm * (0.05 + 0.95 * c) for warm, c in zip([0.5, 1, 1, 1], cosine, strict=True)
    ]
    assert [row["lr"] for row in metrics(tmp_path)] == pytest.approx(expected)


def test_the_backbone_learns_at_its_own_rate(tmp_path):
    rates = ("optim.lr=0.01", "optim.lr_backbone=1e-9", "optim.weight_decay=0")
    assert command("train", *LOOP, *NANO, *rates, f"run={tmp_path}") == 0
    config, info = directory.read(tmp_path)
    start = runs_model.make_model(train_config(config), directory.read_specs(info)).state_dict()
    for name, weight in load_file(tmp_path / "checkpoint" / "model.safetensors").items():
        if not name.startswith("normalizer."):
            moved = (weight - start[name]).abs().max() > 1e-6
            assert moved != name.startswith("backbone."), name


@pytest.mark.parametrize(
    "words", [(), ("model.condition_on=none", "objective=advantage", "objective.temperature=0.3")]
)
def test_micro_batches_of_short_windows_equal_the_whole_batch(words, tmp_path):
    runs = {parts: tmp_path / str(parts) for parts in (1, 4)}
    # episodes of 1 to 20 steps in windows of 15: much padding, unevenly spread
    for parts, path in runs.items():
        assert (
            command(
                "train",
                *LOOP,
                *NANO,
                *words,
                "window=15",
                f"optim.accumulate={parts}",
                f"run={path}",
            )
            == 0
        )
    whole = metrics(runs[1])
    for row, expected in zip(metrics(runs[4]), whole, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "lr, step",
    [(1e15, 1), (1e39, None)],
    ids=["the loss", "a weight, while the loss is still a number"],
)
def test_what_is_not_finite_stops_the_run_and_the_last_good_checkpoint_stays(
    lr, step, tmp_path, capsys
):
    assert (
        command(
            "train",
            *LOOP,
            *NANO,
            f"run={tmp_path}",
            f"optim.lr={lr}",
            "optim.warmup=0",
            "optim.clip=0.0",
            "log.save_every=1",
            "data.held_out=0.0",
        )
        == 1
    )
    printed = capsys.readouterr().err
    assert "not finite" in printed and "Try a lower optim.lr" in printed
    if step is None:
        assert "there is no checkpoint yet" in printed and checkpoint.find(tmp_path) is None
    else:
        assert "the last good checkpoint is kept" in printed
        assert (
            json.loads((tmp_path / "checkpoint" / "trainer.json").read_text(encoding="utf-8"))[
                "step"
            ]
            == step
        )
        assert all(
            tensor.isfinite().all()
            for name, tensor in saved(tmp_path).items()
            if name.startswith("model/")
        )


@pytest.mark.parametrize("targets", [1, 0])
def test_a_batch_without_a_target_adds_nothing_and_a_log_needs_one(targets, tmp_path, capsys):
    masks = np.arange(200).reshape(20, 10) < targets  # of 200 steps
    episodes = [episode([1.0] * 10, loss_mask=mask, group=i) for i, mask in enumerate(masks)]
    path = make_store(tmp_path / "store", episodes).path
    few = [
        "dataset=store",
        f"dataset.path={path}",
        "optim.batch_size=1",
        "data.held_out=0",
        f"run={tmp_path}/run",
    ]
    assert command("train", *LOOP[2:], *NANO, *few) == (0 if targets else 1)
    if targets:
        assert 0 in [row["nll"] for row in metrics(tmp_path / "run")], "a batch without a target"
    else:
        assert (
            "expected a training target in some step (loss_mask), got none"
            in capsys.readouterr().err
        )


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    words = [
        "train",
        *LOOP,
        *NANO,
        "steps=100000",
        f"run={tmp_path}/run",
        f"cache_dir={tmp_path}/data",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "decisionllm", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    log = tmp_path / "run" / "metrics.jsonl"
    patience = time.monotonic() + PATIENCE
    while (
        process.poll() is None
        and time.monotonic() < patience
        and not (log.is_file() and log.read_text(encoding="utf-8").count("\n") > 2)
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    step = json.loads(
        (tmp_path / "run" / "checkpoint" / "trainer.json").read_text(encoding="utf-8")
    )["step"]
    assert process.returncode == 130, out + err
    assert (
        f"decisionllm: stopped at step {step:,} and saved; the same command continues from there"
        in err
        and "Traceback" not in err
    )
    drawn = interrupt(monkeypatch, step)
    assert command(*words) == 130
    assert drawn == [step]
    assert f"from step {step:,}" in capsys.readouterr().out


def test_what_a_killed_run_logged_after_its_checkpoint_comes_again(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste', encoding="utf-8")
    directory.trim_log(log, 2)
    assert log.read_text(encoding="utf-8") == '{"step": 1}\n{"step": 2}\n'
    directory.trim_log(log, 0)
    assert log.read_text(encoding="utf-8") == ""


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """The last line of a short training with the text, and without."""
    path, last = tmp_path_factory.mktemp("losses"), {}
    for text in ("none", "goal"):
        words = (
            "dataset.episodes=300",
            "window=1",
            "steps=70",
            "backbone.layers=1",
            "optim.batch_size=32",
            "optim.lr=0.005",
            "log.every=70",
            "data.held_out=0.2",
        )
        assert (
            command(
                "train",
                *LOOP,
                *NANO,
                *words,
                f"text={text}",
                f"run={path}/{text}",
                f"cache_dir={path}",
            )
            == 0
        )
        last[text] = metrics(path / text)[-1]
    return last


def test_the_loss_falls_below_that_of_the_best_constant_policy(losses):
    actions = np.concatenate([episode.actions for episode in load().episodes])
    squared = ((actions - actions.mean(0)) / 0.5) ** 2  # 0.5 is the Gaussian head's deviation
    constant = squared.sum(1).mean() / 2 + 2 * np.log(0.5 * np.sqrt(2 * np.pi))
    assert (
        losses["goal"]["nll"] < constant - 0.5 and losses["goal"]["held_out_nll"] < constant - 0.5
    )


def test_text_matters(losses):
    """One observation does not say which of four goals the point walks to; the text does."""
    assert losses["goal"]["held_out_nll"] < losses["none"]["held_out_nll"] - 0.5


def test_held_out_groups_are_never_trained_on(tmp_path, monkeypatch):
    (tmp_path / "spoiltlogs.py").write_text(
        """
from dataclasses import replace
from decisionllm.datasets import synthetic
def load(*, spoilt: list):
    source = synthetic.load(episodes=40)
    spoil = lambda e: replace(e, observations=9 - e.observations, actions=-e.actions / 2, rewards=e.rewards - 50)
    return replace(source, episodes=[spoil(e) if e.group in spoilt else e for e in source.episodes])
""",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    trained, held_out = sampling.select(
        store_writer.write_store(tmp_path / "store", load(episodes=40)), held_out=0.25, seed=3
    )
    spoilt = {"clean": [], "held-out": held_out.tolist(), "trained": trained[:1].tolist()}
    words = [word for word in LOOP if word != "dataset.episodes=40"] + [
        "data.held_out=0.25",
        "data.seed=3",
        "dataset._target_=spoiltlogs.load",
    ]
    for name, groups in spoilt.items():
        assert (
            command(
                "train",
                *words,
                *NANO,
                "steps=2",
                f"+dataset.spoilt={groups}",
                f"run={tmp_path}/{name}",
            )
            == 0
        )
    clean = saved(tmp_path / "clean")
    # normaliser and moments too
    assert len(held_out) == 10 and same_bits(clean, saved(tmp_path / "held-out"))
    with trust_modules(["spoiltlogs"]):
        targets = [
            directory.read(tmp_path / name)[1]["embodiments"][ONLY]["targets"]
            for name in ("clean", "held-out")
        ]
        assert targets[0] == targets[1]
    assert (
        metrics(tmp_path / "clean")[-1]["held_out_nll"]
        != metrics(tmp_path / "held-out")[-1]["held_out_nll"]
    )
    assert not same_bits(clean, saved(tmp_path / "trained"))


@pytest.mark.parametrize(("generation", "expected"), [(7, "no"), (8, "bf16")])
def test_bfloat16_is_for_gpus_that_do_not_emulate_it(generation, expected, monkeypatch):
    """Turing and earlier ones compute it, slower than float32."""
    gpu = SimpleNamespace(major=generation)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)
    assert hardware.resolve_precision("auto", "auto") == expected


def test_a_sweep_over_precisions_trains_each_and_prints_its_type(tmp_path, capsys):
    words = (
        *LOOP,
        *NANO,
        "steps=30",
        "optim.lr=0.003",
        f"run={tmp_path}/${{optim.precision}}",
        f"hydra.sweep.dir={tmp_path}",
    )
    assert command("train", "--multirun", *words, "optim.precision=no,bf16") == 0
    printed = capsys.readouterr().out
    assert [printed.count(f" of them trained; {t}, 1 x cpu\n") for t in ("float32", "bf16")] == [
        1,
        1,
    ]
    exact, half = metrics(tmp_path / "no"), metrics(tmp_path / "bf16")
    assert half[0]["nll"] != exact[0]["nll"] and half[0]["nll"] == pytest.approx(
        exact[0]["nll"], rel=0.02
    )
    assert (
        np.mean([row["nll"] for row in half[-5:]]) < np.mean([row["nll"] for row in half[:5]]) - 0.2
    )
    assert {tensor.dtype for tensor in saved(tmp_path / "bf16").values()} == {torch.float32}


def scalars_by_tag(run):
    """What TensorBoard shows of a run: {tag: [(step, value), ...]}."""
    events = EventAccumulator(str(run / "decisionllm")).Reload()
    scalars = {}
    for tag in events.Tags()["scalars"]:
        scalars[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    return scalars


def logged_by_tag(run):
    """The same of its metrics.jsonl, in float32 as TensorBoard keeps them."""
    logged = {}
    for line in read_lines(run / "metrics.jsonl"):
        for key in line.keys() - {"step"}:
            logged.setdefault(key, []).append((line["step"], float(np.float32(line[key]))))
    return logged


def test_tensorboard_has_each_log_line_of_an_interrupted_run_once(tmp_path, monkeypatch):
    """It is stopped after one step, which saves it, and then lost after its last line."""
    words = (
        *LOOP,
        *NANO,
        "log.rollout_every=2",
        "log.rollout_episodes=2",
        "log.save_every=100",
        "log.tracker=tensorboard",
        f"run={tmp_path}",
    )
    with monkeypatch.context() as patch:
        interrupt(patch, step=0)
        assert command("train", *words) == 130
    with monkeypatch.context() as patch:

        def die(*arguments, **options):
            raise MemoryError

        patch.setattr(checkpoint, "save", die)
        with pytest.raises(MemoryError):
            command("train", *words)
    assert [step for step, _ in scalars_by_tag(tmp_path)["nll"]] == [1, 2, 3, 4]
    assert command("train", *words) == 0
    scalars = scalars_by_tag(tmp_path)
    assert [step for step, _ in scalars["score"]] == [2, 4]
    assert scalars == logged_by_tag(tmp_path)
    assert command("train", *words, "fresh=true") == 0
    assert scalars_by_tag(tmp_path) == logged_by_tag(tmp_path)


def test_both_options_of_draws_change_a_training(tmp_path):
    """Symmetries and the discount of steps, each for itself: other weights after a step than
    without.
    """
    spread = (
        "dataset=spread",
        "dataset.actions=continuous",
        "dataset.groups=20",
        "head=gaussian",
        *LOOP[2:],
        *NANO,
    )
    runs = {"plain": (), "turned": ("augment=symmetries",), "early": ("data.step_discount=0.5",)}
    for name, words in runs.items():
        assert command("train", *spread, *words, "steps=1", f"run={tmp_path}/{name}") == 0
    plain, turned, early = (saved(tmp_path / name) for name in runs)
    assert not same_bits(plain, turned) and not same_bits(plain, early)


def test_paraphrased_texts_resume_to_the_bit_and_are_not_those_of_one_wording(
    tmp_path, monkeypatch
):
    maze = ("dataset=maze2d-umaze", "dataset.steps=800", *LOOP[2:], *NANO, "data.held_out=0.3")
    assert command("train", *maze, "text=paraphrased", f"run={tmp_path}/straight") == 0
    with monkeypatch.context() as patch:
        interrupt(patch, step=1)
        assert command("train", *maze, "text=paraphrased", f"run={tmp_path}/resumed") == 130
    assert command("train", *maze, "text=paraphrased", f"run={tmp_path}/resumed") == 0
    assert same_bits(saved(tmp_path / "straight"), saved(tmp_path / "resumed"))
    assert metrics(tmp_path / "straight") == metrics(tmp_path / "resumed")
    assert (
        command("train", *maze, "text=paraphrased", "text_wordings=1", f"run={tmp_path}/one") == 0
    )
    assert command("train", *maze, "text=goal", f"run={tmp_path}/goal") == 0
    assert same_bits(saved(tmp_path / "one"), saved(tmp_path / "goal")), (
        "the first frame is the goal's text"
    )
    assert not same_bits(saved(tmp_path / "one"), saved(tmp_path / "straight"))

    def measured(name):
        policy = loading.load(tmp_path / name)
        config = policy.config
        return measure_losses(
            policy, config, store_cache.prepare_store(config["dataset"], config["cache_dir"]), 1
        )

    assert measured("one") == measured("goal") != measured("straight")


def test_a_run_of_other_texts_is_not_continued_though_its_store_is_the_same(tmp_path, capsys):
    maze = (
        "dataset=maze2d-umaze",
        "dataset.steps=800",
        *LOOP[2:],
        *NANO,
        f"run={tmp_path}/run",
        f"cache_dir={tmp_path}",
    )
    assert command("train", *maze, "text=goal") == 0
    assert command("train", *maze, "text=paraphrased") == 1
    refused = capsys.readouterr().err
    assert "run holds another run" in refused and "text was 'goal', is 'paraphrased'" in refused
    assert len([*(tmp_path / "stores").iterdir()]) == 1


def test_paraphrased_texts_of_a_team_are_refused(tmp_path, capsys):
    options = (
        "dataset=maze2d-umaze",
        "dataset.steps=800",
        "text=paraphrased",
        "team.execution=joint",
        *LOOP[2:],
        *NANO,
    )
    assert command("train", *options, f"run={tmp_path}") == 1
    assert (
        "text: expected team.execution=per_agent with text=paraphrased" in capsys.readouterr().err
    )


def test_a_decoding_that_the_head_lacks_is_refused_before_a_run_begins(tmp_path, capsys):
    options = (*LOOP, *NANO, "head=bins", "act.decode=unclipped", f"run={tmp_path}/run")
    assert command("train", *options) == 1
    assert "decode: unclipped needs head=gaussian, got BinsHead" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_text_that_leaves_no_room_for_a_window_is_refused_before_a_run_begins(tmp_path, capsys):
    """It is one of many, so that it may be drawn late."""
    folder = write(tmp_path / "model", "GPT2", n_positions=32)
    texts = ["Go north."] * 20 + ["Go north, then south, then north, then south, then north."]
    episodes = [episode(np.ones(6), task=task, group=i) for i, task in enumerate(texts)]
    log = make_store(tmp_path / "log", episodes)
    options = (
        "dataset=store",
        f"dataset.path={log.path}",
        "backbone=pretrained",
        f"backbone.folder={folder}",
        *LOOP[2:],
    )
    assert command("train", *options, f"run={tmp_path}/run") == 1
    assert "text and window: expected at most 32 tokens" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert command("train", *options, "window=1", f"run={tmp_path}/short") == 0
