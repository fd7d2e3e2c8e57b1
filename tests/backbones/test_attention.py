"""A text that is multiplied once for all its rows gives what a copy of it for each row gives, and
no such copy is made.
"""

from functools import partial

import pytest
import torch

from decisionllm.backbones import hf_reference as library
from decisionllm.backbones.attention import Grid, TextAttention, attend, attend_fused
from tests.backbones.test_backbones import small_backbone
from tests.conftest import BACKBONES, near

pytestmark = pytest.mark.numeric

L, N_NEW, WIDTH = 24, 3, 8  # tokens of a text, new tokens, head width
ROWS = {
    "one text": [0] * 6,
    "a text for each row": [0, 1, 2, 3, 4, 5],
    "a text for each row, in another order": [3, 0, 5, 1, 4, 2],
    "texts of one row and of four": [1, 0, 1, 2, 1, 1],
    "a few of many texts": [7, 0, 7, 3, 3, 7],
    "neighbours among many texts": [5, 4, 5, 6, 5, 4],
    "one text with most rows": [2] * 20 + [0, 1, 3, 4, 5],
    "a single row": [2],
}
HEADS = {
    "each head has keys": (2, 2),
    "two heads share keys": (4, 2),
    "all heads share keys": (4, 1),
}
by_rows = pytest.mark.parametrize("index", ROWS.values(), ids=ROWS.keys())


def drawn(index, heads, dtype, texts=8):
    """Queries, own keys and values, keys and values of the texts, and a bias that hides the end of
    most texts.
    """
    H, G = heads
    B, generator = len(index), torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    numbers = (
        draw(B, H, N_NEW, WIDTH),
        *(draw(B, G, N_NEW, WIDTH) for _ in "kv"),
        *(draw(texts, G, L, WIDTH) for _ in "kv"),
    )
    lengths = torch.tensor([L, 1, 0, 20, 7, L, 3, 11])[index]
    text = (torch.arange(L) < lengths[:, None])[:, None].expand(-1, N_NEW, -1)
    own = torch.ones(N_NEW, N_NEW, dtype=torch.bool).tril().expand(B, -1, -1)
    visible = torch.cat([text, own], 2)[:, None]
    return numbers, torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))


def results(mixed, numbers):
    """What came out, and the gradients of all numbers that went in."""
    expected = torch.linspace(-1, 1, mixed.numel(), dtype=mixed.dtype).view(mixed.shape)
    return mixed.detach(), *torch.autograd.grad((mixed * expected).sum(), numbers)


@by_rows
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)], ids=str
)
def test_grouped_rows_attend_as_with_a_copy_of_their_text(index, heads, dtype, tolerance):
    numbers, bias = drawn(index, heads, dtype)
    q, k, v, K, V = numbers
    index = torch.tensor(index)
    texts = TextAttention([K], [V], index)
    assert texts._groups_rows(q, K)
    actual = results(texts.attend(0, q, k, v, bias, 0.0), numbers)
    expected = results(
        attend(q, torch.cat([K[index], k], 2), torch.cat([V[index], v], 2), bias, 0.0), numbers
    )
    for ours, plain in zip(actual, expected, strict=True):
        near(ours.float(), plain.float(), tolerance)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_the_kernel_of_a_gpu_attends_as_the_plain_products(heads):
    index = ROWS["texts of one row and of four"]
    (q, k, v, _, _), bias = drawn(index, heads, torch.float64)
    of_own = bias[..., L:]
    expected = results(attend(q, k, v, of_own, 0.0), (q, k, v))
    for actual, right in zip(
        results(attend_fused(q, k, v, of_own, 0.0), (q, k, v)), expected, strict=True
    ):
        near(actual, right, 1e-10)


@pytest.mark.parametrize(
    "index",
    [ROWS["one text"], ROWS["texts of one row and of four"]],
    ids=["one text", "three texts"],
)
def test_no_key_or_value_of_a_text_is_kept_for_each_row(index):
    """For the backward pass, which needs all that was multiplied.

    A copy for each row would have more than B G L d numbers.
    """
    numbers, bias = drawn(index, (2, 2), torch.float32, texts=3)
    q, k, v, K, V = numbers
    stored = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: stored.append(x) or x, lambda x: x):
        TextAttention([K], [V], torch.tensor(index)).attend(0, q, k, v, bias, 0.0)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in stored}
    assert max(storages.values()) < 4 * len(index) * 2 * L * WIDTH
    assert K.untyped_storage().data_ptr() in storages


def test_long_windows_after_short_texts_copy_the_text():
    """With more than half as many queries as text tokens a copy is cheaper; see the comment
    there.
    """
    numbers, _ = drawn([0, 1], (4, 2), torch.float32)
    q, _, _, K, V = numbers  # six queries for each key head
    texts = TextAttention([K], [V], torch.tensor([0, 1]))
    assert (
        texts._groups_rows(q, K)
        and texts._groups_rows(q, K[:, :, :12])
        and not texts._groups_rows(q, K[:, :, :11])
    )


def test_the_places_of_a_grid():
    """Rows of the texts a, b, a, a: as in the docstring; and ten rows of one text beside two texts
    of one row each.
    """
    grid = Grid(torch.tensor([0, 1, 0, 0]), 2)
    assert (grid.width, grid.text, grid.place.tolist(), grid.row.tolist()) == (
        3,
        None,
        [0, 3, 1, 2],
        [0, 2, 3, 1, 0, 0],
    )
    uneven = Grid(torch.tensor([0] * 10 + [1, 2]), 3)
    assert uneven.width == 4 and uneven.text.tolist() == [0, 0, 0, 1, 2]
    assert uneven.place.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16]
    assert (
        Grid(torch.tensor([0, 0, 1, 1]), 2).in_order
        and not Grid(torch.tensor([0, 1, 0, 1]), 2).in_order
    )


def inputs(width, lengths, index, dtype):
    """Two tokens of each row, and texts of these lengths."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(len(index), 2, width, generator=generator, dtype=dtype)
    ids = torch.randint(900, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return tokens, ids, mask, torch.tensor(index)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("tune", ["full", "lora"])
@pytest.mark.parametrize(
    ("lengths", "index"),
    [((20,), [0] * 4), ((20, 20), [1, 0, 1, 1]), ((20, 7, 0, 12), [0, 2, 1, 0, 3, 0])],
    ids=["one text", "equal lengths", "unequal lengths"],
)
def test_a_backbone_reads_and_learns_long_texts_as_the_library_does(backbone, tune, lengths, index):
    """In double precision, in which the library still rounds some steps to single.

    With full tuning the texts' embeddings learn too.
    """
    model = small_backbone(backbone, tune=tune, lora_rank=4).double()
    arguments = inputs(model.width, lengths, index, torch.float64)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    actual = []
    for read in (model, partial(library.plain, model)):
        hidden = read(*arguments)
        loss = (
            hidden * torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
        ).sum()
        grads = torch.autograd.grad(
            loss, trained.values(), allow_unused=True, materialize_grads=True
        )
        actual.append([hidden.detach(), *grads])
    for name, ours, plain in zip(["hidden", *trained], *actual, strict=True):
        assert torch.isfinite(ours).all(), name
        near(ours, plain, 1e-4)


def test_dropout_keeps_the_mean_of_what_grouped_rows_attend_to():
    """The mean over 500 draws of two rows of a text is what comes out without dropout, within a
    tenth.
    """
    numbers, bias = drawn([0] * 2, (2, 2), torch.float32)
    q, k, v, K, V = (x.detach() for x in numbers)
    texts = TextAttention([K], [V], torch.tensor([0] * 2))
    draws = torch.stack([texts.attend(0, q, k, v, bias, 0.2) for _ in range(500)])
    near(draws.mean(0), texts.attend(0, q, k, v, bias, 0.0), 0.1)
    assert draws.std(0).min() > 0
