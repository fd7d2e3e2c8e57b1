"""Units: moments of blocks are those of all rows."""

import numpy as np
import pytest
import torch

from decisionllm.datasets.running_statistics import RunningStatistics, standard_scale
from decisionllm.models.normalizer import Normalizer, one_hot_scale
from decisionllm.schema import Spec


def test_moments_of_blocks_by_hand():
    moments = RunningStatistics()
    for block in ([[1.0, 5.0]], np.zeros((0, 2)), [[3.0, 5.0], [5.0, 5.0]]):
        moments.add(np.array(block, np.float32))
    assert moments.count == 3 and moments.mean.tolist() == [3, 5] and moments.low.tolist() == [1, 5]
    assert moments.variance.tolist() == pytest.approx([8 / 3, 0]) and moments.high.tolist() == [
        5,
        5,
    ]


def test_units_fitted_to_blocks_are_those_of_all_rows():
    rng = np.random.default_rng(0)
    spec = Spec(5, 1, 9, (-1.0,), (1.0,), entity_schema=(("own", 1, 1), ("goal", 2, 2)))
    x = rng.normal(1000, 1, (900, 5)).astype(np.float32)
    togo = rng.normal(size=900).astype(np.float32)
    x[:, (1, 3)] = rng.random((900, 2)) > 0.5
    fitted = [Normalizer(spec), Normalizer(spec)]
    for normalizer, size in zip(fitted, (900, 7), strict=True):
        blocks = [slice(a, a + size) for a in range(0, 900, size)]
        normalizer.fit((x[rows], togo[rows]) for rows in blocks)
        normalizer.fit_changes(np.diff(x, axis=0)[rows] for rows in blocks)
    for (name, one), (_, other) in zip(
        *(normalizer.state_dict().items() for normalizer in fitted), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6, err_msg=name)
    assert fitted[0].observation_scale[0] == np.float32(x[:, 0].std(dtype=np.float64))


def test_one_hot_groups_have_units_of_their_sizes():
    assert one_hot_scale(2) == 0.5 and one_hot_scale(5) == 0.4
    assert one_hot_scale(1) == 0.5  # a flag
    for n in (2, 3, 11):
        assert one_hot_scale(n) == pytest.approx(np.eye(n)[0].std())


@pytest.mark.parametrize(
    "entity_schema", [(), (("own", 1, 1), ("ball", 3, 3)), (("own", 5, 1), ("grid:a", 5, 1))]
)
def test_the_units_of_one_hot_columns_do_not_depend_on_the_data(entity_schema):
    spec = Spec(
        10,
        1,
        9,
        (-1.0,),
        (1.0,),
        entity_schema=entity_schema,
        categorical=[(0, 1), (2, 2), (5, 5)],
    )
    normalizer = Normalizer(spec)
    x = np.zeros((2, 10), np.float32)
    x[0, [0, 1, 4, 6]] = 1  # 1 and 4 are the flags of the first two balls
    x[1, [1, 2, 4, 5]] = 1
    normalizer.fit([(x, np.zeros(2))])
    one_hot = [0, 2, 3, 5, 6, 7, 8, 9]
    assert normalizer.observation_mean[one_hot].tolist() == [0] * 8
    expected = np.float32([0.5, 0.5, 0.5, *[0.4] * 5])
    assert normalizer.observation_scale[one_hot].tolist() == expected.tolist()


@pytest.mark.numeric
def test_the_cells_of_a_grid_share_their_units_and_have_no_flag():
    schema = (("grid:a", 2, 2), ("own", 1, 1))
    normalizer = Normalizer(Spec(5, 1, 9, (-1.0,), (1.0,), entity_schema=schema))
    x = np.array([[0, 5, 2, 5, 1], [4, 5, 6, 9, 3]], np.float32)
    normalizer.fit([(x, np.zeros(2))])
    assert normalizer.observation_mean.tolist() == [3, 6, 3, 6, 2]
    deviations = [5**0.5, 3**0.5]
    assert normalizer.observation_scale.tolist() == pytest.approx([*deviations, *deviations, 1])
    units = normalizer.observations(torch.from_numpy(x))
    # the cell with a first number below 0.5 is there
    assert units[0].tolist() == pytest.approx(
        [-3 / 5**0.5, -1 / 3**0.5, -1 / 5**0.5, -1 / 3**0.5, -1]
    )


@pytest.mark.parametrize(
    ("mean", "deviation", "expected"),
    [
        (0.0, 0.5, 0.5),
        (3.0, 0.0, 1.0),  # constant
        (0.0, 1e-7, 1.0),  # so small that no observation says it
        (1e6, 0.06, 1.0),  # the rounding of float32
        (1e6, 2.0, 2.0),
    ],
)
def test_a_constant_column_keeps_its_unit(mean, deviation, expected):
    assert standard_scale(np.array([mean]), np.array([deviation])).tolist() == [expected]
