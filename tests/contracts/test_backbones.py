"""What a model uses of a backbone, of every registered one: what it reads, what has no effect, what is
trained and what comes back.
"""

import pytest
import torch

from decisionllm.backbones import hf_reference as library
from decisionllm.registry import build, discover
from tests.backbones.test_backbones import WHOLE, close, inputs, write
from tests.conftest import node

pytestmark = pytest.mark.numeric

# fewer blocks, the widths as they are registered; without dropout, which is drawn anew each time
SMALLER = {
    name: {"layers": 2} | ({"dropout": 0.0} if name == "dt" else {})
    for name in ("nano", "tiny", "small", "base", "dt")
}
# built from an installed package of 93 MB in tests/backbones/test_gguf.py, the summary of a text from a
# model of the tests in test_text_layers.py
ELSEWHERE = {"smollm2", "smollm2-summary", "pretrained-summary"}
NAMES = [name for name in discover()["backbone"] if name not in ELSEWHERE]
every_backbone = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder as people download it."""
    return str(write(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def make(folder):
    """Build a backbone by its name, with fewer blocks."""

    def make(name, seed=0, **options):
        own = {"folder": folder, **WHOLE} if name == "pretrained" else SMALLER[name]
        return build(node("backbone", name, **own, **options), seed)

    return make


@pytest.fixture(scope="module")
def reading(make):
    """Built once each, for tests that only read with it: name -> backbone."""
    return {name: make(name, tune="full").eval() for name in NAMES}


@every_backbone
def test_hidden_states_have_the_width_of_the_tokens(name, reading):
    model = reading[name]
    arguments = inputs(model.width)
    with torch.no_grad():
        hidden = model(*arguments)
        assert hidden.shape == arguments[0].shape and hidden.dtype == torch.float32
        assert hidden.isfinite().all() and torch.equal(hidden, model(*arguments))
        for reads in (slice(1, None, 3), slice(-1, None), slice(0, 2)):
            close(model(*arguments, output_positions=reads), hidden[:, reads])


@every_backbone
def test_our_forward_equals_the_librarys(name, reading):
    model = reading[name]
    assert model.layout is not None, "the plain forward would hide a mistake in ours"
    for lengths in ((6, 3, 1), (0, 0, 0)):
        arguments = inputs(model.width, lengths)
        with torch.no_grad():
            close(model(*arguments), library.plain(model, *arguments))


@every_backbone
def test_padding_and_other_rows_have_no_effect(name, reading):
    """Texts are padded by four more tokens, rows by two more, and one row is read alone."""
    model = reading[name]
    tokens, ids, mask, index = inputs(model.width)
    more_ids = torch.nn.functional.pad(ids, (0, 4), value=7)
    more_mask = torch.nn.functional.pad(mask, (0, 4), value=False)
    longer = torch.cat([tokens, 9 * torch.ones(4, 2, model.width)], 1)
    with torch.no_grad():
        expected = model(tokens, ids, mask, index)
        close(model(longer, more_ids, more_mask, index)[:, :-2], expected)
        close(model(tokens[[2]], ids[[1], :3], mask[[1], :3], index[:1]), expected[[2]])


@every_backbone
def test_what_comes_later_has_no_effect_and_the_text_has(name, reading):
    model = reading[name]
    tokens, ids, mask, index = inputs(model.width, (6, 6, 6))
    other = tokens.clone()
    other[:, 4:] = -other[:, 4:]
    with torch.no_grad():
        expected = model(tokens, ids, mask, index)
        close(model(other, ids, mask, index)[:, :4], expected[:, :4])
        assert not torch.allclose(model(tokens, ids.flip(1), mask, index), expected, atol=1e-4)


@every_backbone
def test_tokens_that_are_appended_are_read_as_in_one_forward(name, reading):
    model = reading[name]
    tokens, ids, mask, index = inputs(model.width, n=9)
    with torch.inference_mode():
        expected = model(tokens, ids, mask, index)
        cache = model.read_text(ids, mask).with_room(index, 9)
        filled = torch.zeros(4, dtype=torch.long)
        close(model.append(tokens[:, :4], cache, filled), expected[:, :4])
        close(model.append(tokens[:, 4:], cache, filled + 4), expected[:, 4:])


@every_backbone
def test_weights_depend_on_the_seed_and_come_back_from_their_state(name, make, reading):
    drawn = {"weights": "random"} if name == "pretrained" else {}
    torch.manual_seed(3)
    here = torch.rand(1)
    torch.manual_seed(3)
    one = make(name, 5, tune="full", **drawn).eval()
    assert torch.rand(1) == here, "the global generator was used"
    same, other = (make(name, seed, tune="full", **drawn).eval() for seed in (5, 6))
    arguments = inputs(one.width)
    with torch.no_grad():
        expected = one(*arguments)
        assert torch.equal(same(*arguments), expected)
        assert not torch.allclose(other(*arguments), expected, atol=1e-4)
        other.load_state_dict(one.state_dict())
        assert torch.equal(other(*arguments), expected)


@every_backbone
@pytest.mark.parametrize("tune", ["full", "lora", "frozen"])
def test_tune_says_which_weights_are_trained(name, tune, make):
    model = make(name, tune=tune)
    trained = {key for key, weight in model.named_parameters() if weight.requires_grad}
    adapters = {key for key, _ in model.named_parameters() if "lora_" in key}
    every = {key for key, _ in model.named_parameters()}
    assert bool(adapters) == (tune == "lora")
    assert trained == {"full": every, "lora": adapters, "frozen": set()}[tune]
    tokens, *texts = inputs(model.width)
    tokens.requires_grad_()
    model(tokens, *texts).square().sum().backward()
    assert tokens.grad.abs().max() > 0, "what stands below a frozen backbone is trained too"


@every_backbone
def test_an_unknown_tune_is_refused(name, make):
    with pytest.raises(ValueError, match="backbone.tune: expected one of lora, full, frozen, got"):
        make(name, tune="half")
