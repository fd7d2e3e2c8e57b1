"""AuctionNet's evaluation: every advertiser's day with its own budget and limit, all of them in one batch.

`replay` sets N campaigns, each alone, against market prices that do not answer: cheap, for choosing models. `market` gives the
policy a position of the reference market, whose 47 others answer. Both score conversions, less where they cost more than allowed;
their scores are not to be compared, since a replayed win is cheaper and always shown.
Source: AuctionNet (arXiv 2412.10798), `offline_eval` and `run_test.py`, each for all advertisers in place of the first.
"""

import re
from functools import lru_cache, partial
from itertools import tee
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from decisionllm.baselines import rules as bidders
from decisionllm.baselines.auctionnet_dt import StockDT
from decisionllm.config import listed, one_of, ranges
from decisionllm.datasets.auction import similar, texts
from decisionllm.envs.auction import market as auction
from decisionllm.envs.auction.campaign import MEANS, STATE, STEPS, Campaigns, score
from decisionllm.envs.auction.market import PUBLISHED
from decisionllm.envs.auction.observation import ObservationSpec
from decisionllm.envs.auction.replay import offers
from decisionllm.eval.report import figure
from decisionllm.registry import register

LEAST = PUBLISHED["least_remaining"]
# Mean scores of the 48 advertisers, of the original's code with weights that it trained: periods 7 and 8 replayed, 7 in the market.
PEERS = {
    "replay": {"DT": 27.9, "PID": 25.1, "target CPA": 29.2, "BC": 30.7, "IQL": 31.5, "OnlineLP": 37.1},
    "market": {"DT": 18.8, "target CPA": 22.1},
}


@register("env", "journal", text="${text}", observation="${dataset.observation}", context_features="${dataset.context_features}", reward="${dataset.reward}",
          features="${dataset.features}")  # fmt: skip
@register("env", "auction", text="${text}", observation="${dataset.observation}", context_features="${dataset.context_features}", reward="${dataset.reward}",
          features="${dataset.features}")  # fmt: skip
class Auction:
    """N campaigns: budget factors x repeats x periods x positions.

    text, observation, context_features, reward, features: as in the dataset.
    protocol: see above. periods: such as `7-8`. budgets: factors of the published ones, such as `0.5,1`.
    path: the folder of `lwc_period_7.parquet` and so on, or a pattern: market prices for the replay (timeStepIndex,
    leastWinningCost), an opportunity a row, in order; empty: those of our own market.
    positions: which of the 48 advertisers we are: `0,8,16`; `all`; empty: all in the replay, six in the market.
    share: in a market we are `one` of the positions, each in its own market, or `all` of them in one.
    repeats: with other draws; 0: in the replay until there are num_episodes of each budget, in a market 1.
    draws: `bernoulli`; or `expected`, which counts values, so that a replay has no noise.
    guard: hold every player to its limit once it has paid more, see Campaigns.guarded.
    opportunities: of a period. Fewer are worth more each, so that budgets and limits keep their meaning.
    """

    horizon, unit = STEPS, "conversions, less where they cost more than allowed"

    def __init__(
        self, num_episodes, *, protocol: str = "replay", periods: str = "7-8", budgets: str = "1", path: str = "",
        positions: str = "", share: str = "one", repeats: int = 0, draws: str = "bernoulli", guard: bool = False,
        opportunities: int = 500000, text: str = "none", observation: str = "auctionnet", context_features: str = "none", reward: str = "conversions", features: str = "repaired",
    ):  # fmt: skip
        one_of("env.protocol", protocol, ("replay", "market"))
        one_of("env.share", share, ("one", "all"))
        one_of("env.draws", draws, ("bernoulli", "expected"))
        for name, count, least in (("opportunities", opportunities, 1), ("repeats", repeats, 0)):
            if count < least:
                raise ValueError(f"env.{name}: expected a number from {least}, got {count}")
        if path and protocol == "market":
            raise ValueError(f"env.path: a market makes its own prices; give no path, or protocol=replay; got {path!r}")
        self.share, self.draws, self.guard, self.total, self.path = share, draws, guard, opportunities, path
        self.world_of = Replayed if protocol == "replay" else Among
        unlike = [
            word for word, so in (("shared", share == "all"), ("expected", draws == "expected"), ("guarded", guard)) if so
        ]
        self.protocol = ", ".join([protocol, *unlike])
        self.text, self.features = text, features
        self.spec = ObservationSpec(observation=observation, context_features=context_features, reward=reward, text=text)
        self.factors, days = factors(budgets), sorted(ranges("env.periods", periods))
        if not positions:
            positions = "all" if protocol == "replay" else "0,8,16,24,32,40"
        seats = sorted(ranges("env.positions", "0-47" if positions == "all" else positions))
        if seats[-1] > 47:
            raise ValueError(f"env.positions: expected advertisers from 0 to 47, got {seats[-1]}")
        if path:
            price_files(path, days)
        times = repeats or (-(-num_episodes // (len(days) * len(seats))) if protocol == "replay" else 1)
        who = np.array([(f, r, p, i) for f in range(len(self.factors)) for r in range(times) for p in days for i in seats])
        self.factor, self.repeat, self.period, self.advertiser = who.T
        self.budgets = np.array(self.factors)[self.factor] * np.array(PUBLISHED["budgets"])[self.advertiser]
        self.target_cpa = np.array(PUBLISHED["target_cpa"], float)[self.advertiser]
        self.category = auction.industries(48)[self.advertiser]
        self.tasks = []
        for rows in np.split(np.arange(len(who)), len(self.factors) * times):
            log = {"budget": self.budgets, "target_cpa": self.target_cpa, "category": self.category, "period": self.period}
            self.tasks += texts(SimpleNamespace(**{name: x[rows] for name, x in log.items()}), self.spec)
        self.published = {f"{name} (original's {protocol})": value for name, value in PEERS[protocol].items()}

    def target_returns(self, dataset, quantile):
        """A return to ask of each campaign, from those of the training log (its info) that had about its budget and limit: (N,)"""
        return similar(dataset["campaigns"], self.budgets, self.target_cpa, quantile)

    def reset(self, seed):
        self.campaigns, self.log = Campaigns(self.budgets, self.target_cpa, features=self.features), []
        self.world = self.world_of(self, seed)
        return self.observe()

    def observe(self):
        return self.spec.features(self.states(), self.campaigns.context())

    def states(self, features=None):
        """(N, 16), in the order of STATE"""
        value, volume = self.world.due(self.campaigns.now) if self.campaigns.now < STEPS else (0, 0)
        return self.campaigns.observe(value, volume, features=features)

    def step(self, actions):
        """Bid multipliers (N, 1) -> observations (N, S), rewards (N,), ended (N,): the budget is used up, truncated (N,): the day is over"""
        c, before = self.campaigns, self.paid()
        asked = np.where(c.remaining < LEAST, 0.0, np.asarray(actions, np.float64)[:, 0])
        asked = c.guarded(asked) if self.guard else asked
        brought = self.world.step(c.now, asked, c.remaining)
        if self.draws == "expected":
            brought["conversions"] = brought["exposed_value"]
            brought["conversion"] = brought["conversions"] / np.maximum(brought["volume"], 1)
        c.record(**brought)
        self.log.append((asked, c.spend, c.conversions))
        return self.observe(), self.paid() - before, c.remaining < LEAST, np.full(len(self.budgets), c.now == STEPS)

    def paid(self):
        """The return so far: (N,)"""
        return self.spec.total_reward(self.campaigns)

    def conditions(self):
        """What makes a row of the results: {protocol: the episodes, (M,) int}, one for each budget factor."""
        named = {
            f: self.protocol if factor == 1 else f"{self.protocol} {100 * factor:g} %" for f, factor in enumerate(self.factors)
        }
        return {name: np.flatnonzero(self.factor == f) for f, name in named.items()}

    def score(self, episodes):
        """AuctionNet's score of each episode of the last rollout, whatever its rewards were."""
        rows, c = [e.group for e in episodes], self.campaigns
        return score(c.conversions, c.spend, c.target_cpa)[rows]

    def metrics(self, episodes):
        """What lies behind the scores of these episodes, and the mean score by category and size of budget."""
        rows, c, scores = np.array([e.group for e in episodes]), self.campaigns, self.score(episodes)
        conversions, spend, limit = c.conversions[rows], c.spend[rows], c.target_cpa[rows]
        some = conversions > 0
        size = np.digitize(np.array(PUBLISHED["budgets"])[self.advertiser[rows]], (2500, 3500))
        mean = lambda x: round(float(x.mean()), 4)  # noqa: E731
        by = lambda kind, names: {name: mean(scores[kind == k]) for k, name in enumerate(names) if (kind == k).any()}  # noqa: E731
        return {
            "conversions": mean(conversions), "cpa_ratio": mean((spend / limit)[some] / conversions[some]) if some.any() else None,
            "budget_used": mean(spend / self.budgets[rows]), "over_limit": mean(spend > limit * conversions),
            "by_category": by(self.category[rows], map(str, range(PUBLISHED["categories"]))),
            "by_budget": by(size, ("small", "medium", "large")),
            "by_period": {str(p): mean(scores[self.period[rows] == p]) for p in np.unique(self.period)},
        }  # fmt: skip

    def draw(self, episodes, title, count=4):
        """How the day's money was used: spend, bid multiplier and cost of a conversion by step, a line a campaign for some, dark for
        all of them."""
        rows, c = np.array([e.group for e in episodes]), self.campaigns
        asked, spend, conversions = (np.stack(x)[:, rows] for x in zip(*self.log, strict=True))  # (T, M) each
        asked = np.where(asked == 0, np.nan, asked)  # no bid
        limit, hour = c.target_cpa[rows], np.arange(1, len(spend) + 1) / 2
        ratio = lambda paid, allowed: np.divide(paid, allowed, out=np.full_like(paid, np.nan), where=allowed > 0)  # noqa: E731
        some = slice(0, len(rows), max(len(rows) // count, 1))
        made = figure(11, 3.2)
        for axis, name, lines, mean in zip(
            made.subplots(1, 3),
            ("spend / budget", "bid multiplier", "cost of a conversion / limit, so far"),
            (spend / c.budgets[rows], asked, ratio(spend, limit * conversions)),
            (
                spend.sum(1) / c.budgets[rows].sum(),
                ratio(np.nansum(asked, 1), np.isfinite(asked).sum(1).astype(float)),
                ratio(spend.sum(1), conversions @ limit),
            ),
            strict=True,
        ):
            axis.plot(hour, lines[:, some], linewidth=0.8, alpha=0.5)
            axis.plot(hour, mean, color="black")
            axis.set_title(name, fontsize=9)
            axis.set_xlabel("hour")
            axis.set_ylim(bottom=0)
        made.axes[0].plot([0, 24], [0, 1], color="grey", linestyle=":", linewidth=0.8)
        made.axes[2].axhline(1, color="grey", linestyle=":", linewidth=0.8)
        made.axes[2].set_ylim(0, 3)
        made.suptitle(title, fontsize=9)
        return made

    def baselines(self, seed):
        """The rules and policies of the reference market, the rule that bids the limit and the stock DT: name -> begin(tasks)."""
        found = {"target CPA": bidders.TargetCPA(), StockDT.name: StockDT()}
        for _, bidder in bidders.roster():
            found.setdefault(getattr(bidder, "name", type(bidder).__name__), bidder)
        return {name: partial(Bidder, self, bidder) for name, bidder in found.items() if name != "Constant"}


class Bidder:
    """A bidder of the market as the player of all campaigns: it is shown what it was made for, whatever the policy is shown."""

    def __init__(self, env, bidder, tasks):
        self.env, self.bidder, self.rows = env, bidder, np.arange(len(tasks))
        if hasattr(bidder, "reset"):
            bidder.reset()

    def act(self, observations, rewards=None):
        c = self.env.campaigns
        none = np.zeros((0, len(c.budgets)))
        told = auction.Seats(c.now, self.env.category, c.budgets, c.target_cpa, c.remaining, c.conversions, none)
        made = self.bidder.act(self.env.states(getattr(self.bidder, "features", None)), told)
        return np.asarray(made)[self.rows, None]

    def select(self, rows):
        self.rows = self.rows[rows]


class Replayed:
    """Every campaign by itself against fixed market prices."""

    def __init__(self, env, seed):
        self.advertiser = env.advertiser
        self.keys = np.stack([np.full_like(env.period, seed), env.period, env.advertiser, env.repeat], 1)
        self.days = [(priced(int(p), env.path, env.total), np.flatnonzero(env.period == p)) for p in np.unique(env.period)]

    def due(self, step):
        """Mean value and number of the opportunities of a step: (N,) each"""
        value, volume = np.zeros((2, len(self.advertiser)))
        for day, rows in self.days:
            value[rows], volume[rows] = day.value[step, self.advertiser[rows]], day.volume[step]
        return value, volume

    def step(self, step, multipliers, remaining):
        """-> what Campaigns.record is told"""
        brought = {}
        for day, rows in self.days:
            made = day.step(step, self.advertiser[rows], multipliers[rows], remaining[rows], keys=self.keys[rows])
            for name, x in made.items():
                brought.setdefault(name, np.zeros(len(remaining)))[rows] = x
        return brought


class Among:
    """Markets of 48 in lock-step, in each of which some positions are ours. A market is left when ours have no money."""

    def __init__(self, env, seed):
        self.advertiser, self.worlds = env.advertiser, []
        own = np.arange(len(env.period)) if env.share == "one" else np.zeros_like(env.period)
        _, world = np.unique(np.stack([env.factor, env.repeat, env.period, own], 1), axis=0, return_inverse=True)
        shared = {p: iter(tee(traffic(p, env.total), len(np.unique(world[env.period == p])))) for p in np.unique(env.period)}
        for w in range(world.max() + 1):
            rows = np.flatnonzero(world == w)
            factor = np.ones(48)
            factor[env.advertiser[rows]] = env.factors[env.factor[rows[0]]]
            stream = next(shared[env.period[rows[0]]])
            market = auction.Market(
                bidders.roster(), budget_factor=factor, traffic=lambda period, stream=stream: stream,
                seed=int(np.random.SeedSequence([seed, env.repeat[rows[0]], env.advertiser[rows[0]]]).generate_state(1)[0]),
            )  # fmt: skip
            market.reset(int(env.period[rows[0]]))
            self.worlds.append((market, rows))

    def due(self, step):
        value, volume = np.zeros((2, len(self.advertiser)))
        for market, rows in self.worlds:
            states = market.observe()[self.advertiser[rows]]
            value[rows], volume[rows] = states[:, STATE.index("value now")], states[:, STATE.index("volume now")]
        return value, volume

    def step(self, step, multipliers, remaining):
        totals = ("spend", "conversions", "exposed_value", "volume")
        brought = {name: np.zeros(len(remaining)) for name in (*MEANS, *totals)}
        self.worlds = [(market, rows) for market, rows in self.worlds if (remaining[rows] >= LEAST).any()]
        for market, rows in self.worlds:
            made, seats = market.step(multipliers[rows], self.advertiser[rows]), self.advertiser[rows]
            for name, x in (*zip(MEANS, made.means, strict=True), *((name, getattr(made, name)) for name in totals)):
                brought[name][rows] = np.broadcast_to(x, 48)[seats]
        return brought


def traffic(period, total):
    return auction.opportunities(int(period), total=total, scale=PUBLISHED["opportunities"] / total)


@lru_cache(4)  # some 300 MB each
def priced(period, path, total):
    """Offers of a period at the prices of a file, or of our own market."""
    if not path:
        made = auction.play(bidders.roster(), period, market_prices=True, traffic=partial(traffic, total=total))
        return offers(period, traffic(period, total), made.market_prices)
    file = price_files(path, [period])[period]
    try:
        return offers(period, traffic(period, total), prices(file))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def price_files(path, periods):
    """{period: its file}"""
    given = Path(path).expanduser()
    found = sorted(given.glob("*")) if given.is_dir() else sorted(given.parent.glob(given.name))
    names = {int(m[1]): file for file in found if (m := re.fullmatch(r"lwc_period_(\d+)\.parquet", file.name))}
    absent = [p for p in periods if p not in names]
    if absent:
        raise FileNotFoundError(
            f"env.path: expected lwc_period_{absent[0]}.parquet in {path}, a folder or a pattern; "
            f"there are market prices of {', '.join(f'period {p}' for p in sorted(names)) or 'no period'}"
        )
    return {p: names[p] for p in periods}


def prices(file):
    """A parquet file of market prices -> an array a step, 48 of them."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(file)
    columns = ("timeStepIndex", "leastWinningCost")
    absent = [name for name in columns if name not in table.column_names]
    if absent:
        raise ValueError(f"expected columns {' and '.join(columns)}, got {', '.join(table.column_names)}")
    step, price = (table[name].to_numpy() for name in columns)
    if (np.diff(step.astype(int)) < 0).any() or len(step) and not 0 <= step[0] <= step[-1] < STEPS:
        raise ValueError(f"timeStepIndex: expected steps from 0 to {STEPS - 1} in order")
    wrong = np.flatnonzero(~(np.isfinite(price) & (price > 0)))
    if len(wrong):
        raise ValueError(f"leastWinningCost: row {wrong[0]}: expected a price above 0, got {price[wrong[0]]}")
    return np.split(price, np.searchsorted(step, np.arange(1, STEPS)))


def factors(given):
    """ "0.5,1" -> [0.5, 1.0]"""
    try:
        found = [float(x) for x in listed(given)]
    except ValueError:
        found = []
    if not found or not all(0 < x < np.inf for x in found) or len({*found}) < len(found):
        raise ValueError(f"env.budgets: expected factors above 0, such as 0.5,1 and each once, got {given!r}")
    return found
