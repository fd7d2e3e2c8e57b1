"""The teachers: the oracle and the differentiable replay by hand, a network that learns, OnlineLP's
pooled table.
"""

import numpy as np
import pytest
import torch

from decisionllm.bidding import teacher
from decisionllm.bidding.logs import replay_days as days
from decisionllm.bidding.logs.replay_days import GRID
from decisionllm.bidding.market.market import BidderContext
from decisionllm.bidding.market.traffic import scaled_traffic
from decisionllm.bidding.teacher import (
    Campaigns,
    Curves,
    best_constant,
    oracle,
    pooled_online_lp,
)

FIRST, SECOND = 50, 100  # points of the grid


def steps(cheap=10, dear=10):
    """48 steps; each sells every advertiser a value of 0.5 for `cheap` from GRID[FIRST] on, and as
    much again for `dear` from GRID[SECOND] on.
    """
    values = np.full((2, 48), 0.5)
    prices = np.array([GRID[FIRST], GRID[SECOND]]) * 0.5
    scale = np.array([cheap, dear]) / prices
    day = days.build_day(0, [(values, values)] * 48, [prices] * 48, prices="test")
    cost = day.won * 0
    cost[..., FIRST:] += prices[0] * scale[0]
    cost[..., SECOND:] += prices[1] * scale[1]
    return days.Day(**vars(day) | {"cost": cost})


def campaigns(budget, limit, day=None):
    numbers = (torch.tensor([float(x)]) for x in (budget, limit))
    return Campaigns(Curves([day or steps()]), torch.tensor([0]), torch.tensor([0]), *numbers)


def test_the_oracle_takes_what_the_budget_pays_for():
    """All cheap ones cost 480 and bring 24; both kinds cost 960 and bring 48."""
    assert oracle(campaigns(1000, 100)).item() == pytest.approx(GRID[SECOND])
    assert oracle(campaigns(959, 100)).item() == pytest.approx(GRID[FIRST])
    assert oracle(campaigns(479, 100)).item() == pytest.approx(GRID[0]), (
        "nothing can be held to the end"
    )


def test_the_oracle_weighs_the_limit_against_volume():
    """Dear ones at 50: cheap alone 24 at a CPA of 20; both 48 at 60, worth 48 (limit / 60)^2: more
    from a limit of 42.4 on.
    """
    for limit, best in ((42, FIRST), (43, SECOND)):
        assert oracle(campaigns(1e6, limit, steps(dear=50))).item() == pytest.approx(GRID[best])


def test_the_oracle_counts_what_was_spent_and_converted():
    """24 steps in, 4 conversions for 240: the rest of the cheap ones makes 16 for 480, a CPA of 30;
    both 28 for 1,680, a CPA of 60. At a limit of 30: 16 against 28 / 4 = 7. With 12 conversions for
    nothing: both 36 for 1,440, a CPA of 40, 36 (3/4)^2 = 20.25 against 24. At a limit of 40: 16.9
        against 16 with nothing spent, 12.4 against 16 with 240."""
    for conversions, spend, limit, best in (
        (4, 240, 30, FIRST),
        (12, 0, 30, FIRST),
        (12, 0, 33, SECOND),
        (4, 0, 40, SECOND),
        (4, 240, 40, FIRST),
    ):
        c = campaigns(1e6, limit, steps(dear=50))
        c.step = 24
        c.conversions = torch.tensor([float(conversions)])
        c.spend = torch.tensor([float(spend)])
        assert oracle(c).item() == pytest.approx(GRID[best])


@pytest.mark.numeric
def test_the_replay_and_its_gradient_by_hand():
    """Halfway between two points of the grid half of the step is bought, and a point more buys all
    of it.
    """
    stride = np.log(GRID[1] / GRID[0])
    log = torch.tensor([np.log(GRID[FIRST]) - stride / 2], dtype=torch.float32, requires_grad=True)
    c = campaigns(100, 10)
    cost, value, won, made = c.bid(torch.exp(log))
    assert [x.item() for x in (cost, value, won, made)] == pytest.approx(
        [5, 0.25, 0.5, 0.25], abs=1e-3
    )
    (slope,) = torch.autograd.grad(cost.sum(), log, retain_graph=True)
    assert slope.item() == pytest.approx(10 / stride, rel=1e-3)
    c.bid(torch.tensor([GRID[SECOND]], dtype=torch.float32))
    assert (c.spend.item(), c.remaining.item(), c.value.item()) == pytest.approx(
        (25, 75, 1.25), abs=1e-2
    )
    assert c.score().item() == pytest.approx(1.25 * (10 * 1.25 / 25) ** 2, abs=1e-3), (
        "a CPA of twice the limit leaves a quarter"
    )
    for _ in range(10):
        c.bid(torch.tensor([GRID[SECOND]], dtype=torch.float32))
    assert c.spend.item() == pytest.approx(100) and c.value.item() == pytest.approx(
        1.25 + 75 / 20, abs=1e-2
    )


def test_drawn_conversions_have_the_gradient_of_their_mean():
    log = torch.tensor([np.log(GRID[FIRST]) - 0.01], dtype=torch.float32, requires_grad=True)
    slopes, total = [], 0.0
    for generator in (None, torch.Generator().manual_seed(0)):
        made = campaigns(1e6, 10).bid(torch.exp(log), generator)[3]
        slopes.append(torch.autograd.grad(made.sum(), log)[0].item())
    assert slopes[0] == slopes[1] > 0
    generator = torch.Generator().manual_seed(0)
    c = campaigns(1e9, 10)
    for _ in range(48):
        total += c.bid(torch.tensor([420.0]), generator)[3].item()
    assert total == c.conversions.item() == round(total) and total == pytest.approx(48, abs=28)


def test_the_best_constant_is_scored_with_draws():
    """48 expected conversions at a CPA of 20 and no limit in the way keep their mean; at the limit
    luck below it costs.
    """
    selected, score = best_constant(
        Curves([steps()]), np.array([0, 0]), np.array([0, 7]), [2000, 2000], [1000, 20]
    )
    assert selected == pytest.approx([GRID[SECOND]] * 2) and score[0] == pytest.approx(48, abs=1e-3)
    drawn = np.random.default_rng(0).poisson(48, 200_000)
    assert score[1] == pytest.approx((drawn * np.minimum(1, drawn / 48) ** 2).mean(), rel=0.01)


def test_the_pooled_table_is_the_mean_of_its_days():
    """The rest of a day costs 480 or 960 in one, five times the dear part in the other: 48 x (10,
    40) on average.
    """
    bidder = pooled_online_lp([steps(), steps(dear=50)])

    def context(step, left):
        numbers = [np.array([x]) for x in (1e3, 1e3, left, 0.0)]
        return BidderContext(step, np.array([3]), *numbers)

    for step, left, best in (
        (0, 479.0, FIRST),
        (0, 1919.0, SECOND),
        (24, 239.0, FIRST),
        (24, 241.0, SECOND),
    ):
        assert bidder.act(np.zeros((1, 16)), context(step, left)) == pytest.approx([GRID[best]])
    assert bidder.act(np.zeros((1, 16)), context(0, 1921.0)) == pytest.approx([1000]), (
        "the limit, where all of it costs less"
    )


@pytest.mark.numeric
@pytest.mark.slow
def test_a_fitted_network_beats_half_the_limit_and_repeats():
    traffic = list(scaled_traffic(1, 2000))
    curves = Curves(
        [
            days.build_day(
                1,
                traffic,
                [np.geomspace(0.1, 20, len(v)) for v, _ in traffic],
                prices="test",
                total=2000,
            )
        ]
    )
    few = {
        "rounds": 2,
        "campaigns": 200,
        "updates": 60,
        "gradient_updates": 5,
        "gradient_campaigns": 50,
    }
    first, second = (teacher.fit_network(curves, seed=3, **few) for _ in range(2))
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )

    def score(act):
        drawn = teacher.draw_campaigns(curves, 300, torch.Generator().manual_seed(9))
        with torch.no_grad():
            for _ in range(48):
                drawn.bid(act(drawn))
        return drawn.score().mean().item()

    assert score(oracle) > score(first.act) > 1.05 * score(lambda c: c.limit / 2)
