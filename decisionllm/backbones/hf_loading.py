"""Language models, configs and tokenizers loaded by transformers from a folder or the hub, with one
clear error for each that cannot be taken.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from safetensors import SafetensorError

from decisionllm.files import explain_errors
from decisionllm.hub import ask_hub

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


CUSTOM_CODE = "custom code"  # is in the error of transformers for a model that needs some
Part = TypeVar("Part")  # a model, its config or its tokenizer


def load_from_folder(folder: str, load: Callable[..., Part]) -> Part:
    """Load a part of a model from a local folder. load: see `load_from_hub`."""
    return load(folder, local_files_only=True)


def load_from_hub(hub_id: str, load: Callable[..., Part]) -> Part:
    """Load a part of a model of the hub: the copy in the cache, or a download.

    Args:
        hub_id: name on the hub.
        load: (name, local_files_only) -> model, config or tokenizer.

    Raises:
        OSError: the model is not in the cache, and the hub does not answer or lacks it.
    """
    from huggingface_hub import snapshot_download

    if Path(hub_id).is_dir():
        return load(hub_id, local_files_only=True)
    try:
        # the folder in the cache, since AutoModel looks for adapters of a name in the network in
        # any case
        return load(snapshot_download(hub_id, local_files_only=True), local_files_only=True)
    except (OSError, ValueError):  # it is not in the cache, or only a part of it
        pass
    ask_hub(hub_id)
    return load(hub_id, local_files_only=False)


def load_whole_model(source: str, **options: object) -> "PreTrainedModel":
    """Load the model of a folder or of the hub, see `AutoModel.from_pretrained`.

    Raises:
        OSError: its files lack weights, which transformers would draw at random, or have some of
            other sizes than its config.json says.
    """
    from transformers import AutoModel

    model: PreTrainedModel
    wrong_sizes = "its weights have other sizes than its config.json says"
    with quiet_loading(), explain_errors(wrong_sizes, RuntimeError, raised=OSError):
        model, loading = AutoModel.from_pretrained(
            source, output_loading_info=True, trust_remote_code=False, **options
        )
    missing = loading["missing_keys"]
    if missing:
        raise OSError(f"it lacks weights of {type(model).__name__}, such as {min(missing)}")
    return model


def read_config(source: str, *, local_files_only: bool) -> "PreTrainedConfig":
    """Load the config of a language model, of a folder or of the hub."""
    from transformers import AutoConfig

    config: PreTrainedConfig
    with as_os_error("its config.json names no model of this version of transformers"):
        config = AutoConfig.from_pretrained(
            source, local_files_only=local_files_only, trust_remote_code=False
        )
    attention = config._attn_implementation
    if isinstance(attention, str) and "/" in attention:
        raise OSError(
            f"expected an attention of transformers itself in config.json, got {attention}, which "
            "is code from the hub"
        )
    return config


def read_tokenizer(source: str, *, local_files_only: bool) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a folder or of the hub; raise an OSError if it has none."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase
    with as_os_error("expected the files of a tokenizer, tokenizer.json among them"):
        tokenizer = AutoTokenizer.from_pretrained(
            source, local_files_only=local_files_only, trust_remote_code=False
        )
    # without the files of a tokenizer, transformers makes one that drops every word
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise OSError(f"expected the files of a tokenizer, found none at {source}")
    return tokenizer


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Leave out the bars of transformers and its report of weights that a body has no use for, such
    as those of the head; missing ones are an error, see `load_whole_model`.
    """
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


@contextmanager
def as_os_error(what: str) -> Iterator[None]:
    """Raise an OSError of one line in place of a ValueError of transformers, but for a model that
    needs code of its own.
    """
    try:
        yield
    except ValueError as error:
        if CUSTOM_CODE in str(error):
            raise
        raise OSError(f"{what} ({str(error).splitlines()[0]})") from error


@contextmanager
def explain_load_errors(source: str, likely_cause: str) -> Iterator[None]:
    """Raise an OSError of one line in place of an error of a missing or damaged file: the source,
    the likely cause, the reason.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (OSError, SafetensorError, JSONDecodeError, StrictDataclassError) as error:
        reason = str(error).splitlines()[0]
        raise OSError(
            f"backbone {source}: could not be loaded ({likely_cause}): {reason}"
        ) from error
    except ValueError as error:
        if CUSTOM_CODE not in str(error):
            raise
        raise ValueError(
            f"backbone {source}: expected a model of transformers itself, got one that needs code "
            "of its own, which is never executed"
        ) from error


def refuse_quantised(source: str, config: "PreTrainedConfig") -> None:
    """Raise a ValueError if the weights of a model are quantised: each library keeps them in
    tensors of its own, which can't be hashed, held in another type or adapted as plain ones.
    """
    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return
    method = quantised.get("quant_method", "an unknown method")
    raise ValueError(
        f"backbone {source}: expected weights that are not quantised, got those of {method}; take "
        "the model that it was made of, with backbone.dtype=bfloat16"
    )


def refuse_all_but_decoders(source: str, model: "PreTrainedModel") -> None:
    """Raise a ValueError if a model is an encoder and a decoder, or reads more than text."""
    if model.config.is_encoder_decoder or model.config.get_text_config() is not model.config:
        raise ValueError(
            f"backbone {source}: expected a decoder of text alone, such as Qwen2 or Llama, got "
            f"{type(model).__name__}"
        )
