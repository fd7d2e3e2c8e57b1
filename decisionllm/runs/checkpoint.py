"""The weights of a run in and out: a folder of safetensors and JSON, without frozen weights.

checkpoint/
  model.safetensors    trained weights but adapters, and buffers, such as the normaliser's
  adapter/             LoRA, as peft saves it, by the names on AutoModel and on AutoModelForCausalLM
  trainer.safetensors  the moments of the optimiser
  trainer.json         the step
  checksums.json       of these files, which therefore belong together
"""

import json
import re
import shutil
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from decisionllm.backbones.build import fingerprint
from decisionllm.backbones.forward import Backbone
from decisionllm.backbones.lora import ADAPTER_FILE, by_own_names, save_adapter
from decisionllm.config import TrainConfig, train_config
from decisionllm.datasets.mixture import same_space, spaces
from decisionllm.distributed import whole
from decisionllm.files import explained, sealed
from decisionllm.models.generalist import Model, members
from decisionllm.models.sequence import SequenceModel
from decisionllm.registry import Node
from decisionllm.runs.directory import ROOM, UPGRADE, content, read, specs
from decisionllm.runs.model import make_model
from decisionllm.schema import Json

Part = Backbone | SequenceModel  # whose weights are copied
UNUSED = re.compile(r"planner\.(rewards\.|values\.|reward_low$|reward_span$)")


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
            adapters[name] = whole(weight)
    if not write:
        return
    for partial in path.glob(".partial-*-checkpoint"):  # of a save that was killed
        shutil.rmtree(partial, ignore_errors=True)
    kept = "the checkpoint before it is kept" if folder.is_dir() else "there is no earlier one"
    errors = explained(
        f"{folder}: could not be written",
        OSError,
        SafetensorError,
        remedy=f"{kept}; {ROOM}",
        raised=OSError,
    )
    with errors, sealed(folder) as partial:
        save_file(own, partial / "model.safetensors")
        if adapters:
            save_adapter(model.backbone.model, adapters, partial / "adapter")
        save_file(trainer_tensors, partial / "trainer.safetensors")
        (partial / "trainer.json").write_text(json.dumps(trainer_state), encoding="utf-8")


def find(path: str | Path) -> Path | None:
    """The checkpoint folder of a run, or None.

    A save that was cut off between its two renames left the old one.
    """
    for name in ("checkpoint", "checkpoint.old"):
        if (Path(path) / name).is_dir():
            return Path(path) / name
    return None


def checkpoint_folder(path: str | Path) -> Path:
    """The checkpoint folder of a run; a FileNotFoundError if there is none."""
    folder = find(path)
    if folder is None:
        raise FileNotFoundError(
            f"{path}: expected a run with a checkpoint, found none; train it first"
        )
    return folder


def trained_steps(path: str | Path) -> int:
    """The training steps of a run's last checkpoint."""
    step: int = content(checkpoint_folder(path) / "trainer.json")["step"]
    return step


def stopped_at(path: str | Path) -> int | None:
    """The step at which the training of a run was interrupted; None if it is finished, or if the
    run has no checkpoint, as a baseline.
    """
    folder = find(path)
    if folder is None or not (folder / "trainer.json").is_file():
        return None
    state = content(folder / "trainer.json")
    return None if state.get("finished", True) else int(state["step"])


def weights_folder(path: str | Path, config: TrainConfig) -> Path:
    """The folder whose checkpoint acts: of the lowest held-out loss with log.keep_best, else of the
    last step.
    """
    return Path(path) / "best" if config.log.keep_best else Path(path)


def restore(path: str | Path, model: Model, info: Json) -> None:
    """Load a checkpoint's weights into a model made from the same config; a ValueError if anything
    does not fit.
    """
    folder = checkpoint_folder(path)
    expected = _own_state(model)
    own = todays_names(content(folder / "model.safetensors"), expected)
    adapter = {}
    if model.backbone.tune == "lora":
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        wanted = get_peft_model_state_dict(model.backbone.model, save_embedding_layers=False)
        saved = content(folder / "adapter" / ADAPTER_FILE)
        adapter = by_own_names(saved, wanted, model.backbone.core)
        expected |= wanted
    why = _differences(own | adapter, expected)
    if why:
        trained = "the config names another backbone, head or embedding than was trained"
        raise ValueError(f"{folder}: not this model's weights; {why}{trained}")
    if info["frozen"] != fingerprint(model.backbone):
        raise ValueError(
            f"{folder}: trained on a backbone whose frozen weights were different; load the one it "
            "was trained on"
        )
    if adapter:
        set_peft_model_state_dict(model.backbone.model, adapter)
    model.load_state_dict(own, strict=False)


def todays_names(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of a checkpoint by the names that a model expects now.

    In 0.2 a planner held the tensors of its dynamics itself, and planner=landmarks also networks
    of rewards and values that it did not use.
    """
    found = {}
    for name, tensor in tensors.items():
        if name not in expected:
            if UNUSED.search(name):
                continue
            moved = name.replace("planner.", "planner.dynamics.", 1)
            name = moved if moved in expected else name
        found[name] = tensor
    return found


def load_model(path: str | Path, config: Node, info: Json) -> Model:
    """The model of a run with the weights that act; see `restore` for errors. config, info: of
    `read`.
    """
    # first, since the options of an earlier version may be others
    wrong = "the options of this run are not those of this version"
    with explained(wrong, ValueError, remedy=UPGRADE):
        options = train_config(config)
    model = make_model(options, specs(info))
    restore(weights_folder(path, options), model, info)
    return model


def start_from(path: str | Path, model: Model, config: TrainConfig) -> set[str]:
    """Give a new model the weights of a run: the backbone's, and each embodiment's from the one of
    its space, with its units.

    Args:
        path: of the run.
        model: of a new run.
        config: of the new run. Where its backbone is read from this run (backbone.folder), the
            backbone stays as it is.

    Returns:
        The embodiments that were given weights; the others are new.

    Raises:
        FileNotFoundError: there is no run, or no checkpoint.
        ValueError: the run has another backbone, head or embedding, or none of its spaces is the
            data's.
    """
    before, info = read(path)
    if "policy" in before:
        raise ValueError(f"init_from={path}: expected a run of `decisionllm train`, got a baseline")
    source = load_model(path, before, info)
    given = members(source)
    folder = config.backbone.get("folder")
    is_read_already = folder and _absolute(folder) == _absolute(path)
    if not is_read_already:
        _copy(path, source.backbone, model.backbone)
    started = set()
    for name, member in members(model).items():
        similar = [other for other, one in given.items() if same_space(one.spec, member.spec)]
        if similar:
            chosen = name if name in similar else similar[0]
            _copy(path, given[chosen], member)
            started.add(name)
        elif name in given or not name:
            raise ValueError(_other_space(path, member, given))
    return started


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().resolve()


def _other_space(
    path: str | Path, member: SequenceModel, given: Mapping[str, SequenceModel]
) -> str:
    """Why a run can't give weights to an embodiment of a new model: the message of an error.

    Args:
        path: of the run.
        member: of the new model.
        given: embodiments of the run.
    """
    shown = {"the data": member.spec}
    for name, one in given.items():
        whose = f"the run ({name})" if name else "the run"
        shown[whose] = one.spec
    remedy = (
        "a new space is a new label of dataset=embodiments, or takes the backbone alone by "
        f"backbone=pretrained backbone.folder={path}"
    )
    return f"init_from={path}: expected a run of the data's space, got {spaces(shown)}; {remedy}"


def _copy(path: str | Path, source: Part, model: Part) -> None:
    """Load the weights and buffers of one module into another, but for a model's backbone; a
    ValueError if they differ in more.
    """
    given = _without_backbone(source.state_dict())
    why = _differences(given, _without_backbone(model.state_dict()))
    what = "model"
    if isinstance(source, Backbone) and isinstance(model, Backbone):
        what = "backbone"
        if not why and fingerprint(source) != fingerprint(model):
            why = "frozen weights; "
    if why:
        wanted = (
            "a run of the same backbone, head, embedding and, with tokenizer.timesteps=learned, "
            "horizon"
        )
        why = f"the {what} differs: {why}take the options of its config.yaml"
        raise ValueError(f"init_from={path}: expected {wanted}; {why}")
    model.load_state_dict(given, strict=False)


def _without_backbone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if not name.startswith("backbone.")}


def _own_state(model: Model) -> dict[str, Tensor]:
    """The tensors that a checkpoint holds itself: of the backbone the trained ones but adapters, and
    the features of texts; of all else every weight and buffer.
    """
    names = set()
    # each once, where several embodiments share a backbone
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        is_trained = tensor.requires_grad and "lora_" not in name
        is_frozen_backbone = name.startswith("backbone.") and not is_trained
        if not is_frozen_backbone or name.startswith("backbone.features."):
            names.add(name)
    tensors = model.state_dict()
    return {name: whole(tensor) for name, tensor in tensors.items() if name in names}


def _differences(given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """How named tensors differ from the expected ones in names and sizes, in words; empty if they
    do not.
    """
    sizes = []
    for name in given.keys() & expected.keys():
        got, wanted = tuple(given[name].shape), tuple(expected[name].shape)
        if got != wanted:
            sizes.append(f"{name} is {got}, expected {wanted}")
    kinds = {
        "missing": expected.keys() - given.keys(),
        "unknown": given.keys() - expected.keys(),
        "sizes": sizes,
    }
    words = ""
    for kind, found in kinds.items():
        if found:
            more = " ..." * (len(found) > 4)
            words += f"{kind}: {', '.join(sorted(found)[:4])}{more}; "
    return words
