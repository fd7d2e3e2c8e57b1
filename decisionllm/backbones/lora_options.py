"""Options of LoRA by the names of peft's LoraConfig (`backbone.lora`): those that a backbone takes,
why it refuses the others, and those of an adapter that peft saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decisionllm.checks import unknown_name_message
from decisionllm.files import explain_errors

if TYPE_CHECKING:
    from peft import LoraConfig


# A map with one of these is computed by our forward as by peft's, see `lora.linear`.
SUPPORTED = (
    "r",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "lora_dropout",
    "use_rslora",
    "use_dora",
    "init_lora_weights",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layers_pattern",
)
# what an adapter on a disk says of itself, and what `lora.add_adapters` sets by the model
DESCRIPTIVE = (
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "fan_in_fan_out",
)
KEEPS_BASE = "a run trains adapters and keeps the base model as it is; tune=full trains all of it"
REASONS = {
    "bias": KEEPS_BASE,
    "lora_bias": "it cannot be merged into a map that has no bias, as an export does",
    "modules_to_save": KEEPS_BASE,
    "trainable_token_indices": KEEPS_BASE,
    "target_parameters": "adapters are of linear maps, not of bare parameters",
    "layer_replication": "it changes the blocks of the base model",
    "alora_invocation_tokens": "the tokens of a trajectory are embeddings and have no ids",
    "loftq_config": "base weights are not quantised",
    "use_qalora": "base weights are not quantised",
    "arrow_config": "a run has one adapter",
}
INITS = (True, False, "gaussian", "orthogonal")


def check_lora_options(options: Mapping[str, Any], tune: str) -> None:
    """Raise a ValueError for an option that peft does not have, or that a backbone cannot carry.

    Args:
        options: of peft.LoraConfig, by name.
        tune: which weights are trained.
    """
    if not options:
        return
    if tune != "lora":
        raise ValueError(f"backbone.lora: expected backbone.tune=lora with it, got tune={tune}")
    check_lora_names(options)
    check_lora_values(options)


def check_lora_names(options: Iterable[str]) -> None:
    """Raise a ValueError for an option that peft does not have, or that a backbone does not take."""
    from peft import LoraConfig

    peft_names = {field.name for field in fields(LoraConfig)}
    for name in options:
        if name in SUPPORTED:
            continue
        if name not in peft_names or name in DESCRIPTIVE:
            message = unknown_name_message("option", name, SUPPORTED)
            raise ValueError(f"backbone.lora: {message}")
        reason = REASONS.get(name, "checkpoints, merging and our forward do not carry it")
        raise ValueError(
            f"backbone.lora.{name}: peft has this option and a backbone does not take it, since "
            f"{reason}; there are {', '.join(SUPPORTED)}"
        )


def check_lora_values(options: Mapping[str, Any]) -> None:
    """Raise a ValueError for a value that an option cannot have."""
    init = options.get("init_lora_weights", True)
    if init not in INITS:
        raise ValueError(
            "backbone.lora.init_lora_weights: expected true, false, gaussian or orthogonal, got "
            f"{init}; others change the base model, by which a run recognises it"
        )
    dropout = options.get("lora_dropout", 0.0)
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(
            f"backbone.lora.lora_dropout: expected a share from 0 and below 1, got {dropout}"
        )
    for name, rank in values_of(options, "r", "rank_pattern").items():
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(
                f"backbone.lora.{name}: expected a whole number, 1 or more, got {rank}"
            )
    for name, alpha in values_of(options, "lora_alpha", "alpha_pattern").items():
        if not isinstance(alpha, int | float) or not alpha > 0:
            raise ValueError(f"backbone.lora.{name}: expected more than 0, got {alpha}")


def values_of(options: Mapping[str, Any], name: str, pattern: str) -> dict[str, Any]:
    """Return the value of an option, and those of the modules that its pattern names; 1 if it is
    not given.
    """
    values = {name: options.get(name, 1)}
    for module, value in (options.get(pattern) or {}).items():
        values[f"{pattern}.{module}"] = value
    return values


def read_adapter_options(folder: str) -> dict[str, Any]:
    """Return the LoRA options of an adapter that peft saved, as `backbone.lora` takes them.

    Raises:
        FileNotFoundError: there is no adapter.
        ValueError: it is no LoRA, or has an option that a backbone cannot carry.
    """
    from peft import LoraConfig, PeftConfig

    path = Path(folder).expanduser()
    if not (path / "adapter_config.json").is_file():
        raise FileNotFoundError(
            f"backbone.adapter: expected an adapter of peft (adapter_config.json), found none at {path}"
        )
    with explain_errors(
        f"backbone.adapter={folder}: its adapter_config.json", ValueError, TypeError
    ):
        config = PeftConfig.from_pretrained(str(path))
    if not isinstance(config, LoraConfig):
        raise ValueError(f"backbone.adapter={folder}: expected LoRA, got {config.peft_type}")
    options = describe_lora(config)
    with explain_errors(f"backbone.adapter={folder}", ValueError):
        check_lora_options(options, "lora")
    return options


def describe_lora(config: LoraConfig) -> dict[str, Any]:
    """Return the options in which a LoraConfig differs from peft's defaults, and r and lora_alpha,
    as JSON holds them.
    """
    from peft import LoraConfig

    defaults = LoraConfig()
    options: dict[str, Any] = {"r": config.r, "lora_alpha": config.lora_alpha}
    for field in fields(LoraConfig):
        value = getattr(config, field.name)
        if field.name in DESCRIPTIVE or value == getattr(defaults, field.name):
            continue
        options[field.name] = sorted(value) if isinstance(value, set) else value
    return options
