"""What a run of a study costs, and its loss."""

import pytest

from decisionllm.scaling.held_out_loss import measure_losses
from decisionllm.scaling.model_size import count_parameters, flops_per_step
from decisionllm.schema import Spec
from tests.backbones.test_backbones import write
from tests.conftest import episode, make_policy, make_store, node

SPEC = Spec(4, 2, 10, low=(-1.0, -1.0), high=(1.0, 1.0))


def cost(backbone, **options):
    """(parameters without embeddings, FLOPs of a step) of a model."""
    nodes = {"dataset": node("dataset", "synthetic"), "head": node("head", "gaussian")}
    parts = nodes | {"backbone": backbone, "window": 4}
    config = parts | {"optim": {"batch_size": 8}} | options
    size = count_parameters(config, SPEC)
    return size["non_embedding"], flops_per_step(config, size)


def test_blocks_that_only_read_texts_cost_no_flops(tmp_path):
    folder = str(write(tmp_path, num_hidden_layers=6))
    cut, both = (
        cost(node("backbone", "pretrained", folder=folder, text_layers=below, layers=below + 2))
        for below in (3, 0)
    )
    assert cut[0] > both[0] and cut[1] == both[1]


@pytest.mark.parametrize("beside", ["planner", "text_encoder"])
def test_what_no_token_of_a_trajectory_enters_costs_no_flops(tmp_path, beside):
    backbone = node("backbone", "nano", width=32, layers=1, heads=2, kv_heads=1, inner=16)
    folder = str(write(tmp_path, num_hidden_layers=2))
    options = {
        "planner": node("planner", "value"),
        "text_encoder": node("text_encoder", "features", folder=folder, layer=1),
    }
    plain = cost(backbone)
    more = cost(backbone, **{beside: options[beside]})
    assert more[0] > plain[0] and more[1] == plain[1]


def test_a_loss_of_no_actions_is_refused(tmp_path):
    store = make_store(tmp_path / "log", [episode([1.0, 2.0], group=i) for i in range(4)])
    parts = {"dataset": {}, "backbone": {}, "head": {}}
    config = parts | {"data": {"held_out": 0.5}, "window": 1}
    with pytest.raises(ValueError, match="windows=0: expected held-out actions to measure"):
        measure_losses(make_policy(store.spec), config, store, 0)
