"""The attention of an action to its text: of the library's own forward, and drawn for each
different text.
"""

import numpy as np
import pytest
import torch

from decisionllm.eval import attention
from decisionllm.schema import Episode, Spec
from tests.backbones.test_backbones import write
from tests.conftest import make_policy, near
from tests.policy.test_policy import from_folder

SPEC = Spec(observation_dim=2, action_dim=1, horizon=50, low=(-1.0,), high=(1.0,))


def episode(task, first=0.0):
    rows = np.full((3, 2), first, np.float32)
    return Episode(rows, np.zeros((3, 1), np.float32), np.zeros(3, np.float32), task=task)


@pytest.mark.numeric
@pytest.mark.parametrize("backbone", ["qwen2", "gpt2"])
def test_attention_is_a_share_for_each_token_and_layer(backbone):
    policy = make_policy(SPEC, backbone=backbone)
    measured = attention.measure_attention(
        policy, [episode("Go north."), episode("Go north.", 1.0), episode("Stay here, please.")]
    )
    assert [len(words) for words, _ in measured] == [weights.shape[1] for _, weights in measured]
    assert ["".join(words) for words, _ in measured] == ["Go north.", "Stay here, please."]
    for _, weights in measured:
        assert weights.shape[0] == 2 and (weights > 0).all() and (weights.sum(1) < 1).all(), (
            "the rest is the trajectory's"
        )


def test_with_equal_keys_all_tokens_get_the_same():
    """R and o attend to L + 2 tokens; all scores are 0, so that each gets 1 / (L + 2)."""
    policy = make_policy(SPEC)
    with torch.no_grad():
        for name, weight in policy.model.backbone.named_parameters():
            if "k_proj" in name:
                weight.zero_()
    ((words, weights),) = attention.measure_attention(policy, [episode("Go north.")])
    near(weights, np.full((2, len(words)), 1 / (len(words) + 2)))


def test_the_library_reads_as_before_afterwards():
    policy = make_policy(SPEC)
    before = policy.model.backbone.core.config._attn_implementation
    attention.measure_attention(policy, [episode("Go north.")])
    assert policy.model.backbone.core.config._attn_implementation == before


def test_episodes_without_text_have_no_picture():
    assert attention.draw(make_policy(SPEC), [episode("")], "title") is None
    assert (
        attention.draw(make_policy(SPEC), [episode("Go north."), episode("")], "title") is not None
    )


@pytest.mark.parametrize("family", ["Mamba", "Rwkv"])
def test_a_backbone_without_attention_has_no_picture(family, tmp_path):
    policy = from_folder(write(tmp_path, family), tune="frozen")
    steps = np.zeros((3, 3), np.float32), np.zeros((3, 2), np.float32), np.zeros(3, np.float32)
    assert attention.draw(policy, [Episode(*steps, task="Go north.")], "title") is None
