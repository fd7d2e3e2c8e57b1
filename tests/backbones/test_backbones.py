"""Our forward through the blocks equals the library's, with adapters, dropout and other families; what
every registered backbone must be able to do is in tests/contracts.
"""

import copy
import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from decisionllm import hardware
from decisionllm.backbones import hf_reference as library
from decisionllm.backbones.build import fingerprint, pretrained
from decisionllm.backbones.forward import Backbone
from decisionllm.backbones.layouts import _FrozenRMS, drop
from decisionllm.backbones.lora import _Packed, linear
from decisionllm.backbones.text_encoders import attach_text_encoder
from decisionllm.config import OptimOptions
from decisionllm.policy import loading
from decisionllm.registry import build
from decisionllm.runs.optimizer import make_optimizer
from decisionllm.schema import Spec
from decisionllm.tokenizers.text import own_tokenizer
from tests.conftest import (
    BACKBONES,
    LOOP,
    NANO,
    SMALL,
    backbone_node,
    command,
    damage,
    make_model,
    node,
)

pytestmark = pytest.mark.numeric

SPEC = Spec(observation_dim=2, action_dim=1, horizon=10, low=(-1.0,), high=(1.0,))
READS = slice(1, None, 3)  # the observation tokens of R o a R o a ...
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
FAMILIES = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Llama": {},
    "Mistral": {},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "Olmo": {},
    "StableLm": {},
    "Helium": {"head_dim": 8},  # positions turn neighbouring numbers
    "GPTBigCode": {"n_embd": 32, "n_layer": 2, "n_head": 2},  # one key head
    "OPT": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "Gemma3Text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 4,
        "sliding_window_pattern": 2,  # every second block sees all tokens
    },
    # a convolution, then attention
    "Lfm2": {"full_attn_idxs": [1], "block_ff_dim": 48, "initializer_range": 0.3},
}
UNDERSTOOD = {"Qwen2", "Qwen3", "Llama", "Mistral", "Olmo", "GPT2", "Gemma3Text"}
both = pytest.mark.parametrize("backbone", BACKBONES)


@pytest.fixture(scope="module")
def qwen2_folder(tmp_path_factory):
    """A model folder of Qwen2 in bfloat16, as hubs hold them, which no test changes."""
    return write(tmp_path_factory.mktemp("qwen2"), dtype=torch.bfloat16)


def small_backbone(backbone, **options):
    return make_model(SPEC, backbone=backbone, backbone_options=options).backbone


WHOLE = {"text_layers": 0, "layers": 0}  # all blocks read texts, which are then token ids


def write(folder, family="Qwen2", dtype=torch.float32, **more):
    """A model folder as people download it: random weights of a small model of this family, and a
    tokenizer.
    """
    import transformers

    sizes = FAMILIES.get(family, {}) | more
    if family != "GPT2":
        sizes = SIZES | sizes
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(vocab_size=len(own_tokenizer()), **sizes)
    transformers.AutoModel.from_config(config).to(dtype).save_pretrained(folder)
    own_tokenizer().save_pretrained(folder)
    return folder


def inputs(width, lengths=(6, 3, 1), index=(0, 2, 1, 0), n=7, seed=0):
    """Tokens of four rows, and texts of these lengths: (B, n, D), (U, L), (U, L), (B,)"""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(len(index), n, width, generator=generator)
    ids = torch.randint(900, (len(lengths), max(lengths)), generator=generator)
    return (
        tokens,
        ids,
        torch.arange(max(lengths)) < torch.tensor(lengths)[:, None],
        torch.tensor(index),
    )


def close(ours, plain, tolerance=2e-5):
    torch.testing.assert_close(
        ours, plain, rtol=0, atol=tolerance * max(1.0, plain.abs().max().item())
    )


def weights(module):
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


@both
@pytest.mark.parametrize("lengths", [(6, 3, 1), (4, 4, 4), (5, 0, 2), (0, 0, 0)], ids=str)
def test_our_forward_equals_the_librarys_with_adapters(backbone, lengths):
    model = small_backbone(backbone, tune="lora", lora_rank=4)
    assert model.layout is not None
    arguments = inputs(model.width, lengths)
    with torch.no_grad():
        close(model(*arguments), library.plain(model, *arguments))


@both
@pytest.mark.parametrize("tune", ["full", "lora", "frozen"])
def test_our_gradients_equal_the_librarys(backbone, tune):
    """In double precision: these adapters have gradients up to 1,000, whose single-precision
    rounding alone exceeds 1e-4 on some processors.
    """
    model = small_backbone(backbone, tune=tune, lora_rank=4).double()
    tokens, *texts = inputs(model.width)
    tokens = tokens.double()
    actual = []
    for read in (
        lambda x: model(x, *texts, output_positions=READS),
        lambda x: library.plain(model, x, *texts)[:, READS],
    ):
        x = tokens.clone().requires_grad_()
        model.zero_grad()
        hidden = read(x)
        (
            hidden * torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
        ).sum().backward()
        actual.append(
            {"tokens": x.grad}
            | {
                name: weight.grad
                for name, weight in model.named_parameters()
                if weight.requires_grad
            }
        )
    ours, plain = actual
    assert (len(ours) == 1) == (tune == "frozen") and ours["tokens"].abs().max() > 0
    for name, gradient in plain.items():
        close(ours[name], gradient, 1e-4)


@both
def test_a_shared_text_gives_the_same_as_a_text_per_row(backbone):
    model = small_backbone(backbone)
    tokens, ids, mask, index = inputs(model.width)
    for texts, each in ((3, index), (1, 0 * index)):
        with torch.no_grad():
            shared = model(tokens, ids[:texts], mask[:texts], each)
            close(shared, model(tokens, ids[each], mask[each], torch.arange(4)))


@both
def test_appended_tokens_give_the_same_as_one_forward(backbone):
    """Rows that are at different places, then all together: what padding wrote is overwritten."""
    model = small_backbone(backbone)
    tokens, *texts = inputs(model.width, n=9)
    with torch.inference_mode():
        expected = model(tokens, *texts)
        cache = model.read_text(*texts[:2]).with_room(texts[2], 9)
        filled = torch.tensor([0, 0, 0, 0])
        close(model.append(tokens[:, :3], cache, filled), expected[:, :3])
        some = torch.tensor([3, 1])
        close(model.append(tokens[some, 3:5], cache, filled[some] + 3, some), expected[some, 3:5])
        later = torch.tensor([3, 5, 3, 5])
        pieces = torch.stack([tokens[i, t : t + 4] for i, t in enumerate(later)])
        close(
            model.append(pieces, cache, later),
            torch.stack([expected[i, t : t + 4] for i, t in enumerate(later)]),
        )


@both
def test_appended_tokens_beyond_the_positions_are_refused(backbone):
    """Texts of at most six tokens, three tokens, and one more."""
    model = small_backbone(backbone)
    model.positions = 9
    tokens, *texts = inputs(model.width, n=4)
    with torch.inference_mode():
        cache = model.read_text(*texts[:2]).with_room(texts[2], 4)
        filled = torch.zeros(4, dtype=torch.long)
        model.append(tokens[:, :3], cache, filled)
        with pytest.raises(ValueError, match=r"at most 9 tokens, .*, got 9 \+ 1; take a shorter"):
            model.append(tokens[:, 3:], cache, filled + 3)


def test_rotations_that_change_in_a_longer_sequence_bound_what_our_forward_reads(tmp_path):
    """Longrope has other frequencies in a sequence of more than twelve tokens."""
    rotations = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 12,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    folder = str(write(tmp_path, "Llama", rope_parameters=rotations))
    model = pretrained(0, folder=folder, tune="frozen", **WHOLE).eval()
    within = inputs(model.width, (6, 3, 1), n=6)
    with torch.no_grad():
        close(model(*within), library.plain(model, *within))
    with pytest.raises(ValueError, match=r"at most 12 tokens, .* got 6 \+ 7"):
        model(*inputs(model.width, (6, 3, 1), n=7))


@pytest.mark.usefixtures("bfloat16_is_fast")
def test_appended_tokens_give_the_same_in_bfloat16(tmp_path):
    """There whole buffers are attended to, so that what is not yet filled must have no weight,
    whatever it holds.
    """
    model = pretrained(
        0, folder=str(write(tmp_path, "Llama")), dtype="bfloat16", tune="frozen", **WHOLE
    ).eval()
    tokens, *texts = inputs(model.width, n=9)
    with torch.inference_mode():
        expected = model(tokens, *texts)
        cache = model.read_text(*texts[:2]).with_room(texts[2], 9)
        for buffer in (*cache.keys, *cache.values):
            buffer.fill_(9.0)
        close(
            model.append(tokens[:, :4], cache, torch.zeros(4, dtype=torch.long)),
            expected[:, :4],
            5e-2,
        )
        close(model.append(tokens[:, 4:], cache, torch.full((4,), 4)), expected[:, 4:], 5e-2)


@pytest.mark.parametrize("text_layers", [0, 1])
def test_numbers_of_bfloat16_are_held_in_float32_where_that_is_faster(
    text_layers, tmp_path, monkeypatch
):
    """They are the same numbers: a run goes on, and acts, on another processor."""
    folder = str(write(tmp_path, "Llama"))

    def loaded(*, slow):
        monkeypatch.setattr(hardware, "is_slow_dtype", lambda dtype: slow)
        return pretrained(0, folder=folder, dtype="bfloat16", text_layers=text_layers, layers=2)

    narrow, wide = loaded(slow=False).eval(), loaded(slow=True).eval()
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert fingerprint(narrow) == fingerprint(wide)
    for name, weight in narrow.named_parameters():
        assert torch.equal(wide.get_parameter(name), weight.float())
    actual, expected = (
        model.read_text(*model.encode(["Walk north.", "Stop."])).keys[-1].float()
        for model in (wide, narrow)
    )
    close(actual, expected, 5e-2)


@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32], ids=str)
def test_the_gradient_of_a_frozen_rms_norm_is_that_of_double_precision(wide):
    """Within the rounding of bfloat16, 1/256; the gradients have a mean, which layer norm would
    subtract.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((5, 7, 64), (64,), (5, 7, 64))
    )
    gradient += weight
    actual = x.clone().requires_grad_()
    expected = x.double().requires_grad_()
    _FrozenRMS.apply(actual, weight.to(wide), 1e-5).backward(gradient)
    torch.nn.functional.rms_norm(expected, (64,), weight.double(), 1e-5).backward(gradient.double())
    close(actual.grad.double(), expected.grad, 1 / 256)


@pytest.mark.parametrize(
    ("backbone", "place"),
    [
        ("gpt2", "embd_pdrop"),
        ("gpt2", "attn_pdrop"),
        ("gpt2", "resid_pdrop"),
        ("qwen2", "attention_dropout"),
        ("gemma3", "attention_dropout"),
    ],
)
def test_dropout_is_where_the_library_has_it(backbone, place, monkeypatch):
    """In training, drawn in the same way, ours and the library's drop the same; in evaluation
    nothing is dropped.
    """
    from transformers import AutoModel

    monkeypatch.setattr(
        torch.nn.functional,
        "dropout",
        lambda x, p, training=True, inplace=False: drop(x, p) if training and p else x,
    )
    config = small_backbone(backbone).config
    setattr(config, place, 0.5)
    config._attn_implementation = "eager"
    model = Backbone(AutoModel.from_config(config), own_tokenizer, "full")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    arguments = inputs(model.width, (0, 0, 0))

    def passed(read):
        torch.manual_seed(0)
        with torch.no_grad():
            return read(*arguments)

    model.eval()
    quiet = passed(model)
    close(quiet, passed(partial(library.plain, model)))
    model.train()
    close(passed(model), passed(partial(library.plain, model)))
    assert not torch.allclose(passed(model), quiet, atol=1e-2)


def test_dropout_drops_its_share_and_keeps_the_mean():
    """A quarter of 40,000 ones, within five standard deviations; what is kept is scaled, and so are
    the gradients.
    """
    torch.manual_seed(0)
    x = torch.ones(400, 101)[:, 1:].requires_grad_()
    y = drop(x, 0.25)
    assert sorted(y.unique().tolist()) == pytest.approx([0, 4 / 3])
    assert abs((y == 0).sum() - 10_000) < 5 * (40_000 * 0.25 * 0.75) ** 0.5
    # everywhere
    assert (y == 0).float().mean(0).min() > 0.15 and (y == 0).float().mean(1).max() < 0.45
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    torch.manual_seed(0)
    assert torch.equal(drop(x, 0.25), y) and not torch.equal(drop(x, 0.25), y)
    assert torch.equal(drop(x, 0.0), x) and not drop(x, 1.0).any()


@pytest.mark.parametrize("packed", [False, True])
def test_fused_lora_equals_peft(packed):
    """Maps at once, of other widths and with biases; merged or switched off, they are called as
    they are.
    """
    model = small_backbone("qwen2", tune="lora", lora_rank=4)
    attention = model.core.layers[0].self_attn
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for layer in layers:
            layer.base_layer.bias.normal_()
    if packed:
        model.pack()
    assert all(layer.lora_B["default"].weight.abs().max() > 0 for layer in layers)

    def check():
        with torch.no_grad():
            for ours, layer in zip(linear(x, *layers), layers, strict=True):
                close(ours, layer(x))

    check()
    with_adapter = linear(x, attention.q_proj)[0]
    with model.model.disable_adapter():
        check()
        assert not torch.allclose(linear(x, attention.q_proj)[0], with_adapter, atol=1e-3)
    model.model.merge_adapter()
    check()
    close(linear(x, attention.q_proj)[0], with_adapter)


def test_packed_weights_follow_training_and_are_not_kept_twice(monkeypatch):
    """The same output as without packing, after a step of training too; gradients, copies and moved
    weights take the plain way.
    """
    model = small_backbone("qwen2", tune="lora").eval()
    calls, whole = [], _Packed.__call__
    monkeypatch.setattr(
        _Packed, "__call__", lambda packed, rows: calls.append(rows) or whole(packed, rows)
    )
    arguments = inputs(model.width)

    def check(model, times):
        calls.clear()
        expected = model(*arguments)
        assert not calls
        with torch.no_grad():
            close(model(*arguments), expected)
        assert bool(calls) == times

    check(model, False)
    with torch.inference_mode():
        model.pack()
    check(model, True)
    packed = model.core.layers[0].self_attn.q_proj.packed
    assert (
        packed.weight.data_ptr()
        == model.core.layers[0].self_attn.q_proj.base_layer.weight.data_ptr()
    )
    model(*arguments).square().sum().backward()
    make_optimizer(model, OptimOptions(lr=0.1, lr_backbone=0.1)).step()
    check(model, True)
    check(copy.deepcopy(model), False)
    with torch.no_grad():
        model.core.layers[0].self_attn.k_proj.base_layer.weight.mul_(2)
    check(model, True)
    check(model.double().float(), False)


def test_weights_that_are_packed_again_stay_where_they_are():
    """Recorded kernels read them there."""
    model = small_backbone("qwen2", tune="lora")
    model.pack()
    attention = model.core.layers[0].self_attn
    bases = [layer.base_layer for layer in (attention.q_proj, attention.k_proj)]
    before = [base.weight.data_ptr() for base in bases]
    model.pack()
    assert [base.weight.data_ptr() for base in bases] == before


@pytest.mark.parametrize("targets", ["q_proj,v_proj", "q_proj, v_proj"])
def test_only_the_named_maps_are_adapted(targets):
    model = build(node("backbone", "nano", layers=1, tune="lora", lora_targets=targets), 0)
    adapted = {
        name.split(".lora_")[0].rsplit(".", 1)[1]
        for name, _ in model.named_parameters()
        if "lora_" in name
    }
    assert adapted == {"q_proj", "v_proj"}


def test_adapters_without_a_rank_or_a_weight_are_refused_by_their_option():
    with pytest.raises(ValueError, match="backbone.lora_rank: expected 1 or more, got 0"):
        build(node("backbone", "nano", layers=1, tune="lora", lora_rank=0), 0)
    with pytest.raises(ValueError, match="backbone.lora_alpha: expected more than 0, got 0"):
        build(node("backbone", "nano", layers=1, tune="lora", lora_alpha=0), 0)


@pytest.mark.parametrize("cut", [WHOLE, {}], ids=["whole", "cut"])
def test_a_name_of_no_map_is_refused(cut, tmp_path):
    message = "backbone.lora_targets: no module 'v_prj'; did you mean v_proj\\?"
    with pytest.raises(ValueError, match=message):
        pretrained(0, folder=str(write(tmp_path)), lora_targets="q_proj, v_prj", **cut)


def test_maps_that_peft_refuses_are_named_with_their_option(tmp_path):
    folder = str(write(tmp_path, "Mamba"))
    with pytest.raises(ValueError, match=r"^backbone.lora_targets=all-linear: .*; name others"):
        pretrained(0, folder=folder)
    pretrained(0, folder=folder, lora_targets="in_proj")


def test_the_fingerprint_is_of_what_is_frozen():
    model = build(node("backbone", "nano", layers=1, tune="lora"), 0)
    before = fingerprint(model)
    with torch.no_grad():
        next(weight for name, weight in model.named_parameters() if "lora_B" in name).add_(1)
        assert fingerprint(model) == before
        next(weight for name, weight in model.named_parameters() if "lora_" not in name).view(-1)[
            0
        ] += 1
        assert fingerprint(model) != before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_any_family_is_loaded_from_its_folder(family, tmp_path):
    """Block by block or by the plain forward; a new adapter, and texts of other rows, change
    nothing.
    """
    model = pretrained(0, folder=str(write(tmp_path, family)), **WHOLE).eval()
    assert (model.layout is not None) == (family in UNDERSTOOD)
    bare = pretrained(0, folder=str(tmp_path), tune="frozen", **WHOLE).eval()
    tokens, ids, mask, index = inputs(model.width, (6, 3, 1))
    with torch.no_grad():
        every = library.plain(bare, tokens, ids, mask, index)
        close(model(tokens, ids, mask, index), every)
        close(bare(tokens[[2]], ids[[1], :3], mask[[1], :3], index[:1]), every[[2]])
    assert model.tokenizer("Walk 12")["input_ids"] == own_tokenizer()("Walk 12")["input_ids"]


@pytest.mark.usefixtures("bfloat16_is_fast")
@pytest.mark.parametrize("family", ["Llama", "Olmo", "Gemma3Text"])
def test_keys_have_the_type_of_their_values(family, tmp_path):
    """As a GPU wants; the rotary positions of Olmo are float32."""
    folder = str(write(tmp_path, family, dtype=torch.bfloat16))
    model = pretrained(0, folder=folder, dtype="bfloat16", tune="frozen", **WHOLE)
    texts = model.read_text(*inputs(model.width)[1:3])
    assert {x.dtype for x in (*texts.keys, *texts.values)} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "options"), [("Bert", {}), ("Gemma3Text", {"use_bidirectional_attention": True})]
)
def test_a_backbone_that_reads_later_tokens_is_refused(family, options, dtype, tmp_path):
    folder = str(write(tmp_path, family, **options))
    model = pretrained(0, folder=folder, dtype=dtype, tune="frozen")
    with pytest.raises(ValueError, match=f"expected a language model .*, got {family}.*text_enco"):
        attach_text_encoder(model, {"_target_": "none"}, 0)


def test_weights_are_of_the_folder_or_drawn_from_the_seed(qwen2_folder):
    from transformers import AutoModel

    saved = AutoModel.from_pretrained(qwen2_folder, dtype=torch.float32)
    stored, drawn, again, other = (
        pretrained(seed, folder=str(qwen2_folder), weights=source, tune="frozen", **WHOLE)
        for source, seed in (("pretrained", 0), ("random", 1), ("random", 1), ("random", 2))
    )
    assert all(
        torch.equal(weight, weights(saved)[name]) for name, weight in weights(stored.core).items()
    )
    assert weights(drawn).keys() == weights(stored).keys()
    assert len({fingerprint(model) for model in (stored, drawn, again, other)}) == 3
    assert fingerprint(drawn) == fingerprint(again)


@pytest.mark.usefixtures("bfloat16_is_fast")
@pytest.mark.parametrize("source", ["pretrained", "random"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_is_the_given_one(source, dtype, qwen2_folder):
    """Whatever the folder holds: hubs hold bfloat16."""
    folder = str(qwen2_folder)
    model = pretrained(0, folder=folder, weights=source, dtype=dtype, tune="frozen", **WHOLE).eval()
    assert {str(weight.dtype) for weight in model.parameters()} == {f"torch.{dtype}"}
    arguments = inputs(model.width)
    with torch.no_grad():
        close(model(*arguments).float(), library.plain(model, *arguments), 5e-2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {},
            ValueError,
            "backbone: expected either backbone.folder=<local folder> or backbone.hub_id=",
        ),
        ({"folder": "a", "hub_id": "b/c"}, ValueError, "expected either"),
        (
            {"folder": "nowhere"},
            FileNotFoundError,
            "expected a model.s config.json or a run.s run.json, found none at nowhere",
        ),
        (
            {"hub_id": "a/b"},
            OSError,
            r"backbone a/b: could not be loaded \(no copy in the cache, and no network or no such model; backbone.folder=... reads",
        ),
        (
            {"hub_id": "a/b", "weights": "some"},
            ValueError,
            "backbone.weights: expected one of pretrained, random, shuffled, got 'some'",
        ),
        (
            {"hub_id": "a/b", "dtype": "int3"},
            ValueError,
            "backbone.dtype: expected one of float32, bfloat16, float16, got 'int3'",
        ),
    ],
)
def test_a_model_that_cannot_be_loaded_is_one_clear_error(options, error, message):
    with pytest.raises(error, match=message) as raised:
        pretrained(0, **options)
    assert "\n" not in str(raised.value)


def test_quantised_weights_are_refused_before_they_are_read(tmp_path):
    """Also where the package that quantised them is not installed."""
    folder = write(tmp_path)
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    described["quantization_config"] = {"quant_method": "torchao", "quant_type": {}}
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    with pytest.raises(
        ValueError, match="expected weights that are not quantised, got those of torchao"
    ):
        pretrained(0, folder=str(folder))
    assert pretrained(0, folder=str(folder), weights="random").width == SIZES["hidden_size"]


@pytest.mark.parametrize("text_layers", [0, 1])
def test_a_tokenizer_with_more_tokens_than_the_model_has_is_refused(text_layers, tmp_path):
    """Tokens were added to it, and the word embeddings were not resized."""
    folder = write(tmp_path)
    tokenizer = own_tokenizer().__class__.from_pretrained(folder)
    tokenizer.add_tokens(["<goal>"])
    tokenizer.save_pretrained(folder)
    model = pretrained(0, folder=str(folder), text_layers=text_layers, layers=2)
    model.encode(["Walk north."])
    with pytest.raises(ValueError, match="expected token ids below 919, .* got 919; its tokenizer"):
        model.embed(model.encode(["Walk to <goal>."])[0])


@pytest.mark.slow
@pytest.mark.usefixtures("bfloat16_is_fast")
def test_the_backbone_of_a_run_can_be_loaded(tmp_path):
    assert command("train", *LOOP, *NANO, f"run={tmp_path}/a") == 0
    policy = loading.load(tmp_path / "a")
    loaded = pretrained(0, folder=str(tmp_path / "a"), tune="frozen", **WHOLE)
    drawn = build(node("backbone", "nano", **SMALL["qwen2"]), 7)
    ours, theirs, random = (
        dict(b.model.named_parameters()) for b in (loaded, policy.model.backbone, drawn)
    )
    assert (
        all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
        and ours.keys() == theirs.keys()
    )
    assert any(not torch.equal(weight, random[name]) for name, weight in ours.items())
    rounded = pretrained(0, folder=str(tmp_path / "a"), dtype="bfloat16", tune="frozen")
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded.core.rotary_emb.inv_freq, loaded.core.rotary_emb.inv_freq)
    words = (
        "backbone=pretrained",
        f"backbone.folder={tmp_path}/a",
        "backbone.lora_rank=2",
        f"run={tmp_path}/b",
    )
    assert command("train", *LOOP, *words) == 0
    adapted = loading.load(tmp_path / "b")
    assert adapted.model.backbone.tune == "lora" and fingerprint(
        adapted.model.backbone
    ) == fingerprint(pretrained(0, folder=str(tmp_path / "a"), lora_rank=2))
    for folder, options in (("b", {}), ("a", {"weights": "random"})):
        with pytest.raises(
            ValueError, match="expected weights=pretrained and a run with backbone.tune=full, got"
        ):
            pretrained(0, folder=str(tmp_path / folder), **options)
    damage(tmp_path / "a" / "checkpoint" / "model.safetensors")
    with pytest.raises(OSError, match="model.safetensors is damaged .*not those that were written"):
        pretrained(0, folder=str(tmp_path / "a"))
    (tmp_path / "a" / "checkpoint" / "model.safetensors").unlink()
    with pytest.raises(OSError, match="could not be loaded .is the run trained"):
        pretrained(0, folder=str(tmp_path / "a"))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("T5", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}),
        (
            "Gemma3",
            {
                "text_config": SIZES | {"head_dim": 8, "vocab_size": len(own_tokenizer())},
                "vision_config": SIZES | {"image_size": 28, "patch_size": 14},
                "mm_tokens_per_image": 4,
            },
        ),
    ],
)
def test_a_model_of_more_than_text_is_refused(family, options, tmp_path):
    folder = str(write(tmp_path, family, **options))
    with pytest.raises(ValueError, match=f"expected a decoder of text alone, .* got {family}Model"):
        pretrained(0, folder=folder)


def test_a_model_of_images_is_refused(tmp_path):
    folder = str(write(tmp_path, "ViT"))
    with pytest.raises(ValueError, match="expected a language model with word embeddings, got ViT"):
        pretrained(0, folder=folder)


def test_a_folder_that_lacks_weights_is_refused(tmp_path):
    """transformers would draw them at random, without the seed of the run."""
    file = write(tmp_path) / "model.safetensors"
    stored = {name: x for name, x in load_file(file).items() if "layers.1" not in name}
    save_file(stored, file, metadata={"format": "pt"})
    message = r"could not be loaded \(is the folder complete\?\): it lacks weights of Qwen2Model"
    with pytest.raises(OSError, match=message):
        pretrained(0, folder=str(tmp_path))


def test_an_incomplete_folder_says_so(tmp_path):
    (write(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"could not be loaded \(is the folder complete\?\)"):
        pretrained(0, folder=str(tmp_path))


def cut_off(file):
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])


def with_option(file, name, value):
    file.write_text(
        json.dumps(json.loads(file.read_text(encoding="utf-8")) | {name: value}), encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda at: cut_off(at / "model.safetensors"), "deserializing header"),
        (lambda at: with_option(at / "config.json", "hidden_size", 64), "have other sizes than"),
        (lambda at: with_option(at / "config.json", "num_hidden_layers", "two"), "num_hidden_la"),
        (lambda at: cut_off(at / "tokenizer.json"), "line 1|Unterminated|Expecting"),
        (lambda at: with_option(at / "config.json", "model_type", "new"), "names no model of this"),
        (lambda at: (at / "tokenizer.json").unlink(), "expected the files of a tokenizer"),
    ],
    ids=["weights", "sizes", "config", "tokenizer", "unknown model", "no tokenizer"],
)
def test_a_damaged_folder_is_named(tmp_path, spoil, why):
    spoil(write(tmp_path))
    with pytest.raises(OSError, match=rf"{tmp_path}: could not be loaded \(is the .*({why})"):
        pretrained(0, folder=str(tmp_path)).encode(["Go"])


def test_a_tokenizer_in_place_of_what_loads_it_is_refused():
    model = small_backbone("qwen2").model
    with pytest.raises(TypeError, match="expected a function that loads the tokenizer"):
        Backbone(model, own_tokenizer(), "full")


@both
@pytest.mark.parametrize("tune", ["full", "lora"])
def test_gradient_checkpointing_gives_the_same_bits_and_keeps_less(backbone, tune):
    actual = {}
    for enabled in (False, True):
        model = build(backbone_node(backbone, dropout=0.1, tune=tune), 0).train()
        model.checkpoint_gradients(enabled)
        arguments, stored = inputs(model.width, n=30), []
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, stored=stored: stored.append(x.nbytes) or x, lambda x: x
        ):
            out = model(*arguments, output_positions=READS)
        out.square().sum().backward()
        grads = {name: w.grad for name, w in model.named_parameters() if w.requires_grad}
        actual[enabled] = {"out": out.detach()} | grads, sum(stored)
    for name, value in actual[False][0].items():
        assert value is None or torch.equal(value, actual[True][0][name]), name
    assert actual[True][1] < 0.3 * actual[False][1]


def test_the_librarys_blocks_are_computed_again_too(tmp_path):
    model = pretrained(0, folder=str(write(tmp_path, "StableLm")), tune="full").train()
    assert model.layout is None
    grads = []
    for enabled in (False, True):
        model.checkpoint_gradients(enabled)
        assert model.core.layers[0].gradient_checkpointing == enabled
        model.zero_grad()
        model(*inputs(model.width)).square().sum().backward()
        grads.append([None if w.grad is None else w.grad.clone() for w in model.parameters()])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.usefixtures("bfloat16_is_fast")
# In Qwen3 autocast gives bfloat16 queries and keys to norms of float32 weights.
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("Qwen2", "bfloat16"),
        ("Qwen3", "float32"),
        ("Gemma3Text", "bfloat16"),
        ("Gemma3Text", "float32"),
    ],
)
def test_adapters_of_frozen_weights_are_float32(family, dtype, tmp_path):
    model = pretrained(0, folder=str(write(tmp_path, family)), dtype=dtype, **WHOLE).train()
    kinds = {weight.dtype for name, weight in model.named_parameters() if "lora_" not in name}
    adapters = [weight for name, weight in model.named_parameters() if "lora_" in name]
    assert kinds == {getattr(torch, dtype)} and all(
        w.dtype == torch.float32 and w.requires_grad for w in adapters
    )
    with torch.autocast("cpu", torch.bfloat16):
        model(*inputs(model.width)).float().square().sum().backward()
    assert all(w.grad.dtype == torch.float32 for w in adapters) and any(
        w.grad.any() for w in adapters
    )


def test_float16_is_refused_within_the_autocast_of_a_cpu(qwen2_folder):
    model = pretrained(0, folder=str(qwen2_folder), dtype="float16", tune="frozen", **WHOLE)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match="backbone.dtype: expected float32 or bfloat16.* float16;"),
    ):
        model(*inputs(model.width))


def test_a_model_that_is_trained_whole_is_float32(qwen2_folder):
    model = pretrained(0, folder=str(qwen2_folder), dtype="bfloat16", tune="full")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
