"""A run as a folder of the Hugging Face Hub, see `runs.hub` for its files."""

import json
import shutil
from pathlib import Path

from decisionllm.backbones.build import DTYPES
from decisionllm.backbones.export_hf import save_base
from decisionllm.backbones.forward import Backbone
from decisionllm.backbones.lora_options import describe_lora
from decisionllm.config import train_config
from decisionllm.export.folders import explain_write_errors, read_trained_run
from decisionllm.export.model_card import CardOptions, check_hub_ids, make_card
from decisionllm.files import atomic, check_writable, new_path, seal
from decisionllm.registry import Node, choice, fill_option_defaults
from decisionllm.runs import checkpoint
from decisionllm.runs.directory import read_file
from decisionllm.runs.hub import BASE, CONFIG, LIBRARY

BUILT_HERE = "decisionllm.backbones.build."  # functions whose backbone `pretrained` builds too
SMOLLM2 = f"{BUILT_HERE}smollm2"
SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
# options of `pretrained` about what is trained, which stay as they are
TRAINED_PARTS = ("tune", "lora_rank", "lora_alpha", "lora_targets", "lora", "text_summary")


def write_hub_folder(run: Path, path: Path, card: CardOptions) -> tuple[str, int]:
    """Write a run as a folder that `decisionllm.load` reads and the hub shows.

    Weights are copied from the checkpoint that acts. A base model that config.json does not name is
    written beside them, so that the folder is whole.

    Args:
        run: the run directory, or such a folder.
        path: a new folder.
        card: what the model card says and the run does not know.

    Returns:
        The name of the base model, `base/` if it is in the folder; the number of scores in the
        model card.

    Raises:
        FileExistsError: the path is there already.
        ValueError: a baseline, a damaged run, or an option of the card that the hub does not take.
    """
    path = new_path(path)
    check_hub_ids(card)
    config, info = read_trained_run(run)
    check_writable(path.parent, option="path=...")
    model = checkpoint.load_model(run, config, info)
    weights = checkpoint.checkpoint_folder(checkpoint.weights_folder(run, train_config(config)))
    backbone_node, base = name_base_model(config["backbone"], model.backbone, card.base_model)
    content = {
        "library_name": LIBRARY,
        "format": info["format"],
        "config": config | {"backbone": backbone_node},
        "run": info,
    }
    state = {
        "step": read_file(weights / "trainer.json")["step"],
        "finished": checkpoint.interrupted_step(run) is None,
    }
    model_card, num_scores = make_card(run, path.name, config, info, state, base=base, card=card)
    with explain_write_errors(path), atomic(path) as partial:
        partial.mkdir()
        shutil.copy(weights / "model.safetensors", partial)
        files = ["model.safetensors", "trainer.json", CONFIG]
        if (weights / "adapter").is_dir():
            copy_adapter(weights / "adapter", partial / "adapter", base)
            files += [f"adapter/{file.name}" for file in sorted((partial / "adapter").iterdir())]
        if base == BASE:
            save_base(model.backbone, partial / BASE)
            seal(partial / BASE)
            files.append(f"{BASE}/checksums.json")
        (partial / "trainer.json").write_text(json.dumps(state), encoding="utf-8")
        (partial / CONFIG).write_text(json.dumps(content, indent=1), encoding="utf-8")
        seal(partial, *files)  # not README.md, which people edit on the hub
        model_card.save(partial / "README.md")
    return base, num_scores


def name_base_model(node: Node, backbone: Backbone, base_model: str | None) -> tuple[Node, str]:
    """Return the config node by which a reader anywhere builds a backbone, and its base model.

    The base model is a name on the hub; BASE: it is written into the folder; "": there is none, or
    code of the user's makes it.

    Args:
        node: of the run.
        backbone: of the run.
        base_model: name on the hub of a model that the run read from a folder.
    """
    if not node["_target_"].startswith(BUILT_HERE):
        return node, base_model or ""
    node = fill_option_defaults(node)
    if node.get("adapter"):  # which gave the run its options and first weights
        lora = describe_lora(backbone.model.peft_config["default"])
        node |= {"adapter": "", "lora": lora}
    is_published = node.get("weights") == "pretrained"
    if base_model and not (is_published and node.get("folder")):
        raise ValueError(
            f"card.base_model={base_model}: expected a run whose backbone was read from a folder "
            f"(backbone.folder) with weights=pretrained, got {node}"
        )
    if base_model:
        return node | {"folder": "", "hub_id": base_model}, base_model
    if node["_target_"] == SMOLLM2 and is_published:
        return node, SMOLLM2_ID
    if node.get("hub_id") and is_published:
        return node, node["hub_id"]
    dtypes = {dtype: name for name, dtype in DTYPES.items()}
    # the weights of a backbone that was trained whole are those of the run
    weights = "random" if backbone.tune == "full" else "pretrained"
    options = {name: node[name] for name in TRAINED_PARTS if name in node}
    options |= {"folder": BASE, "weights": weights, "dtype": dtypes[backbone.frozen_dtype]}
    return choice("backbone", "pretrained", **options), BASE


def copy_adapter(source: Path, target: Path, base: str) -> None:
    """Copy an adapter of peft, whose config then names the base model in place of a local path."""
    shutil.copytree(source, target)
    for readme in target.glob("README.md"):  # of peft, with questions that nobody answered
        readme.unlink()
    file = target / "adapter_config.json"
    adapter = json.loads(file.read_text(encoding="utf-8"))
    adapter["base_model_name_or_path"] = base
    file.write_text(json.dumps(adapter, indent=2), encoding="utf-8")
