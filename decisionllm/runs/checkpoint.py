"""The weights of a run in and out: a folder of safetensors and JSON, without frozen weights.

checkpoint/
  model.safetensors    trained weights but adapters, and buffers, such as the normaliser's
  adapter/             LoRA, as peft saves it, by the names on AutoModel and on AutoModelForCausalLM
  trainer.safetensors  the moments of the optimiser
  trainer.json         the step
  checksums.json       of these files, which therefore belong together
"""

import json
import shutil
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from decisionllm.backbones.build import fingerprint
from decisionllm.backbones.forward import Backbone
from decisionllm.backbones.lora import ADAPTER_FILE, save_adapter, select_own_names
from decisionllm.config import TrainConfig, train_config
from decisionllm.datasets.mixture import describe_spaces, is_same_space
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.distributed import gather_tensor
from decisionllm.files import atomic_folder, explain_errors
from decisionllm.models.generalist import Model, members
from decisionllm.models.sequence import SequenceModel
from decisionllm.registry import Node
from decisionllm.runs.directory import ROOM, UPGRADE, read, read_file, read_specs
from decisionllm.runs.hub import is_hub_folder
from decisionllm.runs.model import make_model
from decisionllm.schema import Json

Part = Backbone | SequenceModel  # whose weights are copied


def save(
    path: Path,
    model: Model,
    trainer_tensors: dict[str, Tensor],
    trainer_state: Json,
    *,
    write: bool = True,
) -> None:
    """Write the checkpoint folder of a run, all or nothing: the earlier one stays until the new one
    is complete.

    Of sharded weights every process calls this, and one of them has `write`.
    """
    folder = path / "checkpoint"
    own = _own_state(model)
    adapters = {}
    for name, weight in model.backbone.model.named_parameters():
        if "lora_" in name:
            adapters[name] = gather_tensor(weight)
    if not write:
        return
    for partial in path.glob(".partial-*-checkpoint"):  # of a save that was killed
        shutil.rmtree(partial, ignore_errors=True)
    earlier = "the checkpoint before it is kept" if folder.is_dir() else "there is no earlier one"
    errors = explain_errors(
        f"{folder}: could not be written",
        OSError,
        SafetensorError,
        fix=f"{earlier}; {ROOM}",
        raised=OSError,
    )
    with errors, atomic_folder(folder) as partial:
        save_file(own, partial / "model.safetensors")
        if adapters:
            save_adapter(model.backbone.model, adapters, partial / "adapter")
        save_file(trainer_tensors, partial / "trainer.safetensors")
        (partial / "trainer.json").write_text(json.dumps(trainer_state), encoding="utf-8")


def find(path: str | Path) -> Path | None:
    """Return the checkpoint folder of a run, or None. One that was exported for the hub is its own.

    A save that was cut off between its two renames left the old one.
    """
    for name in ("checkpoint", "checkpoint.old"):
        if (Path(path) / name).is_dir():
            return Path(path) / name
    return Path(path) if is_hub_folder(path) else None


def checkpoint_folder(path: str | Path) -> Path:
    """Return the checkpoint folder of a run; a FileNotFoundError if there is none."""
    folder = find(path)
    if folder is None:
        raise FileNotFoundError(
            f"{path}: expected a run with a checkpoint, found none; train it first"
        )
    return folder


def trained_steps(path: str | Path) -> int:
    """Return the training steps of a run's last checkpoint."""
    step: int = read_file(checkpoint_folder(path) / "trainer.json")["step"]
    return step


def interrupted_step(path: str | Path) -> int | None:
    """Return the step at which the training of a run was interrupted; None if it is finished, or if
    the run has no checkpoint, as a baseline.
    """
    folder = find(path)
    if folder is None or not (folder / "trainer.json").is_file():
        return None
    state = read_file(folder / "trainer.json")
    return None if state.get("finished", True) else int(state["step"])


def weights_folder(path: str | Path, config: TrainConfig) -> Path:
    """Return the folder whose checkpoint acts: with log.keep_best of the best weights, else of the
    last step. A folder that was exported for the hub has no others.
    """
    has_best = config.log.keep_best and not is_hub_folder(path)
    return Path(path) / "best" if has_best else Path(path)


def restore(path: str | Path, model: Model, info: Json) -> None:
    """Load a checkpoint's weights into a model made from the same config; a ValueError if anything
    does not fit.
    """
    folder = checkpoint_folder(path)
    expected = _own_state(model)
    own = read_file(folder / "model.safetensors")
    adapter = {}
    if model.backbone.tune == "lora":
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        in_model = get_peft_model_state_dict(model.backbone.model, save_embedding_layers=False)
        saved = read_file(folder / "adapter" / ADAPTER_FILE)
        adapter = select_own_names(saved, in_model, model.backbone.core)
        expected |= in_model
    differences = _differences(own | adapter, expected)
    if differences:
        raise ValueError(
            f"{folder}: not this model's weights; {differences}the config names another backbone, "
            "head or embedding than was trained"
        )
    if info["frozen"] != fingerprint(model.backbone):
        raise ValueError(
            f"{folder}: trained on a backbone whose frozen weights were different; load the one it "
            "was trained on"
        )
    if adapter:
        set_peft_model_state_dict(model.backbone.model, adapter)
    model.load_state_dict(own, strict=False)


def load_model(path: str | Path, config: Node, info: Json) -> Model:
    """Load the model of a run with the weights that act; see `restore` for errors. config, info: of
    `directory.read`.
    """
    # first, since the options of an earlier version may be others
    with explain_errors(
        "the options of this run are not those of this version", ValueError, fix=UPGRADE
    ):
        options = train_config(config)
    model = make_model(options, read_specs(info))
    restore(weights_folder(path, options), model, info)
    return model


def copy_weights(path: str | Path, model: Model, config: TrainConfig) -> set[str]:
    """Give a new model the weights of a run: the backbone's, and each embodiment's from the one of
    its space, with its units.

    Args:
        path: of the run.
        model: of a new run.
        config: of the new run. Where its backbone is read from this run (backbone.folder), the
            backbone stays as it is.

    Returns:
        The embodiments that got weights; the others are new.

    Raises:
        FileNotFoundError: there is no run, or no checkpoint.
        ValueError: the run has another backbone, head or embedding, or none of its spaces is the
            data's.
    """
    run_config, info = read(path)
    if "policy" in run_config:
        raise ValueError(f"init_from={path}: expected a run of `decisionllm train`, got a baseline")
    source = load_model(path, run_config, info)
    sources = members(source)
    folder = config.backbone.get("folder")
    is_read_already = folder and _absolute(folder) == _absolute(path)
    if not is_read_already:
        _copy(path, source.backbone, model.backbone)
    started = set()
    for name, member in members(model).items():
        similar = [other for other, one in sources.items() if is_same_space(one.spec, member.spec)]
        if similar:
            _copy(path, sources[name if name in similar else similar[0]], member)
            started.add(name)
        elif name in sources or name == ONLY:
            raise ValueError(_other_space(path, member, sources))
    return started


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().resolve()


def _other_space(
    path: str | Path, member: SequenceModel, sources: Mapping[str, SequenceModel]
) -> str:
    """Return the message for a run that has no embodiment of the space of a new model's.

    Args:
        path: of the run.
        member: embodiment of the new model.
        sources: embodiments of the run.
    """
    specs_by_owner = {"the data": member.spec}
    for name, source in sources.items():
        specs_by_owner[f"the run ({name})"] = source.spec
    return (
        f"init_from={path}: expected a run of the data's space, got {describe_spaces(specs_by_owner)}; a new "
        "space is a new label of dataset=embodiments, or takes the backbone alone by "
        f"backbone=pretrained backbone.folder={path}"
    )


def _copy(path: str | Path, source: Part, model: Part) -> None:
    """Load the weights and buffers of one module into another, but for a model's backbone; a
    ValueError if they differ in more.
    """
    tensors = _without_backbone(source.state_dict())
    differences = _differences(tensors, _without_backbone(model.state_dict()))
    kind = "model"
    if isinstance(source, Backbone) and isinstance(model, Backbone):
        kind = "backbone"
        if not differences and fingerprint(source) != fingerprint(model):
            differences = "frozen weights; "
    if differences:
        raise ValueError(
            f"init_from={path}: expected a run of the same backbone, head, embedding and, with "
            f"tokenizer.timesteps=learned, horizon; the {kind} differs: {differences}take the "
            "options of its config.yaml"
        )
    model.load_state_dict(tensors, strict=False)


def _without_backbone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if not name.startswith("backbone.")}


def _own_state(model: Model) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint holds itself: of the backbone the trained ones but
    adapters, and the features of texts; of all else every weight and buffer.
    """
    names = set()
    # each once, where several embodiments share a backbone
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        is_trained = tensor.requires_grad and "lora_" not in name
        is_frozen_backbone = name.startswith("backbone.") and not is_trained
        if not is_frozen_backbone or name.startswith("backbone.features."):
            names.add(name)
    tensors = model.state_dict()
    return {name: gather_tensor(tensor) for name, tensor in tensors.items() if name in names}


def _differences(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Return in words how named tensors differ from the expected ones in names and sizes; empty if
    they do not.
    """
    sizes = []
    for name in tensors.keys() & expected.keys():
        size, expected_size = tuple(tensors[name].shape), tuple(expected[name].shape)
        if size != expected_size:
            sizes.append(f"{name} is {size}, expected {expected_size}")
    lines_by_kind = {
        "missing": expected.keys() - tensors.keys(),
        "unknown": tensors.keys() - expected.keys(),
        "sizes": sizes,
    }
    words = ""
    for kind, lines in lines_by_kind.items():
        if lines:
            more = " ..." * (len(lines) > 4)
            words += f"{kind}: {', '.join(sorted(lines)[:4])}{more}; "
    return words
