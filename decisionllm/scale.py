"""The command `scale`: plan a study of model size, data volume and data quality, run what is missing, fit a law, report, advise."""

from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from decisionllm.config import one_of
from decisionllm.policy import checkpoint
from decisionllm.scaling import advice, executors, grid, ledger, report
from decisionllm.scaling.run import FLOPS, execute

ACTIONS = ("plan", "run", "status", "retry", "report", "advise")


def scale(config: dict[str, Any]) -> Path:
    """Apply config["action"] to config["study"].

    Args:
        config: plain dicts, see configs/scale.yaml.

    Returns:
        The path of the report, or of the ledger.

    Raises:
        ValueError: an option or the study is not valid; nothing is written.
        OSError: a worker could not write, or an executor is not available.
    """
    console = Console(soft_wrap=True, markup=False, highlight=False)
    one_of("action", config["action"], ACTIONS)
    if config["action"] == "advise":
        if not config["flops"] > 0:
            raise ValueError(f"flops: action=advise needs the compute of a run, expected more than 0, got {config['flops']}")
        return advice.write(Path(config["read"] or Path(config["out"]) / "study.json"), config["flops"], say=console.print)
    if config["read"]:
        return report.write(Path(config["read"]).parent, report.read(config["read"]), say=console.print)
    study, out = grid.check(config["study"]), Path(config["out"])
    if config["action"] in ("run", "retry"):
        with executors.from_config(config) as (start, workers, threads):  # an executor that is not available fails first
            runs = grid.Grid(study, config["cache_dir"])
            if config["action"] == "retry":
                console.print(f"{len(ledger.retry(out, runs.all_jobs(out)))} failed runs are planned again")
            options = {key: config[key] for key in ("cache_dir", "device", "keep", "processes")}
            run = partial(execute, **options, threads=threads)
            for jobs in (runs.tuning, lambda: runs.jobs(out)):
                ledger.drive(out, ledger.plan(out, jobs()), run, start, workers, progress=ledger.Progress(out, console.print))
    else:
        runs = grid.Grid(study, config["cache_dir"])
    if config["action"] == "plan":
        grid.estimate(runs, config, console.print)
        return out
    known = runs.all_jobs(out)
    if config["action"] == "status":
        ledger.Progress(out, console.print)(ledger.status(out, known))
        return out
    found = {"study": study, "versions": checkpoint.versions(), "flops": FLOPS, "tuned": runs.tuning_losses(out)}
    rows = []
    for name, state in ledger.status(out, known).items():
        over = ledger.result(out / name) if state in ("done", "failed") else {}
        rows.append({"run": name, "state": state, **known[name]["axes"], **over})
    return report.write(out, found | {"runs": rows}, say=console.print)
