"""The losses and scores of a training select the best weights and show a stall."""

import pytest

from decisionllm.commands.train_history import History


@pytest.mark.parametrize(
    ("keep_best", "values", "expected"),
    [
        ("loss", {"nll": 0.1, "held_out_nll": 1.9}, True),
        ("loss", {"nll": 0.1, "held_out_nll": 2.0}, False),
        ("loss", {"nll": 0.1}, False),
        ("score", {"nll": 9.0, "score": 41.0}, True),
        ("score", {"nll": 0.1, "score": 40.0}, False),
        ("score", {"nll": 0.1}, False),
        ("", {"nll": 0.1, "held_out_nll": 0.1, "score": 99.0}, False),
    ],
)
def test_a_line_is_the_best_if_it_beats_those_before_it(keep_best, values, expected):
    history = History()
    assert history.is_best({"nll": 5.0, "held_out_nll": 5.0, "score": -5.0}, keep_best) == (
        keep_best != ""
    )
    history.add({"nll": 5.0, "held_out_nll": 2.0, "score": 40.0})
    history.add({"nll": 4.0, "held_out_nll": 3.0, "score": 30.0})
    assert history.is_best(values, keep_best) is expected


def test_a_stall_is_told_once_with_the_losses_and_the_score():
    history = History()
    warnings = []
    for loss, score in ((4.0, 20.0), (3.0, 19.0), (2.0, 20.0), (1.5, 18.0), (1.0, 17.0)):
        history.add({"nll": loss, "score": score})
        if history.has_stalled():
            warnings.append(history.stall_warning())
    assert len(warnings) == 1
    assert (
        "the loss fell from 4.0000 to 1.5000, and the score did not rise above 20.0" in warnings[0]
    )
