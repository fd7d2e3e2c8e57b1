"""The learned world of a team: what it reads of whom, its symmetries, that it learns; the teacher in
it; and the dataset of its play."""

import numpy as np
import pytest
import torch

from decisionllm.teams import dataset as team
from decisionllm.teams import imagined as team_imagined
from decisionllm.teams.joint_steps import JointSteps
from decisionllm.teams.learned_world import EntityReward, TeamWorld
from decisionllm.teams.spread import dataset as spread
from decisionllm.teams.td3 import TeamTD3
from tests.conftest import command

pytestmark = pytest.mark.slow
BLOCKS = spread.observation_blocks(3)  # velocity, position, three landmarks, two other agents


@pytest.fixture(scope="module")
def log():
    return spread.generate("random", groups=200, actions="continuous")


@pytest.fixture(scope="module")
def steps(log):
    return JointSteps.from_log(log)


def test_each_agent_reads_itself_first_and_the_others_in_turn(steps):
    world = TeamWorld(steps)
    observations = torch.zeros(3, 18)
    observations[:, 0] = torch.tensor([0.0, 1.0, 2.0])
    world.observation_mean.zero_()
    world.observation_scale.fill_(1.0)
    actions = torch.tensor([[0.1, 0.0], [0.2, 0.0], [0.3, 0.0]])
    joint = world.joint_inputs(observations, actions).unflatten(-1, (3, 20))
    assert joint[..., 0].tolist() == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    near = torch.tensor([[0.1, 0.2, 0.3], [0.2, 0.3, 0.1], [0.3, 0.1, 0.2]])
    assert torch.allclose(joint[..., 18], near)


@torch.no_grad()
def test_the_reward_does_not_depend_on_the_order_of_entities():
    torch.manual_seed(0)
    relations = EntityReward(BLOCKS, torch.ones(18))
    observations = torch.randn(5, 18)
    swapped = observations.clone()
    swapped[:, [4, 5, 6, 7]] = observations[:, [6, 7, 4, 5]]  # two landmarks
    swapped[:, [10, 11, 12, 13]] = observations[:, [12, 13, 10, 11]]  # the two agents
    assert torch.allclose(relations(observations), relations(swapped), atol=1e-5)
    mixed = observations.clone()
    mixed[:, [4, 5, 10, 11]] = observations[:, [10, 11, 4, 5]]  # a landmark and an agent
    assert not torch.allclose(relations(observations), relations(mixed), atol=1e-3)
    silent = observations.clone()
    silent[:, 14:] += 1  # a block without a kind
    assert torch.equal(relations(observations), relations(silent))


def test_vectors_are_turned_alike_and_only_in_a_plane(steps):
    world = TeamWorld(steps)
    first, second = torch.randn(4, 3, 18), torch.randn(4, 3, 2)
    turned = [world.transform_plane(first, second) for _ in range(20)]
    assert len({float(a[0, 0, 0]) for a, _ in turned}) > 2
    for a, b in turned:
        # products of vectors stay, so all have the same turn
        products = (a.unflatten(-1, (9, 2)) * b[..., None, :]).sum(-1)
        before = (first.unflatten(-1, (9, 2)) * second[..., None, :]).sum(-1)
        assert torch.allclose(products, before, atol=1e-5)
    object.__setattr__(steps, "plane", False)
    try:
        assert world.transform_plane(first)[0] is first
    finally:
        object.__setattr__(steps, "plane", True)


def test_a_world_learns_what_follows_and_what_is_paid(steps):
    world = TeamWorld(steps)
    world.fit(150)
    now = torch.from_numpy(steps.observations[:, 10])
    taken = torch.from_numpy(steps.actions[:, 10])
    then, paid = world.advance(now, taken)
    true_change = steps.observations[:, 11] - steps.observations[:, 10]
    moved = (then.numpy() - steps.observations[:, 10])[..., :4]
    error = np.square(moved - true_change[..., :4]).mean()
    assert error < 0.2 * true_change[..., :4].var()
    assert np.corrcoef(paid.ravel(), steps.rewards[:, 10].ravel())[0, 1] > 0.6
    assert steps.rewards.min() <= float(paid.min()) and float(paid.max()) <= steps.rewards.max()


def test_the_teacher_finds_the_action_that_is_paid_best():
    torch.manual_seed(0)
    learner = TeamTD3(2, 3, 1, discount=0.0)
    for k in range(400):
        seen = torch.randn(64, 2, 3)
        taken = 2 * torch.rand(64, 2, 1) - 1
        paid = -10 * (taken[..., 0] - 0.5).square()
        learner.update(seen, taken, paid, torch.randn(64, 2, 3), actor=k % 2 == 1)
    with torch.no_grad():
        selected = learner.act(torch.randn(200, 2, 3))
    assert abs(float(selected.mean()) - 0.5) < 0.15 and float(selected.std()) < 0.2


def small(path, **options):
    sizes = {"worlds": 6, "updates": 3, "rounds": 21}
    return team_imagined.load(path=str(path), **sizes | options)


def test_imagined_teams_are_whole_worlds_and_the_same_again(tmp_path, log):
    team.write(tmp_path / "log", log)
    first, second = (list(small(tmp_path / "log").episodes) for _ in range(2))
    assert len(first) == 18 and {len(each.rewards) for each in first} == {25}
    assert [each.group for each in first] == [g for g in range(6) for _ in range(3)]
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a.observations, b.observations)
        assert np.array_equal(a.actions, b.actions)
        assert np.abs(a.actions).max() <= 1
    others = list(small(tmp_path / "log", seed=1).episodes)
    assert not np.array_equal(first[0].actions, others[0].actions)
    with pytest.raises(ValueError, match=r"dataset\.rounds: expected 1 or more, got 0"):
        small(tmp_path / "log", rounds=0)


def test_a_plain_model_is_trained_on_imagined_teams(tmp_path, log, capsys):
    team.write(tmp_path / "log", log)
    sizes = ("dataset.worlds=40", "dataset.updates=3", "dataset.rounds=21", "dataset.meta=''")
    run = ("steps=2", "log.tracker=none", f"run={tmp_path}/run", "env.rules=mpe2")
    words = ("experiment=omar-imagined", f"dataset.path={tmp_path}/log", *sizes, *run)
    assert command("train", *words) == 0
    assert "imagined(" in capsys.readouterr().out
