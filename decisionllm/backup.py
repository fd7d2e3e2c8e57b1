"""`decisionllm backup`: a copy of a server's journal, whole also while the server writes it."""

from contextlib import closing
from pathlib import Path

from decisionllm.domains.auction.journal import Journal
from decisionllm.registry import Node


def backup(config: Node) -> None:
    """Copy a journal (see configs/backup.yaml)."""
    with closing(Journal(config["journal"], read_only=True)) as journal:
        journal.backup(config["to"])
    with closing(Journal(config["to"], read_only=True)) as copy:
        copy.verify()
        beside = ", and the decisions of its shadow policy" * Path(copy.shadow_path).exists()
        print(f"{config['to']}: {len(copy.campaigns()):,} campaigns of {config['journal']}{beside}")
