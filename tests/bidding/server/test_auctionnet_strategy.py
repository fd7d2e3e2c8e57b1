"""The policy as a bidder of AuctionNet's simulator: in market and replay its bids equal an
evaluation of the same policy.
"""

import numpy as np
import pytest

from decisionllm.bidding.env import Auction
from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.market.campaigns import STEPS
from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.bidding.server.app import create_app
from decisionllm.bidding.server.auctionnet_strategy import (
    DecisionLLMBiddingStrategy,
    DecisionLLMRemoteStrategy,
)
from decisionllm.eval.rollout import rollout
from decisionllm.schema import Spec
from tests.bidding.server.test_http import MODEL_INFO, serving
from tests.conftest import make_policy, near

pytestmark = pytest.mark.numeric

SEAT, PERIOD = 9, "3"
HIGH = 300.0  # largest multiplier of these policies
OPTIONS = {"observation": "auctionnet", "context_features": "progress", "reward": "score"}


def world(protocol, budget=1.0, options=OPTIONS, text="informative"):
    return Auction(
        1,
        protocol=protocol,
        periods=PERIOD,
        positions=str(SEAT),
        budgets=budget,
        opportunities=2000,
        text=text,
        **options,
    )


class Constant:
    """A player with one multiplier for all tasks."""

    def __init__(self, tasks):
        self.multipliers = np.full((len(tasks), 1), 60.0)

    def act(self, observations, rewards=None, action_masks=None):
        return self.multipliers

    def select(self, rows):
        self.multipliers = self.multipliers[rows]


def run(options=OPTIONS, text="informative"):
    """A policy with random weights, in the units of a day of this advertiser."""
    (day,) = rollout(Constant, world("replay", options=options), seed=0)
    policy = make_policy(
        Spec(day.observations.shape[1], 1, STEPS, (0.0,), (HIGH,)), target_return=20.0
    )
    policy.model.normalizer.fit([(day.observations, np.cumsum(day.rewards[::-1])[::-1])])
    policy.info = {"dataset": options | {"text": text}}
    return policy


def who(env):
    return float(env.budgets[0]), "ours", float(env.target_cpa[0]), int(env.category[0])


def strategy_for(env, loaded):
    return DecisionLLMBiddingStrategy(*who(env), run=loaded)


class Seat:
    """The strategy at its position of our market, called as AuctionNet's simulator calls its
    agents.
    """

    def __init__(self, market, strategy, skip=()):
        self.market = market
        self.strategy = strategy
        self.skip = skip
        self.settle = market.settle
        self.history, self.multipliers = [[], [], [], [], []], []
        market.settle = self.record
        market.roster = [*market.roster, (np.array([SEAT]), self)]

    features = "repaired"

    def act(self, states, context):
        values = self.market.values[:, SEAT]
        sigmas = self.market.sigmas[:, SEAT]
        step = context.step
        self.strategy.remaining_budget = context.remaining[0]
        self.bids = (
            60.0 * values
            if step in self.skip
            else self.strategy.bidding(step, values, sigmas, *self.history)
        )
        assert self.bids.shape == values.shape
        self.multipliers.append(self.bids.sum() / values.sum())
        return np.zeros(1)  # `record` puts the bids in its place

    def record(self, bids, values, sigmas, noise, remaining, *, seed):
        bids = np.where(np.arange(bids.shape[1]) == SEAT, self.bids[:, None], bids)
        left, made = self.settle(bids, values, sigmas, noise, remaining, seed=seed)
        own = made.holder == SEAT  # (n, K), one slot of an opportunity at most
        won, slots = own & made.sold, np.arange(1, own.shape[1] + 1)
        auction = np.stack([won.any(1), (won * slots).sum(1), (won * made.cost).sum(1)], 1)
        impressions = np.stack([(own & made.exposed).any(1), (own & made.converted).any(1)], 1)
        step = (
            np.stack([values[:, SEAT], sigmas[:, SEAT]], 1),
            left[:, SEAT],
            auction,
            impressions,
            made.market_price,
        )
        for history, arrays in zip(self.history, step, strict=True):
            history.append(arrays)
        return left, made


def observed(session):
    return session.observations[0, : session.now[0]]


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        {
            "observation": "minimal",
            "context_features": "budget_and_cpa",
            "reward": "expected_value",
        },
    ],
)
def test_in_the_market_it_equals_an_evaluation_to_the_last_bit(options):
    loaded, env = run(options), world("market", options=options)
    (day,) = rollout(lambda tasks: loaded.begin(tasks, STEPS), env, seed=0)
    env.reset(0)
    strategy = strategy_for(env, loaded)
    seat = Seat(env.simulation.markets[0][0], strategy)
    for _ in range(len(day.rewards)):
        seat.market.step()
    assert len(day.rewards) > 20 and len(np.unique(day.actions)) > 20 and day.rewards.any()
    assert observed(strategy.session).tolist() == day.observations.tolist()
    assert strategy.session.actions[0, : len(day.actions)].tolist() == day.actions.tolist()
    assert seat.multipliers == pytest.approx(day.actions[:, 0].clip(0).tolist(), rel=1e-6)


def test_an_exhausted_budget_is_observed_as_in_an_evaluation():
    loaded, env = run(), world("market", budget=0.02)
    (day,) = rollout(lambda tasks: loaded.begin(tasks, STEPS), env, seed=0)
    env.reset(0)
    strategy = strategy_for(env, loaded)
    seat = Seat(env.simulation.markets[0][0], strategy)
    for _ in day.rewards:
        seat.market.step()
    left, values = np.concatenate(seat.history[1]), np.full(3, 0.01)
    assert (left == 0).any() and (left > 0).any() and day.observations[-1, 1] < 0.2, (
        "bids were taken back"
    )
    assert observed(strategy.session).tolist() == day.observations.tolist()
    strategy = strategy_for(env, loaded)
    assert (strategy.bidding(0, values, values, [], [], [], [], []) > 0).all()
    strategy.remaining_budget = 0.05
    assert strategy.bidding(0, values, values, [], [], [], [], []).tolist() == [0, 0, 0], (
        "too little is left"
    )


def test_in_a_replay_it_bids_like_an_evaluation():
    loaded, env = run(), world("replay", budget=20.0)
    (day,) = rollout(lambda tasks: loaded.begin(tasks, STEPS), env, seed=0)
    env.reset(0)
    strategy = strategy_for(env, loaded)
    history = [[], [], [], [], []]
    offers = env.simulation.days[0][0]
    for step, (prices, values, sigmas, _) in enumerate(offers.steps):
        bids = strategy.bidding(step, values[SEAT], sigmas[SEAT], *history)
        made = offers.step(
            step,
            env.entries.advertiser,
            strategy.session.actions[:, step, 0].astype(float),
            env.budgets,
            keys=env.simulation.keys,
        )
        won = bids >= prices
        assert won.sum() == round(made["won"][0] * len(prices)), "the budget is never short"
        converted = np.zeros(len(prices))
        # which of them, no bidder can tell
        converted[np.flatnonzero(won)[: int(made["conversions"][0])]] = 1
        strategy.remaining_budget -= prices[won].sum()
        arrays = (
            np.stack([values[SEAT], sigmas[SEAT]], 1),
            bids,
            np.stack([won, won, prices], 1),
            np.stack([won, converted], 1),
            prices,
        )
        for log, x in zip(history, arrays, strict=True):
            log.append(x)
    assert len(np.unique(day.actions)) > 20
    # a replay adds up in another order
    near(observed(strategy.session), day.observations, 1e-6, axis=0)
    near(strategy.session.actions[0], day.actions, scale=HIGH)


def test_it_can_start_in_the_middle_and_skip_steps():
    loaded = run()
    pairs = []
    for skip in ((), range(10)):
        env = world("market")
        env.reset(0)
        strategy = strategy_for(env, loaded)
        seat = Seat(env.simulation.markets[0][0], strategy, skip=skip)
        for _ in range(12):
            seat.market.step()
        late = strategy_for(env, loaded)
        late.remaining_budget = strategy.remaining_budget
        before = [steps[:11] for steps in seat.history]
        values = seat.history[0][11]
        bids = late.bidding(11, values[:, 0], values[:, 1], *before)
        assert observed(late.session).tolist() == observed(strategy.session).tolist()
        pairs.append((seat.multipliers[11], bids.sum() / values[:, 0].sum()))
        near(late.session.actions[0, :12], strategy.session.actions[0, :12], scale=HIGH)
    near(*np.transpose(pairs), scale=HIGH)
    assert abs(np.diff(np.array(pairs)[:, 0])) > 1e-3, "skipped steps are observed"


def test_a_period_begins_with_the_settings_of_the_simulator():
    loaded, env = run(), world("market")
    env.reset(0)
    first = strategy_for(env, loaded)
    seat = Seat(env.simulation.markets[0][0], first)
    for _ in range(3):
        seat.market.step()
    again = DecisionLLMBiddingStrategy(run=loaded)
    assert (again.budget, again.cpa, again.category) == (100, 2, 1)
    for strategy in (first, again):  # one has played, one is new
        strategy.budget = 3000.0
        strategy.cpa = 90.0
        strategy.category = 4
        strategy.reset()
        assert strategy.remaining_budget == 3000
    values = np.linspace(0.001, 0.01, 5)
    ours, fresh = (
        strategy.bidding(0, values, values, [], [], [], [], []).tolist()
        for strategy in (first, again)
    )
    assert ours == fresh and again.session.tasks == [
        "Auction, advertiser of category 4. Bid for impressions over one day of 48 steps. Get as "
        "many conversions as you can within a medium budget of 3000, at a moderate cost limit "
        "of 90 for each."
    ]


def test_the_remaining_budget_of_the_simulator_counts():
    strategy = DecisionLLMBiddingStrategy(100.0, cpa=10.0, run=run())
    value = np.array([0.5])
    strategy.bidding(0, value, value, [], [], [], [], [])
    results = [np.array([[0.5, 0.0]])], [[5.0]], [[[1, 1, 4.0]]], [[[1, 1]]], [[4.0]]
    strategy.remaining_budget -= 7.0  # 4 by the results
    strategy.bidding(1, value, value, *results)
    assert strategy.campaign.remaining == 93 and strategy.campaign.totals.spend.tolist() == [7]
    assert strategy.campaign.totals.conversions.tolist() == [1] and observed(strategy.session)[
        1, 1
    ] == np.float32(0.93)


def test_a_step_without_opportunities_is_a_step():
    strategy = DecisionLLMBiddingStrategy(100.0, cpa=10.0, run=run())
    none = np.zeros(0)
    assert strategy.bidding(0, none, none, [], [], [], [], []).shape == (0,)
    assert strategy.bidding(
        1, none, none, [np.zeros((0, 2))], [none], [np.zeros((0, 3))], [np.zeros((0, 2))], [none]
    ).shape == (0,)
    assert strategy.campaign.totals.now == 1 and np.isfinite(observed(strategy.session)).all()


def test_wrong_arguments_are_refused_by_name(monkeypatch):
    monkeypatch.delenv("DECISIONLLM_RUN", raising=False)
    with pytest.raises(
        ValueError,
        match="run: expected a run directory, got none; give run=..., or set DECISIONLLM_RUN",
    ):
        DecisionLLMBiddingStrategy()
    of_maze = run()
    of_maze.info = {"dataset": {"name": "maze"}}
    with pytest.raises(ValueError, match="expected a run of an auction dataset, got one of 'maze'"):
        DecisionLLMBiddingStrategy(run=of_maze)
    strategy = DecisionLLMBiddingStrategy(run=run())
    value = np.array([0.5])
    with pytest.raises(ValueError, match="historyBid: expected 1 steps before step 1, got 0"):
        strategy.bidding(1, value, value, [[[0.5, 0]]], [], [[[0, 0, 0]]], [[[0, 0]]], [[1.0]])
    with pytest.raises(
        ValueError,
        match=r"historyImpressionResult: expected finite numbers of shape \(1, 2\), one row an opp.*got \(1,\)",
    ):
        strategy.bidding(1, value, value, [[[0.5, 0]]], [[1.0]], [[[0, 0, 0]]], [[0]], [[1.0]])
    with pytest.raises(ValueError, match="historyLeastWinningCost: expected finite numbers"):
        strategy.bidding(
            1, value, value, [[[0.5, 0]]], [[1.0]], [[[0, 0, 0]]], [[[0, 0]]], [[np.nan]]
        )


def test_a_policy_of_served_texts_needs_a_text():
    loaded = run(text="served")
    with pytest.raises(ValueError, match="text=served: this policy has no text template"):
        DecisionLLMBiddingStrategy(run=loaded)
    strategy = DecisionLLMBiddingStrategy(run=loaded, text="Bid high.")
    value = np.array([0.5])
    strategy.bidding(0, value, value, [], [], [], [], [])
    assert strategy.session.tasks == ["Bid high."]


@pytest.mark.parametrize("token", [None, "secret"])
def test_behind_a_server_it_bids_the_same(token, monkeypatch):
    loaded, env = run(), world("market")
    made = []
    monkeypatch.setenv("DECISIONLLM_TOKEN", token or "")
    with serving(
        create_app(
            loaded,
            MODEL_INFO,
            ObservationSpec.from_info(loaded.info["dataset"]),
            Journal(),
            token=token,
        )
    ) as client:
        remote = DecisionLLMRemoteStrategy(*who(env), url=client.base_url)
        for strategy in (remote, strategy_for(env, loaded)):
            env.reset(0)
            seat = Seat(env.simulation.markets[0][0], strategy)
            for _ in range(12):
                seat.market.step()
            made.append(seat)
        first = remote.campaign
        remote.reset()
        values = np.full(3, 0.01)
        assert (
            remote.bidding(0, values, values, [], [], [], [], []).shape == (3,)
            and remote.campaign != first
        ), "another period"
        with pytest.raises(ValueError, match="/v1/bid: 409 .*expected 1"):
            remote.bidding(
                2,
                values,
                values,
                *([step] * 2 for step in (made[0].history[i][0] for i in range(5))),
            )
        remote.client.close()
    remote, local = made
    near(remote.multipliers, local.multipliers, scale=HIGH)
    assert len(np.unique(local.multipliers)) == 12 and np.concatenate(local.history[3]).any()
