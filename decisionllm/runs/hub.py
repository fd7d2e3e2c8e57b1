"""A run as a folder of the Hugging Face Hub, which `decisionllm export format=hub` writes.

config.json          the content of config.yaml and run.json of the run
model.safetensors    trained weights but adapters, and buffers, such as the normaliser's
trainer.json         the step of the weights
adapter/             LoRA, as peft saves it
base/                the model that was adapted, as transformers saves it; missing if config.json
                     names one that anyone can get
checksums.json       of these files
README.md            the model card

Weights are named as in a checkpoint, see `checkpoint`.
"""

import json
from pathlib import Path

from decisionllm.files import check_all, explain_errors
from decisionllm.hub import download
from decisionllm.schema import Json

LIBRARY = "decisionllm"  # library_name in config.json and in the model card
CONFIG = "config.json"
BASE = "base"
COPY_AGAIN = "download it again, or export the run again"


def is_hub_folder(path: str | Path) -> bool:
    """Return whether a folder may be one that was exported, and is no run directory."""
    return (Path(path) / CONFIG).is_file() and not (Path(path) / "run.json").is_file()


def read_hub_folder(path: Path) -> tuple[Json, Json]:
    """Return run_config and run_info of an exported folder; a ValueError if a file is damaged or
    missing, or if the folder is of another library.
    """
    file = path / CONFIG
    check_all(path, fix=COPY_AGAIN)
    with explain_errors(f"{file} is damaged", ValueError, fix=COPY_AGAIN):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("library_name") != LIBRARY:
        raise ValueError(
            f"{path}: expected a folder of `decisionllm export format=hub`, got a {CONFIG} of "
            "another library; a language model is read by backbone=pretrained backbone.folder=..."
        )
    config, info = content["config"], content["run"]
    if config["backbone"].get("folder") == BASE:
        config["backbone"]["folder"] = str(path / BASE)
    return config, info


def find_run(run: str | Path) -> Path:
    """Return the folder of a run: its path, or, of a name on the hub such as me/policy, the copy in
    the cache, which is downloaded if there is a newer one.

    Raises:
        FileNotFoundError: there is no such folder, and the hub cannot be reached or lacks it.
    """
    path = Path(run).expanduser()
    owner, slash, name = str(run).partition("/")
    is_hub_id = bool(owner and slash and name) and "/" not in name and owner not in (".", "..", "~")
    if path.exists() or not is_hub_id:
        return path
    expected = (
        f"{run}: expected a run directory (with run.json), found none, and no policy of the hub"
    )
    fix = "without a network give the path of a copy of its folder"
    with explain_errors(expected, OSError, fix=fix, raised=FileNotFoundError):
        return download(str(run))
