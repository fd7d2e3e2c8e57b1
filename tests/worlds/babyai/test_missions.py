"""BabyAI's missions: their grammar over all levels, their mirror, and their facts and wordings."""

import itertools
import re

import numpy as np
import pytest

from decisionllm.datasets.paraphrases import (
    Paraphrases,
    held_out_kinds,
    load_library,
    render_frames,
)
from decisionllm.worlds.babyai.missions import (
    COLORS,
    LIBRARIES,
    PLACES,
    TYPES,
    Clause,
    Description,
    Mission,
    facts_by_mission,
    load_synonyms,
    mirror,
    mission_facts,
    parse,
)

BALL = Description("the", "red", "ball", None)
DOOR = Description("a", None, "door", "on your left")


def all_objects(types=("ball", "box", "key"), places=(None,)):
    """Every way to name an object of these types, with and without a colour."""
    names = []
    for parts in itertools.product(("a", "the"), (None, *COLORS), types, places):
        names.append(str(Description(*parts)))
    return names


def level_missions():
    """{name: every mission of a level like it}: GoToRedBall, GoToLocal, PickupLoc, PutNextLocal,
    OpenDoor and PickupDist.
    """
    any_color = [name for name in all_objects() if any(color in name for color in COLORS)]
    placed = all_objects(places=(None, *PLACES))
    definite = [name for name in any_color if name.startswith("the")]
    pairs = itertools.permutations(definite, 2)
    doors = all_objects(types=("door",), places=(None, *PLACES))
    objects = all_objects(types=("ball", "box", "key", "object"))
    return {
        "red ball": ["go to the red ball", "go to a red ball"],
        "local": [f"go to {name}" for name in any_color],
        "places": [f"pick up {name}" for name in placed],
        "put": [f"put {moved} next to {target}" for moved, target in pairs],
        "doors": [f"open {name}" for name in doors],
        "any type": [f"pick up {name}" for name in objects],
    }


def texts_by_mission(missions, kind):
    """{mission: its texts of this kind, each frame with several contrasts}"""
    words = Paraphrases(missions, facts_by_mission(missions), kind=kind)
    texts = {}
    for task, frames in enumerate(words.frames):
        numbers = []
        for frame, turn in itertools.product(range(len(frames)), (0, 0.4, 0.9)):
            numbers += words.index_texts(
                np.array([task]), np.array([frame]), np.array([turn])
            ).tolist()
        texts[missions[task]] = sorted({words[number] for number in numbers})
    return texts


def words_of(text):
    return set(re.findall(r"[a-z]+", re.sub(r"{[^}]*}", " ", text.lower())))


def test_a_mission_of_each_action_is_parsed_by_hand():
    box = Description("a", "blue", "box", "behind you")
    by_hand = {
        "go to the red ball": Clause("go to", BALL),
        "pick up a blue box behind you": Clause("pick up", box),
        "open a door on your left": Clause("open", DOOR),
        "put the red ball next to a blue box behind you": Clause("put", BALL, box),
        "put a blue box behind you next to the red ball": Clause("put", box, BALL),
    }
    for mission, clause in by_hand.items():
        assert parse(mission) == Mission((clause,), ())
    text = "go to the red ball and open a door on your left, then go to the red ball"
    both = (Clause("go to", BALL), Clause("open", DOOR), Clause("go to", BALL))
    assert parse(text) == Mission(both, ("and", "then"))
    after = parse("open a door on your left after you go to the red ball")
    assert after == Mission((Clause("open", DOOR), Clause("go to", BALL)), ("after you",))


@pytest.mark.parametrize(
    "mission",
    [
        "",
        "go to",
        "go to red ball",
        "go to the pink ball",
        "go to the red ball on your head",
        "fetch the red ball",
        "put the red ball",
        "go to the red ball, then",
        "go to the red ball then open the door",
        "Go to the red ball.",
    ],
)
def test_a_text_that_is_no_mission_is_refused(mission):
    with pytest.raises(ValueError, match="mission: expected BabyAI's 'go to', .*, got ") as error:
        parse(mission)
    assert repr(mission) in str(error.value)


def test_a_mirrored_mission_swaps_left_and_right():
    mirrored = {
        "go to a ball on your right": "go to a ball on your left",
        "open the door": "open the door",
        "put the key on your left next to a box on your right": (
            "put the key on your right next to a box on your left"
        ),
    }
    assert {mission: mirror(mission) for mission in mirrored} == mirrored


def test_every_mission_of_every_level_is_parsed():
    gymnasium = pytest.importorskip("gymnasium")
    pytest.importorskip("minigrid")
    wrong = []
    levels = [name for name in gymnasium.registry if name.startswith("BabyAI-")]
    assert len(levels) > 80
    for level in levels:
        env = gymnasium.make(level).unwrapped
        for seed in range(5):
            mission = env.reset(seed=seed)[0]["mission"]
            if str(parse(mission)) != mission:
                wrong.append((level, mission))
    assert not wrong


def test_facts_of_missions_by_hand():
    assert mission_facts("go to a blue ball on your left") == {
        "library": "babyai-go-to",
        "article": "a",
        "color": "blue",
        "type": "ball",
        "place": "on your left",
        "where": " on your left",
        "thing": "a blue ball",
        "object": "a blue ball on your left",
        "object_alias": "an azure sphere to your left",
        "object_alias2": "a navy orb on your left-hand side",
        "contrast": "a blue ball",
        "contrast_alias": "an azure sphere",
        "contrast_alias2": "a navy orb",
    }
    facts = mission_facts("put the key next to a grey object")
    assert (facts["library"], facts["object"]) == ("babyai-put-next-to", "the key")
    assert (facts["target"], facts["target_alias2"]) == ("a grey object", "an ashen item")
    assert facts["target_contrast_alias"] == "a silver thing"
    assert not {"color", "place", "target_type", "target_place"} & set(facts)
    assert mission_facts("open the door and open a door") is None


@pytest.mark.parametrize("mission", ["open the door, then go to a key", "get to the green goal"])
def test_a_mission_without_a_frame_is_refused_by_its_text(mission):
    with pytest.raises(ValueError) as error:
        facts_by_mission(["go to a key", mission])
    assert str(error.value) == (
        "dataset.text=paraphrased: no sentence frame fits the mission "
        f"{mission!r}; take text=mission"
    )


def test_synonyms_name_one_thing_and_are_in_no_trained_text():
    lists = [load_synonyms()[group] for group in ("colors", "types", "places")]
    assert [tuple(sorted(group)) for group in lists] == [COLORS, TYPES, tuple(sorted(PLACES))]
    aliases = [alias for group in lists for pair in group.values() for alias in pair]
    assert len(aliases) == len(set(aliases)) == 2 * (len(COLORS) + len(TYPES) + len(PLACES))
    trained = set()
    for missions in level_missions().values():
        for texts in texts_by_mission(missions, "trained").values():
            trained |= set(texts)
    words = set().union(*map(words_of, trained))
    for group in lists[:2]:
        for alias in itertools.chain.from_iterable(group.values()):
            assert not words_of(alias) & words, alias
    for alias in itertools.chain.from_iterable(lists[2].values()):
        assert not any(alias in text.lower() for text in trained), alias


def test_no_trained_frame_has_a_new_word_of_a_held_out_action():
    libraries = [load_library(name) for name in LIBRARIES.values()]
    trained = [frame for each in libraries for frame in each.frames["trained"]]
    words = set().union(*map(words_of, trained))
    for each in libraries:
        own = set().union(*map(words_of, each.frames["trained"]))
        for frame in each.frames["action_words"] + each.frames["both"]:
            assert words_of(frame) - words, f"{frame}: expected a word that no trained frame has"
        for frame in each.frames["object_words"]:
            assert words_of(frame) <= own and "_alias" in frame, frame
        assert not any("_alias" in frame for frame in trained + each.frames["action_words"])
        assert all("_alias" in frame for frame in each.frames["both"])
    assert not {"left", "right"} & words, "mirrored missions would say something else"


@pytest.mark.parametrize("level", level_missions())
def test_every_text_names_one_mission_and_is_well_formed(level):
    missions = level_missions()[level]
    kinds = held_out_kinds(facts_by_mission(missions).values())
    assert kinds == ["action_words", "object_words", "both"]
    mission_of = {}
    for kind in ("trained", *kinds):
        for mission, texts in texts_by_mission(missions, kind).items():
            assert texts, f"{mission} has no text of {kind}"
            for text in texts:
                assert mission_of.setdefault(text, mission) == mission, text
                assert not re.search(r"  |[{}]| [.,?!:;]|^ | $|\bNone\b|\ba [aeiou]", text), text


def test_texts_of_different_actions_differ():
    levels = level_missions()
    missions = levels["local"] + levels["places"] + levels["put"][:100] + levels["doors"]
    mission_of = {}
    for kind in ("trained", "action_words", "object_words", "both"):
        for mission, texts in texts_by_mission(missions, kind).items():
            for text in texts:
                assert mission_of.setdefault(text, mission) == mission, text


def test_a_contrast_names_an_object_that_differs_in_color_or_type():
    missions = level_missions()["places"]
    facts = facts_by_mission(missions)
    words = Paraphrases(missions, facts)
    for task, frames in enumerate(words.frames):
        own = facts[missions[task]]
        frame = next(i for i, each in enumerate(frames) if each.startswith("Not {"))
        for turn in np.arange(8) / 8:
            number = words.index_texts(np.array([task]), np.array([frame]), np.array([turn]))[0]
            other = re.fullmatch(r"Not (.*): pick up .*\.", words[number])[1]
            assert other != own["contrast"], words[number]
            assert ("color" in own) == any(color in other for color in COLORS)


def test_one_object_alone_is_not_contrasted_and_has_every_kind():
    missions = ["go to the red ball", "go to a red ball"]
    facts = facts_by_mission(missions)
    assert not any("{other" in frame for frame in Paraphrases(missions, facts).frames[0])
    worded = render_frames(facts, held_out=True)
    texts = [text for _, text in worded["go to a red ball"]]
    assert texts == [
        "Approach a red ball.",
        "Kindly head towards a red ball and halt.",
        "Go to a crimson sphere.",
        "Please walk up to a scarlet orb.",
        "Proceed to a crimson sphere.",
        "Pay a scarlet orb a visit.",
    ]
