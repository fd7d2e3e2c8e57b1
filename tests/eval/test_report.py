"""Results over seeds, by hand-checked numbers, and the report as one file."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import pytest
from PIL import Image
from rich.console import Console

from decisionllm.config import TrainConfig
from decisionllm.eval import pictures, report
from decisionllm.eval.conclusions import conclusions, difference_interval
from decisionllm.eval.pictures import draw_curves, draw_scores
from decisionllm.eval.result_groups import shorten
from decisionllm.registry import discover


def row(score, seed=0, **fields):
    common = {
        "world": "w",
        "dataset": "d",
        "protocol": "standard",
        "policy": "p",
        "text": "none",
        "target_return": 5.0,
        "headline": True,
    }
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


def test_the_interquartile_mean_is_the_mean_of_the_middle_half():
    for scores, mean in (([100, 1, 3, 2], 2.5), ([4], 4), ([1, 2, 3, 4, 5, 6, 7, 800], 4.5)):
        (result,) = report.summarise([row(score, seed=seed) for seed, score in enumerate(scores)])
        assert result["iqm"] == mean


def test_policies_of_one_world_share_a_table_whatever_they_were_trained_on():
    rows = [row(10), row(20, policy="q", dataset="other"), row(30, policy="r", world="v")]
    titles = [table.title for table in report.tables(report.summarise(rows))]
    assert titles == [
        "v, standard, seeds x episodes: 1 x 10",
        "w, standard, seeds x episodes: 1 x 10",
    ]
    assert sum("20.0" in line for line in printed(rows[:2], 100)) == 1


def test_headline_targets_of_each_seeds_own_data_are_one_result():
    rows = [row(10, target_return=5.0), row(20, seed=1, target_return=5.5)]
    (result,) = report.summarise(rows)
    assert (result["seeds"], result["target_return"]) == (2, 5.25)
    sweep = [{**each, "headline": False} for each in rows]
    assert len(report.summarise(sweep)) == 2


def test_scripted_players_of_two_environments_are_kept_and_told_apart(tmp_path):
    short, long = ({"env": "e", "env.horizon": horizon} for horizon in (10, 20))
    common = {"policy": "random", "run": None}
    written(tmp_path, row(1, options=short, **common), row(2, options=long, **common))
    rows = report.read_rows(tmp_path)
    assert report.policy_names(rows) == ["random, env.horizon=10", "random, env.horizon=20"]


def test_a_scripted_player_that_does_the_same_with_other_options_is_one_result():
    nodes = [{"env": "e", "env.text": text} for text in ("none", "goal")]
    rows = [row(1, policy="random", run=None, options=node) for node in nodes]
    rows.append(row(2, policy="random", run=None, options={"env": "e", "env.maze": "b"}))
    rows += [row(7, options=node) for node in nodes]
    names = report.policy_names(rows)
    assert names[0] == names[1] != names[2] and names[3] != names[4]
    results = report.summarise(rows)
    players = [(r["score"], r["seeds"], r["n"]) for r in results if "random" in r["policy"]]
    assert players == [(2, 1, 10), (1, 1, 10)]


def concluded(rows):
    return conclusions(report.summarise(rows), report.scripted_players(rows))


def test_the_best_policy_of_each_protocol_stands_first():
    rows = [
        row(3, policy="a"),
        row(9.5, policy="b"),
        row(5, policy="a", protocol="goal-text"),
        row(40, policy="c", headline=False),
        row(99, policy="planner", run=None, protocol="scripted"),
    ]
    assert concluded(rows) == [
        "w, standard: b beats a by 6.5 (5.1 .. 7.9): 9.5 against 3.0. Scripted players: planner 99.0.",
        "w, goal-text: a scores 5.0 (4.0 .. 6.0). Scripted players: planner 99.0.",
    ]


def test_policies_of_one_protocol_each_are_compared_across_them():
    rows = [row(31, policy="goal", protocol="goal-text"), row(30, policy="dt")]
    assert concluded(rows) == [
        "w: goal (goal-text) is not clearly better than dt (standard), with a lead of 1.0 "
        "(-0.414 .. 2.4): 31.0 against 30.0."
    ]
    rows.append(row(20, policy="third", run="runs/third"))
    assert concluded(rows)[0].endswith("31.0 against 30.0, the best of 3 policies.")


def test_the_interval_of_a_difference_adds_the_distances_in_squares():
    first = {"score": 10.0, "low": 7.0, "high": 11.0}
    second = {"score": 4.0, "low": 1.0, "high": 8.0}
    low, high = difference_interval(first, second)
    assert (low, high) == pytest.approx((6 - 5, 6 + 10**0.5))


def test_the_table_shows_the_return_of_the_log_beside_that_of_the_policy():
    rows = [row(1, log_return=-1.5), row(2, policy="random", run=None, protocol="scripted")]
    table = report.result_table(report.summarise(rows))
    column = table.headings.index("mean return of the log")
    assert [cells[column] for _, cells in table.rows] == ["-", "-1.5"]
    same = report.summarise([row(1, log_return=-1.5), row(2, policy="q", log_return=-1.5)])
    assert "mean return of the log: -1.5" in report.result_table(same).shared


def test_an_empty_value_of_an_option_is_called_none_in_a_label():
    assert shorten("") == "none" and shorten("loss") == "loss"


def test_a_column_that_says_the_same_in_all_rows_is_said_once():
    results = report.summarise([row(1), row(2, policy="q", text="goal", dataset="e")])
    table = report.result_table(results)
    shared = ["environment: w", "protocol: standard", "target return: 5.0"]
    assert table.shared == [*shared, "training seeds: 1", "episodes: 10"]
    assert table.headings[:4] == ["policy", "mean score", "95 % interval", "task text"]
    assert table.rows[0] == (False, ["q", "2.0", "1.0 .. 3.0", "goal", "e", "4.0"])
    assert report.result_table(report.summarise([row(1, target_return=None)])).shared == [
        "environment: w",
        "protocol: standard",
        "task text: none",
        "training data: d",
        "training seeds: 1",
        "episodes: 10",
    ]


def test_the_score_is_said_once_where_it_is_the_return():
    table = report.result_table(report.summarise([row(1), row(2, policy="q", **{"return": 2})]))
    assert "mean return" in table.headings
    equal = [row(1, **{"return": 1}), row(2, policy="q", **{"return": 2})]
    assert "mean return" not in report.result_table(report.summarise(equal)).headings


def test_headline_targets_are_bold_beside_a_sweep_alone():
    rows = [row(1), row(3, policy="random", protocol="scripted", target_return=None)]
    table = report.result_table(report.summarise(rows))
    assert [bold for bold, _ in table.rows] == [False, False] and table.num_protocols == 2
    table = report.result_table(
        report.summarise([*rows, row(2, headline=False, target_return=9.0)])
    )
    assert [(bold, cells[0]) for bold, cells in table.rows] == [
        (False, "random"),
        (True, "p"),
        (False, "p"),
    ]


def test_policies_of_one_protocol_each_share_a_column_of_scores():
    rows = [
        row(10, protocol="goal-text"),
        row(20, target_return=None, policy="expert", protocol="scripted"),
    ]
    lines = printed(rows, 100)
    assert lines[1].split() == ["policy", "target", "protocol", "score"]
    assert lines[3].split() == ["expert", "-", "scripted", "20.0"]
    assert lines[-1].strip() == "mean score, below it its 95 % interval"


def test_a_picture_keeps_its_heading_and_its_caption(tmp_path):
    words = {"Title": "Episodes of p", "Description": "w: mean score 3.0."}
    pictures.figure(2, 1).savefig(tmp_path / "rollout-p-0.png", metadata=words)
    assert report.picture_words(tmp_path / "rollout-p-0.png") == tuple(words.values())
    pictures.figure(2, 1).savefig(tmp_path / "rollout-q.png")
    assert report.picture_words(tmp_path / "rollout-q.png") == ("Rollout: q", "")


def test_the_legend_of_scores_hides_no_point():
    """Two protocols have a legend, which stands beside the points; one is named in the title."""
    labels = {"w": "score"}
    rows = [row(9, policy=f"p{i}", protocol=f"{i % 2}") for i in range(8)]
    (axis,) = draw_scores(report.summarise(rows), {}, labels).axes
    axis.figure.draw_without_rendering()
    assert not axis.get_legend().get_window_extent().overlaps(axis.get_window_extent())
    (axis,) = draw_scores(report.summarise(rows[::2]), {}, labels).axes
    assert axis.get_legend() is None and axis.get_title() == "w, 0"


def test_a_policy_trained_on_other_data_is_named_by_it():
    data = [{"dataset": "synthetic"}, {"dataset": "synthetic", "dataset.episodes": 7}]
    rows = [row(i, dataset=str(i), options=each) for i, each in enumerate(data)]
    names = report.policy_names(rows)
    assert names == ["p, dataset.episodes=300", "p, dataset.episodes=7"]


def test_rows_of_several_seeds_are_one_result():
    (result,) = report.summarise([row(10, seed=0), row(20, seed=1), row(60, seed=2)])
    assert (result["score"], result["return"], result["seeds"], result["n"]) == (30, 60, 3, 30)
    assert result["iqm"] == 30
    # 4.303, Student's t of two degrees of freedom, times 26.46 / sqrt(3), the error of the mean
    assert (result["low"], result["high"]) == pytest.approx((30 - 65.72, 30 + 65.72), abs=0.01)
    (latched,) = report.summarise([row(10, latched_score=12), row(20, seed=1, latched_score=30)])
    assert latched["latched_score"] == 21 and "latched_score" not in result
    (alone,) = report.summarise([row(10)])
    assert (alone["low"], alone["high"], alone["seeds"]) == (9, 11, 1), "over the episodes of one"


def test_rows_that_differ_in_another_key_are_other_results():
    rows = [
        row(10),
        row(30, target_return=9.0, headline=False),
        row(20, policy="q"),
        row(5, protocol="goal-text"),
        row(7, dataset="c"),
        row(8, world="v"),
        row(6, changed="agents=5"),
    ]
    results = report.summarise(rows)
    assert [r["protocol"] for r in results if r["score"] == 6] == ["standard, agents=5"], (
        "the table says so"
    )
    pooled = [(r["world"], r["dataset"], r["score"]) for r in results]
    of_one_world = [("d", 20), ("d", 10), ("c", 7), ("d", 6), ("d", 5), ("d", 30)]
    assert pooled == [("v", "d", 8), *(("w", *each) for each in of_one_world)], (
        "by world, headlines first, the best first"
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
    (tmp_path / "results.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8"
    )
    assert [r["score"] for r in report.read_rows(tmp_path)] == [3, 2, 4, 5, 6, 7]


def printed(rows, width):
    """The lines of the tables of these rows, on a terminal of this width."""
    console = Console(width=width, file=io.StringIO())
    for table in report.tables(report.summarise(rows)):
        console.print(table, crop=False)  # as evaluate does
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


def test_a_table_has_a_row_for_each_policy_and_a_column_for_each_protocol():
    rows = [
        row(10),
        row(30, protocol="standard, 50 %"),
        row(20, target_return=None, policy="random"),
        row(3, headline=False),
    ]
    lines = printed(rows, 100)
    assert lines[0].strip() == "w, standard, seeds x episodes: 1 x 10"
    assert lines[1].split() == ["policy", "target", "score", "50", "%"]
    assert lines[3].split() == ["p", "5.0", "10.0", "30.0"]
    assert lines[4].split() == ["9.0..11.0", "29.0..31.0"]
    assert lines[5].split() == ["random", "-", "20.0"]
    assert lines[6].split() == ["19.0..21.0"]
    assert sum("(sweep)" in line for line in lines) == 1


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_table_is_not_wider_than_the_terminal(width):
    # five budgets fit into the narrowest terminal
    long = "policy-with-a-long-name-" * 6
    rows = [
        row(
            10,
            policy=long,
            target_return=None,
            protocol=f"replay 200-203, own market prices, {b} %",
        )
        for b in range(5)
    ]
    lines = printed(rows, width)
    assert max(map(len, lines)) <= width
    letters = "".join(re.findall(r"^ +([a-z-]+)", "\n".join(lines[2:]), re.M))
    assert long in letters, "a long name is broken, not cut"


def test_scores_below_one_are_told_apart_and_long_ones_are_whole():
    (line,) = [x for x in printed([row(0.0638, policy="small")], 100) if "small" in x]
    assert line.split()[-1] == "0.0638"
    rows = [row(1234567.0, protocol=f"replay, {share} %") for share in range(5)]
    words = "".join(printed(rows, 100))
    assert "…" not in words and words.count("1234567.0") == 5


@pytest.mark.parametrize(("name", "count"), [("p", 24), ("a-name=of many, options=1, " * 6, 2)])
def test_curves_and_scores_of_many_runs_and_long_names_have_their_place(tmp_path, name, count):
    """The smallest panel has a fourth of the picture's width and an inch of its height or more."""
    lines = [{"step": i, "nll": 1.0, "held_out_nll": 1.0, "score": 2.0} for i in (1, 2)]
    runs = {}
    for i in range(count):
        run = tmp_path / str(i)
        run.mkdir()
        (run / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
        )
        runs[str(run)] = f"{name}{i}"
    of_one_budget = [row(i, policy=f"{name}{i}") for i in range(count)]
    of_many = [
        row(5, policy=f"{name}{i}", protocol=f"x, {b} %") for b in (1, 2, 3) for i in range(count)
    ]
    made = [draw_curves(runs)]
    for rows in (of_one_budget, of_many):
        made.append(draw_scores(report.summarise(rows), {}, {"w": "score"}))
    for figure in made:
        figure.draw_without_rendering()
        whole = figure.bbox
        boxes = []
        for axis in figure.axes:
            place = axis.get_window_extent()
            assert place.width > whole.width / 4 and place.height > figure.dpi
            boxes.append(axis.get_tightbbox())
        for box in boxes:
            assert box.y0 >= -1 and box.y1 <= whole.height + 1
            assert box.x0 >= -1 and box.x1 <= whole.width + 1


def test_the_curve_of_an_interrupted_run_has_no_gap(tmp_path):
    lines = [
        {"step": 2, "nll": 4.0, "held_out_nll": 5.0},
        {"step": 3, "nll": 3.0},
        {"step": 4, "nll": 2.0, "held_out_nll": 4.0, "score": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    losses, scores = draw_curves({str(tmp_path): "p"}).axes
    training, held_out = [line.get_xydata().tolist() for line in losses.lines]
    assert training == [[2, 4], [3, 3], [4, 2]] and held_out == [[2, 5], [4, 4]]
    assert scores.lines[0].get_xydata().tolist() == [[4, 1]]


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
    (folder / "results.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8"
    )


def test_the_report_is_one_file_that_needs_no_other(tmp_path):
    rows = [
        row(10.25, policy="<b>bold & co</b>", run=str(tmp_path / "run")),
        row(20, policy="random", run=None, target_return=None),
    ]
    written(tmp_path, *rows)
    (tmp_path / "run").mkdir()
    losses = [{"step": 1, "nll": 2.0}, {"step": 2, "nll": 1.0, "held_out_nll": 1.5}]
    (tmp_path / "run/metrics.jsonl").write_text(
        "".join(json.dumps(loss) + "\n" for loss in losses), encoding="utf-8"
    )
    pictures.figure(7, 4).savefig(tmp_path / "rollout-p.png")
    source = report.write_report(tmp_path, {"w": {"DT (a paper)": 31.5}}, {"w": ""}).read_text(
        encoding="utf-8"
    )
    page = Page(source)
    assert page.links == [] and not re.search("https?://|url\\(|@import", source)
    for image in page.images:
        kind, _, data = image.partition(";base64,")
        assert (
            kind == "data:image/png"
            and Image.open(io.BytesIO(base64.b64decode(data))).size[0] > 100
        )
    assert len(page.images) == 3, "scores, losses, a rollout"
    for r in rows:
        assert json.dumps(r) in page.text, "as it stands in results.jsonl"
    assert "DT (a paper)" in page.text and "31.5" in page.text and "10.2" in page.text
    assert "Student's t over training seeds" in page.text, "as `intervals.over_runs`"
    assert "w, standard: <b>bold & co</b> scores 10.2 (9.2 .. 11.2)." in page.text
    assert " Scripted players: random 20.0." in page.text
    assert page.text.index("bold & co") < page.text.index("Results")
    for heading in ("Evaluation in w", "95 % interval", "Learning curves", "Rollout: p"):
        assert heading in page.text
    assert "latched" not in page.text, "a metric of other worlds"


def test_published_scores_and_units_belong_to_one_world(tmp_path):
    """`old` was evaluated before, by another command that knew its unit."""
    written(tmp_path, row(1, world="auction"), row(2, world="maze"), row(3, world="old"))
    published = {"auction": {"DT": 37.1}, "maze": {}}
    units = {"auction": "conversions", "maze": ""}
    text = Page(report.write_report(tmp_path, published, units).read_text(encoding="utf-8")).text
    assert "Score in auction: conversions." in text and "Score in old: score." in text
    assert f"Score in maze: {report.NORMALISED}." in text
    assert text.count("published scores") == 1 and "auction: published scores" in text
    labels = {"auction": "conversions", "maze": report.NORMALISED, "old": "score"}
    panels = pictures.draw_scores(
        report.summarise(report.read_rows(tmp_path)), published, labels
    ).axes
    ticks = [[label.get_text() for label in panel.get_yticklabels()] for panel in panels]
    assert ticks == [["p", "DT, published"], ["p"], ["p"]] and [
        panel.get_xlabel() for panel in panels
    ] == list(labels.values())


def test_runs_of_two_learning_rates_are_two_results_of_two_seeds():
    rows = [
        row(10 * lr + seed, seed, options={"optim.lr": lr, "data.seed": 0}, env_seed=0)
        for lr in (1, 2)
        for seed in (0, 1)
    ]
    results = report.summarise(rows)
    assert [(r["policy"], r["score"], r["seeds"], r["n"]) for r in results] == [
        ("p, optim.lr=2", 20.5, 2, 20),
        ("p, optim.lr=1", 10.5, 2, 20),
    ]
    assert report.policy_names(rows) == ["p, optim.lr=1"] * 2 + ["p, optim.lr=2"] * 2


def test_an_option_at_its_default_is_named_where_another_result_has_another_value():
    """The default of optim.lr is 0.0005, that of the width of nano 128; a frozen default has no
    lora_rank to name.
    """
    options = [
        {"backbone": "nano"},
        {"backbone": "nano", "optim.lr": 0.002},
        {"backbone": "dt", "backbone.width": 64},
    ]
    names = report.policy_names(
        [row(i, run=f"runs/{i}", options=each) for i, each in enumerate(options)]
    )
    lr = TrainConfig({}, {}, {}).optim.lr
    width = discover()["backbone"]["nano"]["width"]
    assert f"backbone=nano, backbone.width={width}, optim.lr={lr}" in names[0].replace(
        "backbone.layers=3, ", ""
    )
    assert (
        "optim.lr=0.002" in names[1]
        and "backbone=dt" in names[2]
        and "backbone.width=64" in names[2]
    )
    assert "dataset" not in " ".join(names) and "seed" not in " ".join(names)


def test_evaluations_with_several_env_seeds_are_kept_and_told_apart(tmp_path):
    written(
        tmp_path,
        row(1, options={}, env_seed=0),
        row(2, options={}, env_seed=3),
        row(5, options={}, env_seed=0, n=20),
        row(6, 1, options={}, env_seed=0, n=20),
    )
    rows = report.read_rows(tmp_path)
    assert [r["score"] for r in rows] == [5, 2, 6], (
        "the last evaluation with the same seed of the environment"
    )
    pooled = [(r["policy"], r["score"], r["seeds"], r["n"]) for r in report.summarise(rows)]
    assert pooled == [("p, env seed 0", 5.5, 2, 40), ("p, env seed 3", 2, 1, 10)]


def test_other_data_and_other_ways_to_act_are_other_results():
    rows = [
        row(1, options={}, fingerprint="aaaabbbbcccc", decode="mode"),
        row(2, options={}, fingerprint="ddddeeeeffff", decode="mode"),
        row(3, options={}, fingerprint="aaaabbbbcccc", decode="sample"),
    ]
    assert len(report.summarise(rows)) == 3 and len(set(report.policy_names(rows))) == 3
    assert report.policy_names(rows[:2]) == ["p, data aaaabbbb", "p, data ddddeeee"]
    assert report.policy_names(rows[::2]) == ["p, act.decode=mode", "p, act.decode=sample"]


def test_an_option_that_follows_the_seed_is_part_of_the_seed():
    """As in dataset.seed='${seed}' init_from='runs/start-${seed}': the data of each seed are its
    own.
    """
    follow = [
        row(
            s,
            s,
            fingerprint=f"data{s}",
            options={"dataset.seed": s, "data.seed": 0, "init_from": f"runs/v1/start-{s}"},
        )
        for s in (0, 1, 12)
    ]
    (result,) = report.summarise(follow)
    assert (result["policy"], result["seeds"]) == ("p", 3)
    grid = [
        row(10 * d + s, s, fingerprint=f"data{d}", options={"dataset.seed": d})
        for s, d in ((0, 0), (1, 1), (0, 1), (1, 0))
    ]
    pooled = {(r["policy"], r["score"]) for r in report.summarise(grid)}
    assert pooled == {("p, dataset.seed=0", 0.5), ("p, dataset.seed=1", 10.5)}
    sweep = [row(s, s, options={"window": s + 5, "steps": s + 1}) for s in (0, 1)]
    assert len(report.summarise(sweep)) == 2, "a sweep beside the seed is none"


def test_a_long_value_is_cut_and_still_told_from_others():
    parts = [{"rooms": [*range(40)], "exit": i} for i in (1, 2)]
    one, two = report.policy_names(
        [row(i, run=f"r{i}", options={"env.maps": each}) for i, each in enumerate(parts)]
    )
    assert (
        one != two and max(len(one), len(two)) < 50 and one.startswith("p, env.maps={'rooms': [0")
    )


def test_scores_by_share_of_the_budget_are_lines_with_bands_and_no_point_is_hidden():
    """Three budgets of two policies: a line each, and each published score has a name beside it."""
    rows = [
        row(score + bonus, policy=policy, world="auction", protocol=protocol)
        for policy, bonus in (("ours", 2), ("theirs", 0))
        for protocol, score in (("replay", 30), ("replay, 50 %", 20), ("replay, 150 %", 40))
    ]
    results = report.summarise(rows)
    assert pictures.percentages(results) == {
        "replay": 100,
        "replay, 50 %": 50,
        "replay, 150 %": 150,
    }
    published = {"auction": {"DT": 27.9, "PID": 25.1}}
    (axis,) = pictures.draw_scores(results, published, {"auction": "conversions"}).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axis.get_lines()}
    assert lines == {
        "ours": [[50, 22], [100, 32], [150, 42]],
        "theirs": [[50, 20], [100, 30], [150, 40]],
        "DT, published": [[100, 27.9]],
        "PID, published": [[100, 25.1]],
    }
    assert len(axis.collections) == 2, "a band each"
    assert len(axis.get_legend().get_texts()) == 4


def test_protocols_that_differ_in_more_than_a_share_are_not_drawn_as_lines():
    results = [{"protocol": name} for name in ("replay 7-8", "replay 9, 50 %", "replay 9, 75 %")]
    assert pictures.percentages(results) == {}


def test_a_run_is_one_run_however_its_path_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, row(1, run="runs/a"), row(2, run=str(tmp_path / "runs" / "a")))
    assert [row["score"] for row in report.read_rows(tmp_path)] == [2]


def test_a_seed_counts_once_and_its_last_run_is_taken():
    rows = [row(10), row(30, run="runs/again"), row(20, seed=1)]
    (result,) = report.summarise(rows)
    assert (result["seeds"], result["score"], result["n"]) == (2, 25, 20)


def test_targets_that_round_alike_have_more_digits():
    rows = [row(score, target_return=target) for score, target in ((10, 2.01), (50, 2.04))]
    lines = printed([each | {"headline": False} for each in rows], 100)
    shown = [line.split()[2:4] for line in lines if "(sweep)" in line]
    assert sorted(shown) == [["2.01", "10.0"], ["2.04", "50.0"]]
