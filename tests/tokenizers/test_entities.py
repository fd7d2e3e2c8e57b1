"""Observations of entities: their order, their number and what is not there are not seen, and units
are those of a kind.
"""

import numpy as np
import pytest
import torch

from decisionllm.datasets import windows
from decisionllm.models.normalizer import Normalizer
from decisionllm.policy.policy import Policy
from decisionllm.schema import History, Spec
from decisionllm.tokenizers import text
from decisionllm.tokenizers.entities import EntityEmbedding, EntityEncoder, vector_columns
from tests.conftest import make_model, near

pytestmark = pytest.mark.numeric

LAYOUT = (("own", 3, 1), ("landmark", 3, 4), ("agent", 5, 2))
SPEC = Spec(observation_dim=25, action_dim=1, horizon=9, num_actions=5, entity_schema=LAYOUT)
ways = pytest.mark.parametrize(("layers", "embedding"), [(0, "linear"), (0, "mlp"), (2, "linear")])


def random_observations(n=7, seed=0, present=0.6):
    """n observations whose entities are there with this probability."""
    rng = np.random.default_rng(seed)
    parts = [rng.normal(size=(n, 3))]
    for width, count in ((3, 4), (5, 2)):
        block = rng.normal(size=(n, count, width))
        block[..., 0] = rng.random((n, count)) < present
        parts.append((block * block[..., :1]).reshape(n, -1))
    return np.concatenate(parts, 1).astype(np.float32)


def encoder(layers, embedding, entity_schema=LAYOUT):
    torch.manual_seed(0)
    made = EntityEncoder(entity_schema, 32, embedding=embedding, layers=layers)
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(2)
    return made


@ways
@torch.no_grad()
def test_the_order_of_entities_of_a_kind_has_no_effect(layers, embedding):
    encode, x = encoder(layers, embedding), torch.from_numpy(random_observations())
    landmarks = x[:, 3:15].view(-1, 4, 3)
    agents = x[:, 15:].view(-1, 2, 5)
    other = torch.cat(
        [x[:, :3], landmarks[:, [2, 0, 3, 1]].flatten(1), agents.flip(1).flatten(1)], 1
    )
    near(encode(other).detach(), encode(x).detach())
    swapped = torch.cat([x[:, [1, 0, 2]], x[:, 3:]], 1)  # two numbers of one block are not alike
    assert (encode(swapped) - encode(x)).abs().max() > 1e-2


@ways
@torch.no_grad()
def test_absent_entities_have_no_effect(layers, embedding):
    encode, x = encoder(layers, embedding), torch.from_numpy(random_observations())
    trash = x.clone()
    for first, width, count in ((3, 3, 4), (15, 5, 2)):
        block = trash[:, first : first + width * count].view(-1, count, width)
        block[..., 1:] += 100 * (block[..., :1] < 0.5)
    assert (trash - x).abs().max() == 100
    torch.testing.assert_close(encode(trash), encode(x), rtol=0, atol=0)


@ways
@torch.no_grad()
def test_empty_slots_change_nothing(layers, embedding):
    """The same weights on the same two landmarks with room for two and for four, and with no entity
    present.
    """
    wide = encoder(layers, embedding)
    x = torch.from_numpy(random_observations(present=1.0))
    x[:, 3 + 6 : 15] = 0
    narrow = encoder(layers, embedding, (("own", 3, 1), ("landmark", 3, 2), ("agent", 5, 2)))
    narrow.load_state_dict(wide.state_dict())
    near(narrow(torch.cat([x[:, :9], x[:, 15:]], 1)).detach(), wide(x).detach())
    alone = torch.cat([x[:, :3], torch.zeros(7, 22)], 1)
    assert wide(alone).isfinite().all() and (wide(alone) - wide(x)).abs().max() > 1e-2


@ways
def test_each_present_entity_has_an_effect(layers, embedding):
    encode = encoder(layers, embedding)
    x = torch.from_numpy(random_observations()).requires_grad_()
    (slope,) = torch.autograd.grad(encode(x).square().sum(), x)
    seen = slope[:, 3:15].view(-1, 4, 3).abs().amax(-1) > 0
    assert torch.equal(seen, x[:, 3:15].view(-1, 4, 3)[..., 0] > 0.5)


def test_units_are_fitted_to_the_present_entities_of_a_kind():
    normalizer, x = Normalizer(SPEC), random_observations(200)
    x[:, 4:15:3] = (x[:, 4:15:3] * 5 + 7) * x[:, 3:15:3]  # a number of landmarks, about 7
    normalizer.fit([(x, np.arange(200.0))])
    units = normalizer.observations(torch.from_numpy(x)).numpy()
    landmarks = units[:, 3:15].reshape(-1, 4, 3)
    before = x[:, 3:15].reshape(-1, 4, 3)
    there = before[..., 0] > 0.5
    assert set(landmarks[..., 0].ravel()) == {0.0, 1.0} and (landmarks[~there] == 0).all()
    np.testing.assert_allclose(landmarks[there][:, 1:].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(landmarks[there][:, 1:].std(0), 1, atol=1e-5)
    mean, scale = before[there][:, 1].mean(), before[there][:, 1].std()
    # for all four alike
    np.testing.assert_allclose(
        landmarks[..., 1][there], (before[..., 1][there] - mean) / scale, atol=1e-4
    )
    np.testing.assert_allclose(
        units[:, :3], (x[:, :3] - x[:, :3].mean(0)) / x[:, :3].std(0), atol=1e-4
    )


def test_a_kind_that_is_never_present_keeps_its_units():
    normalizer, x = Normalizer(SPEC), random_observations(20)
    x[:, 15:] = 0
    normalizer.fit([(x, np.arange(20.0))])
    assert (normalizer.observations(torch.from_numpy(x))[:, 15:] == 0).all()
    x[:, 15:20] = [1, 2, 3, 4, 5]
    np.testing.assert_allclose(
        normalizer.observations(torch.from_numpy(x))[0, 15:20], [1, 2, 3, 4, 5], rtol=1e-5
    )


def test_a_model_of_entities_ignores_their_order():
    """The whole model, one layer of entities that look at each other, in normalised units."""
    model = make_model(SPEC, head="discrete", entity_layers=1)
    model.normalizer.fit([(random_observations(50), np.arange(50.0))])
    assert len(model.tokenizer.observations.layers) == 2
    x = torch.from_numpy(random_observations())
    other = torch.cat([x[:, :3], x[:, 3:15].view(-1, 4, 3).flip(1).flatten(1), x[:, 15:]], 1)
    with torch.no_grad():
        read = [model.tokenizer.observations(model.normalizer.observations(o)) for o in (x, other)]
    near(read[0], read[1])


@ways
@torch.no_grad()
def test_own_blocks_are_read_as_one_wherever_they_stand(layers, embedding):
    encode, x = encoder(layers, embedding), torch.from_numpy(random_observations())
    parts = encoder(
        layers, embedding, (("own", 2, 1), ("landmark", 3, 4), ("agent", 5, 2), ("own", 1, 1))
    )
    assert parts.state_dict().keys() == encode.state_dict().keys()
    other = torch.cat([x[:, :2], x[:, 3:], x[:, 2:3]], 1)
    torch.testing.assert_close(parts(other), encode(x), rtol=0, atol=0)


@torch.no_grad()
def test_without_own_numbers_a_learned_vector_stands_for_them():
    schema = (("landmark", 3, 4),)
    encode, x = encoder(0, "linear", schema), torch.from_numpy(random_observations()[:, 3:15])
    embed = EntityEmbedding(schema, 32)
    assert embed(x[:, None]).shape == (7, 1, 32) and embed(x)[0].tolist() == embed(x)[1].tolist()
    before = encode(x)
    encode.maps[0].vector += 1
    assert before.isfinite().all() and (encode(x) - before).abs().max() > 1e-2


@ways
@torch.no_grad()
def test_the_cells_of_a_grid_are_always_there_and_have_a_place(layers, embedding):
    schema = (("grid:image", 3, 4), ("own", 13, 1))
    encode, x = (
        encoder(layers, embedding, schema),
        torch.from_numpy(random_observations(present=0.0)),
    )
    x[:, :12] = torch.arange(12.0) / 12
    x[:, 0] = 0  # no flag
    cells = x[:, :12].view(-1, 4, 3)
    moved = torch.cat([cells[:, [1, 0, 2, 3]].flatten(1), x[:, 12:]], 1)
    assert (encode(moved) - encode(x)).abs().max() > 1e-2
    _, present = encode.entities(x)
    assert present.shape == (7, 5) and present.all()
    for layer in encode.maps[1:]:
        layer.places.weight.zero_()
    near(encode(moved), encode(x))


@torch.no_grad()
def test_data_without_grids_have_the_weights_of_published_models():
    torch.manual_seed(0)
    encode = EntityEncoder(LAYOUT, 32)
    torch.manual_seed(0)
    expected = [torch.nn.Linear(size, 32) for size in (3, 3, 5)]
    for number, linear in enumerate(expected):
        assert torch.equal(encode.state_dict()[f"maps.{number}.0.weight"], linear.weight)
    names = {name.split(".")[0] for name in encode.state_dict()}
    assert names == {"maps", "layers", "out"}
    maps = [name for name in encode.state_dict() if name.startswith("maps")]
    assert maps == [f"maps.{i}.0.{weight}" for i in range(3) for weight in ("weight", "bias")]


def test_aimed_actions_are_learned_in_any_order_of_entities():
    """Of four landmarks the one whose number is largest: a model of one step, with the pointer, and
    in a cached session too.
    """
    spec = Spec(
        observation_dim=15,
        action_dim=1,
        horizon=1,
        num_actions=5,
        entity_schema=(("own", 3, 1), ("landmark", 3, 4)),
    )
    model = make_model(spec, head="pointer", condition_on="none", timesteps="none", embedding="mlp")
    assert model.head.entities == slice(1, 5)
    x = random_observations(256, present=1.0)[:, :15]
    expected = 1 + x[:, 3:].reshape(-1, 4, 3)[..., 1].argmax(1)
    steps = windows.Steps(
        x,
        expected[:, None].astype(np.float32),
        np.zeros(256, np.float32),
        np.arange(256),
        np.arange(256) + 1,
    )
    window = windows.cut_windows(steps, np.arange(256), np.zeros(256, int), 1)
    batch = windows.collate(window, text.encode(text.own_tokenizer(), [""]), np.zeros(256, int))
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    for _ in range(80):
        optimizer.zero_grad()
        model(batch)["nll"].backward()
        optimizer.step()
    policy, shuffled = Policy(model, 1, 1, None), x.copy()
    shuffled[:, 3:] = x[:, 3:].reshape(-1, 4, 3)[:, [2, 0, 3, 1]].reshape(-1, 12)
    assert (policy.begin([""] * 256, 1).act(x)[:, 0] == expected).mean() > 0.9
    moved = policy.act([History(o[None], np.zeros((0, 1)), np.zeros(0)) for o in shuffled])[:, 0]
    assert (
        np.array([0, 3, 1, 4, 2])[moved.astype(int)] == policy.begin([""] * 256, 1).act(x)[:, 0]
    ).all()


def test_vectors_are_all_numbers_but_presence_and_type():
    """Own: two vectors and a one-hot of two types; three landmarks of one vector each, after their
    presence.
    """
    assert vector_columns((("own", 6, 1), ("landmark", 3, 3)), 2) == [0, 2, 7, 10, 13]
    assert vector_columns((("own", 4, 1), ("mate", 5, 2))) == [0, 2, 5, 7, 10, 12]
    with pytest.raises(
        ValueError, match="plane: expected pairs of numbers in the mate block, got 3"
    ):
        vector_columns((("own", 4, 1), ("mate", 4, 2)))
