"""The one slicer, by hand: returns-to-go, where windows begin and end, how training draws them,
what is chosen to train on.
"""

import numpy as np
import pytest

from decisionllm.datasets import sampling, windows
from decisionllm.schema import Episode, History
from tests.conftest import episode, make_store


def history(rewards, **fields):
    """A history that brought these rewards and then saw one thing more; observations count up from
    0.
    """
    t = len(rewards)
    seen = np.arange(t + 1, dtype=np.float32)[:, None]
    return History(seen, seen[:-1] / 100, np.array(rewards, np.float32), **fields)


def togo(steps, e):
    return steps.returns_to_go[steps.first[e] : steps.end[e]].tolist()


def test_return_to_go_is_the_sum_that_follows(tmp_path):
    store = make_store(tmp_path / "s", [episode([1, 2, 3]), episode([5]), episode([0, 4])])
    steps = windows.load_steps(store)
    assert [togo(steps, e) for e in range(3)] == [[6, 5, 3], [5], [4, 4]]


def test_a_large_reward_leaves_other_episodes_as_they_are(tmp_path):
    store = make_store(tmp_path / "s", [episode([-1e17, 0, 0]), episode([1, 2, 3]), episode([5])])
    steps = windows.load_steps(store)
    assert [togo(steps, e) for e in (1, 2)] == [[6, 5, 3], [5]]
    rollout = windows.concatenate_histories([history([-1e17]), history([1, 2])], [0.0, 6.0])
    assert togo(rollout, 1) == [6, 5, 3]


def test_in_a_rollout_it_is_the_target_minus_received_rewards():
    steps = windows.concatenate_histories(
        [history([1, 2]), history([]), history([-1])], [10.0, 7.0, 0.0]
    )
    assert [togo(steps, e) for e in range(3)] == [[10, 9, 7], [7], [0, 1]]


def test_a_rollout_with_the_return_of_a_log_equals_the_log(tmp_path):
    log = windows.load_steps(
        make_store(tmp_path / "s", [episode([1, 2, 3], S=1), episode([4, 0], S=1)])
    )
    rollout = windows.concatenate_histories([history([1, 2]), history([4])], [6.0, 4.0])
    assert [togo(rollout, e) for e in range(2)] == [togo(log, e) for e in range(2)]
    assert rollout.observations.tolist() == log.observations.tolist()


def test_a_return_horizon_counts_the_next_rewards(tmp_path):
    """Truncated: what the last steps would have brought is not known, so they are left out.

    Terminated: nothing follows.
    """
    cut_off = episode([1, 2, 3, 4])
    ended = episode([1, 2, 3, 4], terminated=True, truncated=False)
    steps = windows.load_steps(
        make_store(tmp_path / "s", [cut_off, ended, episode([8])]), return_horizon=2
    )
    assert [togo(steps, e) for e in range(3)] == [[3, 5, 7], [3, 5, 7, 4], []]


def test_a_return_horizon_ends_with_an_agent_whose_team_plays_on(tmp_path):
    """Of what the team receives later, only the sum is known."""
    left = episode([1, 2, 3, 4], terminated=True, truncated=False, return_after_exit=100)
    steps = windows.load_steps(make_store(tmp_path / "s", [left]), return_horizon=2)
    assert togo(steps, 0) == [3, 5, 7]


def test_a_return_horizon_of_the_whole_episode_keeps_one_step(tmp_path):
    steps = windows.load_steps(make_store(tmp_path / "s", [episode([1, 2, 3])]), return_horizon=3)
    assert togo(steps, 0) == [6]


def test_with_a_return_horizon_the_target_stays_constant():
    steps = windows.concatenate_histories(
        [history([1, 2]), history([5])], [10.0, 7.0], return_horizon=4
    )
    assert [togo(steps, e) for e in range(2)] == [[10, 10, 10], [7, 7]]


def test_the_next_action_is_a_zero():
    steps = windows.concatenate_histories([history([1, 2]), history([1])], [0.0, 0.0])
    np.testing.assert_allclose(steps.actions[:, 0], [0, 0.01, 0, 0, 0])
    assert steps.observations[:, 0].tolist() == [0, 1, 2, 0, 1]


def test_histories_without_masks_allow_everything():
    only_second = np.array([[True, False, True]])
    steps = windows.concatenate_histories(
        [history([]), history([], action_masks=only_second)], [0.0, 0.0]
    )
    assert steps.action_masks.tolist() == [[True, True, True], [True, False, True]]
    assert windows.concatenate_histories([history([])], [0.0]).action_masks is None


def test_a_window_begins_at_its_start_and_stays_in_its_episode(tmp_path):
    """Episodes of 4 and 3 steps, whose observations are 0 1 2 3 and 10 11 12: windows of 3 steps,
    padded on the right.
    """
    store = make_store(tmp_path / "s", [episode([1, 1, 1, 1]), episode([2, 2, 2], start=10)])
    window = windows.cut_windows(
        windows.load_steps(store), np.array([0, 0, 1]), np.array([1, 3, 0]), 3
    )
    assert window.observations[..., 0].tolist() == [[1, 2, 3], [3, 0, 0], [10, 11, 12]]
    np.testing.assert_allclose(
        window.actions[..., 0] * 100, [[1, 2, 3], [3, 0, 0], [10, 11, 12]], rtol=1e-6
    )
    assert window.returns_to_go.tolist() == [[3, 2, 1], [1, 0, 0], [6, 4, 2]]
    # within the episode, not the window
    assert window.timesteps.tolist() == [[1, 2, 3], [3, 0, 0], [0, 1, 2]]
    assert window.mask.tolist() == [[True] * 3, [True, False, False], [True] * 3]


def test_padding_allows_every_action(tmp_path):
    """A masked-out row would have no log-probability at all; only what is real is masked."""
    masks = np.array([[True, False], [True, False]])
    one = Episode(
        np.zeros((2, 1), np.float32),
        np.zeros((2, 1), np.float32),
        np.ones(2, np.float32),
        action_masks=masks,
    )
    window = windows.cut_windows(
        windows.load_steps(make_store(tmp_path / "s", [one], num_actions=2)),
        np.array([0]),
        np.array([1]),
        3,
    )
    assert window.action_masks.tolist() == [[[True, False], [True, True], [True, True]]]


def test_columns_need_not_be_contiguous():
    wide = np.arange(120, dtype=np.float32).reshape(20, 6)
    rest = wide[:, 4:], wide[:, 0], np.array([0, 10]), np.array([10, 20])
    slices, copies = (
        windows.cut_windows(windows.Steps(x, *rest), np.arange(2), np.array([3, 5]), 4)
        for x in (wide[:, :3], wide[:, :3].copy())
    )
    np.testing.assert_array_equal(slices.observations, copies.observations)
    np.testing.assert_array_equal(slices.observations[1], wide[15:19, :3])
    np.testing.assert_array_equal(slices.actions[0], wide[3:7, 4:])


@pytest.mark.parametrize("T", [1, 2, 15, 90])
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_window_holds_the_steps_of_its_episode_and_zeros(T, contiguous):
    """Two episodes of 40 steps; windows leave theirs on either side, also where the log begins and
    ends. All 90 steps: longer than the log.
    """
    wide = np.arange(1, 481, dtype=np.float32).reshape(80, 6)
    masks = wide[:, :2] % 4 == 1
    parts = (wide[:, :3], wide[:, 4:], wide[:, 0])
    columns = [part.copy() if contiguous else part for part in parts]
    steps = windows.Steps(
        *columns, np.array([0, 40]), np.array([40, 80]), action_masks=masks, loss_mask=masks[:, 0]
    )
    episodes = np.array([0, 0, 1, 1, 1])
    starts = np.array([-3, 35, -1, 7, 39])
    window = windows.cut_windows(steps, episodes, starts, T)
    for row, (e, start) in enumerate(zip(episodes, starts, strict=True)):
        for t in range(T):
            at, real = 40 * e + start + t, 0 <= start + t < 40
            assert window.mask[row, t] == real and window.timesteps[row, t] == (
                start + t if real else 0
            )
            np.testing.assert_array_equal(
                window.observations[row, t], wide[at, :3] if real else np.zeros(3)
            )
            np.testing.assert_array_equal(
                window.actions[row, t], wide[at, 4:] if real else np.zeros(2)
            )
            assert window.returns_to_go[row, t] == (wide[at, 0] if real else 0)
            assert window.action_masks[row, t].tolist() == (
                masks[at].tolist() if real else [True, True]
            )
            assert window.loss_mask[row, t] == (masks[at, 0] if real else False)
    assert wide[0, 0] == 1 and wide[-1, -1] == 480  # the log is as it was


def test_a_decision_window_grows_and_then_drops_a_stride():
    now = np.arange(9)
    assert windows.window_start(now, 4, 2).tolist() == [0, 0, 0, 0, 2, 2, 4, 4, 6]
    assert windows.window_start(now, 4, 1).tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5]
    assert windows.window_start(now, 4, 4).tolist() == [0, 0, 0, 0, 4, 4, 4, 4, 8]


@pytest.mark.parametrize(("T", "stride"), [(1, 1), (5, 2), (5, 5), (20, 10)])
def test_a_decision_window_has_from_T_minus_stride_to_T_steps(T, stride):
    now = np.arange(100)
    seen = now - windows.window_start(now, T, stride) + 1
    assert (seen <= T).all() and (seen >= np.minimum(now + 1, T - stride + 1)).all()


def test_windows_are_uniform_over_steps_of_chosen_episodes(tmp_path):
    """Episodes of 3, 5 and 2 steps, of which the first and the last are chosen: five steps, 0 1 2
    and 20 21.
    """
    store = make_store(
        tmp_path / "s", [episode([0] * 3), episode([0] * 5, start=10), episode([0] * 2, start=20)]
    )
    sampler = sampling.Sampler(windows.load_steps(store), [2, 0], T=2, batch_size=4000, seed=0)
    each = sampler.cut_windows(np.arange(5))
    assert each.observations[..., 0].tolist() == [[0, 1], [1, 2], [2, 0], [20, 21], [21, 0]]
    assert each.episodes.tolist() == [0, 0, 0, 2, 2]
    first, counts = np.unique(sampler(0).observations[:, 0, 0], return_counts=True)
    assert first.tolist() == [0, 1, 2, 20, 21]
    assert (abs(counts - 800) < 100).all()  # four standard deviations


@pytest.mark.parametrize("lengths", [[1] * 10 + [90], [90] + [1] * 10, [3, 50, 1, 1, 95, 2]])
def test_each_step_is_found_in_its_episode_whatever_their_lengths(lengths, tmp_path):
    log = make_store(tmp_path, [episode([0.0] * n) for n in lengths], horizon=100)
    window = sampling.Sampler(
        windows.load_steps(log), np.arange(len(lengths)), T=1, batch_size=1, seed=0
    ).cut_windows(np.arange(sum(lengths)))
    assert window.episodes.tolist() == np.repeat(np.arange(len(lengths)), lengths).tolist()
    assert window.timesteps[:, 0].tolist() == [t for n in lengths for t in range(n)]


def test_weighted_episodes_are_drawn_more_often(tmp_path):
    store = make_store(tmp_path / "s", [episode([1, 1]), episode([0, 0, 0]), episode([2, 0])])
    weights = np.array([1.0, 0.25, 1.0])
    sampler = sampling.Sampler(
        windows.load_steps(store), [1, 2], T=1, batch_size=4000, seed=0, weights=weights
    )
    window = sampler(0)
    assert set(window.episodes) == {1, 2}
    assert (window.episodes == 1).mean() == pytest.approx(
        3 * weights[1] / (3 * weights[1] + 2), abs=0.02
    )
    for e, n in ((1, 3), (2, 2)):
        assert np.bincount(window.timesteps[window.episodes == e, 0]) / (
            window.episodes == e
        ).sum() == pytest.approx([1 / n] * n, abs=0.05)


@pytest.mark.parametrize("weights", [None, np.array([1.0, 3.0, 1.0])])
def test_early_steps_are_drawn_more_often_with_a_discount(tmp_path, weights):
    """Steps of an episode as 1 : 0.5 : 0.25; the episodes keep their share."""
    steps = windows.load_steps(
        make_store(tmp_path / "s", [episode([0] * 3), episode([0]), episode([0] * 50)])
    )
    window = sampling.Sampler(
        steps, [0, 1], T=1, batch_size=7000, seed=0, weights=weights, discount=0.5
    )(0)
    assert (window.episodes == 0).mean() == pytest.approx(
        3 / 4 if weights is None else 3 / 6, abs=0.03
    )
    drawn = np.bincount(window.timesteps[window.episodes == 0, 0])
    assert drawn / drawn.sum() == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=0.03)
    late = sampling.Sampler(steps, [2], T=1, batch_size=7000, seed=0, discount=0.9)(0).timesteps
    assert late.mean() == pytest.approx(
        np.average(np.arange(50), weights=0.9 ** np.arange(50)), rel=0.05
    )


def test_a_draw_depends_on_seed_and_step_alone(tmp_path):
    steps = windows.load_steps(make_store(tmp_path / "s", [episode([0] * 40)]))
    make = lambda seed: sampling.Sampler(steps, [0], T=2, batch_size=8, seed=seed)  # noqa: E731
    one, again = make(0), make(0)
    first = [one(step).timesteps.tolist() for step in range(3)]
    assert [again(step).timesteps.tolist() for step in (2, 1, 0)] == first[::-1]
    assert first[0] != first[1] and make(1)(0).timesteps.tolist() != first[0]


def grouped(tmp_path, groups, rewards=None):
    rewards = rewards or [1] * len(groups)
    return make_store(
        tmp_path / "s", [episode([r], group=g) for g, r in zip(groups, rewards, strict=True)]
    )


def test_the_best_are_those_at_or_above_the_quantile(tmp_path):
    store = grouped(tmp_path, range(5), [1, 9, 5, 7, 3])
    select_best = lambda quality: sampling.select(store, min_return_quantile=quality)[0].tolist()  # noqa: E731
    assert select_best(0.0) == [0, 1, 2, 3, 4]
    assert select_best(0.5) == [1, 2, 3]
    assert select_best(0.75) == [1, 3]
    assert select_best(1.0) == [1]


def test_a_split_keeps_groups_whole(tmp_path):
    store = grouped(tmp_path, [3, 1, 3, 2, 1, 4, 4, 2, 5, 6])
    for seed in range(5):
        kept, out = sampling.select(store, held_out=0.34, seed=seed)
        assert len(np.unique(store.group[out])) == 2  # of six
        assert not set(store.group[kept]) & set(store.group[out])
        assert sorted([*kept, *out]) == list(range(10))


def test_a_smaller_fraction_is_part_of_a_larger_one(tmp_path):
    store = grouped(tmp_path, range(20))
    splits = [
        sampling.select(store, fraction=fraction, held_out=0.2, seed=1)
        for fraction in (0.01, 0.25, 0.5, 1.0)
    ]
    assert [len(kept) for kept, _ in splits] == [1, 4, 8, 16]  # at least one group is kept
    for (less, out), (more, same) in zip(splits, splits[1:], strict=False):
        assert set(less) < set(more) and out.tolist() == same.tolist()
    assert (
        splits[1][0].tolist()
        != sampling.select(store, fraction=0.25, held_out=0.2, seed=2)[0].tolist()
    )


def test_the_return_quantile_is_of_the_kept_episodes(tmp_path):
    store = grouped(tmp_path, range(8), [1, 2, 3, 4, 5, 6, 7, 8])
    kept, _ = sampling.select(store, fraction=0.5, seed=0)
    best, _ = sampling.select(store, fraction=0.5, min_return_quantile=1.0, seed=0)
    assert best.tolist() == [kept.max()]


def test_shares_outside_0_to_1_are_refused(tmp_path):
    store = grouped(tmp_path, range(3))
    with pytest.raises(
        ValueError, match=r"min_return_quantile: expected a share within 0 \.\. 1, got 1.5"
    ):
        sampling.select(store, min_return_quantile=1.5)
    with pytest.raises(ValueError, match="data.held_out=1.0 leaves no group of 3 to train on"):
        sampling.select(store, held_out=1.0)


@pytest.mark.parametrize("return_horizon", [0, 2])
def test_blocks_of_any_size_give_the_same_steps(tmp_path, monkeypatch, return_horizon):
    log = make_store(tmp_path / "s", [episode(list(range(1, n + 1))) for n in (3, 1, 7, 2, 5)])
    whole = windows.load_steps(log, return_horizon=return_horizon)
    for block in (1, 4, 9):
        monkeypatch.setattr(windows, "BLOCK", block)
        steps = windows.load_steps(log, return_horizon=return_horizon)
        assert (
            steps.returns_to_go.tolist() == whole.returns_to_go.tolist()
            and steps.end.tolist() == whole.end.tolist()
        )
    parts = list(whole.blocks(np.array([2, 0, 4]), size=4))
    expected_rows = [row for e in (2, 0, 4) for row in range(whole.first[e], whole.end[e])]
    assert np.concatenate(parts).tolist() == expected_rows and {
        len(part) for part in parts[:-1]
    } == {4}


def text_sampler(tmp_path, *, texts, weights=None, discount=1.0):
    """Samples single steps of four episodes; the tasks are 1, 0, 1, 0, and an observation is ten
    times its episode and its step.
    """
    made = [episode([0.0] * n, start=10 * e, S=1) for e, n in enumerate((1, 2, 3, 4))]
    steps = windows.load_steps(make_store(tmp_path / "s", made))
    rows = 3000
    return sampling.TextSampler(
        steps,
        np.arange(4),
        task=np.array([1, 0, 1, 0]),
        rows_per_text=rows // texts,
        T=1,
        batch_size=rows,
        seed=0,
        weights=weights,
        discount=discount,
    )


def test_windows_of_a_batch_share_a_task(tmp_path):
    sampler = text_sampler(tmp_path, texts=300)
    window = sampler(0)
    task = 1 - window.episodes % 2
    assert (task == task[np.arange(3000) % 300]).all()
    seen, counts = np.unique(window.observations[:, 0, 0], return_counts=True)
    assert seen.tolist() == [0, 10, 11, 20, 21, 22, 30, 31, 32, 33]
    assert (counts > 200).all() and (counts < 400).all(), (
        "each of the ten steps has a tenth of the rows"
    )
    assert (sampler(0).observations == window.observations).all()
    assert (sampler(1).observations != window.observations).any()


def test_of_a_task_the_steps_are_drawn_by_weight_and_discount(tmp_path):
    # no row of episode 1, which shares a task with episode 3
    weights = np.array([1.0, 0.0, 1.0, 1.0])
    window = text_sampler(tmp_path, texts=3000, weights=weights, discount=0.5)(0)
    seen = window.observations[:, 0, 0]
    batch = {e: (window.episodes == e).mean() for e in range(4)}
    assert (
        batch[1] == 0
        and abs(batch[0] - 1 / 8) < 0.03
        and abs(batch[2] - 3 / 8) < 0.03
        and abs(batch[3] - 4 / 8) < 0.03
    )
    first, later = (seen == 30).sum(), (seen == 31).sum()
    assert abs(later / first - 0.5) < 0.1, "step t as often as discount^t"
