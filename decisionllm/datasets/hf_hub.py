"""The folder of a dataset: one of this machine, or a download from the Hugging Face Hub."""

from collections.abc import Sequence
from pathlib import Path

from decisionllm.files import explain_errors
from decisionllm.hub import download


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
        expected = (
            f"dataset.repo_id: expected {repo_id}, revision {revision}, on the Hugging Face Hub or in "
            "its cache"
        )
        fix = (
            f"where there is a network run `hf download {repo_id} --repo-type dataset --local-dir "
            "FOLDER`, and take dataset.path=FOLDER here"
        )
        with explain_errors(expected, OSError, fix=fix, raised=FileNotFoundError):
            return download(repo_id, "dataset", revision, patterns)
    root = Path(path).expanduser()
    if not root.exists():
        raise FileNotFoundError(f"dataset.path: expected a file or folder, {root} is not there")
    return root
