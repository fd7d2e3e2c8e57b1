"""Features that are kept: a bounded table, a bounded number of files."""

import torch

from decisionllm.backbones import forward
from decisionllm.backbones.feature_cache import FeatureTable
from decisionllm.tokenizers.text import pad_ids


def reader(folder, seen):
    """Features of a token are its id twice; the texts that are read are noted."""

    def read(texts):
        seen.extend(texts)
        return [torch.tensor(text, dtype=torch.float32)[:, None].expand(-1, 2) for text in texts]

    return FeatureTable(read, size=2, dtype=torch.float32, folder=folder)


def test_rows_stand_for_features_and_a_text_is_read_once(tmp_path):
    seen = []
    features = reader(tmp_path / "f", seen)
    for texts in ([(7,), (5, 6)], [(7,), (8, 9, 10)]):
        ids, mask = pad_ids(texts)
        assert torch.equal(features[features.rows(ids, mask)][..., 0].long(), ids)
    assert seen == [(7,), (5, 6), (8, 9, 10)]


def test_texts_of_one_length_are_read_together(tmp_path, monkeypatch):
    monkeypatch.setattr("decisionllm.backbones.feature_cache.AT_ONCE", 2)
    features = reader(tmp_path / "f", [])
    read = features.read
    forwards = []
    monkeypatch.setattr(features, "read", lambda texts: forwards.append([*texts]) or read(texts))
    ids, mask = pad_ids([(1, 2, 3), (4,), (5, 6, 7), (8,)])
    assert torch.equal(features[features.rows(ids, mask)][..., 0].long(), ids)
    assert forwards == [[(4,), (8,)], [(1, 2, 3), (5, 6, 7)]]


def test_a_file_that_is_not_whole_is_read_again(tmp_path):
    seen = []
    ids, mask = pad_ids([(5, 6)])
    reader(tmp_path / "f", seen).rows(ids, mask)
    (file,) = (tmp_path / "f").iterdir()
    file.write_bytes(file.read_bytes()[:-4])
    features = reader(tmp_path / "f", seen)
    assert torch.equal(features[features.rows(ids, mask)][..., 0].long(), ids)
    assert seen == [(5, 6), (5, 6)]


def test_too_many_texts_are_no_longer_written_but_read(tmp_path, monkeypatch):
    monkeypatch.setattr("decisionllm.backbones.feature_cache.MOST_FILES", 2)
    seen, texts = [], [(3,), (4,), (1, 2)]
    reader(tmp_path / "f", seen).rows(*pad_ids(texts))
    assert len(list((tmp_path / "f").iterdir())) == 2
    again = reader(tmp_path / "f", seen)
    ids, mask = pad_ids(texts)
    assert torch.equal(again[again.rows(ids, mask)][..., 0].long(), ids)
    assert seen == [*texts, (1, 2)]


def test_a_backbone_forgets_texts_beyond_a_number(monkeypatch, tmp_path):
    from decisionllm.backbones.build import qwen2

    monkeypatch.setattr(forward, "MOST_TEXTS", 3)
    backbone = qwen2(0, width=16, layers=1, heads=2, kv_heads=1, inner=16)
    seen = []
    monkeypatch.setattr(backbone, "features", Counted(backbone, reader(tmp_path / "f", seen)))
    for texts in (["a", "b"], ["b", "c"], ["d", "a"]):
        ids, _ = backbone.encode(texts)
        assert torch.equal(
            backbone.features.table[ids][..., 0].long(),
            pad_ids([backbone.features.ids(t) for t in texts])[0],
        )
    assert len(backbone.encoded) == 2, "the three texts before were forgotten"
    assert backbone.features.table.used == 1 + sum(
        len(backbone.features.ids(t)) for t in ("d", "a")
    )


class Counted:
    """A text encoder whose features are kept in this table."""

    def __init__(self, backbone, features):
        self.tokenizer = backbone.tokenizer
        self.table = features
        self.rows = features.rows

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_texts_first_read_while_acting_are_read_further_in_training(tmp_path):
    """A table of inference mode could not grow outside of it; embeddings of it have no gradient."""
    features = reader(tmp_path / "f", [])
    with torch.inference_mode():
        features.forget()
        features.rows(*pad_ids([(5, 6)]))
    ids, mask = pad_ids([(5, 6), (7, 8, 9)])
    actual = features[features.rows(ids, mask)]
    assert torch.equal(actual[..., 0].long(), ids)
    weight = torch.ones(2, requires_grad=True)
    (actual @ weight).sum().backward()
    assert weight.grad is not None
