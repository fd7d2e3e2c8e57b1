"""The command `scale`: plan a study of size, data volume and quality, run, fit, report."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from decisionllm import executors
from decisionllm.commands.options import read_options
from decisionllm.files import check_writable
from decisionllm.registry import Node
from decisionllm.runs import directory
from decisionllm.scaling import cost, grid, ledger, report, study_options, workers
from decisionllm.scaling.model_size import FLOPS
from decisionllm.scaling.run import execute
from decisionllm.scaling.study_options import ScaleConfig
from decisionllm.schema import Json
from decisionllm.trust import trust_user_modules


@trust_user_modules
def scale(config: Node) -> Path:
    """Apply the option `action` to the option `study`.

    Args:
        config: plain dicts, see configs/scale.yaml.

    Returns:
        The path of the report, or of the ledger.

    Raises:
        ValueError: an option or the study is not valid; nothing is written.
        OSError: a worker could not write, or an executor is not available.
    """
    console = Console(soft_wrap=True, markup=False, highlight=False)
    say = console.print
    options = read_options(ScaleConfig, config)
    action = options.action
    out = Path(options.out)
    if options.read:
        study = report.read_study(options.read)
        return report.write_report(Path(options.read).parent, study, say=say)

    study = study_options.check_study(options.study)
    if action in ("run", "retry", "report"):
        check_writable(out, "study.json", "report.html")
    if action in ("run", "retry"):
        # an executor that is not available fails first
        with executors.build_executor(asdict(options)) as executor:
            runs = grid.Grid(study, options.cache_dir)
            if action == "retry":
                failed = ledger.retry(out, runs.all_jobs(out))
                say(f"{len(failed)} failed runs are planned again")
            run_missing(runs, options, executor, say)
    else:
        runs = grid.Grid(study, options.cache_dir)
    if action == "plan":
        cost.print_cost(runs, options, say)
        return out
    jobs = runs.all_jobs(out)
    states = ledger.status(out, jobs)
    if action == "status":
        workers.Progress(out, say)(states)
        return out
    runs.check_rates(out)
    content = {
        "study": study,
        "versions": directory.versions(),
        "flops": FLOPS,
        "tuned": runs.tuning_losses(out),
        "runs": [make_row(runs, out, name, state, jobs[name]) for name, state in states.items()],
    }
    return report.write_report(out, content, say=say)


def run_missing(
    runs: grid.Grid,
    options: ScaleConfig,
    executor: executors.Executor,
    say: workers.Say,
) -> None:
    """Do the runs that are neither done nor failed, first those that choose the learning rates."""
    out = Path(options.out)
    start, count, threads = executor
    run = partial(
        execute,
        cache_dir=options.cache_dir,
        device=options.device,
        keep=options.keep,
        processes=options.processes,
        trust=options.trust,
        threads=threads,
    )
    for find_jobs in (runs.tuning_jobs, partial(runs.jobs, out)):
        runs.check_rates(out)
        names = ledger.plan(out, find_jobs())
        progress = workers.Progress(out, say)
        workers.drive(out, names, run, start, count, progress=progress)


def make_row(runs: grid.Grid, out: Path, name: str, state: str, job: grid.Job) -> Json:
    """Make a row of the report of a run; `reference`: the size and quality on whose data its loss
    is measured.
    """
    result = ledger.load_result(out / name) if state in ledger.ENDED else {}
    axes = job["axes"]
    reference = ", ".join(runs.find_reference_cell((axes["size"], axes["mixture"])))
    return {"run": name, "state": state, **axes, "reference": reference, **result}
