"""The command line: what it refuses, in which words and with which exit code, and what it does
without torch.
"""

import json
import shlex
import subprocess
import sys

import pytest
import torch
import yaml

from decisionllm.__main__ import main
from tests.conftest import (
    LOOP,
    NANO,
    PATIENCE,
    command,
    episode,
    interrupt,
    make_store,
    metrics,
)

pytestmark = pytest.mark.slow

USAGE = {
    "trane": "no command 'trane'; did you mean train? there are data, train, baseline, evaluate",
    "train dataset=sinthetic": "no dataset 'sinthetic'; did you mean synthetic? there are arrays, store, minari, lerobot,",
    "train backbone=tinny": "no backbone 'tinny'; did you mean tiny? there are nano, tiny, small, base, dt, pretrained, ",
    "train experiment=missing": "no experiment 'missing'",
    "train -m backbone=tiny,tinny": "no backbone 'tinny'",
    "train stpes=3": "no key 'stpes' in the config; did you mean steps?",
    "train +stpes=3": "no key 'stpes' in the config; did you mean steps?",
    "train backbone.lora_rnk=4": "no key 'backbone.lora_rnk' in the config; did you mean backbone.lora_rank?",
    "train datset=synthetic": "no key 'datset' in the config; did you mean dataset?",
    "train dataset=synthetic dataset.foo=1": "no key 'dataset.foo' in the config; there are dataset._target_, dataset.text, dataset.discrete,",
    "train +head.foo=1": "no key 'head.foo' in the config; there are head._target_, head.deviation",
    "evaluate dataset.noise=1": "no key 'dataset.noise' in the config",
    "train dataset=npz": "no dataset 'npz'; dataset=arrays reads .npz and HDF5 files",
    "train dataset=maze2d": "no dataset 'maze2d'; did you mean maze2d-umaze or maze2d-medium or maze2d-large or",
    "evaluate run=a env.goal=east": "no key 'env.goal' in the config; to add an option to env, write +env.goal=...",
    "train --steps=10": "--steps=10: options have no dashes; write steps=10",
    "train --dataset synthetic": "--dataset: options have no dashes; write dataset=synthetic",
    "train steps=abc": 'steps: expected a whole number, got "abc"',
    "train ~steps": "steps: expected a value, got none",
    "evaluate run=a seed=-1": "seed: expected 0 or more, got -1",
    "evaluate": "run: expected a value, got none; give run=...",
    "scale +study.axes.size.w={backbone.width:8}": "backbone.width: expected keys without a dot;",
    "journal verfy journal=a": "no journal action 'verfy'; did you mean verify? there are report,",
    "train dataset=minari": "dataset.minari_id: expected a value, got none; give dataset.minari_id=...",
    "train": (
        "dataset: expected one, got none; give dataset=synthetic for a first try, "
        "experiment=..., or dataset=... of arrays, store,"
    ),
    "train backbone=nano dataset.episodes=4": "dataset: expected one, got none; give dataset=synthetic",
    "baseline algorithm=iql": "dataset: expected one, got none; give dataset=synthetic",
    "train steps": "steps: expected KEY=VALUE, as in run=runs/first",
    "train optim.lr=1,2": "To sweep over it, add --multirun",
    "train run=runs/x/lr=3": """run=runs/x/lr=3: Hydra reads a value with = in quotes alone; write 'run="runs/x/lr=3"'""",
    "train run=[a": "no viable alternative at input '[a'",
    "train --multirun --cfg job seed=0,1": "--cfg and --info print the configuration of one job: leave --multirun out",
}


def test_defaults_that_name_an_option_of_another_choice_are_all_named(capsys):
    words = ("name=${backbone.weights}", "run=${backbone.weights}")
    assert command("train", "dataset=synthetic", "backbone=nano", *words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("decisionllm: name, run: expected values of their own; ")
    assert "'backbone.weights' not found" in printed
    assert command("train", "dataset=synthetic", "env.text=${backbone.weights}") == 2
    assert capsys.readouterr().err.startswith("decisionllm: env.text: expected values of their own")


@pytest.mark.parametrize("words", USAGE)
def test_what_does_not_exist_is_named_with_the_nearest_that_does(
    words, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["decisionllm", *words.split()])
    assert main() == 2
    printed = capsys.readouterr().err
    assert (
        printed.startswith("decisionllm: ") and USAGE[words] in printed and printed.count("\n") == 1
    )


def test_several_values_replace_the_one_of_an_experiment(tmp_path, monkeypatch, capsys):
    """Both levels are read: the second is refused by its name."""
    monkeypatch.chdir(tmp_path)
    level = "dataset.level=[GoToLocal,Nowhere]"
    assert command("train", "experiment=babyai-rooms", level, "run=a") == 1
    printed = capsys.readouterr().err
    assert (
        "dataset.level: expected a BabyAI level of MiniGrid" in printed
        and "got 'Nowhere'" in printed
    )


def test_the_way_to_write_a_value_in_quotes_works(tmp_path, monkeypatch, capsys):
    """As the message above says it, in a shell; ~ is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = shlex.split("""'run="~/x/lr=3"' 'init_from="~/b"'""")
    monkeypatch.chdir(tmp_path)
    assert command("train", *LOOP, *NANO, *words[:1]) == 0
    assert (tmp_path / "x" / "lr=3" / "run.json").is_file()
    assert command("train", *LOOP, *NANO, f"run={tmp_path}/c", words[1]) == 1
    assert f"{tmp_path}/b: expected a run directory" in capsys.readouterr().err
    for runs in ('run="~/x/*"', 'run=["~/x/lr=3"]', f'run="{tmp_path}/x/lr=[0-9]"'):
        words = ("episodes=1", 'out="~/out"', "report=false", "baselines=false")
        assert command("evaluate", runs, *words) == 0
    assert len((tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data dataset=arrays dataset.path=12", "12: expected an .npz or HDF5 file"),
        ("data dataset=minari dataset.minari_id=12", "12: no such Minari dataset"),
        ("export run=12 path=13", "12: expected a run directory"),
        ("export run=12 path=13 format=transformers", "12: expected a run directory"),
        ("journal verify journal=12", "journal: expected"),
    ],
)
def test_a_name_of_a_file_may_be_a_number(words, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert command(*words.split()) == 1
    assert message in capsys.readouterr().err


def test_help_and_usage_errors_do_not_wait_for_torch():
    questions = [
        "--help",
        "--version",
        "",
        "trane",
        "train --help",
        "evaluate --cfg=job",
        "train stpes=3",
        "train head=no",
        "train steps=a",
    ]
    script = """
import sys
from decisionllm.__main__ import main
for words in sys.argv[1:]:
    sys.argv = ["decisionllm", *words.split()]
    try:
        code = main()
    except SystemExit as exit:  # after --help
        code = exit.code
    print(f"[{code}]", file=sys.stderr)
    assert "torch" not in sys.modules, words
"""
    done = subprocess.run(
        [sys.executable, "-c", script, *questions],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        encoding="utf-8",
    )
    assert [line for line in done.stderr.splitlines() if line[0] == "["] == [
        f"[{code}]" for code in (0, 0, 2, 2, 0, 0, 2, 2, 2)
    ], done.stderr
    for words in (
        "data  ",
        "train ",
        "evaluate",
        "backbone: base, dt, nano",
        "steps=2000",
        "episodes: 100",
    ):
        assert words in done.stdout


def test_a_module_run_by_name_exits_with_the_code():
    done = subprocess.run(
        [sys.executable, "-m", "decisionllm", "trane"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        encoding="utf-8",
    )
    assert done.returncode == 2 and done.stdout == ""


FAILED = {
    "optim.batch_size=7 optim.accumulate=2": "batch_size: expected a multiple of 1 processes x optim.accumulate=2, got 7",
    "text=shuffled": "dataset.text: expected one of none, goal, got 'shuffled'",
    "head=discrete": "head=discrete: expected discrete actions, got continuous ones",
    "data.fraction=2.0": "data.fraction: expected above 0 and at most 1, got 2.0",
    "backbone.tune=half": "backbone.tune: expected one of lora, full, frozen, got 'half'",
    "head._target_=theirlab.heads.Flow": "theirlab.heads.Flow: No module named 'theirlab'; PYTHONPATH=FOLDER says where it is",
    "head._target_=Flow": "Flow: expected the path of a class or function, such as mylab.Flow",
    "head._target_=collections.ChainMap": "expected a head with loss_floor and entities, see protocols.Head",
    "head._target_=decisionllm.models.heads.Flow": "decisionllm.models.heads.Flow: module 'decisionllm.models.heads' has no attribute 'Flow'",
}


@pytest.mark.parametrize("words", FAILED)
def test_a_run_that_fails_says_why_in_one_line(words, capsys, tmp_path):
    assert command("train", *LOOP, *NANO, *words.split(), f"run={tmp_path}/run") == 1
    printed = capsys.readouterr().err
    assert (
        printed.startswith("decisionllm: ")
        and FAILED[words] in printed
        and printed.count("\n") == 1
    )


MISTAKES = """
import json
import numpy as np
import pandas as pd
from decisionllm.files import explain_errors
def refusal():
    raise ValueError("too few rows")
def wrapped():
    try:
        json.loads("{")
    except ValueError as error:
        raise ValueError("too few rows") from error
def explained_by_the_package():
    with explain_errors("too few rows", ValueError):
        float("x")
def pandas():
    pd.Series([1, 2], index=[0, 0]).reindex([0, 1])
def numpy():
    np.zeros(2) + np.zeros(3)
def standard_library():
    json.loads("{")
def conversion():
    float("x")
def overflow():
    with np.errstate(over="raise"):
        np.float64(1e308) * 10
"""


@pytest.mark.parametrize(
    ("encoding", "flag"),
    [
        ("utf-8-sig", "--config-dir {}"),
        ("latin-1", "--config-dir={}"),
        ("utf-16", "--config-dir {}"),
    ],
)
def test_a_config_in_another_encoding_is_named(encoding, flag, tmp_path, capsys):
    file = tmp_path / "mine" / "experiment" / "north.yaml"
    file.parent.mkdir(parents=True)
    text = "# @package _global_\n# nach Köln\ndefaults: [/dataset: synthetic]\n"
    file.write_text(text, encoding=encoding)
    words = flag.format(tmp_path / "mine").split()
    code = command("data", *words, "dataset=synthetic", "+experiment=north")
    printed = capsys.readouterr().err
    if encoding.startswith("utf-8"):
        assert "utf" not in printed.lower()
    else:
        assert code == 2 and printed.startswith(
            f"decisionllm: {file}: expected UTF-8 ('utf-8' codec"
        )
        assert printed.count("\n") == 1


@pytest.mark.parametrize("name", ["refusal", "wrapped", "explained_by_the_package"])
def test_an_error_that_a_reader_raises_is_one_line(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "fifthlab.py").write_text(MISTAKES, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert command("data", "dataset=arrays", f"dataset._target_=fifthlab.{name}") == 1
    printed = capsys.readouterr().err
    assert printed.startswith("decisionllm: too few rows") and printed.count("\n") == 1


@pytest.mark.parametrize("name", ["pandas", "numpy", "standard_library", "conversion", "overflow"])
def test_an_unexpected_error_shows_its_traceback(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "fifthlab.py").write_text(MISTAKES, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert command("data", "dataset=arrays", f"dataset._target_=fifthlab.{name}") == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback") and f"in {name}\n" in printed
    assert printed.splitlines()[-1].startswith("decisionllm: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys, tmp_path):
    message = "device=cuda: no GPU that torch can use was found; take device=cpu"
    words = ("train", *LOOP, *NANO, f"run={tmp_path}")
    assert command(*words, "device=cuda") == 1
    assert message in capsys.readouterr().err
    assert command(*words) == 0
    assert command("evaluate", f"run={tmp_path}", "device=cuda") == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "hub_id=nobody/nothing",
            "backbone nobody/nothing: could not be loaded (no copy in the cache, and no network or "
            "no such model; ",
        ),
        (
            "folder=/nowhere",
            "backbone.folder: expected a model's config.json or a run's run.json, found none at "
            "/nowhere",
        ),
        (
            "tune=lora",
            "expected either backbone.folder=<local folder> or backbone.hub_id=<name on the hub>",
        ),
    ],
)
def test_a_model_that_is_not_there(words, message, capsys, tmp_path):
    assert (
        command("train", *LOOP, "backbone=pretrained", f"backbone.{words}", f"run={tmp_path}/run")
        == 1
    )
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


def test_somebody_elses_head_keeps_its_own_options(tmp_path, monkeypatch):
    """The options of the head it stands in for are not passed to it, those that were given are."""
    (tmp_path / "otherlab").mkdir()
    (tmp_path / "otherlab" / "heads.py").write_text(
        """
from torch import nn
from decisionllm.models.heads import Gaussian
class Flow(nn.Module):
    entities = None
    def __init__(self, width, spec, *, deviation=0.1, layers=1):
        super().__init__()
        self.deviation, self.loss_floor = deviation, 0.0
        self.out = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)), nn.Linear(width, spec.action_dim))
    def forward(self, hidden, action_masks=None):
        return Gaussian(self.out(hidden), self.deviation)
""",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("head._target_=otherlab.heads.Flow", "+head.layers=2", "head.deviation=0.25")
    assert command("train", *LOOP, *NANO, *words, f"run={tmp_path}/run") == 0
    assert "{_target_: otherlab.heads.Flow, deviation: 0.25, layers: 2}" in (
        tmp_path / "run" / "config.yaml"
    ).read_text(encoding="utf-8").replace("\n  ", ", ").replace("head:, ", "{").replace(
        "layers: 2\n", "layers: 2}"
    )
    trust = "trust=[otherlab]"
    assert command("evaluate", f"run={tmp_path}/run", f"out={tmp_path}", "episodes=2", trust) == 0


@pytest.mark.parametrize("dataset", ["store", "arrays"])
def test_somebody_elses_reader_and_environment_have_the_text_of_the_run(
    dataset, tmp_path, monkeypatch, capsys
):
    (tmp_path / "fourthlab.py").write_text(
        """
from dataclasses import replace
from decisionllm.datasets import synthetic as dataset
from decisionllm.eval import synthetic as env
def load(*, text="none"):
    source = dataset.load(episodes=40)
    return replace(source, episodes=[replace(e, task=text) for e in source.episodes])
class World(env.PointEnv):
    def __init__(self, num_episodes, *, text="none"):
        super().__init__(num_episodes)
        self.tasks = [text] * num_episodes
""",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = (f"dataset={dataset}", "dataset._target_=fourthlab.load", "env._target_=fourthlab.World")
    words = [*own, *LOOP[2:], *NANO]
    for text, override in (("east", []), ("west", ["++dataset.text=west"])):
        assert command("data", *own, "text=east", *override) == 0
        assert f"of episode 0: '{text}'" in capsys.readouterr().out
    if dataset == "arrays":
        assert command("train", *words, "text=east", f"run={tmp_path}/run") == 0
        config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
        assert config["dataset"] == {"_target_": "fourthlab.load", "text": "east"}
        assert config["env"] == {"_target_": "fourthlab.World", "text": "east"}


@pytest.mark.parametrize("verb", ["data", "train"])
def test_a_text_that_no_episode_has_is_refused(verb, tmp_path, capsys):
    make_store(tmp_path / "store", [episode([1, 2])] * 2)
    words = ["dataset=store", f"dataset.path={tmp_path}/store", "text=episode"]
    if verb == "train":
        words += [*LOOP[2:], *NANO, f"run={tmp_path}/run"]
    assert command(verb, *words) == 1
    assert "text=episode: expected episodes with a task text, got none" in capsys.readouterr().err


def test_numbers_take_the_type_of_their_default(tmp_path):
    assert (
        command("train", *LOOP, *NANO, "steps=4e0", "optim.lr=1", "name=7", f"run={tmp_path}") == 0
    )
    lines = (tmp_path / "config.yaml").read_text(encoding="utf-8").splitlines()
    assert {"steps: 4", "  lr: 1.0", "name: '7'", "  lr_backbone: 1.0"} <= set(lines)


def test_a_command_composes_what_hydras_entry_point_composes(tmp_path):
    """An option of Hydra's own takes its entry point."""
    words = ("train", *LOOP, *NANO, "text=goal", "backbone=nano")
    assert command(*words, f"run={tmp_path}/once") == 0
    assert command(*words, f"run={tmp_path}/entry", "hydra.verbose=false") == 0
    once, entry = (
        (tmp_path / name / "config.yaml").read_text(encoding="utf-8") for name in ("once", "entry")
    )
    assert once.replace("/once", "/entry") == entry


def test_a_sweep_goes_on_after_a_failed_run_and_stops_at_ctrl_c(tmp_path, monkeypatch, capsys):
    words = ("--multirun", *LOOP, *NANO, f"hydra.sweep.dir={tmp_path}")
    assert command("train", *words, f"run={tmp_path}/${{optim.lr}}", "optim.lr=0,0.01") == 1
    assert (
        "optim.lr: expected more than 0" in capsys.readouterr().err
        and len(metrics(tmp_path / "0.01")) == 4
    )
    interrupt(monkeypatch, step=1)
    assert command("train", *words, f"run={tmp_path}/${{window}}", "window=5,6") == 130
    assert len(metrics(tmp_path / "5")) == 2 and not (tmp_path / "6").exists()


def test_data_prints_the_card(capsys):
    assert command("data", "dataset=synthetic", "dataset.episodes=8") == 0
    assert "8 in 8 groups" in capsys.readouterr().out
    assert command("data", "dataset=synthetic", "dataset.episodes=8", "export=paper:x") == 1
    assert json.dumps("paper:x")[1:-1] in capsys.readouterr().err
