"""A config from disk imports registered choices alone, unless the user trusts the module."""

import json
import shutil
import sys
from dataclasses import asdict

import numpy as np
import pytest
import transformers
import yaml

from decisionllm import registry, trust
from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.serve import build_model_folder, load_run
from decisionllm.bidding.serve_options import ServeConfig
from decisionllm.command_line import fill_defaults
from decisionllm.commands.options import read_options
from decisionllm.commands.train import train
from decisionllm.config import GROUPS, TrainConfig
from decisionllm.datasets import minari, minari_export
from decisionllm.datasets.mixture import evaluation_parts
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.datasets.store import open_store
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.eval.minari_export import Single
from decisionllm.policy import loading
from decisionllm.runs import directory
from decisionllm.schema import Spec
from decisionllm.teams.pettingzoo.env import PettingZooTeams
from decisionllm.tokenizers.text import own_tokenizer
from tests.conftest import LOOP, NANO, command, episode, make_store, node

TRAP = {"_target_": "trap.spring", "path": "/etc"}
SPEC = asdict(Spec(observation_dim=2, action_dim=1, horizon=50, low=(-1.0,), high=(1.0,)))


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that says whether it was imported."""
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "trap.py").write_text(
        "def spring(*arguments, **options): return 1\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path / "lab")
    yield lambda: "trap" in sys.modules
    sys.modules.pop("trap", None)


def foreign(path, *, info=None, **changes):
    """A run folder that somebody else wrote: this config, and run.json."""
    config = TrainConfig(
        dataset=node("dataset", "synthetic"),
        backbone=node("backbone", "nano"),
        head=node("head", "gaussian"),
        env=node("env", "synthetic"),
    )
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(asdict(config) | changes), encoding="utf-8")
    only = {"spec": SPEC, "targets": {"0.9": 1.0}}
    run = {"format": directory.FORMAT, "embodiments": {ONLY: only}, "parts": {}}
    (path / "run.json").write_text(json.dumps(run | (info or {})), encoding="utf-8")
    return path


def mixture(part):
    return {"dataset": node("dataset", "mixture", parts={"a": part, "b": "synthetic"})}


# how a config, and run.json, would import the module `trap`
IMPORTS = {
    **{group: {group: TRAP} for group in GROUPS},
    "policy": {"policy": TRAP},
    "part of a mixture": mixture(TRAP),
    "env of a part": mixture({"dataset": "synthetic", "env": TRAP}),
    "listed part": {"dataset": node("dataset", "embodiments", parts=[TRAP])},
    "head of a part": mixture({"dataset": "synthetic", "head": TRAP}),
    "env within a dataset": {"dataset": node("dataset", "synthetic") | {"env": TRAP}},
    "part in run.json": {"info": {"parts": {"a": {"env": TRAP, "embodiment": ONLY}}}},
    "embodiment in run.json": {"info": {"embodiments": {"a": {"spec": SPEC, "x": [TRAP]}}}},
    "gymnasium id": {"env": node("env", "gymnasium", id="trap:Env-v0")},
    "gymnasium argument": {
        "env": node("env", "gymnasium", id="GymV26Environment-v0", arguments={"env_id": "trap:E"})
    },
    "pettingzoo id": {"env": node("env", "pettingzoo", id="trap")},
    "partner": {
        "env": node("env", "pettingzoo", id="mpe2.simple_v3", partners={"a": "trap.spring"})
    },
}


# beside `load`: every command once, and `evaluate` where it builds an environment
COMMANDS = dict.fromkeys(IMPORTS, ()) | {
    "head": ("evaluate", "compare", "export", "serve"),
    "env": ("evaluate", "compare"),
    "env of a part": ("evaluate", "compare"),
    "part in run.json": ("evaluate",),
    "gymnasium id": ("evaluate",),
    "gymnasium argument": ("evaluate",),
    "pettingzoo id": ("evaluate",),
    "partner": ("evaluate",),
}


@pytest.mark.parametrize("place", IMPORTS)
def test_a_foreign_run_imports_nothing(place, trap, tmp_path, capsys):
    run = foreign(tmp_path / "run", **IMPORTS[place])
    with pytest.raises(ValueError, match=r"trap.*add trust=\[trap\]"):
        loading.load(run)
    for verb in COMMANDS[place]:
        assert command(verb, f"run={run}") == 1
        assert "add trust=[trap] to the command" in capsys.readouterr().err
    assert not trap()


# callables that need no file of one's own
NAMES = (
    "runpy.run_path",
    "builtins.exec",
    "decisionllm.files.write_json",
    "decisionllm.commands.data.Console",
    "decisionllm.datasets.arrays.np.save",
    "decisionllm.eval.minari_export.export",
    "decisionllm.models.heads.GaussianHead.__init__",
    " decisionllm.models.heads.GaussianHead",
    "none.none",
    "",
    None,
    ["decisionllm.models.heads.GaussianHead"],
)


@pytest.mark.parametrize("name", NAMES)
def test_only_registered_targets_are_built(name, tmp_path):
    run = foreign(tmp_path / "run", head={"_target_": name})
    with pytest.raises(ValueError, match=r"expected registered choices, got head\._target_="):
        loading.load(run)


def test_modules_of_another_version_are_said_to_be_such(tmp_path):
    run = foreign(tmp_path / "run", head={"_target_": "decisionllm.domains.maze2d.heads.Gone"})
    with pytest.raises(ValueError, match="expected modules of this version of decisionllm, got"):
        loading.load(run)
    assert not trust.is_of_another_version("decisionllm.models.heads.GaussianHead.__init__")
    assert not trust.is_of_another_version("mylab.domains.Head")


@pytest.mark.parametrize(
    "text",
    [
        "${oc.create:'{_target_: trap.spring}'}",
        "${oc.decode:'{_target_: trap.spring}'}",
        "${oc.select:nothing,{_target_: trap.spring}}",
        "${oc.env:HOME}",
        "a ${text}",
    ],
)
def test_a_foreign_run_computes_no_options(text, trap, tmp_path):
    for changes in ({"head": text}, {"name": text}, {"dataset": {"parts": [text]}}):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        with pytest.raises(ValueError, match="expected resolved values, got"):
            loading.load(foreign(tmp_path / "run", **changes))
    assert not trap()


def test_a_list_within_itself_is_walked_once(tmp_path):
    run = foreign(tmp_path / "run")
    (run / "config.yaml").write_text("a: &a [*a, {_target_: os.getcwd}]\n", encoding="utf-8")
    with pytest.raises(ValueError, match="a.1._target_=os.getcwd"):
        loading.load(run)


def test_a_name_covers_what_is_below_it_and_no_more():
    named = trust.Import("head._target_", "mylab.heads.Flow", "mylab.heads.Flow")
    for module in ("mylab", "mylab.heads", "mylab.heads.Flow"):
        with trust.trust_modules([module]):
            trust.check_imports([named], "run")
    for module in ("myla", "mylab.head", "heads", "", "mylab."):
        with trust.trust_modules([module]), pytest.raises(ValueError, match="mylab.heads.Flow"):
            trust.check_imports([named], "run")
    with pytest.raises(ValueError, match="expected names of modules"), trust.trust_modules([3]):
        pass


def test_every_registered_choice_is_read_as_before(tmp_path):
    """Their references to other options too, which a config made in Python may still have."""
    needs_more = {"gymnasium": {"id": "CartPole-v1"}, "pettingzoo": {"id": "mpe2.simple_tag_v3"}}
    for group in GROUPS:
        for name, choice in registry.discover().get(group, {}).items():
            options = needs_more.get(name, {}) if group == "env" else {}
            trust.check_config({group: choice | options}, f"{group}={name}")


def test_partners_that_the_package_has_are_registered(tmp_path):
    """As experiment=tag names them."""
    tag = "decisionllm.teams.spread.tag"
    options = {"id": "mpe2.simple_tag_v3", "partners": {"agent": f"{tag}.flee", "b": "random"}}
    trust.check_config({"env": node("env", "pettingzoo", **options)}, "run")
    options["partners"]["agent"] = f"{tag}.teachers"
    with pytest.raises(ValueError, match=r"trust=\[decisionllm.teams.spread.tag.teachers\]"):
        trust.check_config({"env": node("env", "pettingzoo", **options)}, "run")


def test_a_run_that_another_one_reads_is_refused_too(trap, tmp_path):
    run = foreign(tmp_path / "run", env=TRAP)
    with pytest.raises(ValueError, match="env._target_=trap.spring"):
        prepare_store(registry.choice("dataset", "imagined", run=str(run)), tmp_path / "data")
    with pytest.raises(ValueError, match="env._target_=trap.spring"):
        registry.build(node("backbone", "pretrained", folder=str(run), tune="full"), 0)
    with pytest.raises(ValueError, match="env._target_=trap.spring"):
        registry.build(node("text_encoder", "features", folder=str(run)), 8, 0)
    with pytest.raises(ValueError, match="env._target_=trap.spring"):
        PettingZooTeams(1, id="mpe2.simple_tag_v3", horizon=4, partners={"agent": str(run)})
    words = (*LOOP, *NANO, f"cache_dir={tmp_path}/data")
    assert command("train", *words, f"init_from={run}", f"run={tmp_path}/new") == 1
    assert not trap()


def test_the_card_of_a_foreign_store_imports_nothing(trap, tmp_path):
    made = make_store(tmp_path / "store", [episode([1.0, 2.0])])
    card = json.loads((made.path / "card.json").read_text(encoding="utf-8"))
    card["info"]["parts"] = {"a": {"dataset": {"name": "a"}, "env": TRAP}}
    (made.path / "card.json").write_text(json.dumps(card), encoding="utf-8")
    dataset = registry.choice("dataset", "store", path=str(made.path))
    with pytest.raises(ValueError, match="a.env._target_=trap.spring"):
        evaluation_parts(dataset, {ONLY: open_store(made.path)})
    assert not trap()


def test_the_environment_of_a_foreign_minari_dataset_is_not_made(trap, tmp_path):
    made = make_store(tmp_path / "store", [episode([1.0, 2.0])])
    minari_export.export_store("mine/test-v0", made)
    file = minari.data_folder("mine/test-v0") / "metadata.json"
    metadata = json.loads(file.read_text(encoding="utf-8"))
    del metadata["observation_space"]
    env = {"id": "Env-v0", "entry_point": "trap:spring", "additional_wrappers": []}
    file.write_text(json.dumps(metadata | {"env_spec": json.dumps(env)}), encoding="utf-8")
    for group in ("env", "dataset"):
        read = node(group, "minari", minari_id="mine/test-v0", goal="fixed", task="")
        run = foreign(tmp_path / group, **{group: read})
        with pytest.raises(ValueError, match=r"minari_id=mine/test-v0 \(trap.spring\)"):
            loading.load(run)
    # the copy of a remote dataset is checked too
    remote = node("env", "minari", minari_id="hf://owner/mine/test-v0", goal="fixed", task="")
    with pytest.raises(ValueError, match=r"minari_id=hf://owner/mine/test-v0 \(trap.spring\)"):
        loading.load(foreign(tmp_path / "remote", env=remote))
    # an export of this package names a config node, which may be another one in a foreign dataset
    env |= {"entry_point": trust.EXPORTED, "kwargs": {"env": TRAP}}
    file.write_text(json.dumps(metadata | {"env_spec": json.dumps(env)}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"minari_id=mine/test-v0 \(trap.spring\)"):
        loading.load(run)
    assert not trap()


def test_registered_environments_of_minari_datasets_are_made(tmp_path):
    robotics = "gymnasium_robotics.envs.maze.point_maze:PointMazeEnv"
    wrapper = "gymnasium.wrappers.common:TimeLimit"
    exported = f"{Single.__module__}:{Single.__name__}"
    for text in (
        "gymnasium.envs.classic_control.cartpole:CartPoleEnv",
        robotics,
        wrapper,
        exported,
    ):
        assert trust.is_registered_entry_point(text)
    for text in ("gymnasium.envs.registration:load_env_creator", "os:system", "wrappers"):
        assert not trust.is_registered_entry_point(text)


OWN_HEAD = """
from decisionllm.models.heads import GaussianHead
class Own(GaussianHead):
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A run with a head of the user's own, as the user's command line begins it."""
    (tmp_path / "ownlab.py").write_text(OWN_HEAD, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    words = (*LOOP, *NANO, "head._target_=ownlab.Own", f"cache_dir={tmp_path}/data")
    assert command("train", *words, f"run={tmp_path}/run") == 0
    yield tmp_path, words
    sys.modules.pop("ownlab", None)


def test_an_own_head_needs_trust_where_it_is_not_typed(own, capsys):
    path, words = own
    again = (*words, f"run={path}/run", "log.every=2", "log.save_every=2")
    assert command("train", *again) == 0  # the same command goes on
    more = (*words, f"init_from={path}/run", f"run={path}/more")
    assert command("train", *more) == 0  # its own words name the head
    evaluation = (f"run={path}/run", f"out={path}/out", "episodes=2", "report=false")
    assert command("evaluate", *evaluation) == 1
    assert "head._target_=ownlab.Own" in capsys.readouterr().err
    assert command("evaluate", *evaluation, "trust=[ownlab]") == 0
    policy = loading.load(path / "run", trust=["ownlab"])
    assert type(policy.model.head).__name__ == "Own"
    with pytest.raises(ValueError, match=r"add trust=\[ownlab\]"):
        loading.load(path / "run")


def test_an_own_environment_is_typed_for_one_evaluation(own):
    path, _ = own
    words = (*LOOP, *NANO, f"cache_dir={path}/data", f"run={path}/plain")
    assert command("train", *words) == 0
    out = (f"out={path}/out", "episodes=2", "report=false", "baselines=false")
    (path / "ownenv.py").write_text(
        "from decisionllm.eval.synthetic import PointEnv\nclass Own(PointEnv): pass\n",
        encoding="utf-8",
    )
    assert command("evaluate", f"run={path}/plain", *out, "+env._target_=ownenv.Own") == 0


def test_what_a_run_says_of_trust_does_not_count(tmp_path, trap):
    run = foreign(tmp_path / "run", head=TRAP, trust=["trap"])
    with pytest.raises(ValueError, match="head._target_=trap.spring"):
        loading.load(run)
    assert not trap()


def test_a_server_loads_no_foreign_code(own, trap):
    """Neither as the run of its command line, nor from its folder of models, see POST /v1/models."""
    path, _ = own
    with pytest.raises(ValueError, match="ownlab.Own"):
        load_run(path / "run")
    policy, _, _ = load_run(path / "run", trust=["ownlab"])
    assert type(policy.model.head).__name__ == "Own"
    foreign(path / "models" / "theirs", head=TRAP)
    config = {"run": str(path / "run"), "models_dir": str(path / "models"), "trust": ["ownlab"]}
    options = read_options(ServeConfig, fill_defaults("serve", config))
    folder = build_model_folder(options, Journal(path / "j"), {})
    with pytest.raises(ValueError, match="theirs: it cannot be loaded: .*trap.spring"):
        folder.load("theirs")
    assert not trap()


def test_a_typed_config_in_python_is_the_users_own(own):
    path, _ = own
    config = TrainConfig(
        dataset=node("dataset", "synthetic", episodes=40),
        backbone=node("backbone", "nano", width=32, layers=2, inner=48),
        head={"_target_": "ownlab.Own"},
        run=str(path / "python"),
        cache_dir=str(path / "data"),
        steps=2,
        device="cpu",
    )
    train(config)
    assert np.isfinite(loading.load(path / "python", trust="ownlab").target_return)


def test_a_language_model_executes_no_code_of_its_folder(trap, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2Config(**sizes, **heads)
    folder = tmp_path / "model"
    config.save_pretrained(folder)
    own_tokenizer().save_pretrained(folder)
    (folder / "theirs.py").write_text("import trap\n", encoding="utf-8")
    file = folder / "config.json"
    plain = json.loads(file.read_text(encoding="utf-8"))
    refused = {
        "one that needs code of its own": {
            "model_type": "theirs",
            "auto_map": {"AutoConfig": "theirs.Config", "AutoModel": "theirs.Model"},
        },
        "code from the hub": {"attn_implementation": "their/attention"},
    }
    for message, changes in refused.items():
        file.write_text(json.dumps(plain | changes), encoding="utf-8")
        read = node("backbone", "pretrained", folder=str(folder), weights="random", tune="frozen")
        with pytest.raises((ValueError, OSError), match=message):
            registry.build(read, 0)
    assert not trap()
