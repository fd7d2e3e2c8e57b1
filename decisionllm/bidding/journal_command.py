"""`decisionllm journal report | verify | prune | restore`: what an operator does with a journal."""

import json
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from decisionllm.bidding.backup import restore
from decisionllm.bidding.journal.checks import check_rows, prune_campaigns
from decisionllm.bidding.journal.journal import Journal, explain_journal_errors
from decisionllm.checks import check_one_of
from decisionllm.schema import Json

MAX_SHOWN = 20  # most faults that are printed
DAY = 86_400.0  # seconds


def journal(config: Json) -> None:
    """Do one thing with a journal (see configs/journal.yaml).

    Raises:
        ValueError: it is no journal, or damaged, or an option cannot be.
    """
    check_one_of("journal", config["action"], ACTIONS)
    with explain_journal_errors(config["journal"]):
        ACTIONS[config["action"]](config)


def report(config: Json) -> None:
    """Print what each model achieved, and whether they differ by more than noise."""
    from decisionllm.bidding.server import ab_report

    with closing(Journal(config["journal"], read_only=True)) as file:
        comparison = ab_report.compare_models(file)
    text = (
        json.dumps(comparison.as_dict()) if config["json"] else ab_report.format_report(comparison)
    )
    print(text)


def verify(config: Json) -> None:
    """Compare every row with its checksum, and look for rows that are missing."""
    with closing(Journal(config["journal"], read_only=True)) as file:
        check = check_rows(file)
    counts = f"{check.campaigns:,} campaigns, {check.ticks:,} ticks"
    if check.faults:
        shown = "; ".join(check.faults[:MAX_SHOWN])
        raise ValueError(f"{config['journal']}: {len(check.faults)} faults in {counts}: {shown}")
    print(f"{config['journal']}: {counts}: as they were written")


def prune(config: Json) -> None:
    """Remove campaigns that ended long ago."""
    if config["days"] <= 0:
        raise ValueError(f"days: expected a number above 0, got {config['days']}")
    if not Path(config["journal"]).is_file():  # a server would make a new journal there
        raise ValueError(f"journal: expected a journal of a server, got {config['journal']}")
    with closing(Journal(config["journal"])) as file:
        count = prune_campaigns(file, time.time() - config["days"] * DAY)
    print(
        f"{config['journal']}: {count:,} campaigns that ended {config['days']:g} days ago removed"
    )


def restore_journal(config: Json) -> None:
    """Put a backup in the place of the journal."""
    if config["from"] is None:
        raise ValueError("from: expected a file that `decisionllm backup` wrote, got none")
    aside = restore(config["journal"], config["from"])
    replaced = f"; what was there is {', '.join(map(str, aside))}" if aside else ""
    print(f"{config['journal']}: restored from {config['from']}{replaced}")


ACTIONS: dict[str, Callable[[Json], None]] = {
    "report": report,
    "verify": verify,
    "prune": prune,
    "restore": restore_journal,
}
