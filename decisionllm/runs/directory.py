"""A run directory, but for its weights.

runs/x/
  config.yaml       every option, resolved
  run.json          spec and fingerprint of the data, target returns, versions, a hash of the
                    frozen weights
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
from importlib import metadata
from pathlib import Path

import yaml
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file

from decisionllm.config import GROUPS, TrainConfig, default_options, flat
from decisionllm.datasets.store import Store
from decisionllm.files import (
    DIGESTS,
    PARTIAL,
    atomic,
    check_bytes,
    explained,
    own_change,
    seal,
    write_json,
)
from decisionllm.registry import Node, with_option_defaults
from decisionllm.schema import Json, Spec
from decisionllm.trust import check_config, check_nodes

FORMAT = 3  # of run.json, config.yaml and the names of weights
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
PACKAGES = ("decisionllm", "torch", "transformers", "peft", "numpy")


def create(path: Path, config: Node, stores: Mapping[str, Store], **known: object) -> None:
    """Begin a run directory: write config.yaml and run.json, remove earlier checkpoints.

    Args:
        path: the run directory.
        config: of the run.
        stores: by embodiment, see `mixture.stores`.
        known: further keys of run.json.
    """
    each = {name: _described(store) for name, store in stores.items()}
    data: Json = {"format": FORMAT}
    if "" in each:
        data |= each[""]
    else:
        data |= {"embodiments": each, "fingerprint": fingerprint_of(stores)}
    data |= {"versions": versions(), **known}
    with explained(f"{path}: could not be written", OSError, remedy=ROOM, raised=OSError):
        path.mkdir(parents=True, exist_ok=True)
        for folder in ("checkpoint", "checkpoint.old", "best"):
            shutil.rmtree(path / folder, ignore_errors=True)
        (path / DIGESTS).unlink(missing_ok=True)
        with atomic(path / "config.yaml") as partial:
            partial.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        write_json(path / "run.json", data)
        seal(path, "config.yaml", "run.json")


def _described(store: Store) -> Json:
    """What run.json says of a dataset."""
    found: Json = {
        "spec": asdict(store.spec),
        "dataset": {key: value for key, value in store.info.items() if key != "parts"},
        "fingerprint": store.fingerprint,
        "episodes": len(store.lengths),
    }
    if len(store.tasks) <= MOST_TASKS and "wordings" not in store.info:
        found["tasks"] = store.tasks
    return found


def has_texts(info: Json) -> bool:
    """Whether the data of a run have task texts. info: of run.json."""
    if "tasks" not in info:  # they are more than MOST_TASKS, or each has many wordings
        return True
    return any(info["tasks"])


def may_differ(config: Mapping[str, object]) -> tuple[str, ...]:
    """The options that do not change what a run becomes. config: of a run, flat."""
    if config.get("log.keep_best") == "loss":  # the least of the losses that were measured
        return MAY_DIFFER
    return MAY_DIFFER + WHEN_LOSSES_ARE_MEASURED


def same_run(path: Path, config: TrainConfig, stores: Mapping[str, Store]) -> Json:
    """The run_info of a run that was begun with this config and this data; a ValueError if it was
    not.
    """
    before, info = read(path)
    options = asdict(config)
    earlier = flat(default_options()) | flat(_completed(before, options))
    different = {}  # option: its value when the run was begun, and now
    unimportant = may_differ(earlier)
    for key, value in flat(options).items():
        if key not in unimportant and earlier.get(key) != value:
            different[key] = (earlier.get(key), value)
    if different:
        if different.keys() <= {"steps", "minutes"}:
            raise ValueError(longer(path, **different))
        words = [f"{key} was {was!r}, is {now!r}" for key, (was, now) in different.items()]
        changes = "; ".join(words)
        raise ValueError(
            f"{path} holds another run ({changes}): choose another run=..., or fresh=true to begin "
            "again"
        )
    data = fingerprint_of(stores)
    if info["fingerprint"] != data:
        raise ValueError(
            f"{path} was begun on data {info['fingerprint']}, not {data}: choose another run=..., "
            "or fresh=true"
        )
    return info


def _completed(before: Node, options: Node) -> Node:
    """The options of a run that was begun, with the defaults of those that its parts had not yet.

    options: of today; a part that is another one now stays as it was.
    """
    found = dict(before)
    for group in GROUPS:
        node = before.get(group, {})
        today = options[group]
        is_same = node.get("_target_") == today.get("_target_")
        # only then, since a run that goes on needs no environment
        if is_same and today.keys() - node.keys():
            found[group] = with_option_defaults(node)
    return found


def longer(path: Path, **different: tuple[object, object]) -> str:
    """How to train for longer than a run was begun for, as a message."""
    was = ", ".join(f"{key}={before}" for key, (before, _) in different.items())
    now = ", ".join(f"{key}={after}" for key, (_, after) in different.items())
    # The cosine of the learning rate ends at the last step: with another end, each step would have
    # had another rate.
    schedule = "the schedule of its learning rate ends there, so that it can't be moved"
    another = (
        f"begin another run with its weights, by init_from={path} run=..., or with new "
        "weights, by fresh=true"
    )
    return f"{path} was begun for {was}, not {now}: {schedule}. To train for longer, {another}"


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
        shown = ", ".join(foreign[:3]) + " ..." * (len(foreign) > 3)
        raise ValueError(
            f"{path}: expected a new or empty folder or a run (with run.json), found {shown}; "
            "choose another run=..."
        )


def _is_config(file: Path) -> bool:
    """Whether it is the config.yaml of a run, or an empty one, which an earlier version left if it
    was killed.
    """
    if file.name != "config.yaml" or not file.is_file():
        return False
    if not file.stat().st_size:
        return True
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


def read(path: str | Path) -> tuple[Json, Json]:
    """(run_config, run_info) of a run directory: what config.yaml and run.json hold.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: a file is damaged, another version of the format wrote it, or it would import
            what is not trusted, see `decisionllm.trust`.
    """
    path = Path(path)
    if not (path / "run.json").is_file():
        raise FileNotFoundError(f"{path}: expected a run directory (with run.json), found none")
    config = content(path / "config.yaml")
    info = content(path / "run.json")
    if info.get("format") != FORMAT:
        raise ValueError(
            f"{path}: expected a run of format {FORMAT}, got format {info.get('format', 1)}; "
            f"{UPGRADE}"
        )
    check_config(config, path / "config.yaml")
    check_nodes(info, path / "run.json")
    return config, info


def content(path: Path) -> Json:
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
        parse = json.loads if path.suffix == ".json" else yaml.safe_load
        parsed: object = parse(path.read_text(encoding="utf-8"))
        if not isinstance(parsed, dict) or not parsed:
            raise ValueError(f"expected keys with values, got {parsed}")
        return parsed


def _remedy(folder: Path) -> str:
    """What to do about a damaged file of a run directory, or of one of its checkpoints."""
    remedy = "train again, or restore a copy"
    old = folder.with_name("checkpoint.old")
    if folder.name == "checkpoint" and old.is_dir():
        return f"{remedy}; {old} holds the checkpoint before: move it to {folder}"
    if (folder / DIGESTS).is_file() and (folder / "run.json").is_file():
        return f"{remedy}; {own_change(folder)}"
    return remedy


def specs(info: Json) -> Spec | dict[str, Spec]:
    """The spec that run.json holds, or those of its embodiments by name."""
    each = {name: Spec.of(one["spec"]) for name, one in info.get("embodiments", {}).items()}
    return each or Spec.of(info["spec"])


def fingerprint_of(stores: Mapping[str, Store]) -> str:
    """The fingerprint of the data of a run."""
    return "+".join(store.fingerprint for store in stores.values())


def target(info: Json, quantile: float) -> float:
    """The return at this quantile of the training returns, raw reward units; a ValueError if the
    run did not record it.
    """
    if str(float(quantile)) not in info["targets"]:
        known = ", ".join(info["targets"])
        raise ValueError(
            f"quantile: this run knows those of {known}, got {quantile}; target_returns=[...] "
            "takes any return"
        )
    return float(info["targets"][str(float(quantile))])


def of_part(config: Node, part: str, known: Json) -> Json:
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
        encoding="utf-8",
    )
    return found | {"commit": git.stdout.strip() or None}
