"""Columns that mark other ends of episodes than `terminals` and `timeouts`."""

import h5py
import numpy as np
import pytest

from decisionllm.datasets import d4rl_files
from decisionllm.datasets.arrays import load

ROWS = np.arange(120)  # 20 episodes of 6 steps
EPISODE, STEP = ROWS // 6, ROWS % 6
END = STEP == 5
FELL = END & (EPISODE % 5 == 0)  # four of them terminate
CONTACT = np.random.default_rng(0).random(120) < 0.3


def save(path, name, column, terminals=FELL):
    rng = np.random.default_rng(0)
    columns = {
        "observations": rng.normal(size=(120, 2)),
        "actions": rng.uniform(-1, 1, (120, 1)),
        "rewards": np.ones(120),
        "terminals": terminals,
        name: column,
    }
    if path.suffix == ".npz":
        np.savez(path, **columns)
        return str(path)
    with h5py.File(path, "w") as file:
        for key, values in columns.items():
            file[key] = values
    return str(path)


OTHER_ENDS = {
    "step_type": np.select([END, np.roll(END, 1)], [2, 0], 1),
    "dones": END,
    "is_last": END.astype(np.float32),
    "any_name": END[:, None],
    "is_first": STEP == 0,
    "not_done": ~END,
    "infos/TimeLimit.truncated": END & ~FELL,
    "at_most_six": END & ~FELL,
    "episode_ids": EPISODE,
    "group": EPISODE.astype(float),
    "timesteps": STEP,
    "clock": 0.05 * STEP,
    "episode_ends": 6 * (1 + np.arange(20)),
    "offsets": 6 * np.arange(21),
    "lengths": np.full(20, 6),
}
NO_ENDS = {
    "infos/success": (STEP > 3) & (EPISODE % 3 == 0),
    "contact": CONTACT,
    "type": np.where(CONTACT, 2, 0),
    "end_effector_contact": CONTACT,
    "fell": FELL,
    "infos/goal": np.zeros((120, 2)),
    "phase": STEP // 2,
    "seconds": ROWS // 10,
    "row": ROWS,
    "constant": np.zeros(120),
    "histogram": np.array([100, 20]),
    "beat": ROWS % 7 == 0,
    "height": np.full(120, np.nan),
}


@pytest.mark.parametrize("kind", ["npz", "hdf5"])
@pytest.mark.parametrize("name", OTHER_ENDS)
def test_a_column_that_marks_other_ends_is_refused(name, kind, tmp_path):
    path = save(tmp_path / f"log.{kind}", name, OTHER_ENDS[name])
    with pytest.raises(
        ValueError, match=f"expected {name} to agree .*20 episodes with it, 5 without"
    ):
        load(path=path)
    assert len(list(load(path=path, ignore=[name]).episodes)) == 5


@pytest.mark.parametrize("name", NO_ENDS)
def test_a_column_that_is_a_feature_is_not_refused(name, tmp_path):
    path = save(tmp_path / "log.hdf5", name, NO_ENDS[name])
    assert len(list(load(path=path).episodes)) == 5


@pytest.mark.parametrize("name", OTHER_ENDS)
def test_a_column_that_agrees_with_the_ends_is_not_refused(name, tmp_path):
    path = save(tmp_path / "log.npz", name, OTHER_ENDS[name], terminals=END)
    assert len(list(load(path=path).episodes)) == 20


def test_numbers_of_episodes_that_go_on_after_an_end_are_refused(tmp_path):
    path = save(tmp_path / "log.npz", "episode_index", EPISODE // 2, terminals=END)
    with pytest.raises(ValueError, match="an end in row 5 by them alone .10 episodes with it, 20"):
        load(path=path)


def test_an_ignored_column_must_be_there(tmp_path):
    path = save(tmp_path / "log.npz", "dones", END)
    with pytest.raises(ValueError, match=r"dataset.ignore: expected names among .*, got ends"):
        load(path=path, ignore=["ends"])


def test_marks_are_read_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("decisionllm.datasets.episode_markers.ROWS", 7)
    monkeypatch.setattr(d4rl_files, "BLOCK", 14)
    for name, column in OTHER_ENDS.items():
        path = save(tmp_path / "log.npz", name, column)
        with pytest.raises(ValueError, match=f"expected {name} to agree .*20 episodes with it"):
            load(path=path)
