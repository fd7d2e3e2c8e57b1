"""Wordings: libraries that are refused, texts by hand, draws that repeat, and every shipped
frame.
"""

import re

import numpy as np
import pytest
import yaml

from decisionllm.bidding.market.observation import task_facts
from decisionllm.bidding.market.observation import task_text as task_text_of_campaign
from decisionllm.datasets.number_words import number_to_words
from decisionllm.datasets.paraphrases import (
    FILES,
    Paraphrases,
    frame_fields,
    held_out_kinds,
    load_library,
    read_library,
    render_frame,
    render_frames,
)
from decisionllm.schema import Window
from decisionllm.teams.spread.dataset import load as spread_log
from decisionllm.teams.spread.env import SpreadTeams
from decisionllm.teams.texts import task_text as team_task
from decisionllm.teams.texts import team_facts
from decisionllm.worlds.babyai.missions import facts_by_mission
from decisionllm.worlds.maze2d.dataset import goal_facts, task_text

KINDS = ("new_frames", "contrast", "unseen_words")
INSTRUCTION_KINDS = ("action_words", "object_words", "both")
ONE_TASK = {name: path for name, path in FILES.items() if not name.startswith("babyai-")}
INSTRUCTIONS = {name: path for name, path in FILES.items() if name not in ONE_TASK}


def test_a_sentence_of_the_world_stands_before_frames_that_do_not_name_it(tmp_path):
    frames = ["Walk to {spot}.", "In maze {maze} go to {spot}."]
    content = {"trained": frames, "held_out": {}}
    path = tmp_path / "frames.yaml"
    path.write_text(yaml.safe_dump(content | {"world": "Maze {maze}. "}), encoding="utf-8")
    assert read_library(path).frames["trained"] == ["Maze {maze}. Walk to {spot}.", frames[1]]
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert read_library(path).frames["trained"] == frames


def test_a_library_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="wordings: expected one of .*maze2d.*, got 'chess'"):
        load_library("chess")


@pytest.mark.parametrize("path", FILES.values(), ids=FILES)
def test_a_frame_names_known_fields_and_a_task_and_is_there_once(path):
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    optional = {"world", "distinct_contrasts"}
    assert content.keys() - optional == {"fields", "identify", "trained", "held_out"}
    kinds = KINDS if path in ONE_TASK.values() else INSTRUCTION_KINDS
    assert tuple(content["held_out"]) == kinds
    assert read_library(path).held_out_kinds == [*kinds]
    fields_of_library = set(content["fields"].split())
    assert frame_fields(content.get("world", "")) <= fields_of_library
    frames = content["trained"] + sum(content["held_out"].values(), [])
    seen = set()
    for frame in frames:
        fields = frame_fields(frame)
        assert {name.removeprefix("other_") for name in fields} <= fields_of_library, frame
        assert any(fields >= set(group.split()) for group in content["identify"]), frame
        same = " ".join(frame.casefold().split())
        assert same not in seen, f"{frame}: twice; a held-out frame must not be trained"
        seen.add(same)


def test_tasks_of_two_worlds_are_not_contrasted():
    facts = goal_facts("umaze") | goal_facts("medium")
    words = Paraphrases(list(facts), facts)
    seen = {
        words[i]
        for turn in np.arange(20) / 20
        for i in words.index_texts(np.zeros(1, int), np.full(1, 2), turn)
    }
    assert seen == {
        f"Maze2D umaze. Not row {row}, column {column}, but row 1, column 1 is the goal."
        for row, column in ((1, 2), (1, 3), (2, 3), (3, 1), (3, 2), (3, 3))
    }


def test_texts_and_number_words_by_hand():
    facts = {"row": 1, "spot": "top left", "budget": 2914.0}
    other = {"row": 3, "spot": "bottom left"}
    assert (
        render_frame("Row {row}, {row!w}, {row!o}: {spot}, not {other_spot}", facts, other)
        == "Row 1, one, first: top left, not bottom left"
    )
    assert render_frame("{spot!u} is {spot}", facts) == "Top left is top left"
    assert render_frame("{budget:,.0f} {budget!c} {budget!k}", facts) == "2,914 291400 2.914"
    words_by_number = {
        0: "zero",
        19: "nineteen",
        20: "twenty",
        47: "forty-seven",
        300: "three hundred",
        2914: "two thousand nine hundred fourteen",
    }
    assert {n: number_to_words(n) for n in words_by_number} == words_by_number
    assert (
        number_to_words(87.35) == "eighty-seven point three five"
        and number_to_words(0.5) == "zero point five"
    )
    assert number_to_words(110_005) == "one hundred ten thousand five"
    assert (
        number_to_words(123_456.78) == "one hundred twenty-three thousand four hundred fifty-seven"
    )
    assert number_to_words(1_234_567) == (
        "one million two hundred thirty-four thousand five hundred seventy"
    )
    assert number_to_words(-3) == "minus three"
    assert (
        render_frame("{budget:g} {budget!k}", {"budget": 1_234_567_000.0}) == "1234570000 1234570"
    )


def test_facts_of_the_cells_of_a_maze_by_hand():
    facts = goal_facts("umaze")
    assert len(facts) == 7 and list(facts)[2] == task_text("umaze", (1, 3))
    assert facts[task_text("umaze", (3, 1))] == {
        "library": "maze2d",
        "maze": "umaze",
        "rows": 3,
        "columns": 3,
        "row": 3,
        "column": 1,
        "down": 2,
        "right": 0,
        "up": 0,
        "left": 2,
        "place": "bottom left",
        "spot": "bottom left",
        "side": "south-west corner",
        "region": "lower left",
        "kind": "dead end",
        "path": 6,
    }
    large = goal_facts("large")[task_text("large", (1, 1))]
    assert large["place"] == "top left" and not {"spot", "side", "region", "path"} & set(large), (
        "many cells have them"
    )


def test_a_number_stands_for_a_task_a_frame_and_the_other_task_of_a_contrast():
    facts = goal_facts("umaze")
    words = Paraphrases([*facts, "by itself"], facts)
    task, frame = np.array([0, 2, 2, 7]), np.array([1, 2, 3, 0])
    assert [words[i] for i in words.index_texts(task, frame, np.zeros(4))][::2] == [
        "Maze2D umaze. Go to row one, column one.",
        "Maze2D umaze. Could you roll the ball to x = 1.0, y = 3.0, please?",
    ]
    assert words[int(words.draw(np.array([7]), np.random.default_rng(0))[0])] == "by itself"
    texts = {
        words[i]
        for turn in np.arange(6) / 6
        for i in words.index_texts(task[1:2], frame[1:2], turn)
    }
    others = {(1, 1), (1, 2), (2, 3), (3, 1), (3, 2), (3, 3)}
    assert texts == {
        f"Maze2D umaze. Not row {row}, column {column}, but row 1, column 3 is the goal."
        for row, column in others
    }


def test_the_first_frames_are_used_and_too_many_are_refused():
    facts = goal_facts("umaze")
    words = Paraphrases(list(facts), facts, frames=1)
    assert [words[i] for i in words.draw(np.arange(7), np.random.default_rng(3))] == list(facts), (
        "the first is the task text itself"
    )
    for count, message in (
        (-1, "a number of frames, or 0 for all, got -1"),
        (999, "trained frames fit the facts of 'Maze2D umaze"),
    ):
        with pytest.raises(ValueError, match=message):
            Paraphrases(list(facts), facts, frames=count)
    alone = Paraphrases(list(facts)[:1], facts)
    assert not any("{other" in frame for frame in alone.frames[0]) and alone.frames[0], (
        "no contrast with one task"
    )


def test_libraries_are_named_for_their_domain_and_file():
    assert {*ONE_TASK} == {"bidding", "maze2d", "teams"}
    assert {*INSTRUCTIONS} == {
        "babyai-go-to",
        "babyai-open",
        "babyai-pick-up",
        "babyai-put-next-to",
    }


def test_the_libraries_of_instructions_have_sixty_frames_together():
    libraries = [read_library(path).frames for path in INSTRUCTIONS.values()]
    assert sum(len(frames["trained"]) for frames in libraries) >= 60
    for kind in INSTRUCTION_KINDS:
        assert sum(len(frames[kind]) for frames in libraries) >= 8


@pytest.mark.parametrize("path", ONE_TASK.values(), ids=ONE_TASK)
def test_a_shipped_library_has_its_frames_and_held_out_words_are_what_they_say(path):
    frames = read_library(path).frames
    assert len(frames["trained"]) >= 60 and sum(len(frames[kind]) for kind in KINDS) == 20

    def words(frame):
        return set(re.findall(r"[a-z]+", re.sub(r"{[^}]*}", " ", frame.lower())))

    allowed_words = set().union(*map(words, frames["trained"]))
    fields = set().union(*map(frame_fields, frames["trained"]))
    for kind in ("new_frames", "contrast"):
        assert all(
            words(frame) <= allowed_words and frame_fields(frame) <= fields
            for frame in frames[kind]
        ), kind
    assert all(words(frame) - allowed_words for frame in frames["unseen_words"])
    assert all("other_" in frame for frame in frames["contrast"])


@pytest.mark.parametrize("maze", ["umaze", "medium", "large", "open"])
def test_every_text_of_a_maze_names_one_goal(maze):
    facts, named = goal_facts(maze), {}
    for kind in ("trained", *KINDS):
        for text, tasks in meanings(Paraphrases(list(facts), facts, kind=kind)).items():
            assert len(tasks | named.setdefault(text, tasks)) == 1 and "{" not in text, text


def test_a_task_has_the_held_out_kinds_of_its_own_library():
    missions = facts_by_mission(["go to the red ball", "open the door"])
    facts = goal_facts("umaze") | missions | {"by itself": {}}
    kinds = [*KINDS, *INSTRUCTION_KINDS]
    assert held_out_kinds(facts.values()) == kinds
    worded = render_frames(facts, held_out=True)
    cell = task_text("umaze", (1, 3))
    assert [*dict.fromkeys(kind for kind, _ in worded[cell])] == [*KINDS]
    for mission in missions:
        assert [*dict.fromkeys(kind for kind, _ in worded[mission])] == [*INSTRUCTION_KINDS]
    assert worded["by itself"] == [(kind, "by itself") for kind in kinds]
    alone = render_frames(goal_facts("umaze"), held_out=True)
    assert [text for _, text in worded[cell][:7]] == [text for _, text in alone[cell][:7]]


def test_distinct_contrasts_are_used_only_where_another_task_differs():
    alike = facts_by_mission(["open the red door", "open a red door"])
    words = Paraphrases(list(alike), alike)
    assert not any("{other_" in frame for frame in words.frames[0] + words.frames[1])
    other = alike | facts_by_mission(["open a blue door"])
    frames = Paraphrases(list(other), other).frames[0]
    assert frames.index("Not {other_contrast}: open {object}.") == 4


def test_tasks_of_several_worlds_stand_side_by_side():
    campaign = task_facts(2900.0, 100.0, 3)
    facts = (
        goal_facts("umaze")
        | goal_facts("medium")
        | {"bid": campaign, "bid more": campaign | {"budget": 3100.0}}
    )
    words = Paraphrases([*facts, "by itself"], facts)
    assert [len(words.others[k]) for k in (0, 7, 33, 35)] == [7, 26, 2, 1] and len(
        words.frames[7]
    ) < len(words.frames[0]) == 60
    task = np.tile(np.arange(36), 50)
    assert all("{" not in words[i] for i in words.draw(task, np.random.default_rng(0)))


def test_every_text_of_an_auction_names_one_campaign_and_a_contrast_another_amount():
    campaigns = [(2900.0, 100.0, 3), (2900.0, 100.5, 3), (987.0, 87.3, 0), (10400.0, 87.3, 5)]
    facts = {task_text_of_campaign(*campaign): task_facts(*campaign) for campaign in campaigns}
    named = {}
    for kind in ("trained", *KINDS):
        for text, tasks in meanings(Paraphrases(list(facts), facts, kind=kind)).items():
            assert len(tasks | named.setdefault(text, tasks)) == 1 and "{" not in text, text
    assert "Not 2900, but 2900 is the budget" not in " ".join(named)
    assert "In cents: the budget is 98700, a conversion may cost 8730. The category is 0." in named
    assert (
        "Category zero: spend nine hundred eighty-seven, at eighty-seven point three for each "
        "conversion." in named
    )
    assert "A budget of 10.4 thousand and a target CPA of 87.3, for category 5." in named


def test_a_wording_is_drawn_by_seed_and_step_alone(tmp_path):
    facts = goal_facts("umaze")
    words = Paraphrases(list(facts), facts)
    task = np.tile(np.arange(7), 100)

    def drawn(seed, step):
        return drawn_texts(words, task, seed=seed, texts=700, step=step)

    first = drawn(0, 5)
    assert (
        (first == drawn(0, 5)).all()
        and (first != drawn(0, 6)).any()
        and (first != drawn(1, 5)).any()
    )
    texts, meaning = [words[i] for i in first], meanings(words)
    assert all(meaning[text] == {goal} for goal, text in zip(task, texts, strict=True))
    assert len({words[i] for step in range(20) for i in drawn(0, step)}) > 7 * 60


def test_rows_of_a_batch_share_a_wording():
    facts = goal_facts("umaze")
    words = Paraphrases(list(facts), facts)
    task = np.tile([3, 0, 5], 4)
    drawn = drawn_texts(words, task, seed=0, texts=3, step=0)
    assert drawn.tolist() == [*drawn[:3]] * 4
    assert (drawn[:3] // (len(facts) * words.max_frames)).tolist() == [3, 0, 5]


def drawn_texts(words, task, *, seed, texts, step):
    """The numbers of the texts of windows of these tasks."""
    draw = words.sampler(lambda step: window(task), task=np.arange(7), seed=seed, texts=texts)
    return draw(step).text_index


def window(episodes):
    zeros = np.zeros((len(episodes), 1), np.float32)
    return Window(
        observations=zeros[..., None],
        actions=zeros[..., None],
        returns_to_go=zeros,
        timesteps=zeros.astype(int),
        mask=zeros == 0,
        episodes=episodes,
    )


def meanings(words):
    """{text: the tasks that have it}"""
    tasks_by_text = {}
    for task, own in enumerate(words.frames):
        for frame in range(len(own)):
            for turn in np.arange(6) / 6:
                tasks_by_text.setdefault(
                    words[int(words.index_texts(task, frame, turn))], set()
                ).add(task)
    return tasks_by_text


def test_facts_of_a_team_by_hand():
    meta = {
        "name": "smax 2s3z",
        "task": "Win.",
        "horizon": 128,
        "types": {"stalker": {"role": "stalker"}, "zealot": {}},
    }
    facts = {
        "library": "teams",
        "size": 5,
        "role": "zealot",
        "steps": 128,
        "name": "smax 2s3z",
        "goal": "Win",
    }
    assert team_facts(meta, 5, "zealot") == facts
    task = team_task(meta, 5, "zealot", "paraphrased")
    assert (
        Paraphrases([task], {task: facts}, frames=2)[0] == "You are the zealot in a team of 5. Win."
    )
    assert team_facts(meta | {"types": {"agent": {}}}, 5, "agent")["role"] == "agent"


def test_a_team_log_has_the_facts_of_its_wordings_and_its_evaluation_the_texts():
    source = spread_log(agents=4, groups=12, text="paraphrased")
    facts = source.info["wordings"]
    assert {episode.task for episode in source.episodes} == {*facts}
    assert [task_facts["size"] for task_facts in facts.values()] == [4]
    trained = SpreadTeams(60, agents="3,4", text="paraphrased")
    held_out = SpreadTeams(60, agents="3,4", text="paraphrased", wordings="held_out")
    assert (
        trained.tasks[1]
        == "You are the agent in a team of 3. Cover every landmark, each with one agent, without touching another."
    )
    assert len({*trained.tasks}) > 100 and not {*trained.tasks} & {*held_out.tasks}
    assert [*held_out.conditions("per_agent", False)] == [
        "per agent, 3 agents, held-out wordings",
        "per agent, 4 agents, held-out wordings",
    ]
    with pytest.raises(
        ValueError, match="env.wordings=held_out: needs text=paraphrased, got text=informative"
    ):
        SpreadTeams(2, text="informative", wordings="held_out")
