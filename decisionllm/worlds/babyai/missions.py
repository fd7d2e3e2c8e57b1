"""The missions of BabyAI: their grammar, their mirror image, and their facts for other wordings.

Source: minigrid `envs/babyai/core/verifier.py`, which says the missions.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from decisionllm.datasets.paraphrases import Facts

WORDS = Path(__file__).with_name("words.yaml")
COLORS = ("blue", "green", "grey", "purple", "red", "yellow")
TYPES = ("ball", "box", "door", "key", "object")  # `object` stands for any type
PLACES = ("on your left", "on your right", "in front of you", "behind you")
CONNECTORS = (", then ", " and ", " after you ")
ALIASES = ("alias", "alias2")
TARGET_FIELDS = {
    "object": "target",
    "object_alias": "target_alias",
    "object_alias2": "target_alias2",
}
# {action: name of its library of sentence frames}
LIBRARIES = {
    "go to": "babyai-go-to",
    "pick up": "babyai-pick-up",
    "put": "babyai-put-next-to",
    "open": "babyai-open",
}


def build_pattern(prefix: str) -> str:
    """Return the pattern of an object, such as "the red ball on your left", in named groups."""
    article = f"(?P<{prefix}article>a|an|the)"
    color = f"(?:(?P<{prefix}color>{'|'.join(COLORS)}) )?"
    kind = f"(?P<{prefix}type>{'|'.join(TYPES)})"
    place = f"(?: (?P<{prefix}place>{'|'.join(PLACES)}))?"
    return f"{article} {color}{kind}{place}"


CLAUSE = re.compile(
    f"(?P<action>go to|pick up|open) {build_pattern('')}"
    f"|put {build_pattern('moved_')} next to {build_pattern('target_')}"
)
SPLIT = re.compile(f"({'|'.join(CONNECTORS)})")


@dataclass(frozen=True)
class Description:
    """An object as a mission names it."""

    article: str  # `the` or `a`
    color: str | None
    type: str  # of TYPES
    place: str | None  # of PLACES: where it was as the episode began, as the agent saw it

    def __str__(self) -> str:
        return join_words(self.article, self.color, self.type, self.place)

    def may_mean(self, color: str, type: str) -> bool:
        """Return whether an object of this colour and type can be the one that is named."""
        return self.color in (None, color) and self.type in ("object", type)


@dataclass(frozen=True)
class Clause:
    """One instruction of a mission."""

    action: str  # `go to`, `pick up`, `open` or `put`
    object: Description
    target: Description | None = None  # what the object is put next to

    def __str__(self) -> str:
        words = f"{self.action} {self.object}"
        return f"{words} next to {self.target}" if self.target else words


@dataclass(frozen=True)
class Mission:
    """The clauses of a mission in the order of its text, and what joins each with the next one.

    "A, then B" does A first, "A after you B" does B first, and "A and B" has no order. `and` binds
    more closely than the others.
    """

    clauses: tuple[Clause, ...]
    connectors: tuple[str, ...]  # of `then`, `and`, `after you`; one fewer than clauses

    @property
    def descriptions(self) -> list[Description]:
        """Return every object that the mission names."""
        objects = [clause.object for clause in self.clauses]
        return objects + [clause.target for clause in self.clauses if clause.target]

    def __str__(self) -> str:
        text = str(self.clauses[0])
        for connector, clause in zip(self.connectors, self.clauses[1:], strict=True):
            comma = "," if connector == "then" else ""
            text += f"{comma} {connector} {clause}"
        return text


def parse(mission: str) -> Mission:
    """Read a mission of BabyAI.

    Raises:
        ValueError: the text is no mission of the BabyAI grammar.
    """
    pieces = SPLIT.split(mission)
    clauses = [_parse_clause(piece, mission) for piece in pieces[::2]]
    connectors = [connector.strip(" ,") for connector in pieces[1::2]]
    return Mission(tuple(clauses), tuple(connectors))


def _parse_clause(text: str, mission: str) -> Clause:
    """Read one instruction of a mission."""
    match = CLAUSE.fullmatch(text)
    if match is None:
        raise ValueError(
            "mission: expected BabyAI's 'go to', 'pick up', 'open' or 'put ... next to ...' with "
            "objects such as 'the red ball' or 'a box on your left', joined by ', then', 'and' or "
            f"'after you', got {text!r} in {mission!r}"
        )
    groups = match.groupdict()
    if groups["action"]:
        return Clause(groups["action"], _describe(groups, ""))
    return Clause("put", _describe(groups, "moved_"), _describe(groups, "target_"))


def _describe(groups: dict[str, Any], prefix: str) -> Description:
    """Return the object whose groups have this prefix."""
    return Description(
        article=groups[f"{prefix}article"],
        color=groups[f"{prefix}color"],
        type=groups[f"{prefix}type"],
        place=groups[f"{prefix}place"],
    )


def mirror(mission: str) -> str:
    """Return the mission of the mirrored world: left and right change places."""
    swap = {"left": "right", "right": "left"}
    return re.sub(r"\b(left|right)\b", lambda match: swap[match[0]], mission)


def mission_facts(mission: str) -> Facts | None:
    """Return the facts of a mission for the frames of `frames/`; None for several clauses.

    object: "the red ball on your left"; thing: without the place; article, color, type and place:
    its parts, if the mission names them; where: the place with a space before it, or empty;
    contrast: "a red ball", for "not a red ball". object_alias, object_alias2, contrast_alias and
    contrast_alias2 are in the words of words.yaml. Missions of "put" also have the facts of their
    target: target, target_alias, target_contrast, ...

    Raises:
        ValueError: see `parse`.
    """
    parsed = parse(mission)
    if len(parsed.clauses) > 1:
        return None
    clause = parsed.clauses[0]
    facts = {"library": LIBRARIES[clause.action], **describe_object(clause.object)}
    if clause.target is not None:
        for name, words in describe_object(clause.target).items():
            facts[TARGET_FIELDS.get(name, f"target_{name}")] = words
    return facts


def describe_object(description: Description) -> dict[str, str]:
    """Return the facts of one object, see `mission_facts`."""
    color, kind, place = description.color, description.type, description.place
    noun = join_words(color, kind)
    facts = {
        "article": description.article,
        "thing": add_article(description.article, noun),
        "object": add_article(description.article, join_words(noun, place)),
        "contrast": add_article("a", noun),
        "where": f" {place}" if place else "",
    }
    words = load_synonyms()
    for i, name in enumerate(ALIASES):
        noun = join_words(color and words["colors"][color][i], words["types"][kind][i])
        whole = join_words(noun, place and words["places"][place][i])
        facts[f"object_{name}"] = add_article(description.article, whole)
        facts[f"contrast_{name}"] = add_article("a", noun)
    if color:
        facts["color"] = color
    if kind != "object":
        facts["type"] = kind
    if place:
        facts["place"] = place
    return facts


def join_words(*words: str | None) -> str:
    """Return the words that are there, with one space between them."""
    return " ".join(word for word in words if word)


def add_article(article: str, noun: str) -> str:
    """Return "the red ball", "a red ball" or "an azure ball"."""
    if article == "the":
        return f"the {noun}"
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def facts_by_mission(
    missions: Iterable[str], option: str = "dataset.text=paraphrased"
) -> dict[str, Facts]:
    """Return the facts of these missions, {mission: facts}: the `wordings` of a dataset's info.

    Args:
        missions: texts of BabyAI.
        option: that asks for them, to begin a message with.

    Raises:
        ValueError: a mission has several clauses or is none of BabyAI's.
    """
    facts_of: dict[str, Facts] = {}
    for mission in dict.fromkeys(missions):
        try:
            facts = mission_facts(mission)
        except ValueError:
            facts = None
        if facts is None:
            raise ValueError(
                f"{option}: no sentence frame fits the mission {mission!r}; take text=mission"
            )
        facts_of[mission] = facts
    return facts_of


@cache
def load_synonyms() -> dict[str, dict[str, list[str]]]:
    """Load words.yaml: {`colors`, `types` or `places`: {word of a mission: its two others}}."""
    import yaml

    words: dict[str, dict[str, list[str]]] = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
    return words
