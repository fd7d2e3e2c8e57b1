"""Results over seeds, by hand-checked numbers, and the report as one file."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from decisionllm.eval import report


def row(score, seed=0, **fields):
    common = {"dataset": "d", "protocol": "standard", "policy": "p", "text": "none", "target_return": 5.0, "headline": True}
    numbers = {
        "seed": seed,
        "run": f"runs/{seed}",
        "n": 10,
        "return": 2 * score,
        "score": score,
        "low": score - 1,
        "high": score + 1,
        "seconds": 3.0,
    }
    return common | numbers | fields


def test_an_interval_holds_the_mean_of_coin_tosses():
    tosses = np.arange(400) % 2
    low, high = report.interval(tosses)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.005) and high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.005)
    assert report.interval(tosses) == (low, high), "it repeats"
    assert report.interval([7.0]) == report.interval([7, 7, 7]) == (7, 7)


def test_the_interquartile_mean_is_the_mean_of_the_middle_half():
    for scores, mean in (([100, 1, 3, 2], 2.5), ([4], 4), ([1, 2, 3, 4, 5, 6, 7, 800], 4.5)):
        (result,) = report.summarise([row(score, seed=seed) for seed, score in enumerate(scores)])
        assert result["iqm"] == mean


def test_rows_of_several_seeds_are_one_result():
    (result,) = report.summarise([row(10, seed=0), row(20, seed=1), row(60, seed=2)])
    assert (result["score"], result["return"], result["seeds"], result["n"], result["seconds"]) == (30, 60, 3, 30, 9)
    assert result["iqm"] == 30 and result["low"] == 10 and result["high"] == 60, "over seeds, three are all there are"
    (latched,) = report.summarise([row(10, latched_score=12), row(20, seed=1, latched_score=30)])
    assert (
        latched["latched"] == 21
        and result["latched"] is None
        and report.table([latched]).split()[-4:] == ["21.0", "2", "x", "10"]
    )
    (alone,) = report.summarise([row(10)])
    assert (alone["low"], alone["high"], alone["seeds"]) == (9, 11, 1), "over the episodes of one"


def test_rows_that_differ_in_another_key_are_other_results():
    rows = [
        row(10),
        row(30, target_return=9.0, headline=False),
        row(20, policy="q"),
        row(5, protocol="goal-text"),
        row(7, dataset="c"),
        row(6, changed="agents=5"),
    ]
    results = report.summarise(rows)
    assert [r["protocol"] for r in results if r["score"] == 6] == ["standard, agents=5"], "the table says so"
    found = [(r["dataset"], r["score"]) for r in results]
    assert found == [("c", 7), ("d", 20), ("d", 10), ("d", 6), ("d", 5), ("d", 30)], (
        "by dataset, headlines first, the best first"
    )


def test_the_last_row_about_a_run_is_read(tmp_path):
    rows = [
        row(1),
        row(2, seed=1),
        row(3),
        row(4, target_return=9.0),
        row(5, run="runs/other"),
        row(6, run=None),
        row(7, 1, run=None),
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert [r["score"] for r in report.read_rows(tmp_path)] == [3, 2, 4, 5, 6, 7]


def test_a_table_has_a_line_for_each_result():
    lines = report.table(
        report.summarise([row(10), row(20, target_return=None, policy="random"), row(3, headline=False)])
    ).splitlines()
    assert len(lines) == 4 and lines[0].split()[:4] == ["dataset", "protocol", "policy", "target"]
    assert lines[1].split() == ["d", "standard", "random", "-", "20.0", "19.0", "..", "21.0", "40.0", "-", "1", "x", "10"]
    assert lines[3].endswith("1 x 10  (sweep)")


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.images, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if tag == "img" and name == "src":
                self.images.append(value)
            elif name in ("src", "href"):
                self.links.append(value)

    def handle_data(self, data):
        self.text += data


def written(folder, *rows):
    (folder / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_the_report_is_one_file_that_needs_no_other(tmp_path):
    rows = [
        row(10.25, policy="<b>bold & co</b>", run=str(tmp_path / "run")),
        row(20, policy="random", run=None, target_return=None),
    ]
    written(tmp_path, *rows)
    (tmp_path / "run").mkdir()
    losses = [{"step": 1, "nll": 2.0}, {"step": 2, "nll": 1.0, "held_out_nll": 1.5}]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(loss) + "\n" for loss in losses))
    report.figure(7, 4).savefig(tmp_path / "rollout-p.png")
    source = report.write_report(tmp_path, {"d": {"DT (a paper)": 31.5}}, {"d": ""}).read_text()
    page = Page(source)
    assert page.links == [] and not re.search("https?://|url\\(|@import", source)
    for image in page.images:
        kind, _, data = image.partition(";base64,")
        assert kind == "data:image/png" and Image.open(io.BytesIO(base64.b64decode(data))).size[0] > 100
    assert len(page.images) == 3, "scores, losses, a rollout"
    for r in rows:
        assert json.dumps(r) in page.text, "as it stands in results.jsonl"
    assert "DT (a paper)" in page.text and "31.5" in page.text and "10.2" in page.text


def test_published_scores_and_units_belong_to_one_dataset(tmp_path):
    """`old` was evaluated before, by another command that knew its unit."""
    written(tmp_path, row(1, dataset="auction"), row(2, dataset="maze"), row(3, dataset="old"))
    published, units = {"auction": {"DT": 37.1}, "maze": {}}, {"auction": "conversions", "maze": ""}
    text = Page(report.write_report(tmp_path, published, units).read_text()).text
    assert f"auction: conversionsmaze: {report.NORMALISED}old: score" in text
    assert text.count("published scores") == 1 and "auction: published scores" in text
    labels = {"auction": "conversions", "maze": report.NORMALISED, "old": "score"}
    panels = report.draw_scores(report.summarise(report.read_rows(tmp_path)), published, labels).axes
    ticks = [[label.get_text() for label in panel.get_yticklabels()] for panel in panels]
    assert ticks == [["p", "DT, published"], ["p"], ["p"]] and [panel.get_xlabel() for panel in panels] == list(labels.values())
