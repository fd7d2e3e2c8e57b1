"""The model types of transformers whose blocks our forward computes, and the config fields that it
covers.

The config alone decides: our forward reads a model only if its type and every field of its config
are in this table, and transformers' own forward reads all other models, see `hf_forward`. Numbers
could not decide, since some fields change what a model computes at a later position, at larger
numbers, or in training. tests/backbones/test_families.py compares both forwards for each type.

To add a type, read its `modeling_<type>.py` and list each field of its config below, beside the
layout of its blocks, see `layouts`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from decisionllm.backbones.layouts import FULL, GPT2, SLIDING, Llama
from decisionllm.backbones.text_layers import TRAINED_CUT

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# A field of any value: our forward, or a module that it calls (a linear map, a norm, the rotary
# embedding), reads it. Other fields have the values that change nothing.
ANY: Final = "any value"
Fields = dict[str, Any]  # {field: ANY, values that change nothing, or the fields of a dict}


class Family(NamedTuple):
    """A model type: the layout that calls its blocks, and the fields of its config."""

    layout: Llama | GPT2
    fields: Fields


def _any(names: str) -> Fields:
    return dict.fromkeys(names.split(), ANY)


# transformers/modeling_rope_utils.py: read by the rotary embedding, a module that we call. Of
# longrope and dynamic the frequencies are constant up to the positions that `forward` allows.
ROTARY = _any(
    "type rope_theta factor original_max_position_embeddings max_position_embeddings finetuned "
    "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate short_factor long_factor "
    "low_freq_factor high_freq_factor"
) | {
    "rope_type": ("default", "linear", "dynamic", "yarn", "longrope", "llama3"),
    "partial_rotary_factor": (None, 1),
}
COMMON = _any(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings rms_norm_eps attention_dropout "
    "initializer_range original_max_position_embeddings"
)
LLAMA = COMMON | {"hidden_act": ANY, "rope_parameters": ROTARY}
WINDOWS = {"sliding_window": ANY, "layer_types": (FULL, SLIDING)}  # see `layouts.block_kinds`
BIASES = _any("attention_bias mlp_bias")

# from transformers/models/<type>/modeling_<type>.py and configuration_<type>.py
FAMILIES = {
    "llama": Family(Llama(), LLAMA | BIASES),
    # these three are LlamaModel with other defaults
    "exaone": Family(Llama(), LLAMA | BIASES),
    "internlm3": Family(Llama(), LLAMA | BIASES),
    "iquestcoder": Family(Llama(), LLAMA | BIASES),
    "qwen2": Family(Llama(), LLAMA | WINDOWS | _any("use_sliding_window max_window_layers")),
    # norms of queries and keys are modules
    "qwen3": Family(
        Llama(), LLAMA | WINDOWS | _any("use_sliding_window max_window_layers attention_bias")
    ),
    "mistral": Family(Llama(), LLAMA | _any("sliding_window")),
    "ministral": Family(Llama(), LLAMA | WINDOWS),
    # queries are scaled from position original_max_position_embeddings on, which bounds our forward
    "ministral3": Family(
        Llama(),
        LLAMA | _any("sliding_window") | {"rope_parameters": ROTARY | _any("llama_4_scaling_beta")},
    ),
    "cwm": Family(Llama(), LLAMA | WINDOWS | _any("mlp_bias")),
    # the word embedding scales and is a module
    "gemma": Family(
        Llama(norm_offset=1.0),
        LLAMA | _any("attention_bias") | {"use_bidirectional_attention": (None, False)},
    ),
    # norms of queries and keys and the scaling of scores are read from modules; the rest of the
    # model, which caps logits, is not part of a backbone
    "gemma3_text": Family(
        Llama(
            attention_output_norm="post_attention_layernorm",
            mlp_input_norm="pre_feedforward_layernorm",
            mlp_output_norm="post_feedforward_layernorm",
            norm_offset=1.0,
            rotates_by_kind=True,
        ),
        COMMON
        | WINDOWS
        | _any("hidden_activation attention_bias query_pre_attn_scalar final_logit_softcapping")
        | {
            "rope_parameters": {FULL: ROTARY, SLIDING: ROTARY},
            "attn_logit_softcapping": (None,),
            "use_bidirectional_attention": (None, False),
        },
    ),
    # clip_qkv clamps queries, keys and values; the norms are of a fixed epsilon
    "olmo": Family(
        Llama(),
        LLAMA | _any("attention_bias") | {"clip_qkv": (None,), "rms_norm_eps": (1e-5,)},
    ),
    # residual_dropout comes behind the output map and behind the feed-forward
    "seed_oss": Family(
        Llama(), LLAMA | BIASES | _any("attention_out_bias") | {"residual_dropout": (0,)}
    ),
    # 0: a block without rotary positions, every fourth one by default
    "smollm3": Family(
        Llama(),
        LLAMA
        | WINDOWS
        | BIASES
        | _any("use_sliding_window no_rope_layer_interval")
        | {"no_rope_layers": (1,)},
    ),
    "gpt2": Family(
        GPT2(),
        _any(
            "vocab_size n_positions n_embd n_layer n_head n_inner activation_function resid_pdrop "
            "embd_pdrop attn_pdrop layer_norm_epsilon initializer_range summary_type "
            "summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout "
            # computes the same in float32; transformers reads it with eager attention alone
            "reorder_and_upcast_attn"
        )
        | {
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
    ),
}

# Fields of any config that say nothing about what the blocks compute.
BOOKKEEPING = _any(
    "architectures model_type transformers_version dtype torch_dtype auto_map name_or_path "
    "is_encoder_decoder is_decoder chunk_size_feed_forward return_dict output_attentions "
    "output_hidden_states id2label label2id num_labels problem_type finetuning_task "
    "task_specific_params tokenizer_class prefix torchscript use_bfloat16 tf_legacy_loss "
    "tie_word_embeddings tie_encoder_decoder use_cache bos_token_id eos_token_id pad_token_id "
    "sep_token_id decoder_start_token_id unk_token_id gradient_checkpointing output_past n_ctx "
    "model_max_length max_sequence_length pretraining_tp quantization_config unsloth_version "
    f"unsloth_fixed transformers.js_config attn_implementation {TRAINED_CUT}"
)

# Fields that no class of the table has but that stand in many files, with the values that say what
# these classes compute anyway.
EXTRA: Fields = {
    "add_cross_attention": (False,),
    "pruned_heads": {},
    "is_llama_config": (True,),  # SmolLM2
    "rope_interleaved": (False,),
    "use_mrope": (False,),  # DeepSeek-R1-Distill-Qwen
    "embed_dropout": (0,),  # EXAONE
    "hidden_activation": ("gelu_pytorch_tanh",),  # Gemma
    "sliding_window_pattern": ANY,  # Gemma 3, whose layer_types are made of it
    "is_causal": (True,),
}


def layout_of(core: "PreTrainedModel") -> Llama | GPT2 | None:
    """Return the layout that computes a model of transformers, by its config; None: no layout does.

    A class that is defined elsewhere may compute anything, whatever its config says.
    """
    family = FAMILIES.get(core.config.model_type)
    is_own_class = type(core).__module__.startswith("transformers.models.")
    if family is None or not is_own_class or uncomputed_fields(core.config):
        return None
    return family.layout


def uncomputed_fields(config: "PreTrainedConfig") -> list[str]:
    """Return the fields of a config, as `name=value`, that the layout of its model type does not
    compute; empty for a type that has no layout.
    """
    from transformers import GenerationConfig

    family = FAMILIES.get(config.model_type)
    if family is None:
        return []
    of_generation = dict.fromkeys(GenerationConfig().to_dict(), ANY)
    values = {}
    for name, value in config.to_dict().items():
        if not name.startswith("_"):
            values[name] = value
    return _list_uncomputed(values, EXTRA | of_generation | BOOKKEEPING | family.fields)


def _list_uncomputed(
    values: Mapping[str, Any], fields: Mapping[str, Any], path: str = ""
) -> list[str]:
    names = []
    for name, value in values.items():
        neutral = fields.get(name, (None,))
        if neutral == ANY:
            continue
        if isinstance(value, Mapping) and isinstance(neutral, Mapping):
            names += _list_uncomputed(value, neutral, f"{path}{name}.")
        elif not _is_neutral(value, neutral):
            names.append(f"{path}{name}={value}")
    return names


def _is_neutral(value: object, neutral: Any) -> bool:
    """Return whether a value, or every item of a list, is one of these."""
    items = value if isinstance(value, list | tuple) else [value]
    return all(item in neutral for item in items)
