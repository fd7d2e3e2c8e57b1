"""Texts and numbers become tokens: nothing is lost on the way, and the order is R o a."""

import numpy as np
import pytest
import torch

from decisionllm.schema import Spec
from decisionllm.tokenizers import bins, text
from decisionllm.tokenizers.trajectory import TrajectoryTokenizer
from tests.conftest import near

WORDS = [
    "Push the ball to the goal at row 3, column 11.",
    "  two  spaces,\ttabs\nand lines\r\n",
    "naïve café, 東京, 🎯 and \x00 \x7f",
    "don't stop: 3.14159 %",
]


def test_the_tokenizer_is_made_from_the_corpus_byte_for_byte(tmp_path):
    from docs.tokenizer import build

    build((text.HERE / "corpus.txt").read_text(encoding="utf-8").splitlines()).save(
        str(tmp_path / "again.json"), pretty=False
    )
    assert (tmp_path / "again.json").read_bytes() == (text.HERE / "tokenizer.json").read_bytes()
    assert len(text.own_tokenizer()) == text.VOCABULARY


@pytest.mark.parametrize("words", WORDS)
def test_every_text_is_decoded_to_itself(words):
    own = text.own_tokenizer()
    assert own.decode(own(words)["input_ids"]) == words


def test_every_byte_can_be_encoded():
    """All bytes that UTF-8 can hold: of one, two, three and four."""
    words = "".join(
        map(chr, [*range(0x100), 0x7FF, 0x800, 0xFFFD, *range(0x10000, 0x110000, 0x8000)])
    )
    own = text.own_tokenizer()
    assert own.decode(own(words)["input_ids"]) == words


def test_tokens_begin_with_the_given_size():
    spec = Spec(observation_dim=3, action_dim=2, horizon=9, low=(-1.0, -1.0), high=(1.0, 1.0))
    tokenizer = TrajectoryTokenizer(spec, 64, scale=2.0)
    steps = (
        torch.ones(1, 4),
        torch.randn(1, 4, 3),
        torch.zeros(1, 4, 2),
        torch.zeros(1, 4, dtype=torch.long),
    )
    size = tokenizer(*steps).square().mean(-1).sqrt()
    near(size.detach(), np.full((1, 12), 2.0), 1e-3)


def test_digits_are_tokens_of_their_own():
    own = text.own_tokenizer()
    assert [own.decode([i]) for i in own("2048")["input_ids"]] == ["2", "0", "4", "8"]


def test_words_of_the_corpus_are_few_tokens():
    own = text.own_tokenizer()
    assert [own.decode([i]) for i in own(" the ball to the goal")["input_ids"]] == [
        " the",
        " ball",
        " to",
        " the",
        " goal",
    ]


def test_texts_are_padded_on_the_right():
    own = text.own_tokenizer()
    texts = ["goal", "", "Walk to the goal"]
    ids, mask = text.encode(own, texts)
    assert mask.sum(1).tolist() == [len(own(words)["input_ids"]) for words in texts]
    assert mask.int().diff(dim=1).max() <= 0  # never from padding to what is real
    assert (ids[~mask] == 0).all()
    assert [own.decode(row[real]) for row, real in zip(ids, mask, strict=True)] == texts


def test_a_team_text_has_every_sentence_once():
    one = "A team of 2. At most 8 steps. Role: scout."
    other = "A team of 2. At most 8 steps. Role: guard."
    assert (
        text.merge_team_texts([one, other])
        == text.merge_team_texts([other, one])
        == "A team of 2. At most 8 steps. Role: guard. Role: scout."
    )
    assert text.merge_team_texts([one, one]) == one and text.merge_team_texts(["", ""]) == ""
    assert text.merge_team_texts(["Go. Go. Stop."]) == "Go. Go. Stop.", (
        "a common text stays as it is"
    )


def test_empty_texts_have_no_tokens():
    for texts in ([""], ["", ""]):
        ids, mask = text.encode(text.own_tokenizer(), texts)
        assert ids.shape == mask.shape == (len(texts), 0)


@pytest.mark.parametrize("K", [2, 3, 33])
def test_a_binned_action_is_decoded_within_half_a_bin(K):
    actions = torch.linspace(-1, 1, 1001)[:, None]
    back = bins.decode(bins.encode(actions, K), K)
    assert (back - actions).abs().max() <= bins.bin_width(K) / 2 + 1e-6
    assert bins.encode(bins.decode(torch.arange(K), K), K).tolist() == list(range(K))


def test_both_bounds_are_bins_and_numbers_beyond_take_the_last():
    assert bins.encode(torch.tensor([-5.0, -1.0, -0.6, 0.0, 1.0, 5.0]), 5).tolist() == [
        0,
        0,
        1,
        2,
        4,
        4,
    ]
    assert bins.decode(torch.arange(5), 5).tolist() == [-1, -0.5, 0, 0.5, 1]


def numbers(B=2, T=3, S=2, A=1):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return [draw(B, T), draw(B, T, S), draw(B, T, A), torch.arange(T).expand(B, T)]


SPEC = Spec(observation_dim=2, action_dim=1, horizon=10, low=(-1.0,), high=(1.0,))


def changed_tokens(tokenizer, i):
    """Return which tokens change when the i-th input changes at the step of index 1."""
    before, after = numbers(), numbers()
    after[i] = after[i].clone()
    after[i][:, 1] += 1
    with torch.no_grad():
        return (tokenizer(*before) != tokenizer(*after)).any(-1).any(0).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("embedding", ["linear", "mlp", "waves"])
@pytest.mark.parametrize("returns", [True, False])
def test_the_order_is_return_observation_action(embedding, returns):
    tokenizer = TrajectoryTokenizer(SPEC, 8, embedding=embedding, return_conditioned=returns)
    assert [changed_tokens(tokenizer, i) for i in range(4)] == (
        [[3], [4], [5], [3, 4, 5]] if returns else [[], [2], [3], [2, 3]]
    )
    observations = {token for step in range(3) for token in [3 * step + 1 if returns else 2 * step]}
    assert (
        set(range(len(numbers()[0][0]) * tokenizer.tokens)[tokenizer.output_positions])
        == observations
    )


def test_without_timesteps_the_time_has_no_effect():
    assert changed_tokens(TrajectoryTokenizer(SPEC, 8, timesteps="none"), 3) == []


def test_mlp_is_not_a_linear_map():
    """Without the norm and the timesteps, 0, x and 2x lie on a line for `linear` alone."""
    for embedding, straight in (("linear", True), ("mlp", False), ("waves", False)):
        tokenizer = TrajectoryTokenizer(SPEC, 8, embedding=embedding, timesteps="none")
        tokenizer.norm = torch.nn.Identity()
        inputs = numbers()
        none, once, twice = (
            tokenizer(*(k * part for part in inputs[:3]), inputs[3]) for k in (0, 1, 2)
        )
        assert torch.allclose(twice - once, once - none, atol=1e-5) == straight


def test_a_discrete_action_has_a_vector_of_its_own():
    spec = Spec(observation_dim=2, action_dim=1, horizon=10, num_actions=3)
    tokenizer = TrajectoryTokenizer(spec, 8, timesteps="none")
    R, o, _, t = numbers(T=4)
    tokens = tokenizer(R, o, torch.tensor([0.0, 1, 2, 1])[None, :, None].expand(2, 4, 1), t)[
        0, 2::3
    ]
    assert torch.equal(tokens[1], tokens[3])
    assert not any(torch.allclose(tokens[i], tokens[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_unknown_choices_are_refused_by_name():
    with pytest.raises(
        ValueError, match="embedding: expected one of linear, mlp, waves, got 'cnn'"
    ):
        TrajectoryTokenizer(SPEC, 8, embedding="cnn")
    with pytest.raises(ValueError, match="timesteps: expected one of learned, none, got 'sine'"):
        TrajectoryTokenizer(SPEC, 8, timesteps="sine")
