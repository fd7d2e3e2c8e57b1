"""The held-out loss is a mean over the parts of the data."""

from types import SimpleNamespace

import torch

from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.runs.validation import validation_terms


def held_out_data(validators, *, is_mixture):
    return SimpleNamespace(validators=validators, store=SimpleNamespace(is_mixture=is_mixture))


def test_held_out_terms_are_means_over_batches_and_then_over_parts():
    """A draw returns its number, which is the loss; a part counts as much as any other."""
    data = {
        "maze": held_out_data({"umaze": lambda step: step}, is_mixture=False),
        "points": held_out_data(
            {"north": lambda step: 10 + step, "south": lambda step: 20 + step}, is_mixture=True
        ),
    }

    def loss_terms(embodiment, window):
        assert not torch.is_grad_enabled()
        terms = {"nll": torch.tensor(float(window))}
        if embodiment == "maze":
            terms["value"] = torch.tensor(7.0)
        return terms

    assert validation_terms(data, loss_terms, 3) == {
        "held_out_nll/maze": 1.0,
        "held_out_nll/north": 11.0,
        "held_out_nll/south": 21.0,
        "held_out_nll": 11.0,
        "held_out_value": 7.0,
    }


def test_the_only_part_of_a_run_has_no_line_of_its_own():
    data = {ONLY: held_out_data({"umaze": lambda step: step}, is_mixture=False)}
    assert validation_terms(data, lambda name, window: {"nll": torch.tensor(2.0)}, 1) == {
        "held_out_nll": 2.0
    }
