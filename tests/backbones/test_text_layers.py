"""A model cut into two: its lower blocks read a text once, as the whole model does; the blocks
above attend to these states.
"""

import json
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModel, Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from decisionllm.backbones import hf_reference as library
from decisionllm.backbones.build import fingerprint, name_weights, pretrained, qwen2
from decisionllm.backbones.text_encoders import attach_text_encoder
from decisionllm.backbones.text_layers import TRAINED_CUT, only_blocks, resolve_cut
from decisionllm.policy import loading
from decisionllm.schema import History
from tests.backbones.test_backbones import write
from tests.conftest import LOOP, command, near, node

pytestmark = pytest.mark.numeric

# the upper blocks attend to every word of a text, or to three tokens that sum it up
every_layout = pytest.mark.parametrize("text_summary", [0, 3])
TEXTS = ["Walk to row 2.", "Stay.", "Walk to row 2, then to row 3."]
LAYERS = 6


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """A model folder, which no test changes."""
    family = getattr(request, "param", "Qwen2")
    return write(tmp_path_factory.mktemp(family), family, num_hidden_layers=LAYERS)


# the blocks of Gemma 3 see four tokens, fewer than a text has, and all tokens in turn
every_family = pytest.mark.parametrize("folder", ["Qwen2", "Gemma3Text"], indirect=True)


def whole(folder):
    return pretrained(0, folder=str(folder), text_layers=0, layers=0, tune="frozen")


def cut(folder, **options):
    return pretrained(0, folder=str(folder), **{"text_layers": 2, "layers": 4} | options)


def batch(backbone, texts=TEXTS):
    """Five rows of three tokens, and the texts they stand after."""
    torch.manual_seed(3)
    tokens = torch.randn(5, 3, backbone.width)
    return tokens, *backbone.encode(texts), torch.tensor([0, 2, 1, 0, 2])


@every_family
def test_texts_have_the_hidden_states_of_the_whole_model(folder):
    model, ids, mask = whole(folder), *whole(folder).encode(TEXTS)
    expected = model.core(
        input_ids=ids, attention_mask=mask.long(), output_hidden_states=True, use_cache=False
    ).hidden_states
    backbone = cut(folder)
    rows, mask_again = backbone.encode(TEXTS)
    assert torch.equal(mask, mask_again)
    near(backbone.embed(rows)[mask], expected[2][mask].detach())


@every_family
@every_layout
def test_text_and_trajectory_are_read_by_the_upper_blocks_as_the_library_reads_them(
    folder, text_summary
):
    backbone = cut(folder, text_summary=text_summary)
    arguments = batch(backbone)
    near(backbone(*arguments).detach(), library.plain(backbone, *arguments).detach())


def test_upper_blocks_attend_to_the_kept_states_of_a_text(folder):
    """Their keys and values by the modules of the library, whose adapters have learned
    something.
    """
    backbone = cut(folder)
    with torch.no_grad():
        for name, weight in backbone.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    ids, mask = backbone.encode(["one two three four"])
    states = backbone.embed(ids)
    cos, sin = backbone.core.rotary_emb(states, torch.arange(ids.shape[1])[None])
    actual = backbone.read_text(ids, mask)
    for block, keys, values in zip(
        backbone.core.layers[2:], actual.keys, actual.values, strict=True
    ):
        attention, x = block.self_attn, block.input_layernorm(states)
        k, v = (
            project(x).view(1, ids.shape[1], -1, attention.head_dim)
            for project in (attention.k_proj, attention.v_proj)
        )
        k = k.transpose(1, 2)
        near(keys.detach(), apply_rotary_pos_emb(k, k, cos, sin)[1].detach())
        near(values.detach(), v.transpose(1, 2).detach())


@every_family
@every_layout
def test_attention_to_words_is_that_of_the_upper_blocks(folder, text_summary):
    backbone = cut(folder, text_summary=text_summary)
    tokens, ids, mask, index = batch(backbone)
    weights = library.attention_to_text(backbone, tokens, ids, mask, index)
    assert weights.shape == (2, 5, 3, ids.shape[1])
    assert (weights[:, ~mask[index][:, None].expand(-1, 3, -1)] == 0).all(), "padding has none"
    assert (weights.sum(-1) > 0).all() and (weights.sum(-1) < 1).all()


def test_a_summary_is_what_each_query_finds_among_the_words_of_its_text(folder):
    """By hand, text by text; one without words has none."""
    backbone = cut(folder, text_summary=3)
    summary = backbone.summary
    ids, mask = backbone.encode([*TEXTS, ""])
    states = backbone.embed(ids)
    tokens, real = summary(states, mask)
    shares = summary.shares(states, mask)
    assert real.tolist() == [[True] * 3] * 3 + [[False] * 3]
    for text in range(len(TEXTS)):
        words = summary.norm(states[text, mask[text]])
        for k in range(3):
            weight = torch.softmax(words @ summary.queries[k], 0)
            near(shares[text, k, mask[text]].detach(), weight.detach())
            near(tokens[text, k].detach(), (weight @ words @ summary.maps[k]).detach())
    assert not shares[:3][~mask[:3][:, None].expand(-1, 3, -1)].any(), "padding has none"


def test_a_text_is_read_once_and_found_on_disk(folder, monkeypatch):
    first = cut(folder)
    rows, _ = first.encode(TEXTS)
    again = cut(folder)
    monkeypatch.setattr(again.features.table, "read", None)  # a call would fail
    other, _ = again.encode(TEXTS[::-1])
    assert torch.equal(again.embed(other).flip(0), first.embed(rows))


def test_other_weights_or_another_cut_read_texts_anew(folder):
    digests = {
        cut(folder, **o).features.digest
        for o in ({}, {"text_layers": 1}, {"weights": "random"}, {"weights": "shuffled"})
    }
    assert len(digests) == 4


def test_another_config_of_the_same_weights_reads_texts_anew(folder, tmp_path):
    folder = shutil.copytree(folder, tmp_path / "model")
    first = cut(folder)
    rows, _ = first.encode(TEXTS)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps(config | {"rms_norm_eps": 0.5}), encoding="utf-8"
    )
    second = cut(folder)
    other, _ = second.encode(TEXTS)
    assert not torch.allclose(second.embed(other), first.embed(rows))
    assert fingerprint(second) == fingerprint(first), "that of runs of an earlier version"


def test_a_commit_of_the_hub_names_its_weights(folder):
    config = SimpleNamespace(_commit_hash="f00")
    assert name_weights("", "lab/model", config) == "lab/model@f00"
    assert name_weights("", "lab/model", SimpleNamespace()) == ""
    assert name_weights(str(folder), "", config) == "", "its files may change"


@pytest.mark.parametrize("name", ["layers.0.mlp.up_proj.weight", "layers.2.mlp.up_proj.weight"])
def test_the_fingerprint_is_of_the_blocks_that_read_texts_and_of_those_above(
    name, folder, tmp_path
):
    changed = shutil.copytree(folder, tmp_path / "model")
    weights = load_file(changed / "model.safetensors")
    weights[name][0, 0] += 1
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(cut(changed)) != fingerprint(cut(folder))


@every_family
def test_only_the_upper_blocks_have_adapters(folder):
    backbone = cut(folder)
    trained = {
        name.split("layers.")[1].split(".")[0]
        for name, weight in backbone.named_parameters()
        if weight.requires_grad
    }
    assert trained == {"2", "3"} and len(backbone.core.layers) == 4 and backbone.depth == 2


def test_adapters_change_what_is_read_of_a_text_but_not_what_is_kept(folder):
    backbone = cut(folder)
    arguments = batch(backbone)
    before, stored = backbone(*arguments), backbone.embed(arguments[1])
    with torch.no_grad():
        for name, weight in backbone.named_parameters():
            if "lora_B" in name:
                weight.add_(0.1)
    assert not torch.allclose(backbone(*arguments), before) and torch.equal(
        backbone.embed(arguments[1]), stored
    )
    near(backbone(*arguments).detach(), library.plain(backbone, *arguments).detach())


@every_family
@every_layout
def test_gradients_are_those_of_the_library(folder, text_summary):
    backbone = cut(folder, text_summary=text_summary)
    arguments = batch(backbone)
    # the norm behind the last block makes a sum of squares constant
    expected = torch.randn(5, 3, backbone.width)
    gradients = []
    for read in (backbone, partial(library.plain, backbone)):
        backbone.zero_grad()
        (read(*arguments) * expected).sum().backward()
        gradients.append(
            {
                name: weight.grad.clone()
                for name, weight in backbone.named_parameters()
                if weight.requires_grad
            }
        )
    for name, gradient in gradients[0].items():
        near(gradient, gradients[1][name])


@pytest.mark.parametrize(
    "arguments, tune, cut_into",
    [
        ((-1, -1), "lora", (12, 18)),
        ((-1, -1), "frozen", (12, 18)),
        ((0, 0), "lora", (0, 30)),
        ((-1, 0), "lora", (12, 30)),
        ((4, -1), "lora", (4, 18)),
        ((20, -1), "lora", (20, 21)),
        ((-1, -1), "full", (0, 30)),
    ],
)
def test_the_defaults_are_two_and_three_fifths(arguments, tune, cut_into):
    assert resolve_cut(core_of(30), *arguments, tune=tune, supported=True) == cut_into


@pytest.mark.parametrize(
    "blocks, arguments, cut_into",
    [
        (30, (0.4, 0.6), (12, 18)),
        (30, (0.5, 0.7), (15, 21)),
        (18, (0.5, 0.7), (9, 13)),
        (24, (0.5, 0.7), (12, 17)),
        (24, (0.4, 20), (10, 20)),
        (24, (10, 0.99), (10, 24)),
        (24, (-1, 0.5), (10, 12)),
        (24, (0.5, -1), (12, 15)),
        (24, (0.5, 0), (12, 24)),
        (24, (1.0, 12.0), (1, 12)),  # as the command line gives whole numbers
    ],
)
def test_a_share_is_of_the_blocks_of_the_model_rounded(blocks, arguments, cut_into):
    assert resolve_cut(core_of(blocks), *arguments, tune="lora", supported=True) == cut_into


def test_the_summary_of_smollm2_stays_where_it_was_measured():
    options = node("backbone", "smollm2-summary")
    shares = options["text_layers"], options["layers"]
    assert resolve_cut(core_of(30), *shares, tune="lora", supported=True) == (15, 21)
    assert node("backbone", "pretrained-summary").items() >= {
        ("text_layers", shares[0]),
        ("layers", shares[1]),
        ("text_summary", options["text_summary"]),
    }


@pytest.mark.parametrize(
    "arguments, cut_into", [((-1, -1), (12, 18)), ((0, -1), (0, 18)), ((-1, 15), (12, 15))]
)
def test_a_model_that_a_run_trained_is_cut_as_it_was(arguments, cut_into):
    core = core_of(18)
    setattr(core.config, TRAINED_CUT, 12)
    assert resolve_cut(core, *arguments, tune="lora", supported=True) == cut_into


def core_of(blocks):
    """As much of a transformers model as says how many blocks it has."""
    core = torch.nn.Module()
    core.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(blocks))
    core.config = Qwen2Config(num_hidden_layers=blocks)
    return core


def test_a_model_that_cannot_be_cut_is_whole_by_default():
    assert resolve_cut(core_of(4), -1, -1, tune="lora", supported=False) == (0, 4)
    for arguments in ((2, -1), (-1, 3)):
        with pytest.raises(
            ValueError,
            match=(
                "backbone.layers: expected 0 and 0, since the blocks of Module are not "
                "supported, got"
            ),
        ):
            resolve_cut(core_of(4), *arguments, tune="lora", supported=False)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"text_layers": 4},
            "expected text_layers below layers, and layers of at most 6, the blocks of this model, "
            "got 4 and 4",
        ),
        (
            {"text_layers": 0, "text_summary": 2},
            r"expected 0, since no block reads texts alone \(backbone.text_layers\), got 2",
        ),
        ({"text_summary": -1}, "backbone.text_summary: expected 0 or more, got -1"),
        ({"layers": 7}, "layers of at most 6, the blocks of this model, got 2 and 7"),
        ({"text_layers": 0.6, "layers": 0.5}, "text_layers below layers, .* got 4 and 3"),
        (
            {"layers": 0.01},
            "backbone.layers: expected a whole number of blocks, or a share between 0 and 1 of the "
            "6 blocks of this model that is at least one block, got 0.01",
        ),
        ({"layers": 1.5}, "backbone.layers: expected a whole number .*, got 1.5"),
        ({"text_layers": -0.4}, "backbone.text_layers: expected a whole number .*, got -0.4"),
        ({"layers": float("nan")}, "backbone.layers: expected a whole number .*, got nan"),
        (
            {"tune": "full"},
            "backbone.layers: expected 0 and 0, since tune=full trains every block, got 2 and 4",
        ),
        ({"tune": "full", "text_layers": 0.4}, "since tune=full trains every block, got 0.4 and 4"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(folder, options, message):
    with pytest.raises(ValueError, match=message):
        cut(folder, **options)


def test_what_stands_in_place_of_word_embeddings_is_refused(folder):
    encoder = {"_target_": "decisionllm.backbones.text_encoders.FrozenFeatures"}
    with pytest.raises(
        ValueError,
        match=(
            "backbone.text_layers: expected 0, since text_encoder=features stands in place of word"
        ),
    ):
        attach_text_encoder(cut(folder), encoder, 0)


def test_the_library_runs_some_blocks_within_a_statement(folder):
    core = whole(folder).core
    with only_blocks(core, slice(1, 3)):
        assert (len(core.layers), core.config.num_hidden_layers) == (2, 2)
    assert (len(core.layers), core.config.num_hidden_layers) == (LAYERS, LAYERS)


def test_a_small_model_of_its_own_is_not_cut():
    backbone = qwen2(0, width=32, layers=2, heads=2, kv_heads=1, inner=32)
    assert (backbone.text_layers, backbone.depth) == (0, 2)


def test_a_long_text_takes_the_positions_of_its_summary(tmp_path):
    folder = write(tmp_path, num_hidden_layers=LAYERS, max_position_embeddings=20)
    long = ["Walk to row 2, then to row 3."]
    words, summary = cut(folder), cut(folder, text_summary=3)
    ids, mask = words.encode(long)
    tokens = torch.randn(1, 21 - ids.shape[1], words.width)
    first = torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match="text and window: expected at most 20 tokens"):
        words(tokens, ids, mask, first)
    ids, mask = summary.encode(long)
    near(
        summary(tokens, ids, mask, first).detach(),
        library.plain(summary, tokens, ids, mask, first).detach(),
    )


@pytest.mark.slow
@every_layout
def test_a_run_is_trained_saved_and_loaded(folder, text_summary, tmp_path):
    run = tmp_path / "run"
    words = ["text=goal", "backbone=pretrained", f"backbone.folder={folder}"]
    words += [f"backbone.text_summary={text_summary}"]
    words += ["backbone.text_layers=0.5", "backbone.layers=5"]
    assert command("train", *LOOP, *words, f"run={run}") == 0
    policy = loading.load(run)
    backbone = policy.model.backbone
    assert (backbone.text_layers, backbone.depth) == (3, 2)
    assert policy.info["frozen"] == fingerprint(backbone)
    adapter = json.loads(
        (run / "checkpoint/adapter/adapter_config.json").read_text(encoding="utf-8")
    )
    assert adapter["target_modules"].startswith(r"(.*\.)?layers\.(3|4)\.")
    assert command("evaluate", f"run={run}", "episodes=2", "baselines=false") == 0
    # a text of fewer words than it has tokens in a summary
    seen = np.zeros((1, policy.model.spec.observation_dim), np.float32)
    alone = History(seen, np.zeros((0, policy.model.spec.action_dim)), np.zeros(0), task="Go")
    near(policy.begin(["Go"], horizon=5).act(seen), policy.act([alone]))


@every_family
@every_layout
def test_what_is_kept_of_a_text_acts_like_a_text_that_is_read_anew(folder, text_summary):
    """Steps one by one behind a cache of texts, one of them empty, against all at once."""
    backbone = cut(folder, text_summary=text_summary, tune="frozen")
    tokens, ids, mask, index = batch(backbone, [*TEXTS[:2], ""])
    with torch.inference_mode():
        expected = backbone(tokens, ids, mask, index)
        cache = backbone.read_text(ids, mask).with_room(index, tokens.shape[1])
        for k in range(tokens.shape[1]):
            actual = backbone.append(tokens[:, [k]], cache, torch.full((5,), k))
            near(actual[:, 0], expected[:, k])


# peft reads it
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_the_adapter_of_upper_blocks_is_loaded_on_the_whole_model(folder, tmp_path):
    words = ["backbone=pretrained", f"backbone.folder={folder}", "optim.lr=0.1", "optim.clip=0"]
    assert command("train", *LOOP, *words, f"run={tmp_path / 'run'}") == 0
    core = loading.load(tmp_path / "run").model.backbone.core
    adapted = PeftModel.from_pretrained(
        AutoModel.from_pretrained(folder), tmp_path / "run/checkpoint/adapter"
    ).eval()
    bare = AutoModel.from_pretrained(folder)
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        actual, before = (
            model(ids, output_hidden_states=True).hidden_states[4] for model in (adapted, bare)
        )
        near(core.norm(actual), core(ids).last_hidden_state)
    assert (actual - before).abs().max() > 0.01 * before.abs().max(), "the adapter changed nothing"
