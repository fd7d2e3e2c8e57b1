"""Maze2D's evaluation: references, goals in texts, scripted players, pictures."""

import numpy as np
import pytest

from decisionllm.eval.pictures import draw_tables
from decisionllm.eval.rollout import rollout
from decisionllm.schema import Episode
from decisionllm.worlds.maze2d.dataset import task_text
from decisionllm.worlds.maze2d.env import REFERENCE, Maze2D
from tests.conftest import LOOP, NANO, command, episode


def returns(value):
    return episode([value / 2, value / 2])


@pytest.mark.parametrize("maze, dense", REFERENCE)
def test_maze2d_scores_0_and_100_at_its_references(maze, dense):
    random, expert = REFERENCE[maze, dense]
    scores = Maze2D(1, maze=maze, dense=dense).score(
        [returns(random), returns(expert), returns((random + expert) / 2)]
    )
    np.testing.assert_allclose(scores, [0, 100, 50], atol=1e-4)


def test_d4rls_references_are_the_published_ones():
    assert Maze2D(1, maze="umaze").score([returns(300.0)])[0] == pytest.approx(
        100 * (300 - 23.85) / (161.86 - 23.85)
    )
    assert REFERENCE["medium", False] == (13.13, 277.39) and REFERENCE["large", False] == (
        6.7,
        273.99,
    )


def test_a_maze_rewards_the_new_position_until_its_horizon():
    env = Maze2D(2, maze="umaze")
    starts = env.reset(0)
    assert (
        starts.shape == (2, 4)
        and env.horizon == 300
        and env.tasks == ["", ""]
        and env.protocol == "standard"
    )
    # into the goal's disc, and out of it
    env.states = np.array([[1.0, 1.52, 0, -4.0], [1.0, 1.48, 0, 4.0]])
    after, rewards, ended, truncated = env.step(np.zeros((2, 2)))
    assert rewards.tolist() == [1, 0] and after[0, 1] < 1.5 < after[1, 1]
    for _ in range(298):
        *_, ended, truncated = env.step(np.zeros((2, 2)))
    assert not truncated.any()
    *_, ended, truncated = env.step(np.zeros((2, 2)))
    assert truncated.all() and not ended.any()


def test_a_dense_maze_rewards_by_distance():
    env = Maze2D(1, maze="umaze", dense=True)
    env.reset(0)
    env.states = np.array([[1.0, 3.0, 0, 0]])
    np.testing.assert_allclose(env.step(np.zeros((1, 2)))[1], [np.exp(-2)], rtol=1e-3)


def test_an_open_maze_has_no_dense_score():
    with pytest.raises(ValueError, match="env.dense: expected False with maze=open, .* got True"):
        Maze2D(1, maze="open", dense=True)


def test_scripted_players_have_their_known_scores():
    env = Maze2D(60, maze="umaze")
    results = {
        name: env.score(rollout(begin, env, seed=0)).mean()
        for name, begin in env.baselines(0).items()
    }
    assert 130 < results["planner"] < 160, "149 over 200 episodes"
    assert -13 < results["random"] < 13, "-1 over 300"


def test_the_text_may_name_another_goal_than_the_rewarded_one():
    env = Maze2D(1, maze="umaze", text="goal", instructed_goal="3,1")
    assert "row 3, column 1 (x = 3.0, y = 1.0)" in env.tasks[0] and env.protocol == "instructed-3-1"
    env.reset(0)
    env.states = np.array([[1.0, 1.0, 0, 0]])
    assert env.step(np.zeros((1, 2)))[1].tolist() == [1]
    assert "row 1, column 1" in Maze2D(1, maze="umaze", text="goal").tasks[0]
    assert Maze2D(1, maze="umaze", text="shuffled").protocol == "goal-text"
    constant = Maze2D(1, maze="umaze", text="constant")
    assert (
        constant.protocol == "standard"
        and "row" not in constant.tasks[0]
        and "umaze" in constant.tasks[0]
    )


@pytest.mark.parametrize("cell", ["2,1", "9,9", "-2,1", "1", "1,2,3", "one,two"])
def test_a_goal_that_is_no_free_cell_is_refused(cell):
    with pytest.raises(
        ValueError,
        match=f"env.instructed_goal: expected free cells .* 1,1 1,2 1,3 2,3 3,1 .*got '{cell}'",
    ):
        Maze2D(1, maze="umaze", text="goal", instructed_goal=cell)


def test_an_instructed_goal_needs_a_text():
    with pytest.raises(
        ValueError,
        match="env.instructed_goal: needs text=goal, so that the text names it; got text=none",
    ):
        Maze2D(1, maze="umaze", instructed_goal="3,1")


def test_a_picture_has_the_paths_in_the_corridors():
    env = Maze2D(2, maze="large")
    episodes = rollout(env.baselines(0)["planner"], env, seed=0)
    axis = env.draw(episodes, "title").axes[0]
    image = axis.images[0]
    left, right, bottom, top = image.get_extent()
    walls = np.asarray(image.get_array())
    for line, made in zip(axis.lines[::2], episodes, strict=True):
        column = ((line.get_xdata() - left) / (right - left) * walls.shape[1]).astype(int)
        row = ((line.get_ydata() - top) / (bottom - top) * walls.shape[0]).astype(int)
        assert len(column) == len(made.rewards) and not walls[row, column].any()


def test_reaching_and_keeping_the_goal_are_measured():
    env = Maze2D(3, maze="umaze", text="goal", instructed_goal="3,1")
    there, near, far = (3.0, 1.0), (3.0, 1.4), (1.0, 1.0)

    def walk(*places):
        rows = np.array([place for place, count in places for _ in range(count)], np.float32)
        rows = np.concatenate([rows, np.zeros_like(rows)], 1)
        zeros = np.zeros((299, 2), np.float32)
        return Episode(rows[:-1], zeros, zeros[:, 0], final_observation=rows[-1], task=env.tasks[0])

    episodes = [
        walk((far, 100), (near, 200)),
        walk((there, 200), (far, 51), (there, 49)),
        walk((far, 300)),
    ]
    shares = {name: env.metrics(episodes)[name] for name in ("reached", "stayed")}
    assert shares == {"reached": pytest.approx(2 / 3), "stayed": pytest.approx(1 / 3)}


def test_steps_after_the_first_touch_count_where_the_score_is_latched():
    """Touches from step 1 and from step 3 of 4, and none: 3, 1 and 0 steps instead of 2, 1
    and 0.
    """
    episodes = [episode([0, 1, 0, 1]), episode([0, 0, 0, 1]), episode([0, 0, 0, 0])]
    latched = 100 * (4 / 3 - 23.85) / (161.86 - 23.85)
    assert Maze2D(3, maze="umaze").metrics(episodes) == {
        "latched_return": 4 / 3,
        "latched_score": pytest.approx(latched),
    }
    assert Maze2D(3, maze="umaze", dense=True).metrics(episodes) == {}


def test_a_random_goal_is_rewarded_and_named_by_its_text():
    env = Maze2D(50, maze="umaze", text="goal", goal="random")
    starts = env.reset(0)
    first, tasks = env.goals.copy(), list(env.tasks)
    assert env.protocol == "multi2d" and len(np.unique(first, axis=0)) == 7
    assert tasks == [task_text("umaze", cell) for cell in first]
    np.testing.assert_array_equal(starts, Maze2D(50, maze="umaze").reset(0))
    env.states[:, :2] = first
    assert env.step(np.zeros((50, 2)))[1].all()
    env.reset(1)
    assert (env.goals != first).any()
    env.reset(0)
    assert env.tasks == tasks
    results = {
        name: env.score(rollout(begin, env, seed=0)).mean()
        for name, begin in env.baselines(0).items()
    }
    assert results["planner"] > 130 > 20 > results["random"]


@pytest.mark.parametrize("options", [{}, {"text": "goal", "instructed_goal": "3,1"}])
def test_a_random_goal_needs_its_text_alone(options):
    with pytest.raises(
        ValueError, match="env.goal=random: needs text=goal and no env.instructed_goal, got text="
    ):
        Maze2D(1, maze="umaze", goal="random", **options)


def test_paraphrased_texts_name_the_goal_in_trained_or_in_held_out_frames():
    trained = Maze2D(62, maze="umaze", text="paraphrased")
    assert (
        trained.protocol == "goal-text"
        and len(set(trained.tasks)) == 60
        and trained.tasks[60:] == trained.tasks[:2]
    )
    assert trained.tasks[:2] == [
        task_text("umaze", (1, 1)),
        "Maze2D umaze. Go to row one, column one.",
    ]
    few = Maze2D(4, maze="umaze", text="paraphrased", frames=2)
    assert few.tasks == trained.tasks[:2] * 2
    held_out = Maze2D(20, maze="umaze", text="paraphrased", wordings="held_out", frames=2)
    assert held_out.protocol == "goal-text-held-out" and not set(held_out.tasks) & set(
        trained.tasks
    )
    assert [kind for _, kind in held_out.meaning.values()] == ["new_frames"] * 7 + [
        "contrast"
    ] * 7 + ["unseen_words"] * 6
    several = Maze2D(
        4, maze="umaze", text="paraphrased", instructed_goal="1,3; 3,1", wordings="held_out"
    )
    assert several.protocol == "instructed-1-3-3-1-held-out"
    assert [several.meaning[task][0].tolist() for task in several.tasks] == [
        [1, 3],
        [3, 1],
        [1, 3],
        [3, 1],
    ]
    assert Maze2D(1, maze="umaze", text="goal", instructed_goal="all").protocol == "instructed-all"
    for options, message in (
        (
            {"text": "goal", "wordings": "held_out"},
            "env.wordings=held_out: needs text=paraphrased, got text=goal",
        ),
        (
            {"text": "paraphrased", "wordings": "new"},
            "env.wordings: expected one of trained, held_out, got 'new'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Maze2D(1, maze="umaze", **options)


def test_metrics_by_kind_of_frame_by_goal_and_by_the_cell_at_the_end():
    env = Maze2D(
        40, maze="umaze", text="paraphrased", instructed_goal="1,3;3,1", wordings="held_out"
    )
    rows = [0, 1, 14, 39]  # 1,3 and 3,1 in a new frame; 1,3 in a contrast; 3,1 in unseen words
    ends = [(1.0, 3.0), (1.0, 1.0), (1.0, 3.1), (3.0, 1.4)]
    zeros = np.zeros((299, 2), np.float32)

    def at(place, task):
        states = np.tile(np.array([*place, 0, 0], np.float32), (300, 1))
        return Episode(states[:-1], zeros, zeros[:, 0], final_observation=states[-1], task=task)

    results = env.metrics([at(end, env.tasks[row]) for row, end in zip(rows, ends, strict=True)])
    assert {key: value for key, value in results.items() if not key.startswith("latched")} == {
        "reached": 0.75,
        "stayed": 0.75,
        "by_kind": {
            "contrast": {"reached": 1, "stayed": 1},
            "new_frames": {"reached": 0.5, "stayed": 0.5},
            "unseen_words": {"reached": 1, "stayed": 1},
        },
        "by_goal": {"1,3": {"reached": 1, "stayed": 1}, "3,1": {"reached": 0.5, "stayed": 0.5}},
        "final_cell": {
            "rows": ["1,3", "3,1"],
            "columns": ["1,1", "1,3", "3,1"],
            "shares": [[0, 1, 0], [0.5, 0, 0.5]],
        },
    }
    assert draw_tables({"title": results["final_cell"]}).axes[0].images[0].get_array().tolist() == [
        [0, 1, 0],
        [0.5, 0, 0.5],
    ]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "maze=medium",
            "env: expected maze=medium, as in the data, got umaze; give env.maze=medium",
        ),
        ("dense=true", "env: expected dense=True, as in the data, got False; give env.dense=True"),
    ],
)
def test_a_run_is_refused_where_its_data_are_of_another_maze_or_reward(
    option, message, tmp_path, capsys
):
    words = ["dataset=maze2d-umaze", "dataset.source=regenerate", "dataset.steps=1000"]
    words += [*LOOP[2:], *NANO, f"run={tmp_path / 'run'}"]
    assert command("train", *words, f"dataset.{option}") == 1
    assert message in " ".join(capsys.readouterr().err.split())
