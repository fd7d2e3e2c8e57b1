"""AuctionNet's logs: an episode is one advertiser's day of 48 steps, the action its bid multiplier, the reward its conversions.

An episode ends with the first step that began with the budget used up (`until=done`, that step included), or with the day
(`until=day`). What a step after the last one would have shown is in no log.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from decisionllm.baselines.rules import mixture
from decisionllm.config import one_of
from decisionllm.datasets.formats import auctionnet
from decisionllm.datasets.formats.auctionnet import Log, chosen, listed, spelled
from decisionllm.envs.auction.campaign import STATE, STEPS, score
from decisionllm.envs.auction.market import play
from decisionllm.envs.auction.observation import MIN_REMAINING, ObservationSpec
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Spec


@register("dataset", "auction", text="${text}")
def load(
    *,
    path: str = "",
    periods: str = "",
    text: str = "none",
    observation: str = "auctionnet",
    context_features: str = "none",
    reward: str = "conversions",
    features: str = "repaired",
    until: str = "done",
    relabel: int = 0,
    behaviour: str = "reference",
    seed: int = 0,
) -> Source:
    """Advertisers' days as episodes; the days of one period share their group.

    path: a file, a folder or a pattern: .csv, .csv.gz or .parquet, of either schema; empty: days of our own market, whose bidders
    `behaviour` names, see worlds.bidders.mixture. periods: such as `0-6` or `7,8`; empty: all there are, 0-6 of the market.
    text: `none`; `constant` says what is asked of everybody; `informative` also the advertiser's budget, limit and category;
    `shuffled` is `informative` with the texts dealt to other advertisers of the period.
    observation: `official`, AuctionNet's sixteen state numbers; `minimal`, the five of them that no bid of one's own has a part in.
    context_features: `budget_and_cpa` shows behind them what an informative text says, the logarithm of the budget and the limit; `progress` also
    what was spent and brought so far: see ObservationSpec.
    reward: what a step pays. `conversions`, as they were counted; `expected_value`, those to be expected of what was shown, with less
    noise; `score`, what the step adds to the day's score of the expected conversions, so that the limit is felt. An
    evaluation always scores the conversions that were counted.
    features: see Campaigns; trajectory logs hold the repaired ones. until: see above.
    relabel: show each day so many times more, as days of advertisers with other budgets and limits, see `relabelled`. seed: of
    the market, and of other budgets.
    """
    one_of("dataset.text", text, ("none", "constant", "informative", "shuffled"))
    shown = ObservationSpec(observation=observation, context_features=context_features, reward=reward, text=text)
    one_of("dataset.features", features, ("repaired", "original"))
    one_of("dataset.until", until, ("done", "day"))
    log = log_of(path, periods=periods, features=features, behaviour=behaviour, seed=seed)
    origin = stem(path) if path else f"market-{behaviour}" + (f"-seed{seed}" if seed else "")
    name = f"auction@{origin}-periods-{spelled(log.period)}" + (f"-relabelled-{relabel}" if relabel else "")
    log = relabelled(log, relabel, seed) if relabel else log
    seen, paid = observations(log, shown).astype(np.float32), rewards(log, reward).astype(np.float32)
    actions = log.multiplier[:, :, None].astype(np.float32)
    loss_mask = (log.remaining >= MIN_REMAINING) & (log.states[:, :, STATE.index("value now")] > 0)
    ends = np.where(log.done.any(1), log.done.argmax(1) + 1, STEPS) if until == "done" else np.full(len(log.period), STEPS)
    tasks = texts(log, shown)

    def episode(k):
        n = ends[k]
        return Episode(
            seen[k, :n], actions[k, :n], paid[k, :n], task=tasks[k], group=int(log.period[k]), loss_mask=loss_mask[k, :n]
        )

    high = max(float(actions[k, : ends[k]].max()) for k in range(len(ends))) or 1.0
    spec = Spec(observation_dim=seen.shape[2], action_dim=1, horizon=STEPS, low=(0.0,), high=(high,))
    earned = [float(f"{paid[k, : ends[k]].sum():.4g}") for k in range(len(ends))]
    columns = (log.period, log.advertiser, log.category, log.budget, log.target_cpa)
    table = [[*row, r] for *row, r in zip(*(x.tolist() for x in columns), earned, strict=True)]  # what each was, and its return
    info = {
        "name": name, "env": "auction", **shown.info(), "features": features, "until": until, "relabel": relabel, "behaviour": "" if path else behaviour,
        "seed": seed, "path": path, "periods": spelled(log.period),
        "repairs": log.repairs, "campaigns": table,
    }  # fmt: skip
    return Source(spec, map(episode, range(len(ends))), info)


def log_of(path, *, periods, features="repaired", behaviour="reference", seed=0):
    """A Log of the files there, or of our own market where no path is given."""
    if not path:
        return generate(periods=periods or "0-6", features=features, behaviour=behaviour, seed=seed)
    return auctionnet.read(path, periods=periods, features=features)


def generate(*, periods, features="repaired", behaviour="reference", seed=0):
    """A Log of our own market: each of these periods, played by the bidders that `behaviour` names."""
    from rich.progress import track

    days = [
        play(mixture(behaviour, period, seed=seed), period, features=features, seed=seed)
        for period in track(chosen(periods), description="playing periods", transient=True)
    ]
    N = len(days[0].budgets)
    of_days = lambda name: np.concatenate([getattr(day, name) for day in days])  # noqa: E731
    of_steps = lambda name: np.concatenate([np.swapaxes(getattr(day, name), 0, 1) for day in days])  # noqa: E731 (K, T, ...)
    return Log(
        period=np.repeat([day.period for day in days], N), advertiser=np.tile(np.arange(N), len(days)), category=of_days("categories"),
        budget=of_days("budgets"), target_cpa=of_days("target_cpa"), states=of_steps("states"), multiplier=of_steps("multipliers"),
        conversions=of_steps("conversions"), exposed_value=of_steps("exposed_value"), remaining=of_steps("remaining"),
        spend=of_steps("spend").sum(1), done=of_steps("done"), repairs={},
    )  # fmt: skip


def relabelled(log, copies, seed=0):
    """The days of a log, and each of them again as if its advertiser had had another budget and another limit.

    What was bid and what it brought stay as they were, until the other budget is used up: the bids of one advertiser among many move
    the market little. Budgets are drawn from half the smallest to one and a half of the largest, evenly in their logarithm,
    limits from 0.8 of the smallest to 1.1 of the largest.
    """
    rng, K = np.random.default_rng(seed), len(log.period)
    again = np.repeat(np.arange(K), copies)
    days = replace(log, **{name: part[again] for name, part in vars(log).items() if isinstance(part, np.ndarray)})
    low, high = np.log([0.5 * log.budget.min(), 1.5 * log.budget.max()])
    limits = 0.8 * log.target_cpa.min(), 1.1 * log.target_cpa.max()
    drawn = np.exp(rng.uniform(low, high, len(again))), rng.uniform(*limits, len(again))
    budget, target_cpa = (np.array([float(f"{x:.3g}") for x in column]) for column in drawn)  # as a person would say them
    before = days.budget[:, None] - days.remaining  # (K, T), spent before each step
    cost = np.diff(before, axis=1, append=days.spend[:, None])
    remaining = np.maximum(budget[:, None] - before, 0)
    share = np.minimum(np.divide(remaining, cost, out=np.ones_like(cost), where=cost > 0), 1)  # of the step that is paid for
    states = days.states.copy()
    states[:, :, STATE.index("budget left")] = remaining / budget[:, None]
    done = remaining < MIN_REMAINING
    done[:, -1] = True
    days = replace(
        days, budget=budget, target_cpa=target_cpa, states=states, remaining=remaining, done=done | days.done,
        conversions=days.conversions * share, exposed_value=days.exposed_value * share, spend=np.minimum(days.spend, budget),
    )  # fmt: skip
    both = zip(vars(log).items(), vars(days).values(), strict=True)
    return replace(log, **{name: np.concatenate([x, y]) for (name, x), y in both if isinstance(x, np.ndarray)})


def similar(campaigns, budgets, target_cpa, quantile, *, nearest=48):
    """A return to ask of N campaigns: this quantile of what was earned by those of a log with the nearest budgets and limits.

    campaigns: the table of a store's info. budgets, target_cpa: (N,); near is what differs by a small factor. -> (N,)
    """
    table = np.array(campaigns, np.float64)
    apart = np.log(table[:, None, 3:5]) - np.log(np.stack([budgets, target_cpa], 1))  # (days, N, 2)
    found = np.argsort(np.square(apart).sum(2), axis=0, kind="stable")[:nearest]
    return np.quantile(table[found, 5], quantile, axis=0)


def observations(log, spec):
    """Observations before each step of a log: (K, T, S)."""
    before = lambda x: np.cumsum(x, 1) - x  # noqa: E731
    limit = log.target_cpa[:, None]
    spend = log.budget[:, None] - log.remaining
    columns = (np.log(log.budget)[:, None], limit, spend / limit, before(log.conversions), before(log.exposed_value))
    return spec.features(log.states, np.stack(np.broadcast_arrays(*columns), 2))


def rewards(log, reward):
    """The reward of each step: (K, T). reward: see ObservationSpec."""
    if reward == "score":
        spend = np.append(log.budget[:, None] - log.remaining[:, 1:], log.spend[:, None], 1)  # after each step
        return np.diff(score(np.cumsum(log.exposed_value, 1), spend, log.target_cpa[:, None]), axis=1, prepend=0)
    return log.conversions if reward == "conversions" else log.exposed_value


def texts(log, spec):
    """The task text of each advertiser's day: a list of K texts. text=shuffled exchanges them among the advertisers of a period."""
    made = [spec.task(*campaign) for campaign in zip(log.budget, log.target_cpa, log.category, strict=True)]
    if spec.text == "shuffled":
        for period in np.unique(log.period):
            rows = np.flatnonzero(log.period == period)
            shuffled = [made[k] for k in np.random.default_rng(int(period)).permutation(rows)]
            for k, words in zip(rows, shuffled, strict=True):
                made[k] = words
    return made


def files(*, path="", **options):
    """What `load` would read with these options."""
    return listed(path) if path else []


def stem(path):
    """A short name for where a log came from: a file's own, or its folder's."""
    given = Path(path).expanduser()
    return given.name.split(".")[0] if given.is_file() else (given if given.is_dir() else given.parent).resolve().name


def save(path, store):
    """Write an auction's store as a trajectory log. The log is read again: a store has float32 and ends days early."""
    if store.info.get("env") != "auction":
        raise ValueError(f"export=trajectories: expected an auction dataset, got {store.info['name']}")
    options = {name: store.info[name] for name in ("periods", "features", "behaviour", "seed")}
    auctionnet.write(path, log_of(store.info["path"], **options))
