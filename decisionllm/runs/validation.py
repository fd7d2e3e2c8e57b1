"""The loss on held-out windows."""

from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from decisionllm.datasets.batches import Data
from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.schema import Window

# (embodiment, its held-out window) -> terms of the loss
LossTerms = Callable[[str, Window], dict[str, Tensor]]


@torch.no_grad()
def validation_terms(
    data: Mapping[str, Data], loss_terms: LossTerms, num_batches: int
) -> dict[str, float]:
    """Return the mean terms of the loss on held-out windows, raw: {"held_out_nll": 1.3, ...}.

    Of a mixture these are means over its parts, and the likelihood of each part is there too:
    {"held_out_nll/maze2d-umaze": 1.2}.

    Args:
        data: by embodiment.
        loss_terms: computes the terms of the loss of a window.
        num_batches: windows of each part.
    """
    values = {}
    means_by_term: dict[str, list[float]] = defaultdict(list)  # a mean for each part
    for embodiment, of_embodiment in data.items():
        for label, draw_windows in of_embodiment.validators.items():
            batches: dict[str, list[float]] = defaultdict(list)
            for i in range(num_batches):
                for term, value in loss_terms(embodiment, draw_windows(i)).items():
                    batches[term].append(float(value))
            means = {term: float(np.mean(each)) for term, each in batches.items()}
            for term, mean in means.items():
                means_by_term[term].append(mean)
            part = label if of_embodiment.store.is_mixture else embodiment
            if part != ONLY:
                values[f"held_out_nll/{part}"] = means["nll"]
    for term, of_parts in means_by_term.items():
        values[f"held_out_{term}"] = float(np.mean(of_parts))
    return values
