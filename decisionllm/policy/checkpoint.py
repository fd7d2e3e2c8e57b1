"""A run directory in and out. A checkpoint is a folder of safetensors and JSON, complete by itself but for frozen weights.

runs/x/
  config.yaml         every choice, resolved
  run.json            what the data knew, its fingerprint, the target return, versions, a hash of the frozen weights
  metrics.jsonl       one line a log interval
  checkpoint/         model.safetensors: all that is trained but adapters, and the normaliser
                      adapter/: LoRA, as peft saves it
                      trainer.safetensors, trainer.json: the optimiser's moments, the step, random states
  best/checkpoint/    the same of the lowest held-out loss, where `best` asks for it: what is then loaded
"""

import json
import shutil
import subprocess
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from decisionllm.backbones.build import fingerprint
from decisionllm.models.decision_llm import DecisionLLM
from decisionllm.policy.policy import Policy
from decisionllm.registry import build
from decisionllm.schema import Spec

FORMAT = 2  # of run.json, config.yaml and the names of weights
UPGRADE = "train again with this version, or evaluate it with decisionllm 0.1; CHANGELOG.md lists the options that were renamed"
MAY_DIFFER = ("run", "device", "cache_dir", "fresh", "log.tracker", "log.every", "log.save_every")  # when a run is continued
PACKAGES = ("decisionllm", "torch", "transformers", "peft", "numpy")


def versions():
    """What a result must say about the code: package versions, and the commit where the code is a checkout."""
    found = {name: metadata.version(name) for name in PACKAGES}
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists() or not shutil.which("git"):
        return found | {"commit": None}
    git = subprocess.run(
        ["git", "-C", checkout, "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True
    )
    return found | {"commit": git.stdout.strip() or None}


def make_model(config, spec):
    """The model that a config describes, for data of this spec; new parts and random weights are drawn from the seed."""
    backbone = build(config["backbone"], config["seed"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config["seed"])
        options = {key: value for key, value in config["model"].items() if key != "return_horizon"}
        team = {key: config["team"][key] for key in ("execution", "hide_actions")}
        return DecisionLLM(spec, backbone, config["head"], **options, **team)


def describe(path, config, store, **known):
    """Write what is fixed before the first step: config.yaml and run.json, with whatever else is known of the run."""
    data = {"format": FORMAT, "spec": asdict(store.spec), "dataset": store.info, "fingerprint": store.fingerprint}
    facts = data | {"versions": versions()} | known
    try:
        path.mkdir(parents=True, exist_ok=True)
        for folder in ("checkpoint", "checkpoint.old", "best"):
            shutil.rmtree(path / folder, ignore_errors=True)
        (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        (path / "run.json").write_text(json.dumps(facts, indent=1))
    except OSError as error:
        raise OSError(f"{path}: could not be written ({error}). Make room or choose another run=...") from error


def same_run(path, config, store):
    """The facts of a run that was begun, if it was begun with this config and this data; anything else is an error."""
    before, facts = read(path)
    was, now = flat(before), flat(config)
    different = {key: (was.get(key), now[key]) for key in now if was.get(key) != now[key] and key not in MAY_DIFFER}
    if different:
        shown = "; ".join(f"{key} was {was!r}, is {now!r}" for key, (was, now) in different.items())
        raise ValueError(f"{path} holds another run ({shown}): choose another run=..., or fresh=true to begin again")
    if facts["fingerprint"] != store.fingerprint:
        raise ValueError(
            f"{path} was begun on data {facts['fingerprint']}, this is {store.fingerprint}: choose another run=..., or fresh=true"
        )
    return facts


def read(path):
    """(run_config, run_info) of a run directory: what config.yaml and run.json hold.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: a file is damaged, or another version of the format wrote it.
    """
    path = Path(path)
    if not (path / "run.json").is_file():
        raise FileNotFoundError(f"{path}: expected a run directory (with run.json), found none")
    config, info = content(path / "config.yaml"), content(path / "run.json")
    if info.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a run of format {FORMAT}, got format {info.get('format', 1)}; {UPGRADE}")
    return config, info


def flat(config, at=""):
    """Nested options -> {"optim.lr": 1e-3, ...}."""
    pairs = [flat(v, f"{at}{k}.") if isinstance(v, dict) else {f"{at}{k}": v} for k, v in config.items()]
    return {k: v for part in pairs for k, v in part.items()}


def save(path, model, trainer_tensors, trainer_facts):
    """Write runs/x/checkpoint, all or nothing: until the new one is whole, the old one stays."""
    folder, partial, old = path / "checkpoint", path / "checkpoint.partial", path / "checkpoint.old"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        save_file(_own_state(model), partial / "model.safetensors")
        if model.backbone.tune == "lora":
            model.backbone.model.save_pretrained(partial / "adapter", save_embedding_layers=False)
        save_file(trainer_tensors, partial / "trainer.safetensors")
        (partial / "trainer.json").write_text(json.dumps(trainer_facts))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        kept = "the checkpoint before it is kept" if folder.is_dir() else "there is no earlier one"
        raise OSError(f"{folder}: could not be written ({error}); {kept}. Make room or choose another run=...") from error
    if folder.is_dir():  # if not, the old one is all there is until the new one has its name
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def find(path):
    """The checkpoint folder of a run, or None. A save cut off between its two renames left the old one."""
    return next((folder for folder in (Path(path) / "checkpoint", Path(path) / "checkpoint.old") if folder.is_dir()), None)


def weights_folder(path, config):
    """Where the weights of a run stand that act: those of the lowest held-out loss, if it was asked for them, or the last."""
    return Path(path) / "best" if config["log"]["keep_best"] else Path(path)


def restore(path, model, facts):
    """Load a checkpoint's weights into a model made from the same config; anything that does not fit is an error."""
    folder = find(path)
    if folder is None:
        raise FileNotFoundError(f"{path}: expected a run with a checkpoint, found none; train it first")
    own, adapter = content(folder / "model.safetensors"), {}
    if model.backbone.tune == "lora":
        adapter = content(folder / "adapter" / "adapter_model.safetensors")
    wanted, saved = _own_state(model) | _adapter_state(model), own | adapter
    lacking, extra = sorted(set(wanted) - set(saved)), sorted(set(saved) - set(wanted))
    if lacking or extra:
        raise ValueError(
            f"{folder}: not this model's weights; {_names('missing', lacking)}{_names('unknown', extra)}the config names another backbone, head or embedding than was trained"
        )
    for name, tensor in saved.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(
                f"{folder}: {name} is {tuple(tensor.shape)}, expected {tuple(wanted[name].shape)}; it was trained with other sizes"
            )
    if facts["frozen"] != fingerprint(model.backbone):
        raise ValueError(f"{folder}: trained on a backbone whose frozen weights were different; load the one it was trained on")
    if adapter:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model.backbone.model, adapter)
    model.load_state_dict(own, strict=False)


def content(path):
    """What a file of a run holds: named tensors, or what its YAML or JSON says."""
    parse = {
        ".safetensors": load_file,
        ".json": lambda p: json.loads(p.read_text()),
        ".yaml": lambda p: yaml.safe_load(p.read_text()),
    }
    try:
        return parse[path.suffix](path)
    except (OSError, ValueError, SafetensorError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is damaged or missing ({error}); train again, or restore a copy") from error


def usable(device):
    """auto, cpu or cuda -> cpu or cuda, if torch can use it."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: expected auto, cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: no GPU that torch can use was found; take device=cpu, or a CUDA build of torch")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def load(path, *, device="cpu", target_return=None, **options):
    """A run directory -> (Policy, config, facts). options: stride, decode, ... in place of the run's own.

    A config with a `policy` names the class that reads the run instead, from (path, facts, device), and which acts as it was made to.
    """
    (config, facts), device = read(path), usable(device)
    if "policy" in config:
        return build(config["policy"], path, facts, device), config, facts
    spec = Spec(**{key: tuple(value) if isinstance(value, list) else value for key, value in facts["spec"].items()})
    model = make_model(config, spec)
    restore(weights_folder(path, config), model, facts)
    act, team = config["act"], config["team"]
    own = {"execution": "per_agent" if team["execution"] == "per_agent" else "joint", "order": team["order"]}
    own |= {
        "decode": act["decode"],
        "planning_horizon": act["planning_horizon"],
        "return_horizon": config["model"]["return_horizon"],
    }
    options = own | {key: value for key, value in options.items() if value is not None}
    stride = options.pop("stride", act["stride"]) or max(config["window"] // 2, 1)
    quantile = None if config["model"]["max_return_expectile"] else target(facts, act["target_quantile"])
    asked = quantile if target_return is None else target_return
    return Policy(model.to(device), config["window"], stride, asked, device=device, **options), config, facts


def target(facts, quantile):
    """The return at this quantile of those that a run was trained on, if it wrote that one down."""
    if str(float(quantile)) not in facts["targets"]:
        raise ValueError(
            f"quantile: this run knows those of {', '.join(facts['targets'])}, got {quantile}; target_returns=[...] takes any return"
        )
    return facts["targets"][str(float(quantile))]


def _own_state(model):
    """All that a checkpoint must hold: what is trained, but for adapters, and the normaliser."""
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad and "lora_" not in name}
    state = {name: tensor for name, tensor in model.state_dict().items() if name in trained or name.startswith("normalizer.")}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def _adapter_state(model):
    """The adapters, as peft names them."""
    if model.backbone.tune != "lora":
        return {}
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model.backbone.model, save_embedding_layers=False)


def _names(word, names):
    return f"{word}: {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}; " if names else ""
