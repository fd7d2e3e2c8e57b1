"""D4RL's Maze2D logs: real files where D4RL users keep them, or the same protocol run again on our
own physics.

A log is one continuous run of a planner to random goals, so its episodes are a choice, and the
choice decides what a return-to-go means: see the option `cut`. Regenerated logs are equal in their
statistics, not in their bytes, and are named so: `maze2d-umaze-v1@regen-seed0`. A file has D4RL's
name, `maze2d-umaze-v1`, only if it is like D4RL's in all that is known of it, see
`d4rl.py`; else `maze2d-umaze-v1@file-<digest>`.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np

from decisionllm.checks import check_at_least, check_one_of
from decisionllm.datasets import d4rl_files
from decisionllm.datasets.dataset_reader import DatasetReader
from decisionllm.datasets.store import Store, episode_facts, replace_task_texts
from decisionllm.files import atomic, new_path
from decisionllm.protocols import Source
from decisionllm.schema import Episode, Json, Spec, raise_for_first
from decisionllm.worlds.maze2d import d4rl
from decisionllm.worlds.maze2d.simulator import FRAME, Maze, Planner, reward
from decisionllm.worlds.regenerated_logs import check_noise, file_digest, regenerated_name

# most steps of an episode: as many as an evaluation has, and with cut=run
HORIZON = {"open": 150, "umaze": 300, "medium": 600, "large": 800}
PIECE = 1000
CHAINS = 50  # most balls that a regenerated log is walked by
STEPS = {"open": 1_000_000, "umaze": 1_000_000, "medium": 2_000_000, "large": 4_000_000}
GOAL_TEXTS = ("goal", "paraphrased", "shuffled")  # these name the goal that an episode walked to
VERTICAL = ("top", "middle", "bottom")
HORIZONTAL = ("left", "centre", "right")
WIDTHS = {"observations": 4, "actions": 2, "infos/goal": 2}  # numbers in a row
# n rows of a run: observations (n, 4), actions (n, 2), ends (n,) bool; rewards (n,), goals (n, 2)
Log = dict[str, np.ndarray]
Facts = Json  # facts of a task, see `goal_facts`


def load(
    *,
    maze: str,
    dense: bool = False,
    text: str = "none",
    cut: str = "timeouts",
    source: str = "auto",
    steps_after_goal: int = 0,
    path: str = "",
    steps: int = 0,
    noise: float = 0.5,
    without_goals: str = "",
    seed: int = 0,
) -> Source:
    """Read one Maze2D log as episodes.

    Args:
        maze: umaze, medium, large or open, a room without inner walls.
        dense: rewards are exp(-distance to the goal) instead of 1 within 0.5 of it.
        text: `none`; `constant` names the maze; `goal` names the goal that the planner walked to,
            from the log's goal column, and relabels the rewards for it; `paraphrased` is `goal` in
            the wordings of `frames.yaml`, another one in each window; `shuffled` is `goal`
            with the texts permuted among the episodes.
        cut: `timeouts` ends an episode where the planner's own goal is reached (`timeouts` in the
            file); `run` leaves the log as it is, one continuous run, in pieces of at most 1,000
            steps.
        source: `file` reads D4RL's HDF5 (path, $D4RL_DATASET_DIR, ~/.d4rl/datasets); `regenerate`
            runs the protocol; `auto` reads the file where there is one.
        steps_after_goal: with text=goal, an episode goes on for so many steps after its goal was
            reached, with loss mask 0: the planner walks to another goal by then, but the steps show
            transitions and rewards.
        path: the file.
        steps: how many to regenerate; 0: the published size.
        noise: standard deviation of the noise on the planner's actions, which are within -1 .. 1;
            the published logs have 0.5.
        without_goals: with a goal in the text, leave out the episodes that walked to these cells,
            such as `1,3;3,1`.
        seed: draws the regenerated log, and the goal that a text names.

    Raises:
        FileNotFoundError: source=file or a path, and there is no such file.
        ValueError: an option is unknown or does not fit another, or the file is damaged, not a
            Maze2D log or one of another maze.

    Source: Farama-Foundation/D4RL, `d4rl/pointmaze/`.
    """
    goal_options = {"steps_after_goal": steps_after_goal, "without_goals": without_goals}
    check_options(text, cut, source, noise, goal_options)
    check_at_least("dataset.steps", steps, 0)
    simulator = Maze.from_name(maze)
    excluded_cells = simulator.cells(without_goals, "dataset.without_goals")

    file, blocks, info = open_log(
        simulator, maze, dense, path=path, source=source, steps=steps, noise=noise, seed=seed
    )
    info |= {"env": "maze2d", "maze": maze, "dense": dense, "text": text, "cut": cut}
    info["file"] = str(file or "")

    longest = PIECE if cut == "run" else HORIZON[maze]
    cuts = cut_points(blocks(), cut, longest)
    goals = None
    facts: dict[str, Facts] = {}  # by the canonical task
    facts_of_episodes: list[Facts] = [{}] * len(cuts)
    if text in GOAL_TEXTS:
        goals = sample_goals(read_goals(blocks(), f"{file}: text={text}"), cuts, seed)
        outside = "{}: expected a goal in a free cell of the maze, got {}"
        raise_for_first(
            f"{file}, episode ", ~simulator.is_free(goals), outside, np.arange(len(goals)), goals
        )
        is_excluded = (goals[:, None] == excluded_cells).all(-1).any(1)  # (E,)
        cuts = cuts[~is_excluded]
        goals = goals[~is_excluded]
        canonical = [task_text(maze, goal) for goal in goals]
        facts = {task: goal_facts(maze)[task] for task in canonical}
        facts_of_episodes = [facts[task] for task in canonical]
    if text == "paraphrased":
        info["wordings"] = facts
    tasks = write_texts(facts_of_episodes, maze=maze, text=text, seed=seed)
    first, last, stop = cuts.T
    until = np.minimum(last + steps_after_goal, stop)

    def episodes() -> Iterator[Episode]:
        for i, rows in enumerate(slice_blocks(blocks(), first, until)):
            observations = np.asarray(rows["observations"], np.float32)
            actions = np.asarray(rows["actions"], np.float32)
            rewards = rows["rewards"]
            if goals is not None:
                rewards = reward(observations[:, :2], goals[i], dense=dense)
            is_target = None
            if steps_after_goal:
                is_target = np.arange(len(actions)) < last[i] - first[i]
            yield Episode(
                observations,
                actions,
                rewards.astype(np.float32),
                task=tasks[i],
                group=i,
                loss_mask=is_target,
            )

    horizon = longest + steps_after_goal
    low, high = (-1.0, -1.0), (1.0, 1.0)
    spec = Spec(observation_dim=4, action_dim=2, horizon=horizon, low=low, high=high)
    return Source(spec, episodes(), info, facts)


def check_options(text: str, cut: str, source: str, noise: float, goal_options: Json) -> None:
    """Raise a ValueError about an option of `load` that is unknown, out of range, or of goals in the
    text where there are none.
    """
    check_noise(noise)
    for option, value in goal_options.items():
        if value and text not in GOAL_TEXTS:
            raise ValueError(f"dataset.{option}={value}: needs text=goal, got {text}")
    check_one_of("dataset.text", text, ("none", "constant", *GOAL_TEXTS))
    check_one_of("dataset.cut", cut, ("timeouts", "run"))
    check_one_of("dataset.source", source, ("auto", "file", "regenerate"))


def open_log(
    simulator: Maze,
    maze: str,
    dense: bool,
    *,
    path: str,
    source: str,
    steps: int,
    noise: float,
    seed: int,
) -> tuple[Path | None, Callable[[], Iterator[Log]], Json]:
    """Return the file of a log, None if it is regenerated; a function that reads its blocks; its info."""
    published = f"maze2d-{maze}-dense-v1" if dense else f"maze2d-{maze}-v1"
    paths = files(maze=maze, dense=dense, path=path, source=source)
    if paths:
        file = paths[0]
        info = describe_file(file, simulator, published, maze, dense=dense)
        return file, partial(read_maze, file, maze), info
    if source == "file" or path:
        raise FileNotFoundError(
            f"{path or published}: no D4RL file there, in $D4RL_DATASET_DIR or in ~/.d4rl/datasets; "
            f"put {file_names(maze, dense)[0]} in one of them, or use dataset.source=regenerate"
        )

    count = steps or STEPS[maze]
    log = generate(simulator, count, seed=seed, time_limit=HORIZON[maze], noise=noise)
    log["rewards"] = reward(log["observations"][:, :2], simulator.goal, dense=dense)
    info = {"name": regenerated_name(published, count=steps, noise=noise, seed=seed)}
    return None, partial(iter, [log]), info


def read_goals(blocks: Iterable[Log], option: str) -> np.ndarray:
    """Read the goal cell of each row of a log, (n, 2) int8. option: that needs them, to begin a
    message with.
    """
    cells = []
    for block in blocks:
        if "goals" not in block:
            raise ValueError(
                f"{option} needs the log's goal column (infos/goal), which this file lacks"
            )
        cell = np.rint(block["goals"])
        cells.append(np.clip(cell, -1, 100).astype(np.int8))  # what is far away stays outside
    return np.concatenate(cells)


def sample_goals(logged: np.ndarray, cuts: np.ndarray, seed: int) -> np.ndarray:
    """Draw one of the goals that the planner had in each episode, (E, 2) int.

    Args:
        logged: (n, 2) of each row.
        cuts: (E, 3) see `cut_points`.
        seed: of the draw.
    """
    rows = np.random.default_rng(seed).integers(cuts[:, 0], cuts[:, 1])
    return logged[rows].astype(int)


def data_options(*, text: str = "none", **options: object) -> Json:
    """Return the options of the data, see `datasets.store`.

    A goal in the text changes rewards and episodes; its wording changes nothing else.
    """
    canonical = {"constant": "none"} | dict.fromkeys(GOAL_TEXTS, "goal")
    return {"text": canonical.get(text, text), **options}


def select_texts(
    store: Store, *, maze: str, text: str = "none", seed: int = 0, **options: object
) -> Store:
    """Return the store with the texts of the option `text`, see `datasets.store`."""
    return replace_task_texts(
        store, text, write_texts(episode_facts(store), maze=maze, text=text, seed=seed)
    )


def write_texts(
    facts: Sequence[Facts],
    *,
    maze: str,
    text: str = "none",
    seed: int = 0,
) -> list[str]:
    """Write the task text of each episode by its facts (E,), see `goal_facts`. Options as in `load`."""
    if text == "constant":
        return [task_text(maze)] * len(facts)
    if text not in GOAL_TEXTS:
        return [""] * len(facts)
    tasks = [task_text(maze, (each["row"], each["column"])) for each in facts]
    if text == "shuffled":
        return [tasks[i] for i in np.random.default_rng(seed).permutation(len(tasks))]
    return tasks


def describe_file(file: Path, simulator: Maze, published: str, maze: str, *, dense: bool) -> Json:
    """Describe the file that a store was read from.

    Returns:
        "name" of the dataset, "digest" of the bytes (blake2b, 16 bytes), "recognised" and
        "content", see `d4rl.recognise_file`.
    """
    digest = file_digest(file)
    current, former = file_names(maze, dense)
    original = d4rl.Published(published, current, STEPS[maze], dense)
    content = d4rl.recognise_file(file, read_hdf5(file), simulator, original)
    datasets = {current: published, former: published.replace("-v1", "-v0")}  # by file name
    name = name_in(file)
    # a store of D4RL's file that was exported has its name
    claims_to_be_published = "@" not in name and name.startswith(tuple(datasets.values()))
    if content["recognised"]:
        name = published
    elif claims_to_be_published or not name:
        name = f"{published}@{file.stem}"
        if file.name in datasets:
            name = f"{datasets[file.name]}@file-{digest[:8]}"
    return {"name": name, "digest": digest, **content}


def task_text(maze: str, goal: np.ndarray | tuple[int, int] | None = None) -> str:
    """Return the task in words. goal: (2,) cell, also its position; None: the text only names the maze."""
    if goal is None:
        return f"Maze2D {maze}. Push the ball to the goal and keep it there."
    place = place_name(maze, goal)
    place += f", row {goal[0]}, column {goal[1]} (x = {goal[0]}.0, y = {goal[1]}.0)"
    return f"Maze2D {maze}. Push the ball to the goal at the {place}, and keep it there."


def place_name(maze: str, goal: np.ndarray | tuple[int, int]) -> str:
    """Return the place of a cell in words, such as "top left"."""
    i, j = thirds(maze, goal)
    return f"{VERTICAL[i]} {HORIZONTAL[j]}"


def thirds(maze: str, goal: np.ndarray | tuple[int, int]) -> tuple[int, int]:
    """Return the third of the maze that a cell is in: (0: top .. 2: bottom, 0: left .. 2: right)."""
    rows, columns = Maze.from_name(maze).walls.shape
    return int(3 * (goal[0] - 1) / (rows - 2)), int(3 * (goal[1] - 1) / (columns - 2))


@cache
def goal_facts(maze: str) -> dict[str, Facts]:
    """Return the facts of every goal of a maze for `wordings`, by its task text.

    row, column; up, down, left, right: cells to the outer free cells; place: the third of the maze;
    kind: of the cell, by its free neighbours. Where each goal of the maze has another one: spot,
    the place; side, in compass words; region, in other words; path, moves from the cell of the
    fixed goal.
    """
    simulator = Maze.from_name(maze)
    facts = {task_text(maze, cell): cell_facts(maze, cell) for cell in simulator.free_cells}
    for name in ("spot", "side", "region", "path"):
        if len({of_cell[name] for of_cell in facts.values()}) < len(facts):
            for of_cell in facts.values():
                del of_cell[name]
    return facts


def cell_facts(maze: str, cell: np.ndarray) -> Facts:
    """Return the facts of a free cell, see `goal_facts`."""
    simulator = Maze.from_name(maze)
    rows, columns = (size - 2 for size in simulator.walls.shape)
    row, column = cell.tolist()
    i, j = thirds(maze, cell)
    return {
        "library": "maze2d",
        "maze": maze,
        "rows": rows,
        "columns": columns,
        "row": row,
        "column": column,
        "up": rows - row,
        "down": row - 1,
        "left": columns - column,
        "right": column - 1,
        "place": place_name(maze, cell),
        "kind": cell_kind(simulator.walls, row, column),
        "side": side(("north", "", "south")[i], ("west", "", "east")[j]),
        "region": f"{('upper', 'mid', 'lower')[i]} {('left', 'middle', 'right')[j]}",
        "path": simulator.distance(simulator.goal, cell),
        "spot": place_name(maze, cell),
    }


def cell_kind(walls: np.ndarray, row: int, column: int) -> str:
    """Return the kind of a free cell, by its free neighbours."""
    around = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
    free = [not walls[cell] for cell in around]
    if free in ([True, True, False, False], [False, False, True, True]):
        return "corridor"
    return ("dead end", "corner", "junction", "crossing")[sum(free) - 1]


def side(vertical: str, horizontal: str) -> str:
    """Return the compass words of a third of a maze; the middle is empty."""
    if vertical and horizontal:
        return f"{vertical}-{horizontal} corner"
    if vertical or horizontal:
        return f"middle of the {vertical or horizontal} side"
    return "very centre"


def cut_points(blocks: Iterable[Log], cut: str, longest: int) -> np.ndarray:
    """Find the first row and end (exclusive) of each episode, and the end of its run: (E, 3) int.

    A run ends where the ball is somewhere else in the next row, or there is none; that always parts
    two episodes.
    """
    jumps = []
    ends = []
    n = 0
    before = None  # the position in row n - 1
    for block in blocks:
        positions = block["observations"][:, :2]
        if before is None:
            before = positions[:1]
        position = np.concatenate([before, positions])
        apart = np.abs(np.diff(position, axis=0)).max(1)
        jumps.append(n + np.flatnonzero(apart > 0.06))  # one step moves at most 0.053
        if cut == "timeouts":
            ends.append(n + 1 + np.flatnonzero(block["ends"]))
        before = positions[-1:]
        n += len(positions)
    jump = np.append(np.concatenate(jumps), n)
    last = np.unique(np.concatenate([jump, *ends]))
    first = np.append(0, last[:-1])

    # a longer episode is cut into pieces, counted back from its end
    counts = -(-(last - first) // longest)
    back = np.concatenate([np.arange(count)[::-1] for count in counts])
    ends_of = np.repeat(last, counts) - back * longest
    starts = np.maximum(np.repeat(first, counts), ends_of - longest)
    end_of_run = jump[np.searchsorted(jump, starts, side="right")]
    return np.stack([starts, ends_of, end_of_run], 1)


def slice_blocks(blocks: Iterable[Log], first: np.ndarray, until: np.ndarray) -> Iterator[Log]:
    """Yield the rows first[i]:until[i] of columns that come block by block, for each i; both ascend."""
    following = iter(blocks)
    buffer: Log = {}  # rows start:stop
    start = stop = 0
    for a, b in zip(first.tolist(), until.tolist(), strict=True):
        while stop < b:
            block = next(following)
            if buffer:
                rest = {key: x[a - start :] for key, x in buffer.items()}
                block = {key: np.concatenate([rest[key], block[key]]) for key in block}
            start = min(a, stop)
            buffer = block
            stop = start + len(buffer["ends"])
        yield {key: x[a - start : b - start] for key, x in buffer.items()}


def generate(
    simulator: Maze,
    steps: int,
    *,
    seed: int = 0,
    time_limit: int = 300,
    noise: float = 0.5,
) -> Log:
    """Run D4RL's generation protocol, its noisy variant, which made the published files: a dict of
    columns of `steps` rows.

    Up to CHAINS balls walk side by side, each never reset; a goal is a random free cell, aimed at
    through the planner's waypoints; a new one is drawn when it is reached or after `time_limit`
    steps. Actions carry noise N(0, noise^2).
    Source: D4RL `scripts/generation/generate_maze2d_datasets.py`. Left out: its loop shows the old
    observation once more after each goal, which repeats a row.
    """
    rng = np.random.default_rng(seed)
    chains = max(1, min(CHAINS, steps // 2000))
    states = simulator.reset(chains, rng)
    planner = Planner(simulator, chains, rng)
    shape = chains, -(-steps // chains)
    log = {
        "observations": np.empty((*shape, 4), np.float32),
        "actions": np.empty((*shape, 2), np.float32),
        "goals": np.empty((*shape, 2), np.float32),
        "ends": np.zeros(shape, bool),
    }
    age = np.zeros(chains, int)
    goals = np.zeros((chains, 2))
    fresh = np.ones(chains, bool)  # whether a ball needs a new goal
    for t in range(shape[1]):
        rows = np.flatnonzero(fresh)
        if len(rows):
            drawn = rng.integers(len(simulator.free_cells), size=len(rows))
            cells = simulator.free_cells[drawn]
            goals[rows] = cells + rng.uniform(-0.1, 0.1, cells.shape)
            planner.aim(rows, states[rows, :2], cells)
            age[rows] = 0
        actions, solved = planner.act(states)
        actions = np.clip(actions + rng.normal(0, noise, actions.shape), -1, 1)
        fresh = solved | (age >= time_limit)
        log["observations"][:, t] = states
        log["actions"][:, t] = actions
        log["goals"][:, t] = goals
        log["ends"][:, t] = fresh
        states = simulator.step(states, actions)
        age += 1
    log["ends"][:, -1] = True
    return {name: x.reshape(-1, *x.shape[2:])[:steps] for name, x in log.items()}


def final_observations(store: Store) -> np.ndarray:
    """Simulate the observation after the last step of each episode: (E, 4) float32."""
    last = store.offsets[1:] - 1
    simulator = Maze.from_name(store.info["maze"])
    after = simulator.step(store.observations[last], store.actions[last])
    return after.astype(np.float32)


def save(path: str | Path, store: Store) -> None:
    """Write a Maze2D store as a D4RL file, with its episodes' ends as `timeouts` and its name."""
    if store.info.get("env") != "maze2d" or store.info["text"] in GOAL_TEXTS:
        raise ValueError(
            "export=hdf5: expected a Maze2D dataset with text=none or constant, since a D4RL file has "
            f"no column for texts; got {store.info['name']} with text={store.info.get('text')}"
        )
    ends = np.zeros(len(store.rewards), bool)
    ends[store.offsets[1:] - 1] = True
    log = {name: vars(store)[name] for name in ("observations", "actions", "rewards")}
    name = store.info["name"]
    if store.info["cut"] != "timeouts":
        name += f"-{store.info['cut']}"
    write_hdf5(path, log | {"ends": ends}, name=name)


def write_hdf5(path: str | Path, log: Log, *, name: str = "") -> None:
    """Write columns as a file of D4RL, all or nothing. `read_hdf5` reads them back."""
    import h5py

    with atomic(new_path(path)) as partial, h5py.File(partial, "w") as file:
        for key in ("observations", "actions"):
            file.create_dataset(key, data=log[key], compression="gzip")
        file["rewards"] = log["rewards"]
        file["timeouts"] = log["ends"]
        file["terminals"] = np.zeros(len(log["ends"]), bool)
        file["infos/qpos"] = log["observations"][:, :2]
        file["infos/qvel"] = log["observations"][:, 2:]
        if "goals" in log:
            file["infos/goal"] = log["goals"]
        file.attrs["name"] = name


def read_hdf5(path: Path) -> Iterator[Log]:
    """Yield blocks of a D4RL Maze2D file: its columns observations, actions, rewards, ends and, if there,
    goals.

    Files of the public generator have no `timeouts` and put the flag into `terminals`; (N, 1)
    rewards are squeezed; rewards stay as published, computed from the observation of their own row.
    """
    for log in d4rl_files.read_blocks(path, WIDTHS):
        columns = {key: log[key] for key in ("observations", "actions", "rewards")}
        columns["ends"] = d4rl_files.episode_ends(log)
        if "infos/goal" in log:
            columns["goals"] = log["infos/goal"]
        yield columns


def read_maze(path: Path, maze: str) -> Iterator[Log]:
    """Yield blocks as `read_hdf5` does; a ValueError where the ball is in a wall of this maze."""
    simulator = Maze.from_name(maze)
    message = (
        f"row {{}}: expected a position in a free cell of the maze {maze}, got {{}}; give the dataset "
        "of the file's maze"
    )
    count = 0
    for block in read_hdf5(path):
        positions = block["observations"][:, :2]
        rows = count + np.arange(len(positions))
        wrong = ~simulator.is_free(positions + FRAME)
        raise_for_first(f"{path}, ", wrong, message, rows, positions)
        count += len(positions)
        yield block


def name_in(path: Path) -> str:
    """Return the name that `save` gave a file; empty without one."""
    return d4rl.read_outline(path)[1]


def files(
    *,
    maze: str,
    dense: bool = False,
    path: str = "",
    source: str = "auto",
    **options: object,
) -> list[Path]:
    """Return the one file that `load` would read with these options; none where it regenerates.

    It is the one of `path`, or where a D4RL user has it: $D4RL_DATASET_DIR or ~/.d4rl/datasets.
    """
    if source == "regenerate":
        return []
    folders = [os.environ.get("D4RL_DATASET_DIR"), "~/.d4rl/datasets"]
    places = [path]
    if not path:
        pairs = product(filter(None, folders), file_names(maze, dense))
        places = [f"{folder}/{name}" for folder, name in pairs]
    paths = [Path(place).expanduser() for place in places]
    return [file for file in paths if file.is_file()][:1]


def file_names(maze: str, dense: bool) -> list[str]:
    """Return D4RL's names of the file, the current and the former one."""
    kind = "dense" if dense else "sparse"
    return [f"maze2d-{maze}-{kind}-v1.hdf5", f"maze2d-{maze}-{kind}.hdf5"]


READER = DatasetReader(version=2, files=files, data_options=data_options, set_texts=select_texts)
