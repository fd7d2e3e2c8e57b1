"""Seeds of the worlds of an evaluation."""

import pytest

from decisionllm.teams.team_env import REFERENCE_STARTS, make_start_seeds


def test_evaluations_share_no_start_among_them_nor_with_logs_and_references():
    first, second, last = (set(make_start_seeds(seed, 1000)) for seed in (0, 1, 899))
    assert len(first) == 1000 and not first & second
    assert max(last) < REFERENCE_STARTS


@pytest.mark.parametrize(
    ("seed", "worlds", "message"),
    [
        (900, 1, "seed: expected 0 .. 899, so that no start is in a log, got 900"),
        (-1, 1, "seed: expected 0 .. 899"),
        (0, 1001, "episodes: expected at most 1000"),
    ],
)
def test_starts_that_another_evaluation_or_a_log_has_are_refused(seed, worlds, message):
    with pytest.raises(ValueError, match=message):
        make_start_seeds(seed, worlds)
