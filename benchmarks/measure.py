"""Two ways of doing the same work, in turn, in one process on one core. What is compared is CPU
time.

On a shared machine wall time also counts the neighbours; CPU time repeats within a few percent.
Rounds alternate, so that what slows the machine slows both, and the figure is the median of the
rounds' ratios. Before any clock starts, a benchmark's gates show that both compute the same; where
the reference itself spreads by more than 15 %, the run is noisy and not to be quoted.
"""

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from decisionllm.runs import directory

SPREAD = 0.15  # of the reference: interquartile range of its rounds / median
RESULTS = Path(__file__).parent / "results.jsonl"
UNITS = {"us": 1e6, "ms": 1e3}  # of a second


@dataclass(frozen=True)
class Case:
    """One timed comparison: a call of `ours` does `ours_work` units, one of `peer` `peer_work` of the
    same units.
    """

    name: str
    ours: Callable
    peer: Callable
    ours_work: float = 1
    peer_work: float = 1
    unit: str = "ms/step"
    target: float | None = None  # least ratio peer / ours; None: the row is there to be read
    limit: float | None = None  # most that ours may take, in the unit


def pin():
    """One thread on one core: threads that wait for each other wait for the neighbours too. Freed
    memory is kept, so that neither side pays, by chance, for having its pages given back and
    cleared again."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        if hasattr(libc := ctypes.CDLL(None), "mallopt"):
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def seconds(call):
    """CPU time of one call."""
    began = time.process_time()
    call()
    return time.process_time() - began


def compare(case, rounds):
    """Time a case in alternating rounds: one row of results.jsonl."""
    for call in (case.ours, case.peer):
        call()  # warm
    ours, peer = [], []
    for i in range(rounds):
        turns = [(case.ours, case.ours_work, ours), (case.peer, case.peer_work, peer)]
        for call, work, times in turns if i % 2 else turns[::-1]:
            times.append(seconds(call) / work)
    return verdict(case, ours, peer)


def verdict(case, ours, peer):
    """Return the row of a case from seconds a unit of work: [1, 2, 1] against [3, 4, 3] is a
    ratio of 3.
    """
    ratio = statistics.median(p / o for o, p in zip(ours, peer, strict=True))
    scale = UNITS[case.unit.partition("/")[0]]
    taken = statistics.median(ours) * scale
    met = (
        None
        if case.target is None
        else ratio >= case.target and (case.limit is None or taken <= case.limit)
    )
    return {
        "case": case.name,
        "unit": case.unit,
        "ours": taken,
        "peer": statistics.median(peer) * scale,
        "ratio": ratio,
        "target": case.target,
        "limit": case.limit,
        "met": met,
        "spread": spread(peer),
        "noisy": spread(peer) > SPREAD,
        "rounds": len(peer),
    }


def spread(times):
    """Interquartile range / median."""
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return (high - low) / statistics.median(times)


def ceilings():
    """Measure the peak of this core: GFLOP/s of a large product, {dtype: number}."""
    gflops = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(1024, 1024).to(dtype)
        b = torch.randn(1024, 1024).to(dtype)
        gflops[str(dtype).removeprefix("torch.")] = round(
            2 * 1024**3 / min(seconds(lambda a=a, b=b: a @ b) for _ in range(12)) / 1e9
        )
    return gflops


def largest_difference(ours, peer):
    """The largest |ours - peer| / |peer| of pairs of tensors, each taken as one vector."""
    return max(
        float((o - p).norm() / p.norm().clamp(min=1e-12)) for o, p in zip(ours, peer, strict=True)
    )


def gate(name, value, bound):
    """A figure that must hold before anything is timed."""
    if not value <= bound:
        raise AssertionError(
            f"{name}: expected at most {bound:g}, got {value:g}; what is timed would not be the "
            "same work"
        )
    return {name: float(value)}


def main(*modules, out=RESULTS):
    """Run benchmarks by module: gates first, then every case; print a table, append rows to
    `out`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=sys.modules[__name__].__doc__
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args()
    pin()
    console, rows = Console(), []
    units = [
        unit
        for unit in ("avx512_bf16", "amx_tile")
        if getattr(torch.cpu, f"_is_{unit}_supported", bool)()
    ]
    machine = {"ceilings_gflops": ceilings(), "units": units, "versions": directory.versions()}
    console.print(
        f"one core, GFLOP/s: {machine['ceilings_gflops']}; of the units for bfloat16: "
        f"{', '.join(units) or 'none'}"
    )
    for module in modules:
        benchmark = import_module(module)
        name = module.rpartition(".")[2]
        gates = benchmark.gates()
        console.print(f"{name}: {benchmark.__doc__.splitlines()[0]}", soft_wrap=True)
        console.print(
            "  gates: " + ", ".join(f"{gate} {value:.2g}" for gate, value in gates.items())
        )
        for case in benchmark.cases():
            rows.append(
                {"benchmark": name} | compare(case, options.rounds) | {"gates": gates} | machine
            )
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            console.print(f"  {case.name}: {rows[-1]['ratio']:.2f} x")
    Console(width=150).print(table(rows))


def table(rows):
    made = Table()
    for heading in (
        "benchmark",
        "case",
        "ours",
        "peer",
        "unit",
        "ratio",
        "target",
        "met",
        "spread",
    ):
        made.add_column(heading, no_wrap=True)
    for row in rows:
        met = {None: "", True: "yes", False: "NO"}[row["met"]] + (
            " (noisy)" if row["noisy"] else ""
        )
        target = (
            ""
            if row["target"] is None
            else f"{row['target']:g}" + (f", <= {row['limit']:g}" if row["limit"] else "")
        )
        figures = (
            f"{row['ours']:.3g}",
            f"{row['peer']:.3g}",
            row["unit"],
            f"{row['ratio']:.2f}",
            target,
            met,
            f"{row['spread']:.0%}",
        )
        made.add_row(row["benchmark"], row["case"], *figures)
    return made
