"""AuctionNet's logs: an episode is one advertiser's day of 48 steps, the action its bid multiplier, the reward its conversions.

An episode ends with the first step that began without budget, that step included, or with the day. Logs hold no observation after the
last step.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decisionllm.baselines import teacher
from decisionllm.baselines.rules import BEHAVIOURS, behaviour_roster
from decisionllm.config import one_of
from decisionllm.datasets.formats import auctionnet
from decisionllm.datasets.formats.auctionnet import Log, format_periods, log_files, parse_periods
from decisionllm.datasets.formats.auctionnet_days import read_days
from decisionllm.datasets.store import Store, facts_of, with_texts
from decisionllm.envs.auction.campaign import STATE, STEPS, Campaigns, score
from decisionllm.envs.auction.days import Day, day_files, play, read
from decisionllm.envs.auction.market import PUBLISHED, Market, industries
from decisionllm.envs.auction.observation import MIN_REMAINING, ObservationSpec, task_facts, task_text
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Spec

TEACHERS = ("oracle", "teacher")
TEXTS = ("none", "constant", "informative", "paraphrased", "shuffled")
VERSION = 1  # of what `load` says of its campaigns


@register("dataset", "auction", text="${text}")
def load(
    *, path: str = "", periods: str = "", text: str = "none", observation: str = "auctionnet", context_features: str = "none",
    reward: str = "conversions", relabel: int = 0, behaviour: str = "reference", num_campaigns: int = 4000, seed: int = 0,
) -> Source:  # fmt: skip
    """Advertisers' days as episodes; the days of one period share their group.

    Args:
        path: a file, a folder or a pattern: .csv, .csv.gz or .parquet, a traffic or a trajectory log; empty: days of our own market,
            with the bidders of `behaviour`. With a teacher: a folder of replay days, which `export=replay:folder/` makes.
        periods: such as `0-6` or `7,8`; empty: all there are, 0-6 of the market.
        text: `none`, `constant`, `informative`, `paraphrased` or `shuffled`, see ObservationSpec.
        observation: see ObservationSpec.
        context_features: see ObservationSpec.
        reward: see ObservationSpec. An evaluation always scores counted conversions.
        relabel: how many relabelled copies of each day to add, see `relabelled`.
        behaviour: of our own market, see baselines.rules.behaviour_roster; or a teacher on replay days, see `taught`: `oracle` or
            `teacher`.
        num_campaigns: of a teacher.
        seed: of our own market, of relabelled budgets, and of a teacher.

    Raises:
        ValueError: an unknown option, or a file that is not a complete log.
        FileNotFoundError: no log at `path`.
    """
    one_of("dataset.text", text, TEXTS)
    spec = ObservationSpec(observation=observation, context_features=context_features, reward=reward, text=text)
    one_of("dataset.behaviour", behaviour, (*BEHAVIOURS, *TEACHERS))
    if relabel and behaviour in TEACHERS:
        why = f"behaviour={behaviour}, whose campaigns have drawn budgets"
        raise ValueError(f"dataset.relabel: expected 0 with {why}, got {relabel}")
    log = read_log(path, periods=periods, behaviour=behaviour, num_campaigns=num_campaigns, seed=seed)
    origin = (stem(path) if path else "market") + f"-{behaviour}" * (behaviour in TEACHERS or not path)
    origin += f"-seed{seed}" * bool(seed and not path)
    name = f"auction@{origin}-periods-{format_periods(log.period)}" + (f"-relabelled-{relabel}" if relabel else "")
    log = relabelled(log, relabel, seed) if relabel else log
    seen, paid = observations(log, spec).astype(np.float32), rewards(log, reward).astype(np.float32)
    actions = log.multiplier[:, :, None].astype(np.float32)
    loss_mask = (log.remaining >= MIN_REMAINING) & (log.states[:, :, STATE.index("value now")] > 0)
    ends = np.where(log.done.any(1), log.done.argmax(1) + 1, STEPS)
    known = facts(log.budget, log.target_cpa, log.category)
    tasks = texts(known, log.period, text=text)

    episodes = [
        Episode(seen[k, :n], actions[k, :n], paid[k, :n], task=tasks[k], group=int(log.period[k]), loss_mask=loss_mask[k, :n])
        for k, n in enumerate(ends)
    ]
    columns = (log.period, log.advertiser, log.category, log.budget, log.target_cpa)
    info = {
        "name": name, "env": "auction", **spec.info(), "relabel": relabel, "seed": seed,
        "behaviour": behaviour if behaviour in TEACHERS or not path else "", "path": path, "periods": format_periods(log.period),
        "repairs": log.repairs,
    }  # fmt: skip
    if text == "paraphrased":
        info["wordings"] = by_task(known)
    made = campaigns_source(episodes, zip(*(x.tolist() for x in columns), strict=True), STEPS, info)
    return replace(made, facts=by_task(known))


def data_options(*, text: str = "none", **options: Any) -> dict[str, Any]:
    """See `datasets.store`. No text of the auction changes more than texts."""
    return {"text": "informative" if text in TEXTS else text, **options}


def worded(store: Store, *, text: str = "none", **options: Any) -> Store:
    """See `datasets.store`."""
    return with_texts(store, text, texts(facts_of(store), store.group, text=text))


def campaigns_source(episodes: list[Episode], campaigns: Iterable[Sequence[Any]], horizon: int, info: dict[str, Any]) -> Source:
    """Campaigns as a dataset. campaigns: their periods, advertisers, categories, budgets and target CPAs, kept with the returns."""
    high = max(float(e.actions.max()) for e in episodes) or 1.0
    spec = Spec(observation_dim=episodes[0].observations.shape[1], action_dim=1, horizon=horizon, low=(0.0,), high=(high,))
    return Source(spec, episodes, info | {"campaigns": [campaign_row(*each) for each in zip(campaigns, episodes, strict=True)]})


def campaign_row(campaign: Iterable[Any], episode: Episode) -> list[Any]:
    """A campaign and its return, as `nearest_returns` reads them."""
    return [*campaign, float(f"{episode.rewards.sum():.4g}")]


def read_log(path: str, *, periods: str, behaviour: str = "reference", num_campaigns: int = 4000, seed: int = 0) -> Log:
    """The log of these files; without a path, of our own market; with a teacher, of it on the days of a folder."""
    if behaviour in TEACHERS:
        curves = teacher.Curves(map(read, day_files(path, parse_periods(periods)).values()))
        return taught(curves, behaviour=behaviour, num_campaigns=num_campaigns, seed=seed)
    if path:
        return auctionnet.read(path, periods=periods)
    return generate(periods=periods or "0-6", behaviour=behaviour, seed=seed)


def taught(curves: teacher.Curves, *, behaviour: str, num_campaigns: int, seed: int = 0) -> Log:
    """A log of random campaigns that a teacher bids for on replayed days.

    A campaign's bids are the teacher's times one random factor, so that states beside its own occur too; the log has the teacher's.

    Args:
        curves: the days.
        behaviour: `oracle` or `teacher`, which is fitted to the days first.
        num_campaigns: M.
        seed: of the campaigns, their draws and the fit.
    """
    act, spread = (teacher.oracle, 0.25) if behaviour == "oracle" else (teacher.fit(curves, seed=seed).act, 0.1)
    generator = torch.Generator().manual_seed(seed)
    drawn = teacher.draw(curves, num_campaigns, generator)
    factor = torch.exp(spread * torch.randn(num_campaigns, generator=generator))
    day, advertiser = drawn.day.numpy(), drawn.advertiser.numpy()
    log, columns = Campaigns(drawn.budget.numpy(), drawn.limit.numpy()), []
    price = np.array([[p.sum() / max(len(p), 1) for p in d.by_step(d.market_price)] for d in curves.days])
    volumes, means = (np.stack([vars(d)[name] for d in curves.days]) for name in ("volume", "mean_value"))
    for t in range(STEPS):
        volume, value = volumes[day, t], means[day, t, advertiser]
        before = {"states": log.observe(value, volume), "remaining": log.remaining}
        with torch.no_grad():
            multiplier = act(drawn)
            spend, exposed, won, made = (x.double().numpy() for x in drawn.bid(multiplier * factor, generator))
        log.record(
            bid=(multiplier * factor).numpy() * value, market_price=price[day, t], value=value, conversion=made / np.maximum(volume, 1),
            won=won / np.maximum(volume, 1), volume=volume, spend=spend, conversions=made, exposed_value=exposed,
        )  # fmt: skip
        columns.append(before | {"multiplier": multiplier.double().numpy(), "conversions": made, "exposed_value": exposed})
    steps = {name: np.stack([step[name] for step in columns], 1) for name in columns[0]}
    done = (steps["remaining"] < MIN_REMAINING) | (np.arange(STEPS) == STEPS - 1)
    return Log(
        period=np.array([d.period for d in curves.days])[day], advertiser=advertiser, category=industries(48)[advertiser],
        budget=log.budgets, target_cpa=log.target_cpa, spend=log.spend, done=done, repairs={}, **steps,
    )  # fmt: skip


def generate(*, periods: str, behaviour: str = "reference", seed: int = 0) -> Log:
    """A log of our own market with the bidders of `behaviour` in each of these periods."""
    from rich.progress import track

    days = []
    for period in track(parse_periods(periods), description="playing periods", transient=True):
        market = Market(behaviour_roster(behaviour, period, seed=seed), seed=seed)
        played, N = market.play(period), len(market.budgets)
        names = ("states", "conversions", "exposed_value", "remaining", "done")
        steps = {name: np.swapaxes(vars(played)[name], 0, 1) for name in names}  # (N, T, ...)
        days.append(Log(
            period=np.full(N, period), advertiser=np.arange(N), category=market.categories, budget=market.budgets,
            target_cpa=market.target_cpa, multiplier=played.multipliers.T, spend=played.spend.T.sum(1), repairs={}, **steps,
        ))  # fmt: skip
    return auctionnet.concatenated(days)


def replay_days(
    *, path: str = "", periods: str = "", behaviour: str = "reference", seed: int = 0, **options: Any
) -> Iterator[Day]:
    """The replayable days of these files, see `read_days`; without a path, of our own market, see `generate`."""
    if path:
        lacking = set(wanted := parse_periods(periods))
        for day in read_days(path, prices=stem(path)):
            if not wanted or day.period in wanted:
                yield day
            lacking.discard(day.period)
        if lacking:
            raise ValueError(f"dataset.periods: {path} has no period {format_periods(list(lacking))}")
        return
    for period in parse_periods(periods or "0-6"):
        total = PUBLISHED["opportunities"]
        yield play(period, partial(behaviour_roster, behaviour, period, seed=seed), total=total, seed=seed)


def relabelled(log: Log, copies: int, seed: int = 0) -> Log:
    """The days of a log, and copies of each with another budget and target CPA.

    Bids and their results stay as they were until the other budget is used up: one advertiser of many hardly moves the market. Budgets
    are log-uniform in 0.5 x the smallest .. 1.5 x the largest, target CPAs uniform in 0.8 x the smallest .. 1.1 x the largest.
    """
    rng, K = np.random.default_rng(seed), len(log.period)
    again = np.repeat(np.arange(K), copies)
    days = log.rows(again)
    low, high = np.log([0.5 * log.budget.min(), 1.5 * log.budget.max()])
    limits = 0.8 * log.target_cpa.min(), 1.1 * log.target_cpa.max()
    drawn = np.exp(rng.uniform(low, high, len(again))), rng.uniform(*limits, len(again))
    budget, target_cpa = (np.array([float(f"{x:.3g}") for x in column]) for column in drawn)  # three digits, as in a text
    before = days.budget[:, None] - days.remaining  # (K, T), spent before each step
    cost = np.diff(before, axis=1, append=days.spend[:, None])
    remaining = np.maximum(budget[:, None] - before, 0)
    share = np.minimum(np.divide(remaining, cost, out=np.ones_like(cost), where=cost > 0), 1)  # of the step that is paid for
    states = days.states.copy()
    states[:, :, STATE.index("budget left")] = remaining / budget[:, None]
    done = remaining < MIN_REMAINING
    done[:, -1] = True
    days = replace(
        days, budget=budget, target_cpa=target_cpa, states=states, remaining=remaining, done=done | days.done, repairs={},
        conversions=days.conversions * share, exposed_value=days.exposed_value * share, spend=np.minimum(days.spend, budget),
    )  # fmt: skip
    return auctionnet.concatenated([log, days])


def nearest_returns(
    campaigns: Any, budgets: np.ndarray, target_cpa: np.ndarray, quantile: float, *, nearest: int = 48
) -> np.ndarray:
    """Target returns of N campaigns: this quantile of the returns of the logged campaigns with the nearest budgets and target CPAs.

    Args:
        campaigns: the table of a dataset's info, a row a campaign.
        budgets: (N,) currency.
        target_cpa: (N,) currency per conversion.
        quantile: within 0 .. 1.
        nearest: number of logged campaigns; distances are of logarithms.

    Returns:
        (N,) in the reward units of the log.
    """
    table = np.array(campaigns, np.float64)
    apart = np.log(table[:, None, 3:5]) - np.log(np.stack([budgets, target_cpa], 1))  # (days, N, 2)
    found = np.argsort(np.square(apart).sum(2), axis=0, kind="stable")[:nearest]
    return np.asarray(np.quantile(table[found, 5], quantile, axis=0))


def observations(log: Log, spec: ObservationSpec) -> np.ndarray:
    """Observations before each step of a log: (K, T, S)."""
    limit, spend = log.target_cpa[:, None], log.budget[:, None] - log.remaining
    sums = (np.cumsum(x, 1) - x for x in (log.conversions, log.exposed_value))  # before each step
    columns = (np.log(log.budget)[:, None], limit, spend / limit, *sums)
    return spec.features(log.states, np.stack(np.broadcast_arrays(*columns), 2))


def rewards(log: Log, reward: str) -> np.ndarray:
    """The reward of each step: (K, T). reward: see ObservationSpec."""
    if reward == "score":
        spend = np.append(log.budget[:, None] - log.remaining[:, 1:], log.spend[:, None], 1)  # after each step
        return np.diff(score(np.cumsum(log.exposed_value, 1), spend, log.target_cpa[:, None]), axis=1, prepend=0)
    return log.conversions if reward == "conversions" else log.exposed_value


def texts(facts: Sequence[dict[str, Any]], period: np.ndarray, *, text: str) -> list[str]:
    """The task text of each campaign. text=shuffled exchanges them among the campaigns of a period.

    Args:
        facts: (K,) see `task_facts`.
        period: (K,)
        text: see ObservationSpec.
    """
    spec, order = ObservationSpec(text=text), np.arange(len(period))
    if text == "shuffled":
        for number in np.unique(period):
            order[period == number] = np.random.default_rng(int(number)).permutation(np.flatnonzero(period == number))
    told = [facts[k] for k in order.tolist()]
    return [spec.task(known["budget"], known["cpa"], known["category"]) for known in told]


def facts(budget: np.ndarray, target_cpa: np.ndarray, category: np.ndarray) -> list[dict[str, Any]]:
    """The facts of K campaigns, (K,) each."""
    return [task_facts(*campaign) for campaign in zip(budget, target_cpa, category, strict=True)]


def by_task(facts: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The facts of campaigns by their informative texts."""
    return {task_text(known["budget"], known["cpa"], known["category"]): known for known in facts}


def files(*, path: str = "", periods: str = "", behaviour: str = "", **options: Any) -> list[Path]:
    """The files that `load` reads with these options."""
    if behaviour in TEACHERS:
        return list(day_files(path, parse_periods(periods), option="dataset.path").values())
    return log_files(path) if path else []


def stem(path: str) -> str:
    """A short name of a log: its file's, or its folder's."""
    given = Path(path).expanduser()
    return given.name.split(".")[0] if given.is_file() else (given if given.is_dir() else given.parent).resolve().name


def save(path: str, store: Any) -> None:
    """Write an auction's store as a trajectory log. The log is read again: a store has float32 and ends days early."""
    if store.info.get("env") != "auction":
        raise ValueError(f"export=trajectories: expected an auction dataset, got {store.info['name']}")
    options = {name: store.info[name] for name in ("path", "periods", "behaviour", "seed")}
    auctionnet.write(path, read_log(**options, num_campaigns=len(store.lengths)))
