"""The Hugging Face Hub: one question whether it has a repository, and the folder of a download."""

from collections.abc import Sequence
from pathlib import Path

HUB_SECONDS = 5.0  # within which the Hub must answer


def ask_hub(repo_id: str, repo_type: str = "model", revision: str | None = None) -> None:
    """Raise an OSError unless the Hub says that it has a repository.

    It is one request without retries. A download retries each file for most of a minute.

    Args:
        repo_id: OWNER/NAME.
        repo_type: "model" or "dataset".
        revision: branch, tag or commit; None for its default.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().repo_info(repo_id, repo_type=repo_type, revision=revision, timeout=HUB_SECONDS)
    except Exception as error:  # of the HTTP library that this version of huggingface_hub takes
        raise OSError((str(error) or type(error).__name__).splitlines()[0]) from error


def download(
    repo_id: str,
    repo_type: str = "model",
    revision: str | None = None,
    patterns: Sequence[str] | None = None,
) -> Path:
    """Return the folder of a repository: a download, or, if the Hub can't be reached or lacks it,
    the copy in the cache of `huggingface_hub`.

    Args:
        repo_id, repo_type, revision: see `ask_hub`.
        patterns: of the files to download; None for all.

    Raises:
        OSError: the Hub can't be reached or lacks it, and no copy is in the cache.
    """
    from huggingface_hub import snapshot_download

    fault: OSError | None = None
    try:
        ask_hub(repo_id, repo_type, revision)
    except OSError as error:
        fault = error
    allowed = None if patterns is None else list(patterns)
    try:
        folder = snapshot_download(
            repo_id,
            repo_type=repo_type,
            revision=revision,
            allow_patterns=allowed,
            local_files_only=fault is not None,
        )
    except (OSError, ValueError) as error:
        raise OSError(str(fault or error).splitlines()[0]) from error
    return Path(folder)
