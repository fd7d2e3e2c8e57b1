"""Teachers that know logged days: a hindsight oracle, and a network trained by the gradient of the score through their replay.

Letters: M campaigns, D days, T = 48 steps, N = 48 advertisers, G multipliers of `days.GRID`.
A teacher needs traffic (a value and a price for each opportunity); a trajectory log does not suffice. Both act on the curves of
`days.Day`, where a campaign alone does not move the prices.
Source of imitating a hindsight oracle: OIL, "Optimized imitation learning for auto-bidding" (KDD 2025).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decisionllm.baselines.rules import OnlineLP
from decisionllm.envs.auction.campaign import STEPS
from decisionllm.envs.auction.days import GRID, Day
from decisionllm.envs.auction.market import CATEGORIES, PUBLISHED, industries
from decisionllm.envs.auction.observation import MIN_REMAINING

LOW, STRIDE = float(np.log(GRID[0])), float(np.log(GRID[1] / GRID[0]))
CLOCK = torch.tensor(PUBLISHED["clock"] / np.sum(PUBLISHED["clock"]) * PUBLISHED["opportunities"], dtype=torch.float32)


class Curves:
    """Days as sums before each step, `sums` (3, D, T + 1, N, G): cost, value and wins of each multiplier of GRID."""

    def __init__(self, days: Iterable[Day]) -> None:
        self.days = list(days)
        totals = [np.cumsum([day.cost, day.value, day.won], 1, np.float64).astype(np.float32) for day in self.days]
        self.sums = nn.functional.pad(torch.from_numpy(np.stack(totals, 1)), (0, 0, 0, 0, 1, 0))
        self.volume = torch.tensor(np.stack([day.volume for day in self.days]), dtype=torch.float32)
        self.mean_value = torch.tensor(np.stack([day.mean_value for day in self.days]), dtype=torch.float32)
        share = self.volume.sum(1, keepdim=True) / PUBLISHED["opportunities"]  # a day of fewer, each worth more
        self.clock_volume, self.value_unit = CLOCK * share, 5e-4 / share

    def held(self, day: Tensor, advertiser: Tensor, step: int, multipliers: Tensor) -> Tensor:
        """(3, M) cost, value and wins of holding multipliers (M,) through a step, linear in the logarithm of the multiplier."""
        at = ((torch.log(multipliers.clamp(min=1e-3)) - LOW) / STRIDE).clamp(0, len(GRID) - 1.001)
        low = at.detach().long()
        share = at - low
        below, above = (
            self.sums[:, day, step + 1, advertiser, k] - self.sums[:, day, step, advertiser, k] for k in (low, low + 1)
        )
        return below + share * (above - below)


@dataclass
class Campaigns:
    """M campaigns, each replayed alone on a day of `curves`, and how far they are. Tensors (M,), currency and conversions."""

    curves: Curves
    day: Tensor
    advertiser: Tensor
    budget: Tensor
    limit: Tensor

    def __post_init__(self) -> None:
        self.step = 0
        self.remaining, self.spend = self.budget.clone(), torch.zeros_like(self.budget)
        self.conversions, self.value = torch.zeros_like(self.budget), torch.zeros_like(self.budget)

    def bid(self, multipliers: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Bid in the next step; spend ends with the budget. The gradient of drawn conversions is that of their expectation.

        Args:
            multipliers: (M,) currency per conversion.
            generator: of Poisson draws; None: conversions are the expected ones.

        Returns:
            Spend, value, wins and conversions of the step, (M,) each.
        """
        bought = self.curves.held(self.day, self.advertiser, self.step, multipliers)
        cost, value, won = bought * (self.remaining / bought[0].clamp(min=1e-6)).clamp(max=1)
        made = value if generator is None else value + (torch.poisson(value.detach(), generator=generator) - value).detach()
        self.remaining, self.spend = (self.remaining - cost).clamp(min=0), self.spend + cost
        self.conversions, self.value, self.step = self.conversions + made, self.value + value, self.step + 1
        return cost, value, won, made

    def score(self) -> Tensor:
        """(M,) AuctionNet's score so far."""
        return penalised(self.conversions, self.spend, self.limit)

    def features(self) -> Tensor:
        """(M, 11): what the network reads. No price is among them."""
        t, curves, day = self.step, self.curves, self.day
        now, clock, unit = curves.volume[day, t], curves.clock_volume[day, t], curves.value_unit[day, 0]
        own = self.limit / self.budget
        return torch.stack([
            torch.full_like(now, 1 - t / STEPS), torch.log(self.budget / 3000), (self.limit - 95) / 25,
            torch.log(curves.mean_value[day, t, self.advertiser] / unit + 0.01), torch.log(now / clock + 1e-6),
            curves.volume[day, :t].sum(1) / curves.volume[day].sum(1), torch.log(CLOCK[t] / 1e4).expand_as(now),
            self.remaining / self.budget, self.conversions * own, self.conversions * own - self.spend / self.budget, self.value * own,
        ], 1)  # fmt: skip


def penalised(conversions: Tensor, spend: Tensor, limit: Tensor) -> Tensor:
    """AuctionNet's score, with gradients: conversions x min(1, (limit x conversions / spend)^2)."""
    return conversions * (limit * conversions / spend.clamp(min=1e-6)).clamp(max=1) ** 2


def oracle(campaigns: Campaigns) -> Tensor:
    """(M,) the multiplier of GRID that, held for the rest of this very day, would score most.

    With conversions K and spend S so far, and cost C and value V of the rest of the day: the most of (K + V) min(1, (limit (K + V) /
    (S + C))^2) where C is at most the remaining budget. With fixed prices one multiplier is the optimum of the whole rest.
    """
    c, at = campaigns, (campaigns.day, campaigns.step, campaigns.advertiser)
    cost, value = (sums[c.day, STEPS, c.advertiser] - sums[at] for sums in c.curves.sums[:2])  # (M, G)
    scores = penalised(c.conversions[:, None] + value, c.spend[:, None] + cost, c.limit[:, None])
    return torch.from_numpy(GRID).float()[scores.masked_fill(cost > c.remaining[:, None], -1).argmax(1)]


def draw(curves: Curves, count: int, generator: torch.Generator) -> Campaigns:
    """Campaigns of random days and advertisers; of three in five budget and limit are near a published pair, else any."""
    day = torch.randint(len(curves.days), (count,), generator=generator)
    advertiser, pair = torch.randint(48, (2, count), generator=generator)
    near, u, v = torch.rand(3, count, generator=generator)
    budgets, limits = (torch.tensor(PUBLISHED[name], dtype=torch.float32)[pair] for name in ("budgets", "target_cpa"))
    budget = torch.where(near < 0.6, budgets * (0.4 + 1.25 * u), 800 * 10**u)
    limit = torch.where(near < 0.6, limits * (0.9 + 0.2 * v), 50 + 90 * v)
    return Campaigns(curves, day, advertiser, budget, limit)


class Network(nn.Module):
    """Features -> multiplier, as a multiple of the limit. `fit` sets the mean and deviation of the features."""

    def __init__(self, size: int, hidden: int = 192) -> None:
        super().__init__()
        self.mean, self.deviation = torch.zeros(size), torch.ones(size)
        self.layers = nn.Sequential(
            nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, features: Tensor) -> Tensor:
        """(M, 11) -> (M,) log(multiplier / limit)"""
        scaled = ((features - self.mean) / self.deviation).clamp(-6, 6)
        return torch.as_tensor(self.layers(scaled)[:, 0].clamp(-3, 1.5))

    def act(self, campaigns: Campaigns) -> Tensor:
        """(M,) multipliers"""
        return campaigns.limit * torch.exp(self(campaigns.features()))


def fit(
    curves: Curves, *, seed: int = 0, rounds: int = 4, campaigns: int = 1500, updates: int = 250, gradient_updates: int = 400,
    gradient_campaigns: int = 384,
) -> Network:  # fmt: skip
    """Train the network: on labels of the oracle in its own shaken states and then in the network's, then on the score itself.

    Args:
        curves: the days.
        seed: of campaigns, draws and weights.
        rounds: of labelling.
        campaigns: of a round.
        updates: of a round, three times as many in the last.
        gradient_updates: on the mean score of the replay, divided by the square root of what the budget buys at the limit.
        gradient_campaigns: of such an update.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network, seen, labels = Network(11), [], []
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    for number in range(rounds):
        drawn = draw(curves, campaigns, generator)
        shake = torch.exp(0.25 * torch.randn(campaigns, generator=generator))
        for _ in range(STEPS):
            with torch.no_grad():
                label, features, open_ = oracle(drawn), drawn.features(), drawn.remaining >= MIN_REMAINING
                seen.append(features[open_])
                labels.append(torch.log(label / drawn.limit)[open_])
                drawn.bid(network.act(drawn) if number else label * shake, generator)
        x, y = torch.cat(seen), torch.cat(labels)
        if not number:
            network.mean, network.deviation = x.mean(0), x.std(0) + 1e-3
        last = number == rounds - 1
        for update in range(total := updates * (3 if last else 1)):
            optimizer.param_groups[0]["lr"] = (
                4e-4 * (1 - update / total) + 1e-5 if last else 1e-3 * (1 - number / rounds) + 1e-4
            )
            rows = torch.randint(len(x), (1024,), generator=generator)
            descend(optimizer, nn.functional.smooth_l1_loss(network(x[rows]), y[rows], beta=0.3))
    optimizer = torch.optim.Adam(network.parameters())
    for update in range(gradient_updates):
        optimizer.param_groups[0]["lr"] = 5e-4 * (1 - update / gradient_updates) + 1e-5
        drawn = draw(curves, gradient_campaigns, generator)
        for _ in range(STEPS):
            drawn.bid(network.act(drawn), generator)
        descend(optimizer, -(drawn.score() * (drawn.limit / drawn.budget).sqrt()).mean(), clip=1.0)
    return network


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, clip: float = torch.inf) -> None:
    """One step down the loss."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
    optimizer.step()


def best_constant(curves: Curves, day: Any, advertiser: Any, budget: Any, limit: Any) -> tuple[np.ndarray, np.ndarray]:
    """The best constant multiplier of campaigns in hindsight: chosen for the expected conversions of its day, scored with draws.

    Args:
        curves: D days.
        day: (M,) int, which of them.
        advertiser: (M,) int.
        budget: (M,) currency.
        limit: (M,) currency per conversion.

    Returns:
        The multiplier, of GRID and so 2.5 % apart, and its score, the mean over Poisson draws of the conversions, (M,) each.
    """
    numbers = (torch.tensor(np.asarray(x), dtype=torch.float32) for x in (budget, limit))
    campaigns = Campaigns(curves, torch.as_tensor(day), torch.as_tensor(advertiser), *numbers)
    multipliers = oracle(campaigns)
    for _ in range(STEPS):
        campaigns.bid(multipliers)
    counts = torch.arange(int(2 * campaigns.value.max()) + 50.0)[:, None]
    chances = torch.exp(torch.distributions.Poisson(campaigns.value.clamp(min=1e-9)).log_prob(counts))  # (counts, M)
    return multipliers.double().numpy(), (chances * penalised(counts, campaigns.spend, campaigns.limit)).sum(0).double().numpy()


def pooled_online_lp(days: Iterable[Day]) -> OnlineLP:
    """OnlineLP with one table for all of these days: the mean cost of the rest of a day, over days and advertisers of a category."""
    rest = np.mean([day.cost[::-1].cumsum(0, dtype=np.float64)[::-1] for day in days], 0)  # (T, N, G)
    cost = np.stack([rest[:, industries(48) == c].mean(1) for c in range(CATEGORIES)])  # (C, T, G)
    first = (np.arange(CATEGORIES)[:, None] * STEPS + np.arange(STEPS + 1)) * len(GRID)
    return OnlineLP(cost.ravel(), np.tile(GRID, CATEGORIES * STEPS), first)
