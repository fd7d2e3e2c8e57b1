"""A report of what each model of a journal achieved, and of differences that are more than noise.

A campaign counts for the model that answered all of its ticks, once it has ended. Campaigns differ
more than models do: each is compared with what campaigns of the same settings achieve, whichever
model answered them.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import numpy as np
from scipy import stats

from decisionllm.bidding.journal.journal import DamagedRowError, Journal
from decisionllm.bidding.market.campaigns import score
from decisionllm.schema import Json

RESAMPLES = 10_000
MIN_CAMPAIGNS = 10  # campaigns of a model, below which no difference is stated
SIGNIFICANCE = 0.05  # p value from which a difference counts as noise
KIND_SETTINGS = (
    "budget",
    "target_cpa",
    "category",
    "horizon",
)  # settings of campaigns that are alike
BATCH_NUMBERS = 2_000_000  # numbers of the resamples that are drawn at once
Range = tuple[float, float]
Statistic = Callable[..., np.ndarray]  # (columns (..., n), axis) -> (...)


@dataclass(frozen=True)
class Outcome:
    """An ended campaign. Money in currency."""

    model: str
    kind: tuple[object, ...]  # its settings, see SAME
    attainable: float  # conversions that its budget buys at the target CPA
    spend: float
    conversions: float
    score: float


@dataclass(frozen=True)
class ModelSummary:
    """A model's campaigns: means of a campaign with 95 % bootstrap intervals."""

    model: str
    campaigns: int
    spend: float
    conversions: float
    conversions_interval: Range
    cpa: float  # currency per conversion, over all campaigns
    cpa_interval: Range
    score: float
    score_interval: Range


@dataclass(frozen=True)
class Difference:
    """Score of one model over that of another in campaigns of the same settings, less 1.

    Attributes:
        interval: 95 % bootstrap interval; infinite where a sample of the baseline has no score.
        p: share of random assignments of the campaigns to the two models with a larger difference.
    """

    model: str
    baseline: str
    score: float
    interval: Range
    p: float

    @property
    def more_than_noise(self) -> bool:
        return self.p < SIGNIFICANCE


@dataclass(frozen=True)
class Report:
    models: list[ModelSummary]
    differences: list[Difference]
    open: int  # campaigns that have not ended
    moved: int  # campaigns that more than one model answered
    damaged: int

    def as_dict(self) -> Json:
        """The report in values of JSON, which has no infinity: None in place of it."""
        text = json.dumps(asdict(self))
        values: Json = json.loads(text, parse_constant=lambda name: None)
        for each, row in zip(self.differences, values["differences"], strict=True):
            row["more_than_noise"] = each.more_than_noise
        return values


def compare_models(journal: Journal) -> Report:
    """Compare the models of a journal. The one with the most campaigns is the baseline."""
    outcomes, left_out = read_outcomes(journal)
    by_model: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_model[outcome.model].append(outcome)
    names = sorted(by_model, key=lambda name: (-len(by_model[name]), name))
    enough = [name for name in names if len(by_model[name]) >= MIN_CAMPAIGNS]
    differences = []
    # nothing is a share of a score of 0
    if enough and any(outcome.score for outcome in by_model[enough[0]]):
        differences = [
            compare_scores(by_model[name], by_model[enough[0]], np.random.default_rng(0))
            for name in enough[1:]
        ]
    return Report([summarize_model(by_model[name]) for name in names], differences, **left_out)


def read_outcomes(journal: Journal) -> tuple[list[Outcome], dict[str, int]]:
    """The ended campaigns of a journal, and how many of the others there are, by reason."""
    left_out = {"open": 0, "moved": 0, "damaged": 0}
    outcomes = []
    for campaign in journal.campaigns():
        if campaign["ended"] is None:
            left_out["open"] += 1
            continue
        try:
            answers = [tick["answer"] for tick in journal.ticks(campaign["id"])]
        except DamagedRowError:
            continue
        models = {answer["model"] for answer in answers}
        if len(models) > 1:
            left_out["moved"] += 1
        elif answers:
            outcomes.append(build_outcome(campaign, answers[-1]))
    # each row that was found to be damaged above is the first one of its campaign
    left_out["damaged"] = len(journal.damaged)
    return outcomes, left_out


def build_outcome(campaign: Json, last: Json) -> Outcome:
    """The outcome of a campaign by the answer to its last tick."""
    budget = campaign["budget"]
    target_cpa = campaign["target_cpa"]
    conversions, spend = last["conversions"], last["spend"]
    return Outcome(
        model=last["model"],
        kind=tuple(campaign[name] for name in KIND_SETTINGS),
        attainable=budget / target_cpa,
        spend=spend,
        conversions=conversions,
        score=float(score(conversions, spend, target_cpa)),
    )


def summarize_model(outcomes: list[Outcome]) -> ModelSummary:
    """Means of one model's campaigns."""
    spend = column(outcomes, "spend")
    conversions = column(outcomes, "conversions")
    scores = column(outcomes, "score")
    return ModelSummary(
        model=outcomes[0].model,
        campaigns=len(outcomes),
        spend=float(spend.mean()),
        conversions=float(conversions.mean()),
        conversions_interval=bootstrap_interval(np.mean, conversions),
        cpa=float(cost_per_conversion(spend, conversions)),
        cpa_interval=bootstrap_interval(cost_per_conversion, spend, conversions),
        score=float(scores.mean()),
        score_interval=bootstrap_interval(np.mean, scores),
    )


def column(outcomes: Iterable[Outcome], name: str) -> np.ndarray:
    """Return one number of each outcome, (n,)."""
    return np.array([vars(outcome)[name] for outcome in outcomes], np.float64)


def cost_per_conversion(spend: np.ndarray, conversions: np.ndarray, axis: int = -1) -> np.ndarray:
    """Currency per conversion over all campaigns; infinity without conversions."""
    total = np.asarray(conversions.sum(axis))
    cost = np.full(total.shape, np.inf)
    np.divide(spend.sum(axis), total, out=cost, where=total > 0)
    return cost


def bootstrap_interval(statistic: Statistic, *data: np.ndarray) -> Range:
    """The 95 % bootstrap interval of a statistic of campaigns, in batches that fit into memory."""
    if len(data[0]) < 2 or not any(np.ptp(values) for values in data):
        value = float(statistic(*data, axis=-1))
        return value, value
    bootstrap = stats.bootstrap(
        data,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=batch_size(len(data[0])),
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(bootstrap.confidence_interval.low), float(bootstrap.confidence_interval.high)


def batch_size(n: int) -> int:
    """Resamples of n campaigns that are drawn at once."""
    return max(BATCH_NUMBERS // n, 1)


def compare_scores(
    treated: list[Outcome],
    baseline: list[Outcome],
    rng: np.random.Generator,
    *,
    resamples: int = RESAMPLES,
) -> Difference:
    """The difference in score between the campaigns of two models, in the same settings."""
    both = [*treated, *baseline]
    n = len(treated)
    scores = column(both, "score")
    expected, shrunk = expected_scores(both)
    totals = scores[:n].sum(), scores[n:].sum(), expected[:n].sum(), expected[n:].sum()
    # a score is nearer to the mean of its kind, which it is a part of, than to a new campaign's
    spread = expected + (scores - expected) * shrunk
    # where one of the two groups has no score, the difference or its logarithm is infinite
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        effect = float(relative_difference(*totals))
        chance = permuted_differences(scores, expected, n, rng, resamples)
        as_large = np.abs(np.log1p(chance)) >= abs(np.log1p(effect)) - 1e-12
        low, high = np.quantile(
            bootstrap_differences(spread, expected, n, rng, resamples), [0.025, 0.975]
        )
    return Difference(
        model=treated[0].model,
        baseline=baseline[0].model,
        score=effect,
        interval=(float(low), float(high)),
        p=float((1 + as_large.sum()) / (1 + resamples)),
    )


def permuted_differences(
    scores: np.ndarray, expected: np.ndarray, n: int, rng: np.random.Generator, count: int
) -> np.ndarray:
    """Draw differences between n random campaigns and the others, (count,): the null distribution,
    without a difference of the models.
    """
    size = len(scores)

    def draw(count: int) -> np.ndarray:
        orders = rng.permuted(np.tile(np.arange(size), (count, 1)), axis=1)[:, :n]
        score = scores[orders].sum(1)
        likely = expected[orders].sum(1)
        return relative_difference(score, scores.sum() - score, likely, expected.sum() - likely)

    return draw_in_batches(draw, count, size)


def bootstrap_differences(
    scores: np.ndarray, expected: np.ndarray, n: int, rng: np.random.Generator, count: int
) -> np.ndarray:
    """Draw differences between bootstrap samples of the first n campaigns and of the others,
    (count,).
    """
    size = len(scores)

    def draw(count: int) -> np.ndarray:
        ours = rng.integers(n, size=(count, n))
        others = rng.integers(n, size, size=(count, size - n))
        return relative_difference(
            scores[ours].sum(1),
            scores[others].sum(1),
            expected[ours].sum(1),
            expected[others].sum(1),
        )

    return draw_in_batches(draw, count, size)


def draw_in_batches(draw: Callable[[int], np.ndarray], count: int, n: int) -> np.ndarray:
    """Draw resamples of n campaigns in batches that fit into memory, (count,)."""
    most = batch_size(n)
    parts = [draw(min(most, count - done)) for done in range(0, count, most)]
    return np.concatenate(parts)


def relative_difference(
    score: np.ndarray, other: np.ndarray, expected: np.ndarray, other_expected: np.ndarray
) -> np.ndarray:
    """Score over expectation of one group of campaigns, over that of another, less 1."""
    tiny = np.finfo(float).tiny  # without any score both are equal
    ratio = (score + tiny) / (other + tiny) * other_expected / expected
    return np.asarray(ratio - 1)


def expected_scores(outcomes: list[Outcome]) -> tuple[np.ndarray, np.ndarray]:
    """The score that each campaign is expected to have, whichever model answers it.

    It is the mean of the campaigns of its settings. Where there is only one of them, it is in
    proportion to the conversions that the budget buys at the target CPA.

    Returns:
        (n,) expected scores, and (n,) factors by which the distance of a score from its own
        expectation is too small.
    """
    kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, outcome in enumerate(outcomes):
        kinds[outcome.kind].append(i)
    alone = [rows[0] for rows in kinds.values() if len(rows) == 1]
    groups = [rows for rows in kinds.values() if len(rows) > 1]
    scores = column(outcomes, "score")
    attainable = column(outcomes, "attainable")
    expected = np.zeros(len(outcomes))
    shrunk = np.ones(len(outcomes))
    for rows in [*groups, alone] if alone else groups:
        expected[rows] = attainable[rows] * scores[rows].sum() / attainable[rows].sum()
        if len(rows) > 1:
            shrunk[rows] = np.sqrt(len(rows) / (len(rows) - 1))
    return np.maximum(expected, np.finfo(float).tiny), shrunk


def format_report(comparison: Report) -> str:
    """The report as lines for a terminal."""
    header = (
        f"{'model':30s} {'campaigns':>9s} {'conversions':>20s} {'cost each':>22s} {'score':>20s}"
    )
    lines = [
        header,
        *map(format_model, comparison.models),
        *map(format_difference, comparison.differences),
    ]
    if len(comparison.models) > len(comparison.differences) + 1:
        lines.append(
            f"a model with fewer than {MIN_CAMPAIGNS} ended campaigns is not compared, and none is"
            " compared with a model without a score"
        )
    lines.append(
        f"left out: {comparison.open} open campaigns, {comparison.moved} of several models,"
        f" {comparison.damaged} damaged"
    )
    return "\n".join(lines)


def format_model(row: ModelSummary) -> str:
    conversions = f"{row.conversions:.2f} {format_interval(row.conversions_interval, 2)}"
    cpa = f"{row.cpa:.1f} {format_interval(row.cpa_interval, 1)}"
    scored = f"{row.score:.2f} {format_interval(row.score_interval, 2)}"
    return f"{row.model:30s} {row.campaigns:9d} {conversions:>20s} {cpa:>22s} {scored:>20s}"


def format_difference(compared: Difference) -> str:
    verdict = "more than noise" if compared.more_than_noise else "not more than noise"
    low, high = compared.interval
    return (
        f"{compared.model} scores {compared.score:+.1%} [{low:+.1%}, {high:+.1%}] against"
        f" {compared.baseline} in campaigns of the same settings, p {compared.p:.4f}: {verdict}"
    )


def format_interval(interval: Range, digits: int) -> str:
    low, high = interval
    return f"[{low:.{digits}f}, {high:.{digits}f}]"
