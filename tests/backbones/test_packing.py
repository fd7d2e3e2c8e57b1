"""Rows of tokens without their padding."""

import torch

from decisionllm.backbones.packing import PackedTokens

REAL = torch.tensor([[True, True, False], [True, True, True]])
NUMBERS = torch.arange(6.0).reshape(2, 3, 1)


def test_real_tokens_lie_side_by_side_those_at_output_positions_first():
    tokens = PackedTokens(REAL, slice(1, 2))
    packed = tokens.pack(NUMBERS)
    assert packed.flatten().tolist() == [1, 4, 0, 3, 5]
    assert packed[:, tokens.outputs].flatten().tolist() == [1, 4]
    assert tokens.unpack_outputs(packed[:, tokens.outputs]).tolist() == [[[1]], [[4]]]


def test_one_row_of_positions_stands_for_all():
    packed = PackedTokens(REAL, slice(0, 1)).pack(torch.tensor([[7, 8, 9]]))
    assert packed.tolist() == [[7, 7, 8, 8, 9]]


def test_heads_return_to_their_rows():
    tokens = PackedTokens(REAL, slice(1, 2))
    heads = tokens.pack(NUMBERS)[:, None]  # (1, H, N, d), one head
    rows = tokens.rows(heads)
    assert rows.shape == (2, 1, 3, 1)
    assert rows[:, 0, :, 0][REAL].tolist() == [0, 1, 3, 4, 5]
    assert tokens.output_rows(heads[:, :, tokens.outputs]).tolist() == [[[[1]]], [[[4]]]]


def test_a_token_has_the_gradient_of_its_place():
    numbers = NUMBERS.clone().requires_grad_()
    tokens = PackedTokens(REAL, slice(0, 1))
    rows = tokens.rows(tokens.pack(numbers)[:, None])[:, 0]
    (rows * torch.arange(6.0).reshape(2, 3, 1) * REAL[..., None]).sum().backward()
    assert numbers.grad[..., 0].tolist() == [[0, 1, 0], [3, 4, 5]]
