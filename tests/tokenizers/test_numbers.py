"""Numbers in texts: which are found, where their token stands, what it holds."""

import pytest
import torch

from decisionllm.tokenizers import numbers, text


@pytest.mark.parametrize("value", [0.0, 1.0, -1.5, 12000.0, 3e8, -3e8, 0.001])
def test_a_token_holds_its_value(value):
    assert numbers.token(value) < 0
    assert numbers.values(torch.tensor([numbers.token(value), 7])).tolist() == [torch.tensor(value).item(), 0.0]


@pytest.mark.parametrize(
    "words, found",
    [
        ("row 1, column 12", [1, 12]), ("x = 1.0, y = -2.5.", [1.0, -2.5]), ("budget 12,000 units", [12000]),
        ("Maze2D, 3rd", []), ("", []), ("v1.5 and 7", [7]),
    ],
)  # fmt: skip
def test_numbers_are_found(words, found):
    ids, mask = text.encode(text.own_tokenizer(), [words], with_numbers=True)
    assert numbers.values(ids)[(ids < 0) & mask].tolist() == found


def test_a_number_token_follows_the_digits():
    own = text.own_tokenizer()
    plain, _ = text.encode(own, ["row 12, go"])
    ids, mask = text.encode(own, ["row 12, go", "go"], with_numbers=True)
    at = own("row 12")["input_ids"]
    assert ids[0].tolist() == [*at, numbers.token(12), *plain[0, len(at) :].tolist()]
    assert mask.sum(1).tolist() == [plain.shape[1] + 1, len(own("go")["input_ids"])], (
        "a text without numbers has its words alone"
    )


def test_a_token_of_several_digits_has_its_number_behind_it():
    assert numbers.insert([5, 6, 7], [(0, 2), (2, 5), (5, 6)], "a 123.") == [5, 6, numbers.token(123), 7]


def test_the_embedding_is_a_function_of_the_value():
    embed = numbers.NumberEmbedding(8)
    out = embed(torch.tensor([2.0, 2.0, -2.0, 2.1, 1e6]))
    assert out.shape == (5, 8) and out.isfinite().all()
    assert (
        (out[0] - out[1]).abs().max() < 1e-5 and (out[0] - out[2]).abs().max() > 1e-3 and (out[0] - out[3]).abs().max() > 1e-3
    )
    features = []
    embed.out[0].register_forward_pre_hook(lambda module, given: features.append(given[0]))
    embed(torch.tensor(0.0))
    assert features[0].tolist() == [0.0] * 10 + [1.0] * 9, "0 has phase 0: sines are 0, cosines 1"
