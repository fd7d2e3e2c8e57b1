"""Which words of its task text an action attends to: a picture for the report."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from decisionllm.eval.report import figure
from decisionllm.schema import Episode, History


@torch.inference_mode()
def attention(policy: Any, episodes: Sequence[Episode], count: int = 6) -> list[tuple[list[str], np.ndarray]]:
    """Attention from the observation, where the first action is predicted, to the text.

    Args:
        policy: a `Policy`.
        episodes: of a rollout.
        count: of different texts, at most.

    Returns:
        For each of the first different texts: its tokens, and the attention (layers, tokens), mean over heads. The rest of the sum
        of 1 goes to the tokens of the trajectory.
    """
    firsts = {e.task: e for e in reversed(episodes) if e.task}
    model, found = policy.model, []
    for task, episode in [*reversed(firsts.items())][:count]:
        masks = None if episode.action_masks is None else episode.action_masks[:1]
        first = episode.observations[:1], episode.actions[:0], episode.rewards[:0]
        history = History(*first, task=task, action_masks=masks)
        batch, _ = policy.batch([history])
        tokens = model.tokens(batch)[:, :-1]
        weights = model.backbone.attention_to_text(tokens, batch.text_ids, batch.text_mask, batch.text_index)
        found.append((model.backbone.words(task), weights[:, 0, -1].cpu().numpy()))
    return found


def draw(policy: Any, episodes: Sequence[Episode], title: str) -> Any:
    """A figure: a heat map of layers by tokens for each text; None for episodes without text, or a policy that reads teams."""
    found = [] if policy.model.team is not None else attention(policy, episodes)
    if not found:
        return None
    made = figure(2 + 0.22 * max(len(words) for words, _ in found), 1 + 1.3 * len(found), title)
    for axis, (words, weights) in zip(made.subplots(len(found), squeeze=False)[:, 0], found, strict=True):
        axis.imshow(weights, aspect="auto", cmap="viridis", vmin=0)
        axis.set_xticks(range(len(words)), words, rotation=60, ha="right", fontsize=6)
        axis.set_yticks(range(len(weights)), [str(i + 1) for i in range(len(weights))], fontsize=6)
        axis.set_ylabel("layer", fontsize=7)
    return made
