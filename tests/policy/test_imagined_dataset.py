"""A run with a value plans to it, keeps it in its checkpoint, and imagines a dataset."""

import numpy as np
import pytest
import torch

import decisionllm
from decisionllm.commands.data import card
from decisionllm.datasets.store import open_store
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.datasets.store_writer import write_store
from decisionllm.policy.imagined_dataset import support_faults, task_texts
from decisionllm.protocols import Source
from decisionllm.schema import History, Spec
from decisionllm.worlds.maze2d.dataset import goal_facts
from tests.conftest import LOOP, NANO, command, episode, make_policy, node

pytestmark = pytest.mark.slow

CORRUPT = ("transform=corrupted", "transform.column=observations", "transform.share=1")
SHORT = (
    *LOOP,
    *NANO,
    *CORRUPT,
    "planner=value",
    "planner.discount=0.9",
    "planner.steps=24",
    "planner.horizon=3",
)


def small_batches(patch):
    for module in ("dynamics", "value_planner"):
        patch.setattr(f"decisionllm.models.{module}.BATCH", 64)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("imagined")
    with pytest.MonkeyPatch.context() as patch:
        small_batches(patch)
        assert command("train", *SHORT, f"run={path}/run", f"cache_dir={path}/data") == 0
    return path / "run"


def test_a_value_is_restored_and_planned_to(run):
    policy, other = (decisionllm.load(run) for _ in range(2))
    imagined = policy.model.planner
    places = np.array([[0.5, 0.5], [-1, 2]], np.float32)
    assert imagined.dynamics.change_scale.abs().max() < 1, "as fitted"
    assert imagined.values[1].frequencies.max() > 1, "as fitted"
    values = torch.full((2, 9), 0.1)
    # the last candidate is best in the first episode; none is known in the second
    values[0, 8], values[1] = 0.2, -1.0
    for each, plan in (
        (policy, lambda observations, steps: values),
        (other, lambda observations, steps: 0 * values - 1),
    ):
        each.model.planner.plan = plan
    acted, own = (each.begin(["", ""], 5).act(places) for each in (policy, other))
    np.testing.assert_allclose(acted[0], [1, 1], atol=1e-6)
    np.testing.assert_allclose(acted[1], own[1])
    assert np.abs(own[0] - acted[0]).max() > 1e-3


def test_below_planning_value_the_policy_acts_itself(run):
    values = torch.full((2, 9), 0.1)
    values[0, 8] = 0.2
    planned, own = (decisionllm.load(run, planning_value=value) for value in (0.15, 0.25))
    for policy in (planned, own):
        policy.model.planner.plan = lambda observations, steps: values
    places = np.array([[0.5, 0.5], [-1, 2]], np.float32)
    acted, plain = (policy.begin(["", ""], 5).act(places) for policy in (planned, own))
    np.testing.assert_allclose(acted[0], [1, 1], atol=1e-6)
    np.testing.assert_allclose(acted[1], plain[1])
    assert np.abs(plain[0] - acted[0]).max() > 1e-3


@pytest.mark.parametrize("allowed", range(4))
def test_a_plan_takes_allowed_actions_only(allowed):
    """In a session and from a history; the policy's own action and the best plan may be
    other ones.
    """
    moves = Spec(observation_dim=1, action_dim=1, horizon=50, num_actions=4)
    policy = make_policy(
        moves,
        head="discrete",
        planner=node("planner", "value", discount=0.9),
        planning_horizon=3,
    )
    masks = np.arange(4)[None] == allowed
    values = torch.full((1, 4), 0.1)
    values[0, (allowed + 1) % 4] = 0.5
    policy.model.planner.plan = lambda states, steps: values
    session = policy.begin([""], 10)
    session.observe(np.zeros((1, 1), np.float32), action_masks=masks)
    assert session.decide() == allowed
    begun = History(np.zeros((1, 1)), np.zeros((0, 1)), np.zeros(0), action_masks=masks)
    assert policy.act([begun]) == allowed


def test_a_plan_needs_a_value_and_few_dimensions():
    with pytest.raises(
        ValueError, match="act.planning_horizon: needs a model trained with planner=value"
    ):
        make_policy(
            Spec(observation_dim=3, action_dim=1, horizon=15, low=(-1.0,), high=(1.0,)),
            planning_horizon=3,
        )
    wide = Spec(observation_dim=3, action_dim=3, horizon=15, low=(-1.0,) * 3, high=(1.0,) * 3)
    with pytest.raises(
        ValueError, match="at most two action dimensions, or discrete actions, got 3"
    ):
        make_policy(wide, planning_horizon=3, planner=node("planner", "value", discount=0.9))


def test_one_value_for_many_texts(monkeypatch, tmp_path):
    small_batches(monkeypatch)
    words = (
        "text=goal",
        "planner.reads_text=true",
        f"run={tmp_path}/run",
        f"cache_dir={tmp_path}/data",
    )
    assert command("train", *SHORT, *words) == 0
    policy = decisionllm.load(tmp_path / "run")
    store = open_store(next((tmp_path / "data" / "stores").glob("corruptions-*")))
    known = policy.model.planner.known
    assert known.any(1).sum() == len(store.tasks) > 1
    torch.testing.assert_close(
        policy.model.planner.states(torch.zeros(1, 2), [store.tasks[1]])[:, 2:], known[1:2]
    )
    assert policy.begin(list(store.tasks[:2]), 5).act(np.zeros((2, 2), np.float32)).shape == (2, 2)
    dataset = node(
        "dataset", "imagined", run=str(tmp_path / "run"), episodes=6, steps=3, text="goal"
    )
    imagined = prepare_store(dataset, tmp_path)
    assert len(imagined.tasks) > 1 and imagined.info["text"] == "goal"
    with pytest.raises(
        ValueError,
        match=(
            "dataset.text=none: .*run reads text=goal, and so must what imitates it; give text=goal"
        ),
    ):
        prepare_store(dataset | {"text": "none"}, tmp_path)
    with pytest.raises(
        ValueError, match="expected a task text that the value was fitted to, got 'Fly.'"
    ):
        policy.begin(["Fly."], 5).act(np.zeros((1, 2), np.float32))


def test_the_task_of_a_row_is_that_of_its_episode(tmp_path):
    made = [episode([1.0] * 3, task="a"), episode([1.0], task="b"), episode([1.0] * 2, task="a")]
    spec = Spec(observation_dim=2, action_dim=1, horizon=3, low=(-1.0,), high=(1.0,))
    store = write_store(tmp_path / "store", Source(spec, made, {"name": "x"}))
    assert task_texts(store, np.array([5, 3, 0, 2, 4])) == ["a", "b", "a", "a", "a"]


def test_what_a_run_imagines_is_worded_in_every_frame_of_its_goals(monkeypatch, tmp_path):
    small_batches(monkeypatch)
    maze = ("dataset=maze2d-umaze", "dataset.steps=2000", "text=goal", "planner.reads_text=true")
    loop = [word for word in SHORT if not word.startswith("dataset") and word not in CORRUPT]
    assert command("train", *loop, *maze, f"run={tmp_path}/run", f"cache_dir={tmp_path}/data") == 0
    dataset = node("dataset", "imagined", run=str(tmp_path / "run"), episodes=40, steps=3)
    named, worded = (
        prepare_store(dataset | {"text": text}, tmp_path / "data")
        for text in ("goal", "paraphrased")
    )
    assert (
        named.path == worded.path
        and named.tasks == worded.tasks
        and named.fingerprint == worded.fingerprint
    )
    assert named.info["text"] == "goal" and "wordings" not in named.info
    log = open_store(next((tmp_path / "data" / "stores").glob("maze2d-*")))
    own = []
    for e in range(len(named.lengths)):
        begun = named.episode(e).observations[0]
        own += task_texts(log, np.flatnonzero((log.observations == begun).all(1))[:1])
    drawn = [named.tasks[task] for task in named.task]
    assert own != drawn, "an episode has the task of another row than it begins at"
    known = goal_facts("umaze")
    assert (
        worded.info["wordings"] == {task: known[task] for task in named.tasks}
        and worded.info["text"] == "paraphrased"
    )
    for text in ("none", "shuffled"):
        with pytest.raises(
            ValueError, match="run reads text=goal, .*; give text=goal or text=paraphrased"
        ):
            prepare_store(dataset | {"text": text}, tmp_path / "data")


def test_an_interrupted_run_does_not_fit_its_value_again(run, monkeypatch):
    before = decisionllm.load(run).model.planner.state_dict()
    monkeypatch.setattr("decisionllm.runs.start.fit_planner", None)
    assert command("train", *SHORT, f"run={run}", f"cache_dir={run.parent}/data") == 0
    after = decisionllm.load(run).model.planner.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_imagines_a_dataset(run, tmp_path):
    imagined = node("dataset", "imagined", run=str(run), episodes=6, steps=4)
    store = prepare_store(imagined, tmp_path)
    policy = decisionllm.load(run)
    data = open_store(next((run.parent / "data" / "stores").glob("corruptions-*")))
    assert len(store.lengths) <= 6 and store.lengths.max() <= 4 and store.spec == data.spec
    first = store.episode(int(store.lengths.argmax()))
    assert (data.observations == first.observations[0]).all(1).any(), (
        "it begins at an observation of the data"
    )
    np.testing.assert_allclose(
        policy.begin([""], 5).act(first.observations[:1]), first.actions[:1], atol=1e-5
    )
    units, model = policy.model.normalizer, policy.model.planner
    seen, taken = (torch.tensor(x[:1].tolist()) for x in (first.observations, first.actions))
    after, paid, _, agreed = model.advance(units.observations(seen), units.actions(taken))
    np.testing.assert_allclose(units.raw_observations(after), first.observations[1:2], atol=1e-4)
    assert first.rewards[0] == pytest.approx(paid.item(), abs=1e-4)
    assert agreed.item(), "the members agree about every step of an episode"
    assert store.info["outside_support"] == pytest.approx(
        1 - len(store.rewards) / (6 * 4), abs=1e-4
    )
    assert any("outside_support=" in line for line in card(store))
    shaken = prepare_store(imagined | {"noise": 0.5}, tmp_path)
    assert shaken.actions[0].tolist() == store.actions[0].tolist()
    assert not np.array_equal(shaken.observations, store.observations)


def test_a_run_without_texts_imagines_none(run, tmp_path):
    with pytest.raises(
        ValueError,
        match=(
            "dataset.text=goal: .*run reads text=none, and so must what imitates it; give text=none"
        ),
    ):
        prepare_store(
            node("dataset", "imagined", run=str(run), episodes=6, steps=4, text="goal"), tmp_path
        )


def test_many_steps_outside_of_the_support_are_a_fault():
    assert support_faults(0.1) == [] == support_faults(0.0)
    expected = (
        "12.5 % of the imagined steps are outside of the support of the run's data and were "
        "left out"
    )
    assert support_faults(0.125) == [f"{expected}; imagine fewer steps (dataset.steps)"]


def test_the_card_and_the_training_print_the_faults_of_a_reader(tmp_path, capsys):
    made = [episode([1.0, 2.0], start=i) for i in range(4)]
    spec = Spec(observation_dim=2, action_dim=1, horizon=2, low=(-1.0,), high=(1.0,))
    imagined = write_store(
        tmp_path / "store", Source(spec, made, {"name": "imagined(x)", "faults": ["12.5 % of it"]})
    )
    assert "  fault        12.5 % of it" in list(card(imagined))
    loop = [word for word in LOOP if not word.startswith("dataset")]
    words = ("dataset=store", f"dataset.path={imagined.path}", "env=none", f"run={tmp_path}/run")
    assert command("train", *loop, *NANO, *words) == 0
    assert "\nfault: 12.5 % of it\n" in capsys.readouterr().out


def test_a_dataset_is_imagined_by_a_run_with_a_value(run, tmp_path):
    plain = tmp_path / "plain"
    assert command("train", *LOOP, *NANO, f"run={plain}", f"cache_dir={run.parent}/data") == 0
    with pytest.raises(
        ValueError, match="dataset.run=.*: expected a run trained with planner=value"
    ):
        prepare_store(node("dataset", "imagined", run=str(plain)), tmp_path)


def test_a_value_is_of_one_task(tmp_path, capsys):
    assert (
        command("train", *SHORT, "text=goal", f"run={tmp_path}/run", f"cache_dir={tmp_path}/data")
        == 1
    )
    assert "planner=value: expected at most 1 task texts" in capsys.readouterr().err


@pytest.mark.parametrize("planner", ["value", "landmarks"])
def test_a_policy_whose_plans_need_a_text_warms_up(planner):
    spec = Spec(observation_dim=4, action_dim=2, horizon=15, low=(-1.0,) * 2, high=(1.0,) * 2)
    reads = {"value": {"reads_text": True}, "landmarks": {"goal_in": "text"}}[planner]
    policy = make_policy(spec, planning_horizon=3, planner=node("planner", planner, **reads))
    policy.warm_up()
