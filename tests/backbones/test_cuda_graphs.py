"""Training by CUDA graphs: the same hidden states and gradients as without."""

import pytest
import torch

from decisionllm.backbones.build import pretrained
from decisionllm.backbones.cuda_graphs import TEXTS, WORDS, pad_texts
from tests.backbones.test_backbones import write
from tests.conftest import near

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
LAYOUTS = {
    "every block": {"text_layers": 0, "layers": 0},
    "cut": {"text_layers": 2, "layers": 4},
    "cut, with a summary": {"text_layers": 2, "layers": 4, "text_summary": 3},
}
SHORT, LONG = (
    ["Stay.", "Walk to row 2."],
    ["Walk to row 2, then to row 3, and stay there.", "Stay."],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder, which no test changes."""
    return write(tmp_path_factory.mktemp("model"), num_hidden_layers=6)


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def backbone(request, folder):
    made = pretrained(0, folder=str(folder), lora_rank=4, **request.param)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_B" in name:  # it begins as zero, which would hide mistakes
                weight.normal_(0, 0.1)
    return made.train()


def batch(backbone, texts, seed, device):
    """Six rows of three tokens that have gradients, and the texts they stand after."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(6, 3, backbone.width, generator=generator).to(device).requires_grad_()
    ids, mask = (x.to(device) for x in backbone.encode(texts))
    return tokens, ids, mask, torch.tensor([0, 1, 1, 0, 1, 0], device=device)


def loss(hidden):
    """Of weights that differ, since the norm makes a sum of squares the same for all states."""
    weights = torch.linspace(-1, 1, hidden.numel(), device=hidden.device)
    return (hidden * weights.view(hidden.shape).roll(5, -1).sin()).sum()


def alike(actual, expected):
    """The same but for the rounding of a GPU, whose products of other shapes add in another order."""
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def gradients(backbone):
    actual = [
        weight.grad.clone()
        for weight in backbone.parameters()
        if weight.requires_grad and weight.grad is not None
    ]
    backbone.zero_grad()
    return actual


def summed_gradients(backbone, arguments):
    """Of the loss of several batches, all of which are read before the one backward pass."""
    sum(loss(backbone(*each)) for each in arguments).backward()
    return gradients(backbone)


def test_texts_and_tokens_that_pad_a_batch_change_nothing(backbone):
    tokens, ids, mask, index = batch(backbone, LONG, 0, "cpu")
    states = backbone.embed(ids)
    more, real = pad_texts(states, mask)
    assert more.shape[:2] == real.shape
    assert (real.shape[0] % TEXTS, real.shape[1] % WORDS) == (0, 0)
    assert real.sum() == mask.sum()
    every = slice(None)
    plain = backbone.read_rows(tokens, states, mask, index, every)
    near(backbone.read_rows(tokens, more, real, index, every).detach(), plain.detach())


@needs_gpu
def test_recorded_steps_have_the_states_and_gradients_of_plain_ones(backbone):
    backbone.cuda()
    arguments = [
        batch(backbone, texts, seed, "cuda") for seed, texts in enumerate([LONG, SHORT, LONG, LONG])
    ]
    expected = []
    for each in arguments:
        hidden = backbone(*each)
        loss(hidden).backward()
        expected.append((hidden.detach(), each[0].grad.clone(), *gradients(backbone)))
        each[0].grad = None
    backbone.record()
    for each, plain in zip(arguments, expected, strict=True):
        hidden = backbone(*each)
        loss(hidden).backward()
        actual = hidden.detach(), each[0].grad, *gradients(backbone)
        for mine, theirs in zip(actual, plain, strict=True):
            alike(mine, theirs)
    assert len(backbone.reader.graphs) == 2  # one for each length of the texts


@needs_gpu
def test_gradients_of_recorded_micro_batches_add_up(backbone):
    backbone.cuda()
    arguments = [batch(backbone, LONG, seed, "cuda") for seed in range(3)]
    expected = summed_gradients(backbone, arguments)
    backbone.record()
    for each in arguments:
        loss(backbone(*each)).backward()
    for mine, theirs in zip(gradients(backbone), expected, strict=True):
        alike(mine, theirs)


@needs_gpu
def test_a_second_call_before_the_backward_pass_leaves_the_first_as_it_is(backbone):
    backbone.cuda()
    arguments = [batch(backbone, LONG, seed, "cuda") for seed in range(2)]
    expected = summed_gradients(backbone, arguments)
    backbone.record()
    for mine, theirs in zip(summed_gradients(backbone, arguments), expected, strict=True):
        alike(mine, theirs)


@needs_gpu
def test_a_weight_that_was_stepped_is_read_by_the_next_recorded_step(backbone):
    backbone.cuda()
    each = batch(backbone, LONG, 0, "cuda")
    backbone.record()
    hidden = backbone(*each)
    before = hidden.detach().clone()
    loss(hidden).backward()
    with torch.no_grad():
        for weight in backbone.parameters():
            if weight.requires_grad:
                weight.mul_(2)
    after = backbone(*each).detach()
    tokens, ids, *others = each
    plain = backbone.read_rows(tokens, backbone.embed(ids), *others, slice(None))
    alike(after, plain)
    assert not torch.equal(before, after)
