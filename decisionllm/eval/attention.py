"""Attention of actions to the words of their task text: a picture for the report."""

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from decisionllm.backbones.hf_reference import attention_to_text
from decisionllm.eval.pictures import figure
from decisionllm.policy.policy import Policy
from decisionllm.schema import Episode, History

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXTS = 6  # in one picture


@torch.inference_mode()
def measure_attention(
    policy: Policy, episodes: Sequence[Episode]
) -> list[tuple[list[str], np.ndarray]]:
    """Measure the attention from the observation, where the first action is predicted, to the text.

    Args:
        policy: of single agents.
        episodes: of a rollout.

    Returns:
        For each of at most six different texts: its tokens, and the attention (layers, tokens),
        mean over heads. The rest of the sum of 1 goes to the tokens of the trajectory.
    """
    model = policy.model
    firsts: dict[str, Episode] = {}
    for episode in reversed(episodes):
        if episode.task:
            firsts[episode.task] = episode
    measured = []
    for task, episode in islice(reversed(firsts.items()), TEXTS):
        masks = None if episode.action_masks is None else episode.action_masks[:1]
        history = History(
            episode.observations[:1],
            episode.actions[:0],
            episode.rewards[:0],
            task=task,
            action_masks=masks,
        )
        batch, _ = policy.batch([history])
        tokens = model.tokens(batch)[:, :-1]  # up to the observation
        text = (batch.text_ids, batch.text_mask, batch.text_index)
        weights = attention_to_text(model.backbone, tokens, *text)  # (layers, 1, tokens, text)
        measured.append((model.backbone.words(task), weights[:, 0, -1].cpu().numpy()))
    return measured


def draw(policy: Policy, episodes: Sequence[Episode], title: str) -> "Figure | None":
    """Draw a heat map of layers by tokens for each text.

    None for episodes without text, a policy that reads teams or has tokens of entities, or a
    backbone without attention.
    """
    model = policy.model
    reads_more = model.team is not None or model.tokenizer.entities != "pooled"
    measured = [] if reads_more else measure_attention(policy, episodes)
    if not measured or not len(measured[0][1]):
        return None
    longest = max(len(words) for words, _ in measured)
    picture = figure(3 + 0.22 * longest, 1 + 1.3 * len(measured), title)
    axes = picture.subplots(len(measured), squeeze=False)[:, 0]
    for axis, (words, weights) in zip(axes, measured, strict=True):
        layers = range(len(weights))
        image = axis.imshow(weights, aspect="auto", cmap="viridis", vmin=0)
        bar = picture.colorbar(image, ax=axis)
        bar.set_label("attention", fontsize=7)
        bar.ax.tick_params(labelsize=6)
        axis.set_xticks(range(len(words)), words, rotation=60, ha="right", fontsize=7)
        axis.set_yticks(layers, [str(layer + 1) for layer in layers], fontsize=6)
        axis.set_ylabel("layer", fontsize=7)
    return picture
