"""Entities as tokens of their own: what attends to them, and that a session equals the plain path."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from decisionllm.backbones.blocks import TokenPlaces, plan_attention_with_entities
from decisionllm.datasets.windows import collate, concatenate_histories, cut_windows
from decisionllm.schema import History, Spec
from decisionllm.tokenizers import text
from decisionllm.tokenizers.entities import EntityEmbedding
from decisionllm.tokenizers.entity_tokens import EntityTokens
from tests.conftest import BACKBONES, MAX_RETURN, make_model, make_policy, near
from tests.policy.test_policy import TASKS, World, play

pytestmark = pytest.mark.numeric

SCHEMA = (("own", 2, 1), ("ball", 3, 3), ("door", 4, 2))
SPEC = Spec(observation_dim=19, action_dim=1, horizon=15, num_actions=4, entity_schema=SCHEMA)


def draw_observations(shape, seed=0, share=0.5):
    """Observations (*shape, S) whose entities are each there with this probability."""
    rng = np.random.default_rng(seed)
    blocks = [rng.normal(size=(*shape, 2))]
    for width, count in ((3, 3), (4, 2)):
        block = rng.normal(size=(*shape, count, width))
        block[..., 0] = rng.random((*shape, count)) < share
        blocks.append((block * block[..., :1]).reshape(*shape, -1))
    return np.concatenate(blocks, -1).astype(np.float32)


def agree(policy, tasks=TASKS, share=0.5):
    world = World(SPEC, tasks)
    if policy.model.spec == SPEC:
        world.observations = draw_observations(world.observations.shape[:2], share=share)
    if policy.target_return is None:
        world.targets = [None, 0.5, None, None]
    play(policy, world, policy.begin(world.tasks, 15, world.targets), np.arange(len(tasks)))


@pytest.mark.parametrize("entities", ["current", "all"])
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("returns", ["return_to_go", "none"])
def test_the_cached_session_equals_the_plain_policy(entities, backbone, returns):
    agree(
        make_policy(
            SPEC, head="discrete", backbone=backbone, condition_on=returns, entities=entities
        )
    )


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (6, 1), (6, 6), (40, 3)])
def test_it_does_for_every_window_and_stride(window, stride):
    agree(make_policy(SPEC, head="discrete", window=window, stride=stride, entities="current"))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_it_does_without_entities_and_with_all_of_them(share):
    agree(make_policy(SPEC, head="discrete", entities="current"), share=share)


@pytest.mark.parametrize("entities", ["pooled", "current", "all"])
@pytest.mark.parametrize(
    "schema",
    [
        (("own", 2, 1), ("grid:a", 3, 4), ("own", 5, 1)),
        (("grid:a", 3, 3), ("own", 2, 2), ("grid:b", 2, 3)),
        (("grid:a", 3, 4), ("grid:b", 7, 1)),
        (("grid:a", 1, 7), ("ball", 3, 4)),
    ],
)
def test_it_does_on_grids_with_own_numbers_around_them_and_none(schema, entities):
    agree(make_policy(replace(SPEC, entity_schema=schema), head="discrete", entities=entities))


@torch.no_grad()
@pytest.mark.parametrize("entities", ["pooled", "current", "all"])
def test_the_place_of_a_cell_has_an_effect(entities):
    schema = (("grid:image", 3, 4), ("own", 7, 1))
    model = make_model(replace(SPEC, entity_schema=schema), head="discrete", entities=entities)
    rng = np.random.default_rng(0)
    observations = 5 * rng.normal(size=(5, 19)).astype(np.float32)
    observations[:, :12:3] = 0  # a first number of 0 is no flag
    moved = observations.copy()
    moved[:, :12] = observations[:, :12].reshape(5, 4, 3)[:, [1, 0, 2, 3]].reshape(5, -1)
    assert (read(model, moved) - read(model, observations)).abs().max() > 1e-3
    model.tokenizer.observations.maps[1].places.weight.zero_()
    near(read(model, moved), read(model, observations))


def test_it_does_with_the_predicted_maximum_return():
    agree(
        make_policy(
            SPEC, head="discrete", objective=MAX_RETURN, target_return=None, entities="current"
        )
    )


def test_an_observation_token_attends_to_the_entities_of_its_step():
    """Two steps of two tokens; one entity each, and one that is absent at the second."""
    beside = EntityTokens(
        embedded=torch.zeros(1, 3, 5),
        present=torch.tensor([[True, True, False]]),
        place=torch.tensor([[0, 2, 2]]),
        remembered=False,
    )
    slots = torch.arange(4)[None]
    last = beside.last_slots(slots)
    assert last.tolist() == [[0, 1, 2, 3, -1, 1, 1]]
    causal = torch.arange(4) <= last[..., None]
    expected = [
        # o1 a1 o2 a2  e1 e2 absent
        [1, 0, 0, 0, 1, 0, 0],  # o1
        [1, 1, 0, 0, 0, 0, 0],  # a1
        [1, 1, 1, 0, 0, 1, 0],  # o2
        [1, 1, 1, 1, 0, 0, 0],  # a2
        [0, 0, 0, 0, 1, 0, 0],  # e1
        [1, 1, 0, 0, 0, 1, 0],  # e2
        [1, 1, 0, 0, 0, 1, 1],  # absent: itself, so that its softmax is defined
    ]
    assert beside.visible(causal)[0].int().tolist() == expected
    remembered = beside._replace(remembered=True).visible(causal)[0].int().tolist()
    assert remembered[1] == [1, 1, 0, 0, 1, 0, 0]  # a1 attends to e1
    assert remembered[2] == [1, 1, 1, 0, 1, 1, 0]  # o2 to both
    assert remembered[4] == expected[4]  # e1 not to the later e2
    assert beside.positions(10 + slots).tolist() == [[10, 11, 12, 13, 10, 12, 12]]


def test_a_window_counts_an_entity_as_its_observation_token():
    """Two words, then three steps of one token; an entity at the first step and one at the third,
    and each token sees itself and one before it.
    """
    beside = EntityTokens(
        embedded=torch.zeros(1, 2, 5),
        present=torch.tensor([[True, True]]),
        place=torch.tensor([[0, 2]]),
        remembered=True,
    )
    places = TokenPlaces(
        positions=2 + torch.arange(3)[None],
        slots=torch.arange(3)[None],
        num_keys=3,
        text_mask=torch.tensor([[True, True, False]]),
        output_positions=slice(None),
    )
    plan = plan_attention_with_entities(places, [None, 2], beside, 3)
    assert plan.visible[2][0].int().tolist() == [
        # w1 w2 padding o1 o2 o3 e1 e3
        [0, 1, 0, 1, 0, 0, 1, 0],  # o1
        [0, 0, 0, 1, 1, 0, 1, 0],  # o2
        [0, 0, 0, 0, 1, 1, 0, 1],  # o3
        [0, 1, 0, 0, 0, 0, 1, 0],  # e1
        [0, 0, 0, 0, 1, 0, 0, 1],  # e3
    ]
    assert plan.visible[None][0].int().tolist() == [
        [1, 1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1, 1, 1, 1],
        [1, 1, 0, 0, 0, 0, 1, 0],
        [1, 1, 0, 1, 1, 0, 1, 1],
    ]


@torch.no_grad()
def test_the_entities_of_a_row_are_those_present_step_by_step():
    embed = EntityEmbedding(SCHEMA, 8)
    observation = torch.zeros(2, 2, 19)
    observation[0, 0, 5:8] = torch.tensor([1.0, 2.0, 3.0])  # the second ball
    observation[0, 0, 11:15] = torch.tensor([1.0, 4.0, 5.0, 6.0])  # the first door
    observation[1, 1, 2:5] = torch.tensor([1.0, 7.0, 8.0])  # the first ball
    tokens, step, present = embed.entities(observation)
    assert present.tolist() == [[True, True], [True, False]]
    assert step[0].tolist() == [0, 0] and step[1, 0] == 1
    near(tokens[0, 0], embed.maps[1](torch.tensor([1.0, 2.0, 3.0])))
    near(tokens[0, 1], embed.maps[2](torch.tensor([1.0, 4.0, 5.0, 6.0])))
    near(tokens[1, 0], embed.maps[1](torch.tensor([1.0, 7.0, 8.0])))


def read(model, observations, task=TASKS[0]):
    """Hidden states (T, D) of one history with these observations (T, S)."""
    past = np.arange(len(observations) - 1)[:, None] % 4
    history = History(observations, past, np.zeros(len(past)), target_return=1.0, task=task)
    steps = concatenate_histories([history], np.ones(1))
    window = cut_windows(steps, np.zeros(1, int), np.zeros(1, int), len(observations))
    batch = collate(window, model.backbone.encode([task]), np.zeros(1, int))
    return model.read(batch)[0]


@torch.no_grad()
def test_neither_the_order_nor_the_number_of_slots_of_entities_has_an_effect():
    model = make_model(SPEC, head="discrete", entities="current")
    observations = draw_observations((5,))
    balls = observations[:, 2:11].reshape(5, 3, 3)
    other = observations.copy()
    other[:, 2:11] = balls[:, [2, 0, 1]].reshape(5, -1)
    near(read(model, other), read(model, observations))
    later = np.concatenate([observations, draw_observations((1,), share=1.0)])  # more of them
    near(read(model, later)[:5], read(model, observations))


@torch.no_grad()
def test_the_library_reads_the_same_with_the_same_mask():
    """The library's own forward over all tokens in one row, with the mask as a bias."""
    model = make_model(SPEC, head="discrete", entities="current", condition_on="none")
    observations = draw_observations((4,))
    hidden = read(model, observations)

    backbone = model.backbone
    ids, _ = backbone.encode(TASKS[:1])
    past = np.arange(3)[:, None] % 4
    steps = concatenate_histories([History(observations, past, np.zeros(3), 1.0)], np.ones(1))
    batch = collate(
        cut_windows(steps, np.zeros(1, int), np.zeros(1, int), 4),
        text.pad_ids([[]]),
        np.zeros(1, int),
    )
    trajectory = model.tokens(batch)[:, :-1]  # o1 a1 o2 a2 o3 a3 o4
    beside = model.entity_tokens(batch.observations)
    L, n, E = ids.shape[1], 7, beside.embedded.shape[1]
    visible = torch.zeros(L + n + E, L + n + E, dtype=torch.bool)
    visible[: L + n, : L + n] = torch.ones(L + n, L + n).tril().bool()
    for e, (place, is_present) in enumerate(
        zip(beside.place[0].tolist(), beside.present[0].tolist(), strict=True)
    ):
        visible[L + n + e, : L + place] = True
        for other in range(E):
            if beside.place[0, other] == place and beside.present[0, other]:
                visible[L + n + e, L + n + other] = True
        visible[L + n + e, L + n + e] = True
        visible[L + place, L + n + e] = is_present
    bias = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))[None, None]
    positions = torch.cat([torch.arange(L + n), L + beside.place[0]])[None]
    embedded = torch.cat([backbone.embed(ids), trajectory, beside.embedded], 1)
    out = backbone.core(inputs_embeds=embedded, attention_mask=bias, position_ids=positions)
    near(out.last_hidden_state[0, L : L + n : 2], hidden)


@pytest.mark.parametrize("entities", ["pooled", "current"])
@torch.no_grad()
def test_entities_can_be_hidden(entities):
    observations = draw_observations((5,))
    without = draw_observations((5,), share=0.0)
    always, half = (
        make_model(SPEC, head="discrete", entities=entities, hide_entities=share)
        for share in (1.0, 0.5)
    )
    near(read(always, observations), read(always, without))
    # when it acts, it reads them all
    near(read(half, observations), read(half, observations))
    assert (read(half, observations) - read(half, without)).abs().max() > 1e-2
    half.train()
    assert (read(half, observations) - read(half, observations)).abs().max() > 1e-2


def test_what_cannot_have_entity_tokens_is_refused():
    plain = Spec(observation_dim=3, action_dim=1, horizon=15, num_actions=4)
    with pytest.raises(
        ValueError, match="expected .* an entity schema, .*; take tokenizer.entities=po"
    ):
        make_model(plain, head="discrete", entities="current")
    for own_blocks in ([("own", 3, 1)], [("own", 1, 1), ("own", 2, 1)]):
        with pytest.raises(ValueError, match="expected observations with an entity schema"):
            alone = replace(plain, entity_schema=own_blocks)
            make_model(alone, head="discrete", entities="current")
    with pytest.raises(ValueError, match="got no entities; take tokenizer.hide_entities=0"):
        make_model(plain, head="discrete", hide_entities=0.3)
    with pytest.raises(ValueError, match="tokenizer.hide_entities: expected a share"):
        make_model(SPEC, head="discrete", hide_entities=-1.0)
    with pytest.raises(ValueError, match="tokenizer.entities: expected"):
        make_model(SPEC, head="discrete", entities="each")
    with pytest.raises(ValueError, match="expected a head that points at no entities"):
        make_model(SPEC, head="pointer", entities="current")
    with pytest.raises(ValueError, match="expected team.execution=per_agent"):
        make_model(SPEC, head="discrete", entities="current", execution="both")
