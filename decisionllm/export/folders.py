"""What all exported folders have in common: the run that is read, their size, errors of writing."""

from contextlib import AbstractContextManager
from pathlib import Path

from safetensors import SafetensorError

from decisionllm.files import explain_errors
from decisionllm.runs import directory
from decisionllm.schema import Json


def read_trained_run(run: Path) -> tuple[Json, Json]:
    """Return run_config and run_info, see `directory.read`; a ValueError for a baseline too."""
    config, info = directory.read(run)
    if "policy" in config:
        raise ValueError(f"run={run}: expected a run of `decisionllm train`, got a baseline")
    return config, info


def folder_megabytes(folder: Path) -> float:
    """Return the size of the files in a folder and below it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def explain_write_errors(path: Path) -> AbstractContextManager[None]:
    """Explain an error of writing a folder, such as a full disk."""
    return explain_errors(
        f"{path}: could not be written",
        OSError,
        SafetensorError,
        fix="nothing of it is left; make room, or choose another path=...",
        raised=OSError,
    )
