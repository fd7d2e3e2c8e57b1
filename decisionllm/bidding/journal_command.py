"""`decisionllm journal report | verify | prune | restore`: what an operator does with a journal."""

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from decisionllm.bidding.backup import restore
from decisionllm.bidding.journal.checks import check_rows, prune_campaigns
from decisionllm.bidding.journal.journal import Journal, explain_journal_errors
from decisionllm.checks import check_one_of
from decisionllm.commands.options import read_options
from decisionllm.registry import Node

MAX_SHOWN = 20  # most faults that are printed
DAY = 86_400.0  # seconds


@dataclass(frozen=True, kw_only=True)
class JournalConfig:
    """The options of `journal`; configs/journal.yaml explains them and has their defaults."""

    action: str  # one of ACTIONS
    journal: str
    json: bool
    days: float
    backup: str | None  # the option `from`, which is no name of Python


def journal(config: Node) -> None:
    """Do one thing with a journal (see configs/journal.yaml).

    Raises:
        ValueError: it is no journal, or damaged, or an option cannot be.
    """
    options = read_options(JournalConfig, config | {"backup": config["from"]})
    check_one_of("journal", options.action, ACTIONS)
    with explain_journal_errors(options.journal):
        ACTIONS[options.action](options)


def report(options: JournalConfig) -> None:
    """Print what each model achieved, and whether they differ by more than noise."""
    from decisionllm.bidding.server import ab_report

    with closing(Journal(options.journal, read_only=True)) as file:
        comparison = ab_report.compare_models(file)
    text = json.dumps(comparison.as_dict()) if options.json else ab_report.format_report(comparison)
    print(text)


def verify(options: JournalConfig) -> None:
    """Compare every row with its checksum, and look for rows that are missing."""
    with closing(Journal(options.journal, read_only=True)) as file:
        check = check_rows(file)
    counts = f"{check.campaigns:,} campaigns, {check.ticks:,} ticks"
    if check.faults:
        shown = "; ".join(check.faults[:MAX_SHOWN])
        raise ValueError(f"{options.journal}: {len(check.faults)} faults in {counts}: {shown}")
    print(f"{options.journal}: {counts}: as they were written")


def prune(options: JournalConfig) -> None:
    """Remove campaigns that ended long ago."""
    if options.days <= 0:
        raise ValueError(f"days: expected a number above 0, got {options.days}")
    if not Path(options.journal).is_file():  # a server would make a new journal there
        raise ValueError(f"journal: expected a journal of a server, got {options.journal}")
    with closing(Journal(options.journal)) as file:
        count = prune_campaigns(file, time.time() - options.days * DAY)
    print(f"{options.journal}: {count:,} campaigns that ended {options.days:g} days ago removed")


def restore_journal(options: JournalConfig) -> None:
    """Put a backup in the place of the journal."""
    if options.backup is None:
        raise ValueError("from: expected a file that `decisionllm backup` wrote, got none")
    aside = restore(options.journal, options.backup)
    replaced = f"; what was there is {', '.join(map(str, aside))}" if aside else ""
    print(f"{options.journal}: restored from {options.backup}{replaced}")


ACTIONS: dict[str, Callable[[JournalConfig], None]] = {
    "report": report,
    "verify": verify,
    "prune": prune,
    "restore": restore_journal,
}
