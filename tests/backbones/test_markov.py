"""Weights to compare with: a random Markov chain, shuffled numbers; and the loss of a language model on text."""

import shutil

import pytest
import torch

from decisionllm.backbones import markov
from decisionllm.backbones.build import pretrained
from decisionllm.backbones.forward import Backbone
from decisionllm.files import cache_dir
from decisionllm.registry import build
from decisionllm.tokenizers.text import encode, own_tokenizer
from tests.backbones.test_backbones import FAMILIES, SIZES, small_backbone, weights, write
from tests.conftest import BACKBONES, SMALL, damage, near, node

pytestmark = pytest.mark.numeric
TEXTS = ["Walk to the red door.", "Stop.", ""]


@pytest.mark.parametrize("family", ["Qwen2", "Llama", "GPT2"])
def test_the_language_loss_equals_the_librarys(family):
    """Of rows of other lengths; perplexity is its exponential."""
    import transformers

    sizes = FAMILIES[family] if family == "GPT2" else SIZES | FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(vocab_size=len(own_tokenizer()), tie_word_embeddings=True, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    backbone = Backbone(model.base_model, own_tokenizer(), "full")
    ids, mask = encode(own_tokenizer(), TEXTS)
    with torch.no_grad():
        theirs = model(input_ids=ids, attention_mask=mask.long(), labels=ids.where(mask, -100)).loss
        near(backbone.next_token_loss(ids, mask).numpy(), theirs.numpy())
    near(backbone.perplexity(TEXTS), theirs.exp().numpy(), 1e-4)


def test_a_language_loss_needs_tied_words(tmp_path):
    backbone = pretrained(0, folder=str(write(tmp_path)))
    with pytest.raises(ValueError, match="Qwen2Model: a language loss needs .*tie_word_embeddings"):
        backbone.perplexity(TEXTS)
    with pytest.raises(ValueError, match="perplexity: expected texts of two tokens or more, got 2 shorter"):
        small_backbone("qwen2").perplexity(["", "a"])
    assert small_backbone("qwen2").next_token_loss(*encode(own_tokenizer(), [""])) == 0


def test_a_chain_follows_its_transitions():
    """Of 100 states; the frequencies of 20,000 transitions are the probabilities, within five deviations."""
    chain = markov.MarkovChain(2048, 0)
    ids = chain.sample(200, 101)
    assert ids.shape == (200, 101) and set(ids.unique().tolist()) == set(chain.states.tolist())
    state = torch.full((2048,), -1)
    state[chain.states] = torch.arange(100)
    first, then = state[ids[:, :-1]].flatten(), state[ids[:, 1:]].flatten()
    visits, likely = torch.bincount(first, minlength=100), chain.transitions.max(-1)
    found = torch.bincount(first[then == likely.indices[first]], minlength=100)
    deviation = (visits * likely.values * (1 - likely.values)).sqrt()
    assert ((found - visits * likely.values).abs() < 5 * deviation).all()
    assert torch.equal(markov.MarkovChain(2048, 0).sample(200, 101), ids)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_pretraining_on_a_chain_lowers_its_loss_and_is_cached(backbone):
    name, sizes = BACKBONES[backbone]
    made = {w: build(node("backbone", name, **sizes, weights=w, markov_steps=30), 0).eval() for w in ("random", "markov")}
    ids = markov.MarkovChain(len(own_tokenizer()), 0).sample(8, 64)
    with torch.no_grad():
        losses = {w: float(model.next_token_loss(ids, torch.ones_like(ids).bool())) for w, model in made.items()}
    assert losses["markov"] < losses["random"] - 0.1
    (file,) = (cache_dir() / "backbones").iterdir()
    stamp = file.stat().st_mtime_ns
    again = weights(build(node("backbone", name, **sizes, weights="markov", markov_steps=30), 0))
    assert file.stat().st_mtime_ns == stamp and all(torch.equal(w, again[n]) for n, w in weights(made["markov"]).items())
    build(node("backbone", name, **sizes, weights="markov", markov_steps=2, tune="lora"), 0)
    assert len([*(cache_dir() / "backbones").iterdir()]) == 2


def test_damaged_weights_of_the_cache_are_refused():
    chosen = node("backbone", "nano", **SMALL["qwen2"], weights="markov", markov_steps=2)
    build(chosen, 0)
    (folder,) = (cache_dir() / "backbones").iterdir()
    damage(folder / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors is damaged .*delete the folder, it is made again"):
        build(chosen, 0)


def test_weights_that_an_earlier_version_kept_are_read():
    """They were one file: a run that was trained on them needs the same bits."""
    chosen = node("backbone", "nano", **SMALL["qwen2"], weights="markov", markov_steps=2)
    made = weights(build(chosen, 0))
    (folder,) = (cache_dir() / "backbones").iterdir()
    (folder / "model.safetensors").rename(folder.with_suffix(".safetensors"))
    shutil.rmtree(folder)
    again = weights(build(chosen, 0))
    assert all(torch.equal(weight, again[name]) for name, weight in made.items()) and not folder.exists()


def test_a_folder_is_shuffled_or_trained_on_a_chain(tmp_path):
    """Shuffled within each tensor, as the seed says, whatever is tuned; adapters are left alone."""
    folder = str(write(tmp_path))
    kept, one, same, other = (
        pretrained(seed, folder=folder, weights=source, tune="frozen", text_layers=0, layers=0).core
        for seed, source in ((0, "pretrained"), (0, "shuffled"), (0, "shuffled"), (1, "shuffled"))
    )
    kept, one, same, other = map(weights, (kept, one, same, other))
    for name, weight in kept.items():
        assert torch.equal(weight.flatten().sort().values, one[name].flatten().sort().values)
        assert torch.equal(one[name], same[name])
    assert not any(torch.equal(one["embed_tokens.weight"], w["embed_tokens.weight"]) for w in (kept, other))
    whole = {"text_layers": 0, "layers": 0}
    adapted = weights(pretrained(0, folder=folder, weights="shuffled", **whole).core)
    plain = weights(pretrained(0, folder=folder, **whole).core)
    assert torch.equal(adapted["layers.0.mlp.up_proj.base_layer.weight"], one["layers.0.mlp.up_proj.weight"])
    assert all(torch.equal(weight, adapted[name]) for name, weight in plain.items() if "lora_" in name)
    with pytest.raises(ValueError, match="a language loss needs"):  # these words are not tied
        pretrained(0, folder=folder, weights="markov", markov_steps=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "shuffled"}, "backbone.weights: expected one of random, markov, got 'shuffled'"),
        ({"weights": "markov", "markov_steps": 0}, "backbone.markov_steps: expected 1 or more, got 0"),
    ],
)
def test_weights_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build(node("backbone", "nano", **SMALL["qwen2"], **options), 0)
