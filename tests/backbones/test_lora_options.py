"""Options of LoRA by peft's names: our forward computes them as peft does, a run keeps them, what it
cannot carry is refused; models in memory.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, ViTConfig, ViTModel

import decisionllm
from decisionllm import TrainConfig, choice
from decisionllm.backbones import hf_reference as library
from decisionllm.backbones.build import pretrained
from decisionllm.backbones.lora import linear
from decisionllm.policy import loading
from decisionllm.registry import build
from decisionllm.tokenizers.text import own_tokenizer
from tests.backbones.test_backbones import close, inputs, write
from tests.backbones.test_text_layers import batch
from tests.conftest import LOOP, NANO, SMALL, command, near, node
from tests.policy.test_checkpoint import config, save_run

pytestmark = pytest.mark.numeric
OPTIONS = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True, "r": 4},
    "patterns": {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 7}},
    "blocks": {"layers_to_transform": [2], "target_modules": ["q_proj", "up_proj"]},
    "pattern": {"target_modules": r".*\.(k_proj|down_proj)", "lora_dropout": 0.2},
    "gaussian": {"init_lora_weights": "gaussian", "exclude_modules": ["v_proj"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("llama") / "model", "Llama", num_hidden_layers=4)


def moved(backbone):
    """The backbone with other numbers in its adapters, as training gives them."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in backbone.named_parameters():
            if "lora_" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    return backbone.eval()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_our_forward_equals_pefts(options, folder):
    backbone = moved(pretrained(0, folder=str(folder), lora=options, text_layers=1, layers=3))
    arguments = batch(backbone)
    ours = backbone(*arguments)
    with torch.no_grad():
        close(ours, library.plain(backbone, *arguments))
        with backbone.model.disable_adapter():
            assert (ours - backbone(*arguments)).abs().max() > 1e-3
    ours.square().sum().backward()
    adapters = {n: w.grad for n, w in backbone.named_parameters() if "lora_" in n}
    assert all(gradient is not None and gradient.any() for gradient in adapters.values())
    below = [name for name in adapters if "layers.0." in name]
    assert adapters and not below  # the lower block reads texts, frozen


def test_our_forward_of_gpt2_equals_pefts():
    small = node("backbone", "dt", **SMALL["gpt2"], dropout=0.0, tune="lora")
    backbone = moved(build(small | {"lora": {"use_dora": True}}, 0))
    arguments = inputs(backbone.width)
    with torch.no_grad():
        close(backbone(*arguments), library.plain(backbone, *arguments))


@pytest.mark.parametrize(
    "option", [{"lora_dropout": 0.5}, {"lora_bias": True}, {"use_dora": True}], ids=str
)
def test_a_map_is_computed_as_by_peft_in_training(option):
    options = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False, **option)
    layer = get_peft_model(nn.Sequential(nn.Linear(6, 5)), options).base_model.model[0].train()
    x = torch.randn(3, 4, 6)
    torch.manual_seed(0)
    expected = layer(x)
    torch.manual_seed(0)
    (actual,) = linear(x, layer)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"use_dorra": True},
            "no option 'use_dorra'; did you mean use_dora\\? there are r, lora_a",
        ),
        ({"peft_type": "LOHA"}, "no option 'peft_type'.*; there are r, lora_alpha"),
        (
            {"bias": "all"},
            r"lora.bias: .*adapters and keeps the base model as it is; .*there are r",
        ),
        ({"velora_config": {}}, "velora_config: peft has this option .* our forward do not carry"),
        (
            {"init_lora_weights": "pissa"},
            "init_lora_weights: expected true, .* got pissa; others",
        ),
        ({"lora_dropout": 1.5}, "lora_dropout: expected a share from 0 and below 1, got 1.5"),
        (
            {"lora_bias": True},
            "lora_bias: .* since it cannot be merged into a map that has no bias",
        ),
        ({"lora_dropout": "much"}, "lora_dropout: expected a share .* got much"),
        ({"r": 0}, "lora.r: expected a whole number, 1 or more, got 0"),
        ({"r": "four"}, "lora.r: expected a whole number, 1 or more, got four"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj: expected a whole number, .* got 0"),
        ({"lora_alpha": -1}, "lora_alpha: expected more than 0, got -1"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern.q_proj: expected more than 0, got x"),
        (
            {"target_modules": ["input_layernorm"]},
            "peft does not adapt .*others of down_proj, gate",
        ),
        ({"layers_pattern": "h"}, "backbone.lora: peft refuses these options"),
        (
            {"layers_to_transform": [0]},
            r"layers_to_transform: expected blocks within 1 .. 2 .*got \[0\]",
        ),
        ({"target_modules": ["q_prj"]}, "no module 'q_prj'; did you mean q_proj"),
    ],
    ids=str,
)
def test_what_a_backbone_cannot_carry_is_refused(options, message, folder):
    with pytest.raises(ValueError, match=message):
        pretrained(0, folder=str(folder), lora=options, text_layers=1, layers=3)


def test_options_are_refused_before_the_model_is_read():
    with pytest.raises(ValueError, match="no option 'ranks'"):
        pretrained(0, folder="nowhere", lora={"ranks": 1})
    with pytest.raises(ValueError, match="expected backbone.tune=lora with it, got tune=frozen"):
        pretrained(0, folder="nowhere", lora={"r": 1}, tune="frozen")
    with pytest.raises(ValueError, match="use_dora: expected backbone.weights=pretrained"):
        pretrained(0, folder="nowhere", lora={"use_dora": True}, weights="shuffled")


def test_a_run_keeps_the_magnitudes_of_dora(tmp_path):
    small = node("backbone", "nano", **SMALL["qwen2"], tune="lora", lora={"use_dora": True})
    model = save_run(tmp_path / "run", config() | {"backbone": small})
    weights = loading.load(tmp_path / "run").model.state_dict()
    assert any("lora_magnitude_vector" in name for name in weights)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=0)


def test_options_are_given_on_the_command_line(tmp_path, capsys):
    words = (*LOOP, *NANO, "backbone.tune=lora", f"run={tmp_path}/run", "+backbone.lora.r=3")
    assert command("train", *words, "+backbone.lora.use_dorra=true") == 1
    assert "no option 'use_dorra'; did you mean use_dora?" in capsys.readouterr().err
    words += ("+backbone.lora.use_dora=true", "+backbone.lora.rank_pattern={q_proj: 2}")
    assert command("train", *words) == 0
    assert command("train", *words) == 0  # goes on
    (adapter,) = loading.load(tmp_path / "run").model.backbone.model.peft_config.values()
    assert (adapter.r, adapter.use_dora, adapter.rank_pattern) == (3, True, {"q_proj": 2})


@torch.no_grad()
def hidden(model):
    """What a model makes of some words, (2, 6, D)."""
    ids = torch.arange(12).view(2, 6)
    return model.eval()(ids, output_hidden_states=True).hidden_states[-1]


def adapted(folder):
    """A model in memory with an output map and an adapter that was trained elsewhere."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    options = LoraConfig(r=3, use_dora=True, target_modules=["q_proj", "up_proj"], lora_dropout=0.1)
    model = get_peft_model(model, options)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    return model


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
@pytest.mark.filterwarnings("ignore:.*missing keys:UserWarning")  # of an output map
def test_a_peft_model_in_memory_is_a_backbone(folder, tmp_path):
    causal = write_causal(folder, tmp_path / "causal")
    model = adapted(causal)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    backbone = decisionllm.save_backbone(model, own_tokenizer(), tmp_path / "mine")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    built = build(backbone, 0)
    near(hidden(built.model), hidden(model))
    (options,) = built.model.peft_config.values()
    assert (options.r, options.use_dora, options.lora_dropout) == (3, True, 0.1)
    assert built.text_layers == 0 and built.depth == 4
    trained = TrainConfig(
        dataset=choice("dataset", "synthetic", episodes=20),
        backbone=backbone,
        head=choice("head", "gaussian"),
        window=2,
        steps=2,
        run=str(tmp_path / "run"),
    )
    run = decisionllm.train(trained)
    assert decisionllm.train(trained) == run  # nothing is left to do
    before = load_file(tmp_path / "mine" / "adapter" / "adapter_model.safetensors")
    after = load_file(run / "checkpoint" / "adapter" / "adapter_model.safetensors")
    assert before.keys() <= after.keys()
    decisionllm.load(run)
    assert command("export", "format=hub", f"run={run}", f"path={tmp_path}/hub") == 0
    for file in (tmp_path / "mine").rglob("*"):  # another machine has no such folder
        if file.is_file():
            file.unlink()
    weights = decisionllm.load(tmp_path / "hub").model.backbone.model.state_dict()
    assert any("lora_magnitude" in name for name in weights)


def write_causal(folder, target):
    """That language model with an output map."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(target)
    return target


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_an_adapter_that_does_not_fit_is_refused(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="backbone.adapter: expected an adapter of peft"):
        pretrained(0, folder=str(folder), adapter=str(tmp_path))
    model = get_peft_model(AutoModel.from_pretrained(folder), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="unknown: .*text_layers=0 backbone.layers=0 adapts all"):
        pretrained(0, folder=str(folder), adapter=str(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    weights = load_file(file)
    weights.pop(min(weights))
    save_file(weights, file)
    with pytest.raises(ValueError, match="expected the weights of the adapted maps; missing"):
        pretrained(0, folder=str(folder), adapter=str(tmp_path), text_layers=0, layers=0)


def test_only_language_models_of_transformers_and_peft_are_taken(folder, tmp_path):
    with pytest.raises(ValueError, match="expected a model of transformers or peft, got Linear"):
        decisionllm.save_backbone(torch.nn.Linear(2, 2), own_tokenizer(), tmp_path / "mine")
    image = ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    with pytest.raises(ValueError, match="expected a language model with word embeddings, got ViT"):
        decisionllm.save_backbone(image, own_tokenizer(), tmp_path / "mine")
    with pytest.raises(ValueError, match="expected the model's tokenizer .*, got NoneType"):
        decisionllm.save_backbone(AutoModel.from_pretrained(folder), None, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()
