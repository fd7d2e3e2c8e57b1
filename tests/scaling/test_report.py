"""The report of a study: a law planted in study.json is on the page."""

import json
import math
import re
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from decisionllm.scaling import figures, law
from decisionllm.scaling import report as study

STUDIES = Path(__file__).parents[2] / "lab" / "studies"
TRUE = law.Law(E=0.4, A=60.0, alpha=0.45, B=90.0, beta=0.55)
SIZES = {"30k": 3e4, "150k": 1.5e5, "600k": 6e5, "2500k": 2.5e6, "10000k": 1e7}


def planted(loss_of=TRUE, noise=0.005, **changes):
    """A study.json of 80 runs whose losses follow a law; the score falls with loss."""
    rng, runs = np.random.default_rng(0), []
    for (size, N), fraction, mixture, seed in product(
        SIZES.items(), (0.01, 0.1, 0.3, 1.0), ("0", "0.5"), (0, 1)
    ):
        D, loss = 1e6 * fraction * (0.5 if mixture == "0.5" else 1), 0.0
        loss = float(loss_of(N, D) * np.exp(noise * rng.normal()))
        runs.append(
            {
                "run": f"{len(runs):016x}",
                "state": "done",
                "size": size,
                "fraction": fraction,
                "mixture": mixture,
                "seed": seed,
                "lr": 1e-3,
                "held_out": loss + 0.45,
                "floor": 0.45,
                "action_error": 0.3,
                "score": 100 / (1 + float(np.exp(3 * (loss - 1)))),
                "low": 0,
                "high": 1,
                "parameters": int(N),
                "trained": int(N),
                "non_embedding": int(N),
                "data_steps": int(D),
                "steps": 100,
                "tokens": 1000,
                "flops": 6 * N * 1000,
                "train_seconds": 1.0,
                "quality": 1.3 if mixture == "0.5" else 1.0,
                "metrics": {
                    "reached": 0.25 if size == "30k" else 0.5 + 0.1 * seed,
                    "by_goal.north.reached": 1.0,
                    "length": 30.0,
                },
                "curve": [[50, loss + 1, loss + 1], [100, loss, loss]],
            }
        )
    node = {"name": "planted", "budget": {"rule": "steps"}, "lr": {"rule": "sweep"}, "exclude": []}
    tuned = {size: {"0.0001": 9.0, "0.001": 1.0, "0.01": 9.0} for size in SIZES}
    return {
        "study": node,
        "versions": {},
        "flops": "6 N a token",
        "tuned": tuned,
        "runs": runs,
    } | changes


def test_computation_is_written_in_powers_of_ten():
    assert study.power_of_ten(3.14159e13) == ("3.14", 13)
    assert study.power_of_ten(7.0) == ("7.00", 0)


def test_pairs_differ_in_one_axis_alone_and_are_measured_on_the_same_data():
    rows = [
        ("a", 1.0, "0", 0, "maze", 5.0),
        ("a", 1.0, "0", 1, "maze", 7.0),
        ("a", 1.0, "0", 2, "maze", 7.0),
        ("b", 1.0, "0", 0, "maze", 4.0),
        ("b", 1.0, "0", 1, "maze", 9.0),
        ("b", 1.0, "0", 2, "auction", 9.0),
        ("b", 0.5, "0", 0, "maze", 1.0),
    ]
    grid = pd.DataFrame(rows, columns=[*study.COMPARABLE, "held_out"])
    assert study.paired_differences(grid, "held_out", "size", "b", "a").tolist() == [-1, 2]


def report(folder, actual):
    study.write_report(folder, actual, say=lambda text: None)
    written = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    return written["fits"], " ".join(
        line for lines in written["sentences"].values() for line in lines
    )


def found_in(actual):
    """The comparisons of sizes that the report of a study makes, without its laws and figures."""
    return " ".join(study.describe_comparisons(study.select_finished_runs(actual)))


@pytest.fixture(scope="module")
def planted_report(tmp_path_factory):
    """The report of a planted law, with a tuning run: its folder, fits and sentences."""
    folder, actual = tmp_path_factory.mktemp("planted"), planted()
    actual["runs"].append(actual["runs"][0] | {"run": "tuned", "lr": 1e-2, "held_out": 50.0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(law.describe.__kwdefaults__, "draws", 50)
        return folder, *report(folder, actual)


@pytest.fixture
def figures_without_pixels(monkeypatch):
    """Figures are drawn and saved, but not rendered; those of the planted law are."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: path.touch())


def test_a_planted_law_is_reported_with_its_intervals(planted_report):
    folder, fits, text = planted_report
    low, high = fits["law"]["intervals"]["alpha"]
    assert low <= TRUE.alpha <= high and abs(fits["left_out"]["missed"]) < 0.02
    for words in (
        "the loss falls with more parameters",
        "the loss falls with more data",
        "the law misses its losses by",
        "Score and loss: the score rises as the loss falls",
        "reached, 100% of the data: 30k 0.25",
    ):
        assert words in text
    assert (
        "held-out loss, 100% of the data: 10000k against 30k: -" in text
        and "the best size is 10000k" in text
    )
    assert (
        "learning rate 0.001, by held-out loss on the smallest data" in text
        and "the edge of" not in text
    )
    assert {path.stem for path in folder.glob("*.png")} == set(figures.CAPTIONS)


def test_what_evaluations_measure_is_reported_by_size_on_the_first_quality():
    actual = planted()
    for run in actual["runs"]:
        run["metrics"]["reached"] += 9 * (run["mixture"] == "0.5")
    values = study.collect_metrics(actual, study.select_finished_runs(actual))
    text = " ".join(study.describe_metrics(values))
    assert (
        "reached, 100% of the data: 30k 0.25 (0.25 .. 0.25, 2 runs)" in text
        and "10000k 0.55 (0.5 .. 0.6, 2 runs)" in text
    )
    assert "length, 100% of the data: 30k 30 (30 .. 30, 2 runs)" in text and "by_goal" not in text
    shares = values.groupby("metric")["value"].agg(lambda x: bool(x.between(0, 1).all()))
    assert shares.to_dict() == {"reached": True, "length": False}, "a figure shows shares alone"


def test_a_crossover_is_reported():
    """The largest size is the worst on the least data."""
    worse = lambda N, D: TRUE(N, D) * (2 if N > 5e6 and D < 2e4 else 1)  # noqa: E731
    text = found_in(planted(worse, noise=0.001))
    assert (
        "1% of the data: the best size is 2500k" in text
        and "100% of the data: the best size is 10000k" in text
    )


@pytest.mark.usefixtures("figures_without_pixels")
def test_noise_is_reported_as_no_trend(tmp_path):
    fits, text = report(tmp_path, planted(lambda N, D: 1.0, noise=0.1))
    assert (
        fits["law"] is None
        and text.count("no trend, the loss does not fall") == 2
        and "No law is fitted" in text
    )


def test_tuning_runs_are_in_the_table_and_not_in_the_fit(planted_report):
    folder, *_ = planted_report
    actual = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    assert len(actual["runs"]) == 81 and len(study.select_finished_runs(actual)) == 80
    assert 'href="tuned/"' in (folder / "report.html").read_text(encoding="utf-8")


def test_an_excluded_cell_does_not_return_by_its_tuning_run():
    actual = planted()
    actual["study"]["exclude"] = [{"size": "30k", "fraction": [0.01], "quality": "0"}]
    left = study.select_finished_runs(actual)
    assert len(left) == 80 - 2 and not ((left["size"] == "30k") & (left["data_steps"] == 1e4)).any()


def test_scores_are_compared_with_losses_within_a_world():
    """Within each of two worlds the score rises with the loss, though not over both."""
    actual = planted()
    for run in actual["runs"]:
        run["reference"] = run["mixture"]
        run["held_out"] += 5 * (run["mixture"] == "0.5")
        run["score"] = run["held_out"] - 20 * (run["mixture"] == "0.5")
    assert study.trend_p_values(study.select_finished_runs(actual))["score"] == 1
    lines = study.describe_comparisons(study.select_finished_runs(actual))
    assert not any("quality 0.5 against 0" in line for line in lines)


def test_the_versions_of_runs_that_differ_from_the_reports_are_named():
    actual = planted(versions={"commit": "b", "torch": "2"})
    actual["runs"] = [
        run | {"versions": {"commit": commit, "torch": "2"}}
        for run, commit in zip(actual["runs"], "aab", strict=False)
    ]
    sentences = study.describe_tuning(actual)
    assert sentences[0] == "commit: the runs had a (2 runs), b (1 runs), this report b."
    assert "All seeds of a size train on the same episodes" in sentences[1]


def lines_of_curves(actual):
    """The (steps, losses) of each line in the figure of the curves that is not empty."""
    panels = figures.Panels()
    figures.plot_curves(
        panels.add("curves", "step", "loss", log="x"), study.select_finished_runs(actual)
    )
    panels.finish()
    lines = panels.figures["curves"].axes[0].lines
    return [(*line.get_data(),) for line in lines if len(line.get_xdata())]


def test_the_curve_of_an_interrupted_run_has_no_gap():
    """The line at which a run stopped has no held-out loss."""
    actual = planted()
    actual["runs"] = actual["runs"][:3]
    stopped, whole, without_curve = actual["runs"]
    stopped["curve"] = [[2, 6.0, 5.0], [3, 5.5, None], [4, 5.0, 4.0]]
    whole["curve"] = [[2, 6.0, 3.0], [4, 5.0, 2.0]]
    del without_curve["curve"]
    first, second = lines_of_curves(actual)
    assert [x.tolist() for x in first] == [[2, 4], [5, 4]]
    assert [x.tolist() for x in second] == [[2, 4], [3, 2]]
    for run in actual["runs"]:
        run["curve"] = []
    assert lines_of_curves(actual) == []


@pytest.mark.parametrize("loss", [None, math.nan, math.inf])
def test_a_run_without_a_finite_loss_is_left_out_and_named(loss):
    actual = planted()
    actual["tuned"]["30k"]["0.0001"] = math.nan
    actual["runs"][3]["held_out"] = loss
    grid = study.select_finished_runs(actual)
    assert len(grid) == 79 and study.trend_p_values(grid)["size"] <= law.CERTAIN
    sentence = "Left out, since their held-out loss is not a finite number: 0000000000000003."
    assert sentence in study.describe_tuning(actual)


@pytest.mark.parametrize("count", [3, 12, 25])
def test_each_size_has_a_colour_of_its_own(count):
    assert len({*figures.make_palette(pd.Series([*range(count), 0]))}) == count


def test_a_study_without_finished_runs_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="expected at least one run of the grid that is done, found none"
    ):
        study.write_report(tmp_path, planted(runs=[]))
    assert not list(tmp_path.iterdir())


def test_the_best_size_is_that_of_the_first_quality():
    """The other qualities may lack some sizes, so that their mean would be of other data."""
    actual = planted(lambda N, D: 1.0 if N < 1e6 else 0.9)
    for run in actual["runs"]:
        run["held_out"] += 5.0 * (run["mixture"] == "0.5")
    actual["runs"] = [
        run for run in actual["runs"] if run["mixture"] == "0" or run["size"] in ("2500k", "10000k")
    ]
    text = found_in(actual)
    assert (
        "held-out loss, 100% of the data: the best size is 2500k" in text
        or "the best size is 10000k" in text
    )
    assert (
        "loss, 100% of the data: the best size is 30k" not in text
        and "loss, 100% of the data: the best size is 150k" not in text
    )


def best(losses):
    """What the report says about the best of these sizes: {size: the held-out losses of seeds 0, 1
    and 2}.
    """
    rows = [
        (size, 1.0, "0", seed, "", loss)
        for size, each in losses.items()
        for seed, loss in enumerate(each)
    ]
    part = pd.DataFrame(rows, columns=[*study.COMPARABLE, "held_out"])
    return study.describe_best_size("loss", part, "held_out", [*losses], -1)


def test_a_size_is_the_best_only_beyond_chance():
    """b is the best mean; a is above it in all seeds, or better in one of them."""
    assert best({"a": [3, 3, 4], "b": [1, 2, 2]}) == ["loss: the best size is b."]
    (said,) = best({"a": [1, 3, 4], "b": [2, 2, 3], "c": [8, 9, 9], "d": [2, 3, 3]})
    assert (
        said
        == "loss: no size is the best beyond chance; a, b, d cannot be told apart, the smallest of them is a."
    )
    one_run = best({"a": [3], "b": [2]})
    assert one_run == ["loss: b has the best mean; one run of a size tells it from no other."]
    assert (
        best({"a": [3, 3, 4]}) == [] == best({"a": [3, float("nan"), 4], "b": [float("nan")] * 3})
    ), "nothing to compare"


def test_a_size_with_one_run_is_not_compared():
    actual = planted()
    actual["runs"] = [
        run
        for run in actual["runs"]
        if run["size"] != "10000k" or (run["seed"], run["mixture"]) == (0, "0")
    ]
    text = found_in(actual)
    assert (
        "held-out loss, 100% of the data: 2500k against 30k" in text
        and "10000k against" not in text
    )


@pytest.mark.slow
@pytest.mark.usefixtures("figures_without_pixels")
@pytest.mark.parametrize("name", sorted(path.parent.name for path in STUDIES.glob("*/study.json")))
def test_a_published_study_is_reported_again_from_its_json(name, tmp_path, monkeypatch):
    # the width of an interval is not compared
    monkeypatch.setitem(law.describe.__kwdefaults__, "draws", 10)
    published = json.loads((STUDIES / name / "study.json").read_text(encoding="utf-8"))
    study.write_report(
        tmp_path, study.read_study(STUDIES / name / "study.json"), say=lambda text: None
    )
    again = json.loads((tmp_path / "study.json").read_text(encoding="utf-8"))
    verdicts = [
        [text.rpartition(": ")[2] for text in actual["sentences"]["findings"]]
        for actual in (published, again)
    ]
    assert verdicts[0] == verdicts[1] and len(verdicts[0]) > 3
    assert (published["fits"]["law"] is None) == (again["fits"]["law"] is None)
    assert published["fits"]["p"] == again["fits"]["p"]
    assert {path.name for path in tmp_path.glob("*.png")} >= {
        path.name for path in (STUDIES / name).glob("*.png")
    }
    assert name in (STUDIES / "README.md").read_text(encoding="utf-8") and all(
        run["state"] == "done" for run in published["runs"]
    )


def test_the_page_of_the_studies_shows_every_published_figure():
    shown = re.findall(r"\]\(([\w/-]+\.png)\)", (STUDIES / "README.md").read_text(encoding="utf-8"))
    assert {STUDIES / name for name in shown} == {*STUDIES.glob("*/*.png")} and list(
        STUDIES.glob("*/study.json")
    )


def test_ticks_of_a_logarithmic_axis_are_plain_numbers():
    axes = Figure().subplots()
    axes.plot([3000, 60000], [3.6, 4.8])
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(figures.PlainLogFormatter())
        axis.set_major_formatter(figures.PlainLogFormatter())
    axes.figure.canvas.draw()
    labels = [text.get_text() for text in axes.get_yticklabels(minor=True)]
    assert "4.2" in labels and not any("10" in label for label in labels)
    assert "10,000" in [text.get_text() for text in axes.get_xticklabels()]
    assert "10^{8}" in figures.PlainLogFormatter()(1e8)
