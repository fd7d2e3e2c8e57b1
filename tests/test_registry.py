"""Whatever is registered composes on the command line with its defaults and is built; a mistake is
refused by name.
"""

import subprocess
import sys

import pytest
import yaml

from decisionllm import registry
from decisionllm.__main__ import run
from decisionllm.registry import build, choice, discover
from decisionllm.schema import Spec
from tests.backbones.test_backbones import write
from tests.conftest import episode, make_store

pytestmark = pytest.mark.slow

CHOICES = [(group, name) for group, choices in discover().items() for name in choices]
SPECS = {
    "discrete": Spec(observation_dim=2, action_dim=1, horizon=20, num_actions=5),
    "pointer": Spec(
        observation_dim=8,
        action_dim=1,
        horizon=20,
        num_actions=5,
        entity_schema=(("own", 2, 1), ("enemy", 2, 3)),
    ),
    "continuous": Spec(
        observation_dim=2, action_dim=2, horizon=20, low=(-1.0, -1.0), high=(1.0, 1.0)
    ),
}


def composed(capsys, *overrides):
    """The configuration that `decisionllm train` would run with, made by the command line
    itself.
    """
    code = run("train", [*overrides, "--cfg", "job", "--resolve"])
    out, err = capsys.readouterr()
    return yaml.safe_load(out) if code == 0 else (code, err)


def chosen(capsys, group, name):
    paired = ["env=none"] if group == "dataset" and name not in discover()["env"] else []
    env_of_dataset = group == "env" and name in discover()["dataset"]
    return composed(
        capsys, *([f"dataset={name}"] if env_of_dataset else [f"{group}={name}", *paired])
    )[group]


@pytest.fixture(autouse=True)
def command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")


def test_every_choice_composes_with_its_defaults(capsys):
    wrong = []
    for group, name in CHOICES:
        defaults, node = discover()[group][name], chosen(capsys, group, name)
        if node.keys() != defaults.keys():
            wrong.append(f"{group}={name}: composed {sorted(node)}, registered {sorted(defaults)}")
            continue
        for key, value in node.items():  # a default may refer to what was chosen elsewhere
            right = "${" not in str(value) if "${" in str(defaults[key]) else value == defaults[key]
            if not right:
                wrong.append(f"{group}={name}: {key}={value}, registered {defaults[key]}")
    assert not wrong, "\n".join(wrong)


def test_everything_is_built_with_its_defaults(capsys, monkeypatch, tmp_path):
    """What is too large for a test is made small: fewer layers, fewer steps.

    What needs a name says so.
    """
    monkeypatch.setitem(sys.modules, "jax", None)
    small = {"backbone": {"layers": 1}, "dataset": {"steps": 600, "periods": "3"}}
    usual = SPECS["continuous"]
    given = {
        "backbone": (0,),
        "env": (3,),
        "dataset": (),
        "objective": (8, usual),
        "planner": (usual,),
    }
    for group, name in CHOICES:
        node = chosen(capsys, group, name)
        node |= {key: value for key, value in small.get(group, {}).items() if key in node}
        if missing := sorted(key for key, value in node.items() if value == "???"):
            with pytest.raises(ValueError, match=f"give a value to {', '.join(missing)}"):
                build(node)
        elif (group, name) == ("backbone", "pretrained"):
            with pytest.raises(ValueError, match="expected either"):
                build(node, 0)
        elif (
            name == "smollm2"
        ):  # an installed package of 93 MB; tests/backbones/test_gguf.py builds it
            continue
        elif name == "smax":  # JAX is not there, or is not to be asked
            with pytest.raises(ImportError, match="pip install"):
                build(node, *given[group])
        elif group == "text_encoder":
            assert (
                build(node | {"folder": str(write(tmp_path / "encoder")), "layer": 2}, 8, 0)
                is not None
            )
        elif group == "head":
            spec = SPECS.get(name, SPECS["continuous"])
            assert build(node, 8, spec) is not None
        elif group == "transform":
            assert build(node, make_store(tmp_path / name, [episode([1.0])] * 10)) is not None
        else:
            assert build(node, *given[group]) is not None


@pytest.fixture
def discovered(monkeypatch, tmp_path):
    """What is found in a package that holds this one file."""

    def find(file, source):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(source)
        monkeypatch.setattr(registry, "PACKAGE", tmp_path)
        monkeypatch.setattr(registry, "_registered", registry._registered.__wrapped__)
        return discover.__wrapped__()

    return find


def test_names_are_unique_and_say_where_they_are_taken(discovered):
    mark = '@register("head", "mine")'
    with pytest.raises(
        ValueError,
        match=r"head=mine is registered twice: by decisionllm.models.heads.one and decisionllm.models.heads.two",
    ):
        discovered("models/heads.py", f"{mark}\ndef one(): ...\n\n\n{mark}\ndef two(): ...\n")


def test_a_preset_with_a_misspelt_option_says_what_there_is(discovered):
    mark = '@register("head", "mine", num_binz=3)'
    with pytest.raises(
        ValueError,
        match=r"@register of decisionllm.models.heads.one: no option num_binz; it has num_bins, deep",
    ):
        discovered(
            "models/heads.py", f"{mark}\ndef one(width, *, num_bins: int = 8, deep=False): ...\n"
        )


def test_what_is_keyword_only_is_configured_and_what_is_positional_is_supplied(discovered):
    """Presets of one callable differ in their defaults; an option without one must be given."""
    marks = '@register("dataset", "a", size=3)\n@register("dataset", "b")'
    source = f"{marks}\nclass Load:\n    def __init__(self, seed, *, path: str, size=1): ...\n"
    assert discovered("datasets/mine.py", source) == {
        "dataset": {
            "a": {"_target_": "decisionllm.datasets.mine.Load", "path": "???", "size": 3},
            "b": {"_target_": "decisionllm.datasets.mine.Load", "path": "???", "size": 1},
        }
    }


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


def test_somebody_elses_class_needs_no_registration():
    assert build({"_target_": "collections.Counter", "a": 2}, "ab") == {"a": 3, "b": 1}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "head=bims",
            "Could not find 'head/bims' Available options in 'head': "
            f"{' '.join(sorted(discover()['head']))}",
        ),
        ("head.num_binz=3", "Could not override 'head.num_binz'"),
        ("windw=3", "Could not override 'windw'"),
    ],
)
def test_a_mistake_on_the_command_line_is_refused_by_name(capsys, override, message):
    code, said = composed(capsys, override)
    assert code == 2 and message in said and "Traceback" not in said


def test_the_names_are_known_without_importing_torch():
    code = (
        "import sys, decisionllm.__main__, decisionllm.registry as r; r.discover(); "
        "sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
