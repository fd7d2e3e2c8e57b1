"""D4RL's Maze2D logs: real files where D4RL users keep them, or the same protocol run again on our own physics.

A log is one continuous run of a planner to random goals, so its episodes are a choice, and the choice decides what a
return-to-go means. `cut=timeouts` ends an episode where the planner's own goal is reached (`timeouts` in the file);
`cut=horizon` after as many steps as an evaluation has; `cut=goal_exit` where the ball leaves the fixed goal's disc.
Regenerated logs are equal in their statistics, not in their bytes, and are named so: `maze2d-umaze-v1@regen-seed0`. A file has D4RL's name,
`maze2d-umaze-v1`, only if it is like D4RL's in all that is known of it, see `formats/d4rl.py`; else `maze2d-umaze-v1@file-<digest>`.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.config import one_of
from decisionllm.datasets import arrays
from decisionllm.datasets.formats import d4rl
from decisionllm.datasets.store import Store, facts_of, with_texts
from decisionllm.envs.maze2d import Maze, Planner, reward
from decisionllm.files import AGAIN, absent, atomic, explained
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Spec

HORIZON = {"open": 150, "umaze": 300, "medium": 600, "large": 800}
STEPS = {"open": 1_000_000, "umaze": 1_000_000, "medium": 2_000_000, "large": 4_000_000}
VERSION = 2  # of what `load` says of a file and of its tasks
GOAL_TEXTS = ("goal", "paraphrased", "shuffled")  # these name the goal that an episode walked to
WIDTHS = {"observations": 4, "actions": 2, "infos/goal": 2}  # numbers in a row
Log = dict[str, np.ndarray]  # n rows of a run: observations (n, 4), actions (n, 2), ends (n,) bool; rewards (n,), goals (n, 2)


@register("dataset", "maze2d-umaze", maze="umaze", text="${text}")
@register("dataset", "maze2d-medium", maze="medium", text="${text}")
@register("dataset", "maze2d-large", maze="large", text="${text}")
@register("dataset", "maze2d-open", maze="open", text="${text}")
@register("dataset", "maze2d-umaze-dense", maze="umaze", dense=True, text="${text}")
@register("dataset", "maze2d-medium-dense", maze="medium", dense=True, text="${text}")
@register("dataset", "maze2d-large-dense", maze="large", dense=True, text="${text}")
def load(
    *, maze: str, dense: bool = False, text: str = "none", cut: str = "timeouts", source: str = "auto", piece: int = 1000,
    steps_after_goal: int = 0, path: str = "", steps: int = 0, noise: float = 0.5, without_goals: str = "", seed: int = 0,
) -> Source:  # fmt: skip
    """One Maze2D log as episodes.

    Args:
        maze: umaze, medium, large or open, a room without inner walls.
        dense: rewards are exp(-distance to the goal) instead of 1 within 0.5 of it.
        text: `none`; `constant` names the maze; `goal` names the goal that the planner walked to, from the log's goal column, and
            relabels the rewards for it; `paraphrased` is `goal` in the wordings of `frames/maze2d.yaml`, another one in each window;
            `shuffled` is `goal` with the texts permuted among the episodes.
        cut: see above; `run` leaves the log as it is, one continuous run, in pieces of at most `piece` steps.
        source: `file` reads D4RL's HDF5 (path, $D4RL_DATASET_DIR, ~/.d4rl/datasets); `regenerate` runs the protocol; `auto` reads
            the file where there is one.
        piece: steps, with cut=run.
        steps_after_goal: with text=goal, an episode goes on for so many steps after its goal was reached, with loss mask 0: the
            planner walks to another goal by then, but the steps show transitions and rewards.
        path: of the file.
        steps: how many to regenerate; 0: the published size.
        noise: standard deviation of the noise on the planner's actions, which are within -1 .. 1; the published logs have 0.5.
        without_goals: with a goal in the text, leave out the episodes that walked to these cells, such as `1,3;3,1`.
        seed: of the regeneration.

    Raises:
        FileNotFoundError: source=file or a path, and there is no such file.
        ValueError: an option is unknown or does not fit another, or the file is damaged or not a Maze2D log.

    Source: Farama-Foundation/D4RL, `d4rl/pointmaze/`.
    """
    if not 0 <= noise < np.inf:
        raise ValueError(f"dataset.noise: expected a deviation of actions within -1 .. 1, 0 or more, got {noise}")
    by_goal = text in GOAL_TEXTS
    for option, value in {"steps_after_goal": steps_after_goal, "without_goals": without_goals}.items():
        if value and not by_goal:
            raise ValueError(f"dataset.{option}={value}: needs text=goal, got {text}")
    one_of("dataset.text", text, ("none", "constant", *GOAL_TEXTS))
    one_of("dataset.cut", cut, ("timeouts", "horizon", "goal_exit", "run"))
    one_of("dataset.source", source, ("auto", "file", "regenerate"))
    simulator, published = Maze.named(maze), f"maze2d-{maze}{'-dense' if dense else ''}-v1"
    absent = simulator.cells(without_goals, "dataset.without_goals")
    if by_goal and cut not in ("timeouts", "run"):
        raise ValueError(f"dataset.cut: text={text} needs cut=timeouts or run, got {cut}")
    file = next(iter(files(maze=maze, dense=dense, path=path, source=source)), None)
    if not file and (source == "file" or path):
        remedy = f"put {file_names(maze, dense)[0]} in one of them, or use dataset.source=regenerate"
        raise FileNotFoundError(
            f"{path or published}: no D4RL file there, in $D4RL_DATASET_DIR or in ~/.d4rl/datasets; {remedy}"
        )
    if file:
        blocks = partial(read_hdf5, file)
        info = of_file(file, blocks(), simulator, published, maze, dense=dense)
    else:
        log = generate(simulator, steps or STEPS[maze], seed=seed, time_limit=HORIZON[maze], noise=noise)
        info = {"name": f"{published}@regen-seed{seed}" + f"-{steps}" * bool(steps) + f"-noise{noise:g}" * (noise != 0.5)}
        log["rewards"] = reward(log["observations"][:, :2], simulator.goal, dense=dense)
        blocks = partial(iter, [log])
    info |= {"env": "maze2d", "maze": maze, "dense": dense, "text": text, "cut": cut, "file": str(file or "")}
    first, last, stop = cut_points(blocks(), cut, longest := piece if cut == "run" else HORIZON[maze], simulator)
    until = np.minimum(last + steps_after_goal, stop)
    goals = None
    facts: dict[str, dict[str, Any]] = {}
    known: list[dict[str, Any]] = [{}] * len(first)  # the facts of each episode
    if by_goal:
        if "goals" not in next(blocks()):
            raise ValueError(f"{file}: text={text} needs the log's goal column (infos/goal), which this file lacks")
        rows = np.random.default_rng(seed).integers(first, last)  # one of the goals that the planner had in this episode
        goals = np.concatenate([np.rint(block["goals"]).astype(np.int8) for block in blocks()])[rows].astype(int)
        kept = ~(goals[:, None] == absent).all(-1).any(1)
        first, last, until, goals = (x[kept] for x in (first, last, until, goals))
        canonical = [task_text(maze, goal) for goal in goals]
        facts = {task: goal_facts(maze)[task] for task in dict.fromkeys(canonical)}
        known = [facts[task] for task in canonical]
    tasks = texts(known, maze=maze, text=text, seed=seed)
    if text == "paraphrased":
        info["wordings"] = facts

    def episode(i: int, rows: Log) -> Episode:
        observations, actions = (np.asarray(rows[key], np.float32) for key in ("observations", "actions"))
        rewards = rows["rewards"] if goals is None else reward(observations[:, :2], goals[i], dense=dense)
        loss_mask = np.arange(len(actions)) < last[i] - first[i] if steps_after_goal else None
        return Episode(observations, actions, rewards.astype(np.float32), task=tasks[i], group=i, loss_mask=loss_mask)

    spec = Spec(observation_dim=4, action_dim=2, horizon=longest + steps_after_goal, low=(-1.0, -1.0), high=(1.0, 1.0))
    return Source(spec, map(episode, range(len(first)), pieces(blocks(), first, until)), info, facts)


def data_options(*, text: str = "none", **options: Any) -> dict[str, Any]:
    """See `datasets.store`. A goal in the text changes the rewards, and which episodes there are; its wording changes nothing else."""
    canonical = {"constant": "none"} | dict.fromkeys(GOAL_TEXTS, "goal")
    return {"text": canonical.get(text, text), **options}


def worded(store: Store, *, text: str = "none", **options: Any) -> Store:
    """See `datasets.store`."""
    return with_texts(store, text, texts(facts_of(store), text=text, **options))


def texts(facts: Sequence[dict[str, Any]], *, maze: str, text: str = "none", seed: int = 0, **options: Any) -> list[str]:
    """The task text of each episode, by their facts (E,), see `goal_facts`; the other arguments as in `load`."""
    if text not in GOAL_TEXTS:
        return [task_text(maze) if text == "constant" else ""] * len(facts)
    made = [task_text(maze, (known["row"], known["column"])) for known in facts]
    if text == "shuffled":
        return [made[i] for i in np.random.default_rng(seed).permutation(len(made))]
    return made


def of_file(file: Path, blocks: Iterable[Log], simulator: Maze, published: str, maze: str, *, dense: bool) -> dict[str, Any]:
    """What a store says of the file that it was read from.

    Returns:
        "name" of the dataset, "digest" of the bytes (blake2b, 16 bytes), "recognised" and "content", see `d4rl.content`.
    """
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    current, former = file_names(maze, dense)
    known = d4rl.content(file, blocks, simulator, d4rl.Published(published, current, STEPS[maze], dense))
    called = {current: published, former: published.replace("-v1", "-v0")}
    name = name_in(file)
    claimed = "@" not in name and name.startswith(tuple(called.values()))  # of a store of D4RL's file that was exported
    if known["recognised"]:
        name = published
    elif claimed or not name:
        kind = called.get(file.name)
        name = f"{kind}@file-{digest[:8]}" if kind else f"{published}@{file.stem}"
    return {"name": name, "digest": digest, **known}


def task_text(maze: str, goal: np.ndarray | tuple[int, int] | None = None) -> str:
    """The task in words. goal: (2,) cell, also its position; None: the text only names the maze."""
    if goal is None:
        return f"Maze2D {maze}. Push the ball to the goal and keep it there."
    vertical, horizontal = thirds(maze, goal)
    place = f"{('top', 'middle', 'bottom')[vertical]} {('left', 'centre', 'right')[horizontal]}"
    place += f", row {goal[0]}, column {goal[1]} (x = {goal[0]}.0, y = {goal[1]}.0)"
    return f"Maze2D {maze}. Push the ball to the goal at the {place}, and keep it there."


def thirds(maze: str, goal: np.ndarray | tuple[int, int]) -> tuple[int, int]:
    """In which third of the maze a cell is: (0: top .. 2: bottom, 0: left .. 2: right)."""
    rows, columns = Maze.named(maze).walls.shape
    return int(3 * (goal[0] - 1) / (rows - 2)), int(3 * (goal[1] - 1) / (columns - 2))


@cache
def goal_facts(maze: str) -> dict[str, dict[str, Any]]:
    """The facts of every goal of a maze for `wordings`, by its task text.

    row, column; up, down, left, right: cells to the outer free cells; place: the third of the maze; kind: of the cell, by its free
    neighbours. Where each goal of the maze has another one: spot, the place; side, in compass words; region, in other words;
    path, moves from the cell of the fixed goal.
    """
    simulator = Maze.named(maze)
    rows, columns = (int(size) - 2 for size in simulator.walls.shape)
    found = {}
    for cell in simulator.free_cells:
        (row, column), (i, j) = cell.tolist(), thirds(maze, cell)
        free = [not simulator.walls[row + a, column + b] for a, b in ((-1, 0), (1, 0), (0, -1), (0, 1))]
        straight = free in ([True, True, False, False], [False, False, True, True])
        compass = "-".join(word for word in (("north", "", "south")[i], ("west", "", "east")[j]) if word)
        side = f"{compass} corner" if "-" in compass else f"middle of the {compass} side" if compass else "very centre"
        place = f"{('top', 'middle', 'bottom')[i]} {('left', 'centre', 'right')[j]}"
        found[task_text(maze, cell)] = {
            "library": "maze2d", "maze": maze, "rows": rows, "columns": columns, "row": row, "column": column,
            "up": rows - row, "down": row - 1, "left": columns - column, "right": column - 1,
            "place": place, "kind": "corridor" if straight else ("dead end", "corner", "junction", "crossing")[sum(free) - 1],
            "side": side, "region": f"{('upper', 'mid', 'lower')[i]} {('left', 'middle', 'right')[j]}",
            "path": simulator.distance(simulator.goal, cell), "spot": place,
        }  # fmt: skip
    places = ("spot", "side", "region", "path")
    shared = [name for name in places if len({known[name] for known in found.values()}) < len(found)]
    return {task: {name: fact for name, fact in known.items() if name not in shared} for task, known in found.items()}


def cut_points(blocks: Iterable[Log], cut: str, longest: int, simulator: Maze) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First rows and ends (exclusive) of the episodes, and the end of the run that each is of: three (E,) int arrays.

    A run ends where the ball is somewhere else in the next row, or there is none; that always parts two episodes.
    """
    jumps, ends, n, before = [], [], 0, None
    for block in blocks:
        own = block["observations"][:, :2]
        position = np.concatenate([own[:1] if before is None else before, own])  # row n - 1 and the block's
        jumps.append(n + np.flatnonzero(np.abs(np.diff(position, axis=0)).max(1) > 0.06))  # one step moves at most 0.053
        if cut == "timeouts":
            ends.append(n + 1 + np.flatnonzero(block["ends"]))
        if cut == "goal_exit":
            inside = reward(position, simulator.goal) > 0
            ends.append(n + np.flatnonzero(inside[:-1] & ~inside[1:]))
        before, n = own[-1:], n + len(own)
    jump = np.append(np.concatenate(jumps), n)
    last = np.unique(np.concatenate([jump, *ends]))
    first = np.append(0, last[:-1])
    pieces = -(-(last - first) // longest)  # what is longer is cut into pieces, counted back from the end
    back = np.concatenate([np.arange(p)[::-1] for p in pieces])
    last_of, first_of = np.repeat(last, pieces), np.repeat(first, pieces)
    starts = np.maximum(first_of, last_of - (back + 1) * longest)
    return starts, last_of - back * longest, jump[np.searchsorted(jump, starts, side="right")]


def pieces(blocks: Iterable[Log], first: np.ndarray, until: np.ndarray) -> Iterator[Log]:
    """The rows first[i]:until[i] of columns that come block by block, for each i; both ascend."""
    following, kept, start, stop = iter(blocks), dict[str, np.ndarray](), 0, 0  # rows start:stop are kept
    for a, b in zip(first.tolist(), until.tolist(), strict=True):
        while stop < b:
            block = next(following)
            kept = {key: np.concatenate([kept[key][a - start :], x]) if kept else x for key, x in block.items()}
            start, stop = min(a, stop), stop + len(block["ends"])
        yield {key: x[a - start : b - start] for key, x in kept.items()}


def generate(simulator: Maze, steps: int, *, seed: int = 0, time_limit: int = 300, noise: float = 0.5, chains: int = 50) -> Log:
    """D4RL's generation protocol, its noisy variant, which made the published files: a dict of columns of `steps` rows.

    `chains` balls walk side by side, each never reset; a goal is a random free cell, aimed at through the planner's
    waypoints; a new one is drawn when it is reached or after `time_limit` steps. Actions carry noise N(0, noise^2).
    Source: D4RL `scripts/generation/generate_maze2d_datasets.py`. Left out: its loop shows the old observation once more
    after each goal, which repeats a row.
    """
    rng, chains = np.random.default_rng(seed), max(1, min(chains, steps // 2000))
    states, planner = simulator.reset(chains, rng), Planner(simulator, chains, rng)
    length = -(-steps // chains)
    shape = (chains, length)
    log = {"observations": np.empty((*shape, 4), np.float32), "actions": np.empty((*shape, 2), np.float32),
           "goals": np.empty((*shape, 2), np.float32), "ends": np.zeros(shape, bool)}  # fmt: skip
    age, goals, fresh = np.zeros(chains, int), np.zeros((chains, 2)), np.ones(chains, bool)
    for t in range(length):
        rows = np.flatnonzero(fresh)
        if len(rows):
            cells = simulator.free_cells[rng.integers(len(simulator.free_cells), size=len(rows))]
            goals[rows] = cells + rng.uniform(-0.1, 0.1, cells.shape)
            planner.aim(rows, states[rows, :2], cells)
            age[rows] = 0
        actions, solved = planner.act(states)
        actions = np.clip(actions + rng.normal(0, noise, actions.shape), -1, 1)
        fresh = solved | (age >= time_limit)
        for name, column in (("observations", states), ("actions", actions), ("goals", goals), ("ends", fresh)):
            log[name][:, t] = column
        states = simulator.step(states, actions)
        age += 1
    log["ends"][:, -1] = True
    return {name: column.reshape(chains * length, *column.shape[2:])[:steps] for name, column in log.items()}


def final_observations(store: Store) -> np.ndarray:
    """The observation after the last step of each episode, by the physics: (E, 4) float32."""
    last = store.offsets[1:] - 1
    return Maze.named(store.info["maze"]).step(store.observations[last], store.actions[last]).astype(np.float32)


def save(path: str | Path, store: Store) -> None:
    """Write a Maze2D store as a D4RL file, which keeps where its episodes end, as `timeouts`, and its name, as an attribute."""
    if store.info.get("env") != "maze2d" or store.info["text"] in GOAL_TEXTS:
        wanted = "a Maze2D dataset with text=none or constant, since a D4RL file has no column for texts"
        raise ValueError(f"export=hdf5: expected {wanted}; got {store.info['name']} with text={store.info.get('text')}")
    log = {name: vars(store)[name] for name in ("observations", "actions", "rewards")}
    log["ends"] = np.zeros(len(store.rewards), bool)
    log["ends"][store.offsets[1:] - 1] = True
    cut = store.info["cut"]
    write_hdf5(path, log, name=store.info["name"] + ("" if cut == "timeouts" else f"-{cut}"))


def write_hdf5(path: str | Path, log: Log, *, name: str = "") -> None:
    """Columns as the file that D4RL's users read, all or nothing; what `read_hdf5` gives back block by block."""
    import h5py

    with atomic(absent(path)) as partial, h5py.File(partial, "w") as file:
        for key in ("observations", "actions"):
            file.create_dataset(key, data=log[key], compression="gzip")
        file["rewards"], file["timeouts"], file["terminals"] = log["rewards"], log["ends"], np.zeros(len(log["ends"]), bool)
        file["infos/qpos"], file["infos/qvel"] = log["observations"][:, :2], log["observations"][:, 2:]
        if "goals" in log:
            file["infos/goal"] = log["goals"]
        file.attrs["name"] = name


def read_hdf5(path: Path) -> Iterator[Log]:
    """Blocks of a D4RL Maze2D file: its columns observations, actions, rewards, ends and, if there, goals.

    Files of the public generator have no `timeouts` and put the flag into `terminals`; (N, 1) rewards are squeezed;
    rewards stay as published, computed from the observation of their own row.
    """
    for log in arrays.blocks(path, WIDTHS):
        goals = {"goals": log["infos/goal"]} if "infos/goal" in log else {}
        columns = {key: log[key] for key in ("observations", "actions", "rewards")}
        yield columns | {"ends": arrays.ends(log)} | goals


def name_in(path: Path) -> str:
    """The name that `save` gave a file; empty without one."""
    import h5py

    with explained(f"{path}: not a readable HDF5 file, perhaps truncated", OSError, remedy=AGAIN), h5py.File(path) as file:
        return str(file.attrs.get("name", ""))


def files(*, maze: str, dense: bool = False, path: str = "", source: str = "auto", **options: Any) -> list[Path]:
    """What `load` would read with these options: one file, the given one or where a D4RL user has it, $D4RL_DATASET_DIR or
    ~/.d4rl/datasets; none where it regenerates."""
    folders = filter(None, (os.environ.get("D4RL_DATASET_DIR"), "~/.d4rl/datasets"))
    places = [path] if path else [f"{folder}/{name}" for folder in folders for name in file_names(maze, dense)]
    found = [place for place in (Path(place).expanduser() for place in places) if place.is_file()]
    return [] if source == "regenerate" else found[:1]


def file_names(maze: str, dense: bool) -> list[str]:
    kind = "dense" if dense else "sparse"
    return [f"maze2d-{maze}-{kind}-v1.hdf5", f"maze2d-{maze}-{kind}.hdf5"]
