"""A run directory, but for its weights.

runs/x/
  config.yaml       every option, resolved
  run.json          spec, fingerprint and target returns of the data of each embodiment, the parts
                    of a mixture, a hash of the frozen weights, the command line, versions
  checksums.json    of config.yaml and run.json
  metrics.jsonl     one line a log interval
  checkpoint/       see `checkpoint`
  best/checkpoint/  the same at the lowest held-out loss, with log.keep_best; then this one acts
"""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path

import yaml
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file

from decisionllm import __version__
from decisionllm.config import GROUPS, TrainConfig, default_options, flatten
from decisionllm.datasets.store import Store, find_text_option
from decisionllm.files import (
    DIGESTS,
    PARTIAL,
    atomic,
    check_bytes,
    explain_errors,
    explain_own_change,
    read_lines,
    seal,
    write_json,
    write_lines,
)
from decisionllm.registry import Node, fill_option_defaults
from decisionllm.runs.hub import is_hub_folder, read_hub_folder
from decisionllm.schema import Json, Spec
from decisionllm.trust import check_config, check_nodes

FORMAT = 5  # of run.json, config.yaml and the names of weights
SILENT_TEXTS = 4  # the format before, whose text=none read the texts that a log has of its own
ROOM = "make room or choose another run=..."
UPGRADE = (
    "train again, or use the version that wrote it (run.json names its commit); CHANGELOG.md "
    "lists the options that were renamed"
)
# options that may differ when a run is continued
MAY_DIFFER = (
    "run",
    "device",
    "cache_dir",
    "fresh",
    "trust",
    "optim.gradient_checkpointing",
    "log.tracker",
)
WHEN_LOSSES_ARE_MEASURED = ("log.every", "log.save_every")
# what our own commands leave in a folder before there is a run in it
BEFORE_A_RUN = (".lock", ".hydra", "multirun.yaml")
MOST_TASKS = 64  # task texts that run.json names
PACKAGES = ("torch", "transformers", "peft", "numpy")


def create(
    path: Path,
    config: Node,
    stores: Mapping[str, Store],
    targets: Mapping[str, Mapping[str, float]],
    **keys: object,
) -> None:
    """Begin a run directory: write config.yaml and run.json, remove earlier checkpoints.

    Args:
        path: the run directory.
        config: of the run.
        stores: by embodiment, see `mixture.open_stores`.
        targets: quantiles of the returns of each embodiment, see `target_return`.
        keys: further keys of run.json.
    """
    embodiments = {}
    for name, store in stores.items():
        embodiments[name] = _describe_dataset(store) | {"targets": targets.get(name, {})}
    info: Json = {
        "format": FORMAT,
        "embodiments": embodiments,
        "parts": {},
        "fingerprint": data_fingerprint(stores),
        "made_by": command_line(),
        "versions": versions(),
        **keys,
    }
    with explain_errors(f"{path}: could not be written", OSError, fix=ROOM, raised=OSError):
        path.mkdir(parents=True, exist_ok=True)
        for folder in ("checkpoint", "checkpoint.old", "best"):
            shutil.rmtree(path / folder, ignore_errors=True)
        (path / DIGESTS).unlink(missing_ok=True)
        with atomic(path / "config.yaml") as partial:
            partial.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        write_json(path / "run.json", info)
        seal(path, "config.yaml", "run.json")


def _describe_dataset(store: Store) -> Json:
    """Return the keys of run.json about a dataset."""
    keys: Json = {
        "spec": asdict(store.spec),
        "dataset": {key: value for key, value in store.info.items() if key != "parts"},
        "fingerprint": store.fingerprint,
        "episodes": len(store.lengths),
        "mean_return": float(store.returns.mean()),  # of all of them, raw reward units
    }
    if len(store.tasks) <= MOST_TASKS and "wordings" not in store.info:
        keys["tasks"] = store.tasks
    return keys


def command_line() -> Json:
    """Return the command line that is being run, of a job of a sweep its own.

    Returns:
        `command`, such as "train"; `choices`, the name that is chosen in each group, such as
        {"experiment": "demo", "head": "bins"}; `overrides`, the words behind the command. {}: called
        from Python.
    """
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return {}
    hydra = HydraConfig.get()
    choices = {}
    for group, name in hydra.runtime.choices.items():
        if name is not None and "/" not in group:
            choices[str(group)] = str(name)
    return {
        "command": hydra.job.config_name,
        "choices": choices,
        "overrides": list(hydra.overrides.task),
    }


def has_texts(info: Json) -> bool:
    """Return whether the data of a run have task texts. info: of run.json."""
    if "tasks" not in info:  # they are more than MOST_TASKS, or each has many wordings
        return True
    return any(info["tasks"])


def find_data_text(info: Json) -> str:
    """Return the option `text` that the data of a run were read with. info: of its embodiment."""
    return find_text_option(info["dataset"], has_texts=has_texts(info))


def options_that_may_differ(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the options that do not change what a run becomes. config: of a run, flat."""
    if config.get("log.keep_best") == "loss":  # the least of the losses that were measured
        return MAY_DIFFER
    return MAY_DIFFER + WHEN_LOSSES_ARE_MEASURED


def check_same_run(path: Path, config: TrainConfig, stores: Mapping[str, Store]) -> Json:
    """Return the run_info of a run that was begun with this config and this data; a ValueError if
    it was not.
    """
    run_config, info = read(path)
    options = asdict(config)
    earlier = flatten(default_options()) | flatten(_add_new_options(run_config, options))
    changes = {}  # option: its value when the run was begun, and now
    unimportant = options_that_may_differ(earlier)
    for key, value in flatten(options).items():
        if key not in unimportant and earlier.get(key) != value:
            changes[key] = (earlier.get(key), value)
    if changes and changes.keys() <= {"steps", "minutes"}:
        raise ValueError(_longer_training(path, changes))
    if changes:
        words = [f"{key} was {was!r}, is {now!r}" for key, (was, now) in changes.items()]
        raise ValueError(
            f"{path} holds another run ({'; '.join(words)}): choose another run=..., or fresh=true "
            "to begin again"
        )
    fingerprint = data_fingerprint(stores)
    if info["fingerprint"] != fingerprint:
        raise ValueError(
            f"{path} was begun on data {info['fingerprint']}, not {fingerprint}: choose another "
            "run=..., or fresh=true"
        )
    return info


def _add_new_options(run_config: Node, options: Node) -> Node:
    """Return the options of a run that was begun, with the defaults of those that its parts did not
    have yet.

    options: of today; a part that is another one now stays as it was.
    """
    completed = dict(run_config)
    for group in GROUPS:
        node = run_config.get(group, {})
        today = options[group]
        is_same = node.get("_target_") == today.get("_target_")
        # only then, since a run that goes on needs no environment
        if is_same and today.keys() - node.keys():
            completed[group] = fill_option_defaults(node)
    return completed


def _longer_training(path: Path, changes: Mapping[str, tuple[object, object]]) -> str:
    """Return the message for a run that is to be trained for longer than it was begun for."""
    was = ", ".join(f"{key}={before}" for key, (before, _) in changes.items())
    now = ", ".join(f"{key}={after}" for key, (_, after) in changes.items())
    # The cosine of the learning rate ends at the last step: with another end, each step would have
    # had another rate.
    return (
        f"{path} was begun for {was}, not {now}: the schedule of its learning rate ends there, so "
        f"that it can't be moved. To train for longer, begin another run with its weights, by "
        f"init_from={path} run=..., or with new weights, by fresh=true"
    )


def refuse_foreign(path: str | Path) -> None:
    """Raise a ValueError if a run directory holds files that are not of a run.

    A start that was killed may have left files of its own.
    """
    path = Path(path)
    if not path.is_dir() or (path / "run.json").is_file():
        return
    files = sorted(path.iterdir())
    foreign = []
    for file in files:
        is_ours = file.name in BEFORE_A_RUN or file.name.startswith(PARTIAL)
        if not is_ours and not _is_config(file):
            foreign.append(file.name)
    if foreign:
        names = ", ".join(foreign[:3]) + " ..." * (len(foreign) > 3)
        raise ValueError(
            f"{path}: expected a new or empty folder or a run (with run.json), found {names}; "
            "choose another run=..."
        )


def _is_config(file: Path) -> bool:
    """Return whether a file is the config.yaml of a run, or an empty one, which an earlier version
    left if it was killed.
    """
    if file.name != "config.yaml" or not file.is_file():
        return False
    if not file.stat().st_size:
        return True
    try:
        return {"dataset", "run"} <= read_file(file).keys()
    except ValueError:
        return False


@contextmanager
def lock_run(path: str | Path) -> Iterator[None]:
    """Hold a run directory for one training, until the end of the block or of the process; it is
    removed if nothing came into it.

    Raises:
        ValueError: another training holds it.
        OSError: it cannot be written.
    """
    file = Path(path) / ".lock"
    with explain_errors(f"{path}: could not be written", OSError, fix=ROOM, raised=OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with explain_errors(
            f"{path}: another training is running in this directory",
            Timeout,
            fix="wait for it, or choose another run=...",
        ):
            lock = FileLock(file).acquire(blocking=False)
    with lock:
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
            if not any(file.parent.iterdir()):
                file.parent.rmdir()


def read(path: str | Path) -> tuple[Json, Json]:
    """Read a run directory, or a folder that was exported for the hub.

    Returns:
        run_config and run_info, the contents of config.yaml and run.json.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: a file is damaged, another version of the format wrote it, or it would import
            what is not trusted, see `decisionllm.trust`.
    """
    path = Path(path)
    if is_hub_folder(path):
        config, info = read_hub_folder(path)
    elif (path / "run.json").is_file():
        config, info = read_file(path / "config.yaml"), read_file(path / "run.json")
    else:
        raise FileNotFoundError(f"{path}: expected a run directory (with run.json), found none")
    if info.get("format") not in (SILENT_TEXTS, FORMAT):
        raise ValueError(
            f"{path}: expected a run of format {FORMAT}, got format {info.get('format', 1)}; "
            f"{UPGRADE}"
        )
    check_config(config, path / "config.yaml")
    check_nodes(info, path / "run.json")
    return (config, info) if info["format"] == FORMAT else convert_texts(config, info)


def convert_texts(config: Json, info: Json) -> tuple[Json, Json]:
    """Return config and run.json of a run of format 4 as they are today: text=none was what
    text=auto is, and dataset.task_from=none is text=none.
    """
    nodes = {key: convert_node(config[key]) for key in ("dataset", "env") if key in config}
    text = "auto" if config.get("text") == "none" else config.get("text")
    parts = {}
    for label, part in info.get("parts", {}).items():
        parts[label] = part | {"env": convert_node(part["env"])} if part.get("env") else part
    return config | nodes | {"text": text}, info | {"parts": parts, "format": FORMAT}


def convert_node(node: Node) -> Node:
    """Return a config node of a run of format 4 as it is today, see `convert_texts`; one of the
    user's own stays as it is.
    """
    converted = dict(node)
    if not node["_target_"].startswith("decisionllm."):
        return converted
    if node.get("text") == "none":
        converted["text"] = "auto"
    if node.get("task_from") in ("", "none"):
        del converted["task_from"]
    if node.get("task_from") == "none":
        converted["text"] = "none"
    return converted


def read_file(path: Path) -> Json:
    """Read a file of a run: named tensors, or a YAML or JSON object; a ValueError if it is damaged
    or missing.
    """
    errors = OSError, ValueError, SafetensorError, yaml.YAMLError
    # an adapter is a part of its checkpoint
    folder = path.parents[1] if path.parent.name == "adapter" else path.parent
    with explain_errors(f"{path} is damaged or missing", *errors, fix=_repair(folder)):
        check_bytes(folder, path.relative_to(folder).as_posix())
        if path.suffix == ".safetensors":
            return load_file(path)
        parse = json.loads if path.suffix == ".json" else yaml.safe_load
        parsed: object = parse(path.read_text(encoding="utf-8"))
        if not isinstance(parsed, dict) or not parsed:
            raise ValueError(f"expected keys with values, got {parsed}")
        return parsed


def trim_log(path: Path, step: int) -> list[Json]:
    """Remove the lines of a metrics.jsonl after this step, which a continued run writes again, and
    a line that was cut short. Return the remaining lines.
    """
    lines = read_lines(path) if path.is_file() and step else []
    remaining = [line for line in lines if line["step"] <= step]
    write_lines(path, remaining)
    return remaining


def _repair(folder: Path) -> str:
    """Return how to repair a damaged run directory or checkpoint, in words."""
    words = "train again, or restore a copy"
    old = folder.with_name("checkpoint.old")
    if folder.name == "checkpoint" and old.is_dir():
        return f"{words}; {old} holds the checkpoint before: move it to {folder}"
    if (folder / DIGESTS).is_file() and (folder / "run.json").is_file():
        return f"{words}; {explain_own_change(folder)}"
    return words


def read_specs(info: Json) -> dict[str, Spec]:
    """Return the specs of the embodiments that run.json describes, by name."""
    return {name: Spec.of(each["spec"]) for name, each in info["embodiments"].items()}


def data_fingerprint(stores: Mapping[str, Store]) -> str:
    """Return the fingerprint of the data of a run."""
    return "+".join(store.fingerprint for store in stores.values())


def target_return(info: Json, quantile: float) -> float:
    """Return the return at this quantile of the training returns, raw reward units; a ValueError if
    the run did not record it.
    """
    targets = info["targets"]
    if str(float(quantile)) not in targets:
        raise ValueError(
            f"quantile: this run knows those of {', '.join(targets)}, got {quantile}; "
            "target_returns=[...] takes any return"
        )
    return float(targets[str(float(quantile))])


def part_config(config: Node, part: str, info: Json) -> Json:
    """Return the config of a run as that of one of its parts: its env, its window, and its text,
    which another env takes too.

    Args:
        config: of the run.
        part: label.
        info: the part's object in run.json.
    """
    text = info["dataset"].get("text", config["text"])
    window = info.get("window", config["window"])
    return config | {"env": info["env"], "text": text, "window": window, "part": part}


@cache
def versions() -> dict[str, str | None]:
    """Return the versions of packages, and the commit where the code is a checkout; asked once in a
    process, which runs the code that it has imported.
    """
    packages: dict[str, str | None] = {"decisionllm": __version__}
    packages |= {name: metadata.version(name) for name in PACKAGES}
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists() or not shutil.which("git"):
        return packages | {"commit": None}
    git = subprocess.run(
        ["git", "-C", checkout, "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    return packages | {"commit": git.stdout.strip() or None}
