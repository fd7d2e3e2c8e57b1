"""Rollouts against returns worked out by hand; reports over seeds."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from decisionllm.envs import point
from decisionllm.eval import report
from decisionllm.eval.maze2d import Maze2D
from decisionllm.eval.rollout import rollout
from decisionllm.eval.synthetic import PointEnv
from decisionllm.protocols import EnvDefaults
from decisionllm.schema import Spec
from tests.conftest import make_policy


class Walk(EnvDefaults):
    """Points at 1, 2, 3 and 9 that end at 0 and are truncated above 5; ended ones are at -7 afterwards."""

    tasks = ["a", "b", "c", "d"]
    horizon = 9

    def reset(self, seed):
        self.at, self.ended, self.got = np.array([1.0, 2.0, 3.0, 9.0]), np.zeros(4, bool), []
        return self.at[:, None]

    def step(self, actions):
        self.got.append(actions[:, 0].tolist())
        self.at = np.where(self.ended, -7, self.at + actions[:, 0])
        ended, truncated = self.at <= 0, self.at > 5
        self.ended |= ended | truncated
        return self.at[:, None], -self.at, ended, truncated


class Down:
    """One step down at each observation, and a log of the calls."""

    def __init__(self, tasks):
        self.calls, self.tasks = [], list(tasks)

    def act(self, observations, rewards=None, action_masks=None):
        self.calls.append((observations[:, 0].tolist(), None if rewards is None else rewards.tolist(), list(self.tasks)))
        return np.full((len(observations), 1), -1.0)

    def select(self, rows):
        self.tasks = [task for task, kept in zip(self.tasks, rows, strict=True) if kept]


def test_a_scripted_player_gets_the_return_worked_out_by_hand():
    episodes = rollout(Down, Walk(), seed=0)
    assert [e.rewards.tolist() for e in episodes] == [[0], [-1, 0], [-2, -1, 0], [-8]]
    assert [e.observations[:, 0].tolist() for e in episodes] == [[1], [2, 1], [3, 2, 1], [9]]
    assert [e.final_observation.tolist() for e in episodes] == [[0], [0], [0], [8]]
    assert [(e.task, e.group) for e in episodes] == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]
    assert [(e.terminated, e.truncated) for e in episodes] == [(True, False)] * 3 + [(False, True)]
    assert all((e.actions == -1).all() for e in episodes)


def test_ended_episodes_leave_the_batch():
    env, players, steps = Walk(), [], []
    rollout(lambda tasks: players.append(Down(tasks)) or players[0], env, seed=0, progress=steps.append)
    assert players[0].calls == [([1, 2, 3, 9], None, ["a", "b", "c", "d"]), ([1, 2], [-1, -2], ["b", "c"]), ([1], [-1], ["c"])]
    assert env.got == [[-1, -1, -1, -1], [0, -1, -1, 0], [0, 0, -1, 0]] and steps == [1, 1, 1]


def test_observations_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"env: expected observations of shape \(4, 3\), .* got \(4, 1\)"):
        rollout(Down, Walk(), seed=0, observation_dim=3)
    assert len(rollout(Down, Walk(), seed=0, observation_dim=1)) == 4


def test_what_an_env_returns_beside_rewards_is_kept_by_episode():
    class Counted(Walk):
        def outcomes(self):
            return {"place": self.at, "pair": np.arange(8).reshape(4, 2)}

    episodes = rollout(Down, Counted(), seed=0)
    assert [e.outcome["pair"].tolist() for e in episodes] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [float(e.outcome["place"]) for e in episodes] == [-7, -7, 0, -7]


SPEC = Spec(observation_dim=2, action_dim=2, horizon=20, low=(-1.0, -1.0), high=(1.0, 1.0))


def played(env, seed, begin):
    episodes = rollout(begin, env, seed=seed)
    return [[*e.rewards.tolist(), *e.actions.ravel().tolist()] for e in episodes]


def test_a_rollout_repeats_with_its_seed():
    policy = make_policy(SPEC)
    begin = lambda tasks: policy.begin(tasks, point.HORIZON)  # noqa: E731
    one, again, other = (played(PointEnv(5), seed, begin) for seed in (3, 3, 4))
    assert one == again and one != other
    mazes = [Maze2D(3, maze="umaze") for _ in range(3)]
    one, again, other = (played(maze, seed, maze.baselines(0)["random"]) for maze, seed in zip(mazes, (3, 3, 4), strict=True))
    assert one == again and one != other


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


def test_the_interquartile_mean_is_that_of_the_middle_half():
    assert report.interquartile_mean([100, 1, 3, 2]) == 2.5
    assert report.interquartile_mean([4]) == 4
    assert report.interquartile_mean([1, 2, 3, 4, 5, 6, 7, 800]) == 4.5


def test_rows_of_several_seeds_are_one_result():
    (result,) = report.summarise([row(10, seed=0), row(20, seed=1), row(60, seed=2)])
    assert (result["score"], result["return"], result["seeds"], result["n"], result["seconds"]) == (30, 60, 3, 30, 9)
    assert result["iqm"] == 30 and result["low"] == 10 and result["high"] == 60, "over seeds, three are all there are"
    (alone,) = report.summarise([row(10)])
    assert (alone["low"], alone["high"], alone["seeds"]) == (9, 11, 1), "over the episodes of one"


def test_what_differs_in_more_than_the_seed_is_another_result():
    rows = [
        row(10),
        row(30, target_return=9.0, headline=False),
        row(20, policy="q"),
        row(5, protocol="goal-text"),
        row(7, dataset="c"),
    ]
    found = [(r["dataset"], r["score"]) for r in report.summarise(rows)]
    assert found == [("c", 7), ("d", 20), ("d", 10), ("d", 5), ("d", 30)], "by dataset, headlines first, the best first"


def test_of_rows_about_the_same_run_the_last_is_read(tmp_path):
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


def test_a_table_has_a_line_a_result():
    lines = report.table(
        report.summarise([row(10), row(20, target_return=None, policy="random"), row(3, headline=False)])
    ).splitlines()
    assert len(lines) == 4 and lines[0].split()[:4] == ["dataset", "protocol", "policy", "target"]
    assert lines[1].split() == ["d", "standard", "random", "-", "20.0", "19.0", "..", "21.0", "40.0", "1", "x", "10"]
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


def test_the_report_is_one_file_that_needs_nothing_else(tmp_path):
    rows = [
        row(10.25, policy="<b>bold & co</b>", run=str(tmp_path / "run")),
        row(20, policy="random", run=None, target_return=None),
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "run").mkdir()
    losses = [{"step": 1, "nll": 2.0}, {"step": 2, "nll": 1.0, "held_out_nll": 1.5}]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(loss) + "\n" for loss in losses))
    report.save(tmp_path / "rollout-p.png", report.figure())
    path = report.write_report(tmp_path, {"DT (a paper)": 31.5})
    written = path.read_text()
    page = Page(written)
    assert page.links == [] and not re.search("https?://|url\\(|@import", written)
    for image in page.images:
        kind, _, data = image.partition(";base64,")
        assert kind == "data:image/png" and Image.open(io.BytesIO(base64.b64decode(data))).size[0] > 100
    assert len(page.images) == 3, "scores, losses, a rollout"
    for r in rows:
        assert json.dumps(r) in page.text, "as it stands in results.jsonl"
    assert "DT (a paper)" in page.text and "31.5" in page.text and "10.2" in page.text
