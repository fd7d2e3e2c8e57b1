"""Our forward reads a model only if it computes every field of its config; transformers reads the
others.
"""

import inspect
from dataclasses import fields

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaModel

from decisionllm.backbones import attention, layouts
from decisionllm.backbones import hf_reference as library
from decisionllm.backbones.blocks import TokenPlaces, plan_attention
from decisionllm.backbones.build import pretrained
from decisionllm.backbones.families import FAMILIES, layout_of, uncomputed_fields
from decisionllm.backbones.forward import Backbone
from decisionllm.backbones.layouts import FULL, SLIDING, BlockKind, Llama, block_kinds
from decisionllm.tokenizers.text import own_tokenizer
from tests.backbones.test_backbones import WHOLE, close, inputs, write

pytestmark = pytest.mark.numeric

SIZES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "llama": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "head_dim": 8,
        "max_position_embeddings": 128,
    },
}
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
# rope_parameters of a queries' scale that begins at position 16
SCALED = DEFAULT | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16}
# what makes the default of a family one that our forward computes
PLAIN = {
    "ministral3": {"rope_parameters": SCALED | {"original_max_position_embeddings": 64}},
    "seed_oss": {"residual_dropout": 0.0},
}
WINDOW = 8
# families whose first block, or each of two, sees WINDOW tokens
WINDOWS = {
    "mistral": {"sliding_window": WINDOW},
    "ministral": {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL]},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, FULL],
    },
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, FULL],
    },
}
PLAIN["gemma3_text"] = WINDOWS["gemma3_text"]


def make_config(family, **options):
    sizes = SIZES["gpt2" if family == "gpt2" else "llama"]
    return CONFIG_MAPPING[family](
        vocab_size=len(own_tokenizer()), pad_token_id=0, **sizes | PLAIN.get(family, {}) | options
    )


def make_model(config):
    """A model with weights that are large enough for attention to be far from uniform."""
    torch.manual_seed(1)
    model = AutoModel.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.3)
    return model


def make_backbone(family, **options):
    return Backbone(make_model(make_config(family, **options)), own_tokenizer, "full").eval()


def load(folder, family, **options):
    make_model(make_config(family, **options)).save_pretrained(folder)
    own_tokenizer().save_pretrained(folder)
    return pretrained(0, folder=str(folder), tune="frozen", **WHOLE).eval()


def check_equal(backbone, n, longest=6):
    """Assert that n tokens behind texts of six tokens are read as transformers reads them."""
    arrays = inputs(backbone.width, (longest, 3, 1), n=n)
    with torch.no_grad():
        close(backbone(*arrays), library.plain(backbone, *arrays))


class _DropoutScales(TorchFunctionMode):
    """Let dropout of a share p multiply by 1 + p, so that the same dropout gives the same numbers."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.dropout:
            bound = inspect.signature(F.dropout).bind(*args, **kwargs)
            bound.apply_defaults()
            options = bound.arguments
            return options["input"] * (1 + options["p"] * options["training"])
        if func is F.scaled_dot_product_attention:
            share = kwargs.pop("dropout_p", 0.0)
            return func(*args, **kwargs) * (1 + share)
        return func(*args, **kwargs)


def trains_like_transformers(backbone, monkeypatch):
    """Whether the blocks compute in training what transformers does, at 16 positions up to the last
    one, with inputs and weights that are large enough for any clipping.
    """
    for module in (layouts, attention):
        monkeypatch.setattr(module, "drop", lambda x, share: x * (1 + share))
    core = backbone.core
    words = core.get_input_embeddings().weight
    with torch.no_grad():
        for weight in core.parameters():
            if weight is not words:
                length = torch.linalg.vector_norm(weight, dim=-1, keepdim=True).clamp(min=1e-9)
                root = len(weight) ** 0.5 if weight.ndim == 1 else 1
                weight.mul_(3 * root / length)
    # a rotation has few correct digits beyond
    last = min(backbone.positions, 2**17) - 1
    positions = torch.linspace(0, last, 16).long()
    x = 3 * torch.randn(2, 16, backbone.width, generator=torch.Generator().manual_seed(0))
    slots = torch.arange(16)[None]
    places = TokenPlaces(
        positions=positions[None],
        slots=slots,
        num_keys=16,
        text_mask=slots[:, :0],
        output_positions=layouts.ALL,
    )
    backbone.model.train()
    with torch.no_grad(), _DropoutScales():
        ours, _, _ = backbone._run_blocks(x, plan_attention(places, backbone.windows))
        expected = core(
            inputs_embeds=x,
            attention_mask=torch.ones(2, 16, dtype=torch.long),
            position_ids=positions.expand(2, -1),
            use_cache=False,
        ).last_hidden_state
    return torch.allclose(ours, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_our_forward_reads_each_family_of_the_table(family):
    """At all positions that it allows, in long sequences too."""
    backbone = make_backbone(family)
    assert backbone.layout is FAMILIES[family].layout
    check_equal(backbone, n=min(backbone.positions, 100) - 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_our_forward_trains_each_family_of_the_table(family, monkeypatch):
    """With dropout."""
    options = {} if family == "gpt2" else {"attention_dropout": 0.1}
    assert trains_like_transformers(make_backbone(family, **options), monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_decides_each_field_of_a_config_class(family):
    names = {field.name for field in fields(CONFIG_MAPPING[family])} | {
        "head_dim",
        "original_max_position_embeddings",
        "rms_norm_eps",
    }
    assert not FAMILIES[family].fields.keys() - names
    assert not uncomputed_fields(make_config(family))


@pytest.mark.parametrize("family", WINDOWS)
@pytest.mark.parametrize(
    ("longest", "n"), [(WINDOW - 3, 2 * WINDOW), (3 * WINDOW, 3), (3 * WINDOW, 2 * WINDOW)]
)
def test_a_sliding_window_ends_what_a_token_attends_to(family, longest, n):
    """Behind texts that are shorter and longer than it; the padding of a text does not count."""
    backbone = make_backbone(family, **WINDOWS[family])
    assert WINDOW in backbone.windows
    check_equal(backbone, n, longest)
    tokens, *texts = inputs(backbone.width, (longest, 3, 1), n=n)
    with torch.no_grad():
        within = backbone(tokens, *texts)
        cache = backbone.read_text(*texts[:2]).with_room(texts[2], n)
        for k in range(n):
            appended = backbone.append(tokens[:, [k]], cache, torch.full((4,), k))
            close(appended, within[:, [k]])
        backbone.kinds = [BlockKind(kind.name, None) for kind in backbone.kinds]
        assert not torch.allclose(backbone(tokens, *texts), within, atol=1e-2)


def test_each_kind_of_block_has_its_own_rotary_frequencies():
    """Also where they are scaled."""
    rotations = {
        FULL: {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10.0},
    }
    check_equal(make_backbone("gemma3_text", rope_parameters=rotations), n=30)
    long = {
        "rope_type": "longrope",
        "rope_theta": 10.0,
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 12,
    }
    assert make_backbone("gemma3_text", rope_parameters=rotations | {FULL: long}).positions == 12


CHANGED = [
    ("llama", {"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor=0.5"),
    ("llama", {"rope_parameters": SCALED}, "rope_parameters.llama_4_scaling_beta=0.5"),
    ("llama", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0"),
    ("llama", {"sliding_window": 16}, "sliding_window=16"),
    ("llama", {"clip_qkv": 0.1}, "clip_qkv=0.1"),
    ("llama", {"layer_types": ["full_attention", "full_attention"]}, "layer_types=["),
    ("llama", {"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0]"),
    ("llama", {"residual_multiplier": 0.5}, "residual_multiplier=0.5"),
    ("llama", {"embedding_multiplier": 4.0}, "embedding_multiplier=4.0"),
    ("llama", {"attention_multiplier": 0.1}, "attention_multiplier=0.1"),
    ("llama", {"logit_scale": 0.1}, "logit_scale=0.1"),
    ("llama", {"resid_pdrop": 0.1}, "resid_pdrop=0.1"),
    ("exaone", {"embed_dropout": 0.1}, "embed_dropout=0.1"),
    ("internlm3", {"attention_sinks": 4}, "attention_sinks=4"),
    ("iquestcoder", {"query_pre_attn_scalar": 4.0}, "query_pre_attn_scalar=4.0"),
    ("qwen2", {"use_mrope": True}, "use_mrope=True"),
    ("qwen2", {"rope_parameters": DEFAULT | {"mrope_section": [2, 1, 1]}}, "mrope_section=["),
    ("qwen3", {"partial_rotary_factor": 0.25}, "rope_parameters.partial_rotary_factor=0.25"),
    ("mistral", {"attention_bias": True}, "attention_bias=True"),
    ("ministral", {"attention_temperature": 2.0}, "attention_temperature=2.0"),
    ("ministral3", {"attention_scale": 2.0}, "attention_scale=2.0"),
    ("cwm", {"residual_dropout": 0.1}, "residual_dropout=0.1"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0"),
    (
        "gemma3_text",
        {"rope_parameters": {FULL: DEFAULT | {"partial_rotary_factor": 0.5}, SLIDING: DEFAULT}},
        "rope_parameters.full_attention.partial_rotary_factor=0.5",
    ),
    ("olmo", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("seed_oss", {"residual_dropout": 0.1}, "residual_dropout=0.1"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0]"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
]


@pytest.mark.parametrize(("family", "options", "name"), CHANGED, ids=lambda x: str(x)[:40])
def test_a_field_that_our_forward_does_not_compute_is_named(family, options, name):
    """Whatever a comparison of a few numbers would show."""
    config = make_config(family, **options)
    assert [field for field in uncomputed_fields(config) if name in field]
    with torch.device("meta"):
        assert layout_of(AutoModel.from_config(config)) is None


def test_a_supported_folder_is_loaded_without_a_note(tmp_path, capsys):
    assert load(tmp_path, "llama", **HARMLESS["llama"]).layout is not None
    assert "note: backbone" not in capsys.readouterr().err


def test_a_field_that_our_forward_does_not_compute_is_printed(tmp_path, capsys):
    backbone = load(tmp_path, "gpt2", scale_attn_weights=False)
    assert backbone.layout is None
    message = capsys.readouterr().err
    assert f"note: backbone {tmp_path}: transformers' own forward reads it" in message
    assert "scale_attn_weights=False" in message


def test_a_model_type_that_our_forward_does_not_read_is_printed(tmp_path, capsys):
    pretrained(0, folder=str(write(tmp_path, "StableLm")))
    assert "since the faster one does not read model_type=stablelm" in capsys.readouterr().err


HARMLESS = {
    "llama": {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "pretraining_tp": 2,
        "temperature": 0.6,
        "unsloth_version": "2025.1",
        "sliding_window": None,
    },
    "qwen2": {"use_mrope": False, "decisionllm_text_layers": 1},
    "gemma3_text": {"sliding_window_pattern": 6, "final_logit_softcapping": 30.0},
    "gpt2": {"n_ctx": 1024, "task_specific_params": {"text-generation": {"do_sample": True}}},
}


@pytest.mark.parametrize("family", HARMLESS)
def test_fields_that_change_nothing_keep_our_forward(family):
    assert not uncomputed_fields(make_config(family, **HARMLESS[family]))


@pytest.mark.parametrize(
    "rotations",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rotations: rotations["rope_type"],
)
def test_scaled_rotary_positions_are_read_at_all_positions(rotations):
    backbone = make_backbone("llama", rope_parameters=DEFAULT | rotations)
    assert backbone.layout is not None
    check_equal(backbone, n=122)
    with pytest.raises(ValueError, match="expected at most 128 tokens"):
        check_equal(backbone, n=123)


def test_the_position_from_which_queries_are_scaled_bounds_our_forward():
    backbone = make_backbone("ministral3", rope_parameters=SCALED)
    check_equal(backbone, n=10)
    with pytest.raises(ValueError, match=r"at most 16 tokens, .* got 6 \+ 11; take a shorter"):
        check_equal(backbone, n=11)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("seed_oss", {"residual_dropout": 0.1}),  # in training alone
        ("ministral3", {"rope_parameters": SCALED}),  # from position 16 on
        ("olmo", {"clip_qkv": 8.0}),  # of large numbers
    ],
)
def test_the_comparison_sees_training_later_positions_and_large_numbers(
    family, options, monkeypatch
):
    """Should the table be wrong."""
    backbone = make_backbone(family, **options)
    backbone.layout = Llama()
    backbone.kinds = block_kinds(backbone.config)
    backbone.positions = 128
    check_equal(backbone, n=10)
    assert not trains_like_transformers(backbone, monkeypatch)


def test_a_class_of_ones_own_is_read_by_transformers():
    """It may compute anything, whatever its config says."""

    class Other(LlamaModel):
        def forward(self, **inputs):
            out = super().forward(**inputs)
            out.last_hidden_state = 2 * out.last_hidden_state
            return out

    backbone = Backbone(Other(make_config("llama")), own_tokenizer, "full").eval()
    assert backbone.layout is None
    check_equal(backbone, n=5)


def test_a_type_that_is_not_in_the_table_is_read_by_transformers():
    """Doge has a mask that its weights make: one of zeros is that of Llama, until it is trained."""
    config = AutoConfig.for_model("doge", vocab_size=300, **SIZES["llama"], pad_token_id=0)
    model = make_model(config)
    assert not model.layers[0].self_attn.A.any()
    assert Backbone(model, own_tokenizer, "full").layout is None
