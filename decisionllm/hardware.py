"""Device and precision of a run, and of the frozen weights of a language model."""

import torch

from decisionllm.checks import check_one_of


def resolve_device(device: str) -> str:
    """auto, cpu or cuda -> cpu or cuda; a ValueError if torch cannot use it."""
    check_one_of("device", device, ("auto", "cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device=cuda: no GPU that torch can use was found; take device=cpu, or a CUDA build of "
            "torch"
        )
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def resolve_precision(device: str, choice: str) -> str:
    """`no` or `bf16`; auto: bf16 where the processor multiplies it faster than float32."""
    if choice != "auto":
        return choice
    if resolve_device(device) == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    for unit in ("avx512_bf16", "amx_tile"):
        is_supported = vars(torch.cpu).get(f"_is_{unit}_supported", bool)
        if is_supported():
            return "bf16"
    return "no"


def is_slow_dtype(dtype: torch.dtype) -> bool:
    """Return whether float32 is the faster type here: bfloat16 on a processor without units for it takes
    three to six times as long.
    """
    return dtype == torch.bfloat16 and resolve_precision("auto", "auto") == "no"
