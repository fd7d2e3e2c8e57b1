"""Teams: windows of a group, one list of tokens a team, members that decide in turn, and a game
that shows whether they can agree.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from decisionllm.bidding import serve
from decisionllm.datasets import store_writer, windows
from decisionllm.policy.policy import Policy
from decisionllm.protocols import Source
from decisionllm.schema import Episode, History, Spec
from decisionllm.teams.session import TeamSession
from decisionllm.teams.tokenizer import POOL
from decisionllm.teams.windows import TeamSampler
from decisionllm.tokenizers import text
from lab import permutation
from tests.conftest import BACKBONES, MAX_RETURN, NANO, command, make_model, node

pytestmark = pytest.mark.numeric

DISCRETE = Spec(observation_dim=3, action_dim=1, horizon=12, num_actions=4)
CONTINUOUS = Spec(observation_dim=3, action_dim=2, horizon=12, low=(-2.0, 0.0), high=(2.0, 1.0))
TASKS = ["Walk to the goal in the north.", "Go south, and do it within 20 steps."]


def made(spec, stays, seed=0):
    """Groups of agents that stay from a step to before another: [[(0, 5), (2, 4)], ...] ->
    episodes; a team's reward is 1 a step.
    """
    rng, episodes = np.random.default_rng(seed), []
    for g, group in enumerate(stays):
        whole = max(end for _, end in group)
        for agent, (start, end) in enumerate(group):
            n = end - start
            chosen = rng.integers(4, size=(n, 1)) if spec.num_actions else rng.uniform(size=(n, 2))
            masks = np.ones((n, 4), bool) if spec.num_actions else None
            episodes.append(
                Episode(
                    rng.normal(size=(n, 3)).astype(np.float32),
                    chosen.astype(np.float32),
                    np.ones(n, np.float32),
                    group=g,
                    action_masks=masks,
                    agent=agent,
                    start=start,
                    return_after_exit=float(whole - end),
                    task=TASKS[agent % 2],
                )
            )
    return episodes


def sampler(path, spec, stays, chosen=None, **options):
    log = store_writer.write_store(path, Source(spec, made(spec, stays), {"name": "test"}))
    chosen = np.arange(len(log.lengths)) if chosen is None else chosen
    return TeamSampler(
        windows.load_steps(log), log, chosen, **{"T": 4, "batch_size": 16, "seed": 0} | options
    ), log


def batch_of(window, log):
    tasks = [*log.tasks, text.merge_team_texts(log.tasks)]  # as a sampler's
    return windows.collate(window, text.encode(text.own_tokenizer(), tasks), window.text_index)


def rows(window, expected):
    """A window of these rows alone."""
    return replace(
        window, **{name: part[expected] for name, part in vars(window).items() if part is not None}
    )


STAYS = [[(0, 6)] * 3, [(0, 6), (2, 5), (0, 3), (0, 6)], [(0, 4), (0, 6), (1, 6), (3, 6), (0, 2)]]


def test_a_window_holds_a_whole_group_over_the_same_steps(tmp_path):
    draw, log = sampler(tmp_path / "s", DISCRETE, STAYS)
    seen = set()
    for step in range(8):
        window = draw(step)
        for team in range(window.team[-1] + 1):
            members = rows(window, window.team == team)
            (group,) = set(log.group[members.episodes])
            begin = {
                int(t)
                for row, here in zip(members.timesteps - np.arange(4), members.mask, strict=True)
                for t in row[here]
            }
            assert len(begin) == 1  # one clock
            begin = begin.pop()
            assert sorted(log.agent[members.episodes]) == [
                agent
                for agent, (start, end) in enumerate(STAYS[group])
                if start < begin + 4 and end > begin
            ]
            for e, here, row, t, togo in zip(
                members.episodes,
                members.mask,
                members.observations,
                members.timesteps,
                members.returns_to_go,
                strict=True,
            ):
                start, end = STAYS[group][log.agent[e]]
                assert here.tolist() == [start <= begin + i < end for i in range(4)]
                np.testing.assert_array_equal(
                    row[here], log.episode(e).observations[t[here] - start]
                )
                # the team's, the dead's too
                assert (row[~here] == 0).all() and togo[here].tolist() == [6 - s for s in t[here]]
            assert (
                len(set(members.identity)) == len(members.identity)
                and members.identity.max() < POOL
            )
            tasks = {log.tasks[log.task[e]] for e in np.flatnonzero(log.group == group)}
            assert {draw.tasks[i] for i in members.text_index} == {text.merge_team_texts(tasks)}, (
                "of absent members too"
            )
            seen.add((int(group), begin))
        assert window.team.tolist() == sorted(window.team) and len(set(window.team)) == 16
    assert seen == {(g, t) for g in range(3) for t in range(6)}


def test_windows_of_teams_are_a_function_of_seed_and_step(tmp_path):
    draw, _ = sampler(tmp_path / "s", DISCRETE, STAYS)
    again, _ = sampler(tmp_path / "s", DISCRETE, STAYS)
    other, _ = sampler(tmp_path / "s", DISCRETE, STAYS, seed=1)
    for name, part in vars(draw(3)).items():
        np.testing.assert_array_equal(part, getattr(again(3), name) if part is not None else part)
    assert not np.array_equal(draw(3).episodes, other(3).episodes) and not np.array_equal(
        draw(3).episodes, draw(4).episodes
    )


def test_members_have_a_new_order_and_identity_in_each_window(tmp_path):
    draw, log = sampler(tmp_path / "s", DISCRETE, [[(0, 6)] * 3], batch_size=200)
    window = draw(0)
    orders = {tuple(row) for row in log.agent[window.episodes].reshape(-1, 3).tolist()}
    assert len(orders) == 6 and set(window.identity) == set(range(POOL))


def test_half_of_the_windows_are_split_into_teams_of_one(tmp_path):
    draw, log = sampler(tmp_path / "s", DISCRETE, [[(0, 6)] * 3], alone=0.5)
    window = draw(0)
    assert np.bincount(window.team).tolist() == [1] * 24 + [3] * 8
    assert (window.text_index[:24] == log.task[window.episodes[:24]]).all() and len(
        set(window.text_index[:24])
    ) == 2
    assert {draw.tasks[i] for i in window.text_index[24:]} == {text.merge_team_texts(TASKS)}


def test_members_not_chosen_are_inputs_but_no_targets(tmp_path):
    draw, _ = sampler(tmp_path / "s", DISCRETE, [[(0, 6)] * 3], chosen=[1])
    window = draw(0)
    assert set(window.episodes) == {0, 1, 2} and window.mask.any(1).all()
    np.testing.assert_array_equal(window.loss_mask, window.mask & (window.episodes == 1)[:, None])


def test_an_agent_that_returns_keeps_its_identity(tmp_path):
    first, again, other = made(DISCRETE, [[(0, 2), (3, 6), (0, 6)]])
    log = store_writer.write_store(
        tmp_path / "s", Source(DISCRETE, [first, replace(again, agent=0), other], {"name": "test"})
    )
    window = TeamSampler(windows.load_steps(log), log, [0, 1, 2], T=6, batch_size=40, seed=0)(0)
    for team in range(40):
        names = dict(
            zip(
                *(part[window.team == team] for part in (window.episodes, window.identity)),
                strict=True,
            )
        )
        assert 2 in names and (len(names) < 3 or names[0] == names[1] != names[2])


def test_teams_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"group 1: expected at most 16 agents \(the identities there are\), got 17",
    ):
        sampler(tmp_path / "a", DISCRETE, [[(0, 2)] * 3, [(0, 2)] * 17])
    with pytest.raises(
        ValueError,
        match=(
            "episode 1: expected an end within the horizon of 12 steps of its world, it begins "
            "at step 9 and has 4"
        ),
    ):
        sampler(tmp_path / "b", DISCRETE, [[(0, 2), (9, 13)]])


# the list of tokens, and what is seen where


def drawn(path, model_spec=DISCRETE, stays=STAYS, **options):
    """A batch of one window of each group, from its beginning."""
    draw, log = sampler(path, model_spec, stays, T=6, **options)
    episodes = np.arange(len(log.lengths))
    window = windows.cut_windows(draw.steps, episodes, -draw.start, 6)
    window = replace(
        window,
        timesteps=(window.timesteps + draw.start[:, None]) * window.mask,
        team=log.group,
        identity=draw.number,
        text_index=draw.team_text[log.group],
    )
    return window, log


def joint(spec=DISCRETE, **options):
    return make_model(
        spec, head="discrete" if spec.num_actions else "gaussian", execution="joint", **options
    )


@torch.no_grad()
def test_a_step_is_a_return_then_observations_then_queries(tmp_path):
    window, log = drawn(tmp_path / "s")
    model, batch = joint(), batch_of(window, log)
    tokens, lists, _ = model.team_tokens(batch)
    here = [[sum(start <= t < end for start, end in group) for t in range(6)] for group in STAYS]
    for g, n in enumerate(here):
        begin = np.cumsum([0, *(2 * m + 1 for m in n)])
        for row, (start, end) in zip(np.flatnonzero(log.group == g), STAYS[g], strict=True):
            for t in range(start, end):
                nth = sum(a <= t < b for a, b in STAYS[g][: log.agent[row]])
                assert lists.queries[row, t] == begin[t] + 1 + n[t] + nth
    # who is not there leaves no token
    assert tokens.shape[1] == max(sum(2 * m + 1 for m in n) for n in here)
    assert (tokens[0, 6 * 7 :] == 0).all() and (tokens[0, : 6 * 7] != 0).any(1).all()
    alone, lists, _ = model.team_tokens(replace(batch, team=None, identity=None))
    assert alone.shape[:2] == (12, 6 * 3) and lists.queries[0].tolist() == [2, 5, 8, 11, 14, 17]


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("spec", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
@torch.no_grad()
def test_teams_of_different_size_share_a_batch(backbone, spec, tmp_path):
    window, log = drawn(tmp_path / "s", spec)
    model = joint(spec, backbone=backbone)
    together = model.read(batch_of(window, log))
    assert np.bincount(window.team).tolist() == [3, 4, 5]
    for g in range(3):
        mine = window.team == g
        alone = model.read(batch_of(rows(window, mine), log))
        real = torch.from_numpy(window.mask[mine])
        assert (together[torch.from_numpy(mine)] - alone)[real].abs().max() < 1e-4


@torch.no_grad()
def test_a_sharded_backbone_is_read_once_whatever_the_teams(tmp_path):
    """Other processes, whose teams may all be of one or of several, wait for each time."""
    window, log = drawn(tmp_path / "s", stays=[[(0, 3)], [(0, 3), (1, 4)]])
    model = joint()
    calls = []
    model.backbone.register_forward_hook(lambda *_: calls.append(1))
    expected = model.read(batch_of(window, log))
    model.backbone.shard()
    actual = model.read(batch_of(window, log))
    assert len(calls) == 2 + 1
    real = torch.from_numpy(window.mask)
    assert (actual - expected)[real].abs().max() < 1e-4


@torch.no_grad()
def moved(model, batch, name, at):
    """How far each row's hidden states move when this part changes at these (row, step)."""
    part = getattr(batch, name).clone()
    part[at] = (part[at] + 1) % 4 if name == "actions" else part[at] + 1
    return (model.read(replace(batch, **{name: part})) - model.read(batch)).abs().amax(-1)


def test_a_member_depends_on_all_observations_and_earlier_actions(tmp_path):
    """Three members, six steps; the second one's part of step 2 changes.

    Rows: members; columns: steps.
    """
    window, log = drawn(tmp_path / "s", stays=[[(0, 6)] * 3])
    model, batch = joint(), batch_of(window, log)
    seen = moved(model, batch, "observations", (1, 2))
    assert (seen[:, :2] == 0).all() and (seen[:, 2:] > 1e-5).all()
    done = moved(model, batch, "actions", (1, 2))
    # the first and itself, where they decide
    assert (done[:, :2] == 0).all() and (done[:2, 2] == 0).all()
    assert (done[2, 2] > 1e-5).all() and (done[:, 3:] > 1e-5).all()
    paid = moved(model, batch, "returns_to_go", (1, 2))
    assert (paid[:, :2] == 0).all() and (paid[:, 2:] > 1e-6).all()


def test_teams_of_one_do_not_depend_on_each_other(tmp_path):
    """Teams of one, of the same weights: whatever the others see, do or are paid, not one bit
    moves.
    """
    window, log = drawn(tmp_path / "s", stays=[[(0, 6)] * 3])
    model = joint()
    batch = batch_of(replace(window, team=np.arange(3)), log)
    for name in ("observations", "actions", "returns_to_go"):
        change = moved(model, batch, name, (1, 2))
        assert (change[[0, 2]] == 0).all() and change[1, 3] > 1e-6


@torch.no_grad()
def test_a_team_of_one_does_not_depend_on_the_batch(tmp_path):
    window, log = drawn(tmp_path / "s")
    model = joint()
    parted = replace(window, team=np.arange(len(window.team)))
    together = model.read(batch_of(parted, log))
    for row in range(len(window.team)):
        here = torch.from_numpy(window.mask[row])
        alone = model.read(batch_of(rows(parted, [row]), log))
        assert (alone[0] - together[row])[here].abs().max() < 1e-5


@torch.no_grad()
def test_actions_outside_the_loss_mask_are_hidden(tmp_path):
    window, log = drawn(tmp_path / "s", stays=[[(0, 6)] * 3])
    loss_mask = window.mask.copy()
    loss_mask[1, 2] = False
    model = joint()
    batch = batch_of(replace(window, loss_mask=loss_mask), log)
    assert (moved(model, batch, "actions", (1, 2)) == 0).all() and moved(
        model, batch, "actions", (1, 1)
    ).max() > 1e-5
    each = -model.head(model.read(batch), batch.action_masks).log_prob(batch.actions)
    torch.testing.assert_close(model(batch)["nll"], each[batch.loss_mask].mean())
    other = batch.actions.clone()
    other[1, 2] = (other[1, 2] + 1) % 4
    assert model(replace(batch, actions=other))["nll"] == model(batch)["nll"]


def test_past_actions_can_be_hidden_from_their_agent(tmp_path):
    window, log = drawn(tmp_path / "s", stays=[[(0, 6)]])
    batch = batch_of(window, log)
    assert moved(joint(), batch, "actions", (0, 2))[0, 3:].min() > 1e-6
    assert (moved(joint(hide_actions=1.0), batch, "actions", (0, 2)) == 0).all()
    half = joint(hide_actions=0.5)
    assert moved(half, batch, "actions", (0, 2))[0, 3:].min() > 1e-6  # when it acts
    half.train()
    first = half.read(batch)
    assert not torch.equal(first, half.read(batch))


# acting


class World:
    """Teams of 3, 1, 4 and 2 whose members see drawn numbers and end at drawn steps."""

    def __init__(self, spec, seed=0, steps=10):
        rng = np.random.default_rng(seed)
        self.groups = np.array([0, 2, 0, 1, 2, 2, 3, 0, 2, 3])  # not side by side
        self.tasks = [TASKS[i % 2] for i in range(len(self.groups))]  # within a team too
        self.ends = np.array([10, 3, 6, 10, 10, 6, 2, 10, 8, 4])
        N = len(self.groups)
        self.observations = rng.normal(size=(N, steps, 3)).astype(np.float32)
        self.rewards = rng.normal(size=(4, steps)).astype(np.float32)[self.groups]
        self.masks = rng.random((N, steps, 4)) < 0.6
        self.masks[..., 0] |= ~self.masks.any(-1)
        self.masks = self.masks if spec.num_actions else None

    def play(self, session):
        """Every action, (N, steps, A), zeros where an agent had ended."""
        N, steps = self.observations.shape[:2]
        alive = np.arange(N)
        actions = np.zeros((N, steps, session.actions.shape[-1]), np.float32)
        for t in range(steps):
            masks = None if self.masks is None else self.masks[alive, t]
            actions[alive, t] = session.act(
                self.observations[alive, t], self.rewards[alive, t - 1] if t else None, masks
            )
            goes_on = self.ends[alive] > t + 1
            if not goes_on.all():
                session.select(goes_on)
            alive = alive[goes_on]
        return actions


def policy_of(model, window=5, stride=2, **options):
    return Policy(model, window, stride, 3.0, **{"execution": "joint"} | options)


@pytest.mark.parametrize(("window", "stride"), [(5, 2), (1, 1), (3, 3), (20, 10)])
@pytest.mark.parametrize(
    ("backbone", "returns"),
    [("qwen2", "return_to_go"), ("gpt2", "none"), ("gemma3", "return_to_go")],
)
def test_cached_decoding_of_teams_equals_the_plain_one(window, stride, backbone, returns):
    for spec in (DISCRETE, CONTINUOUS):
        world, played = World(spec), []
        policy = policy_of(joint(spec, backbone=backbone, condition_on=returns), window, stride)
        for cached in (True, False):
            played.append(
                world.play(TeamSession(policy, world.tasks, 10, None, world.groups, cached=cached))
            )
        np.testing.assert_allclose(played[0], played[1], atol=2e-4)
        assert np.median(played[0].std(1)) > 0.1  # they do not always do the same
        if spec is DISCRETE:
            here = np.arange(10) < world.ends[:, None]
            assert np.take_along_axis(world.masks, played[0].astype(int), 2)[here].all()


@pytest.mark.parametrize("spec", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_a_team_acts_as_it_was_trained_to(spec, tmp_path):
    """What a session decides, read again as a training window of the log that it made, is the mode
    at each step.
    """
    model, world = joint(spec), World(spec)
    policy = policy_of(model, 10, 5)
    returns = np.array(
        [
            world.rewards[world.groups == g][0, : world.ends[world.groups == g].max()].sum()
            for g in range(4)
        ]
    )
    session = TeamSession(policy, world.tasks, 10, returns[world.groups], world.groups)
    order = session.active  # before any agent has ended
    actions = world.play(session)
    episodes = []
    for i, g in enumerate(world.groups):
        n = world.ends[i]
        episodes.append(
            Episode(
                world.observations[i, :n],
                actions[i, :n],
                world.rewards[i, :n],
                group=int(g),
                task=world.tasks[i],
                action_masks=None if world.masks is None else world.masks[i, :n],
                agent=i,
                start=0,
                return_after_exit=float(returns[g] - world.rewards[i, :n].sum()),
            )
        )
    log = store_writer.write_store(tmp_path / "log", Source(spec, episodes, {"name": "test"}))
    draw = TeamSampler(windows.load_steps(log), log, np.arange(10), T=10, batch_size=1, seed=0)
    # the agents in the order in which the session let them decide, team by team
    in_turn = order.argsort()
    window = windows.cut_windows(draw.steps, in_turn, np.zeros(10, int), 10)
    text_index = draw.team_text[world.groups[in_turn]]
    window = replace(window, team=session.team, identity=session.identity, text_index=text_index)
    batch = batch_of(window, log)
    with torch.no_grad():
        mode = model.normalizer.raw_actions(model.head(model.read(batch), batch.action_masks).mode)
    np.testing.assert_allclose(mode[batch.mask], batch.actions[batch.mask], atol=2e-4)


def test_a_session_per_agent_equals_the_plain_policy():
    """The same weights in execution per agent: no groups are needed, and each row is a team
    of one.
    """
    for spec in (DISCRETE, CONTINUOUS):
        world = World(spec)
        world.ends[:] = 10
        policy = policy_of(joint(spec), execution="per_agent")
        session = policy.begin(world.tasks, 10)
        session.identity[:] = 0  # as of histories
        actions = world.play(session)
        for t in (0, 4, 7):
            histories = [
                History(
                    o[: t + 1],
                    a[:t],
                    r[:t],
                    None,
                    task,
                    action_masks=None if world.masks is None else world.masks[i, : t + 1],
                )
                for i, (o, a, r, task) in enumerate(
                    zip(world.observations, actions, world.rewards, world.tasks, strict=True)
                )
            ]
            np.testing.assert_allclose(policy.act(histories), actions[:, t], atol=2e-4)


def test_teams_are_independent_and_ended_members_stay_in_windows():
    model = joint(CONTINUOUS)
    world = World(CONTINUOUS)
    other = World(CONTINUOUS)
    other.observations[world.groups == 0] += 1
    other.observations[1, 1] += 1  # of group 2, gone from step 3 on
    play = lambda w: w.play(policy_of(model, 10, 5).begin(w.tasks, 10, None, w.groups))  # noqa: E731
    changed = np.abs(play(world) - play(other)).max(-1) > 1e-4
    assert not changed[[3, 6, 9]].any() and changed[[0, 2, 7], 0].all()
    assert not changed[[4, 5, 8], 0].any() and changed[4, 3:].any()


def test_a_policy_that_cannot_act_as_a_team_is_refused():
    with pytest.raises(
        ValueError,
        match="team.execution=joint: needs a model trained with team.execution=joint or both",
    ):
        policy_of(make_model(DISCRETE, head="discrete"))
    with pytest.raises(ValueError, match="team.execution=joint: the env names no groups of agents"):
        policy_of(joint()).begin([""], 5)
    alone = History(np.zeros((1, 3)), np.zeros((0, 1)), np.zeros(0))
    with pytest.raises(ValueError, match="team.execution=joint: histories name no team"):
        policy_of(joint()).act([alone])
    with pytest.raises(ValueError, match=r"groups: expected teams of at most 16, got 17"):
        policy_of(joint()).begin([""] * 17, 5, None, np.zeros(17))
    with pytest.raises(
        ValueError, match="team.execution: expected one of per_agent, joint, got 'both'"
    ):
        policy_of(joint(), execution="both")
    with pytest.raises(ValueError, match="MaxReturn: expected team.execution=per_agent"):
        joint(objective=MAX_RETURN)
    with pytest.raises(ValueError, match="ImaginedValue: expected team.execution=per_agent"):
        joint(planner=node("planner", "value"))
    with pytest.raises(
        ValueError, match="tokenizer.hide_actions: expected a share within 0 .. 1, got 2"
    ):
        joint(hide_actions=2)
    session = policy_of(joint()).begin(["", ""], 1, None, [0, 0])
    with pytest.raises(ValueError, match="^observations: expected finite numbers, got nan"):
        session.act(np.array([[0, 1, 2], [0, np.nan, 1]]))
    session.act(np.zeros((2, 3)))
    with pytest.raises(
        ValueError, match=r"session: expected at most 1 steps \(the horizon\), got one more"
    ):
        session.act(np.zeros((2, 3)), np.zeros(2))


# the game

GAME = (
    "head=discrete",
    "model.condition_on=none",
    "tokenizer.timesteps=none",
    "window=1",
    "optim.batch_size=64",
    "optim.warmup=30",
    "optim.lr=0.01",
    "steps=200",
    "log.every=100",
    "log.validation_batches=1",
    "optim.precision=no",
    "device=cpu",
    "log.tracker=none",
    "dataset._target_=lab.permutation.load",
    "env._target_=lab.permutation.PermutationGame",
)


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    """A training on games of three, with both executions."""
    path = tmp_path_factory.mktemp("games")
    words = ("team.execution=both", "name=both", f"run={path}/both", f"cache_dir={path}/data")
    assert command("train", *GAME, *NANO, "backbone.layers=1", *words) == 0
    return path


def agreed(run, out, *words):
    assert (
        command(
            "evaluate",
            f"run={run}",
            f"out={out}",
            "episodes=1000",
            "report=false",
            "act.decode=sample",
            "trust=[lab]",
            *words,
        )
        == 0
    )
    row = json.loads((out / "results.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return row["score"], row["policy"], row["execution"]


@pytest.mark.slow
def test_agents_that_decide_in_turn_agree_and_single_ones_cannot(games, tmp_path):
    score, name, execution = agreed(games / "both", tmp_path)
    # as it was trained, by default
    assert score >= 97 and (name, execution) == ("both+joint", "joint")
    score, name, execution = agreed(games / "both", tmp_path, "team.execution=per_agent")
    assert abs(score - 100 * 6 / 27) <= 4 and (name, execution) == ("both", "per_agent")


@pytest.mark.slow
def test_games_of_different_size_share_a_run(tmp_path):
    words = (
        "+dataset.agents=2-4",
        "+env.agents=2-4",
        "+dataset.games=200",
        "team.execution=both",
        "steps=2",
    )
    assert command("train", *GAME, *NANO, *words, f"run={tmp_path}/run") == 0
    assert agreed(tmp_path / "run", tmp_path, "episodes=50")[0] > 0
    with pytest.raises(
        ValueError, match="agents: expected a number above 0 or a range such as 2-5, got '5-2'"
    ):
        permutation.load(agents="5-2")


@pytest.mark.slow
def test_micro_batches_split_no_team_and_equal_the_whole_batch(tmp_path):
    lines = []
    for parts in (1, 4):
        words = (
            f"optim.accumulate={parts}",
            "steps=3",
            "log.every=1",
            "team.execution=both",
            "+dataset.agents=2-4",
            "+env.agents=2-4",
            "optim.batch_size=16",
            "objective=advantage",
            "objective.temperature=0.3",
        )
        assert command("train", *GAME, *NANO, *words, f"run={tmp_path}/{parts}") == 0
        lines.append(
            [
                json.loads(line)
                for line in (tmp_path / str(parts) / "metrics.jsonl")
                .read_text(encoding="utf-8")
                .splitlines()
            ]
        )
    for one, other in zip(*lines, strict=True):
        assert other == pytest.approx(one | {"seconds": other["seconds"]}, rel=1e-5)


def test_a_team_that_decides_in_turn_is_not_served(monkeypatch):
    policy = policy_of(joint(), config={"team": {"execution": "joint"}})
    monkeypatch.setattr(serve.loading, "load_policy", lambda *args, **options: policy)
    with pytest.raises(ValueError, match="run=runs/team: expected one whose agents can decide"):
        serve.load_run("runs/team")
