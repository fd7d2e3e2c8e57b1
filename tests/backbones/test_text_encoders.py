"""Text encoders: features of a frozen language model for each token, read once, kept on disk."""

import json

import numpy as np
import pytest
import torch

from decisionllm import hardware
from decisionllm.backbones.build import fingerprint
from decisionllm.backbones.text_encoders import FrozenFeatures
from decisionllm.policy import loading
from decisionllm.runs import directory
from decisionllm.schema import History, Spec
from decisionllm.tokenizers import text
from tests.backbones.test_backbones import small_backbone, write
from tests.conftest import LOOP, NANO, command, near

pytestmark = [pytest.mark.numeric, pytest.mark.slow]

TEXTS = ["Walk to row 2.", "Stay.", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder, which no test changes."""
    return write(tmp_path_factory.mktemp("encoder"), num_hidden_layers=5)


def reader(folder, **options):
    torch.manual_seed(1)
    return FrozenFeatures(32, 0, folder=str(folder), **{"layer": 1} | options)


def rows_of(features, texts=TEXTS):
    backbone = small_backbone("qwen2")
    backbone.features, backbone.encoded = features, {}
    return backbone.encode(texts)


# of five blocks, three are built for the first two layers
@pytest.mark.parametrize("layer", [1, 3, 4])
def test_every_token_of_a_text_has_its_features(layer, folder, tmp_path):
    from transformers import AutoModel

    features = reader(folder, layer=layer)
    rows, mask = rows_of(features)
    ids = features.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    expected = AutoModel.from_pretrained(folder)(
        torch.tensor([ids]), output_hidden_states=True
    ).hidden_states[layer][0]
    assert mask.sum(1).tolist() == [len(ids), len(features.tokenizer(TEXTS[1])["input_ids"]), 0]
    near(features.table.table[rows[0][mask[0]]].float(), expected.detach(), 1e-2)  # bfloat16
    assert not rows[~mask].any() and not features.table.table[0].any(), (
        "padding is row 0, which is zeros"
    )


def test_features_are_read_once_and_kept_on_disk(folder, tmp_path):
    first, second = reader(folder), reader(folder)
    rows, mask = rows_of(first)
    files = sorted(first.table.folder.glob("*.safetensors"))
    assert len(files) == 2, "one file for each text that is not empty"
    for features in (first, second):
        features.encoder[0].model = None  # it can't read again
    again, _ = rows_of(first, TEXTS[::-1])
    assert torch.equal(again.flip(0)[:, : rows.shape[1]], rows)
    other, _ = rows_of(second)
    assert torch.equal(first.table.table[rows], second.table.table[other])


def test_weights_that_are_held_in_another_type_have_files_of_their_own(folder, monkeypatch):
    """They are the same numbers, whose products round in another way."""
    held = []
    for slow in (False, True):
        monkeypatch.setattr(hardware, "is_slow_dtype", lambda dtype, slow=slow: slow)
        held.append(reader(folder))
    narrow, wide = held
    assert narrow.digest == wide.digest
    assert narrow.table.folder != wide.table.folder


def test_another_layer_or_other_weights_have_files_of_their_own(folder, tmp_path):
    digests = {reader(folder, **o).digest for o in ({}, {"layer": 2}, {"weights": "random"})}
    assert len(digests) == 3


def test_features_are_standardised_on_the_tokens_of_training(folder, tmp_path):
    features = reader(folder)
    rows, mask = rows_of(features)
    features.fit(rows, mask)
    seen = []
    features.out[0].register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    features(rows)
    units = seen[0][mask]
    near(units.mean(0), np.zeros(32), 1e-4, scale=1)
    near(units.std(0), np.ones(32), 1e-4)


def test_an_encoder_may_be_bidirectional(tmp_path):
    features = reader(write(tmp_path, "Bert"))
    rows, mask = rows_of(features)
    assert features(rows).shape == (*mask.shape, 32)


def test_units_that_are_fitted_stay(folder):
    features = reader(folder)
    rows, mask = rows_of(features)
    features.fit(rows, mask)
    other, before = reader(folder), features.mean.clone()
    # as a run does that starts with the weights of another
    other.load_state_dict(features.state_dict())
    other.fit(*rows_of(other, ["Run to column 7."]))
    assert torch.equal(other.mean, before) and torch.equal(other.scale, features.scale)


def test_units_of_a_single_token_stay_finite(folder):
    features = reader(folder)
    rows, mask = rows_of(features, ["Stay"])
    features.fit(rows[:, :1], mask[:, :1])
    assert torch.isfinite(features(rows)).all()


def test_a_text_longer_than_the_encoder_reads_is_refused(tmp_path):
    features = reader(write(tmp_path, "Bert", max_position_embeddings=8))
    with pytest.raises(ValueError, match=r"text: expected at most 8 tokens, .* encoder, got \d+"):
        rows_of(features, ["Walk to row 2 and to column 7, and stay there."])


def test_a_layer_that_is_not_there_is_named(folder, tmp_path):
    with pytest.raises(
        ValueError, match=r"text_encoder.layer: expected 0 .. 5, the layers of this encoder, got 6"
    ):
        reader(folder, layer=6)


def test_the_encoder_belongs_to_the_fingerprint(folder, tmp_path):
    backbone = small_backbone("qwen2", tune="frozen")
    before = fingerprint(backbone)
    backbone.features = reader(folder)
    assert fingerprint(backbone) != before


def test_a_text_longer_than_the_positions_is_refused():
    backbone = small_backbone("gpt2")
    backbone.positions = 8
    with pytest.raises(
        ValueError,
        match="text: expected fewer than 8 tokens, the positions of this backbone, got 9",
    ):
        backbone.encode(["one two three four five six seven eight"])
    ids, mask = backbone.encode(["one two"])
    with pytest.raises(
        ValueError,
        match=f"at most 8 tokens, the positions of this backbone, got {ids.shape[1]} \\+ 7;",
    ):
        backbone(torch.zeros(1, 7, backbone.width), ids, mask, torch.zeros(1, dtype=torch.long))


def test_a_run_is_trained_saved_and_loaded_with_its_reader(folder, tmp_path):
    run = tmp_path / "run"
    reading = ["text_encoder=features", f"text_encoder.folder={folder}", "text_encoder.layer=1"]
    command("train", *NANO, *LOOP, *reading, "text=goal", f"run={run}")
    one, other = (loading.load(run) for _ in range(2))
    spec, rng = Spec.of(one.info["spec"]), np.random.default_rng(0)
    shape = rng.normal(size=(3, spec.observation_dim)).astype(np.float32)
    past = np.zeros((2, spec.action_dim), np.float32)
    history = History(shape, past, np.zeros(2, np.float32), task="Walk to row 7.")
    assert np.array_equal(one.act([history]), other.act([history]))
    session = one.begin([history.task], 10).restore([history])
    session.observe(shape[-1:])
    near(session.decide(), one.act([history]), 1e-4, scale=2)
    names = directory.read_file(run / "checkpoint" / "model.safetensors")
    assert "backbone.features.mean" in names
    assert not any("encoder" in name for name in names), "the frozen encoder is not saved"
    assert (
        json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["nll"]
        < 1e9
    )


def test_a_text_is_encoded_once_and_as_without_the_memory(monkeypatch):
    backbone, calls, encode = small_backbone("qwen2"), [], text.encode
    monkeypatch.setattr(
        text,
        "encode",
        lambda tokenizer, texts, **options: (
            calls.extend(texts) or encode(tokenizer, texts, **options)
        ),
    )
    texts = ["goal", "", "Walk to the goal"]
    for part in (texts, texts[:1], texts[1:2], texts[::-1]):
        for actual, reference in zip(
            backbone.encode(part), encode(text.own_tokenizer(), part), strict=True
        ):
            assert torch.equal(actual, reference) and actual.dtype == reference.dtype
    assert calls == ["goal", "Walk to the goal"]  # the empty text has no tokens


def test_a_text_is_read_alike_inside_and_outside_of_autocast(folder):
    outside, inside = reader(folder), reader(folder)
    # so that it does not find what the other one has read
    inside.table.folder = inside.table.folder.with_name("another")
    backbone = small_backbone("qwen2")
    for features, autocast in ((outside, False), (inside, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for text in TEXTS:  # one by one, so that the table grows
                backbone.features, backbone.encoded = features, {}
                backbone.encode([text])
    assert torch.equal(
        inside.table.table[: inside.table.used], outside.table.table[: outside.table.used]
    )


def test_a_text_that_no_training_step_read_is_validated_on(folder, tmp_path):
    """Eight training windows of one row read fewer texts than the held-out windows; the first
    validation reads the rest.
    """
    reading = [
        "text=goal",
        "text_encoder=features",
        f"text_encoder.folder={folder}",
        "text_encoder.layer=1",
    ]
    few = [
        "optim.batch_size=1",
        "steps=1",
        "data.held_out=0.5",
        "log.validation_batches=32",
        "optim.precision=bf16",
        "seed=2",
    ]
    assert command("train", *NANO, *LOOP, *reading, *few, f"run={tmp_path / 'run'}") == 0
    assert np.isfinite(
        json.loads((tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8"))["held_out_nll"]
    )


@pytest.mark.parametrize(
    "options",
    [
        ("text_encoder=features", "text_encoder.folder={folder}", "text_encoder.layer=1"),
        ("backbone=pretrained", "backbone.folder={folder}", "backbone.text_summary=2"),
    ],
    ids=["a text encoder", "a summary"],
)
def test_what_reads_texts_is_refused_where_there_is_none(folder, tmp_path, capsys, options):
    arguments = [option.format(folder=folder) for option in options]
    assert command("train", *LOOP, *arguments, "text=none", f"run={tmp_path / 'run'}") == 1
    assert "expected episodes with a task text for it to read, got none" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
