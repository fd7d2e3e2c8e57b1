"""The unit of actions, and faults of their bounds."""

import numpy as np
import pytest

from decisionllm.datasets.action_range import action_units, describe_faults, separate_bounds
from decisionllm.datasets.arrays import from_episodes, load, open_folder
from decisionllm.datasets.data_quality import list_faults
from decisionllm.datasets.running_statistics import RunningStatistics
from decisionllm.models.normalizer import Normalizer
from decisionllm.schema import Episode, Spec

ACTIONS = np.linspace(-0.8, 0.8, 400, dtype=np.float32)[:, None]


def moments_of(actions):
    taken = RunningStatistics()
    taken.add(actions)
    return taken


def spec_of(low, high):
    return Spec(1, len(low), 10, low, high)


@pytest.mark.parametrize(
    ("low", "high", "unit"),
    [
        (-1.0, 1.0, (-1, 1)),
        (-15.0, 15.0, (-15, 15)),
        (-100.0, 100.0, (-0.8, 0.8)),
        (0.0, 1e6, (-0.8, 0.8)),
        (-3.4e38, 3.4e38, (-0.8, 0.8)),
    ],
)
def test_bounds_that_are_far_wider_are_not_the_unit(low, high, unit):
    spec = spec_of((low,), (high,))
    least, most = action_units(spec, moments_of(ACTIONS))
    assert (least[0], most[0]) == pytest.approx(unit)
    assert len(describe_faults(spec, {"actions": ACTIONS})) == (unit[1] != high)


def test_one_number_of_several_has_its_own_unit():
    actions = np.hstack([ACTIONS, 500 * ACTIONS, 0 * ACTIONS])
    spec = spec_of((-1000.0,) * 3, (1000.0,) * 3)
    low, high = action_units(spec, moments_of(actions))
    assert low == pytest.approx([-0.8, -1000, 0])
    assert high == pytest.approx([0.8, 1000, 0])
    assert [fault[:10] for fault in describe_faults(spec, {"actions": actions})] == [
        "action [0]",
        "action [2]",
    ]


def test_a_number_that_never_changes_keeps_bounds_of_its_size():
    spec = spec_of((-1.0,), (1.0,))
    assert action_units(spec, moments_of(0 * ACTIONS)) == (-1, 1)


def test_missing_actions_are_no_part_of_the_range():
    actions = np.concatenate([ACTIONS, [[99.0]]]).astype(np.float32)
    columns = {"actions": actions, "action_weight": np.append(np.ones(400), 0)}
    assert describe_faults(spec_of((-1.0,), (1.0,)), columns) == []
    assert len(describe_faults(spec_of((-50.0,), (99.0,)), columns)) == 1


@pytest.mark.parametrize("outlier", [100.0, -1e30])
def test_an_outlier_among_the_actions_is_a_fault(outlier):
    actions = ACTIONS.copy()
    actions[7] = outlier
    bounds = ((actions.min().item(),), (actions.max().item(),))
    (fault,) = describe_faults(spec_of(*bounds), {"actions": actions})
    assert fault.startswith("action [0]: 1 of 400 are far from all others")
    assert "dataset.clip" in fault


@pytest.mark.parametrize(
    "actions",
    [
        np.eye(1, 400)[0],  # a button that is pressed once
        np.random.default_rng(0).normal(size=400),
        np.random.default_rng(0).lognormal(size=400),
    ],
)
def test_actions_that_are_rarely_large_are_no_outliers(actions):
    actions = actions.astype(np.float32)[:, None]
    bounds = ((actions.min().item(),), (actions.max().item(),))
    assert describe_faults(spec_of(*bounds), {"actions": actions}) == []


def test_a_range_beyond_float32_is_refused():
    actions = np.array([[-3e38], [3e38], [0]], np.float32)
    with pytest.raises(ValueError, match="expected a range whose width float32 can hold, got -3"):
        describe_faults(spec_of((-3e38,), (3e38,)), {"actions": actions})


def test_a_policy_stays_within_the_unit_and_the_log_too():
    spec = spec_of((-3.4e38, -1.0), (3.4e38, 1.0))
    units = Normalizer(spec)
    actions = np.hstack([ACTIONS, ACTIONS])
    units.fit_actions(spec, moments_of(actions))
    ends = units.raw_actions(units.observation_mean.new_tensor([[-9.0, -9.0], [1.0, 1.0]]))
    assert ends.numpy() == pytest.approx(np.array([[-0.8, -1], [0.8, 1]]))
    again = units.raw_actions(units.actions(ends.new_tensor(actions)))
    assert again.numpy() == pytest.approx(actions, abs=1e-6)


def test_units_of_usual_bounds_keep_their_bits():
    spec = spec_of((-0.3,), (0.7,))
    units = Normalizer(spec)
    before = units.low.clone(), units.high.clone()
    units.fit_actions(spec, moments_of(ACTIONS / 2))
    assert (units.low.equal(before[0]), units.high.equal(before[1])) == (True, True)


def test_a_number_with_one_value_has_bounds_on_both_sides():
    assert separate_bounds((-1, 5.0), (1, 5.0)) == ((-1, 4.995), (1, 5.005))


def test_a_store_reports_bounds_in_name_only(tmp_path):
    episodes = [Episode(ACTIONS[:10], ACTIONS[i : i + 10], np.ones(10)) for i in range(0, 400, 10)]
    spec = Spec(1, 1, 10, (-1e4,), (1e4,))
    node = from_episodes(episodes, tmp_path / "s", name="wide", spec=spec)
    (fault,) = list_faults(open_folder(path=node["path"]).info)
    assert fault.startswith("action [0]: bounds -1e+04 .. 1e+04 are far wider than")


def test_a_file_may_have_an_action_that_never_changes(tmp_path):
    n = 6
    ends = np.arange(n) == n - 1
    columns = {"observations": np.eye(n), "rewards": np.ones(n), "terminals": ends}
    actions = np.stack([np.linspace(-1, 1, n), np.full(n, 2.0)], 1)
    np.savez(tmp_path / "log.npz", actions=actions, **columns)
    spec = load(path=str(tmp_path / "log.npz")).spec
    assert (spec.low, spec.high) == (pytest.approx((-1, 1.998)), pytest.approx((1, 2.002)))


def test_actions_of_a_file_are_clipped_to_stated_bounds(tmp_path):
    columns = {"observations": np.eye(3), "rewards": np.ones(3), "terminals": [0, 0, 1]}
    path = str(tmp_path / "log.npz")
    np.savez(path, actions=np.array([-3.0, 0.5, 1.5]), **columns)
    source = load(path=path, low=[-1], high=[1], clip=True)
    assert next(iter(source.episodes)).actions.tolist() == [[-1], [0.5], [1]]
    with pytest.raises(ValueError, match="dataset.clip: expected dataset.low or dataset.high"):
        load(path=path, clip=True)
