"""Language models of any size on one core: what loading, memory and a training step cost, against
transformers + peft.

`python -m lab.llm_sizes MODEL`: a folder, a GGUF file or `smollm2`; a row of rows/llm_sizes.jsonl. 512 windows of one step share 64 texts of 22 tokens, and LoRA has rank 32. Ours
cuts a model as backbone=pretrained does: the lower two fifths of its blocks are frozen and read each
text once, the next fifth is trained on the rows. The peer is fed as its users feed it, the text's
embeddings repeated in front of each of 16 rows, through the same blocks, all with adapters.
Embedding, head, loss and optimiser are the same. Memory is that of the process, without files that
are mapped; loading is timed after the imports, of a file that was converted before.
"""

import argparse
import gc
import json
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks import measure
from benchmarks.dt_step import log, our_loss, trainer
from benchmarks.llm_step_tiny import adapted, peer_loss
from decisionllm.backbones import hf_reference as library
from decisionllm.backbones.build import fingerprint
from decisionllm.backbones.gguf import convert_gguf
from decisionllm.datasets.sampling import Sampler
from decisionllm.datasets.windows import collate
from decisionllm.hardware import resolve_precision
from decisionllm.models.sequence import SequenceModel
from decisionllm.runs import directory
from decisionllm.schema import Batch, Json

OUT = Path(__file__).parent / "rows" / "llm_sizes.jsonl"
ROWS, PEER_ROWS, TEXTS = 512, 16, 64
TASKS = [
    f"Maze2D medium. Drive the ball into row {i // 8}, column {i % 8}, and keep it in that cell, "
    "please."
    for i in range(TEXTS)
]


def load(source: str, **options: object) -> SequenceModel:
    """Build a model in training on a language model: a folder, a GGUF file or `smollm2`."""
    options = {"lora_rank": 32, "lora_alpha": 64, "dtype": "bfloat16"} | options
    if source == "smollm2":
        return adapted(source, **options)
    return adapted("pretrained", folder=source, **options)


def batches(model, rows=ROWS):
    """step -> a Batch whose rows have the texts in turn."""
    steps = log(20_000)
    sampler = Sampler(steps, np.arange(len(steps.first)), T=1, batch_size=rows, seed=0)
    return lambda step: collate(
        sampler(step), model.backbone.encode(TASKS), np.arange(rows) % TEXTS
    )


def library_loss(model: SequenceModel, batch: Batch) -> torch.Tensor:
    """Compute our loss by the library's own forward."""
    backbone = model.backbone
    fast = backbone.forward

    def forward(*arguments: torch.Tensor, output_positions: slice, entities: None) -> torch.Tensor:
        return library.plain(backbone, *arguments)[:, output_positions]

    backbone.forward = forward
    try:
        return our_loss(model, batch)
    finally:
        backbone.forward = fast


def check_gradients(model: SequenceModel) -> float:
    """Return the largest difference from the gradients by the library's own blocks, in float32."""
    batch = batches(model, rows=TEXTS)(0)
    gradients = []
    for loss in (our_loss, library_loss):
        model.zero_grad()
        loss(model, batch).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    model.zero_grad()
    return measure.largest_difference(*gradients)


class Memory:
    """The most anonymous memory of this process in GB since the last `reset`, by a thread that
    looks 50 times a second.
    """

    def __init__(self) -> None:
        self.peak = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def reset(self) -> None:
        self.peak = 0.0

    def _watch(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text(encoding="ascii")
            kilobytes = status.split("RssAnon:")[1].split()[0]
            self.peak = max(self.peak, int(kilobytes) / 1e6)
            time.sleep(0.02)


def measure_model(source: str, rounds: int, memory: Memory) -> Json:
    """Return the row of a model."""
    load("smollm2")  # imports what loading needs
    if source.endswith(".gguf"):
        convert_gguf(Path(source))
    gc.collect()
    measure.pin()
    memory.reset()
    time.sleep(0.1)
    before = memory.peak
    began = time.process_time()
    model = load(source)
    fingerprint(model.backbone)
    load_seconds = time.process_time() - began
    load_peak = memory.peak - before
    gates = measure.gate("gradients", check_gradients(model), 1e-4)
    kept = sum(weight.nbytes for weight in model.parameters()) / 1e9
    memory.reset()
    precise = resolve_precision("cpu", "auto") != "bf16"
    dtype = torch.float32 if precise else torch.bfloat16
    ours = trainer(model, partial(our_loss, dtype=dtype), batches(model))
    ours()
    train_peak = memory.peak - before
    blocks = model.backbone.config.num_hidden_layers
    peer = load(source, text_layers=0, layers=blocks)
    peer_step = trainer(peer, partial(peer_loss, dtype=dtype), batches(peer, PEER_ROWS))
    case = measure.Case("a row", ours, peer_step, ROWS, PEER_ROWS, unit="ms/row")
    return {
        "model": Path(source).name,
        "blocks": blocks,
        "load_cpu_s": load_seconds,
        "kept_gb": kept,
        "load_peak_gb": load_peak,
        "train_peak_gb": train_peak,
        "gates": gates,
        **measure.compare(case, rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.llm_sizes", description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    row = measure_model(options.model, options.rounds, Memory())
    row |= {"ceilings_gflops": measure.ceilings(), "versions": directory.versions()}
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
