"""The cost of the ledger: planning and listing 10,000 runs; 60 short runs while a driver and a
worker are killed.

`taskset -c 0 python -m lab.ledger [local|ray|slurm]` prints one line for each check and
appends a row to ledger.jsonl.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from decisionllm import executors
from decisionllm.runs import directory
from decisionllm.scaling import grid, ledger, study_options
from decisionllm.scaling import workers as run_workers

ROWS = Path(__file__).parent / "rows" / "ledger.jsonl"
RUNS, SECONDS, WORKERS = 60, 0.5, 2
CONFIG = {
    "workers": WORKERS,
    "processes": 1,
    "gpus": 0.0,
    "address": "",
    "slurm": {"cluster": "local"},
}


def nap(folder: Path, job: Any) -> dict[str, Any]:
    """A run that sleeps and adds its name to a file that all runs share."""
    time.sleep(SECONDS)
    with (folder.parent.parent / "names").open("a", encoding="utf-8") as file:
        file.write(f"{folder.name}\n")
    return {}


def drive(
    folder: str, executor: str, progress: Any = lambda states: None
) -> tuple[Path, list[str]]:
    """Do a study of short runs. Returns its ledger and their names."""
    root = Path(folder) / "study"
    names = ledger.plan(root, [{"i": i} for i in range(RUNS)])
    with executors.build_executor(CONFIG | {"executor": executor, "out": str(root)}) as (
        start,
        workers,
        _,
    ):
        run_workers.drive(root, names, nap, start, workers, progress=progress)
    return root, names


def killed(folder: str, executor: str) -> dict[str, int]:
    """Kill the driver after a third of the runs, start another, and kill one of its workers."""
    file, victims = Path(folder) / "names", list[int]()
    first = subprocess.Popen([sys.executable, "-m", "lab.ledger", executor, "--drive", folder])
    while not file.exists() or len(file.read_text(encoding="utf-8").splitlines()) < RUNS // 3:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()

    def kill(states: dict[str, str]) -> None:
        running = [name for name, state in states.items() if state == "running"]
        if (
            not victims
            and running
            and sum(state == "done" for state in states.values()) > RUNS // 2
        ):
            victims.append(
                int(
                    (Path(folder) / "study" / running[0] / "begun")
                    .read_text(encoding="utf-8")
                    .split()[0]
                )
            )
            os.kill(victims[0], signal.SIGKILL)

    root, names = drive(folder, executor, kill)
    states = ledger.status(root, names)
    noted = file.read_text(encoding="utf-8").split()
    return {
        "done": sum(state == "done" for state in states.values()),
        "twice": len(noted) - len(set(noted)),
        "begun": sum(
            len((root / name / "begun").read_text(encoding="utf-8").splitlines()) for name in names
        ),
        "killed": len(victims) + 1,
    }


def overhead(folder: str, executor: str) -> float:
    """Seconds per run beyond its sleep, from the first end to the last, so that the start of the
    workers is not counted.
    """
    root, names = drive(folder, executor)
    ends = sorted((root / name / "done.json").stat().st_mtime for name in names)
    return (ends[-1] - ends[WORKERS - 1]) * WORKERS / (RUNS - WORKERS) - SECONDS


def large(folder: str, executor: str = "local", count: int = 10_000) -> dict[str, float]:
    """CPU seconds to plan so many runs of study=smoke and write their folders, and to list their
    states.
    """
    import hydra
    import yaml

    from decisionllm.command_line import config_folder, store_choices

    store_choices()
    study = yaml.safe_load(
        (config_folder() / "study" / "smoke.yaml").read_text(encoding="utf-8")
    ) | {"seeds": list(range(-(-count // 18)))}
    study["lr"] = {"rule": "fixed"}
    root = Path(folder) / "large"
    began = time.process_time()
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        runs = grid.Grid(study_options.check_study(study), Path(folder) / "data")
        names = ledger.plan(root, runs.all_jobs(root).values())
        planned = time.process_time() - began
        began = time.process_time()
        run_workers.Progress(root, lambda text: None)(ledger.status(root, runs.all_jobs(root)))
    return {"runs": len(names), "plan": planned, "status": time.process_time() - began}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.ledger", description=sys.modules[__name__].__doc__
    )
    parser.add_argument("executor", nargs="?", default="local", choices=("local", "ray", "slurm"))
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROWS)
    arguments = parser.parse_args()
    if arguments.drive:
        drive(arguments.drive, arguments.executor)
        return
    row = {
        "executor": arguments.executor,
        "cores": executors.count_cores(),
        "versions": directory.versions(),
    }
    for name, measure in (("large", large), ("killed", killed), ("overhead", overhead)):
        folder = tempfile.mkdtemp()
        try:
            row[name] = measure(folder, arguments.executor)
        finally:
            shutil.rmtree(folder)
    with arguments.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    many, end = row["large"], row["killed"]
    for met, words in (
        (
            many["plan"] < 5,
            f"{many['runs']:,} runs planned and written in {many['plan']:.2f} s (5)",
        ),
        (many["status"] < 2, f"their states in {many['status']:.2f} s (2)"),
        (
            end["done"] == RUNS
            and not end["twice"]
            and end["begun"] <= RUNS + end["killed"] + WORKERS,
            f"{end['done']} of {RUNS} done, {end['twice']} twice, {end['begun']} begun, a driver "
            "and a worker killed",
        ),
        (row["overhead"] < 0.2, f"{row['overhead']:.3f} s a run beyond its own (0.2)"),
    ):
        Console(soft_wrap=True).print("yes" if met else "NO ", words, highlight=False)


if __name__ == "__main__":
    main()
