"""Teachers that know logged days: a hindsight oracle, and a network trained by the gradient of the
score through their replay.

Letters: M campaigns, D days, T = 48 steps, N = 48 advertisers, G multipliers of `days.GRID`.
A teacher needs traffic (a value and a price for each opportunity); a trajectory log does not
suffice. Both act on the curves of `days.Day`, where a campaign alone does not move the prices.
Source of imitating a hindsight oracle: OIL, "Optimized imitation learning for auto-bidding" (KDD
2025).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from decisionllm.bidding.logs.replay_days import GRID, Day
from decisionllm.bidding.market.advertisers import (
    BUDGETS,
    CATEGORIES,
    PUBLISHED,
    TARGET_CPA,
    industries,
)
from decisionllm.bidding.market.bidders import OnlineLP
from decisionllm.bidding.market.campaigns import STEPS
from decisionllm.bidding.market.observation import MIN_REMAINING
from decisionllm.progress import track
from decisionllm.randomness import temporary_seed

LOW = float(np.log(GRID[0]))
STRIDE = float(np.log(GRID[1] / GRID[0]))
# opportunities of each step of a published day, (T,)
SHARES = PUBLISHED["clock"] / np.sum(PUBLISHED["clock"])
CLOCK = torch.tensor(SHARES * PUBLISHED["opportunities"], dtype=torch.float32)
WIDTH = 192  # of the hidden layers


class Curves:
    """Days as sums of cost, value and wins before each step: `sums` (3, D, T + 1, N, G)."""

    def __init__(self, days: Iterable[Day]) -> None:
        self.days = list(days)
        totals = []  # (3, T, N, G) up to each step, that step included
        for day in self.days:
            steps = [day.cost, day.value, day.won]
            totals.append(np.cumsum(steps, 1, np.float64).astype(np.float32))
        sums = torch.from_numpy(np.stack(totals, 1))
        self.sums = nn.functional.pad(sums, (0, 0, 0, 0, 1, 0))  # zeros before the first step
        self.volume = torch.tensor(np.stack([day.volume for day in self.days])).float()  # (D, T)
        means = np.stack([day.mean_value for day in self.days])
        self.mean_value = torch.tensor(means).float()  # (D, T, N)
        # a day of fewer opportunities, each worth more
        share = self.volume.sum(1, keepdim=True) / PUBLISHED["opportunities"]  # (D, 1)
        self.clock_volume = CLOCK * share
        self.value_unit = 5e-4 / share

    def interpolate(
        self, day: Tensor, advertiser: Tensor, step: int, multipliers: Tensor
    ) -> Tensor:
        """Interpolate cost, value and wins (3, M) of holding multipliers (M,) through a step.

        Between two multipliers of GRID they are linear in the logarithm.
        """
        at = (torch.log(multipliers.clamp(min=1e-3)) - LOW) / STRIDE
        at = at.clamp(0, len(GRID) - 1.001)
        low = at.detach().long()

        def conversions_at(index: Tensor) -> Tensor:
            before = self.sums[:, day, step, advertiser, index]
            return self.sums[:, day, step + 1, advertiser, index] - before

        below = conversions_at(low)
        return below + (at - low) * (conversions_at(low + 1) - below)


@dataclass
class Campaigns:
    """M campaigns in progress, each replayed alone on a day of `curves`.

    Tensors (M,), in currency and conversions.
    """

    curves: Curves
    day: Tensor
    advertiser: Tensor
    budget: Tensor
    limit: Tensor

    def __post_init__(self) -> None:
        self.step = 0
        self.remaining = self.budget.clone()
        self.spend = torch.zeros_like(self.budget)
        self.conversions = torch.zeros_like(self.budget)
        self.value = torch.zeros_like(self.budget)

    def bid(
        self,
        multipliers: Tensor,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Bid in the next step; spend ends with the budget.

        The gradient of drawn conversions is that of their expectation.

        Args:
            multipliers: (M,) currency per conversion.
            generator: draws conversions (Poisson); None: conversions are the expected ones.

        Returns:
            Spend, value, wins and conversions of the step, (M,) each.
        """
        bought = self.curves.interpolate(self.day, self.advertiser, self.step, multipliers)
        affordable = (self.remaining / bought[0].clamp(min=1e-6)).clamp(max=1)
        cost, value, won = bought * affordable
        made = value
        if generator is not None:
            drawn = torch.poisson(value.detach(), generator=generator)
            made = value + (drawn - value).detach()
        self.remaining = (self.remaining - cost).clamp(min=0)
        self.spend = self.spend + cost
        self.conversions = self.conversions + made
        self.value = self.value + value
        self.step += 1
        return cost, value, won, made

    def score(self) -> Tensor:
        """Return AuctionNet's score so far, (M,)."""
        return penalised_score(self.conversions, self.spend, self.limit)

    def features(self) -> Tensor:
        """Return the inputs of the network, (M, 11). No price is among them."""
        t = self.step
        day = self.day
        curves = self.curves
        volume = curves.volume[day]  # (M, T)
        now = volume[:, t]
        value = curves.mean_value[day, t, self.advertiser] / curves.value_unit[day, 0]
        per_budget = self.limit / self.budget
        columns = [
            torch.full_like(now, 1 - t / STEPS),
            torch.log(self.budget / 3000),
            (self.limit - 95) / 25,
            torch.log(value + 0.01),
            torch.log(now / curves.clock_volume[day, t] + 1e-6),
            curves.volume[day, :t].sum(1) / volume.sum(1),
            torch.log(CLOCK[t] / 1e4).expand_as(now),
            self.remaining / self.budget,
            # computed twice: one product for both would round the gradient otherwise
            self.conversions * per_budget,
            self.conversions * per_budget - self.spend / self.budget,
            self.value * per_budget,
        ]
        return torch.stack(columns, 1)


def penalised_score(conversions: Tensor, spend: Tensor, limit: Tensor) -> Tensor:
    """AuctionNet's score, with gradients: conversions x min(1, (limit x conversions / spend)^2)."""
    ratio = limit * conversions / spend.clamp(min=1e-6)
    return conversions * ratio.clamp(max=1) ** 2


def oracle(campaigns: Campaigns) -> Tensor:
    """Return the multipliers (M,) of GRID that, held for the rest of this very day, would score
    most.

    With conversions K and spend S so far, and cost C and value V of the rest of the day: the most
    of (K + V) min(1, (limit (K + V) / (S + C))^2) where C is at most the remaining budget. With
    fixed prices one multiplier is the optimum of the whole rest.
    """
    c = campaigns
    now = c.day, c.step, c.advertiser
    cost, value = (sums[c.day, STEPS, c.advertiser] - sums[now] for sums in c.curves.sums[:2])
    conversions = c.conversions[:, None] + value  # (M, G)
    scores = penalised_score(conversions, c.spend[:, None] + cost, c.limit[:, None])
    best = scores.masked_fill(cost > c.remaining[:, None], -1).argmax(1)
    return torch.from_numpy(GRID).float()[best]


def draw_campaigns(curves: Curves, count: int, generator: torch.Generator) -> Campaigns:
    """Campaigns of random days and advertisers.

    Three in five have a budget and a limit near a published pair, the others any.
    """
    day = torch.randint(len(curves.days), (count,), generator=generator)
    advertiser, pair = torch.randint(48, (2, count), generator=generator)
    near, u, v = torch.rand(3, count, generator=generator)
    budgets = torch.tensor(BUDGETS, dtype=torch.float32)[pair]
    limits = torch.tensor(TARGET_CPA, dtype=torch.float32)[pair]
    budget = torch.where(near < 0.6, budgets * (0.4 + 1.25 * u), 800 * 10**u)
    limit = torch.where(near < 0.6, limits * (0.9 + 0.2 * v), 50 + 90 * v)
    return Campaigns(curves, day, advertiser, budget, limit)


class Network(nn.Module):
    """Features -> multiplier, as a multiple of the limit. `fit_network` sets mean and deviation."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mean = torch.zeros(size)
        self.deviation = torch.ones(size)
        self.layers = nn.Sequential(
            nn.Linear(size, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Map features (M, 11) to log(multiplier / limit), (M,)."""
        scaled = ((features - self.mean) / self.deviation).clamp(-6, 6)
        return torch.as_tensor(self.layers(scaled)[:, 0].clamp(-3, 1.5))

    def act(self, campaigns: Campaigns) -> Tensor:
        """Return the multipliers, (M,)."""
        return campaigns.limit * torch.exp(self(campaigns.features()))


def fit_network(
    curves: Curves,
    *,
    seed: int = 0,
    rounds: int = 4,
    campaigns: int = 1500,
    updates: int = 250,
    gradient_updates: int = 400,
    gradient_campaigns: int = 384,
) -> Network:
    """Train the network: first on labels of the oracle, then on the score itself.

    The oracle labels states after its own shaken bids in the first round, after the network's in
    the others.

    Args:
        curves: the days.
        seed: draws campaigns, conversions and first weights.
        rounds: how often campaigns are played and labelled.
        campaigns: number in a round.
        updates: number in a round, three times as many in the last.
        gradient_updates: number of updates on the mean score of the replay, divided by the square
            root of what the budget buys at the limit.
        gradient_campaigns: number in such an update.
    """
    generator = torch.Generator().manual_seed(seed)
    with temporary_seed(seed):
        network = Network(11)
    features = []  # from all rounds, as are labels
    labels = []
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    for number in track(range(rounds), "teacher: labels of the oracle"):
        drawn = draw_campaigns(curves, campaigns, generator)
        player = network if number else None
        seen, log_ratios = label_campaigns(drawn, player, generator)
        features.append(seen)
        labels.append(log_ratios)
        x, y = torch.cat(features), torch.cat(labels)
        if not number:
            network.mean = x.mean(0)
            network.deviation = x.std(0) + 1e-3
        last = number == rounds - 1
        total = 3 * updates if last else updates
        for update in range(total):
            rate = 1e-3 * (1 - number / rounds) + 1e-4
            if last:
                rate = 4e-4 * (1 - update / total) + 1e-5
            rows = torch.randint(len(x), (1024,), generator=generator)
            loss = nn.functional.smooth_l1_loss(network(x[rows]), y[rows], beta=0.3)
            take_gradient_step(optimizer, rate, loss)
    optimizer = torch.optim.Adam(network.parameters())
    for update in track(range(gradient_updates), "teacher: score of the replay"):
        rate = 5e-4 * (1 - update / gradient_updates) + 1e-5
        drawn = draw_campaigns(curves, gradient_campaigns, generator)
        for _ in range(STEPS):
            drawn.bid(network.act(drawn), generator)
        weight = (drawn.limit / drawn.budget).sqrt()
        take_gradient_step(optimizer, rate, -(drawn.score() * weight).mean(), clip=1.0)
    return network


@torch.no_grad()
def label_campaigns(
    campaigns: Campaigns,
    network: Network | None,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Play M campaigns to the end: features (n, 11) and log(multiplier of the oracle / limit) (n,).

    The network bids; None: the oracle does, each campaign's bids times one random factor.
    """
    features = []
    labels = []
    shake = torch.exp(0.25 * torch.randn(len(campaigns.day), generator=generator))
    for _ in range(STEPS):
        best = oracle(campaigns)
        bids = campaigns.remaining >= MIN_REMAINING
        features.append(campaigns.features()[bids])
        labels.append(torch.log(best / campaigns.limit)[bids])
        multipliers = network.act(campaigns) if network else best * shake
        campaigns.bid(multipliers, generator)
    return torch.cat(features), torch.cat(labels)


def take_gradient_step(
    optimizer: torch.optim.Optimizer,
    rate: float,
    loss: Tensor,
    clip: float = torch.inf,
) -> None:
    """Take one step down the loss. rate: learning rate; clip: greatest norm of the gradient."""
    group = optimizer.param_groups[0]
    group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(group["params"], clip)
    optimizer.step()


def best_constant(
    curves: Curves,
    day: np.ndarray,
    advertiser: np.ndarray,
    budget: np.ndarray,
    limit: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The best constant multiplier of campaigns in hindsight.

    It is chosen for the expected conversions of its day, and scored with draws.

    Args:
        curves: D days.
        day: (M,) int, which of them.
        advertiser: (M,) int.
        budget: (M,) currency.
        limit: (M,) currency per conversion.

    Returns:
        The multiplier, of GRID and so 2.5 % apart, and its score, the mean over Poisson draws of
        the conversions, (M,) each.
    """
    campaigns = Campaigns(
        curves,
        day=torch.as_tensor(day),
        advertiser=torch.as_tensor(advertiser),
        budget=torch.tensor(budget, dtype=torch.float32),
        limit=torch.tensor(limit, dtype=torch.float32),
    )
    multipliers = oracle(campaigns)
    for _ in range(STEPS):
        campaigns.bid(multipliers)
    counts = torch.arange(int(2 * campaigns.value.max()) + 50.0)[:, None]
    poisson = torch.distributions.Poisson(campaigns.value.clamp(min=1e-9))
    chances = torch.exp(poisson.log_prob(counts))  # (counts, M)
    scores = chances * penalised_score(counts, campaigns.spend, campaigns.limit)
    return multipliers.double().numpy(), scores.sum(0).double().numpy()


def pooled_online_lp(days: Iterable[Day]) -> OnlineLP:
    """OnlineLP with one table for all of these days.

    It holds the mean cost of the rest of a day, over days and advertisers of a category.
    """
    costs = [day.cost[::-1].cumsum(0, dtype=np.float64)[::-1] for day in days]
    rest = np.mean(costs, 0)  # (T, N, G)
    cost = np.stack([rest[:, industries(48) == c].mean(1) for c in range(CATEGORIES)])  # (C, T, G)
    first = (np.arange(CATEGORIES)[:, None] * STEPS + np.arange(STEPS + 1)) * len(GRID)
    return OnlineLP(cost.ravel(), np.tile(GRID, CATEGORIES * STEPS), first)
