"""The options of `serve`, checked."""

import math
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decisionllm.bidding.server import logs
from decisionllm.commands.options import matching, option, word
from decisionllm.registry import Node
from decisionllm.runs import directory


def above_zero() -> Any:
    """Declare a finite number above 0, or None."""
    return matching("a number above 0", lambda value: value is None or 0 < value < math.inf)


def from_zero() -> Any:
    """Declare a finite number of 0 or more, or None."""
    return matching("a number from 0", lambda value: value is None or 0 <= value < math.inf)


def read_replicas(name: str, count: int) -> int:
    """Return a number of processes that can share a port; a ValueError if they cannot."""
    if count < 1 or (count > 1 and not hasattr(socket, "SO_REUSEPORT")):
        raise ValueError(
            f"{name}: expected a number from 1, and 1 on a system without SO_REUSEPORT; got {count}"
        )
    return count


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The options of `serve`; configs/serve.yaml explains them and has their defaults."""

    run: str
    part: str | None
    host: str
    port: int = matching("0 .. 65535", lambda port: 0 <= port <= 65535)
    tokens: str | None
    journal: str | None
    snapshot_s: float = from_zero()
    move_campaigns: bool
    models_dir: str | None
    models: list[str] | None
    replicas: int = option(read_replicas)
    device: str
    trust: list[str]
    log: str = word(*logs.KINDS)
    log_sample: float = matching("a share within 0 .. 1", lambda share: 0 <= share <= 1)
    log_slow_ms: float = above_zero()
    docs: bool
    tracing: str | None
    act: Node  # fields of `Policy`; None: as the run was trained to
    shadow: str | None
    cache_mb: float = from_zero()
    max_campaigns: int = above_zero()
    horizon: int | None = above_zero()
    pacing: float | None = above_zero()
    deadline_ms: float = above_zero()
    batch_wait_ms: float = from_zero()
    max_batch_size: int = above_zero()
    max_queue: int = above_zero()
    max_body_bytes: int = above_zero()
    currency: str = matching(
        "three capitals such as USD", lambda code: re.fullmatch("[A-Z]{3}", str(code)) is not None
    )
    seat: str
    bid_expiry_s: float = above_zero()
    bid_wait_ms: float = above_zero()
    max_tick_age_s: float = above_zero()
    notice_url: str | None = matching(
        "http:// or https:// and a host without a query, such as https://bidder.example",
        lambda url: url is None or re.fullmatch(r"https?://[^\s?#]+", url) is not None,
    )
    shading: bool

    @property
    def journal_path(self) -> Path:
        return Path(self.journal or Path(self.run) / "journal.sqlite")


def check_options(options: ServeConfig) -> None:
    """Raise a ValueError for options that do not fit each other, the token or the runs."""
    from decisionllm.bidding.server.middleware import is_loopback
    from decisionllm.bidding.server.tokens import SHORTEST

    token = os.environ.get("DECISIONLLM_TOKEN", "")
    if token and len(token.encode()) < SHORTEST:
        raise ValueError(f"DECISIONLLM_TOKEN: expected at least {SHORTEST} bytes, got fewer")
    has_token = token or options.tokens
    if not is_loopback(options.host) and not has_token:
        raise ValueError(
            f"host={options.host}: others can reach it: set a token, DECISIONLLM_TOKEN, give a file,"
            " tokens=, or take host=127.0.0.1"
        )
    if options.models and not options.models_dir:
        raise ValueError("models: expected models_dir=..., the folder of these runs, got none")
    if options.shading and not options.notice_url:
        raise ValueError("shading: expected notice_url=..., whose notices it learns from, got none")
    for run in (options.run, options.shadow):
        if run and "policy" in directory.read(run)[0]:
            raise ValueError(f"run={run}: expected a run of `decisionllm train`, got a baseline")
