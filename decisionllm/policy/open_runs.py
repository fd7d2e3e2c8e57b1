"""The runs that a command names, with their policies."""

from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING

from decisionllm.policy import loading
from decisionllm.policy.policy import Policy
from decisionllm.registry import Node
from decisionllm.runs import directory
from decisionllm.schema import Json

if TYPE_CHECKING:
    from decisionllm.baselines.d3rlpy import Baseline


@dataclass(frozen=True)
class OpenedRun:
    """A policy, of a run or of a part of it, and the run's directory."""

    path: Path
    policy: "Policy | Baseline"

    @property
    def config(self) -> Node:
        return self.policy.config

    @property
    def info(self) -> Json:
        return self.policy.info


def open_runs(
    paths: Sequence[Path], *, device: str, seed: int, acting: Node, parts: list[str] | None = None
) -> list[OpenedRun]:
    """Load the policies of run directories, which act as a command says.

    Args:
        paths: of the runs.
        device: of the policies: auto, cpu or cuda.
        seed: of their draws.
        acting: see `load_parts`.
        parts: of a run on a mixture one policy for each of these labels; empty: for each part;
            None: one of the run as a whole.
    """
    opened = []
    for path in paths:
        labels: list[str] = []
        if parts is not None:
            _, info = directory.read(path)
            labels = parts or list(info["parts"])
        for policy in loading.load_parts(path, labels, device=device, **acting):
            policy.reseed(seed)
            opened.append(OpenedRun(path, policy))
    return opened


def run_directories(value: object) -> list[Path]:
    """Return the run directories of a path or pattern, or of a list of them, in their order."""
    directories: list[Path] = []
    patterns = value if isinstance(value, list) else [value]
    for pattern in patterns:
        directories += match_run_directories(str(pattern))
    return directories


def match_run_directories(pattern: str) -> list[Path]:
    """Return a run directory as it is, or those that a pattern such as runs/x/* matches, sorted.

    Raises:
        FileNotFoundError: nothing that the pattern matches is a run directory.
    """
    path = Path(pattern).expanduser()
    if path.exists() or not has_magic(pattern):
        return [path]
    matches = [Path(match) for match in sorted(glob(str(path), recursive=True))]
    runs = [match for match in matches if (match / "run.json").is_file()]
    if not runs:
        raise FileNotFoundError(
            f"run={pattern}: expected a pattern of run directories (with run.json), "
            f"it matches {len(matches)} files or folders and none is a run; `ls {pattern}` shows them"
        )
    return runs
