"""Scripted players of simple_tag by hand, and a log of them: one layout for both roles, which only
the text tells apart.
"""

import numpy as np
import pytest

from decisionllm.teams.dataset import collect, source
from decisionllm.teams.spread.tag import META, chase, flee, teachers

STAY, LEFT, RIGHT, DOWN, UP = range(5)


def observation(others, *, velocity=(0, 0), position=(0, 0), prey=()):
    return np.array([*velocity, *position, 9, 9, 9, 9, *np.ravel(others), *prey], float)


@pytest.mark.parametrize(
    ("gap", "prey", "position", "action"),
    [
        ((0.5, 0.1), (0, 0), (0, 0), RIGHT),
        ((0.5, 0.1), (0, 1.3), (0, 0), UP),  # after 0.51 s it is at (0.5, 0.76)
        # it is past x = 0.9, where the field ends: (0.05, 0.2) remain
        ((0.5, 0.2), (1.3, 0), (0.85, 0.5), UP),
    ],
)
def test_a_chaser_runs_to_where_it_meets_the_prey(gap, prey, position, action):
    seen = observation([(3, 3), (3, -3), gap], position=position, prey=prey)
    assert chase({"adversary_0": seen}, {}) == {"adversary_0": action}


@pytest.mark.parametrize(
    ("chasers", "position", "action"),
    [
        ([(-0.3, 0), (-0.4, 0), (-0.5, 0)], (0, 0), RIGHT),
        ([(-0.3, 0), (0.3, 0), (0, -0.3)], (0, 0), UP),
        ([(9, 9)] * 3, (0, -1.2), UP),  # back into the field
    ],
)
def test_the_prey_flees_from_chasers_and_the_edge(chasers, position, action):
    assert flee({"agent_0": observation(chasers, position=position)}, {}) == {"agent_0": action}


def test_each_role_has_its_share_of_random_actions():
    """A random action is the scripted one in a fifth of the cases: 0.52 and 0.92 are expected."""
    act = teachers(np.random.default_rng(0))["chase 0.6, flee 0.1"]
    seen = {
        "adversary_0": observation([(3, 3), (3, -3), (0.5, 0.1)], prey=(0, 0)),
        "agent_0": observation([(-0.3, 0)] * 3),
    }
    selected = [act(seen, {}) for _ in range(1000)]
    shares = [np.mean([each[agent] == RIGHT for each in selected]) for agent in seen]
    assert shares == pytest.approx([0.52, 0.92], abs=0.06)


def test_a_log_has_one_layout_and_the_text_says_the_role():
    from mpe2 import simple_tag_v3

    log = collect(
        simple_tag_v3.parallel_env(max_cycles=3),
        teachers(np.random.default_rng(0)),
        episodes=5,
        **META,
    )
    assert log.meta["behaviours"] == [
        "chase 0.1, flee 0.1",
        "chase 0.1, flee 0.6",
        "chase 0.6, flee 0.1",
        "chase 0.6, flee 0.6",
    ]
    assert (log.agents["behaviour"] == log.agents["group"] % 4).all()
    chasers, prey = (source(log, text="informative", team=team) for team in (0, 1))
    assert chasers.spec == prey.spec and chasers.spec.entity_schema == (("own", 16, 1),)
    texts = [{e.task for e in made.episodes} for made in (chasers, prey)]
    (chaser,), (fleeing,) = texts
    assert "A team of 3" in chaser and chaser.endswith("Role: You chase: touch the prey.")
    assert "Alone" in fleeing and "Role: You flee" in fleeing
