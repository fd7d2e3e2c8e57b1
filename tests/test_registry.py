"""Whatever is registered composes on the command line with its defaults and is built; a mistake is
refused by name.
"""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import decisionllm
from decisionllm import registry
from decisionllm.__main__ import run
from decisionllm.choices import CHOICES as CHOICES_OF_CORE
from decisionllm.command_line import config_folder, store_choices
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.datasets.windows import load_steps
from decisionllm.protocols import Env, Estimator, Objective, Planner
from decisionllm.registry import build, choice, discover, function_targets
from decisionllm.schema import Spec
from tests.backbones.test_backbones import write
from tests.conftest import episode, make_store

pytestmark = pytest.mark.slow

CHOICES = [(group, name) for group, choices in discover().items() for name in choices]
SPEC = Spec(observation_dim=2, action_dim=2, horizon=20, low=(-1.0, -1.0), high=(1.0, 1.0))


def compose_config(capsys, *overrides):
    """The configuration that `decisionllm train` would run with, made by the command line
    itself.
    """
    code = run("train", [*overrides, "--cfg", "job", "--resolve"])
    out, err = capsys.readouterr()
    return yaml.safe_load(out) if code == 0 else (code, err)


@pytest.fixture(scope="module")
def nodes():
    """The composed node of every choice, {(group, name): node}; one config has a choice of each
    group.
    """
    store_choices()
    choices = {group: [*names] for group, names in discover().items()}
    envs = choices.pop("env")
    # an env takes options of its dataset, where there is one of its name, which chooses it too
    configs_to_compose = [{"env": name} for name in envs if name not in choices["dataset"]]
    for names in zip_longest(*choices.values()):
        row = {group: name for group, name in zip(choices, names, strict=True) if name}
        if row.get("dataset") in envs:
            row["env"] = row["dataset"]
        configs_to_compose.append(row)
    nodes = {}
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        for row in configs_to_compose:
            implied = "env" if "dataset" in row and "env" in row else None
            words = [f"{group}={name}" for group, name in row.items() if group != implied]
            if "env" not in row:
                words.append("env=none")
            config = compose("train", words)
            for group, name in row.items():
                node = config[group]
                OmegaConf.resolve(node)
                nodes[group, name] = OmegaConf.to_container(node)
    return nodes


@pytest.fixture(autouse=True)
def command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")


def test_every_choice_composes_with_its_defaults(nodes):
    wrong = []
    for group, name in CHOICES:
        defaults, node = discover()[group][name], nodes[group, name]
        if node.keys() != defaults.keys():
            wrong.append(f"{group}={name}: composed {sorted(node)}, registered {sorted(defaults)}")
            continue
        for key, value in node.items():  # a default may refer to what was chosen elsewhere
            right = "${" not in str(value) if "${" in str(defaults[key]) else value == defaults[key]
            if not right:
                wrong.append(f"{group}={name}: {key}={value}, registered {defaults[key]}")
    assert not wrong, "\n".join(wrong)


def test_what_needs_a_name_or_a_package_says_so(nodes, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)  # it is not there, or is not to be asked
    for group, name in CHOICES:
        node = nodes[group, name]
        if missing := sorted(key for key, value in node.items() if value == "???"):
            with pytest.raises(ValueError, match=f"give a value to {', '.join(missing)}"):
                build(node)
    with pytest.raises(ValueError, match="expected either"):
        build(nodes["backbone", "pretrained"], 0)
    for group, *supplied in (("dataset",), ("env", 3)):
        with pytest.raises(ImportError, match="pip install"):
            build(nodes[group, "smax"], *supplied)


def test_what_has_no_contract_of_its_own_is_built_with_its_defaults(nodes, tmp_path):
    """Heads, backbones, datasets and environments are built in tests/contracts."""
    encoder = {"folder": str(write(tmp_path / "encoder")), "layer": 2}
    log = make_store(tmp_path / "log", [episode([1.0], A=2)] * 10)
    nobody = np.zeros(10, bool)
    supplied = {
        "augment": (lambda step: None, log, 0, nobody),
        "fill_actions": (log, load_steps(log), np.arange(10), 0),
        "tokenizer": (SPEC, 8, True, False),
        "objective": (8, SPEC),
        "planner": (SPEC,),
        "text_encoder": (8, 0),
        "transform": (log,),
    }
    assert discover().keys() == supplied.keys() | {"head", "backbone", "dataset", "env"}
    for group, name in CHOICES:
        if group in supplied:
            own = encoder if group == "text_encoder" else {}
            assert build(nodes[group, name] | own, *supplied[group]) is not None


def test_every_part_of_the_package_is_in_a_table():
    """A module that defines an environment, an objective, a planner, an estimator or a reader of
    datasets is named by a row of a table.
    """
    targets = [name for group in registry._read_tables() for name in function_targets(group)]
    modules = {target.rpartition(".")[0] for target in targets}
    for module in pkgutil.walk_packages(decisionllm.__path__, "decisionllm."):
        if not module.name.endswith(("__main__", "bidding.server")):
            importlib.import_module(module.name)
    readers = [name for name, module in sys.modules.items() if "READER" in vars(module)]
    parts = [
        cls.__module__ for base in (Env, Objective, Planner, Estimator) for cls in leaves(base)
    ]
    own = {name for name in readers + parts if name.startswith("decisionllm.")}
    assert len(own) > 5 and own <= modules, own - modules


def test_a_table_names_its_own_folder_alone():
    """The choices that go with a neighbour's folder are in no other table."""
    for folder in registry.NEIGHBOURS:
        if (registry.PACKAGE / folder / "choices.py").is_file():
            table = importlib.import_module(f"decisionllm.{folder}.choices").CHOICES
            assert {target.split(".")[1] for target in targets_of(table)} == {folder}
    folders = {target.split(".")[1] for target in targets_of(CHOICES_OF_CORE)}
    assert folders.isdisjoint({*registry.NEIGHBOURS, "export", "scaling"})


def targets_of(table):
    return [node["_target_"] for nodes in table.values() for node in nodes.values()]


def leaves(base):
    """The classes below a class that have no subclasses themselves."""
    below = base.__subclasses__()
    return [leaf for cls in below for leaf in leaves(cls)] or [base]


@pytest.fixture
def add_table(monkeypatch, tmp_path):
    """A function that writes `heads.py` and the rows of a table for heads, and reads the table."""

    def add(rows, source):
        (tmp_path / "heads.py").write_text(source, encoding="utf-8")
        table = f"CHOICES = {{'head': {rows}}}\n"
        (tmp_path / "choices.py").write_text(table, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "choices", raising=False)
        merged = {"head": {"taken": {"_target_": "decisionllm.models.heads.BinsHead"}}}
        registry._add_table(merged, "choices")
        return merged["head"]

    yield add
    sys.modules.pop("choices", None)
    registry._parse_module.cache_clear()


def test_keyword_only_parameters_are_options_and_positional_ones_are_supplied(add_table):
    """Rows of one callable differ in their defaults; an option without one must be given."""
    rows = {"a": {"_target_": "heads.Load", "size": 3}, "b": {"_target_": "heads.Load"}}
    source = "class Load:\n    def __init__(self, seed, *, path: str, size=1): ...\n"
    nodes = add_table(rows, source)
    assert nodes["a"] == {"_target_": "heads.Load", "path": "???", "size": 3}
    assert nodes["b"] == {"_target_": "heads.Load", "path": "???", "size": 1}


def test_two_rows_of_one_name_are_refused(add_table):
    both = "head=taken is in two rows: decisionllm.models.heads.BinsHead and heads.one"
    with pytest.raises(ValueError, match=both):
        add_table({"taken": {"_target_": "heads.one"}}, "def one(): ...\n")


def test_a_row_with_a_misspelt_option_says_what_there_is(add_table):
    row = {"_target_": "heads.one", "num_binz": 3}
    with pytest.raises(
        ValueError, match="head=mine: heads.one has no option num_binz; it has num_bins, deep"
    ):
        add_table({"mine": row}, "def one(width, *, num_bins: int = 8, deep=False): ...\n")


def install(folder, module, row):
    """Put the package theirlab, whose entry point names the module of its table, into a folder."""
    (folder / "theirlab.py").write_text(
        f"CHOICES = {{'head': {{'mine': {row}}}}}\ndef one(*, size=1): ...\n", encoding="utf-8"
    )
    installed = folder / "theirlab-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: theirlab\nVersion: 1\n", encoding="utf-8"
    )
    (installed / "entry_points.txt").write_text(
        f"[decisionllm]\nmine = {module}\n", encoding="utf-8"
    )


def test_an_installed_package_adds_the_rows_of_its_table(tmp_path, monkeypatch):
    row = {"_target_": "theirlab.one", "size": 3}
    install(tmp_path, "theirlab", row)
    monkeypatch.syspath_prepend(tmp_path)
    heads = registry._read_tables.__wrapped__()["head"]
    assert heads["mine"] == row and "bins" in heads


@pytest.mark.parametrize(
    ("module", "wrong"),
    [
        ("theirlab", "theirlab.one has no option width; it has size"),
        ("theirlabs", "No module named 'theirlabs'"),
    ],
)
def test_an_installed_package_with_a_mistake_is_named(module, wrong, tmp_path):
    """Every command reads the table of the package."""
    install(tmp_path, module, {"_target_": "theirlab.one", "width": 3})
    path = os.pathsep.join([str(tmp_path), *sys.path])
    words = [sys.executable, "-m", "decisionllm", "train", "--help"]
    done = subprocess.run(
        words,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
    )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"decisionllm: entry point decisionllm:mine ({module}) is wrong" in done.stderr
    assert wrong in done.stderr and "uninstall the package" in done.stderr


def test_a_choice_made_in_python_takes_the_callables_own_defaults():
    """On the command line `${text}` is what `text=` says; a choice made in Python has nothing to
    refer to.
    """
    env = build(choice("env", "gymnasium", id="CartPole-v1"), 1)
    assert env.text == "none" and env.tasks == [""]
    with pytest.raises(
        ValueError, match="decisionllm.eval.gymnasium.recover: give a value to minari_id"
    ):
        build(choice("env", "minari"), 1)


def test_text_auto_of_our_own_data_and_environments_is_none(tmp_path):
    nodes = [choice("dataset", "synthetic", episodes=4, text=text) for text in ("auto", "none")]
    auto, none = (prepare_store(node, tmp_path) for node in nodes)
    assert auto.path == none.path and auto.tasks == none.tasks == ("",)
    env = build(choice("env", "synthetic", text="auto"), 2)
    assert env.text == "none" and not any(env.tasks)


def test_a_path_in_a_choice_is_text_in_its_config():
    made = choice("dataset", "store", path=Path("data") / "corridor")
    assert json.loads(json.dumps(made))["path"] == str(Path("data") / "corridor")


def test_somebody_elses_class_needs_no_registration():
    assert build({"_target_": "collections.Counter", "a": 2}, "ab") == {"a": 3, "b": 1}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("head=bims", "no head 'bims'; did you mean bins?"),
        ("head.num_binz=3", "no key 'head.num_binz' in the config; there are head._target_"),
        ("windw=3", "no key 'windw' in the config; did you mean window?"),
    ],
)
def test_a_mistake_on_the_command_line_is_refused_by_name(capsys, override, message):
    code, printed = compose_config(capsys, override)
    assert code == 2 and message in printed and "Traceback" not in printed


def test_the_names_are_known_without_importing_torch():
    code = (
        "import sys, decisionllm.__main__, decisionllm.registry as r; r.discover(); "
        "sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
