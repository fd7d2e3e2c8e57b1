"""The folder of a dataset: one of this machine, or a download from the Hugging Face Hub."""

from collections.abc import Sequence
from pathlib import Path

HUB_SECONDS = 5.0  # within which the Hub must answer


def find_folder(path: str, repo_id: str, revision: str, patterns: Sequence[str]) -> Path:
    """Return the file or folder of the options `path` and `repo_id` of a dataset.

    Args:
        path: a file or folder.
        repo_id: of a dataset on the Hub, in place of a path.
        revision: branch, tag or commit of the repository.
        patterns: of the files of the repository to download.

    Raises:
        FileNotFoundError: nothing is there, or the Hub cannot be reached.
        ValueError: not one of both is given.
    """
    if bool(path) == bool(repo_id):
        raise ValueError(
            "dataset: expected one of dataset.path=FOLDER and dataset.repo_id=OWNER/NAME, got "
            f"{path!r} and {repo_id!r}"
        )
    if repo_id:
        return download(repo_id, revision, patterns)
    root = Path(path).expanduser()
    if not root.exists():
        raise FileNotFoundError(f"dataset.path: expected a file or folder, {root} is not there")
    return root


def download(repo_id: str, revision: str, patterns: Sequence[str]) -> Path:
    """Return the folder of a dataset of the Hub: a download, or without a network the copy in the
    cache of `huggingface_hub`.

    Raises:
        FileNotFoundError: the Hub cannot be reached, or lacks it, and no copy is there.
    """
    from huggingface_hub import HfApi, snapshot_download

    fault = ""
    try:  # one request without retries, of which a download makes many
        HfApi().dataset_info(repo_id, revision=revision, timeout=HUB_SECONDS)
    except Exception as error:  # of the HTTP library that this version of huggingface_hub takes
        fault = (str(error) or type(error).__name__).splitlines()[0]
    try:
        folder = snapshot_download(
            repo_id,
            repo_type="dataset",
            revision=revision,
            allow_patterns=list(patterns),
            local_files_only=bool(fault),
        )
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"dataset.repo_id: expected {repo_id}, revision {revision}, on the Hugging Face Hub or in "
            f"its cache, got: {fault or error}; where there is a network run `hf download {repo_id} "
            "--repo-type dataset --local-dir FOLDER`, and take dataset.path=FOLDER here"
        ) from error
    return Path(folder)
