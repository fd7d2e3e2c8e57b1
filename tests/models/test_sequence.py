"""What the whole model promises, on two architectures: invisible padding, causality, units, and
what is trained.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from decisionllm.datasets import windows
from decisionllm.datasets.windows import collate
from decisionllm.models.normalizer import Normalizer
from decisionllm.models.objectives.likelihood import masked_mean
from decisionllm.registry import build
from decisionllm.schema import Spec
from decisionllm.tokenizers import text
from tests.conftest import BACKBONES, MAX_RETURN, make_model, near, node

pytestmark = pytest.mark.numeric

CONTINUOUS = Spec(observation_dim=3, action_dim=2, horizon=20, low=(-2.0, 0.0), high=(2.0, 1.0))
DISCRETE = Spec(observation_dim=3, action_dim=1, horizon=20, num_actions=4)
TASKS = [
    "Walk to the goal in the north.",
    "Walk to the goal in the south, and do it within 20 steps.",
    "",
]
both = pytest.mark.parametrize("backbone", BACKBONES)


def steps(spec, lengths):
    """Episodes of these lengths, every number drawn; the e-th one is the start of the same episode
    whatever its length.
    """

    def drawn(e, n):
        rng, N = np.random.default_rng(e), spec.horizon
        observations = rng.normal(size=(N, spec.observation_dim))
        returns = rng.normal(size=N)
        selected = rng.integers(4, size=(N, 1))
        pushed = rng.uniform(size=(N, 2))
        return [
            part[:n].astype(np.float32)
            for part in (observations, selected if spec.num_actions else pushed, returns)
        ]

    numbers = (
        np.concatenate(parts)
        for parts in zip(*(drawn(e, n) for e, n in enumerate(lengths)), strict=True)
    )
    end = np.cumsum(lengths)
    return windows.Steps(*numbers, end - lengths, end)


def make_batch(spec, lengths, T, tasks=("",), index=None):
    """The first T steps of episodes of these lengths; row i has the text tasks[index[i]], or the
    first one.
    """
    rows = np.arange(len(lengths))
    window = windows.cut_windows(steps(spec, lengths), rows, 0 * rows, T)
    return collate(
        window,
        text.encode(text.own_tokenizer(), tasks),
        0 * rows if index is None else np.array(index),
    )


@torch.no_grad()
def hidden_states(model, batch, rows=slice(None)):
    """Hidden states of these rows' observations."""
    return model.read(batch)[rows]


def same(a, b):
    return torch.allclose(a, b, atol=1e-4)


@both
@pytest.mark.parametrize("tasks", [("",), TASKS])
def test_padding_changes_nothing(backbone, tasks):
    """Five steps alone, and in a batch with longer episodes, longer texts, and room for ten."""
    model = make_model(CONTINUOUS, backbone=backbone)
    alone = make_batch(CONTINUOUS, [5], 5, tasks[:1])
    padded = make_batch(CONTINUOUS, [5, 9, 7], 10, tasks, [i % len(tasks) for i in range(3)])
    assert same(hidden_states(model, padded)[0, :5], hidden_states(model, alone)[0])


@both
def test_whatever_padding_holds_the_loss_is_the_same(backbone):
    model = make_model(CONTINUOUS, backbone=backbone)
    batch = make_batch(CONTINUOUS, [5, 2], 6, TASKS, [0, 1])
    real, trash = batch.mask[..., None], 1e3
    noise = replace(
        batch,
        observations=batch.observations.where(real, trash),
        actions=batch.actions.where(real, trash),
        returns_to_go=batch.returns_to_go.where(batch.mask, -trash),
        timesteps=batch.timesteps.where(batch.mask, 7),
        text_ids=batch.text_ids.where(batch.text_mask, 300),
    )
    assert not batch.text_mask.all() and not batch.mask.all()
    with torch.no_grad():
        torch.testing.assert_close(model(noise)["nll"], model(batch)["nll"])


def test_the_loss_weighs_every_real_step_alike():
    model = make_model(CONTINUOUS)
    batch = make_batch(CONTINUOUS, [6, 2], 6)
    with torch.no_grad():
        each = -model.head(model.read(batch)).log_prob(model.normalizer.actions(batch.actions))
        torch.testing.assert_close(model(batch)["nll"], (each[0].sum() + each[1, :2].sum()) / 8)


def test_the_weight_of_an_action_multiplies_its_loss():
    model = make_model(CONTINUOUS)
    batch = make_batch(CONTINUOUS, [6, 3], 6)
    weight = batch.mask.float()
    weight[0, 1], weight[1, 0] = 0.25, 0
    reference = replace(batch, action_weight=weight, loss_mask=batch.mask & (weight > 0))
    with torch.no_grad():
        each = -model.head(model.read(batch)).log_prob(model.normalizer.actions(batch.actions))
        expected = (each[0, 0] + 0.25 * each[0, 1] + each[0, 2:].sum() + each[1, 1:3].sum()) / 8
        torch.testing.assert_close(model(reference)["nll"], expected)


def test_actions_outside_the_loss_mask_are_inputs_but_no_targets():
    model = make_model(CONTINUOUS)
    batch = make_batch(CONTINUOUS, [6, 2], 6)
    loss_mask = batch.mask.clone()
    loss_mask[0, 2:5] = False
    with torch.no_grad():
        each = -model.head(model.read(batch)).log_prob(model.normalizer.actions(batch.actions))
        expected = (each[0, :2].sum() + each[0, 5] + each[1, :2].sum()) / 5
        torch.testing.assert_close(model(replace(batch, loss_mask=loss_mask))["nll"], expected)
        nothing = model(replace(batch, loss_mask=torch.zeros_like(loss_mask)))
        assert nothing["nll"] == 0


def test_max_return_refuses_single_rows_which_would_never_predict_it():
    model = make_model(CONTINUOUS, objective=MAX_RETURN)
    one = make_batch(CONTINUOUS, [3], 4)
    with pytest.raises(ValueError, match="at least 2 rows of optim.batch_size"):
        model.train()(one)
    assert model.eval()(one)["max_return"] == 0, "of the last rows of a validation"


def test_max_return_is_an_expectile_on_rows_with_the_null_return():
    model = make_model(CONTINUOUS, objective=MAX_RETURN)
    batch = make_batch(CONTINUOUS, [3, 2, 3, 1], 4)
    model.normalizer.return_mean.fill_(1.0)
    model.normalizer.return_scale.fill_(2.0)
    with torch.no_grad():
        arguments = torch.tensor([True, False, True, False])
        hidden, terms = model.read(batch, arguments), model(batch)
        short = (batch.returns_to_go - 1) / 2 - model.objective.predict_return(hidden)
        each = torch.where(short > 0, 0.9, 0.1) * short**2
        torch.testing.assert_close(terms["max_return"], (each[1, :2].sum() + each[3, 0]) / 3)
        assert not torch.equal(model.read(batch, ~arguments), hidden)
        other = replace(batch, returns_to_go=batch.returns_to_go + 1)
        # their returns have no effect
        torch.testing.assert_close(
            model.read(other, arguments)[~arguments], hidden[~arguments], rtol=0, atol=0
        )
        assert (model.read(other, arguments)[arguments] != hidden[arguments]).any()


def after(batch, name, t):
    """The batch with one of its parts changed from step t on."""
    part = getattr(batch, name).clone()
    part[:, t:] = (part[:, t:] + 1) % 4 if name == "actions" else part[:, t:] + 1
    return replace(batch, **{name: part})


@both
@pytest.mark.parametrize("spec", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
@pytest.mark.parametrize("returns", ["return_to_go", "none"])
def test_a_prediction_depends_on_neither_its_action_nor_the_future(backbone, spec, returns):
    """What is changed at step 3 is first seen at step 3 if it is a return or an observation, and at
    step 4 if an action.
    """
    head = "discrete" if spec.num_actions else "gaussian"
    model = make_model(spec, backbone=backbone, head=head, condition_on=returns)
    batch = make_batch(spec, [6, 6], 6, TASKS[:1])
    before = hidden_states(model, batch)
    for name, first in (
        ("observations", 3),
        ("actions", 4),
        *([("returns_to_go", 3)] if returns == "return_to_go" else []),
    ):
        now = hidden_states(model, after(batch, name, 3))
        assert same(now[:, :first], before[:, :first])
        assert not any(same(now[:, t], before[:, t]) for t in range(first, 6))


@both
def test_a_prediction_depends_on_the_past(backbone):
    model = make_model(CONTINUOUS, backbone=backbone)
    batch = make_batch(CONTINUOUS, [6], 6)
    for name in ("observations", "actions", "returns_to_go"):
        part = getattr(batch, name).clone()
        part[:, 0] += 1
        assert not same(
            hidden_states(model, replace(batch, **{name: part}))[:, 5],
            hidden_states(model, batch)[:, 5],
        )


@both
def test_the_text_changes_the_action(backbone):
    model, rows = make_model(CONTINUOUS, backbone=backbone), [0, 1, 2]
    batch = make_batch(CONTINUOUS, [4], 4)
    batches = [make_batch(CONTINUOUS, [4], 4, TASKS, [i]) for i in rows]
    actions = [model.head(hidden_states(model, one)).mode for one in batches]
    # an empty text is no text
    assert same(hidden_states(model, batches[2]), hidden_states(model, batch))
    assert not any(
        torch.allclose(actions[i], actions[j], atol=1e-3) for i in rows for j in rows if i < j
    )


@both
def test_each_row_reads_its_own_text(backbone):
    model = make_model(CONTINUOUS, backbone=backbone)
    mixed = hidden_states(model, make_batch(CONTINUOUS, [4, 4, 4, 4], 4, TASKS, [1, 0, 1, 2]))
    for row, task in enumerate((1, 0, 1, 2)):
        alone = make_batch(CONTINUOUS, [4] * 4, 4, TASKS, [task] * 4)
        assert same(hidden_states(model, alone)[row], mixed[row])


def test_without_conditioning_returns_have_no_effect():
    model = make_model(CONTINUOUS, condition_on="none")
    batch = make_batch(CONTINUOUS, [6], 6)
    other = replace(batch, returns_to_go=batch.returns_to_go + 5)
    with torch.no_grad():
        assert torch.equal(model(other)["nll"], model(batch)["nll"])
    assert model.tokens(batch).shape[1] == 12 and model.tokenizer.returns is None


@both
@pytest.mark.parametrize("tune", ["lora", "full", "frozen"])
def test_only_adapters_and_new_parts_are_trained(backbone, tune):
    """And each of them is: a parameter that gets no gradient is one that is not used."""
    model = make_model(
        CONTINUOUS, backbone=backbone, backbone_options={"tune": tune, "lora_rank": 4}
    )
    sum(model(make_batch(CONTINUOUS, [6, 6], 6, TASKS, [0, 1])).values()).backward()
    trained = {
        name: tune == "full" or not name.startswith("backbone.") or "lora_" in name
        for name, _ in model.named_parameters()
    }
    assert {
        name: weight.grad is not None and bool(weight.grad.any())
        for name, weight in model.named_parameters()
    } == trained


def test_an_adapter_changes_nothing_at_first():
    plain = build(node("backbone", "nano", width=32, layers=1, heads=2, inner=48, tune="frozen"), 0)
    adapted = build(node("backbone", "nano", width=32, layers=1, heads=2, inner=48, tune="lora"), 0)
    ids = torch.arange(4)[None]
    inputs = torch.randn(1, 5, 32), ids, ids >= 0, torch.zeros(1, dtype=torch.long)
    torch.testing.assert_close(adapted(*inputs), plain(*inputs))


def test_units_go_there_and_back():
    units = Normalizer(CONTINUOUS)
    actions = torch.tensor([[-2.0, 0.0], [2.0, 1.0], [1.0, 0.25]])
    torch.testing.assert_close(
        units.actions(actions), torch.tensor([[-1.0, -1.0], [1.0, 1.0], [0.5, -0.5]])
    )
    torch.testing.assert_close(units.raw_actions(units.actions(actions)), actions)


def test_an_action_beyond_the_bounds_is_the_bound():
    assert Normalizer(CONTINUOUS).raw_actions(torch.tensor([[-7.0, 1.5]])).tolist() == [[-2, 1]]


def test_a_discrete_action_has_no_unit():
    units, selected = Normalizer(DISCRETE), torch.tensor([[0.0], [3.0]])
    assert torch.equal(units.actions(selected), selected) and torch.equal(
        units.raw_actions(selected), selected
    )


def test_observations_and_returns_are_standardised_by_hand():
    """Observations 0 and 4: mean 2, deviation 2. Returns 10, 20 and 30: mean 20."""
    units = Normalizer(Spec(observation_dim=2, action_dim=1, horizon=5, low=(-1.0,), high=(1.0,)))
    units.fit(
        [
            (
                np.array([[0, 7], [4, 7], [0, 7], [4, 7]], np.float32),
                np.array([10, 20, 30, 20], np.float32),
            )
        ]
    )
    seen = torch.tensor([[4.0, 7.0], [8.0, 9.0]])
    expected = torch.tensor([[1.0, 0.0], [3.0, 2.0]])
    torch.testing.assert_close(units.observations(seen), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(
        units.returns_to_go(torch.tensor([20.0, 30.0])), torch.tensor([0.0, 10 / 50**0.5])
    )


def test_a_return_beyond_the_training_range_is_clamped():
    units = Normalizer(CONTINUOUS)
    units.fit([(np.zeros((3, 3), np.float32), np.array([10, 20, 30], np.float32))])
    nearest = units.returns_to_go(torch.tensor([10.0, 30.0]))
    assert torch.equal(units.returns_to_go(torch.tensor([-1e6, 1e6])), nearest)


def test_units_of_constant_columns_stay_finite():
    units = Normalizer(CONTINUOUS)
    units.fit([(np.full((4, 3), 0.1, np.float32), np.full(4, 0.1, np.float32))])
    assert units.observations(torch.full((1, 3), 0.1)).abs().max() < 1e-6
    assert units.returns_to_go(torch.tensor([0.1, 5.0])).tolist() == [0, 0]


def test_the_scaler_is_saved_with_the_weights():
    old, new = make_model(CONTINUOUS), make_model(CONTINUOUS, seed=1)
    old.normalizer.fit(
        [(np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(4, dtype=np.float32))]
    )
    new.load_state_dict(old.state_dict())
    batch = make_batch(CONTINUOUS, [4], 4)
    assert torch.equal(hidden_states(new, batch), hidden_states(old, batch))


def test_an_action_before_noise_and_clipping_is_chosen():
    """A mean of 0.8005 is that of 1 with the head's noise of 0.5, clipped."""
    model = make_model(CONTINUOUS)
    hidden = torch.ones(1, model.backbone.width)
    torch.nn.init.zeros_(model.head.out.weight)
    torch.nn.init.constant_(model.head.out.bias, math.atanh(0.80053))
    stored, before = (model.choose(hidden, None, decode=decode) for decode in ("mode", "unclipped"))
    torch.testing.assert_close(stored, model.normalizer.raw_actions(torch.full((1, 2), 0.80053)))
    torch.testing.assert_close(
        before, model.normalizer.raw_actions(torch.ones(1, 2)), atol=1e-3, rtol=0
    )


def test_a_masked_mean_is_over_what_is_real():
    values = torch.tensor([[1.0, 2, 9], [3, torch.nan, torch.inf]])
    assert masked_mean(values, torch.tensor([[True, True, False], [True, False, False]])) == 2


@pytest.mark.parametrize(
    ("head", "spec"), [("gaussian", CONTINUOUS), ("bins", CONTINUOUS), ("discrete", DISCRETE)]
)
@pytest.mark.parametrize("decode", ["mode", "mean", "sample"])
def test_an_action_is_chosen_in_raw_units(head, spec, decode):
    model = make_model(spec, head=head)
    hidden = model.read(make_batch(spec, [6] * 5, 6))[:, -1].detach()
    selected = model.choose(hidden, None, decode=decode, generator=torch.Generator().manual_seed(0))
    distribution = model.head(hidden[:, None])
    expected = (
        distribution.sample(torch.Generator().manual_seed(0))
        if decode == "sample"
        else getattr(distribution, decode)
    )
    assert torch.equal(selected, model.normalizer.raw_actions(expected[:, 0]))
    if not spec.num_actions:
        assert (selected >= torch.tensor(spec.low)).all() and (
            selected <= torch.tensor(spec.high)
        ).all()


def test_a_masked_action_is_never_chosen():
    model = make_model(DISCRETE, head="discrete")
    hidden = model.read(make_batch(DISCRETE, [6] * 50, 6))[:, -1].detach()
    masks = torch.tensor([False, True, False, True]).expand(50, 4)
    for decode in ("mode", "sample"):
        selected = model.choose(
            hidden, masks, decode=decode, generator=torch.Generator().manual_seed(0)
        )
        assert set(selected.flatten().tolist()) <= {1, 3}


def test_the_loss_counts_allowed_actions_alone():
    model = make_model(DISCRETE, head="discrete")
    batch = make_batch(DISCRETE, [6], 6)
    # nothing else is allowed: nothing to learn
    only = torch.nn.functional.one_hot(batch.actions[..., 0].long(), 4).bool()
    with torch.no_grad():
        assert model(replace(batch, action_masks=only))["nll"] == 0 < model(batch)["nll"]


@torch.no_grad()
def test_hidden_numbers_of_an_observation_have_no_effect():
    model = make_model(CONTINUOUS, hide_observations="0,2")
    batch = make_batch(CONTINUOUS, [6], 6)
    near(model.normalizer.observations(torch.ones(3)), [0, 1, 0])
    for column, changes in ((0, False), (1, True), (2, False)):
        other = batch.observations.clone()
        other[..., column] += 1
        assert (
            same(
                hidden_states(model, replace(batch, observations=other)),
                hidden_states(model, batch),
            )
            != changes
        )


@torch.no_grad()
def test_past_actions_can_be_hidden():
    batch = make_batch(CONTINUOUS, [6], 6)
    other = replace(batch, actions=1 - batch.actions)
    hidden, half = (make_model(CONTINUOUS, hide_actions=share) for share in (1.0, 0.5))
    assert same(hidden_states(hidden, other), hidden_states(hidden, batch))
    # when it acts, it reads them all
    assert not same(hidden_states(half, other), hidden_states(half, batch))
    half.train()
    assert not same(hidden_states(half, batch), hidden_states(half, batch))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"hide_observations": "3"},
            "tokenizer.hide_observations: expected 0 .. 2, got 3",
        ),
        ({"hide_actions": 2.0}, "tokenizer.hide_actions: expected a share within 0 .. 1, got 2.0"),
    ],
)
def test_what_cannot_be_hidden_is_refused(options, expected):
    with pytest.raises(ValueError, match=expected):
        make_model(CONTINUOUS, **options)
