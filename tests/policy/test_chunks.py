"""Action chunks: several actions predicted at a decision, which hold until the next one."""

import numpy as np
import pytest
import torch

from decisionllm.policy.policy import Session
from tests.conftest import LOOP, NANO, command, make_policy, metrics
from tests.models.test_decision_llm import make_batch
from tests.policy.test_policy import CONTINUOUS, DISCRETE, World, agree, play

pytestmark = pytest.mark.numeric


@torch.no_grad()
def test_in_between_decisions_a_policy_takes_the_actions_it_predicted():
    policy, world = make_policy(CONTINUOUS, action_chunk=4, decide_every=3), World(CONTINUOUS)
    model, session = policy.model, policy.begin(world.tasks, 15, world.targets)
    actions = play(policy, world, session, np.arange(4))
    for t in range(15):
        begun = t - t % 3
        hidden = policy.read([world.history(i, begun) for i in range(4)])[0]
        if t % 3:
            hidden = model.later[t % 3 - 1](hidden)
        wanted = model.normalizer.raw_actions(model.head(hidden[:, None]).mode[:, 0])
        np.testing.assert_allclose(actions[:, t], wanted, atol=2e-4)
    assert np.abs(np.diff(actions, axis=1)).min() > 0


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (6, 3), (15, 15)])
@pytest.mark.parametrize("target", [3.0, None])
def test_a_session_holds_decisions_as_the_plain_policy_does(window, stride, target):
    options = {} if target else {"max_return_expectile": 0.9}
    agree(
        make_policy(CONTINUOUS, window=window, stride=stride, target_return=target, action_chunk=4, decide_every=4, **options),
        CONTINUOUS,
    )


def test_later_actions_are_among_those_allowed_then():
    policy, world = make_policy(DISCRETE, head="discrete", action_chunk=3, decide_every=3), World(DISCRETE)
    actions = play(policy, world, policy.begin(world.tasks, 15, world.targets), np.arange(4))
    assert np.take_along_axis(world.masks, actions.astype(int), 2).all()


def test_an_episode_that_is_taken_over_between_decisions_goes_on_as_it_would_have():
    policy, world = make_policy(CONTINUOUS, action_chunk=4, decide_every=4), World(CONTINUOUS)
    play(policy, world, policy.begin(world.tasks, 15, world.targets), np.arange(4), end=7)
    session = Session(policy, world.tasks, 15, world.targets).restore([world.history(i, 6) for i in range(4)])
    play(policy, world, session, np.arange(4), begin=6, end=9)
    session.restore([world.history(2, 7)], [1])  # another episode in a row that has a decision of its own
    session.observe(world.observations[[2], 7], world.rewards[[2], 6], rows=np.array([1]))
    np.testing.assert_allclose(session.decide(np.array([1])), policy.act([world.history(2, 7)]), atol=2e-4)


def test_rows_that_end_leave_the_decisions_of_the_others_alone():
    policy, world = make_policy(CONTINUOUS, action_chunk=4, decide_every=4), World(CONTINUOUS)
    session = policy.begin(world.tasks, 15, world.targets)
    play(policy, world, session, np.arange(4), end=6)
    session.select(np.array([3, 1]))
    play(policy, world, session, np.array([3, 1]), begin=6, end=11)


@torch.no_grad()
def test_the_loss_of_later_actions_is_that_of_each_real_pair_of_steps():
    model = make_policy(CONTINUOUS, action_chunk=3).model
    batch = make_batch(CONTINUOUS, [7, 3, 1], 6)  # windows of 4 steps, and two more
    terms, hidden = model(batch), model.read(batch.steps(slice(4)))
    actions, each = model.normalizer.actions(batch.actions), []
    for row, length in enumerate([6, 3, 1]):
        for t in range(4):
            for k in (1, 2):
                if t + k < length:
                    distribution = model.head(model.later[k - 1](hidden[row, t])[None, None])
                    each.append(-distribution.log_prob(actions[row, t + k][None, None]))
    torch.testing.assert_close(terms["later"], torch.stack(each).mean())
    plain = -model.head(hidden).log_prob(actions[:, :4])
    torch.testing.assert_close(terms["nll"], plain[batch.mask[:, :4]].mean())


def test_a_run_learns_later_actions_and_is_evaluated_with_them(tmp_path):
    words = ["model.action_chunk=3", "act.decide_every=3", "steps=60", "log.every=20", f"run={tmp_path / 'run'}"]
    assert command("train", *LOOP, *NANO, "optim.lr=1e-2", *words) == 0
    rows = metrics(tmp_path / "run")
    assert rows[-1]["later"] < rows[0]["later"]
    assert command("evaluate", f"run={tmp_path / 'run'}", "episodes=4", "report=false") == 0
    assert command("evaluate", f"run={tmp_path / 'run'}", "episodes=4", "report=false", "act.decide_every=4") == 1
    assert command("train", *LOOP, *NANO, *words[:1], "act.decide_every=4", f"run={tmp_path / 'other'}") == 1
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("decide_every", [0, 3])
def test_a_policy_predicts_no_further_than_it_was_trained_to(decide_every):
    with pytest.raises(ValueError, match=r"act.decide_every: expected 1 .. 2 \(model.action_chunk of the training"):
        make_policy(CONTINUOUS, action_chunk=2, decide_every=decide_every)


@pytest.mark.parametrize("options", [{"action_chunk": 0}, {"action_chunk": 2, "value_discount": 0.9},
                                     {"action_chunk": 2, "execution": "joint"}], ids=str)  # fmt: skip
def test_chunks_that_nothing_could_execute_are_refused(options):
    with pytest.raises(ValueError, match="model.action_chunk=.: expected 1 or more; above 1 without model.value_discount"):
        make_policy(CONTINUOUS, **options)
