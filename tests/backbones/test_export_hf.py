"""The language model of a run as a folder of transformers: it reads as the run's backbone with its
adapters, and alone.
"""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from decisionllm import hardware
from decisionllm.backbones.build import pretrained
from decisionllm.backbones.export_hf import save_merged
from decisionllm.export.export import export_language_model
from decisionllm.policy import loading
from tests.backbones import test_gguf
from tests.backbones.test_backbones import write
from tests.conftest import DT, LOOP, NANO, command, damage, near
from tests.policy.test_checkpoint import full_disk

pytestmark = pytest.mark.numeric
IDS = torch.arange(12).view(2, 6)


def trained(path, *words):
    assert command("train", *LOOP, "optim.lr=0.1", *words, f"run={path}") == 0
    return path


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run whose backbone was trained whole."""
    return trained(tmp_path_factory.mktemp("whole") / "run", *NANO)


@pytest.fixture(scope="module")
def adapted_run(tmp_path_factory):
    """A run that trained adapters of random weights."""
    return trained(tmp_path_factory.mktemp("adapted") / "run", *NANO, "backbone.tune=lora")


@torch.no_grad()
def hidden(model):
    """What a model of transformers makes of some words, (2, 6, D)."""
    return model.eval()(IDS, output_hidden_states=True).hidden_states[-1]


@pytest.mark.parametrize("source", ["random", "dt", "folder", "bfloat16", "gguf", "full", "frozen"])
def test_the_exported_language_model_equals_the_backbone_of_the_run(
    source, tmp_path, capsys, request
):
    folder = tmp_path / ("small.gguf" if source == "gguf" else "model")
    if source == "gguf":
        test_gguf.write(folder)
    elif source in ("folder", "bfloat16"):
        write(folder, "Llama", num_hidden_layers=5)
    words = {
        "dt": (*DT, "backbone.tune=lora"),
        "bfloat16": ("backbone=pretrained", f"backbone.folder={folder}", "backbone.dtype=bfloat16"),
        "frozen": (*NANO, "backbone.tune=frozen"),
    }.get(source, ("backbone=pretrained", f"backbone.folder={folder}"))
    if source == "full":
        run = request.getfixturevalue("whole_run")
    elif source == "random":
        run = request.getfixturevalue("adapted_run")
    else:
        run = trained(tmp_path / "run", *words)
    assert command("export", f"run={run}", "format=transformers") == 0
    printed = capsys.readouterr().out
    assert f"exported the language model of {run} to {run / 'transformers'}" in printed
    actual, read_back = AutoModel.from_pretrained(run / "transformers", output_loading_info=True)
    assert not any(read_back.values()) and {weight.dtype for weight in actual.parameters()} == {
        torch.float32
    }
    backbone = loading.load(run).model.float().backbone
    near(hidden(actual), hidden(backbone.model))
    task = "Reach the goal."
    tokenizer = AutoTokenizer.from_pretrained(run / "transformers")
    assert tokenizer(task)["input_ids"] == backbone.tokenizer(task)["input_ids"]
    if backbone.tune == "lora":
        with backbone.model.disable_adapter():
            assert (hidden(actual) - hidden(backbone.model)).abs().max() > 0.01 * hidden(
                actual
            ).abs().max()
    # a backbone of further runs
    again = pretrained(0, folder=str(run / "transformers"), tune="frozen")
    assert (again.text_layers, again.depth) == (backbone.text_layers, backbone.depth)
    near(hidden(again.model), hidden(actual))


def test_frozen_weights_keep_their_type_where_they_were_held_in_a_wider_one(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "is_slow_dtype", lambda dtype: True)
    folder = str(write(tmp_path / "model", "Llama", num_hidden_layers=5))
    backbone = pretrained(0, folder=folder, dtype="bfloat16", tune="frozen")
    assert backbone.dtype == torch.float32
    assert save_merged(backbone, tmp_path / "out") == 0
    actual = AutoModel.from_pretrained(tmp_path / "out")
    assert {weight.dtype for weight in actual.parameters()} == {torch.bfloat16}


def test_a_model_with_tied_words_is_loaded_with_its_output_map(adapted_run, tmp_path):
    assert (
        command("export", f"run={adapted_run}", "format=transformers", f"path={tmp_path}/out") == 0
    )
    model, read_back = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(read_back.values())
    near(hidden(model), hidden(AutoModel.from_pretrained(tmp_path / "out")))


def test_a_damaged_export_is_no_backbone(adapted_run, tmp_path):
    folder = tmp_path / "out"
    assert command("export", f"run={adapted_run}", "format=transformers", f"path={folder}") == 0
    damage(folder / "model.safetensors")
    with pytest.raises(
        ValueError, match="model.safetensors is damaged .*not those that were written"
    ):
        pretrained(0, folder=str(folder))


def test_what_is_there_already_is_kept(whole_run, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert command("export", f"run={whole_run}", "format=transformers", f"path={tmp_path}/out") == 1
    assert "out: is there already; move it away, or choose another path" in capsys.readouterr().err
    assert not any((tmp_path / "out").iterdir())


def test_an_export_to_a_full_disk_says_so_and_leaves_nothing(whole_run, tmp_path, capsys):
    with full_disk(tmp_path):
        assert (
            command("export", f"run={whole_run}", "format=transformers", f"path={tmp_path}/out")
            == 1
        )
    output = capsys.readouterr().err
    assert "out: could not be written (" in output and "make room, or choose another path" in output
    assert not (tmp_path / "out").exists() and not [*tmp_path.glob(".partial*")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("format=gguf",), "format: expected one of onnx, transformers, hub, got 'gguf'"),
        (
            ("format=transformers", "act.decode=mean"),
            "format=transformers: expected no part and no act and no card, which are of a policy, "
            "got act.decode",
        ),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(words, message, whole_run, capsys):
    assert command("export", f"run={whole_run}", *words) == 1
    assert message in capsys.readouterr().err


def test_a_baseline_has_no_language_model(tmp_path):
    (tmp_path / "run.json").write_text('{"format": 5}', encoding="utf-8")
    (tmp_path / "config.yaml").write_text("policy: {}", encoding="utf-8")
    with pytest.raises(ValueError, match="expected a run of `decisionllm train`, got a baseline"):
        export_language_model(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
