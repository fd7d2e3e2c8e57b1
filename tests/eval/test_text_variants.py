"""Variants of task texts, and files of pairs."""

import json

import numpy as np
import pytest

from decisionllm.eval.text_variants import (
    Pair,
    TaskTexts,
    ask_politely,
    build_variants,
    check_pairs,
    read_pairs,
    swap_letters,
    text_variants,
    toggle_full_stop,
)

TASKS = ["Walk north.", "Walk south."]


def draws():
    return np.random.default_rng(0)


def test_edits_of_a_text():
    assert toggle_full_stop("Go up.") == "Go up" and toggle_full_stop("Go up") == "Go up."
    assert ask_politely("Go up.") == "Please, go up." and ask_politely("X = 3") == "Please, X = 3"
    assert swap_letters("Go to box 12", draws()) == "Go to bxo 12"
    assert swap_letters("12, 34", draws()) == "12, 34", "it has no letters"


def test_variants_of_a_text_with_one_other_task():
    variants = text_variants(TASKS[0], TaskTexts(TASKS, {}), draws())
    assert sorted(variants.pop("typing error")) == sorted(TASKS[0])
    assert variants == {
        "full stop": "Walk north",
        "capitals": "WALK NORTH.",
        "politeness": "Please, walk north.",
        "other task": "Walk south.",
        "contrast": "Not this: Walk north. But this: Walk south.",
        "contrast, reversed": "Do this: Walk south. Not this: Walk north.",
        "no text": "",
    }


def test_a_text_without_a_variant_has_none():
    variants = build_variants(["12", "Walk"], TaskTexts(["12", "Walk"], {}), draws())
    assert variants["capitals"] == [None, "WALK"] and variants["other task"] == ["Walk", "12"]


def test_pairs_are_read_from_yaml_json_and_csv(tmp_path):
    pairs = [Pair("Go up", "Head up", same=True), Pair("Go up", "Go down", same=False)]
    rows = [{"text": pair.text, "other": pair.other, "same": pair.same} for pair in pairs]
    yaml_file, json_file, csv_file = (tmp_path / f"pairs.{end}" for end in ("yaml", "json", "csv"))
    yaml_file.write_text(
        "- {text: Go up, other: Head up, same: yes}\n- {text: Go up, other: Go down, same: false}\n",
        encoding="utf-8",
    )
    json_file.write_text(json.dumps(rows), encoding="utf-8")
    csv_file.write_text(
        "\ufefftext,other,same\nGo up,Head up,1\nGo up,Go down,False\n", encoding="utf-8"
    )
    for path in (yaml_file, json_file, csv_file):
        assert read_pairs(path) == pairs


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected a list of {text, other, same}, got an empty file"),
        ("text: a", "expected a list of {text, other, same}, got dict"),
        ("[{text: a, other: b}]", "pair 1: expected the keys text, other and same, got"),
        ("[{text: a, other: 3, same: true}]", "pair 1: expected other to be a text, got 3"),
        ("[{text: a, other: b, same: 2}]", "pair 1: expected same to be true or false, got 2"),
        ("[{text: a, other: a, same: true}]", "pair 1: expected two different texts, got 'a'"),
        ("[{", "expected a YAML, JSON or CSV file"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, content, message):
    path = tmp_path / "pairs.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError) as raised:
        read_pairs(path)
    assert message in str(raised.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="none.csv: expected a YAML, JSON or CSV file"):
        read_pairs(tmp_path / "none.csv")


def test_a_pair_of_an_unknown_text_is_refused_with_near_ones():
    with pytest.raises(
        ValueError, match="pair 1: expected .*got 'Walk nort'; near are 'Walk north.'"
    ):
        check_pairs([Pair("Walk nort", "Sit", same=False)], TASKS, "probe_pairs=a.yaml")
    check_pairs([Pair("Walk north.", "Sit", same=False)], TASKS, "probe_pairs=a.yaml")
