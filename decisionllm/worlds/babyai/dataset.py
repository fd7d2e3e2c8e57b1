"""Demonstrations of MiniGrid's bot in BabyAI levels, or a Minari dataset of such a level.

The reward is 1 at success and 0 elsewhere, so that the return of an episode is its success.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from decisionllm.checks import check_at_least, check_one_of, check_seed, check_share
from decisionllm.datasets import minari
from decisionllm.datasets.dataset_reader import DatasetReader
from decisionllm.datasets.store import Store, replace_task_texts
from decisionllm.progress import track
from decisionllm.protocols import Source
from decisionllm.schema import Episode, Json, raise_for_first
from decisionllm.worlds.babyai.levels import (
    NUM_ACTIONS,
    Bot,
    first_missions,
    make_level,
    parse_levels,
    reset_level,
    step_limit,
    training_seeds,
)
from decisionllm.worlds.babyai.missions import facts_by_mission
from decisionllm.worlds.babyai.observation import (
    NUM_DIRECTIONS,
    VIEW,
    VIEWS,
    are_cells,
    encode,
    spec_of,
    stack_observations,
)
from decisionllm.worlds.babyai.symmetries import Demonstration, add_mirrored, add_renamed

TEXTS = ("none", "mission", "paraphrased", "shuffled")
# of a Minari dataset whose observations are MiniGrid's
MINIGRID_PARTS = [["direction", NUM_DIRECTIONS], ["image", VIEW * VIEW * 3]]
# The bot is given up on in a level where it fails in more missions than these and nine in ten.
MOST_FAILURES = 20


def load(
    *,
    level: str | Sequence[str],
    episodes: int = 1000,
    view: str = "objects",
    noise: float = 0.0,
    mirror: bool = False,
    renamed: int = 0,
    drop_objects: float = 0.0,
    minari_id: str = "",
    text: str = "none",
    seed: int = 0,
) -> Source:
    """Collect demonstrations of MiniGrid's bot, or read a Minari dataset, with a reward of 1 at
    success.

    A mission that the bot fails is left out. `episode.group` is 10^9 times the number of the level,
    plus the seed of the mission in MiniGrid; training missions have seeds below 10^9, those of
    env=babyai do not.

    Args:
        level: such as GoToLocal, or several, such as [GoToRedBall,PickupLoc].
        episodes: of each level.
        view: `objects` or `grid`, see `observation.encode`.
        noise: share of random actions; the bot plans again after each. They are kept as they were
            taken and are no training target.
        mirror: add each episode mirrored, with left and right swapped in actions and missions.
        renamed: add so many copies of each episode in worlds whose objects have other colours and
            types, and missions that say so; see `symmetries.add_renamed`.
        drop_objects: probability for the objects of one colour and type that the mission does not
            name to be missing in a copy of `renamed`.
        minari_id: read all episodes of this Minari dataset, whose observations are MiniGrid's, in
            place of new demonstrations.
        text: `none`; `mission`: the mission of the episode; `paraphrased`: the mission in the
            sentences of frames/, another one in each window, of levels whose missions are single
            instructions; `shuffled`: the missions permuted among the episodes.
        seed: of the missions and the noise.

    Raises:
        ValueError: there is no such level, the bot fails in it, or another option cannot be.
        ImportError: MiniGrid is not installed.
        FileNotFoundError: there is no such Minari dataset.
    """
    check_at_least("dataset.episodes", episodes, 1)
    check_at_least("dataset.renamed", renamed, 0)
    check_share("dataset.drop_objects", drop_objects)
    if drop_objects and not renamed:
        raise ValueError(
            "dataset.drop_objects: expected 0 with dataset.renamed=0, since only copies have fewer "
            f"objects, got {drop_objects:g}; give dataset.renamed=10"
        )
    check_one_of("dataset.view", view, VIEWS)
    check_one_of("dataset.text", text, TEXTS)
    check_share("dataset.noise", noise)
    check_seed("dataset.seed", seed)
    levels = parse_levels("dataset.level", level)
    if text == "paraphrased" and not minari_id:
        check_frames("dataset", levels)
    horizon = max(step_limit(name) for name in levels)
    info: Json = {"env": "babyai", "level": levels, "text": text, "view": view, "mirror": mirror}
    info |= {"renamed": renamed, "drop_objects": drop_objects}
    if minari_id:
        if noise:
            raise ValueError(f"dataset.noise: expected 0 with dataset.minari_id, got {noise}")
        recorded = open_recorded(minari_id, levels)
        horizon = max(horizon, recorded.spec.horizon)
        demonstrations = read_recorded(recorded)
        info = {"name": minari_id, **info}
        if "faults" in recorded.info:
            info["faults"] = recorded.info["faults"]
    else:
        name = f"babyai-{'+'.join(levels)}@seed{seed}-{episodes}"
        name += f"-noise{noise:g}" if noise else ""
        # The store writes the card after the last episode, with the failures up to then.
        info |= {"name": name, "noise": noise, "seed": seed, "repairs": {}}
        demonstrations = demonstrate(levels, episodes, noise, seed, info["repairs"])
    if mirror:
        info["name"] += "-mirror"
        demonstrations = add_mirrored(demonstrations)
    if renamed:
        info["name"] += f"-renamed{renamed}"
        info["name"] += f"-drop{drop_objects:g}" if drop_objects else ""
        demonstrations = add_renamed(demonstrations, renamed, drop_objects, seed)
    encoded = (to_episode(each, view) for each in demonstrations)
    return Source(spec_of(view, horizon), write_texts(encoded, text, seed, info), info)


def demonstrate(
    levels: Sequence[str], count: int, noise: float, seed: int, failures: dict[str, int]
) -> Iterator[Demonstration]:
    """Play missions by MiniGrid's bot, the levels in turn.

    Args:
        levels: their names.
        count: of successes in each level.
        noise, seed: see `load`.
        failures: counts those of the bot, by what they are.
    """
    envs = [make_level(name) for name in levels]
    attempts = [0] * len(levels)
    seeds = training_seeds(seed, MOST_FAILURES + 10 * count)
    for done in track(range(count), "babyai: demonstrations"):
        for number, (name, env) in enumerate(zip(levels, envs, strict=True)):
            demonstration = None
            while demonstration is None:
                failed = attempts[number] - done
                if failed > max(MOST_FAILURES, 9 * done):
                    got = f"{done} successes in {attempts[number]} missions"
                    fix = "choose another level or less dataset.noise"
                    raise ValueError(
                        f"dataset.level: expected a level that MiniGrid's bot can do, got {name} with "
                        f"{got}; {fix}"
                    )
                mission_seed = int(seeds[attempts[number]])
                demonstration = play_mission(env, mission_seed, noise, (seed, number, mission_seed))
                attempts[number] += 1
                if demonstration is None:
                    what = f"missions of {name} that the bot failed, left out"
                    failures[what] = failures.get(what, 0) + 1
            yield replace(demonstration, group=1_000_000_000 * number + demonstration.group)


def play_mission(
    env: Any, seed: int, noise: float, noise_seed: Sequence[int]
) -> Demonstration | None:
    """Play the mission of a seed by MiniGrid's bot; None if it fails."""
    rng = np.random.default_rng(noise_seed)
    observations = [reset_level(env, seed)]
    bot = Bot(env)
    actions: list[int] = []
    is_random: list[bool] = []
    has_ended = False
    reward = 0.0
    while not has_ended:
        action = bot.act(actions[-1] if actions else None)
        if bot.has_failed:
            return None
        is_random.append(bool(noise) and rng.random() < noise)
        if is_random[-1]:
            action = int(rng.integers(NUM_ACTIONS))
        observation, reward, terminated, truncated, _ = env.step(action)
        observations.append(observation)
        actions.append(action)
        has_ended = terminated or truncated
    if reward <= 0:
        return None
    images, directions = stack_observations(observations)
    rewards = np.zeros(len(actions), np.float32)
    rewards[-1] = 1
    return Demonstration(
        mission=observations[0]["mission"],
        images=images,
        directions=directions,
        actions=np.array(actions),
        rewards=rewards,
        group=seed,
        is_random=np.array(is_random) if noise else None,
    )


def open_recorded(minari_id: str, levels: Sequence[str]) -> Source:
    """Open a Minari dataset of these levels.

    Raises:
        ValueError: its observations or actions are not MiniGrid's, or it is of another level.
    """
    id = minari.read_env_spec(minari.open_dataset(minari_id)).get("id", "")
    if id.startswith("BabyAI-"):
        (recorded_level,) = parse_levels("dataset.minari_id", id)
        if recorded_level not in levels:
            raise ValueError(
                f"dataset.level: expected {recorded_level}, the level of {minari_id}, got "
                f"{', '.join(levels)}; give dataset.level={recorded_level}"
            )
    recorded = minari.load(minari_id=minari_id, text="episode", task_from="observation.mission")
    parts, actions = recorded.info["observation_parts"], recorded.spec.num_actions
    if parts != MINIGRID_PARTS or actions != NUM_ACTIONS:
        raise ValueError(
            f"{minari_id}: expected observations of {MINIGRID_PARTS} and {NUM_ACTIONS} actions, as "
            f"MiniGrid's are, got {parts} and {actions}"
        )
    return recorded


def read_recorded(recorded: Source) -> Iterator[Demonstration]:
    """Yield the episodes of a Minari dataset, see `open_recorded`."""
    fix = "record with jpeg_encoding=False, since JPEG changes numbers"
    message = f"expected type, colour and state of a cell, got {{}}; {fix}"
    for number, episode in enumerate(recorded.episodes):
        assert episode.final_observation is not None
        rows = np.concatenate([episode.observations, episode.final_observation[None]])
        images = rows[:, NUM_DIRECTIONS:].reshape(-1, VIEW, VIEW, 3).astype(np.uint8)
        place = f"{recorded.info['name']}, episode {number}: "
        raise_for_first(place, ~are_cells(images), message, images)
        yield Demonstration(
            mission=episode.task,
            images=images,
            directions=rows[:, :NUM_DIRECTIONS].argmax(axis=1),
            actions=episode.actions[:, 0].astype(int),
            rewards=(episode.rewards > 0).astype(np.float32),
            group=episode.group,
            terminated=episode.terminated,
        )


def to_episode(demonstration: Demonstration, view: str) -> Episode:
    """Encode a demonstration as an episode, with its mission as text."""
    rows = encode(demonstration.images, demonstration.directions, view)
    is_target = None
    if demonstration.is_random is not None:
        is_target = ~demonstration.is_random
    return Episode(
        rows[:-1],
        demonstration.actions[:, None].astype(np.float32),
        demonstration.rewards,
        task=demonstration.mission,
        group=demonstration.group,
        terminated=demonstration.terminated,
        truncated=not demonstration.terminated,
        final_observation=rows[-1],
        loss_mask=is_target,
    )


def write_texts(episodes: Iterable[Episode], text: str, seed: int, info: Json) -> Iterator[Episode]:
    """Give episodes whose texts are their missions those that the option `text` asks for, and with
    text=paraphrased the info of their dataset the facts of their missions.
    """
    if text == "mission":
        yield from episodes
        return
    every = list(episodes)  # a permutation is of all of them
    missions = [episode.task for episode in every]
    if text == "paraphrased":
        info["wordings"] = facts_by_mission(missions)
    tasks = choose_texts(missions, text=text, seed=seed)
    for episode, task in zip(every, tasks, strict=True):
        yield replace(episode, task=task)


def choose_texts(missions: Sequence[str], *, text: str, seed: int) -> list[str]:
    """Return the task text of each episode by its mission (E,). Options as in `load`."""
    if text == "none":
        return [""] * len(missions)
    if text == "shuffled":
        order = np.random.default_rng(seed).permutation(len(missions))
        return [missions[i] for i in order]
    return list(missions)


def check_frames(group: str, levels: Sequence[str]) -> None:
    """Raise a ValueError if a level has missions that text=paraphrased has no sentence frame for.

    Args:
        group: of the options, `dataset` or `env`, for the message.
        levels: their names.
    """
    for level in levels:
        facts_by_mission(first_missions(level), f"{group}.level={level}, text=paraphrased")


def data_options(*, text: str = "none", **options: Any) -> Json:
    """Return the options of the data, see `datasets.store`: the canonical text is the mission.

    Levels without sentence frames are refused here, before their demonstrations are made.
    """
    check_one_of("dataset.text", text, TEXTS)
    if text == "paraphrased" and not options.get("minari_id"):
        check_frames("dataset", parse_levels("dataset.level", options["level"]))
    return {**options, "text": "mission"}


def select_texts(store: Store, *, text: str = "none", seed: int = 0, **options: object) -> Store:
    """Return the store with the texts of the option `text`, see `datasets.store`."""
    missions = [store.tasks[i] for i in store.task.tolist()]
    facts = facts_by_mission(missions) if text == "paraphrased" else None
    return replace_task_texts(
        store, text, choose_texts(missions, text=text, seed=seed), wordings=facts
    )


def files(*, minari_id: str = "", **options: object) -> list[Path]:
    """Return the files that `load` reads with these options."""
    return minari.files(minari_id=minari_id) if minari_id else []


# Version 2: the spec has each one-hot group, and the cells of the view `grid` as entities.
READER = DatasetReader(version=2, files=files, data_options=data_options, set_texts=select_texts)
