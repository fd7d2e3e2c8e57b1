"""Advantage-weighted action loss: the numbers by hand, and the better of two arms where cloning
keeps their mixture.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

import decisionllm
from decisionllm.datasets import windows
from decisionllm.datasets.batches import to_batch
from decisionllm.models.objectives.advantage import AdvantageWeighted, expectile_loss
from decisionllm.models.objectives.likelihood import masked_mean
from decisionllm.schema import Episode
from decisionllm.teams.windows import TeamSampler
from tests.conftest import NANO, command, make_model, make_store, metrics, node
from tests.models.test_sequence import CONTINUOUS, make_batch

pytestmark = [pytest.mark.numeric, pytest.mark.slow]
SPEC = replace(CONTINUOUS, horizon=10)
WEIGHTED = node("objective", "advantage", temperature=2.0, expectile=0.9)
LEARN = (  # enough for one step of a few numbers
    *NANO,
    "backbone.layers=1",
    "head=discrete",
    "model.condition_on=none",
    "window=1",
    "steps=100",
    "optim.batch_size=64",
    "optim.lr=0.006",
    "optim.warmup=10",
    "log.every=100",
    "log.validation_batches=1",
    "log.tracker=none",
)


def test_an_expectile_weighs_errors_by_their_sign():
    assert expectile_loss(torch.tensor([2.0, -1.0, 0.0]), 0.9).tolist() == pytest.approx(
        [3.6, 0.1, 0.0]
    )


def test_a_weight_is_the_exponential_of_the_advantage_up_to_twenty():
    weights = AdvantageWeighted(4, SPEC, temperature=0.5, expectile=0.7)
    weights.deviation.fill_(2.0)
    weights.mean_weight.fill_(4.0)
    actual = weights.weights(
        torch.tensor([[0.0, 1.0, -1.0, 100.0]]), torch.ones(1, 4, dtype=torch.bool)
    )
    assert actual[0].tolist() == pytest.approx([1 / 4, np.e / 4, 1 / np.e / 4, 20 / 4])
    weights.deviation.zero_()  # certain returns: a fiftieth of the returns' deviation in its place
    assert float(
        weights.weights(torch.tensor([[0.01]]), torch.ones(1, 1, dtype=torch.bool))
    ) == pytest.approx(np.e / 4)


def test_deviation_and_mean_weight_follow_the_targets_of_whole_batches():
    weights = AdvantageWeighted(4, SPEC, temperature=2.0, expectile=0.7)
    mask = torch.tensor([[True, True, False]])
    # micro-batches of one step: advantages 3 and -1 have deviation 2; weights are e^1.5 and e^-0.5
    for part in (0, 1):
        weights.weights(torch.tensor([[3.0, -1.0, torch.nan]]), mask & (torch.arange(3) == part))
    weights.after_step(lambda x: x)
    assert float(weights.deviation) == pytest.approx(0.9 + 0.1 * 2)
    assert float(weights.mean_weight) == pytest.approx(0.9 + 0.1 * (np.e**1.5 + np.e**-0.5) / 2)
    reference = float(weights.deviation), float(weights.mean_weight)
    # held-out windows leave them as they are
    weights.eval().weights(torch.tensor([[9.0]]), torch.ones(1, 1, dtype=torch.bool))
    weights.after_step(lambda x: x)
    assert (float(weights.deviation), float(weights.mean_weight)) == reference


def test_a_value_is_a_level_and_a_slope_times_the_time_left():
    weights = AdvantageWeighted(2, SPEC, temperature=1.0, expectile=0.7)
    weights.out.weight.data = torch.eye(2)
    weights.out.bias.data = torch.tensor([1.0, 0.0])
    actual = weights.value(torch.tensor([[[5.0, 20.0], [5.0, 20.0]]]), torch.tensor([[0, 4]]))
    assert actual[0].tolist() == pytest.approx([6 + 20, 6 + 12])


def test_the_loss_weighs_each_action_and_the_value_does_not_learn_from_the_weights():
    model = make_model(CONTINUOUS, condition_on="none", objective=WEIGHTED)
    batch = make_batch(CONTINUOUS, [3, 2, 3, 1], 4)
    batch = replace(batch, loss_mask=batch.mask & (torch.arange(4) != 1))
    model.normalizer.return_mean.fill_(1.0)
    model.normalizer.return_scale.fill_(2.0)
    terms = model(batch)
    with torch.no_grad():
        hidden = model.read(batch)
        advantages = (batch.returns_to_go - 1) / 2 - model.objective.value(hidden, batch.timesteps)
        each = -model.distribution(hidden, None, None).log_prob(
            model.normalizer.actions(batch.actions)
        )
        torch.testing.assert_close(
            terms["nll"], masked_mean(each * (advantages / 2).exp(), batch.loss_mask)
        )
        torch.testing.assert_close(
            terms["value"], masked_mean(expectile_loss(advantages, 0.9), batch.loss_mask)
        )
        other = replace(batch, returns_to_go=batch.returns_to_go + 1, actions=batch.actions.flip(0))
        # of neither its return nor its action
        first = model.objective.value(hidden, batch.timesteps)[:, 0]
        assert torch.equal(model.objective.value(model.read(other), batch.timesteps)[:, 0], first)
    terms["nll"].backward(retain_graph=True)
    assert model.objective.out.weight.grad is None
    terms["value"].backward()
    assert model.objective.out.weight.grad.abs().sum() > 0


def arms(path, n=2000):
    """One step: the arm named by the sign of the observation pays 1, and is drawn in 30 %; the
    observation alone pays ten times that.
    """
    rng = np.random.default_rng(0)
    sign, good = rng.choice([-1, 1], n), rng.random(n) < 0.3
    columns = {
        "observations": sign[:, None].astype(np.float32),
        "actions": np.where(good, sign > 0, sign < 0).astype(np.int64),
        "rewards": (good + 10.0 * sign).astype(np.float32),
        "terminals": np.ones(n, bool),
    }
    np.savez(path, **columns)


@pytest.mark.parametrize(
    ("words", "least", "most"),
    [
        ((), 0.2, 0.4),
        (
            (
                "objective=advantage",
                "objective.temperature=0.5",
            ),
            0.8,
            1.0,
        ),
    ],
)
def test_weighting_prefers_the_better_arm_where_cloning_keeps_the_mixture(
    words, least, most, tmp_path
):
    arms(tmp_path / "arms.npz")
    data = ("dataset=arrays", f"dataset.path={tmp_path}/arms.npz")
    assert command("train", *data, *LEARN, *words, f"run={tmp_path}/run") == 0
    policy = decisionllm.load(tmp_path / "run")
    for arm, seen in enumerate((-1.0, 1.0)):
        history = decisionllm.schema.History(
            np.array([[seen]], np.float32), np.zeros((0, 1), np.float32), np.zeros(0, np.float32)
        )
        hidden, _ = policy.read([history])
        chances = policy.model.distribution(hidden[:, None], None, None).logits.exp()
        assert least < chances[0, 0, arm].item() < most
    if words:
        assert {"value", "held_out_value"} <= metrics(tmp_path / "run")[-1].keys()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"condition_on": "return_to_go"},
            "AdvantageWeighted: expected model.condition_on=none, got return_to_go",
        ),
        ({"temperature": -1.0}, "objective.temperature: expected above 0, got -1.0"),
        ({"expectile": 1.5}, "objective.expectile: expected within 0 .. 1, got 1.5"),
    ],
)
def test_what_cannot_be_weighted_is_refused(options, expected):
    conditions = {"condition_on": options.pop("condition_on", "none")}
    with pytest.raises(ValueError, match=expected):
        make_model(CONTINUOUS, objective=node("objective", "advantage", **options), **conditions)


@pytest.mark.parametrize(
    ("words", "least", "most"),
    [
        ((), 0.4, 0.6),
        (
            (
                "objective=advantage",
                "objective.temperature=0.5",
            ),
            0.85,
            1.0,
        ),
    ],
)
def test_a_later_member_of_a_team_takes_the_action_that_pays_beside_the_earlier_ones(
    words, least, most, tmp_path
):
    rng, episodes = np.random.default_rng(0), []
    # any two actions are as frequent; two different ones pay
    for group, pair in enumerate(rng.integers(2, size=(600, 2))):
        pays = np.array([pair[0] != pair[1]], np.float32)
        seen = np.ones((1, 1), np.float32)
        episodes += [
            Episode(seen, np.array([[a]], np.float32), pays, group=group, agent=i)
            for i, a in enumerate(pair)
        ]
    log = make_store(tmp_path / "log", episodes, num_actions=2)
    data = ("dataset=store", f"dataset.path={tmp_path}/log", "team.execution=joint")
    assert command("train", *data, *LEARN, *words, f"run={tmp_path}/run") == 0
    model = decisionllm.load(tmp_path / "run").model
    sampler = TeamSampler(
        windows.load_steps(log), log, np.arange(1200), T=1, batch_size=256, seed=1
    )
    batch = to_batch(
        sampler(0),
        slice(None),
        store=log,
        tasks=sampler.tasks,
        encode=model.backbone.encode,
        device="cpu",
    )
    chances = (
        model.distribution(model.read(batch), None, None)
        .log_prob(batch.actions)
        .exp()
        .view(-1, 2)[:, 1]
    )
    assert least < chances[batch.returns_to_go.view(-1, 2)[:, 0] > 0].mean().item() < most
