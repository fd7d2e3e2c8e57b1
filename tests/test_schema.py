"""Records are checked where they are made: a message names the record, the field, what was expected
and what came.
"""

import json
from dataclasses import asdict

import gymnasium
import numpy as np
import pandas as pd
import pytest
import torch

from decisionllm.schema import Batch, Episode, History, Report, Spec, Window, raise_for_first


def zeros(*shape):
    return np.zeros(shape, np.float32)


def batch(**fields):
    """One row of two steps: S = 3, A = 1, a text of four tokens."""
    parts = {
        "observations": torch.zeros(1, 2, 3),
        "actions": torch.zeros(1, 2, 1),
        "returns_to_go": torch.zeros(1, 2),
        "timesteps": torch.zeros(1, 2, dtype=torch.long),
        "mask": torch.ones(1, 2, dtype=torch.bool),
        "text_ids": torch.zeros(1, 4, dtype=torch.long),
        "text_mask": torch.ones(1, 4, dtype=torch.bool),
        "text_index": torch.zeros(1, dtype=torch.long),
    }
    return Batch(**parts | fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Episode(zeros(3, 2), zeros(4, 1), zeros(3)),
            r"Episode.actions: expected shape \(n=3, A\), got \(4, 1\)",
        ),
        (
            lambda: Episode(zeros(3), zeros(3, 1), zeros(3)),
            r"Episode.observations: expected shape \(n, S\), got \(3,\)",
        ),
        (
            lambda: Episode({"position": zeros(1, 2)}, zeros(1, 1), zeros(1)),
            r"Episode.observations: expected shape \(n, S\), got dict",
        ),
        (
            lambda: Episode(zeros(1, 2), zeros(1, 1), zeros(1), final_observation=zeros(3)),
            r"expected shape \(S=2\), got \(3,\)",
        ),
        (
            lambda: Episode(zeros(0, 2), zeros(0, 1), zeros(0)),
            "Episode: expected at least one step, got none",
        ),
        (
            lambda: History(zeros(3, 2), zeros(3, 1), zeros(2)),
            r"History.actions: expected shape \(t=2, A\), got \(3, 1\)",
        ),
        (
            lambda: History(zeros(3, 2), zeros(2, 1), zeros(2), action_masks=np.ones((2, 4), bool)),
            r"History.action_masks: expected shape \(t\+1=3, C\), got \(2, 4\)",
        ),
        (
            lambda: Window(
                zeros(1, 2, 3), zeros(1, 2, 1), zeros(1, 2), zeros(1, 2), zeros(2, 2), zeros(1)
            ),
            r"Window.mask: expected shape \(B=1, T=2\), got \(2, 2\)",
        ),
        (
            lambda: batch(text_mask=torch.ones(1, 5)),
            r"Batch.text_mask: expected shape \(U=1, L=4\), got \(1, 5\)",
        ),
    ],
)
def test_a_wrong_shape_names_the_field_and_what_came(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "made",
    [np.ndarray.tolist, torch.from_numpy, pd.DataFrame],
    ids=["lists", "tensors", "tables"],
)
def test_columns_of_other_libraries_become_arrays(made):
    rows = np.arange(6.0).reshape(3, 2)
    episode = Episode(made(rows), made(rows[:, :1]), pd.Series([1.0, 2.0, 3.0]))
    assert type(episode.observations) is type(episode.rewards) is np.ndarray
    assert episode.observations.tolist() == rows.tolist() and episode.rewards.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match=r"Episode.rewards: .* finite numbers, got nan at \[1\]"):
        Episode(made(rows), made(rows), pd.Series([1.0, np.nan, 3.0]))


@pytest.mark.parametrize(
    ("observations", "message"),
    [
        (np.full((2, 1), None), "expected numbers, got object"),
        (np.full((2, 1), 1j), "expected numbers, got complex128"),
        ([[0], [0, 0]], "expected an array, got list .*inhomogeneous"),
        (torch.zeros(2, 1, requires_grad=True), "expected an array, got Tensor .*requires grad"),
    ],
    ids=["object", "complex", "ragged", "with a gradient"],
)
def test_a_column_that_is_no_array_of_numbers_is_named(observations, message):
    with pytest.raises(ValueError, match=f"Episode.observations: {message}"):
        Episode(observations, zeros(2, 1), zeros(2))


def test_a_number_that_is_not_finite_is_named_with_its_place():
    rows = zeros(3, 2)
    rows[1, 0] = np.nan
    with pytest.raises(
        ValueError, match=r"Episode.observations: expected finite numbers, got nan at \[1, 0\]"
    ):
        Episode(rows, zeros(3, 1), zeros(3))
    with pytest.raises(
        ValueError, match=r"History.rewards: expected finite numbers, got inf at \[0\]"
    ):
        History(zeros(2, 2), zeros(1, 1), np.array([np.inf]))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("task", None, "expected str, got None"),
        ("task", 3, "expected str, got 3"),
        ("group", 1.5, "expected one int64, got 1.5"),
        ("group", "a", "expected one int64, got 'a'"),
        ("group", 2**70, "expected one int64, got 1180591620717411303424"),
        ("agent", 2**31, "expected one int32, got 2147483648"),
        ("start", "a", "expected one int32, got 'a'"),
        ("return_after_exit", np.nan, "expected one float32, got nan"),
        ("terminated", [False, False, True], r"expected one bool, got an array of shape \(3,\)"),
        ("terminated", "false", "expected one bool, got 'false'"),
        ("terminated", np.nan, "expected one bool, got nan"),
        ("terminated", None, "expected one bool, got None"),
        ("truncated", 2, "expected one bool, got 2"),
    ],
)
def test_a_value_of_an_episode_of_another_type_is_refused(name, value, message):
    with pytest.raises(ValueError, match=f"^Episode.{name}: {message}$"):
        Episode(zeros(3, 2), zeros(3, 1), zeros(3), **{name: value})


def test_numbers_of_numpy_are_values_of_an_episode():
    numbers = {"terminated": np.bool_(True), "truncated": np.int64(0), "group": np.int64(4)}
    episode = Episode(zeros(3, 2), zeros(3, 1), zeros(3), task=np.str_("Go."), **numbers)
    assert (episode.terminated, episode.truncated, episode.group) == (True, False, 4)
    assert [type(vars(episode)[name]) for name in numbers] == [bool, bool, int]


def test_a_history_may_hold_the_first_observation_alone():
    history = History(zeros(1, 2), zeros(0, 1), zeros(0))
    assert history.target_return is None and history.task == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"low": (-1.0,), "high": (1.0, 1.0)}, "expected 2 bounds each, got 1 and 2"),
        ({"low": (-1.0, 1.0), "high": (1.0, 1.0)}, "expected finite bounds, low < high"),
        ({"low": (-1.0, -np.inf), "high": (1.0, 1.0)}, "expected finite bounds, low < high"),
        (
            {"low": (1.0, 1.0), "high": (1.0, 2.0)},
            r"low < high, got \(1.0, 1.0\) and \(1.0, 2.0\); give those of the action space",
        ),
        ({"horizon": 0}, "expected sizes and a horizon above 0, got 3, 2 and 0"),
        (
            {"num_actions": -1},
            "expected a number of discrete actions, or 0 for continuous ones, got -1",
        ),
        ({"num_actions": 5}, "a discrete action is one index, got 2 numbers"),
        ({"num_actions": 1 << 25}, "at most 16,777,216 .*, got 33,554,432; give low and high"),
        ({"categorical": [(0, 2), (1, 2)]}, r"Spec.categorical: .*, got \(\(0, 2\), \(1, 2\)\)"),
        ({"categorical": [(2, 2)]}, "groups that follow one another within 3 numbers, the size"),
        ({"categorical": [(0, 0)]}, "Spec.categorical: expected "),
        ({"categorical": [(-1, 2)]}, "Spec.categorical: expected "),
        ({"horizon": 2.5}, "Spec.horizon: expected one int64, got 2.5"),
        ({"low": zeros(1, 2)}, r"Spec.low: expected a number for .*, got shape \(1, 2\), float32"),
        ({"high": "ab"}, r"Spec.high: expected a number for .*, got shape \(\), <U2"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Spec(**{"observation_dim": 3, "action_dim": 2, "horizon": 10} | fields)


def test_bounds_and_sizes_of_an_action_space_become_plain_numbers():
    space = gymnasium.spaces.Box(np.array([-1, 0], np.float32), np.array([1, 0.5], np.float32))
    size = np.int64(2)
    for low, high in ((space.low, space.high), (list(space.low), torch.from_numpy(space.high))):
        spec = Spec(observation_dim=3, action_dim=size, horizon=9.0, low=low, high=high)
        assert json.dumps(asdict(spec)) == json.dumps(
            asdict(Spec(3, 2, 9, (-1.0, 0.0), (1.0, 0.5)))
        )
    # whole numbers stay whole: the fingerprint of a store depends on it
    assert json.dumps(asdict(Spec(3, 2, 9, -1, 0.5))["low"]) == "[-1, -1]"


def test_a_batch_moves_whole_and_what_is_missing_stays_missing():
    here, there = vars(batch()), vars(batch().to("meta"))
    assert (
        {name for name in there if there[name] is None}
        == {name for name in here if here[name] is None}
        > set()
    )
    assert {part.device.type for part in there.values() if part is not None} == {"meta"}


def test_a_report_is_one_line_whose_return_is_called_return():
    report = Report(
        "w",
        "d",
        "p",
        "standard",
        "none",
        0,
        None,
        True,
        2,
        1.5,
        50.0,
        40.0,
        60.0,
        0.1,
        extra={"commit": "abc"},
    )
    row = report.row()
    assert (row["return"], row["score"], row["commit"]) == (1.5, 50.0, "abc")
    assert "mean_return" not in row and "extra" not in row


def test_the_first_wrong_entry_is_refused_with_its_values():
    wrong = np.array([[False, False], [True, True]])
    values = np.array([[1.0, 2.0], [3.5, 4.0]])
    raise_for_first("log, ", np.zeros((2, 2), bool), "row {}: got {}", values, values)
    with pytest.raises(ValueError, match=r"^log, row 3.5: got \[7.0\], x$"):
        raise_for_first(
            "log, ",
            wrong,
            "row {:g}: got {}, {}",
            values,
            values[..., None] * 2,
            np.full((2, 2), "x", object),
        )
