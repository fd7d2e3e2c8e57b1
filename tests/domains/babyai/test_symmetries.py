"""Renamed worlds: colours and types are others in what is seen and said, and nothing else is."""

import numpy as np

from decisionllm.domains.babyai.dataset import load
from decisionllm.domains.babyai.symmetries import Demonstration, rename_demonstration

WALL, DOOR, KEY, BALL, BOX = 2, 4, 5, 6, 7
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
