"""The report on a split: a better model is found, two copies of one are not told apart."""

import json

import numpy as np
import pytest

from decisionllm.bidding.journal.campaign_history import SETTINGS
from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.journal.rows import end_campaign, insert_campaign, insert_tick
from decisionllm.bidding.server.ab_report import (
    Outcome,
    compare_models,
    compare_scores,
    cost_per_conversion,
    format_report,
)
from decisionllm.bidding.server.models import assign_model

ADVERTISERS, DAYS = 48, 20


def outcomes(better, seed, split=0.5):
    """Days of advertisers whose sizes differ tenfold, each assigned by its id. Conversions are
    counted, the market of a day is easy or hard, and the second model buys more for its money.
    """
    rng = np.random.default_rng(seed)
    budgets = rng.uniform(1000, 10_000, ADVERTISERS)
    cpas = rng.uniform(60, 130, ADVERTISERS)
    markets = rng.lognormal(-0.1, 0.15, (DAYS, ADVERTISERS))
    for day in range(DAYS):
        for i in range(ADVERTISERS):
            id = f"{seed}-{day}-{i}"
            model = assign_model(id, {"a@1": 1 - split, "b@1": split})
            factor = 1 + better * (model == "b@1")
            mean = budgets[i] / cpas[i] * markets[day, i] * factor
            spend = budgets[i] * rng.uniform(0.85, 1.0)
            yield id, model, float(budgets[i]), float(cpas[i]), spend, float(rng.poisson(mean))


def written(path, better, seed=0):
    journal = Journal(path)
    entries = []
    for id, model, budget, cpa, spend, conversions in outcomes(better, seed):
        campaigns = dict.fromkeys(SETTINGS) | {"budget": budget, "target_cpa": cpa}
        campaigns |= {"category": 0, "horizon": 1}
        answer = {"index": 1, "spend": spend, "conversions": conversions, "model": model}
        entries += [
            insert_campaign(id, None, campaigns, model),
            insert_tick(id, 0, "{}", json.dumps(answer | {"index": 0, "spend": 0.0}), model),
            insert_tick(id, 1, "{}", json.dumps(answer), model),
            end_campaign(id, "over"),
        ]
    journal.write(entries)
    return journal


def test_a_model_that_is_five_percent_better_is_found(tmp_path):
    result = compare_models(written(tmp_path / "j", 0.05))
    assert sum(row.campaigns for row in result.models) == ADVERTISERS * DAYS
    (difference,) = result.differences
    assert {difference.model, difference.baseline} == {"a@1", "b@1"}
    assert difference.more_than_noise and difference.p < 0.01
    assert (difference.score > 0) == (difference.model == "b@1")
    low, high = difference.interval
    assert low < difference.score < high and not low <= 0 <= high
    assert "p 0.00" in format_report(result) and "more than noise" in format_report(result)


def test_two_copies_are_not_told_apart(tmp_path):
    (difference,) = compare_models(written(tmp_path / "j", 0.0)).differences
    low, high = difference.interval
    assert not difference.more_than_noise and low <= 0 <= high
    assert high - low < 0.12, "the interval is narrow enough to see five percent"


@pytest.mark.slow
def test_it_errs_as_rarely_as_it_says():
    """Of simulated splits of copies one in twenty differs; of 5 % nearly all do."""

    def count_hits(better, count):
        hits = 0
        for seed in range(count):
            groups = {"a@1": [], "b@1": []}
            for _, model, budget, cpa, spend, conversions in outcomes(better, seed):
                scored = conversions * min(1, (cpa * conversions / spend)) ** 2
                kind = (budget, cpa)
                groups[model].append(Outcome(model, kind, budget / cpa, spend, conversions, scored))
            rng = np.random.default_rng(seed)
            difference = compare_scores(groups["b@1"], groups["a@1"], rng, resamples=499)
            hits += difference.more_than_noise
        return hits

    assert count_hits(0.0, 60) <= 8  # 3 are expected; more than 8 happen once in 200 times
    assert count_hits(0.05, 30) >= 24


def test_campaigns_of_two_models_open_and_damaged_ones_are_left_out(tmp_path):
    journal = Journal(tmp_path / "j")
    entries = dict.fromkeys(SETTINGS) | {"budget": 100.0, "target_cpa": 10.0, "category": 0}
    entries["horizon"] = 1
    answer = {"index": 0, "spend": 50.0, "conversions": 4.0}
    for id, models in (("one", "aa"), ("two", "ab"), ("bad", "aa"), ("open", "a"), ("empty", "")):
        journal.write([insert_campaign(id, None, entries, "a")])
        for step, model in enumerate(models):
            journal.write([insert_tick(id, step, "{}", json.dumps(answer | {"model": model}), "a")])
        if id != "open":
            journal.write([end_campaign(id, "over")])
    journal.write([insert_campaign("worse", None, entries, "a"), end_campaign("worse", "over")])
    journal._writer.execute("UPDATE ticks SET answer = answer || ' ' WHERE campaign = 'bad'")
    journal._writer.execute("UPDATE campaigns SET facts = facts || ' ' WHERE id = 'worse'")
    result = compare_models(journal)
    assert (result.open, result.moved, result.damaged) == (1, 1, 2)
    (row,) = result.models
    # by hand: 4 conversions for 50 at 12.5 each, of which 10 was wanted: 4 x (10 / 12.5)^2
    assert (row.campaigns, row.conversions, row.cpa) == (1, 4.0, 12.5)
    assert row.score == pytest.approx(2.56) and row.score_interval == (row.score, row.score)
    assert result.differences == [] and json.dumps(result.as_dict())


@pytest.mark.parametrize(("first", "second"), [(0.0, 2.0), (2.0, 0.0)])
def test_a_model_without_a_conversion_is_reported_and_no_baseline(tmp_path, first, second):
    journal = Journal(tmp_path / "j")
    entries = dict.fromkeys(SETTINGS) | {"budget": 100.0, "target_cpa": 10.0, "category": 0}
    entries["horizon"] = 1
    for i in range(20):
        model, conversions = (("a@1", first), ("b@1", second))[i % 2]
        answer = {"index": 0, "spend": 50.0, "conversions": conversions, "model": model}
        tick = insert_tick(f"{i}", 0, "{}", json.dumps(answer), model)
        journal.write(
            [insert_campaign(f"{i}", None, entries, model), tick, end_campaign(f"{i}", "over")]
        )
    result = compare_models(journal)
    entries = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert {row["model"]: row["cpa"] for row in entries["models"]}["ab"[first > 0] + "@1"] is None
    assert [row["score"] for row in entries["differences"]] == [-1.0] * (first > 0)
    assert "inf" in format_report(result)


def test_cost_per_conversion_counts_all_campaigns_together():
    spend, conversions = np.array([30.0, 10.0]), np.array([1.0, 3.0])
    assert cost_per_conversion(spend, conversions) == 10.0
    assert cost_per_conversion(spend, 0 * conversions) == np.inf
