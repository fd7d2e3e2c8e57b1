"""Several processes of one training, as accelerate or torchrun starts them: they divide each batch
(DDP), or the weights too (FSDP2).
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
)
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import str_to_bool
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

CONFIG = (
    "accelerate launch --config_file configs/accelerate/ddp.yaml (or fsdp.yaml) "
    "--num_processes N -m decisionllm train ..."
)
REFUSED = {  # settings of accelerate that a training here does not follow: what to do instead
    "ACCELERATE_USE_DEEPSPEED": "shard by FSDP2, configs/accelerate/fsdp.yaml",
    "ACCELERATE_USE_MEGATRON_LM": "shard by FSDP2, configs/accelerate/fsdp.yaml",
    "FSDP_ACTIVATION_CHECKPOINTING": "take optim.gradient_checkpointing=true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": (
        "every process loads the weights; set fsdp_cpu_ram_efficient_loading: false"
    ),
}

# The group of the processes of this run. torch waits for gloo's threads when the last reference to
# a group goes; it does so while it holds Python's lock if that reference is DDP's, and a thread
# that wants this lock then waits for ever (pytorch/pytorch#56297). Held here, the group outlives
# the model: the last reference is Python's, which lets the lock go.
_group: list[object] = []


def check_environment(precision: str) -> bool:
    """Return whether the environment selects FSDP2; a ValueError for what accelerate or torchrun may set
    and this training would not do.
    """
    refuse_settings(precision)
    alone = "RANK" not in os.environ
    if alone and {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys():
        raise ValueError(
            "accelerate launch started one process, not several, as it does on CPUs; start them "
            f"by {CONFIG}"
        )
    if not is_on("ACCELERATE_USE_FSDP"):
        return False
    if alone:
        raise ValueError(
            f"ACCELERATE_USE_FSDP: expected several processes, got one; start them by {CONFIG}"
        )
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise ValueError(
            f"FSDP_VERSION: expected fsdp_version: 2, got {version}; see "
            "configs/accelerate/fsdp.yaml"
        )
    return True


def refuse_settings(precision: str) -> None:
    """Raise a ValueError for settings of accelerate that this training would not follow."""
    environment = os.environ
    for name, fix in REFUSED.items():
        if is_on(name):
            raise ValueError(f"{name}={environment[name]}: expected false; {fix}")
    compiler = environment.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if compiler.lower() != "no":
        raise ValueError(
            f"dynamo_backend of accelerate: expected no, got {compiler}; leave dynamo_config out, "
            "since a training here compiles nothing"
        )
    parts = int(environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1"))
    if parts > 1:
        raise ValueError(
            f"gradient_accumulation_steps of accelerate: expected 1, got {parts}; take "
            f"optim.accumulate={parts}"
        )
    mixed = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed not in ("no", precision):
        raise ValueError(
            f"mixed_precision of accelerate: expected no, or that of optim.precision, {precision}; "
            f"got {mixed}"
        )


def is_on(name: str) -> bool:
    """Return whether a variable of the environment says yes."""
    return bool(str_to_bool(os.environ.get(name, "false")))


def create_accelerator(precision: str, *, cpu: bool, **options: object) -> Accelerator:
    """The accelerator of a run.

    Args:
        precision: no or bf16.
        cpu: whether to stay on CPUs.
        options: of `Accelerator`.

    Raises:
        ValueError: see `check_environment`.
    """
    # runs of a sweep share a process, not a precision or device
    AcceleratorState._reset_state(reset_partial_state=True)
    sharded = check_environment(precision)
    accelerator = Accelerator(mixed_precision=precision, cpu=cpu, **options)
    _group[:] = [torch.distributed.group.WORLD] if torch.distributed.is_initialized() else []
    if sharded:
        if cpu and torch.cuda.is_available():
            raise ValueError(
                "FSDP2 on CPUs: expected no GPU in sight, since torch shards on it; set "
                "CUDA_VISIBLE_DEVICES="
            )
        # accelerate reads its own variables on GPUs alone
        accelerator.state.distributed_type = DistributedType.FSDP
        # without casts: autocast has them
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    return accelerator


def wrap_model(
    accelerator: Accelerator, model: Any, optimizer: torch.optim.Optimizer, *, alike: bool
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """Model and optimiser wrapped by accelerate; with FSDP2 each block of the backbone is gathered
    while it is read.

    alike: every step uses the same parameters; then DDP learns from the first one which these are.

    Raises:
        ValueError: FSDP2 would shard a model whose lower blocks read texts alone. Sharded, all
            processes must read a block at the same time, and each process reads the texts of its
            own rows, when they are new.
    """
    if accelerator.is_fsdp2 and model.backbone.text_layers:
        raise ValueError(
            f"backbone.text_layers: expected 0 with FSDP2, got {model.backbone.text_layers}; "
            "take backbone.text_layers=0 backbone.layers=0, or configs/accelerate/ddp.yaml"
        )
    if not accelerator.is_fsdp2:
        accelerator.ddp_handler = DistributedDataParallelKwargs(
            static_graph=alike, find_unused_parameters=not alike
        )
        wrapped: tuple[nn.Module, AcceleratedOptimizer] = accelerator.prepare(model, optimizer)
        return wrapped
    plugin = accelerator.state.fsdp_plugin
    plugin.transformer_cls_names_to_wrap = plugin.transformer_cls_names_to_wrap or [
        *model.backbone.core._no_split_modules
    ]
    prepared, stepped = accelerator.prepare(model, optimizer)
    prepared.backbone.shard()
    return prepared, stepped


def gather_weights(model: nn.Module) -> None:
    """Gather the weights of a sharded model that are in no block, for who calls its parts: a policy
    that acts. A forward of the whole model does so itself."""
    if isinstance(model, FSDPModule):
        model.unshard()


def reshard_weights(model: nn.Module) -> None:
    """Divide the weights of a sharded model that are in no block, such as word embeddings; a
    forward without a backward pass leaves them gathered."""
    if isinstance(model, FSDPModule):
        model.reshard()


def gather_tensor(x: Tensor) -> Tensor:
    """A tensor on the CPU, gathered from all processes if it is sharded: then all of them must call
    this.
    """
    if isinstance(x, DTensor):
        x = x.full_tensor()
    return x.detach().cpu().contiguous()


def place_like(x: Tensor, weight: Tensor) -> Tensor:
    """A tensor of the optimiser's state where its weight is: on its device, and divided as
    it is.
    """
    if isinstance(weight, DTensor) and x.ndim:
        return distribute_tensor(x.to(weight.device), weight.device_mesh, weight.placements)
    return x.to(weight.device)


def is_connection_lost(error: RuntimeError) -> bool:
    """Return whether this is how torch says that another process of the run cannot be reached."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


def create_call_counter(accelerator: Accelerator) -> Callable[[], int]:
    """Return a function that counts its calls over all processes of a run, also once their
    connection is lost.
    """
    if accelerator.num_processes == 1:
        return lambda: 1
    store = torch.distributed.distributed_c10d._get_default_store()

    def count() -> int:
        try:
            return int(store.add("calls", 1))
        except RuntimeError:  # the process that kept the count is the lost one
            return 1

    return count
