"""Renamed worlds: colours and types are others in what is seen and said, and nothing else is."""

import numpy as np
import pytest

from decisionllm.worlds.babyai.dataset import load
from decisionllm.worlds.babyai.symmetries import (
    Demonstration,
    drop_unnamed_objects,
    rename_demonstration,
)

EMPTY, WALL, DOOR, KEY, BALL, BOX = 1, 2, 4, 5, 6, 7
RED, GREEN, GREY = 0, 1, 5


def make_demonstration(mission, cells):
    images = np.zeros((2, 7, 7, 3), np.uint8)
    for (x, y), cell in cells.items():
        images[:, x, y] = cell
    return Demonstration(
        mission=mission,
        images=images,
        directions=np.array([3, 3]),
        actions=np.array([2]),
        rewards=np.ones(1),
        group=0,
    )


def test_colours_and_types_change_in_sight_and_mission():
    """Red becomes green, green red; a key becomes a ball, a ball a box, a box a key."""
    cells = {(0, 0): (WALL, GREY, 0), (2, 3): (KEY, RED, 0), (4, 3): (BOX, GREEN, 0)}
    made = make_demonstration("put the red key next to a green box", cells)
    colors, types = [1, 0, 2, 3, 4, 5], [0, 2, 3, 1]
    renamed = rename_demonstration(made, colors, types)
    assert renamed.mission == "put the green ball next to a red key"
    assert renamed.images[0, 0, 0].tolist() == [WALL, GREY, 0]  # a wall stays
    assert renamed.images[0, 2, 3].tolist() == [BALL, GREEN, 0]
    assert renamed.images[1, 4, 3].tolist() == [KEY, RED, 0]
    assert renamed.images.dtype == np.uint8
    assert made.images[0, 2, 3].tolist() == [KEY, RED, 0]


def test_types_stay_where_a_door_is_seen_or_named():
    for mission, cells in (
        ("open the red door", {}),
        ("pick up a red key", {(0, 0): (DOOR, RED, 2)}),
    ):
        made = make_demonstration(mission, {(2, 3): (KEY, RED, 0), **cells})
        renamed = rename_demonstration(made, [1, 0, 2, 3, 4, 5], [0, 2, 3, 1])
        assert renamed.mission == mission.replace("red", "green")
        assert renamed.images[0, 2, 3].tolist() == [KEY, GREEN, 0]


def test_objects_that_the_mission_does_not_name_can_be_missing():
    cells = {
        (0, 0): (WALL, GREY, 0),
        (1, 1): (DOOR, RED, 2),
        (2, 3): (KEY, RED, 0),
        (4, 3): (BOX, GREEN, 0),
        (5, 3): (BALL, RED, 0),
        (3, 6): (BALL, GREY, 0),  # carried
    }
    rng = np.random.default_rng(0)
    for mission, missing in (
        ("put the red key next to a green box", {(5, 3)}),
        ("pick up a key on your left", {(4, 3), (5, 3)}),
        ("go to the red object", {(4, 3)}),
        ("go to the grey ball, then pick up a box", {(2, 3), (5, 3)}),
    ):
        made = make_demonstration(mission, cells)
        fewer = drop_unnamed_objects(made, 1.0, rng)
        gone = {cell for cell in cells if fewer.images[0][cell].tolist() == [EMPTY, 0, 0]}
        assert gone == missing
        assert np.array_equal(fewer.images[1], fewer.images[0])
        assert np.array_equal(drop_unnamed_objects(made, 0.0, rng).images, made.images)


def test_objects_are_missing_in_copies_alone():
    options = {"level": "GoToLocal", "episodes": 3, "text": "mission", "renamed": 2}
    plain, fewer = (list(load(**options, drop_objects=p).episodes) for p in (0, 1))
    for i, (before, after) in enumerate(zip(plain, fewer, strict=True)):
        is_there = [each.observations[:, 29::18].sum() for each in (before, after)]
        assert is_there[1] == is_there[0] if i % 3 == 0 else is_there[1] < is_there[0]
    with pytest.raises(ValueError, match="dataset.drop_objects: expected 0 with dataset.renamed=0"):
        load(level="GoToLocal", drop_objects=0.5)


def test_renamed_episodes_follow_their_own_in_one_group():
    plain = list(load(level="GoToLocal", episodes=2, text="mission").episodes)
    made = list(
        load(level="GoToLocal", episodes=2, text="mission", mirror=True, renamed=2).episodes
    )
    assert len(made) == 12  # two, mirrored, each with two copies
    assert [e.group for e in made[:6]] == [plain[0].group] * 6
    assert np.array_equal(made[0].observations, plain[0].observations)
    for copy in made[1:3]:
        assert np.array_equal(copy.actions, plain[0].actions)
        assert np.array_equal(copy.observations[:, -1], plain[0].observations[:, -1])
        assert copy.task.split()[:3] == plain[0].task.split()[:3]  # go to the
    assert len({e.task for e in made}) > 4
