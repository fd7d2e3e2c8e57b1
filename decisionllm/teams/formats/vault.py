"""Vaults of OG-MARL, as whole worlds. Source: flashbax `vault.py`."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from decisionllm.datasets.row_blocks import Columns, regroup_blocks, to_flags
from decisionllm.files import AGAIN, explain_errors
from decisionllm.schema import Json, raise_for_first
from decisionllm.teams.formats.fixed_team_worlds import BLOCK, Worlds

# Required and optional columns of each format
VAULT = ("observations", "actions", "rewards", "terminals", "truncations")
MORE_OF_VAULT = ("infos.legals", "infos.state")


def read_vault(folder: Path, repairs: Counter[str]) -> Iterator[Worlds]:
    """One Vault: a folder with `manifest.ocdbt`.

    Its rows of B are separate worlds; a world ends when all of its agents have ended, whose flags
    stay set until then. Only steps before `vault_index` count; the last world of each row of B is
    left out if it did not end.
    """
    with explain_vault_errors(folder):
        names, length, files = open_vault(folder)
    missing = ", ".join(name for name in VAULT if name not in names)
    if missing:
        raise ValueError(
            f"{folder}: expected a Vault's columns, {missing} not among {', '.join(sorted(names))}"
        )
    count = 0  # worlds
    for lane in range(files["observations"].shape[0]):
        start = 0  # step of the lane at which the block begins
        for steps in regroup_blocks(read_lane(folder, lane, length, files), world_ends):
            check_ends(folder, lane, start, steps)
            last = world_ends(steps)
            start += len(last)
            if not last.any():
                repairs["worlds cut at the end"] += 1
                continue
            yield Worlds(
                group=count + np.cumsum(last) - last,
                observations=steps["observations"],
                actions=steps["actions"],
                rewards=steps["rewards"],
                terminals=steps["terminals"],
                available=steps.get("infos.legals"),
                state=steps.get("infos.state"),
            )
            count += int(last.sum())


def explain_vault_errors(folder: Path) -> AbstractContextManager[None]:
    """Explain an error of reading a Vault."""
    errors = (OSError, ValueError, KeyError, RuntimeError)
    return explain_errors(f"{folder}: not a readable Vault, perhaps cut", *errors, fix=AGAIN)


def agent_ends(steps: Columns) -> np.ndarray:
    """Return the steps of a Vault in which each agent has ended: (n, N) bool."""
    return np.asarray(steps["terminals"] | steps["truncations"])


def world_ends(steps: Columns) -> np.ndarray:
    """Return the steps of a Vault that end a world: (n,) bool."""
    return np.asarray(agent_ends(steps).all(1))


def check_ends(folder: Path, lane: int, start: int, steps: Columns) -> None:
    """Raise a ValueError if an agent that has ended is there again in the next step of its world.

    The end of such a world is in no single step, so it would be joined to the worlds after it.
    """
    ended = agent_ends(steps)
    last = world_ends(steps)
    is_back = ended[:-1] & ~ended[1:] & ~last[:-1, None]
    step, agent = np.indices(is_back.shape)
    where = f"{folder}, row {lane} of B, step "
    raise_for_first(
        where,
        is_back,
        "{}, agent {}: expected its end to stay set until all agents have ended, got none "
        "in the next step; set terminals of an agent in every step of its world after its end",
        start + step,
        agent,
    )


def read_lane(folder: Path, lane: int, length: int, files: Json) -> Iterator[Columns]:
    """Return the steps of a row of B of a Vault, in blocks. files: see `open_vault`."""
    _, _, *shape = files["observations"].shape
    size = max(BLOCK // int(np.prod(shape)), 1)
    for start in range(0, max(length, 1), size):
        end = min(start + size, length)
        with explain_vault_errors(folder):
            columns = {name: x[lane, start:end].read().result() for name, x in files.items()}
        check_written(folder, lane, start, length, columns)
        for name in ("terminals", "truncations"):
            columns[name] = to_flags(f"{folder}, row {lane} of B, {name}", columns[name], start)
        yield columns


def open_vault(folder: Path) -> tuple[set[str], int, Json]:
    """Names of all columns, number of steps, and the columns that are read, (B, T, ...) each."""
    import tensorstore as ts  # pip install -e '.[marl]'

    def open_column(name: str) -> "ts.TensorStore":
        store = {"driver": "ocdbt", "base": f"file://{folder.resolve()}/", "path": f"{name}/"}
        return ts.open({"driver": "zarr", "kvstore": store}, read=True, open=True).result()

    card = json.loads((folder / "metadata.json").read_text(encoding="utf-8-sig"))
    if float(card["version"]) // 1 != 1:
        raise ValueError(f"expected version 1 of the format, got {card['version']}")
    shapes = card["structure_shape"]
    names = {*shapes, *(f"infos.{name}" for name in shapes.get("infos", ()))}
    length = int(open_column("vault_index").read().result()[0])
    read_names = [name for name in (*VAULT, *MORE_OF_VAULT) if name in names]
    return names, length, {name: open_column(f"{name}.") for name in read_names}


def check_written(
    folder: Path,
    lane: int,
    start: int,
    length: int,
    columns: Columns,
) -> None:
    """Raise a ValueError if a step of a block, from `start` on, holds zeros alone."""
    numbers = []
    for name in ("observations", "infos.legals"):
        if name in columns:
            numbers.append(columns[name].reshape(len(columns[name]), -1))
    blank = ~np.concatenate(numbers, 1).any(1)
    if length and not blank.any():
        return
    step = start + int(np.argmax(blank)) if length else 0
    where = f"{folder}, row {lane} of B, step {step}"
    raise ValueError(
        f"{where}: expected {length} steps (vault_index), got nothing from here; it was cut "
        f"while it was written: {AGAIN}"
    )
