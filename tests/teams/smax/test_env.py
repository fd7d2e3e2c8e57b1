"""SMAX: a recorded log compared with JaxMARL's own numbers, and a small battle worked out
by hand.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from decisionllm.datasets.store_writer import write_store
from decisionllm.eval.rollout import rollout
from decisionllm.teams.dataset import read, source
from decisionllm.teams.entity_layout import build_entity_schema
from decisionllm.teams.simulated_logs import generate
from decisionllm.teams.smax import dataset as smax
from decisionllm.teams.smax.env import SmaxTeams
from decisionllm.teams.smax.world import (
    OWN,
    STOP,
    TEACHERS,
    UNIT,
    Facts,
    Teacher,
    are_allowed,
    compile_map,
)
from lab.smax import Unmasked, verdicts
from tests.conftest import command, make_policy

pytestmark = pytest.mark.slow

FIXTURE = Path(__file__).parents[2] / "fixtures" / "smax"
KINDS = ("marine", "marauder", "stalker", "zealot", "zergling", "hydralisk")


class Duel:
    """Three allies against two marines, all in range of each other, none of which can walk. A hit
    takes half a marine; marine e hits ally e, or the first that lives, for 0.6 of it, all at once.
    Worlds whose seed is odd are out of time after two steps."""

    facts = Facts(3, 2, KINDS, (2, 3), (45.0, 125.0, 160.0, 150.0, 35.0, 80.0), "by hand")
    hit = 0.5

    def __init__(self, seeds, map="3m"):
        self.odd, E = np.asarray(seeds) % 2 == 1, len(seeds)
        self.health = np.ones((E, 5))
        self.places = np.zeros((E, 5, 2))
        self.time = 0
        self.kinds = np.broadcast_to([2, 2, 3], (E, 3))
        self.over, self.terminated, self.won = np.zeros((3, E), bool)
        self.alive = np.ones((E, 3), bool)
        self.taken = []

    @property
    def acting(self):
        return self.alive & ~self.over[:, None]

    @property
    def masks(self):
        enemies = np.broadcast_to(self.health[:, None, 3:] > 0, (len(self.odd), 3, 2))
        return np.concatenate(
            [np.broadcast_to(np.arange(5) == STOP, (len(self.odd), 3, 5)), enemies], -1
        )

    @property
    def observations(self):
        views = np.zeros((len(self.odd), 3, 4 * UNIT + OWN), np.float32)
        for e in range(2):
            at = (2 + e) * UNIT
            views[..., at] = self.health[:, None, 3 + e].clip(0)
            views[..., at + 1] = 0.1 + 0.1 * e
            views[..., at + 7] = 1
            views[..., at : at + UNIT] *= self.health[:, None, 3 + e, None] > 0
        views[..., -OWN] = self.health[:, :3]
        views[..., -OWN + 1 : -OWN + 3] = 0.25
        return views

    def step(self, actions):
        self.time += 1
        self.taken.append(actions)
        going = ~self.over
        before = self.health.copy()
        hits = are_allowed(self.masks, actions) & self.acting
        for w in np.flatnonzero(going):
            for i in range(3):
                if hits[w, i] and actions[w, i] > STOP:
                    self.health[w, 3 + actions[w, i] - 5] -= self.hit
            for e in range(2):
                if before[w, 3 + e] > 0:
                    standing = [e, *np.flatnonzero(before[w, :3] > 0)]
                    self.health[w, next(i for i in standing if before[w, i] > 0)] -= 0.6
        self.health = self.health.clip(0)
        ours = self.health[:, :3] > 0
        theirs = (self.health[:, 3:] > 0).any(1)
        won = going & ours.any(1) & ~theirs
        self.alive = np.where(going[:, None], ours, self.alive)
        self.terminated = self.terminated | (going & ~(ours.any(1) & theirs))
        self.won = self.won | won
        self.over = self.over | self.terminated | (self.odd & (self.time >= 2))
        return (before - self.health)[:, 3:].sum(1) / 2 + won


@pytest.fixture
def duel(monkeypatch):
    monkeypatch.setattr("decisionllm.teams.smax.dataset.Smax", Duel)


@pytest.fixture(scope="module")
def recorded():
    return read(FIXTURE / "log"), {
        name: np.array(x)
        for name, x in json.loads(
            (FIXTURE / "played_again.json").read_text(encoding="utf-8")
        ).items()
    }


def test_every_unit_has_the_return_of_its_team(recorded):
    log, world = recorded
    episodes = list(source(log).episodes)
    own, later = (
        np.array(x)
        for x in zip(
            *((e.rewards.sum(dtype=float), e.return_after_exit) for e in episodes), strict=True
        )
    )
    assert np.abs(own + later - world["returns"][[e.group for e in episodes]]).max() < 1e-5
    assert later.sum() > 0.3 * (own + later).sum(), (
        "without the rows after a death a third were lost"
    )


def test_the_dead_have_no_row_and_the_living_have_one(recorded):
    log, world = recorded
    episodes = list(source(log).episodes)
    assert len(episodes) == world["lives"].size
    length = world["lives"].max(1)  # of the battle, where a unit lived to its end
    ended = np.bincount(log.steps["group"])
    assert (length == ended).all()
    for e in episodes:
        assert (
            len(e.rewards) == world["lives"][e.group, e.agent]
            and e.start == 0
            and e.loss_mask.all()
        )
        assert e.terminated == (
            len(e.rewards) < ended[e.group]
            or e.group in log.steps["group"][log.steps["terminated"]]
        )


def test_no_recorded_action_is_forbidden_and_many_are(recorded):
    log, _ = recorded
    masks = log.agents["available"]
    assert (
        np.take_along_axis(masks, log.agents["action"][:, None], 1).all()
        and 0.2 < 1 - masks.mean() < 0.8
    )


def test_a_recorded_log_is_a_store_with_unit_types_and_enemies(tmp_path, recorded):
    store = write_store(tmp_path / "store", source(recorded[0], text="informative"))
    assert (
        store.spec.entity_schema == (("own", 12, 1), ("ally", 14, 6), ("enemy", 14, 6))
        and store.spec.num_actions == 10
    )
    assert sorted(task.split()[-1] for task in store.tasks) == ["stalker.", "zealot."]
    assert store.spec == source(recorded[0]).spec
    enemies = store.observations[:, 12 + 14 * 6 :].reshape(-1, 6, 14)
    reach = store.action_masks[:, STOP + 1 :]
    assert not (reach & (enemies[:, :5, 0] == 0)).any(), "an enemy that can be attacked is observed"
    assert (enemies[:, 5] == 0).all()


def test_focused_fire_wins_by_hand(duel):
    """Marine 0 falls in the first step and marine 1 in the second, in which ally 1 falls too: 1/2 +
    1/2 + 1.
    """
    env = SmaxTeams(2)
    episodes = rollout(env.baselines(0)["expert"], env, seed=0)
    assert [e.rewards.tolist() for e in episodes] == [[0.5, 1.5]] * 6
    assert env.score(episodes[::3]).tolist() == [100, 100] and [e.group for e in episodes] == [
        0,
        0,
        0,
        1,
        1,
        1,
    ]
    assert env.metrics(episodes[::3]) == {
        "return": 2.0,
        "deaths": 1.0,
        "out_of_time": 0.0,
        "decisions": 12,
        "illegal": 0,
    }


def test_the_dead_leave_the_batch_and_their_teams_rewards_go_on(duel, monkeypatch):
    """With half as hard a hit, allies 0 and 1 fall in step 2, which brings down marine 0; ally 2
    takes 1/8 a step and falls in step 4.
    """
    monkeypatch.setattr(Duel, "hit", 0.25)
    log = generate(smax.game("duel"), "expert", groups=2)
    episodes = list(source(log).episodes)
    assert [len(e.rewards) for e in episodes] == [2, 2, 4, 2, 2, 2], (
        "battle 1 is out of time after two steps"
    )
    assert [e.return_after_exit for e in episodes] == [0.25, 0.25, 0, 0, 0, 0]
    assert [e.terminated for e in episodes] == [True] * 5 + [False]
    assert [e.truncated for e in episodes] == [False] * 5 + [True]
    assert [e.action_masks[1].tolist() for e in episodes[:2]] == [[False] * 4 + [True] * 3] * 2
    assert not log.steps["won"].any() and log.steps["truncated"].sum() == 1
    env = SmaxTeams(2)
    played = rollout(env.baselines(0)["expert"], env, seed=0)
    for ours, logged in zip(played, episodes, strict=True):
        assert (
            ours.observations == schema_of(env, logged)
        ).all() and ours.rewards.tolist() == logged.rewards.tolist()
    assert (
        env.metrics(played[::3])["out_of_time"] == 0.5 and env.metrics(played[:1])["return"] == 0.75
    )
    assert sum(e.rewards.sum() for e in played[:1]) == 0.5, "its first unit died before the end"


def schema_of(env, episode):
    """The observations of a log of six places as those of an evaluation of three, which has room
    for three marines.
    """
    assert env.entity_schema == (("own", 12, 1), ("ally", 14, 3), ("enemy", 14, 3))
    own, allies, enemies = np.split(episode.observations, [12, 12 + 6 * 14], 1)
    return np.concatenate([own, allies[:, : 3 * 14], enemies[:, : 3 * 14]], 1)


def test_observations_have_the_entity_schema_of_the_log(duel):
    made = smax.load(map="duel", groups=3, text="informative")
    env = SmaxTeams(1, map="duel", text="informative")
    assert made.spec.entity_schema == env.entity_schema and {e.task for e in made.episodes} == set(
        env.tasks
    )
    assert (
        made.spec.observation_dim == env.reset(0).shape[1]
        and made.spec.num_actions == env.action_masks.shape[1]
    )
    assert build_entity_schema(env.meta, 3) == env.entity_schema


def test_one_unit_stands_still_from_the_step_of_the_crash_on(duel, monkeypatch):
    monkeypatch.setattr(Duel, "hit", 0.25)
    env = SmaxTeams(40, crash="0,1")
    env.begin = lambda seeds: Duel(2 * seeds)
    episodes = rollout(env.baselines(0)["expert"], env, seed=0)
    assert list(env.conditions("per_agent", False)) == [
        "per agent",
        "per agent, crash at 0",
        "per agent, crash at 1",
    ]
    taken = np.stack(env.world.taken[:2])  # (2, E, N)
    stood = (taken == STOP) & (np.arange(120)[:, None] >= 40)
    struck = stood[1, 40:].argmax(1)
    assert (stood.sum(2) == np.repeat([[0, 1, 0], [0, 1, 1]], 40, 1)).all()
    assert (struck[:40] == struck[40:]).all() and set(struck) == {0, 1, 2}, (
        "the same one under each crash"
    )
    assert (
        env.metrics(episodes[:1])["return"] == 0.75
        and env.metrics(episodes[120:240:3])["return"] < 0.75
    )


def test_a_forbidden_action_is_counted_and_does_nothing(duel):
    env = SmaxTeams(1)
    env.reset(0)
    env.step(np.array([[5.0], [5.0], [STOP]]))
    env.step(np.array([[5.0], [6.0], [STOP]]))
    assert env.illegal.tolist() == [1] and env.decisions.tolist() == [6]
    assert env.world.health[0, 3:].tolist() == [0, 0.5]


def test_no_policy_takes_a_forbidden_action_unless_unmasked(duel, monkeypatch):
    """Random weights would take one: the mask alone prevents it."""
    monkeypatch.setattr(Duel, "hit", 0.25)
    spec = smax.load(map="duel", groups=2).spec
    counts = {SmaxTeams: 0, Unmasked: 0}
    policy = make_policy(spec, head="discrete", decode="sample")
    for kind in counts:
        env = kind(20, map="duel")
        rollout(lambda tasks, e=env: policy.begin(tasks, e.horizon), env, seed=0)
        counts[kind] = env.illegal.sum()
    assert (
        counts[SmaxTeams] == 0
        and counts[Unmasked] > 0
        and list(env.conditions("per_agent", False)) == ["per agent, unmasked"]
    )


def view(enemies, own=(0.25, 0.5)):
    """The observation of a team of one: enemies as (health, x, y, type)."""
    made = np.zeros((1, 1, len(enemies) * UNIT + OWN), np.float32)
    for e, (health, x, y, kind) in enumerate(enemies):
        if health:
            made[0, 0, e * UNIT : e * UNIT + 3] = (health, x, y)
            made[0, 0, e * UNIT + 7 + kind] = 1
    made[0, 0, -OWN + 1 : -OWN + 3] = own
    return made


@pytest.mark.parametrize(
    ("enemies", "reach", "expert", "medium"),
    [
        # 75, 40.5 and 45 of health
        ([(0.5, 0.4, 0, 3), (0.9, 0.3, 0, 0), (0.3, 0.1, 0, 3)], [1, 1, 1], 6, 7),
        ([(0.5, 0.4, 0, 3), (0.9, 0.1, 0, 0), (0.2, 0.3, 0, 3)], [1, 0, 0], 5, 5),
        # down, to the closest in sight
        ([(0.5, 0.5, -0.6, 3), (0.9, 0.9, 0, 0), (0, 0, 0, 0)], [0, 0, 0], 2, 2),
        ([(0, 0, 0, 0)] * 3, [0, 0, 0], 1, 1),  # to the right, where the enemy began
    ],
)
def test_teachers_choose_by_their_observations(enemies, reach, expert, medium):
    class World:
        facts = Duel.facts
        alive = np.ones((1, 1), bool)
        observations = view(enemies)
        masks = np.array([1, 1, 1, 1, 1, *reach], bool)[None, None]

    for name, expected in (("expert", expert), ("medium", medium)):
        assert Teacher(World, TEACHERS.index(name), np.random.default_rng(0)).act(
            World
        ).tolist() == [[expected]]
    random = Teacher(World, TEACHERS.index("random"), np.random.default_rng(0))
    drawn = {int(random.act(World)[0, 0]) for _ in range(300)}
    assert drawn == set(np.flatnonzero(World.masks[0, 0]))


def test_a_mixed_log_has_a_third_of_each_teacher(duel):
    log = generate(smax.game("duel"), "mixed", groups=30)
    _, first = np.unique(log.agents["group"], return_index=True)
    assert np.bincount(log.agents["behaviour"][first]).tolist() == [10, 10, 10]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda: smax.load(log="clever"),
            "dataset.log: expected one of expert, medium, random, mixed, got 'clever'",
        ),
        (lambda: smax.load(noise=2.0), "noise of 0 .. 1, got 1500 and 2.0"),
        (lambda: SmaxTeams(2, crash="200"), "env.crash: expected 0 .. 100, got 200"),
    ],
)
def test_a_mistake_is_refused_by_name(duel, wrong, message):
    with pytest.raises(ValueError) as error:
        wrong()
    assert message in str(error.value)


def test_without_jaxmarl_the_error_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jaxmarl.environments.smax", None)
    compile_map.cache_clear()
    for call in (smax.load, lambda: SmaxTeams(2)):
        with pytest.raises(ImportError, match=r"pip install -e '\.\[smax\]'"):
            call()
    assert command("train", "experiment=smax") == 1
    assert "pip install -e '.[smax]'" in capsys.readouterr().err


def test_a_battle_is_drawn(duel, tmp_path):
    env = SmaxTeams(3, crash="0")
    episodes = rollout(env.baselines(0)["expert"], env, seed=0)
    env.draw(episodes, "a title").savefig(tmp_path / "battle.png")
    assert (tmp_path / "battle.png").stat().st_size > 5000


def test_runs_are_judged_by_their_rows():
    def row(protocol, score, policy="nano", illegal=0):
        return {
            "protocol": protocol,
            "score": score,
            "policy": policy,
            "illegal": illegal,
            "decisions": 1000,
        }

    plain = [row("per agent", 80), row("per agent", 82, "expert"), row("per agent", 0, "random")]
    crashed = [
        row(f"per agent, crash at {c}", s, p)
        for c, s in ((20, 40), (10, 20), (0, 0))
        for p in ("nano", "expert")
    ]
    lost = [row("per agent, unmasked", 0, illegal=800)]
    good = verdicts(plain, lost, crashed)
    assert all(met for met, _ in good.values()) and "80 %" in good["MA-5"][1]
    crashed[0]["score"] = 25
    bad = verdicts([row("per agent", 60, illegal=1), plain[1]], lost, crashed)
    assert not any(met for met, _ in bad.values())
