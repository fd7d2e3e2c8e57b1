"""AuctionNet's evaluation: every advertiser's day with its own budget and target CPA, all of them in one batch.

`replay` runs N campaigns, each alone, against fixed market prices: cheap, for choosing models. `market` gives the policy a position of the
reference market, whose 47 other bidders react. Both score conversions with a penalty for exceeding the target CPA; their scores are not
comparable, since a replayed win is cheaper and always exposed.
Source: AuctionNet (arXiv 2412.10798), `offline_eval` and `run_test.py`, each for all advertisers instead of the first.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import numpy as np

from decisionllm.baselines.auctionnet_dt import AuctionNetDT
from decisionllm.baselines.rules import Constant, TargetCPA, roster
from decisionllm.baselines.teacher import Curves, best_constant, pooled_online_lp
from decisionllm.config import listed, one_of, ranges
from decisionllm.datasets.auction import by_task, facts, nearest_returns, texts
from decisionllm.datasets.formats.auctionnet import format_periods
from decisionllm.datasets.wordings import KINDS, is_held_out, turns
from decisionllm.envs.auction.campaign import STEPS, Campaigns, score
from decisionllm.envs.auction.days import day_files, read
from decisionllm.envs.auction.market import CATEGORIES, PUBLISHED, Bidder, BidderContext, industries
from decisionllm.envs.auction.observation import MIN_REMAINING, ObservationSpec
from decisionllm.envs.auction.simulation import Entries, MarketSimulation, PriceReplay, found_day
from decisionllm.eval.report import figure
from decisionllm.eval.rollout import ScriptedPlayer
from decisionllm.protocols import Begin, Env
from decisionllm.registry import register
from decisionllm.schema import Episode

# Mean scores of the 48 advertisers by AuctionNet's code with weights that it trained: periods 7 and 8 replayed, 7 in the market.
PEERS = {
    "replay": {"DT": 27.9, "PID": 25.1, "target CPA": 29.2, "BC": 30.7, "IQL": 31.5, "OnlineLP": 37.1},
    "market": {"DT": 18.8, "target CPA": 22.1},
}


@register("env", "journal", text="${text}", observation="${dataset.observation}", context_features="${dataset.context_features}",
          reward="${dataset.reward}")  # fmt: skip
@register("env", "auction", text="${text}", observation="${dataset.observation}", context_features="${dataset.context_features}",
          reward="${dataset.reward}", frames="${text_wordings}")  # fmt: skip
class Auction(Env):
    """N campaigns: budget factors x repeats x periods x positions.

    Args:
        num_episodes: least number of campaigns of a replay.
        protocol: `replay` or `market`.
        periods: such as `7-8`.
        budgets: factors of the published budgets, such as `0.5,1`.
        path: of the replay: a folder of replay days, which `decisionllm data ... export=replay:folder/` makes; empty: days of our own
            market.
        table_days: a folder of replay days, such as those of training: the baseline "OnlineLP, pooled" has its table from all of them.
        positions: which of the 48 advertisers are ours: `0,8,16` or `all`; empty: all in the replay, six in the market.
        repeats: number of repetitions with other draws; 0: in the replay until there are num_episodes of each budget, in a market 1.
        draws: `bernoulli`; `expected` counts predicted conversion probabilities instead of conversions, so that a replay has no noise.
        opportunities: of a day of our own market. Fewer are worth more each, so that budgets and target CPAs keep their meaning.
        text: see ObservationSpec, as the next three.
        observation: as in the dataset.
        context_features: as in the dataset.
        reward: as in the dataset.
        wordings: with text=paraphrased, `trained` or `held_out`: which frames the texts have, each in turn.
        text_of: `own`, or `another`: each campaign has the text of another advertiser of its day, to see what words change.
        frames: how many frames were trained on, see `text_wordings`; 0: all.

    Raises:
        ValueError: an option out of range.
        FileNotFoundError: a day is not there.
    """

    horizon, unit = STEPS, "conversions, with a penalty for exceeding the target CPA"

    def __init__(
        self, num_episodes: int, *, protocol: str = "replay", periods: str = "7-8", budgets: Any = "1", path: str = "",
        positions: str = "", repeats: int = 0, draws: str = "bernoulli", opportunities: int = 500000, text: str = "none",
        observation: str = "auctionnet", context_features: str = "none", reward: str = "conversions",
        wordings: str = "trained", text_of: str = "own", frames: int = 0, table_days: str = "",
    ) -> None:  # fmt: skip
        one_of("env.protocol", protocol, ("replay", "market"))
        one_of("env.text_of", text_of, ("own", "another"))
        one_of("env.draws", draws, ("bernoulli", "expected"))
        for name, count, least in (("opportunities", opportunities, 1), ("repeats", repeats, 0)):
            if count < least:
                raise ValueError(f"env.{name}: expected a number from {least}, got {count}")
        if path and protocol == "market":
            raise ValueError(f"env.path: a market makes its own prices; give no path, or protocol=replay; got {path!r}")
        self.spec = ObservationSpec(observation=observation, context_features=context_features, reward=reward, text=text)
        self.observation_parts = [("observation", self.spec.size)]  # so that nobody needs to simulate a day to know it
        self.text, self.draws = text, draws
        self.days = days = sorted(ranges("env.periods", periods))
        self.factors: list[float] = []
        with suppress(ValueError):
            self.factors = [float(x) for x in listed(budgets)]
        if not self.factors or not all(0 < x < np.inf for x in self.factors) or len({*self.factors}) < len(self.factors):
            raise ValueError(f"env.budgets: expected factors above 0, such as 0.5,1 and each once, got {budgets!r}")
        given = positions or ("all" if protocol == "replay" else "0,8,16,24,32,40")
        advertisers = sorted(ranges("env.positions", "0-47" if given == "all" else given, within=range(48)))
        if path:
            day_files(path, days, option="env.path")
        self.table_days = list(day_files(table_days, option="env.table_days").values()) if table_days else []
        self.day, self.replayed = partial(found_day, path=path, total=opportunities, roster=roster), protocol == "replay"
        self.protocol = f"{protocol} {format_periods(days)}" + ", expected" * (draws == "expected")
        if self.replayed:
            self.protocol += f", {self.day(days[0]).prices if path else 'own market'} prices"
        times = repeats or (-(-num_episodes // (len(days) * len(advertisers))) if self.replayed else 1)
        grid = np.meshgrid(self.factors, range(times), days, advertisers, indexing="ij")
        factor, repeat, period, advertiser = (x.ravel() for x in grid)
        self.entries = Entries(period=period, advertiser=advertiser, budget_factor=factor, repeat=repeat)
        self.budgets = factor * np.array(PUBLISHED["budgets"])[advertiser]
        self.target_cpa = np.array(PUBLISHED["target_cpa"], float)[advertiser]
        self.category = industries(48)[advertiser]
        known, held_out = facts(self.budgets, self.target_cpa, self.category), is_held_out(wordings, text)
        # texts are shuffled within a budget and a repeat
        blocks = np.split(np.arange(len(known)), len(self.factors) * times)
        self.tasks = [task for rows in blocks for task in texts([known[i] for i in rows], period[rows], text=text)]
        self.kinds: dict[str, str] = {}  # of each held-out text: the kind of its frame
        if text == "paraphrased":
            chosen = turns(self.tasks, by_task(known), held_out=held_out, frames=frames)
            self.tasks, self.kinds = [words for _, words in chosen], {words: kind for kind, words in chosen if held_out}
        self.protocol += ", held-out wordings" * held_out
        if text_of == "another":
            if len(advertisers) < 2:
                raise ValueError(f"env.text_of=another: expected two positions or more, got env.positions={positions}")
            self.tasks = texts_of_another(self.tasks, len(advertisers))
            self.protocol += ", words of another"
        self.published = {f"{name} (AuctionNet's {protocol})": value for name, value in PEERS[protocol].items()}
        simulation: Any = PriceReplay if self.replayed else MarketSimulation
        self.simulate = partial(simulation, self.entries, roster=roster, path=path, total=opportunities)

    def target_returns(self, info: Mapping[str, Any], quantile: float) -> np.ndarray:
        return nearest_returns(info["campaigns"], self.budgets, self.target_cpa, quantile)

    def reset(self, seed: int) -> np.ndarray:
        self.campaigns = Campaigns(self.budgets, self.target_cpa)
        self.log: list[tuple[np.ndarray, ...]] = []  # of each step: multipliers, spend and conversions so far, (N,) each
        self.simulation: PriceReplay | MarketSimulation = self.simulate(seed=seed)
        return self.observe()

    def observe(self) -> np.ndarray:
        return self.spec.features(self.states(), self.campaigns.context())

    def states(self, features: str = "repaired") -> np.ndarray:
        """(N, 16), in the order of STATE"""
        now = self.campaigns.now
        value, volume = self.simulation.next_opportunities(now) if now < STEPS else (0, 0)
        return self.campaigns.observe(value, volume, features=features)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Bid multipliers (N, 1). An episode is terminated when its budget is used up, and truncated at the end of the day."""
        c, before = self.campaigns, self.total_reward()
        multipliers = np.where(c.remaining < MIN_REMAINING, 0.0, np.asarray(actions, np.float64)[:, 0])
        results = self.simulation.step(c.now, multipliers, c.remaining)
        if self.draws == "expected":
            results["conversions"] = results["exposed_value"]
            results["conversion"] = results["conversions"] / np.maximum(results["volume"], 1)
        c.record(**results)
        self.log.append((multipliers, c.spend, c.conversions))
        ended, truncated = c.remaining < MIN_REMAINING, np.full(len(self.budgets), c.now == STEPS)
        return self.observe(), self.total_reward() - before, ended, truncated

    def total_reward(self) -> np.ndarray:
        """(N,) return so far"""
        return self.spec.total_reward(self.campaigns)

    def outcomes(self) -> dict[str, np.ndarray]:
        """Results of each campaign, (N,), and by step, (N, T): multipliers, and spend and conversions so far."""
        c, steps = self.campaigns, ("step_multipliers", "step_spend", "step_conversions")
        return {
            "conversions": c.conversions, "spend": c.spend, "target_cpa": c.target_cpa, "budget": c.budgets,
            "category": self.category, "advertiser": self.entries.advertiser, "period": self.entries.period,
            **{name: np.stack(x, 1) for name, x in zip(steps, zip(*self.log, strict=True), strict=True)},
        }  # fmt: skip

    def conditions(self, execution: str, scripted: bool) -> dict[str, Sequence[int]]:
        """A row of the results for each budget factor."""
        names = [self.protocol + f", {100 * factor:g} %" * (factor != 1) for factor in self.factors]
        rows = np.split(np.arange(len(self.tasks)), len(self.factors))
        return {name: part.tolist() for name, part in zip(names, rows, strict=True)}

    def score(self, episodes: Sequence[Episode]) -> np.ndarray:
        """AuctionNet's score of each episode, whatever its rewards are."""
        return score(*outcome(episodes, "conversions", "spend", "target_cpa"))

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Conversions, CPA and spend, the mean score by category, published budget and period, and in a replay its share of that of the
        best constant multipliers in hindsight."""
        conversions, spend, limit, budget = outcome(episodes, "conversions", "spend", "target_cpa", "budget")
        category, advertiser, period = outcome(episodes, "category", "advertiser", "period")
        scores, some = self.score(episodes), conversions > 0
        best = self.best_constant(period, advertiser, budget, limit)[1] if self.replayed else np.zeros(1)
        kinds = [self.kinds[e.task] for e in episodes if e.task in self.kinds]  # of held-out wordings
        size = np.digitize(np.array(PUBLISHED["budgets"])[advertiser], (2500, 3500))

        def mean(x: np.ndarray) -> float:
            return round(float(x.mean()), 4)

        def by(kind: np.ndarray, names: Iterable[str]) -> dict[str, float]:
            return {name: mean(scores[kind == k]) for k, name in enumerate(names) if (kind == k).any()}

        return {
            "conversions": mean(conversions), "cpa_ratio": mean((spend / limit)[some] / conversions[some]) if some.any() else None,
            "budget_used": mean(spend / budget), "over_limit": mean(spend > limit * conversions),
            **({"share_of_best_constant": round(float(scores.mean() / best.mean()), 4)} if best.any() else {}),
            "by_category": by(category, map(str, range(CATEGORIES))),
            "by_budget": by(size, ("small", "medium", "large")),
            "by_period": {str(p): mean(scores[period == p]) for p in np.unique(period)},
        } | ({"by_kind": by(np.array([KINDS.index(kind) for kind in kinds]), KINDS)} if kinds else {})  # fmt: skip

    @cached_property
    def curves(self) -> Curves:
        """Of the replayed days."""
        return Curves(map(self.day, self.days))

    def best_constant(self, period: np.ndarray, *campaigns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `teacher.best_constant`; all (M,), campaigns: advertiser, budget, target CPA."""
        return best_constant(self.curves, np.searchsorted(self.days, period), *campaigns)

    def draw(self, episodes: Sequence[Episode], title: str, count: int = 4) -> Any:
        """Spend, bid multiplier and CPA by step: a coloured line for each of `count` campaigns, a black one for all of them."""
        multipliers, spend, conversions = (x.T for x in outcome(episodes, "step_multipliers", "step_spend", "step_conversions"))
        limit, budget = outcome(episodes, "target_cpa", "budget")
        bids = np.where(multipliers == 0, np.nan, multipliers)  # (T, M); 0 is no bid

        def ratio(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            return np.asarray(np.divide(x, y, out=np.full_like(x, np.nan), where=y > 0))

        panels = {  # lines (T, M), their mean (T,)
            "spend / budget": (spend / budget, spend.sum(1) / budget.sum()),
            "bid multiplier": (bids, ratio(np.nansum(bids, 1), np.isfinite(bids).sum(1).astype(float))),
            "CPA / target CPA, so far": (ratio(spend, limit * conversions), ratio(spend.sum(1), conversions @ limit)),
        }
        made, hour = figure(11, 3.2, title), np.arange(1, len(spend) + 1) / 2
        for axis, (name, (lines, mean)) in zip(made.subplots(1, 3), panels.items(), strict=True):
            axis.plot(hour, lines[:, :: max(len(limit) // count, 1)], linewidth=0.8, alpha=0.5)
            axis.plot(hour, mean, color="black")
            axis.set_title(name, fontsize=9)
            axis.set(xlabel="hour", ylim=(0, None))
        made.axes[0].plot([0, 24], [0, 1], color="grey", linestyle=":", linewidth=0.8)
        made.axes[2].axhline(1, color="grey", linestyle=":", linewidth=0.8)
        made.axes[2].set_ylim(0, 3)
        return made

    def baselines(self, seed: int) -> dict[str, Begin]:
        """The bidders of the reference market but the constant, the target CPA rule, AuctionNet's Decision Transformer, OnlineLP with a
        table of `table_days`, and in a replay the best constant multiplier in hindsight, see `teacher.best_constant`."""
        found: dict[str, Bidder] = {bidder.name: bidder for bidder in (TargetCPA(), AuctionNetDT())}
        for _, bidder in roster():
            found.setdefault(bidder.name, bidder)
        del found["Constant"]
        if self.table_days:
            found["OnlineLP, pooled"] = pooled_online_lp(map(read, self.table_days))
        if self.replayed:
            e = self.entries
            best, _ = self.best_constant(e.period, e.advertiser, self.budgets, self.target_cpa)
            found["best constant, hindsight"] = Constant(best)
        return {name: partial(self.player, bidder) for name, bidder in found.items()}

    def player(self, bidder: Bidder, tasks: Sequence[str]) -> ScriptedPlayer:
        """A bidder of the market as the player of all campaigns. It receives its own features, not the policy's observations."""

        def bid(observations: np.ndarray, rows: np.ndarray) -> np.ndarray:
            c = self.campaigns
            context = BidderContext(c.now, self.category, c.budgets, c.target_cpa, c.remaining, c.conversions)
            return np.asarray(bidder.act(self.states(bidder.features), context))[rows, None]

        bidder.reset()
        return ScriptedPlayer(bid, tasks)


def texts_of_another(tasks: Sequence[str], advertisers: int) -> list[str]:
    """Each campaign's text exchanged for that of another advertiser on the same day, half of the advertisers away.

    Args:
        tasks: N texts, the advertisers of a day one after the other.
        advertisers: of a day.
    """
    days = np.array(tasks, object).reshape(-1, advertisers)
    return [str(task) for task in np.roll(days, advertisers // 2, axis=1).ravel()]


def outcome(episodes: Sequence[Episode], *names: str) -> list[np.ndarray]:
    """These outcomes of the episodes, (M, ...) each."""
    return [np.stack([e.outcome[name] for e in episodes]) for name in names]
