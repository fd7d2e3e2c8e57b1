"""AuctionNet's evaluation: every advertiser's day with its own budget and target CPA, all of them
in one batch.

`replay` runs N campaigns, each alone, against fixed market prices: cheap, for choosing models.
`market` gives the policy a position of the reference market, whose 47 other bidders react. Both
score conversions with a penalty for exceeding the target CPA; their scores are not comparable,
since a replayed win is cheaper and always exposed.
Source: AuctionNet (arXiv 2412.10798), `offline_eval` and `run_test.py`, each for all advertisers
instead of the first.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.bidding.dataset import facts, facts_by_task, nearest_returns, texts
from decisionllm.bidding.logs.auctionnet_log import format_periods
from decisionllm.bidding.logs.replay_days import Day, find_day_files, read_day
from decisionllm.bidding.market.advertisers import BUDGETS, CATEGORIES, TARGET_CPA, industries
from decisionllm.bidding.market.auctionnet_dt import AuctionNetDT
from decisionllm.bidding.market.bidders import Constant, TargetCPA, roster
from decisionllm.bidding.market.campaigns import STEPS, Campaigns, score
from decisionllm.bidding.market.market import Bidder, BidderContext
from decisionllm.bidding.market.observation import (
    MIN_REMAINING,
    SIZE_EDGES,
    SIZES,
    ObservationSpec,
)
from decisionllm.bidding.market.simulation import Entries, MarketSimulation, PriceReplay, load_day
from decisionllm.bidding.teacher import Curves, best_constant, pooled_online_lp
from decisionllm.checks import check_at_least, check_one_of, parse_ranges, split_list
from decisionllm.datasets.paraphrases import (
    LabelledTexts,
    assign_texts,
    load_library,
    uses_held_out_frames,
)
from decisionllm.eval.pictures import figure
from decisionllm.eval.rollout import ScriptedPlayer
from decisionllm.protocols import Begin, Env
from decisionllm.schema import Episode, Json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Mean scores of the 48 advertisers by AuctionNet's code with weights that it trained: periods 7 and
# 8 replayed, 7 in the market.
PEERS = {
    "replay": {
        "DT": 27.9,
        "PID": 25.1,
        "target CPA": 29.2,
        "BC": 30.7,
        "IQL": 31.5,
        "OnlineLP": 37.1,
    },
    "market": {"DT": 18.8, "target CPA": 22.1},
}


MARKET_POSITIONS = "0,8,16,24,32,40"  # one of each category


class Auction(Env):
    """N campaigns: budget factors x repeats x periods x positions.

    Args:
        num_episodes: least number of campaigns of a replay.
        protocol: `replay` or `market`.
        periods: such as `7-8`.
        budgets: factors of the published budgets, such as `0.5,1`.
        path: folder of replay days, which `export=replay:folder/` of `decisionllm data` makes; empty:
            days of our own market.
        table_days: a folder of replay days, such as those of training: the baseline "OnlineLP,
            pooled" has its table from all of them.
        positions: those of the 48 advertisers that are ours, `0,8,16` or `all`; empty: all in the
            replay, six in the market.
        repeats: number of repetitions with other draws; 0: in the replay until there are
            num_episodes of each budget, in a market 1.
        draws: `bernoulli`; `expected` counts predicted conversion probabilities instead of
            conversions, so that a replay has no noise.
        opportunities: number in a day of our own market. Fewer are worth more each, so that
            budgets and target CPAs keep their meaning.
        text: as in the dataset.
        observation: as in the dataset.
        context_features: as in the dataset.
        reward: as in the dataset.
        wordings: with text=paraphrased, `trained` or `held_out`: which frames the texts have, each
            in turn.
        text_of: `own`, or `another`: each campaign has the text of another advertiser of its day,
            to see what words change.
        frames: how many frames were trained on, see `text_wordings`; 0: all.

    Raises:
        ValueError: an option out of range.
        FileNotFoundError: a day is not there.
    """

    horizon = STEPS
    num_actions = 0
    action_dim = 1
    name = "auction"
    unit = "conversions, with a penalty for exceeding the target CPA"

    def __init__(
        self,
        num_episodes: int,
        *,
        protocol: str = "replay",
        periods: str = "7-8",
        budgets: str | float | Sequence[float] = "1",
        path: str = "",
        positions: str = "",
        repeats: int = 0,
        draws: str = "bernoulli",
        opportunities: int = 500000,
        text: str = "none",
        observation: str = "auctionnet",
        context_features: str = "none",
        reward: str = "conversions",
        wordings: str = "trained",
        text_of: str = "own",
        frames: int = 0,
        table_days: str = "",
    ) -> None:
        check_one_of("env.protocol", protocol, ("replay", "market"))
        check_one_of("env.text_of", text_of, ("own", "another"))
        check_one_of("env.draws", draws, ("bernoulli", "expected"))
        check_at_least("env.opportunities", opportunities, 1)
        check_at_least("env.repeats", repeats, 0)
        if path and protocol == "market":
            raise ValueError(
                "env.path: a market makes its own prices; give no path, or protocol=replay;"
                f" got {path!r}"
            )
        self.spec = ObservationSpec(observation, context_features, reward, text)
        # declared here, so that nobody needs to simulate a day to know the size
        self.observation_parts = [("observation", self.spec.size)]
        self.text = text
        self.draws = draws
        self.is_replay = protocol == "replay"
        self.path = path
        self.opportunities = opportunities
        self.days = sorted(parse_ranges("env.periods", periods))
        self.factors = parse_budget_factors(budgets)
        advertisers = self._advertisers(positions)
        if text_of == "another" and len(advertisers) < 2:
            got = f"got env.positions={positions}"
            raise ValueError(f"env.text_of=another: expected two positions or more, {got}")
        if path:
            find_day_files(path, self.days, option="env.path")
        self.table_days: list[Path] = []
        if table_days:
            self.table_days = list(find_day_files(table_days, option="env.table_days").values())
        if not repeats:
            of_each_budget = len(self.days) * len(advertisers)
            repeats = math.ceil(num_episodes / of_each_budget) if self.is_replay else 1

        grid = np.meshgrid(self.factors, range(repeats), self.days, advertisers, indexing="ij")
        factor, repeat, period, advertiser = (x.ravel() for x in grid)  # (N,) each
        self.entries = Entries(period, advertiser, factor, repeat)
        # a campaign is the same in each of its repetitions
        campaign = np.stack([period, advertiser, factor])
        _, self.clusters = np.unique(campaign, axis=1, return_inverse=True)
        self.budgets = factor * BUDGETS[advertiser]
        self.target_cpa = TARGET_CPA[advertiser]
        self.category = industries(48)[advertiser]

        held_out = uses_held_out_frames(wordings, text)
        worded = self._write_texts(repeats, held_out=held_out, frames=frames)
        self.tasks = [words for _, words in worded]
        # {held-out text: kind of its frame}
        self.kinds = {words: kind for kind, words in worded if held_out}
        if text_of == "another":
            self.tasks = swap_texts(self.tasks, len(advertisers))
        self.protocol = self._label(held_out=held_out, text_of=text_of)
        peers = PEERS[protocol].items()
        self.published = {f"{name} (AuctionNet's {protocol})": score for name, score in peers}

    def _advertisers(self, positions: str) -> list[int]:
        """The advertisers that are ours, see the option `positions`."""
        if not positions:
            positions = "all" if self.is_replay else MARKET_POSITIONS
        if positions == "all":
            positions = "0-47"
        return sorted(parse_ranges("env.positions", positions, within=range(48)))

    def _write_texts(self, repeats: int, *, held_out: bool, frames: int) -> LabelledTexts:
        """The kind of frame and the task text of each of the N campaigns."""
        campaign_facts = facts(self.budgets, self.target_cpa, self.category)
        tasks: list[str] = []
        # texts are shuffled within a budget and a repeat
        for rows in np.split(np.arange(len(campaign_facts)), len(self.factors) * repeats):
            tasks += texts(
                [campaign_facts[i] for i in rows], self.entries.period[rows], text=self.text
            )
        if self.text != "paraphrased":
            return [("", task) for task in tasks]
        self.facts = facts_by_task(campaign_facts)
        return assign_texts(tasks, self.facts, held_out=held_out, frames=frames)

    def _label(self, *, held_out: bool, text_of: str) -> str:
        """The protocol, as results name it."""
        label = "replay" if self.is_replay else "market"
        label += f" {format_periods(self.days)}"
        if self.draws == "expected":
            label += ", expected"
        if self.is_replay:
            prices = self.day(self.days[0]).prices if self.path else "own market"
            label += f", {prices} prices"
        if held_out:
            label += ", held-out wordings"
        if text_of == "another":
            label += ", words of another"
        return label

    def day(self, period: int) -> Day:
        """A replayed day."""
        return load_day(period, self.path, self.opportunities)

    def target_returns(self, info: Json, quantile: float) -> np.ndarray | None:
        if "campaigns" not in info:  # a log whose rewards were changed
            return None
        return nearest_returns(info["campaigns"], self.budgets, self.target_cpa, quantile)

    def reset(self, seed: int) -> np.ndarray:
        self.campaigns = Campaigns(self.budgets, self.target_cpa)
        # for each step: multipliers, spend and conversions so far, (N,) each
        self.log: list[tuple[np.ndarray, ...]] = []
        total = self.opportunities
        self.simulation: PriceReplay | MarketSimulation
        if self.is_replay:
            self.simulation = PriceReplay(self.entries, path=self.path, total=total, seed=seed)
        else:
            self.simulation = MarketSimulation(self.entries, total=total, seed=seed)
        return self.observe()

    def observe(self) -> np.ndarray:
        return self.spec.features(self.states(), self.campaigns.context())

    def states(self, features: str = "repaired") -> np.ndarray:
        """State numbers (N, 16), in the order of STATE."""
        now = self.campaigns.now
        if now == STEPS:
            return self.campaigns.observe(0, 0, features=features)
        value, volume = self.simulation.next_opportunities(now)
        return self.campaigns.observe(value, volume, features=features)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Bid with multipliers (N, 1).

        An episode is terminated when its budget is used up, and truncated at the end of the day.
        """
        c = self.campaigns
        before = self.total_reward()
        requested = np.asarray(actions, np.float64)[:, 0]
        multipliers = np.where(c.remaining < MIN_REMAINING, 0.0, requested)
        results = self.simulation.step(c.now, multipliers, c.remaining)
        if self.draws == "expected":
            results["conversions"] = results["exposed_value"]
            results["conversion"] = results["conversions"] / np.maximum(results["volume"], 1)
        c.record(**results)
        self.log.append((multipliers, c.spend, c.conversions))
        gains = self.total_reward() - before
        ended = c.remaining < MIN_REMAINING
        truncated = np.full(len(self.budgets), c.now == STEPS)
        return self.observe(), gains, ended, truncated

    def total_reward(self) -> np.ndarray:
        """Return so far, (N,)."""
        return self.spec.total_reward(self.campaigns)

    def outcomes(self) -> dict[str, np.ndarray]:
        """Results of each campaign, (N,), and by step, (N, T); spend and conversions so far."""
        c = self.campaigns
        multipliers, spend, conversions = (np.stack(x, 1) for x in zip(*self.log, strict=True))
        return {
            "conversions": c.conversions,
            "spend": c.spend,
            "target_cpa": c.target_cpa,
            "budget": c.budgets,
            "category": self.category,
            "advertiser": self.entries.advertiser,
            "period": self.entries.period,
            "step_multipliers": multipliers,
            "step_spend": spend,
            "step_conversions": conversions,
        }

    def conditions(self, execution: str, scripted: bool) -> dict[str, Sequence[int]]:
        """A row of the results for each budget factor."""
        rows = np.split(np.arange(len(self.tasks)), len(self.factors))
        rows_by_label: dict[str, Sequence[int]] = {}
        for factor, part in zip(self.factors, rows, strict=True):
            label = self.protocol if factor == 1 else f"{self.protocol}, {100 * factor:g} %"
            rows_by_label[label] = part.tolist()
        return rows_by_label

    def score(self, episodes: Sequence[Episode]) -> np.ndarray:
        """AuctionNet's score of each episode, whatever its rewards are."""
        return score(*stack_outcomes(episodes, "conversions", "spend", "target_cpa"))

    def metrics(self, episodes: Sequence[Episode]) -> Json:
        """Conversions, CPA, spend, and mean scores by category, published budget, period and
        wording.

        A replay also has its share of the score of the best constant multipliers in hindsight.
        """
        conversions, spend = stack_outcomes(episodes, "conversions", "spend")
        limit, budget = stack_outcomes(episodes, "target_cpa", "budget")
        category, advertiser, period = stack_outcomes(episodes, "category", "advertiser", "period")
        scores = self.score(episodes)
        converted = conversions > 0
        results: Json = {
            "conversions": round_mean(conversions),
            "cpa_ratio": None,
            "budget_used": round_mean(spend / budget),
            "over_limit": round_mean(spend > limit * conversions),
        }
        if converted.any():
            results["cpa_ratio"] = round_mean((spend / limit)[converted] / conversions[converted])
        if self.is_replay:
            day = np.searchsorted(self.days, period)
            _, best = best_constant(self.curves, day, advertiser, budget, limit)
            if best.any():
                results["share_of_best_constant"] = round(float(scores.mean() / best.mean()), 4)
        size = np.digitize(BUDGETS[advertiser], SIZE_EDGES)
        results["by_category"] = mean_by_name(scores, category, [str(c) for c in range(CATEGORIES)])
        results["by_budget"] = mean_by_name(scores, size, SIZES)
        results["by_period"] = {str(p): round_mean(scores[period == p]) for p in np.unique(period)}
        kinds = [self.kinds[e.task] for e in episodes if e.task in self.kinds]
        if kinds:
            names = load_library("bidding").held_out_kinds
            numbers = np.array([names.index(kind) for kind in kinds])
            results["by_kind"] = mean_by_name(scores, numbers, names)
        return results

    @cached_property
    def curves(self) -> Curves:
        """Curves of the replayed days."""
        return Curves(map(self.day, self.days))

    def draw(self, episodes: Sequence[Episode], title: str, count: int = 4) -> "Figure":
        """Spend, bid multiplier and CPA by step: `count` campaigns in colours, all in black."""
        steps = stack_outcomes(episodes, "step_multipliers", "step_spend", "step_conversions")
        multipliers, spend, conversions = (x.T for x in steps)  # (T, M) each
        limit, budget = stack_outcomes(episodes, "target_cpa", "budget")  # (M,) each
        bids = np.where(multipliers == 0, np.nan, multipliers)  # 0 is no bid
        bidders = np.isfinite(bids).sum(1).astype(float)  # (T,)
        all_costs = divide_or_nan(spend.sum(1), conversions @ limit)
        panels = {  # lines (T, M), their mean (T,)
            "spend / budget": (spend / budget, spend.sum(1) / budget.sum()),
            "bid multiplier": (bids, divide_or_nan(np.nansum(bids, 1), bidders)),
            "CPA / target CPA, so far": (divide_or_nan(spend, limit * conversions), all_costs),
        }
        made = figure(11, 3.2, title)
        hour = np.arange(1, len(spend) + 1) / 2
        every = max(len(limit) // count, 1)
        for axis, (name, (lines, overall)) in zip(made.subplots(1, 3), panels.items(), strict=True):
            axis.plot(hour, lines[:, ::every], linewidth=0.8, alpha=0.5)
            axis.plot(hour, overall, color="black")
            axis.set_title(name, fontsize=9)
            axis.set(xlabel="hour", ylim=(0, None))
        spent, _, cost = made.axes
        spent.plot([0, 24], [0, 1], color="grey", linestyle=":", linewidth=0.8)
        cost.axhline(1, color="grey", linestyle=":", linewidth=0.8)
        cost.set_ylim(0, 3)
        return made

    def baselines(self, seed: int) -> dict[str, Begin]:
        """Bidders to compare with.

        They are those of the reference market except the constant one, the target CPA rule,
        AuctionNet's Decision Transformer, OnlineLP with a table of `table_days`, and in a replay
        the best constant multiplier in hindsight.
        """
        bidders: dict[str, Bidder] = {
            bidder.name: bidder for bidder in (TargetCPA(), AuctionNetDT())
        }
        for _, bidder in roster():
            bidders.setdefault(bidder.name, bidder)
        del bidders["Constant"]
        if self.table_days:
            bidders["OnlineLP, pooled"] = pooled_online_lp(map(read_day, self.table_days))
        if self.is_replay:
            day = np.searchsorted(self.days, self.entries.period)
            advertiser = self.entries.advertiser
            best, _ = best_constant(self.curves, day, advertiser, self.budgets, self.target_cpa)
            bidders["best constant, hindsight"] = Constant(best)
        return {name: partial(self.player, bidder) for name, bidder in bidders.items()}

    def player(self, bidder: Bidder, tasks: Sequence[str]) -> ScriptedPlayer:
        """A bidder of the market as the player of all campaigns.

        It receives its own features, not the policy's observations.
        """

        def bid(observations: np.ndarray, rows: np.ndarray) -> np.ndarray:
            context = BidderContext.from_campaigns(self.campaigns, self.category)
            multipliers = np.asarray(bidder.act(self.states(bidder.features), context))  # (N,)
            return multipliers[rows, None]

        bidder.reset()
        return ScriptedPlayer(bid, tasks)


def parse_budget_factors(budgets: str | float | Sequence[float]) -> list[float]:
    """The option `budgets`, such as `0.5,1`, as numbers."""
    factors: list[float] = []
    with suppress(ValueError):
        factors = [float(x) for x in split_list(budgets)]
    positive = all(0 < x < np.inf for x in factors)
    if not factors or not positive or len(set(factors)) < len(factors):
        raise ValueError(
            f"env.budgets: expected factors above 0, such as 0.5,1 and each once, got {budgets!r}"
        )
    return factors


def swap_texts(tasks: Sequence[str], advertisers: int) -> list[str]:
    """Each campaign's text exchanged for that of another advertiser on the same day, half of the
    advertisers away.

    Args:
        tasks: N texts, the advertisers of a day one after the other.
        advertisers: number of advertisers on a day.
    """
    days = np.array(tasks, object).reshape(-1, advertisers)
    return [str(task) for task in np.roll(days, advertisers // 2, axis=1).ravel()]


def stack_outcomes(episodes: Sequence[Episode], *names: str) -> list[np.ndarray]:
    """These outcomes of the episodes, (M, ...) each."""
    return [np.stack([e.outcome[name] for e in episodes]) for name in names]


def round_mean(x: np.ndarray) -> float:
    """The mean, with four digits."""
    return round(float(x.mean()), 4)


def mean_by_name(scores: np.ndarray, kind: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """{name: mean score} of the kinds that occur. scores (M,); kind (M,) int, an index of names."""
    return {
        name: round_mean(scores[kind == k]) for k, name in enumerate(names) if (kind == k).any()
    }


def divide_or_nan(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x / y, NaN where y is 0."""
    return np.asarray(np.divide(x, y, out=np.full_like(x, np.nan), where=y > 0))
