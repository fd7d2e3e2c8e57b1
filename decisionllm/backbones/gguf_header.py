"""The header of a GGUF file, carried into a config of transformers.

transformers reads a part of the header, skips the keys that it does not know, and so converts some
files into other models. Here each key of the architecture is carried or compared with the config;
a key that is neither, and a tensor that no weight is made of, refuse the file by name.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from decisionllm.schema import Json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# {key behind the architecture's name: the config fields that hold its value, by model type}; of
# llama.cpp's gguf-py/gguf/constants.py
FIELDS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size n_inner",
    "use_parallel_residual": "use_parallel_residual",
    "full_attention_interval": "full_attention_interval",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads num_kv_heads",
    "attention.key_length": "head_dim global_head_dim",
    "attention.value_length": "head_dim global_head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps layer_norm_epsilon",
    "attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": "conv_kernel linear_conv_kernel_dim",
    "ssm.inner_size": "intermediate_size",
    "ssm.state_size": "state_size linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "time_step_rank linear_num_value_heads",
}
# Of these, the ones that no tensor's shape depends on are written into the config.
CARRIED = (
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
# Values that change nothing, where no config field holds them; None: any value.
NEUTRAL: dict[str, tuple[object, ...] | None] = {
    "tensor_data_layout": None,  # how rows of queries and keys are ordered, as in every file
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0,),
    "attention.clamp_kqv": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "use_parallel_residual": (False,),
    "feed_forward_length": (0,),  # Mamba
    "attention.head_count": (0,),
    "attention.head_count_kv": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "ssm.dt_b_c_rms": (False,),
}
# Read by `_carry_rotary`.
ROTARY = (
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.dimension_count",
    "rope.dimension_sections",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
# Tensors of the factors by which rotary frequencies are divided: in short sequences, in long ones.
# The first has no such bound.
FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
# The map to logits, which a model without its head has no use for.
HEAD = ("output.weight", "output.bias")


class Header:
    """The keys of the architecture of a GGUF file and its tensors.

    Args:
        path: the file.

    Raises:
        ValueError: a key or a type of file that cannot be carried.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        self.reader = GGUFReader(path)
        fields = self.reader.fields
        self.architecture: str = fields["general.architecture"].contents()
        prefix = f"{self.architecture}."
        self.values: Json = {}
        for name, field in fields.items():
            if name.startswith(prefix):
                self.values[name.removeprefix(prefix)] = field.contents()
        self.type = fields["general.type"].contents() if "general.type" in fields else "model"
        self.parts = int(fields["split.count"].contents()) if "split.count" in fields else 1
        self.sizes = {tensor.name: int(tensor.n_elements) for tensor in self.reader.tensors}

    def factors(self, name: str) -> list[float] | None:
        """Return the numbers of a tensor of rotary factors; None: the file has no such tensor."""
        for tensor in self.reader.tensors:
            if tensor.name == name:
                return [float(number) for number in tensor.data]
        return None

    def refuse(self, key: str, expected: str, *, prefixed: bool = True) -> NoReturn:
        """Raise a ValueError that names a key and its value."""
        value = self.values.get(key)
        name = f"{self.architecture}.{key}={value}" if prefixed else key
        raise ValueError(
            f"{self.path}: expected {expected}, got {name}; take the model folder that the file "
            "was made of"
        )


def check_keys(header: Header) -> None:
    """Raise a ValueError unless each key is one that `carry` carries or compares."""
    if header.type != "model":
        header.refuse(f"general.type={header.type}", "the file of a model", prefixed=False)
    if header.parts > 1:
        header.refuse(f"split.count={header.parts}", "a model in one file", prefixed=False)
    for key in header.values:
        if key not in FIELDS and key not in NEUTRAL and key not in ROTARY:
            header.refuse(key, "keys that the conversion carries")
    values = header.values
    rotated = values.get("rope.dimension_count")
    # transformers takes it for the width of a head
    if header.architecture == "llama" and rotated is not None:
        heads = values.get("attention.head_count") or 1
        width = values.get("attention.key_length") or values.get("embedding_length", 0) // heads
        if rotated != width:
            header.refuse("rope.dimension_count", f"{width}, the width of a head")


def carry(header: Header, model: "PreTrainedModel") -> None:
    """Carry the header into the config of the model that transformers made of its file.

    Raises:
        ValueError: a key that the model does not compute, or a tensor that is no part of it.
    """
    config = model.config
    _refuse_unread_tensors(header, model)
    # transformers adds a field that GPT2Config does not have
    vars(config).pop("feed_forward_length", None)
    if config.model_type == "mistral":  # whose default is a window that the file does not name
        config.sliding_window = None
    if config.model_type == "gemma3_text":  # of which no key speaks
        config.query_pre_attn_scalar = _gemma3_query_scalar(config)
    for key, value in header.values.items():
        if key not in ROTARY:
            _carry_key(header, key, value, config)
    _carry_rotary(header, config)


def _gemma3_query_scalar(config: "PreTrainedConfig") -> int:
    """Return the number by whose root Gemma 3 divides scores.

    Source: llama.cpp, src/llama-model.cpp (load_hparams), which knows the model of 27B by its depth.
    """
    if config.num_hidden_layers == 62:
        return int(config.hidden_size // config.num_attention_heads)
    return _head_width(config)


def _carry_key(header: Header, key: str, value: Any, config: "PreTrainedConfig") -> None:
    """Compare a key with the config, or write it there."""
    names = [name for name in FIELDS.get(key, "").split() if hasattr(config, name)]
    value = _one_value(key, value)
    neutral = NEUTRAL.get(key, ())
    if neutral is None or value in neutral:
        return
    if any(_equal(value, number) for number in _own_values(key, names, config)):
        return
    if key == "context_length" and not names:  # Bloom has no limit
        return
    if key == "attention.scale" and _equal(value, _head_width(config) ** -0.5):
        return
    has_window = key == "attention.sliding_window" and not hasattr(config, "layer_types")
    if names and (key in CARRIED or has_window):
        setattr(config, names[0], value)
        return
    header.refuse(key, f"a value that {type(config).__name__} of transformers computes")


def _one_value(key: str, value: Any) -> Any:
    """Return the value of a key; of a list for each block, in which all are equal, that value."""
    if key == "attention.head_count_kv" and isinstance(value, list):  # 0 of blocks without any
        value = sorted(set(value) - {0}) or 0
    if isinstance(value, list) and len(set(value)) == 1:
        return value[0]
    return value


def _own_values(key: str, names: Sequence[str], config: "PreTrainedConfig") -> list[Any]:
    """Return what a config says of a key, in its fields of these names or by others."""
    own = [getattr(config, name) for name in names]
    if key in ("attention.key_length", "attention.value_length") and not names:
        return [_head_width(config)]
    if key == "ssm.inner_size" and hasattr(config, "linear_value_head_dim"):
        return [config.linear_num_value_heads * config.linear_value_head_dim]
    if key == "feed_forward_length" and own in ([], [None]):  # Bloom, and GPT-2's default
        return [4 * config.hidden_size]
    return own


def _carry_rotary(header: Header, config: "PreTrainedConfig") -> None:
    """Write the rotary positions of a header into the config."""
    values = header.values
    own = getattr(config, "rope_parameters", None)
    if not own:
        for key in ROTARY:
            if key in values:
                header.refuse(key, f"no rotary positions, which {config.model_type} does not have")
        return
    # with windows, a model can have other frequencies within them
    full = own.get("full_attention", own)
    if "rope.freq_base" in values:
        full["rope_theta"] = values["rope.freq_base"]
    if "rope.freq_base_swa" in values:
        if "sliding_attention" not in own:
            header.refuse("rope.freq_base_swa", "the same frequencies in every block")
        own["sliding_attention"]["rope_theta"] = values["rope.freq_base_swa"]
    width = _head_width(config)
    rotated = values.get("rope.dimension_count", width)
    if "partial_rotary_factor" in full:
        full["partial_rotary_factor"] = rotated / width
    elif rotated != width:
        header.refuse("rope.dimension_count", f"{width}, the width of a head, which is all rotated")
    sections = [number for number in values.get("rope.dimension_sections", []) if number]
    if sections and sections != list(own.get("mrope_section", [])):
        header.refuse("rope.dimension_sections", "one position for each token")
    scaling = _scaling(header, int(config.max_position_embeddings), pairs=rotated // 2)
    if not scaling:
        return
    full.update(scaling)
    if hasattr(config, "original_max_position_embeddings"):  # Phi-3, which prefers it
        config.original_max_position_embeddings = scaling["original_max_position_embeddings"]


def _scaling(header: Header, context: int, *, pairs: int) -> Json:
    """Return how rotary frequencies are scaled, as rope_parameters of transformers; {}: not.

    Source: llama.cpp, src/llama-model.cpp (load_hparams) and ggml_rope_ext.
    """
    values = header.values
    factor = float(values.get("rope.scaling.factor") or values.get("rope.scale_linear") or 1.0)
    kind = str(values.get("rope.scaling.type") or "linear")
    original = int(values.get("rope.scaling.original_context_length") or context)
    attention = float(values.get("rope.scaling.attn_factor") or 1.0)
    if kind not in ("none", "linear", "yarn", "longrope"):
        header.refuse("rope.scaling.type", "none, linear, yarn or longrope")
    if kind == "none":
        factor = 1.0
    every, short, long = (header.factors(name) for name in FACTORS)
    if every or short or long:
        for numbers in (every or short, every or long):
            if len(numbers or []) != pairs:
                expected = f"{FACTORS[0]}, or {' and '.join(FACTORS[1:])}, of {pairs} numbers"
                header.refuse(f"{len(numbers or [])} numbers", expected, prefixed=False)
        if kind == "yarn":
            header.refuse("rope.scaling.type", "no factors of frequencies beside yarn")
        if kind == "longrope":  # its factors say all
            factor = 1.0
        return {
            "rope_type": "longrope",
            "short_factor": [number * factor for number in every or short or []],
            "long_factor": [number * factor for number in every or long or []],
            "original_max_position_embeddings": context if every else original,
            "attention_factor": attention,
            "factor": 1.0,
        }
    if kind == "longrope":
        header.refuse("rope.scaling.type", f"the tensors {' and '.join(FACTORS[1:])} beside it")
    if attention != 1.0:
        header.refuse("rope.scaling.attn_factor", "1, or factors of frequencies beside it")
    if factor == 1.0:
        return {}
    scaling: Json = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{name}" in values:
                scaling[name] = values[f"rope.scaling.yarn_{name}"]
    return scaling


def _refuse_unread_tensors(header: Header, model: "PreTrainedModel") -> None:
    """Raise a ValueError if the file has numbers that are in no weight of the model."""
    elsewhere = HEAD + (FACTORS if getattr(model.config, "rope_parameters", None) else ())
    sizes = {name: size for name, size in header.sizes.items() if name not in elsewhere}
    weights = sum(weight.numel() for weight in model.parameters())
    if sum(sizes.values()) == weights:
        return
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architectures = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    named = get_tensor_name_map(
        architectures[header.architecture], int(model.config.num_hidden_layers)
    )
    read = set()
    for name in model.state_dict():
        path, _, suffix = name.rpartition(".")
        for prefix in ("model.", "transformer.", ""):
            read.add(f"{named.get_name(prefix + path)}.{suffix}")
    unread = sorted(sizes.keys() - read) or sorted(sizes)
    raise ValueError(
        f"{header.path}: expected only tensors that {type(model).__name__} of transformers has, got "
        f"{', '.join(unread[:4])}; take the model folder that the file was made of"
    )


def _head_width(config: "PreTrainedConfig") -> int:
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)


def _equal(value: object, own: object) -> bool:
    """Return whether two values are equal but for the rounding of a header's float32."""
    if isinstance(value, float) and isinstance(own, int | float):
        return math.isclose(value, own, rel_tol=1e-6)
    return value == own
