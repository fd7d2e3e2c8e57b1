"""Minari datasets through the real library: written and read back, every kind of space."""

import json
import shutil
import tracemalloc
import warnings

import h5py
import minari
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import NameNotFound
from minari.data_collector import EpisodeBuffer

from decisionllm.datasets.arrays import from_episodes
from decisionllm.datasets.categorical import as_categorical
from decisionllm.datasets.minari import load
from decisionllm.datasets.minari_export import export_store
from decisionllm.datasets.store import open_store
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.datasets.store_writer import write_store
from decisionllm.trust import trust_modules
from tests.conftest import episode, make_store, node

BOX = spaces.Box(-1, 1, (2,), np.float32)


def put(minari_id, episodes, *, observation_space=BOX, action_space=BOX, also=(), **options):
    """A local Minari dataset of (observations, actions, rewards), each episode's last step
    terminated. also: further episodes of Minari.
    """
    buffers = [
        EpisodeBuffer(
            None,
            None,
            None,
            seen,
            done,
            list(got),
            [False] * (len(got) - 1) + [True],
            [False] * len(got),
        )
        for seen, done, got in episodes
    ]
    buffers += also
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spaced = {"observation_space": observation_space, "action_space": action_space}
        return minari.create_dataset_from_buffers(
            minari_id, buffers, data_format="hdf5", **spaced, **options
        )


def rows(n, size=2, start=0.0):
    return start + np.arange(n * size, dtype=np.float32).reshape(n, size) / 100


def test_a_store_comes_back_from_minari_as_it_was(tmp_path):
    written = [
        episode([1, 2, 3], A=2, final_observation=np.array([3, 3], np.float32)),
        episode(
            [4],
            A=2,
            start=7,
            terminated=True,
            truncated=False,
            final_observation=np.array([8, 8], np.float32),
        ),
    ]
    export_store("mine/test-v0", make_store(tmp_path / "s", written))
    source = load(minari_id="mine/test-v0")
    assert source.spec.low == (-1, -1) and source.spec.high == (1, 1) and source.spec.horizon == 3
    assert source.info["name"] == "mine/test-v0"
    read = list(source.episodes)
    for before, after in zip(written, read, strict=True):
        for name in (
            "observations",
            "actions",
            "rewards",
            "final_observation",
            "terminated",
            "truncated",
        ):
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name), err_msg=name)
    assert [e.group for e in read] == [0, 1]


def test_discrete_actions_come_back_from_minari(tmp_path):
    store = prepare_store(node("dataset", "synthetic-discrete", episodes=4), tmp_path)
    dataset = export_store("mine/discrete-v0", store)
    assert all(action in dataset.action_space for action in dataset[0].actions)
    back = write_store(tmp_path / "back", load(minari_id="mine/discrete-v0"))
    assert back.spec.num_actions == 5 and back.actions.tolist() == store.actions.tolist()
    assert (
        back.terminated.tolist() == store.terminated.tolist()
        and back.offsets.tolist() == store.offsets.tolist()
    )


def test_what_is_written_is_what_minaris_users_read(tmp_path):
    store = make_store(tmp_path / "s", [episode([1, 2]), episode([5], start=9)])
    export_store("mine/test-v0", store, reference=(1.0, 5.0))
    dataset = minari.load_dataset("mine/test-v0")
    assert (dataset.total_episodes, dataset.total_steps) == (2, 3)
    assert dataset[0].observations.tolist() == [[0, 0], [1, 1], [1, 1]], (
        "no observation after the end: the last is repeated"
    )
    assert dataset[0].rewards.tolist() == [1, 2] and dataset[0].truncations.tolist() == [
        False,
        True,
    ]
    assert minari.get_normalized_score(dataset, np.array([1.0, 3.0, 5.0])).tolist() == [0, 0.5, 1]
    assert store.fingerprint in dataset.storage.metadata["description"]
    info = load(minari_id="mine/test-v0").info
    assert (info["ref_min_score"], info["ref_max_score"]) == (1, 5)


def test_an_export_needs_a_free_id_with_a_version(tmp_path):
    store = make_store(tmp_path / "s", [episode([1, 2])])
    for bad in ("mine/test", "no spaces-v0", ""):
        with pytest.raises(ValueError, match="export=minari: expected an id with a version"):
            export_store(bad, store)
    with pytest.raises(NameNotFound):
        export_store("mine/test-v0", store, env="NoSuchEnv-v0")
    export_store("mine/test-v0", store)
    with pytest.raises(
        FileExistsError, match="mine/test-v0: such a Minari dataset is there already"
    ):
        export_store("mine/test-v0", store)
    assert len(list(load(minari_id="mine/test-v0").episodes)) == 1


def test_a_dict_is_laid_out_key_by_key_and_a_discrete_is_one_hot():
    inner = spaces.Dict(one=spaces.Box(-9, 9, (1, 2), np.float32), two=spaces.Discrete(3, start=4))
    space = spaces.Dict(a=spaces.Box(-9, 9, (1,), np.float32), b=inner)
    seen = {
        "a": np.array([[1.0], [2.0]]),
        "b": {"one": np.array([[[3.0, 4.0]], [[5.0, 6.0]]]), "two": np.array([6, 4])},
    }
    put("mine/dict-v0", [(seen, rows(1), [0])], observation_space=space)
    (only,) = load(minari_id="mine/dict-v0").episodes
    assert only.observations.tolist() == [
        [1, 3, 4, 0, 0, 1]
    ] and only.final_observation.tolist() == [2, 5, 6, 1, 0, 0]


def test_discrete_spaces_are_counted_from_their_start():
    put(
        "mine/discrete-v0",
        [(np.array([2, 3, 2]), np.array([5, 7]), [0, 0])],
        observation_space=spaces.Discrete(2, start=2),
        action_space=spaces.Discrete(3, start=5),
    )
    source = load(minari_id="mine/discrete-v0")
    assert source.spec.num_actions == 3 and source.spec.observation_dim == 2
    (only,) = source.episodes
    assert only.observations.tolist() == [[1, 0], [0, 1]] and only.actions.tolist() == [[0], [2]]


@pytest.mark.parametrize("value", [1, 4, 2.5])
def test_a_value_that_a_discrete_observation_cannot_have_is_refused(value):
    space = spaces.Dict(mode=spaces.Discrete(2, start=2))
    good, bad = ({"mode": np.array([2, 3, last])} for last in (2, value))
    put("mine/mode-v0", [(good, rows(2), [0, 0]), (bad, rows(2), [0, 0])], observation_space=space)
    message = rf"mine/mode-v0, episode 1: expected a value of Discrete\(2, start=2\), got {value} in row 2"
    with pytest.raises(ValueError, match=message):
        load(minari_id="mine/mode-v0")


def test_a_multi_discrete_action_is_an_index():
    space = spaces.MultiDiscrete([3, 2], start=[1, 5])
    put("mine/buttons-v0", [(rows(3), np.array([[1, 6], [3, 5]]), [0, 0])], action_space=space)
    source = load(minari_id="mine/buttons-v0")
    assert source.spec.num_actions == 6 and source.info["action_parts"] == [3, 2]
    (only,) = source.episodes
    assert only.actions.tolist() == [[1], [4]]
    assert np.transpose(np.unravel_index([1, 4], [3, 2])).tolist() == [[0, 1], [2, 0]]


def test_an_action_without_bounds_takes_those_of_the_data(tmp_path):
    space = spaces.Box(np.array([-np.inf, -3], np.float32), np.array([np.inf, 3], np.float32))
    put(
        "mine/free-v0",
        [(rows(2), np.array([[-7.0, 1]]), [0]), (rows(2), np.array([[5.0, 2]]), [0])],
        action_space=space,
    )
    source = load(minari_id="mine/free-v0")
    assert (source.spec.low, source.spec.high) == ((-7, -3), (5, 3))
    write_store(tmp_path / "s", source)


def test_a_number_of_an_action_may_have_one_value(tmp_path):
    """Both one that never changes, without bounds, and one whose bounds are equal."""
    low, high = np.array([[-1, 2, -np.inf], [1, 2, np.inf]], np.float32)
    taken = np.array([[-0.5, 2, 3], [0.5, 2, 3]])
    put("mine/still-v0", [(rows(3), taken, [0, 0])], action_space=spaces.Box(low, high))
    store = write_store(tmp_path / "s", load(minari_id="mine/still-v0"))
    assert store.spec.low == pytest.approx((-1, 1.998, 2.997))
    assert store.spec.high == pytest.approx((1, 2.002, 3.003))
    assert store.info["faults"][0].startswith("action [1, 2]: the same number at every step")


def test_actions_beyond_the_box_are_clipped_or_have_wider_bounds(tmp_path):
    taken = np.array([[-1.5, 0.5], [0.5, 1.0]])
    put("mine/loose-v0", [(rows(3), taken, [0, 0])])
    with pytest.raises(ValueError, match="got .-1.5, 0.5.; clip them .dataset.clip=true"):
        write_store(tmp_path / "s", load(minari_id="mine/loose-v0"))
    clipped = write_store(tmp_path / "s", load(minari_id="mine/loose-v0", clip=True))
    assert clipped.actions.tolist() == [[-1, 0.5], [0.5, 1]]
    assert (clipped.spec.low, clipped.spec.high) == ((-1, -1), (1, 1))
    wide = write_store(tmp_path / "s", load(minari_id="mine/loose-v0", low=[-2, -2], high=[2, 1]))
    assert wide.actions.tolist() == taken.tolist()
    assert (wide.spec.low, wide.spec.high) == ((-2, -2), (2, 1))


def test_discrete_actions_have_no_bounds():
    put("mine/mode-v0", [(rows(3), np.array([0, 1]), [0, 0])], action_space=spaces.Discrete(2))
    with pytest.raises(ValueError, match="expected none of low, high and clip with discrete"):
        load(minari_id="mine/mode-v0", clip=True)


def test_an_episode_that_goes_on_after_its_end_is_a_fault():
    ended = np.array([False, True, False])
    on = EpisodeBuffer(None, None, None, rows(4), rows(3), np.ones(3), ended, ended[::-1])
    put("mine/on-v0", [(rows(4), rows(3), [0, 0, 1])], also=[on])
    (fault,) = load(minari_id="mine/on-v0").info["faults"]
    assert fault.startswith("1 episodes, the first is 1, go on after a step that ended them")


def test_a_missing_action_is_no_bound_of_the_data():
    taken = np.array([[5.0, 1], [np.nan, np.nan], [7, 2]])
    free = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    put("mine/some-v0", [(rows(4), taken, [0, 0, 0])], action_space=free)
    spec = load(minari_id="mine/some-v0").spec
    assert (spec.low, spec.high) == ((5, 1), (7, 2))


def test_actions_of_any_shape_are_rows_of_numbers():
    space = spaces.Box(-1, 1, (2, 2), np.float32)
    put("mine/square-v0", [(rows(2), rows(1, 4).reshape(1, 2, 2), [0])], action_space=space)
    source = load(minari_id="mine/square-v0")
    assert (
        source.spec.action_dim == 4
        and next(source.episodes).actions.tolist() == rows(1, 4).tolist()
    )


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"action_space": spaces.MultiBinary(2)},
            "action space: expected a Box, a Discrete or a MultiDiscrete, got MultiBinary",
        ),
        (
            {"action_space": spaces.Dict(a=BOX)},
            "action space: expected a Box, a Discrete or a MultiDiscrete, got Dict",
        ),
    ],
)
def test_spaces_that_do_not_fit_are_refused(options, message):
    done = (
        {"a": rows(1)}
        if isinstance(options.get("action_space"), spaces.Dict)
        else np.array([[1, 1]])
    )
    put("mine/other-v0", [(rows(2), done, [0])], **options)
    with pytest.raises(ValueError, match=message):
        load(minari_id="mine/other-v0")


def test_a_tuple_and_its_discrete_parts_have_the_layout_of_environments():
    space = spaces.Tuple([BOX, spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(1)])
    seen = (rows(2), np.array([[1, 0], [0, 2]]), np.array([[1], [0]], np.int8))
    put("mine/tuple-v0", [(seen, rows(1), [0])], observation_space=space)
    made = load(minari_id="mine/tuple-v0")
    assert made.info["observation_parts"] == [["0", 2], ["1", 5], ["2", 1]]
    (first,) = made.episodes
    assert first.observations[0, 2:].tolist() == [0, 1, 1, 0, 0, 1]
    assert first.final_observation[2:].tolist() == [1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    "limit, options, horizon", [(300, {}, 300), (2, {}, 3), (None, {}, 3), (300, {"horizon": 9}, 9)]
)
def test_the_horizon_is_the_longest_episode_or_evaluation(limit, options, horizon):
    entry = "gymnasium.envs.classic_control.pendulum:PendulumEnv"
    spec = EnvSpec("Pendulum-v1", entry, max_episode_steps=limit)
    put("mine/limit-v0", [(rows(4), rows(3), [0, 0, 1])], eval_env=spec)
    assert load(minari_id="mine/limit-v0", **options).spec.horizon == horizon


def test_a_constant_text_is_the_id_and_the_description(tmp_path):
    store = make_store(tmp_path / "s", [episode([1])])
    export_store("mine/test-v0", store)
    expected = f"mine/test-v0. test, written by decisionllm, fingerprint {store.fingerprint}"
    assert next(load(minari_id="mine/test-v0", text="constant").episodes).task == expected
    assert next(load(minari_id="mine/test-v0").episodes).task == ""


def test_a_task_takes_the_place_of_the_description(tmp_path):
    export_store("mine/test-v0", make_store(tmp_path / "s", [episode([1])]))
    assert (
        next(load(minari_id="mine/test-v0", text="constant", task="Run.").episodes).task == "Run."
    )
    without = load(minari_id="mine/test-v0", task="Run.").info
    assert without["faults"] == ["the task text 'Run.' is not read, since text=none"]


def test_a_template_names_the_numbers_of_the_first_observation():
    space = spaces.Dict(
        pos=spaces.Box(-9, 9, (1,), np.float32),
        arm=spaces.Dict(goal=spaces.Box(-9, 9, (3,), np.float64)),
    )
    seen = [
        {"pos": np.array([[p], [9]]), "arm": {"goal": np.array([goal, [9, 9, 9]])}}
        for p, goal in ((2, [1.25, -0.5, 3]), (-0.001, [0.333, 1.999, -7.1]))
    ]
    put("mine/go-v0", [(one, rows(1), [0]) for one in seen], observation_space=space)
    source = load(minari_id="mine/go-v0", text="template", task="From {pos} to {arm.goal}.")
    assert [each.task for each in source.episodes] == [
        "From 2 to 1.25, -0.5, 3.",
        "From 0 to 0.33, 2, -7.1.",
    ]
    with pytest.raises(
        ValueError,
        match=r"dataset.task: expected names of parts of the observation, .arm.goal, pos., got goal",
    ):
        load(minari_id="mine/go-v0", text="template", task="To {goal}.")
    with pytest.raises(ValueError, match="dataset.task: text=template needs a text, got none"):
        load(minari_id="mine/go-v0", text="template")


def test_a_template_of_a_vector_has_no_parts_but_the_whole(tmp_path):
    export_store("mine/test-v0", make_store(tmp_path / "s", [episode([1], start=4)]))
    with pytest.raises(
        ValueError, match="got desired_goal; the observation is one vector without named parts"
    ):
        load(minari_id="mine/test-v0", text="template", task="Go to {desired_goal}.")
    source = load(minari_id="mine/test-v0", text="template", task="At {observation}.")
    assert next(source.episodes).task == "At 4, 4."


def test_a_dataset_in_any_folder_is_read_again_when_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = export_store(
        "mine/test-v0", make_store(tmp_path / "s", [episode([1])])
    ).storage.data_path.parent
    shutil.move(place, tmp_path / "elsewhere")
    dataset = node("dataset", "minari", minari_id="elsewhere")
    one = prepare_store(dataset, tmp_path / "home")
    assert prepare_store(dataset, tmp_path / "home").path == one.path
    export_store("mine/test-v0", make_store(tmp_path / "s", [episode([2, 3])]))
    shutil.rmtree(tmp_path / "elsewhere")
    shutil.move(place, tmp_path / "elsewhere")
    assert prepare_store(dataset, tmp_path / "home").rewards.tolist() == [2, 3]
    assert open_store(one.path).rewards.tolist() == [1]


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match="mine/none-v0: no such Minari dataset in .*minari download mine/none-v0",
    ):
        load(minari_id="mine/none-v0")
    with pytest.raises(
        ValueError,
        match="dataset.text: expected one of auto, none, constant, template, episode, got 'goal'",
    ):
        load(minari_id="mine/none-v0", text="goal")
    with pytest.raises(ValueError, match="dataset.goal: expected one of fixed, own"):
        load(minari_id="mine/none-v0", goal="fix")
    with pytest.raises(ValueError, match="give a value to minari_id"):
        prepare_store(node("dataset", "minari"), tmp_path)
    put("mine/empty-v0", [])
    with pytest.raises(ValueError, match="mine/empty-v0: expected at least one episode"):
        load(minari_id="mine/empty-v0")
    put("mine/nan-v0", [(rows(2), rows(1), [0]), (rows(3), rows(2), [0, np.nan])])
    with pytest.raises(
        ValueError,
        match=r"mine/nan-v0, episode 1: Episode.rewards: expected finite numbers, got nan at \[1\]",
    ):
        load(minari_id="mine/nan-v0")


def test_a_damaged_dataset_is_refused(tmp_path):
    data = export_store(
        "mine/test-v0", make_store(tmp_path / "s", [episode([1, 2])])
    ).storage.data_path
    numbers = (data / "main_data.hdf5").read_bytes()
    card = (data / "metadata.json").read_text(encoding="utf-8")
    facts = json.loads(card)
    for name, damage in (
        ("main_data.hdf5", numbers[: len(numbers) // 2]),
        ("metadata.json", card[:-9].encode()),
        (
            "metadata.json",
            json.dumps({k: v for k, v in facts.items() if k != "dataset_id"}).encode(),
        ),
        ("metadata.json", json.dumps(facts | {"minari_version": "0.1.0"}).encode()),
        ("metadata.json", json.dumps(facts | {"total_episodes": 2}).encode()),
    ):
        (data / name).write_bytes(damage)
        with pytest.raises(ValueError, match="mine/test-v0: not a readable Minari dataset"):
            load(minari_id="mine/test-v0")
        (data / "main_data.hdf5").write_bytes(numbers)
        (data / "metadata.json").write_text(card, encoding="utf-8")
    load(minari_id="mine/test-v0")
    (data / "metadata.json").unlink()
    with pytest.raises(ValueError, match="not a readable Minari dataset"):
        load(minari_id="mine/test-v0")


def test_a_dataset_is_not_held_as_a_whole(tmp_path):
    many = [episode([1.0] * 100, S=100) for _ in range(25)]  # 1 MB, 40 kB each
    export_store("mine/long-v0", make_store(tmp_path / "s", many, horizon=100))
    source = load(minari_id="mine/long-v0")
    tracemalloc.start()
    assert sum(len(e.rewards) for e in source.episodes) == 2500
    assert tracemalloc.get_traced_memory()[1] < 5e5  # bytes
    tracemalloc.stop()


def test_an_episode_that_is_missing_is_named(tmp_path):
    data = export_store(
        "mine/test-v0", make_store(tmp_path / "s", [episode([1, 2]), episode([3])])
    ).storage.data_path
    with h5py.File(data / "main_data.hdf5", "a") as file:
        del file["episode_1"]
    with pytest.raises(ValueError, match="mine/test-v0: not a readable Minari dataset .*episode_1"):
        load(minari_id="mine/test-v0")


def test_numbers_that_float32_rounds_visibly_are_a_fault(tmp_path):
    space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    times = 1.7e9 + 30.0 * np.arange(4)
    put("mine/clock-v0", [(times[:, None], rows(3), np.ones(3))], observation_space=space)
    faults = prepare_store(node("dataset", "minari", minari_id="mine/clock-v0"), tmp_path).info[
        "faults"
    ]
    assert any("rounded by up to" in fault for fault in faults)


def told(texts, **infos):
    """An episode of three steps with these texts, of the reset and of each step, in its infos."""
    flags = [False] * 3
    infos |= {"goal": {"text": texts}}
    return EpisodeBuffer(
        None, None, None, rows(4), rows(3), [0.0] * 3, flags, [*flags[1:], True], infos
    )


def test_task_from_reads_the_texts_of_recorded_infos():
    put("mine/told-v0", [], also=[told(["Go left."] * 4), told(["Fahre nach Köln."] * 4)])
    source = load(minari_id="mine/told-v0", task_from="info.goal.text")
    assert [each.task for each in source.episodes] == ["Go left.", "Fahre nach Köln."]
    assert source.info["text"] == "episode" and "unread" not in source.info
    assert load(minari_id="mine/told-v0").info["unread"] == ["info.goal.text"]
    silent = load(minari_id="mine/told-v0", task_from="info.goal.text", text="none")
    assert {each.task for each in silent.episodes} == {""} and silent.info["text"] == "none"


def test_recorded_texts_that_cannot_be_read_are_refused():
    put("mine/told-v0", [], also=[told(["Go left.", "Go left.", "Go right.", "Go right."])])
    for option, message in {
        "info.goal.text": "episode 0: dataset.task_from: expected one text for each episode as info.goal",
        "info.task": "episode 0: dataset.task_from: expected info.task, got info.goal.text; name one",
        "goal": "dataset.task_from: expected info.KEY",
    }.items():
        with pytest.raises(ValueError, match=message):
            list(load(minari_id="mine/told-v0", task_from=option).episodes)
    with pytest.raises(
        ValueError, match="dataset.text: expected dataset.task_from with text=episode"
    ):
        load(minari_id="mine/told-v0", text="episode")


def test_a_text_of_the_observations_is_the_task_and_comes_back_from_an_export():
    space = spaces.Dict(mission=spaces.Text(50), place=BOX)
    made = []
    for task in ("Go left.", "Fahre nach Köln."):
        made.append(({"mission": [task] * 4, "place": rows(4)}, rows(3), [0, 0, 1]))
    put("mine/spoken-v0", made, observation_space=space)
    for options in ({"text": "episode"}, {"task_from": "observation.mission"}):
        source = load(minari_id="mine/spoken-v0", **options)
        assert [each.task for each in source.episodes] == ["Go left.", "Fahre nach Köln."]
        assert source.info["text"] == "episode" and "unread" not in source.info
        assert source.info["observation_parts"] == [["place", 2]]
    assert load(minari_id="mine/spoken-v0").info["unread"] == ["observation.mission"]
    template = load(minari_id="mine/spoken-v0", text="template", task="{mission} ({place})")
    assert next(template.episodes).task == "Go left. (0, 0.01)"


def test_texts_of_the_observations_that_cannot_be_read_are_refused():
    space = spaces.Dict(mission=spaces.Text(50), remark=spaces.Text(50), place=BOX)
    seen = {"mission": ["Go.", "Go.", "Stop.", "Go."], "remark": ["x"] * 4, "place": rows(4)}
    put("mine/spoken-v0", [(seen, rows(3), [0, 0, 1])], observation_space=space)
    for options, message in (
        ({"text": "episode"}, "it is one of observation.mission, observation.remark, where"),
        ({"task_from": "observation.mission"}, "got 'Go.' and, after step 2, 'Stop.'; end the epi"),
    ):
        with pytest.raises(ValueError, match=message):
            list(load(minari_id="mine/spoken-v0", **options).episodes)


def test_an_export_into_a_space_with_a_text_has_the_tasks(tmp_path):
    episodes = [episode([1, 2], task=task, group=i) for i, task in enumerate(["Go.", "Köln"])]
    path = from_episodes(episodes, tmp_path / "store", name="mine")["path"]
    space = spaces.Dict(mission=spaces.Text(50), place=spaces.Box(-9, 9, (2,), np.float32))
    export_store("mine/written-v0", open_store(path), observation_space=space)
    source = load(minari_id="mine/written-v0", text="episode")
    assert [each.task for each in source.episodes] == ["Go.", "Köln"]


def put_cells(cells, minari_id="mine/cells-v0"):
    """A dataset of one episode of three steps whose observations are a grid of these cells (4, 2)
    and a place.
    """
    grid = spaces.Box(0, 255, (1, 1, 2), np.uint8)
    space = spaces.Dict(grid=grid, place=BOX)
    seen = {"grid": np.uint8(cells).reshape(4, 1, 1, 2), "place": rows(4)}
    put(minari_id, [(seen, rows(3), [0, 0, 1])], observation_space=space)
    return space


CELLS = [[0, 1], [2, 0], [1, 1], [0, 0]]


def test_declared_parts_are_one_hot_and_marked(tmp_path):
    put_cells(CELLS)
    source = load(minari_id="mine/cells-v0", categorical={"grid": [3, 2]})
    (read,) = source.episodes
    assert read.observations[:, :5].tolist() == [[1, 0, 0, 0, 1], [0, 0, 1, 1, 0], [0, 1, 0, 0, 1]]
    assert read.final_observation[:5].tolist() == [1, 0, 0, 1, 0]
    assert source.spec.categorical == ((0, 3), (3, 2)) and source.spec.observation_dim == 7
    assert source.spec.entity_schema == (("grid:grid", 5, 1), ("own", 2, 1))
    assert source.info["categorical"] == {"grid": [3, 2]}
    plain = load(minari_id="mine/cells-v0")
    assert plain.spec.categorical == plain.spec.entity_schema == ()
    assert "categorical" not in plain.info
    options = {"minari_id": "mine/cells-v0", "categorical": {"grid": [3, 2]}}
    store = prepare_store(node("dataset", "minari", **options), tmp_path)
    assert store.spec == source.spec and store.info["categorical"] == {"grid": [3, 2]}


def test_a_declaration_unlike_the_data_is_refused():
    put_cells(CELLS)
    with pytest.raises(
        ValueError, match=r"cells-v0, episode 0: expected a value below 2 in grid\[0, 0, 0\], got 2"
    ):
        load(minari_id="mine/cells-v0", categorical={"grid": 2})
    with pytest.raises(ValueError, match="dataset.categorical.grid: expected bounds with at most"):
        load(minari_id="mine/cells-v0", categorical=["grid"])


def test_declared_parts_are_written_as_the_box_that_they_were(tmp_path):
    space = put_cells(CELLS)
    options = {"minari_id": "mine/cells-v0", "categorical": {"grid": [3, 2]}}
    store = prepare_store(node("dataset", "minari", **options), tmp_path)
    declared = as_categorical(space, options["categorical"])
    written = export_store("mine/again-v0", store, observation_space=declared)
    assert written.observation_space == space
    grid = written[0].observations["grid"]
    assert grid.dtype == np.uint8 and grid.reshape(4, 2).tolist() == CELLS
    again = prepare_store(
        node("dataset", "minari", **options | {"minari_id": written.id}), tmp_path
    )
    assert again.fingerprint == store.fingerprint


def test_a_text_of_the_observations_that_changes_is_refused():
    space = spaces.Dict(mission=spaces.Text(50), place=BOX)
    made = [({"mission": ["a", "a", "b", "b"], "place": rows(4)}, rows(3), [0, 0, 1])]
    put("mine/changes-v0", made, observation_space=space)
    with pytest.raises(ValueError, match="one text for each episode as observation.mission, got"):
        load(minari_id="mine/changes-v0", text="episode")


def test_a_remote_dataset_is_read_where_it_is_or_its_download_is_named():
    put("D4RL/mine/log-v0", [(rows(3), rows(2), np.ones(2))])
    source = load(minari_id="hf://farama-minari/D4RL/mine/log-v0")
    assert source.info["name"] == "D4RL/mine/log-v0" and len(list(source.episodes)) == 1
    remote = "hf://farama-minari/D4RL/mine/other-v0"
    with pytest.raises(FileNotFoundError, match="only what the command itself names is downloaded"):
        load(minari_id=remote)
    for typed in (remote, "ftp://me/log-v0"):
        with trust_modules(typed=[typed]), pytest.raises(FileNotFoundError) as error:
            load(minari_id=typed)
        assert f"{typed} could not be downloaded (" in str(error.value)
        assert f"run `minari download {typed}`, and copy the folder to" in str(error.value)
