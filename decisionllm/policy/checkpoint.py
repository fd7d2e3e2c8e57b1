"""A run directory in and out. A checkpoint is a folder of safetensors and JSON; only frozen weights
are not in it.

runs/x/
  config.yaml         every option, resolved
  run.json            spec and fingerprint of the data, target returns, versions, a hash of the
  frozen weights metrics.jsonl       one line a log interval
  checkpoint/         model.safetensors: trained weights but adapters, and the normaliser
                      adapter/: LoRA, as peft saves it, by the names on AutoModel and on
                      AutoModelForCausalLM trainer.safetensors, trainer.json: the optimiser's
                      moments, the step digests.json: of these files, which therefore belong
                      together
  best/checkpoint/    the same at the lowest held-out loss, with log.keep_best; then this one is
  loaded digests.json        of config.yaml and run.json
"""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from decisionllm.backbones.build import fingerprint
from decisionllm.backbones.lora import ADAPTER_FILE, by_own_names, save_adapter
from decisionllm.backbones.readers import attach
from decisionllm.config import ModelOptions, TeamOptions, TrainConfig, flat, one_of
from decisionllm.datasets.mixture import of_embodiments, same_space, spaces
from decisionllm.datasets.store import Store
from decisionllm.distributed import whole
from decisionllm.files import DIGESTS, atomic, check_bytes, explained, own_change, seal, sealed
from decisionllm.models.generalist import Generalist, members
from decisionllm.models.sequence import SequenceModel
from decisionllm.models.team import TeamSequenceModel
from decisionllm.policy.policy import Policy
from decisionllm.registry import build
from decisionllm.schema import Spec

FORMAT = 3  # of run.json, config.yaml and the names of weights
ROOM = "make room or choose another run=..."
UPGRADE = "train again, or use the version that wrote it (run.json names its commit); CHANGELOG.md lists the options that were renamed"
# options that may differ when a run is continued
MAY_DIFFER = (
    "run",
    "device",
    "cache_dir",
    "fresh",
    "model.gradient_checkpointing",
    "log.tracker",
    "log.every",
    "log.save_every",
)
# what our own commands leave in a folder before there is a run in it
BEFORE_A_RUN = (".lock", ".hydra", "multirun.yaml")
MOST_TASKS = 64  # task texts that run.json names
PACKAGES = ("decisionllm", "torch", "transformers", "peft", "numpy")


def versions() -> dict[str, str | None]:
    """What a result says about the code: package versions, and the commit where the code is a
    checkout.
    """
    found = {name: metadata.version(name) for name in PACKAGES}
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists() or not shutil.which("git"):
        return found | {"commit": None}
    git = subprocess.run(
        ["git", "-C", checkout, "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
    )
    return found | {"commit": git.stdout.strip() or None}


def make_model(config: dict[str, Any], spec: Spec | Mapping[str, Spec]) -> Any:
    """The model that a config describes, for data of this spec; new parts and random weights are
    drawn from the seed.

    Returns:
        A `SequenceModel`; a `Generalist` where `spec` holds those of several embodiments by name.
    """
    # First, since the options of a backbone of an earlier version may be others too.
    with explained(
        "the options of this run are not those of this version", TypeError, KeyError, remedy=UPGRADE
    ):
        options, team = ModelOptions(**config["model"]), TeamOptions(**config["team"])
        parts = config["objective"], config["planner"]
    backbone = build(config["backbone"], config["seed"])
    one_of("team.execution", team.execution, ("per_agent", "joint", "both"))
    kind = SequenceModel if team.execution == "per_agent" else TeamSequenceModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config["seed"])
        if isinstance(spec, Spec):
            model: Any = kind(spec, backbone, config["head"], options, *parts)
        else:
            heads = {
                name: part.get("head", config["head"])
                for name, part in of_embodiments(config["dataset"]).items()
            }
            model = Generalist(
                {name: kind(s, backbone, heads[name], options, *parts) for name, s in spec.items()}
            )
        attach(backbone, config)
    return model


def specs(info: dict[str, Any]) -> Spec | dict[str, Spec]:
    """The spec that run.json holds, or those of its embodiments by name."""
    each = {name: Spec.of(one["spec"]) for name, one in info.get("embodiments", {}).items()}
    return each or Spec.of(info["spec"])


def fingerprint_of(stores: Mapping[str, Store]) -> str:
    """The fingerprint of the data of a run."""
    return "+".join(store.fingerprint for store in stores.values())


def describe(path: Path, config: dict[str, Any], stores: Mapping[str, Store], **known: Any) -> None:
    """Begin a run directory: write config.yaml and run.json, remove earlier checkpoints.

    Args:
        path: the run directory.
        config: of the run.
        stores: by embodiment, see `mixture.stores`.
        known: further keys of run.json.
    """
    each = {
        name: {
            "spec": asdict(store.spec),
            "dataset": {key: value for key, value in store.info.items() if key != "parts"},
            "fingerprint": store.fingerprint,
            "episodes": len(store.lengths),
        }
        | (
            {"tasks": store.tasks}
            if len(store.tasks) <= MOST_TASKS and "wordings" not in store.info
            else {}
        )
        for name, store in stores.items()
    }
    data = {"format": FORMAT} | (
        each[""] if "" in each else {"embodiments": each, "fingerprint": fingerprint_of(stores)}
    )
    with explained(f"{path}: could not be written", OSError, remedy=ROOM, raised=OSError):
        path.mkdir(parents=True, exist_ok=True)
        for folder in ("checkpoint", "checkpoint.old", "best"):
            shutil.rmtree(path / folder, ignore_errors=True)
        (path / DIGESTS).unlink(missing_ok=True)
        (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        with atomic(path / "run.json") as partial:
            partial.write_text(json.dumps(data | {"versions": versions()} | known, indent=1))
        seal(path, "config.yaml", "run.json")


def same_run(path: Path, config: dict[str, Any], stores: Mapping[str, Store]) -> dict[str, Any]:
    """The run_info of a run that was begun with this config and this data; a ValueError if it was
    not.
    """
    before, info = read(path)
    was, now = flat(asdict(TrainConfig({}, {}, {}))) | flat(before), flat(config)
    different = {
        key: (was.get(key), now[key])
        for key in now
        if was.get(key) != now[key] and key not in MAY_DIFFER
    }
    if different:
        if different.keys() <= {"steps", "minutes"}:
            raise ValueError(longer(path, **different))
        changes = "; ".join(
            f"{key} was {was!r}, is {now!r}" for key, (was, now) in different.items()
        )
        raise ValueError(
            f"{path} holds another run ({changes}): choose another run=..., or fresh=true to begin again"
        )
    if info["fingerprint"] != (data := fingerprint_of(stores)):
        raise ValueError(
            f"{path} was begun on data {info['fingerprint']}, not {data}: choose another run=..., or fresh=true"
        )
    return info


def longer(path: Path, **different: tuple[Any, Any]) -> str:
    """How to train for longer than a run was begun for, as a message."""
    was = ", ".join(f"{key}={before}" for key, (before, _) in different.items())
    now = ", ".join(f"{key}={after}" for key, (_, after) in different.items())
    # The cosine of the learning rate ends at the last step: with another end, each step would have
    # had another rate.
    schedule = "the schedule of its learning rate ends there, so that it can't be moved"
    another = f"begin another run with its weights, by init_from={path} run=..., or with new weights, by fresh=true"
    return f"{path} was begun for {was}, not {now}: {schedule}. To train for longer, {another}"


def refuse_foreign(path: str | Path) -> None:
    """Raise a ValueError if a run directory holds files that are not of a run.

    A start that was killed may have left files of its own.
    """
    path = Path(path)
    if not path.is_dir() or (path / "run.json").is_file():
        return
    foreign = sorted(
        file.name
        for file in path.iterdir()
        if file.name not in BEFORE_A_RUN and not _is_config(file)
    )
    if foreign:
        shown = ", ".join(foreign[:3]) + " ..." * (len(foreign) > 3)
        raise ValueError(
            f"{path}: expected a new or empty folder or a run (with run.json), found {shown}; choose another run=..."
        )


def _is_config(file: Path) -> bool:
    """Whether it is the config.yaml of a run."""
    if file.name != "config.yaml":
        return False
    try:
        return {"dataset", "run"} <= content(file).keys()
    except ValueError:
        return False


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Hold a run directory for one training, until the end of the block or of the process; it is
    removed if nothing came into it.

    Raises:
        ValueError: another training holds it.
        OSError: it cannot be written.
    """
    file = Path(path) / ".lock"
    with explained(f"{path}: could not be written", OSError, remedy=ROOM, raised=OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        wait = "wait for it, or choose another run=..."
        with explained(
            f"{path}: another training is running in this directory", Timeout, remedy=wait
        ):
            lock = FileLock(file).acquire(blocking=False)
    with lock:
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
            if not any(file.parent.iterdir()):
                file.parent.rmdir()


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(run_config, run_info) of a run directory: what config.yaml and run.json hold.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: a file is damaged, or another version of the format wrote it.
    """
    path = Path(path)
    if not (path / "run.json").is_file():
        raise FileNotFoundError(f"{path}: expected a run directory (with run.json), found none")
    config, info = content(path / "config.yaml"), content(path / "run.json")
    if info.get("format") != FORMAT:
        raise ValueError(
            f"{path}: expected a run of format {FORMAT}, got format {info.get('format', 1)}; {UPGRADE}"
        )
    return config, info


def save(
    path: Path,
    model: SequenceModel | Generalist,
    trainer_tensors: dict[str, Tensor],
    trainer_state: dict[str, Any],
    *,
    write: bool = True,
) -> None:
    """Write the checkpoint folder of a run, all or nothing: the earlier one stays until the new one
    is complete.

    Of sharded weights every process calls this, and one of them has `write`.
    """
    folder, own = path / "checkpoint", _own_state(model)
    adapters = {
        name: whole(weight)
        for name, weight in model.backbone.model.named_parameters()
        if "lora_" in name
    }
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
        (partial / "trainer.json").write_text(json.dumps(trainer_state))


def find(path: str | Path) -> Path | None:
    """The checkpoint folder of a run, or None.

    A save that was cut off between its two renames left the old one.
    """
    return next(
        (
            folder
            for folder in (Path(path) / "checkpoint", Path(path) / "checkpoint.old")
            if folder.is_dir()
        ),
        None,
    )


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


def weights_folder(path: str | Path, config: dict[str, Any]) -> Path:
    """The folder whose checkpoint acts: of the lowest held-out loss with log.keep_best, else of the
    last step.
    """
    return Path(path) / "best" if config["log"]["keep_best"] else Path(path)


def restore(path: str | Path, model: SequenceModel | Generalist, info: dict[str, Any]) -> None:
    """Load a checkpoint's weights into a model made from the same config; a ValueError if anything
    does not fit.
    """
    folder = checkpoint_folder(path)
    expected, own, adapter = _own_state(model), content(folder / "model.safetensors"), {}
    if model.backbone.tune == "lora":
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        wanted = get_peft_model_state_dict(model.backbone.model, save_embedding_layers=False)
        saved = content(folder / "adapter" / ADAPTER_FILE)
        adapter = by_own_names(saved, wanted, model.backbone.core)
        expected |= wanted
    if why := _differences(own | adapter, expected):
        trained = "the config names another backbone, head or embedding than was trained"
        raise ValueError(f"{folder}: not this model's weights; {why}{trained}")
    if info["frozen"] != fingerprint(model.backbone):
        raise ValueError(
            f"{folder}: trained on a backbone whose frozen weights were different; load the one it was trained on"
        )
    if adapter:
        set_peft_model_state_dict(model.backbone.model, adapter)
    model.load_state_dict(own, strict=False)


def load_model(
    path: str | Path, config: dict[str, Any], info: dict[str, Any]
) -> SequenceModel | Generalist:
    """The model of a run with the weights that act; see `restore` for errors. config, info: of
    `read`.
    """
    model: SequenceModel | Generalist = make_model(config, specs(info))
    restore(weights_folder(path, config), model, info)
    return model


def start_from(
    path: str | Path, model: SequenceModel | Generalist, config: dict[str, Any]
) -> set[str]:
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
    own, known = config["backbone"].get("folder"), members(source)
    if not (own and Path(own).expanduser().resolve() == Path(path).expanduser().resolve()):
        _copy(path, "backbone", source.backbone, model.backbone)
    started = set()
    for name, member in members(model).items():
        similar = [other for other, one in known.items() if same_space(one.spec, member.spec)]
        if not similar and (name in known or not name):
            found = spaces(
                {"the data": member.spec}
                | {f"the run{f' ({n})' * bool(n)}": one.spec for n, one in known.items()}
            )
            raise ValueError(
                f"init_from={path}: expected a run of the data's space, got {found}; a new space is a new label of "
                f"dataset=embodiments, or takes the backbone alone by backbone=pretrained backbone.folder={path}"
            )
        if similar:
            _copy(path, "model", known[name if name in similar else similar[0]], member)
            started.add(name)
    return started


def _copy(path: str | Path, what: str, source: Any, model: Any) -> None:
    """Load the weights and buffers of one module into another, but for a model's backbone; a
    ValueError if they differ in more.
    """
    given, own = (
        {k: v for k, v in m.state_dict().items() if not k.startswith("backbone.")}
        for m in (source, model)
    )
    why = _differences(given, own)
    if why or (what == "backbone" and fingerprint(source) != fingerprint(model)):
        wanted = (
            "a run of the same backbone, head, embedding and, with model.timesteps=learned, horizon"
        )
        why = f"the {what} differs: {why or 'frozen weights; '}take the options of its config.yaml"
        raise ValueError(f"init_from={path}: expected {wanted}; {why}")
    model.load_state_dict(given, strict=False)


def content(path: Path) -> dict[str, Any]:
    """What a file of a run holds: named tensors, or what its YAML or JSON says; a ValueError if it
    is damaged or missing.
    """
    errors = OSError, ValueError, SafetensorError, yaml.YAMLError
    # an adapter is a part of its checkpoint
    folder = path.parents[1] if path.parent.name == "adapter" else path.parent
    with explained(f"{path} is damaged or missing", *errors, remedy=_remedy(folder)):
        check_bytes(folder, path.relative_to(folder).as_posix())
        if path.suffix == ".safetensors":
            return load_file(path)
        parsed: Any = (json.loads if path.suffix == ".json" else yaml.safe_load)(path.read_text())
        if not isinstance(parsed, dict) or not parsed:
            raise ValueError(f"expected keys with values, got {parsed}")
        return parsed


def _remedy(folder: Path) -> str:
    """What to do about a damaged file of a run directory, or of one of its checkpoints."""
    remedy, old = "train again, or restore a copy", folder.with_name("checkpoint.old")
    if folder.name == "checkpoint" and old.is_dir():
        return f"{remedy}; {old} holds the checkpoint before: move it to {folder}"
    if (folder / DIGESTS).is_file() and (folder / "run.json").is_file():
        return f"{remedy}; {own_change(folder)}"
    return remedy


def usable(device: str) -> str:
    """auto, cpu or cuda -> cpu or cuda; a ValueError if torch cannot use it."""
    one_of("device", device, ("auto", "cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device=cuda: no GPU that torch can use was found; take device=cpu, or a CUDA build of torch"
        )
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def precision(device: str, choice: str) -> str:
    """`no` or `bf16`; auto: bf16 where the processor multiplies it faster than float32."""
    one_of("optim.precision", choice, ("auto", "no", "bf16"))
    if choice != "auto":
        return choice
    if usable(device) == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "no"
    supported = (
        vars(torch.cpu).get(f"_is_{unit}_supported", bool) for unit in ("avx512_bf16", "amx_tile")
    )
    return "bf16" if any(known() for known in supported) else "no"


def load(
    path: str | Path, *, part: str | None = None, **acting: Any
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Load a run, or one part of a run on a mixture, see `load_parts`."""
    return load_parts(path, [] if part is None else [part], **acting)[-1]


def load_parts(
    path: str | Path, parts: Sequence[str] = (), *, device: str = "cpu", **acting: Any
) -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Load a run once, to act in each of several datasets that it was trained on.

    Args:
        path: the run directory.
        parts: labels of parts of a mixture; none: the run as a whole.
        device: auto, cpu or cuda.
        acting: target_return in raw reward units, None: the headline target of the run or the part;
            and other fields of `Policy`, such as decode or planning_horizon, None: as the run's
            config says.

    Returns:
        (policy, run_config, run_info) of each part: env, dataset and targets are the part's. The
        policy is a `Policy`, or what the config names under `policy` makes of (the checkpoint's
        tensors by name, device), which has its `begin`.

    Raises:
        FileNotFoundError: there is no run, or no checkpoint.
        ValueError: a file is damaged or does not fit the others, or an option or a part cannot be.
    """
    (config, info), device = read(path), usable(device)
    if "policy" in config:
        return [
            (
                build(
                    config["policy"], content(checkpoint_folder(path) / "model.safetensors"), device
                ),
                config,
                info,
            )
        ]
    known = info.get("parts", {})
    if wrong := next((part for part in parts if part not in known), None):
        raise ValueError(
            f"part: expected one of {', '.join(known) or 'none, the run is of one dataset'}, got {wrong!r}"
        )
    if "embodiments" in info and not parts:
        raise ValueError(
            f"{path}: its parts have spaces of their own; give part=, one of {', '.join(known)}"
        )
    model = load_model(path, config, info)
    views = (
        [("", config, info)]
        if not parts
        else [
            (
                name := known[part]["embodiment"],
                of_part(config, part, known[part]),
                info | info.get("embodiments", {}).get(name, {}) | known[part],
            )
            for part in parts
        ]
    )
    each = members(model.to(device))
    return [(_policy(each[name], c, i, acting | {"device": device}), c, i) for name, c, i in views]


def of_part(config: dict[str, Any], part: str, known: dict[str, Any]) -> dict[str, Any]:
    """The config of a run as that of one of its parts: its env, its window, and its text, which
    another env takes too.

    Args:
        config: of the run.
        part: label.
        known: what run.json holds of the part.
    """
    text = known["dataset"].get("text", config["text"])
    window = known.get("window", config["window"])
    return config | {"env": known["env"], "text": text, "window": window, "part": part}


def _policy(
    model: SequenceModel, config: dict[str, Any], info: dict[str, Any], acting: dict[str, Any]
) -> Policy:
    """The policy that a run's config describes, with these fields of `Policy` in place of its own."""
    act, team, given = (
        config["act"],
        config["team"],
        {key: value for key, value in acting.items() if value is not None},
    )
    options: dict[str, Any] = {"stride": act["stride"], "decode": act["decode"]}
    if model.planner is not None:
        options |= {
            "planning_horizon": model.planner.horizon,
            "planning_value": model.planner.least_value,
        }
    options |= {"execution": "per_agent" if team["execution"] == "per_agent" else "joint"}
    options |= {"target_return": None} | given
    options["stride"] = options["stride"] or max(config["window"] // 2, 1)
    if options["target_return"] is None and not model.predicts_return:
        options["target_return"] = target(info, act["target_quantile"])
    return_horizon = config["model"]["return_horizon"]
    return Policy(
        model, config["window"], return_horizon=return_horizon, config=config, info=info, **options
    )


def load_policy(
    run: str | Path, *, part: str | None = None, device: str = "cpu", **acting: Any
) -> Any:
    """Load the policy of a run, public as `decisionllm.load`.

    Args:
        run: the run directory.
        part: label of a part, of a run on a mixture: acts with its targets.
        device: auto, cpu or cuda.
        acting: target_return in raw reward units, and fields of `Policy` such as decode or
            planning_horizon, in place of the run's own.

    Returns:
        A `Policy`: `policy.act(histories)`, `policy.begin(tasks, horizon)`; the run's config is
        `policy.config`, and run.json is `policy.info`. A run of `decisionllm baseline` gives a
        baseline with the same `begin`.

    Raises:
        FileNotFoundError: there is no run, or no checkpoint.
        ValueError: a file is damaged or does not fit the others, or an option cannot be.
    """
    return load(run, part=part, device=device, **acting)[0]


def target(info: dict[str, Any], quantile: float) -> float:
    """The return at this quantile of the training returns, raw reward units; a ValueError if the
    run did not record it.
    """
    if str(float(quantile)) not in info["targets"]:
        known = ", ".join(info["targets"])
        raise ValueError(
            f"quantile: this run knows those of {known}, got {quantile}; target_returns=[...] takes any return"
        )
    return float(info["targets"][str(float(quantile))])


def _own_state(model: SequenceModel | Generalist) -> dict[str, Tensor]:
    """The weights that a checkpoint holds itself: trained ones but adapters, the normaliser, and
    what was fitted before.
    """
    trained = {
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and "lora_" not in name
    }
    return {
        name: whole(tensor)
        for name, tensor in model.state_dict().items()
        if name in trained
        or "normalizer." in name
        or "planner." in name
        or "objective." in name
        or name.startswith("backbone.features.")
    }


def _differences(given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """How named tensors differ from the expected ones in names and sizes, in words; empty if they
    do not.
    """
    shapes = {
        name: (tuple(given[name].shape), tuple(expected[name].shape))
        for name in given.keys() & expected.keys()
    }
    sizes = [
        f"{name} is {got}, expected {wanted}"
        for name, (got, wanted) in shapes.items()
        if got != wanted
    ]
    kinds = {
        "missing": expected.keys() - given.keys(),
        "unknown": given.keys() - expected.keys(),
        "sizes": sizes,
    }
    listed = {
        kind: ", ".join(sorted(found)[:4]) + " ..." * (len(found) > 4)
        for kind, found in kinds.items()
    }
    return "".join(f"{kind}: {names}; " for kind, names in listed.items() if names)
