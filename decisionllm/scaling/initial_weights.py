"""The weights that a training begins with, and their digests."""

import hashlib
from pathlib import Path

from decisionllm.registry import Node


def list_initial_weights(config: Node) -> dict[str, str]:
    """List the weights that a training begins with: {key of their digest in a job: folder or file}.

    An empty place means none.
    """
    return {"backbone": config["backbone"].get("folder", ""), "init_from": config["init_from"]}


def digest_weights(folder: str | None) -> str | None:
    """Return a digest of weights; None without any.

    Args:
        folder: of a model or a run, with safetensors, or a GGUF file.
    """
    if not folder:
        return None
    path = Path(folder).expanduser()
    files = [path] if path.suffix == ".gguf" else sorted(path.rglob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()
