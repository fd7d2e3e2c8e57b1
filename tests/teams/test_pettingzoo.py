"""PettingZoo environments: equal to our own simple_spread, several teams and roles, masks, agents
that leave, and the command line.
"""

import json
import sys
from types import ModuleType

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from decisionllm.eval.rollout import rollout
from decisionllm.policy import loading
from decisionllm.policy.policy import Policy
from decisionllm.registry import build
from decisionllm.teams.dataset import collect, load, source, write
from decisionllm.teams.pettingzoo import env as pettingzoo_env
from decisionllm.teams.pettingzoo.env import PettingZooTeams
from decisionllm.teams.pettingzoo.scripted import to_space
from decisionllm.teams.spread.env import SpreadTeams
from decisionllm.teams.spread.world import Teacher
from decisionllm.trust import trust_modules
from tests.conftest import NANO, command, make_model

pytestmark = pytest.mark.slow


class Island:
    """Fishers and a thief, all over after step 3. fisher_1 is only there if the seed is even, and
    terminates in step 1, as the thief does if it is `caught`; action 1 is forbidden to fishers. A
    fisher gets its action, and 10 in the step after the thief (two actions, from 5 on) took 6."""

    possible_agents = ["fisher_0", "fisher_1", "thief_0"]

    def __init__(self, *, late=False, caught=False):
        self.late = late
        self.caught = caught

    def observation_space(self, agent):
        numbers = Box(-np.inf, np.inf, (2 + agent.startswith("thief"),))
        return (
            numbers
            if agent == "thief_0"
            else Dict({"observation": numbers, "action_mask": Box(0, 1, (3,))})
        )

    def action_space(self, agent):
        return Discrete(2, start=5) if agent == "thief_0" else Discrete(3)

    def reset(self, seed=None):
        self.t, self.seed, self.stolen = 0, seed, 0
        self.agents = [
            agent for agent in self.possible_agents if agent != "fisher_1" or seed % 2 == 0
        ]
        return self.seen(), {agent: {} for agent in self.agents}

    def seen(self):
        fisher = {
            "observation": np.array([self.t, self.stolen], np.float32),
            "action_mask": np.array([1, 0, 1], np.int8),
        }
        return {
            agent: np.full(3, self.t, np.float32) if agent == "thief_0" else fisher
            for agent in self.agents
        }

    def step(self, actions):
        assert actions.keys() == set(self.agents) and all(
            self.action_space(a).contains(x) for a, x in actions.items()
        )
        rewards = {
            a: 0.0 if a == "thief_0" else actions[a] + 10.0 * self.stolen for a in self.agents
        }
        self.stolen = int(actions.get("thief_0") == 6)
        self.t += 1
        mortal = ["fisher_1"]
        if self.caught and self.seed % 2 == 0:
            mortal.append("thief_0")
        terminated = {a: a in mortal and self.t == 2 for a in self.agents}
        truncated = {a: self.t == 4 for a in self.agents}
        self.agents = [a for a in self.agents if not (terminated[a] or truncated[a])]
        if self.late and self.t == 1 and "fisher_1" not in self.agents:
            self.agents = [*self.agents, "fisher_1"]
        return self.seen(), rewards, terminated, truncated, {a: {} for a in self.agents}


parallel_env = Island
ISLAND = "tests.teams.test_pettingzoo"
OPTIONS = {"id": ISLAND, "teams": {"thief": 1}, "horizon": 4}


def steal(observations, infos):
    """A thief that always takes."""
    return dict.fromkeys(observations, 6)


def fish(observations, infos):
    """Fishers that always take 2."""
    return dict.fromkeys(observations, 2)


class Always:
    """A player that always takes the same action."""

    def __init__(self, action):
        self.action = action

    def act(self, observations, rewards=None, action_masks=None):
        self.masks = action_masks
        return np.full((len(observations), 1), self.action, float)

    def select(self, rows):
        pass


@pytest.fixture
def from_zero(monkeypatch):
    """The starts of our own simple_spread, and of a log from seed 0."""
    monkeypatch.setattr(pettingzoo_env, "EVALUATION_SEEDS", 0)


def test_simple_spread_equals_our_own(tmp_path, from_zero):
    from mpe2 import simple_spread_v3

    blocks = [["own", 4, 1], ["landmark", 2, 3], ["agent", 2, 2], ["", 2, 2]]
    log = collect(
        simple_spread_v3.parallel_env(N=3),
        lambda seen, infos: dict.fromkeys(seen, 0),
        episodes=1,
        types={"agent": {"num_actions": 5, "observations": {"18": blocks}}},
    )
    write(tmp_path / "log", log)
    ours = SpreadTeams(4)
    theirs = PettingZooTeams(4, id="mpe2.simple_spread_v3", path=str(tmp_path / "log"))
    assert (
        theirs.entity_schema == ours.entity_schema
        and (theirs.groups == ours.groups).all()
        and theirs.horizon == 25
    )
    assert (ours.reset(0) == theirs.reset(0)).all()
    teacher = Teacher(ours.world, 0, np.random.default_rng(0))
    for _ in range(25):
        actions = teacher.act(ours.world).reshape(12, 1)
        (a, gains, *over) = ours.step(actions)
        (b, theirs_gains, *theirs_over) = theirs.step(actions)
        assert (a == b).all() and np.array_equal(over, theirs_over)
        np.testing.assert_allclose(gains, theirs_gains, rtol=1e-12)
    np.testing.assert_allclose(theirs.world_outcomes()["team_return"], ours.returns, rtol=1e-12)


def test_agents_leave_and_the_team_return_goes_on_by_hand():
    """Copy 0 has two fishers until step 1, copy 1 has one; both take 2, and 10 more after each
    theft.
    """
    env = PettingZooTeams(
        2, **OPTIONS, partners={1: f"{ISLAND}.steal"}, reference=[0, 50], text="informative"
    )
    player = Always(2)
    episodes = rollout(lambda tasks: player, env, seed=0)
    assert [e.rewards.tolist() for e in episodes] == [[2, 12, 6, 6], [2, 12], [2, 12, 12, 12]]
    assert [(e.group, e.terminated, e.truncated) for e in episodes] == [
        (0, False, True),
        (0, True, False),
        (1, False, True),
    ]
    assert player.masks.tolist() == [[True, False, True]] * 2 and env.num_actions == 3
    assert [e.observations[-1].tolist() for e in episodes] == [
        [3, 1, 1, 0],
        [1, 1, 1, 0],
        [3, 1, 1, 0],
    ]
    assert (
        env.tasks[0].endswith("A team of 2. At most 4 steps. Role: fisher.")
        and ". Alone. " in env.tasks[2]
    )
    assert env.conditions("joint", False) == {"joint, 1 tests.teams.test_pettingzoo.steal": [0, 2]}
    assert env.score(episodes[::2]).tolist() == [52, 76] and env.unit == ""
    assert env.metrics(episodes[::2]) == {"return": 32.0, "agents": 1.5, "steps": 4.0}


def test_own_rewards_and_a_partner_in_the_own_team():
    env = PettingZooTeams(1, **OPTIONS | {"teams": {}}, partners={"thief": "noop"}, returns="own")
    episodes = rollout(lambda tasks: Always(2), env, seed=0)
    assert [e.rewards.tolist() for e in episodes] == [[2, 2, 2, 2], [2, 2]]
    assert (
        env.score(episodes[:1]) == pytest.approx((4 + 4 + 2 + 2) / 3) and env.unit == "team return"
    )


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("teams", [{}, {"thief": 1}])
def test_a_world_goes_on_without_the_agents_of_the_policy(teams, copies, from_zero):
    """The thief of copy 0 is caught in step 1: its two fishers, of whom one leaves in step 1, get 2,
    12, 12 and 2 each; the fisher of copy 1 gets 2, 12, 12 and 12.
    """
    act = lambda seen, infos: {a: 6 if a == "thief_0" else 2 for a in seen}  # noqa: E731
    log = collect(Island(caught=True), act, episodes=copies, teams=teams)
    env = PettingZooTeams(
        copies,
        id=ISLAND,
        horizon=4,
        arguments={"caught": True},
        team=teams.get("thief", 0),
        teams=teams,
        partners={"fisher": f"{ISLAND}.fish"},
    )
    episodes = rollout(lambda tasks: Always(1), env, seed=0)
    assert [len(e.rewards) for e in episodes] == [2, 4][:copies]
    assert env.steps.tolist() == [4, 4][:copies]
    of_fishers = env.team_returns[:, 0] * env.counts[:, 0]
    assert of_fishers.tolist() == [28 + 14, 38][:copies]
    logged = log.steps["reward"].reshape(copies, 4, -1).sum(1)
    np.testing.assert_allclose(env.team_returns, logged, rtol=1e-12)


def test_the_environment_of_a_log_gives_its_episodes(tmp_path, from_zero):
    fixed = lambda seen, infos: {agent: 5 if agent == "thief_0" else 2 for agent in seen}  # noqa: E731
    write(tmp_path / "log", collect(Island(), fixed, episodes=2, teams={"thief": 1}, task="Fish."))
    log = load(path=str(tmp_path / "log"), text="informative")
    env = PettingZooTeams(
        2, id=ISLAND, path=str(tmp_path / "log"), partners={"thief": "noop"}, text="informative"
    )
    episodes = rollout(lambda tasks: Always(2), env, seed=0)
    for ours, logged in zip(episodes, log.episodes, strict=True):
        assert (
            ours.observations == logged.observations
        ).all() and ours.rewards.tolist() == logged.rewards.tolist()
        assert (ours.terminated, ours.task, ours.group) == (
            logged.terminated,
            logged.task,
            logged.group,
        )
    assert env.entity_schema == log.spec.entity_schema and env.horizon == log.spec.horizon
    thief = PettingZooTeams(2, id=ISLAND, path=str(tmp_path / "log"), team=1)
    logged = list(source(collect(Island(), fixed, episodes=2, teams={"thief": 1}), team=1).episodes)
    episodes = rollout(lambda tasks: Always(0), thief, seed=0)
    assert thief.action_masks.tolist() == [[True, True, False]] * 2
    assert [e.observations.tolist() for e in episodes] == [e.observations.tolist() for e in logged]


@pytest.mark.parametrize("continuous", [False, True])
def test_predators_act_and_the_prey_is_random(continuous):
    options = {
        "id": "mpe2.simple_tag_v3",
        "teams": {"agent": 1},
        "arguments": {"max_cycles": 5, "continuous_actions": continuous},
    }
    env = PettingZooTeams(2, **options, horizon=25)
    assert env.groups.tolist() == [0, 0, 0, 1, 1, 1] and env.entity_schema == (("own", 16 + 2, 1),)
    first, again = (rollout(env.baselines(0)["random"], env, seed=3) for _ in range(2))
    assert [e.observations.tolist() for e in first] == [e.observations.tolist() for e in again]
    assert {e.observations.shape for e in first} == {(5, 18)} and all(e.truncated for e in first)
    assert (first[0].observations[:, 16:] == [1, 0]).all() and first[0].actions.shape[1] == (
        5 if continuous else 1
    )
    actions = np.concatenate([e.actions for e in first])
    assert (
        (actions.min() >= 0 and actions.max() <= 1) if continuous else len(np.unique(actions)) == 5
    )
    prey = PettingZooTeams(2, **options, horizon=25, team=1)
    assert prey.groups.tolist() == [0, 1] and prey.entity_schema == (("own", 14 + 2, 1),)


def test_a_policy_acts_while_members_of_its_team_leave():
    env = PettingZooTeams(4, **OPTIONS)
    spec = source(
        collect(
            Island(),
            lambda seen, infos: {a: 5 if a == "thief_0" else 2 for a in seen},
            episodes=2,
            teams={"thief": 1},
        )
    ).spec
    for execution in ("per_agent", "joint"):
        policy = Policy(
            make_model(spec, head="discrete", execution=execution), 6, 3, 3.0, execution=execution
        )
        episodes = rollout(
            lambda tasks, p=policy: p.begin(tasks, 4, groups=env.groups), env, seed=0
        )
        assert [len(e.rewards) for e in episodes] == [4, 2, 4, 4, 2, 4]
        assert not np.isin(1, np.concatenate([e.actions for e in episodes])), (
            "action 1 is forbidden"
        )


def test_a_log_is_trained_on_and_evaluated_in_its_environment(tmp_path):
    from mpe2 import simple_tag_v3

    env = simple_tag_v3.parallel_env(max_cycles=6)
    random = lambda seen, infos: {agent: env.action_space(agent).sample() for agent in seen}  # noqa: E731
    write(
        tmp_path / "log",
        collect(env, random, episodes=20, teams={"agent": 1}, task="Catch the prey"),
    )
    words = (
        "dataset=team",
        f"dataset.path={tmp_path}/log",
        "env=pettingzoo",
        "env.id=mpe2.simple_tag_v3",
        "text=informative",
        "head=discrete",
        "+env.arguments={max_cycles:6}",
        "+env.partners={agent:noop}",
        "window=3",
        "optim.batch_size=8",
        "steps=2",
        "optim.precision=no",
        "device=cpu",
        "data.held_out=0.2",
        "log.tracker=none",
        f"cache_dir={tmp_path}/data",
    )
    assert command("train", *words, *NANO, f"run={tmp_path}/run") == 0
    for more in ((), ("+env.reference=[-10,30]",)):
        assert (
            command(
                "evaluate",
                f"run={tmp_path}/run",
                f"out={tmp_path}",
                "episodes=3",
                "report=false",
                *more,
            )
            == 0
        )
    rows = [
        json.loads(line)
        for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [(r["policy"], r["protocol"], r["n"], r["agents"], r["steps"]) for r in rows] == [
        ("nano", "per agent, agent noop", 3, 3, 6),
        ("random", "per agent, agent noop", 3, 3, 6),
    ] * 2
    assert rows[0]["score"] == pytest.approx(rows[0]["return"], abs=1e-3)
    assert rows[2]["score"] == pytest.approx(100 * (rows[2]["return"] + 10) / 40, abs=1e-3)


def test_groups_of_a_log_are_played_in_turn():
    acts = {
        name: lambda seen, infos, x=x: {a: 5 if a == "thief_0" else x for a in seen}
        for name, x in (("calm", 0), ("wild", 2))
    }
    log = collect(Island(), acts, episodes=3)
    assert (
        log.meta["behaviours"] == ["calm", "wild"]
        and log.agents["behaviour"].tolist() == (log.agents["group"] % 2).tolist()
    )
    fishers = log.agents["agent"] < 2
    assert (log.agents["action"][fishers] == 2 * (log.agents["group"][fishers] % 2)).all()


def test_a_world_is_won_by_return():
    """Fishers have (2 + 12 + 6 + 6) = 26 and 2 + 12 + 12 + 12 = 38, see above, the thief
    nothing.
    """
    for team, won in ((0, [0, 100]), (1, [100, 0])):
        partners = {0: f"{ISLAND}.fish", 1: f"{ISLAND}.steal"}
        env = PettingZooTeams(
            2, **OPTIONS, team=team, partners={1 - team: partners[1 - team]}, winner=[0, 30]
        )
        episodes = rollout(lambda tasks, action=2 - team: Always(action), env, seed=0)
        _, members = env.conditions("per_agent", False).popitem()
        worlds = [episodes[i] for i in members]
        assert env.score(worlds).tolist() == won and env.unit == "episodes won, %"
        means = {key: env.metrics(worlds)[key] for key in ("won", "return_0", "return_1")}
        assert means == {"won": 0.5, "return_0": 32, "return_1": 0}


@pytest.fixture(scope="module")
def island_run(tmp_path_factory):
    """A run that plays fishers and thief, as parts of a mixture."""
    folder = tmp_path_factory.mktemp("island")
    rng = np.random.default_rng(0)
    random = lambda seen, infos: {a: int(rng.integers(5, 7)) if a == "thief_0" else 2 for a in seen}  # noqa: E731
    types = {
        "fisher": {"num_actions": 3, "observations": {"2": [["own", 2, 1]]}},
        "thief": {"num_actions": 2, "observations": {"3": [["own", 2, 1], ["", 1, 1]]}},
    }
    write(folder / "log", collect(Island(), random, episodes=8, teams={"thief": 1}, types=types))
    part = "{{dataset:team,path:{}/log,team:{},env:{{env:pettingzoo,id:{}}}}}"
    parts = ",".join(
        f"{label}:{part.format(folder, team, ISLAND)}"
        for team, label in enumerate(("fish", "steal"))
    )
    assert (
        command(
            "train",
            "dataset=mixture",
            f"dataset.parts={{{parts}}}",
            "text=informative",
            "head=discrete",
            "window=2",
            "steps=20",
            "device=cpu",
            "optim.batch_size=8",
            "optim.precision=no",
            "log.tracker=none",
            f"cache_dir={folder}/data",
            *NANO,
            f"run={folder}/run",
        )
        == 0
    )
    return folder / "run"


def test_a_run_as_a_partner_plays_as_the_policy_does(island_run):
    """The same pairing from either side: the run beside scripted fishers, and as the thief that
    they meet.
    """
    policy = loading.load(island_run, part="steal", trust=["tests"])
    thief = build(policy.config["env"] | {"partners": {"fisher": f"{ISLAND}.fish"}}, 5)
    episodes = rollout(
        lambda tasks: policy.begin(tasks, thief.horizon, groups=thief.groups), thief, seed=3
    )
    node = loading.load(island_run, part="fish", trust=["tests"]).config["env"]
    fishers = build(node | {"partners": {"thief": str(island_run)}}, 5)
    rollout(lambda tasks: Always(2), fishers, seed=3)
    (rival,) = fishers.rivals
    for i, episode in enumerate(episodes):
        assert (rival.player.observations[i] == episode.observations).all()
        assert (rival.player.actions[i] == episode.actions).all() and (
            rival.player.rewards[i, :3] == episode.rewards[:3]
        ).all()
    assert (thief.team_returns == fishers.team_returns).all()
    assert [*fishers.conditions("joint", False)] == [f"joint, thief {island_run}"]
    assert rival.env.tasks[0].endswith("Role: thief.")
    both = build(node | {"partners": {1: str(island_run)}}, 2)
    mine = loading.load(island_run, part="fish", trust=["tests"])
    episodes = rollout(
        lambda tasks: mine.begin(tasks, both.horizon, groups=both.groups), both, seed=0
    )
    assert [len(e.rewards) for e in episodes] == [4, 2, 4]


def test_a_run_plays_on_without_the_agents_of_the_policy(island_run):
    node = loading.load(island_run, part="steal", trust=["tests"]).config["env"]
    env = build(node | {"arguments": {"caught": True}, "partners": {0: str(island_run)}}, 1)
    rollout(lambda tasks: Always(1), env, seed=0)
    (rival,) = env.rivals
    assert env.steps.tolist() == [4] and not rival.env.running.any()
    assert (rival.env.team_returns == env.team_returns).all()


def test_a_run_that_does_not_fit_is_refused_as_a_partner(island_run, tmp_path):
    with pytest.raises(
        ValueError,
        match=(
            "to play fisher_0, fisher_1, thief_0, got a run that plays fisher_0, fisher_1 or "
            "thief_0"
        ),
    ):
        PettingZooTeams(
            1,
            id="tests.teams.test_pettingzoo",
            horizon=4,
            team=1,
            teams={"thief": 0},
            partners={0: str(island_run)},
        )
    with (
        trust_modules(["tests"]),
        pytest.raises(
            ValueError,
            match=(
                "id=mpe2.simple_tag_v3, type in the log: expected one of fisher, thief, got 'adversary'"
            ),
        ),
    ):
        PettingZooTeams(
            1, id="mpe2.simple_tag_v3", horizon=4, teams={"agent": 1}, partners={1: str(island_run)}
        )
    with pytest.raises(FileNotFoundError, match="expected a run directory"):
        PettingZooTeams(1, **OPTIONS, partners={1: f"{tmp_path}/none"})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"id": "no.such.world"}, ImportError, "env.id: cannot import no.such.world"),
        (
            {"id": "json"},
            ValueError,
            "env.id: expected the path of a function, but json has no parallel_env",
        ),
        ({"arguments": {"size": 3}}, ValueError, "env.arguments={'size': 3}: "),
        ({"horizon": 0}, ValueError, "env: expected horizon"),
        ({"reference": [3]}, ValueError, "reference=[low,high], got 4 and [3]"),
        ({"reference": [3, 3]}, ValueError, "reference=[low,high], got 4 and [3, 3]"),
        (
            {"winner": [0]},
            ValueError,
            "expected winner=[team,return] without reference, got [0] and []",
        ),
        (
            {"winner": [0, 1], "reference": [0, 1]},
            ValueError,
            "without reference, got [0, 1] and [0, 1]",
        ),
        ({"returns": "sum"}, ValueError, "env.returns: expected one of team, own, mean, got 'sum'"),
        (
            {"partners": {"shark": "noop"}},
            ValueError,
            "env.partners: expected types or teams, of fisher, thief, [0, 1], got ['shark']",
        ),
        (
            {"partners": {"thief": "clever"}},
            ValueError,
            "env.partners: expected the path of a function, but no module has no clever",
        ),
        (
            {"partners": {"fisher": "noop"}},
            ValueError,
            "env.team=0: expected an agent to play in every copy, got none in copy 0",
        ),
        ({"team": 2}, ValueError, "env.team=2: expected an agent to play"),
        ({"teams": {"theif": 1}}, ValueError, "env.teams: expected one of fisher, thief"),
        ({"winner": [3, 0]}, ValueError, "env.winner: expected a team of [0, 1], got 3"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, error, message):
    with pytest.raises(error) as raised:
        PettingZooTeams(2, **OPTIONS | options)
    assert message in str(raised.value)


def test_an_environment_that_does_not_fit_its_log_is_refused(tmp_path):
    log = collect(
        Island(), lambda seen, infos: {a: 5 if a == "thief_0" else 2 for a in seen}, episodes=1
    )
    for types, message in (
        (
            {"shark": {"num_actions": 3}, "fisher": None},
            "type in the log: expected one of thief, shark, got 'fisher'",
        ),
        (
            {"fisher": {"num_actions": 4}},
            "type fisher: expected num_actions 4 as in the log, got 3",
        ),
        (
            {"fisher": {"num_actions": 3, "observations": {"5": [["own", 5, 1]]}}},
            "fisher_0: expected an observation of 5 numbers",
        ),
    ):
        meta = log.meta | {
            "types": {name: x for name, x in (log.meta["types"] | types).items() if x}
        }
        write(tmp_path / "log", type(log)(meta, log.steps, log.agents))
        with pytest.raises(ValueError, match=message):
            PettingZooTeams(1, id=ISLAND, path=str(tmp_path / "log"))
        (tmp_path / "log").rename(tmp_path / f"log-{len(list(tmp_path.iterdir()))}")


@pytest.mark.parametrize("high", [[5, 5], [1]])
def test_bounds_of_actions_that_are_not_those_of_the_log_are_refused(tmp_path, high):
    from mpe2 import simple_spread_v3

    env = simple_spread_v3.parallel_env(max_cycles=1, continuous_actions=True)
    middle = lambda seen, infos: {agent: np.full(5, 0.5) for agent in seen}  # noqa: E731
    types = {"agent": {"low": [0] * len(high), "high": high}}
    write(tmp_path / "log", collect(env, middle, episodes=1, types=types))
    expected = "type agent: expected .* as in the log, got .*; choose env.arguments, or"
    with pytest.raises(ValueError, match=expected):
        PettingZooTeams(
            1,
            id="mpe2.simple_spread_v3",
            arguments={"continuous_actions": True},
            path=str(tmp_path / "log"),
        )


def test_an_action_of_whole_numbers_is_the_nearest_within_the_bounds():
    taken = to_space(Box(0, 10, (2,), np.int32), np.array([2.999, 10.8]))
    assert taken.tolist() == [3, 10] and taken.dtype == np.int32


def test_an_agent_that_appears_after_the_start_is_refused():
    env = PettingZooTeams(2, **OPTIONS, arguments={"late": True})
    with pytest.raises(
        ValueError,
        match="expected no agent of the team to appear or return after the start, got fisher_1",
    ):
        rollout(lambda tasks: Always(2), env, seed=0)


class Cards(Island):
    """The island, where a fisher sees a card, and a thief the step and two cards."""

    def observation_space(self, agent):
        if agent == "thief_0":
            return Dict(step=Box(0, 9, (1,)), hand=Tuple([Discrete(2), MultiDiscrete([2, 2])]))
        return Dict(observation=Discrete(4), action_mask=MultiBinary(3))

    def seen(self):
        thief = {"step": np.array([self.t], np.float32), "hand": (1, np.array([0, 1]))}
        fisher = {"observation": self.t % 4, "action_mask": np.array([1, 0, 1], np.int8)}
        return {agent: thief if agent == "thief_0" else fisher for agent in self.agents}


def test_an_evaluation_lays_observations_out_as_the_log(tmp_path, from_zero, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "parallel_env", Cards)
    fixed = lambda seen, infos: {a: 5 if a == "thief_0" else 2 for a in seen}  # noqa: E731
    log = collect(Cards(), fixed, episodes=2, teams={"thief": 1})
    write(tmp_path / "log", log)
    for team, action, size in ((0, 2, 4), (1, 0, 7)):
        logged = list(source(log, team=team).episodes)
        partners = {0: "noop", 1: "noop"}
        partners.pop(team)
        if team:
            partners = {"fisher": f"{ISLAND}.fish"}
        env = PettingZooTeams(
            2, id=ISLAND, path=str(tmp_path / "log"), team=team, partners=partners
        )
        episodes = rollout(lambda tasks, a=action: Always(a), env, seed=0)
        ours = [e.observations.tolist() for e in episodes]
        assert ours == [e.observations.tolist() for e in logged]
        own = episodes[0].observations[:, :size]
        assert set(np.unique(own[:, :4])) == {0, 1}


def test_a_log_of_a_discrete_observation_as_a_number_is_refused(tmp_path, monkeypatch):
    """As versions before recorded it."""
    monkeypatch.setattr(sys.modules[__name__], "parallel_env", Cards)
    plain = Island()
    plain.observation_space = lambda agent: Box(0, 9, (3 if agent == "thief_0" else 2,))
    fixed = lambda seen, infos: {a: 5 if a == "thief_0" else 2 for a in seen}  # noqa: E731
    log = collect(plain, fixed, episodes=2, teams={"thief": 1})
    write(tmp_path / "log", log)
    message = "fisher_0: expected observations of observation 2, as in the log, got observation 4"
    with pytest.raises(ValueError, match=message):
        PettingZooTeams(1, id=ISLAND, path=str(tmp_path / "log"))
    for described in log.meta["types"].values():
        del described["observation_parts"]
    write(tmp_path / "old", log)
    with pytest.raises(
        ValueError, match="fisher_0: expected observations without parts, as an ear"
    ):
        PettingZooTeams(1, id=ISLAND, path=str(tmp_path / "old"))


def test_an_environment_of_aec_is_played(monkeypatch):
    from mpe2 import simple_spread_v3

    module = ModuleType("only_turns")
    module.env = simple_spread_v3.env
    monkeypatch.setitem(sys.modules, "only_turns", module)
    arguments = {"N": 2, "max_cycles": 3}
    turns = PettingZooTeams(2, id="only_turns", arguments=arguments, horizon=3)
    same = PettingZooTeams(2, id="mpe2.simple_spread_v3", arguments=arguments, horizon=3)
    one, other = (rollout(lambda tasks: Always(1), env, seed=0) for env in (turns, same))
    assert [e.observations.tolist() for e in one] == [e.observations.tolist() for e in other]
    assert [e.rewards.tolist() for e in one] == [e.rewards.tolist() for e in other]


def test_a_step_without_a_result_of_a_dead_agent_names_it(monkeypatch):
    class Silent(Island):
        def step(self, actions):
            observations, rewards, *rest = super().step(actions)
            return observations, {a: rewards[a] for a in self.agents}, *rest

    monkeypatch.setattr(sys.modules[__name__], "parallel_env", Silent)
    env = PettingZooTeams(2, **OPTIONS)
    with pytest.raises(
        ValueError, match="step failed .expected a reward of fisher_1, got those of"
    ):
        rollout(lambda tasks: Always(2), env, seed=0)
