"""A log of many steps of 20 numbers: memory of writing and training, and windows drawn as fast as
from a million steps.

    python -m lab.large_log [--steps 100_000_000] [--folder ...]

100 million steps are 9.2 GB on disk. A row appended to large_log.jsonl holds wall seconds, the peak
of resident memory beside the page cache (RssAnon, Linux), that of the imports alone, and CPU
microseconds of a window of 20 steps whose pages were read before: medians of alternating rounds.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks import measure
from decisionllm import TrainConfig, choice
from decisionllm.commands.train import train
from decisionllm.config import LogOptions, OptimOptions
from decisionllm.datasets import sampling, windows
from decisionllm.datasets.arrays import from_episodes
from decisionllm.datasets.store import open_store
from decisionllm.runs import directory
from decisionllm.schema import Episode, Spec

RESULTS = Path(__file__).parent / "rows" / f"{Path(__file__).stem}.jsonl"
LENGTH, S, A, T = 300, 20, 2, 20
SPEC = Spec(S, A, LENGTH, (-1.0,) * A, (1.0,) * A)
# targets: resident memory; the time of a window against one of a million steps
LIMIT_MB, SLOWER = 2000, 1.1


def episodes(steps, seed=0):
    """Episodes of LENGTH steps: a random walk of S numbers, actions that follow from it."""
    rng = np.random.default_rng(seed)
    for e in range(steps // LENGTH):
        rows = rng.standard_normal((LENGTH, S), np.float32)
        yield Episode(rows, np.tanh(rows[:, :A]), rows[:, 0], group=e)


def resident_mb():
    """Resident memory that is no file, MB."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) / 1024


@contextlib.contextmanager
def watched():
    """{"seconds", "mb"}: wall time and the peak of resident memory of the block, sampled a hundred
    times a second.
    """
    found, over = {"mb": resident_mb()}, threading.Event()

    def sample():
        while not over.wait(0.01):
            found["mb"] = max(found["mb"], resident_mb())

    thread = threading.Thread(target=sample)
    began = time.monotonic()
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        found["seconds"] = time.monotonic() - began


def sampler(store):
    return sampling.Sampler(
        windows.load_steps(store), np.arange(len(store.lengths)), T=T, batch_size=4096, seed=0
    )


def window_us(samplers, rounds=15):
    """CPU microseconds of a window of each sampler, after a warm-up that reads the pages."""
    times = [[] for _ in samplers]
    for i in range(rounds + 5):
        for draw, each in zip(samplers, times, strict=True):
            each.append(measure.seconds(lambda draw=draw, i=i: draw(i % 5)) / 4096 * 1e6)
    return [statistics.median(each[5:]) for each in times]


def options_of(results, doc, **size):
    """The options of a benchmark that writes a log of this size, {its unit: how many by default},
    and appends a row to its results.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m lab.{results.stem}", description=doc.splitlines()[0]
    )
    for unit, count in size.items():
        parser.add_argument(f"--{unit}", type=int, default=count)
    parser.add_argument(
        "--folder", default=None, help="where the log is written for the time of the benchmark"
    )
    parser.add_argument("--out", type=Path, default=results)
    return parser.parse_args()


def main():
    options = options_of(RESULTS, __doc__, steps=100_000_000)
    measure.pin()
    row = {"steps": options.steps, "imports_mb": resident_mb()}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        with watched() as writing:
            dataset = from_episodes(
                episodes(options.steps), Path(folder) / "large", name="large", spec=SPEC
            )
        from_episodes(episodes(1_000_000), Path(folder) / "small", name="small", spec=SPEC)
        config = TrainConfig(
            dataset=dataset,
            run=f"{folder}/run",
            steps=5,
            window=T,
            device="cpu",
            cache_dir=folder,
            backbone=choice("backbone", "nano", width=64, layers=1),
            head=choice("head", "gaussian"),
            optim=OptimOptions(batch_size=64),
            log=LogOptions(tracker="none"),
        )
        with watched() as training:
            train(config)
        samplers = [sampler(open_store(Path(folder) / name)) for name in ("large", "small")]
        large, small = window_us(samplers)
    row |= {
        "writing": writing,
        "training": training,
        "window_us": large,
        "window_of_a_million_us": small,
    }
    row |= {
        "met": max(writing["mb"], training["mb"]) <= LIMIT_MB and large <= SLOWER * small,
        "versions": directory.versions(),
    }
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
