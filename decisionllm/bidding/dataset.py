"""AuctionNet's logs: an episode is one advertiser's day of 48 steps, the action its bid multiplier,
the reward its conversions.

An episode ends with the first step that began without budget, that step included, or with the day.
Logs hold no observation after the last step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike

from decisionllm.bidding import teacher
from decisionllm.bidding.logs import auctionnet
from decisionllm.bidding.logs.auctionnet_days import read_days
from decisionllm.bidding.logs.auctionnet_log import (
    Log,
    concatenate_logs,
    format_periods,
    log_files,
    parse_periods,
)
from decisionllm.bidding.logs.replay_days import Day, find_day_files, play_day, read_day, save_day
from decisionllm.bidding.market.advertisers import PUBLISHED, industries
from decisionllm.bidding.market.bidders import BEHAVIOURS, behaviour_roster
from decisionllm.bidding.market.campaigns import STATE, STEPS, Campaigns, context_numbers, score
from decisionllm.bidding.market.market import Market
from decisionllm.bidding.market.observation import (
    MIN_REMAINING,
    ObservationSpec,
    task_facts,
    task_text,
)
from decisionllm.checks import check_at_least, check_one_of
from decisionllm.datasets.dataset_reader import DatasetReader
from decisionllm.datasets.store import Store, episode_facts, replace_task_texts
from decisionllm.progress import track
from decisionllm.protocols import Source
from decisionllm.registry import Node
from decisionllm.schema import Episode, Json, Spec

TEACHERS = ("oracle", "teacher")
TEXTS = ("none", "constant", "informative", "paraphrased", "shuffled")
NUM_CAMPAIGNS = 4000  # of a teacher by default, which its name does not say


def load(
    *,
    path: str = "",
    periods: str = "",
    text: str = "none",
    observation: str = "auctionnet",
    context_features: str = "none",
    reward: str = "conversions",
    relabel: int = 0,
    behaviour: str = "reference",
    num_campaigns: int = 4000,
    seed: int = 0,
) -> Source:
    """Advertisers' days as episodes; the days of one period share their group.

    Args:
        path: a file, a folder or a pattern: .csv, .csv.gz or .parquet, a traffic or a trajectory
            log; empty: days of our own market, with the bidders of `behaviour`. With a teacher: a
            folder of replay days, which `export=replay:folder/` makes.
        periods: such as `0-6` or `7,8`; empty: all there are, 0-6 of the market.
        text: see `ObservationSpec`.
        observation: see `ObservationSpec`.
        context_features: see `ObservationSpec`.
        reward: see `ObservationSpec`. An evaluation always scores counted conversions.
        relabel: how many relabelled copies of each day to add, see `relabel_log`.
        behaviour: who bids in our own market, see `bidders.behaviour_roster`; or a teacher on replay
            days, see `generate_taught_log`: `oracle` or `teacher`.
        num_campaigns: how many campaigns a teacher bids for.
        seed: draws our own market, relabelled budgets, and what a teacher does.

    Raises:
        ValueError: an unknown option, or a file that is not a complete log.
        FileNotFoundError: no log at `path`.
    """
    check_one_of("dataset.text", text, TEXTS)
    spec = ObservationSpec(observation, context_features, reward, text)
    check_one_of("dataset.behaviour", behaviour, (*BEHAVIOURS, *TEACHERS))
    check_at_least("dataset.relabel", relabel, 0)
    check_at_least("dataset.num_campaigns", num_campaigns, 1)
    if path and behaviour not in (*TEACHERS, "reference"):
        raise ValueError(
            f"dataset.behaviour: expected {' or '.join(TEACHERS)} with dataset.path, whose files"
            f" say who bid, got {behaviour}"
        )
    if relabel and behaviour in TEACHERS:
        raise ValueError(
            f"dataset.relabel: expected 0 with behaviour={behaviour}, whose campaigns have drawn"
            f" budgets, got {relabel}"
        )
    if num_campaigns != NUM_CAMPAIGNS and behaviour not in TEACHERS:
        raise ValueError(
            f"dataset.num_campaigns: expected {NUM_CAMPAIGNS} unless dataset.behaviour is"
            f" {' or '.join(TEACHERS)}, got {num_campaigns}"
        )
    log = read_log(path, periods, behaviour=behaviour, num_campaigns=num_campaigns, seed=seed)
    if path and behaviour not in TEACHERS:
        behaviour = ""  # whoever bid in these files
    all_periods = format_periods(log.period)
    if relabel:
        log = relabel_log(log, relabel, seed)
    campaign_facts = facts(log.budget, log.target_cpa, log.category)
    info = {
        "name": log_name(
            path,
            behaviour,
            seed=seed,
            num_campaigns=num_campaigns,
            periods=all_periods,
            relabel=relabel,
        ),
        "env": "auction",
        **spec.info(),
        "relabel": relabel,
        "seed": seed,
        "behaviour": behaviour,
        "path": path,
        "periods": all_periods,
        "repairs": log.repairs,
    }
    if text == "paraphrased":
        info["wordings"] = facts_by_task(campaign_facts)
    episodes = make_episodes(log, spec, texts(campaign_facts, log.period, text=text))
    columns = log.period, log.advertiser, log.category, log.budget, log.target_cpa
    campaigns = zip(*(x.tolist() for x in columns), strict=True)
    source = campaigns_source(episodes, campaigns, STEPS, info)
    return replace(source, facts=facts_by_task(campaign_facts))


def log_name(
    path: str, behaviour: str, *, seed: int, num_campaigns: int, periods: str, relabel: int
) -> str:
    """The name of a dataset in results; options as in `load`, behaviour empty of given files."""
    name = f"auction@{short_name(path)}" if path else "auction@market"
    if behaviour:
        name += f"-{behaviour}"
    if seed and (behaviour or relabel):  # else nothing is drawn
        name += f"-seed{seed}"
    if behaviour in TEACHERS and num_campaigns != NUM_CAMPAIGNS:
        name += f"-{num_campaigns}-campaigns"
    name += f"-periods-{periods}"
    if relabel:
        name += f"-relabelled-{relabel}"
    return name


def make_episodes(log: Log, spec: ObservationSpec, tasks: Sequence[str]) -> list[Episode]:
    """The K days of a log as episodes. Steps without budget or opportunities are not learned."""
    seen = observations(log, spec).astype(np.float32)
    paid = rewards(log, spec.reward).astype(np.float32)
    actions = log.multiplier[:, :, None].astype(np.float32)
    value = log.states[:, :, STATE.index("value now")]
    learned = (log.remaining >= MIN_REMAINING) & (value > 0)
    lengths = np.where(log.done.any(1), log.done.argmax(1) + 1, STEPS)
    episodes = []
    for k, n in enumerate(lengths):
        rows = seen[k, :n], actions[k, :n], paid[k, :n]
        group = int(log.period[k])
        episodes.append(Episode(*rows, task=tasks[k], group=group, loss_mask=learned[k, :n]))
    return episodes


def data_options(*, text: str = "none", **options: object) -> Json:
    """Return the options that decide the stored data, see `datasets.store`: a text changes texts
    alone.
    """
    if text in TEXTS:
        text = "informative"
    return {"text": text, **options}


def replace_texts(store: Store, *, text: str = "none", **options: object) -> Store:
    """Replace the task texts of a store, see `datasets.store`."""
    return replace_task_texts(store, text, texts(episode_facts(store), store.group, text=text))


def campaigns_source(
    episodes: list[Episode],
    campaigns: Iterable[Iterable[object]],
    horizon: int,
    info: Json,
) -> Source:
    """Campaigns as a dataset.

    campaigns: their periods, advertisers, categories, budgets and target CPAs, kept with the
        returns.
    """
    high = max(float(e.actions.max()) for e in episodes) or 1.0
    size = episodes[0].observations.shape[1]
    spec = Spec(observation_dim=size, action_dim=1, horizon=horizon, low=(0.0,), high=(high,))
    table = []  # as `nearest_returns` reads it
    for campaign, episode in zip(campaigns, episodes, strict=True):
        table.append([*campaign, float(f"{episode.rewards.sum():.4g}")])
    return Source(spec, episodes, info | {"campaigns": table})


def read_log(path: str, periods: str, *, behaviour: str, num_campaigns: int, seed: int) -> Log:
    """The log of a teacher on the days of a folder, of files, or of our own market."""
    if behaviour in TEACHERS:
        days = files(path=path, periods=periods, behaviour=behaviour)
        curves = teacher.Curves(map(read_day, days))
        return generate_taught_log(
            curves, behaviour=behaviour, num_campaigns=num_campaigns, seed=seed
        )
    if path:
        return auctionnet.read(path, periods=periods)
    return generate_log(periods=periods or "0-6", behaviour=behaviour, seed=seed)


def generate_taught_log(
    curves: teacher.Curves, *, behaviour: str, num_campaigns: int, seed: int
) -> Log:
    """A log of random campaigns that a teacher bids for on replayed days.

    A campaign's bids are the teacher's times one random factor, so that states beside its own occur
    too; the log has the teacher's.

    Args:
        curves: the days.
        behaviour: `oracle` or `teacher`, which is fitted to the days first.
        num_campaigns: M.
        seed: draws the campaigns and their conversions, and seeds the fit.
    """
    act, spread = teacher.oracle, 0.25
    if behaviour == "teacher":
        act = teacher.fit_network(curves, seed=seed).act
        spread = 0.1
    generator = torch.Generator().manual_seed(seed)
    drawn = teacher.draw_campaigns(curves, num_campaigns, generator)
    factor = torch.exp(spread * torch.randn(num_campaigns, generator=generator))
    day, advertiser = drawn.day.numpy(), drawn.advertiser.numpy()  # (M,) int
    log = Campaigns(drawn.budget.numpy(), drawn.limit.numpy())
    price = np.stack([d.mean_price for d in curves.days])  # (D, T)
    volumes = np.stack([d.volume for d in curves.days])  # (D, T)
    means = np.stack([d.mean_value for d in curves.days])  # (D, T, N)
    steps = []
    for t in range(STEPS):
        volume = volumes[day, t]
        value = means[day, t, advertiser]
        opportunities = np.maximum(volume, 1)
        with torch.no_grad():
            multiplier = act(drawn)
            bid = multiplier * factor
            spend, exposed, won, made = (x.double().numpy() for x in drawn.bid(bid, generator))
        step = {
            "states": log.observe(value, volume),
            "remaining": log.remaining,
            "multiplier": multiplier.double().numpy(),
            "conversions": made,
            "exposed_value": exposed,
        }
        steps.append(step)
        log.record(
            bid=bid.numpy() * value,
            market_price=price[day, t],
            value=value,
            conversion=made / opportunities,
            won=won / opportunities,
            volume=volume,
            spend=spend,
            conversions=made,
            exposed_value=exposed,
        )
    # (M, T, ...) each
    columns = {name: np.stack([step[name] for step in steps], 1) for name in steps[0]}
    last = np.arange(STEPS) == STEPS - 1
    return Log(
        period=np.array([d.period for d in curves.days])[day],
        advertiser=advertiser,
        category=industries(48)[advertiser],
        budget=log.budgets,
        target_cpa=log.target_cpa,
        spend=log.spend,
        done=(columns["remaining"] < MIN_REMAINING) | last,
        repairs={},
        **columns,
    )


def generate_log(*, periods: str, behaviour: str, seed: int) -> Log:
    """A log of our own market with the bidders of `behaviour` in each of these periods."""
    days = []
    for period in track(parse_periods(periods), "playing periods"):
        market = Market(behaviour_roster(behaviour, period, seed=seed), seed=seed)
        played = market.play(period)  # (T, N, ...)
        N = len(market.budgets)
        day = Log(
            period=np.full(N, period),
            advertiser=np.arange(N),
            category=market.categories,
            budget=market.budgets,
            target_cpa=market.target_cpa,
            states=np.swapaxes(played.states, 0, 1),
            multiplier=played.multipliers.T,
            conversions=played.conversions.T,
            exposed_value=played.exposed_value.T,
            remaining=played.remaining.T,
            spend=played.spend.T.sum(1),
            done=played.done.T,
            repairs={},
        )
        days.append(day)
    return concatenate_logs(days)


def export_days(folder: str, dataset: Node, say: Callable[[str], None]) -> None:
    """Write the replayable days of an auction dataset, a config node, into a folder."""
    if dataset["_target_"] != f"{__name__}.load":
        raise ValueError(f"export=replay: expected dataset=auction, got {dataset['_target_']}")
    for day in replay_days(**dataset):
        path = save_day(folder, day)
        say(f"written: {path}, {day.volume.sum():,} opportunities, prices: {day.prices}")


def replay_days(
    *,
    path: str = "",
    periods: str = "",
    behaviour: str = "reference",
    seed: int = 0,
    **options: object,
) -> Iterator[Day]:
    """The replayable days of files, see `read_days`; without a path, of our own market."""
    selected = parse_periods(periods)
    if path:
        missing_periods = set(selected)
        for day in read_days(path, prices=short_name(path)):
            if not selected or day.period in selected:
                yield day
            missing_periods.discard(day.period)
        if missing_periods:
            missing = format_periods(list(missing_periods))
            raise ValueError(f"dataset.periods: {path} has no period {missing}")
        return
    total = PUBLISHED["opportunities"]
    for period in selected or range(7):
        roster = partial(behaviour_roster, behaviour, period, seed=seed)
        yield play_day(period, roster, total=total, seed=seed)


def relabel_log(log: Log, copies: int, seed: int = 0) -> Log:
    """The days of a log, and copies of each with another budget and target CPA.

    Bids and their results stay as they were until the other budget is used up: one advertiser of
    many hardly moves the market. Budgets are log-uniform in 0.5 x the smallest .. 1.5 x the
    largest, target CPAs uniform in 0.8 x the smallest .. 1.1 x the largest.
    """
    rng = np.random.default_rng(seed)
    again = np.repeat(np.arange(len(log.period)), copies)
    days = log.rows(again)
    low, high = np.log([0.5 * log.budget.min(), 1.5 * log.budget.max()])
    budget = round_to_three_digits(np.exp(rng.uniform(low, high, len(again))))
    low = 0.8 * log.target_cpa.min()
    high = 1.1 * log.target_cpa.max()
    target_cpa = round_to_three_digits(rng.uniform(low, high, len(again)))
    before = days.budget[:, None] - days.remaining  # (K, T), spent before each step
    cost = np.diff(before, axis=1, append=days.spend[:, None])
    remaining = np.maximum(budget[:, None] - before, 0)
    # the share of a step's cost that the other budget pays
    share = np.minimum(np.divide(remaining, cost, out=np.ones_like(cost), where=cost > 0), 1)
    states = days.states.copy()
    states[:, :, STATE.index("budget left")] = remaining / budget[:, None]
    done = days.done | (remaining < MIN_REMAINING)
    done[:, -1] = True
    copied = replace(
        days,
        budget=budget,
        target_cpa=target_cpa,
        states=states,
        remaining=remaining,
        done=done,
        repairs={},
        conversions=days.conversions * share,
        exposed_value=days.exposed_value * share,
        spend=np.minimum(days.spend, budget),
    )
    return concatenate_logs([log, copied])


def round_to_three_digits(x: np.ndarray) -> np.ndarray:
    """Numbers (n,) rounded to three significant digits, as in a text."""
    return np.array([float(f"{number:.3g}") for number in x])


def nearest_returns(
    campaigns: ArrayLike,
    budgets: np.ndarray,
    target_cpa: np.ndarray,
    quantile: float,
    *,
    nearest: int = 48,
) -> np.ndarray:
    """Target returns of N campaigns: a quantile of the returns of similar logged campaigns.

    Args:
        campaigns: the table of a dataset's info, a row a campaign.
        budgets: (N,) currency.
        target_cpa: (N,) currency per conversion.
        quantile: within 0 .. 1.
        nearest: number of logged campaigns, those with the nearest budgets and target CPAs;
            distances are of logarithms.

    Returns:
        (N,) in the reward units of the log.
    """
    table = np.array(campaigns, np.float64)
    apart = np.log(table[:, None, 3:5]) - np.log(np.stack([budgets, target_cpa], 1))  # (days, N, 2)
    rows = np.argsort(np.square(apart).sum(2), axis=0, kind="stable")[:nearest]
    return np.asarray(np.quantile(table[rows, 5], quantile, axis=0))


def observations(log: Log, spec: ObservationSpec) -> np.ndarray:
    """Observations before each step of a log: (K, T, S)."""
    budget = log.budget[:, None]
    spend = budget - log.remaining  # (K, T), before each step as the next two
    conversions = np.cumsum(log.conversions, 1) - log.conversions
    value = np.cumsum(log.exposed_value, 1) - log.exposed_value
    facts_so_far = context_numbers(budget, log.target_cpa[:, None], spend, conversions, value)
    return spec.features(log.states, facts_so_far)


def rewards(log: Log, reward: str) -> np.ndarray:
    """The reward of each step: (K, T). reward: see ObservationSpec."""
    if reward == "conversions":
        return log.conversions
    if reward == "expected_value":
        return log.exposed_value
    # after each step
    spend = np.append(log.budget[:, None] - log.remaining[:, 1:], log.spend[:, None], 1)
    scores = score(np.cumsum(log.exposed_value, 1), spend, log.target_cpa[:, None])
    return np.diff(scores, axis=1, prepend=0)


def texts(facts: Sequence[Json], period: np.ndarray, *, text: str) -> list[str]:
    """The task text of each campaign. text=shuffled exchanges them among the campaigns of a period.

    Args:
        facts: (K,) see `task_facts`.
        period: (K,)
        text: see ObservationSpec.
    """
    spec = ObservationSpec(text=text)
    order = np.arange(len(period))
    if text == "shuffled":
        for number in np.unique(period):
            rng = np.random.default_rng(int(number))
            order[period == number] = rng.permutation(np.flatnonzero(period == number))
    named = [facts[k] for k in order.tolist()]
    return [
        spec.task(campaign["budget"], campaign["cpa"], campaign["category"]) for campaign in named
    ]


def facts(budget: np.ndarray, target_cpa: np.ndarray, category: np.ndarray) -> list[Json]:
    """The facts of K campaigns, (K,) each."""
    return list(map(task_facts, budget, target_cpa, category))


def facts_by_task(facts: Sequence[Json]) -> dict[str, Json]:
    """The facts of campaigns by their informative texts."""
    return {
        task_text(campaign["budget"], campaign["cpa"], campaign["category"]): campaign
        for campaign in facts
    }


def files(
    *, path: str = "", periods: str = "", behaviour: str = "", **options: object
) -> list[Path]:
    """The files that `load` reads with these options."""
    if behaviour in TEACHERS:
        return list(find_day_files(path, parse_periods(periods), option="dataset.path").values())
    return log_files(path) if path else []


def short_name(path: str) -> str:
    """A short name of a log: its file's, or its folder's."""
    location = Path(path).expanduser()
    if location.is_file():
        return location.name.split(".")[0]
    folder = location if location.is_dir() else location.parent
    return folder.resolve().name


def save(path: str, store: Store) -> None:
    """Write an auction's store as a trajectory log.

    The log is read again: a store has float32 and ends days early.
    """
    if store.info.get("env") != "auction":
        got = store.info["name"]
        raise ValueError(f"export=trajectories: expected an auction dataset, got {got}")
    if store.info["relabel"]:
        raise ValueError(
            "export=trajectories: expected dataset.relabel=0, since such a log has one budget for"
            f" each advertiser and day; got {store.info['relabel']}"
        )
    options = {name: store.info[name] for name in ("path", "periods", "behaviour", "seed")}
    log = read_log(**options, num_campaigns=len(store.lengths))
    auctionnet.write(path, log)


# Version 2: the library of sentence frames has another name.
READER = DatasetReader(version=2, files=files, data_options=data_options, set_texts=replace_texts)
