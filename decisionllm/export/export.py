"""`decisionllm export`: a trained policy as ONNX graphs or as a folder of the Hugging Face Hub, or
its language model alone.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from decisionllm.backbones.export_hf import save_merged
from decisionllm.commands.options import read_options, word
from decisionllm.export.folders import explain_write_errors, folder_megabytes, read_trained_run
from decisionllm.export.hub_folder import write_hub_folder
from decisionllm.export.model_card import CardOptions
from decisionllm.export.onnx_policy import measure_difference, write_onnx
from decisionllm.files import atomic_folder, check_writable, new_path
from decisionllm.policy import loading
from decisionllm.registry import Node
from decisionllm.runs import checkpoint
from decisionllm.trust import trust_user_modules


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The options of `export`; configs/export.yaml explains them and has their defaults."""

    run: str
    part: str | None
    format: str = word("onnx", "transformers", "hub")
    path: str | None
    trust: list[str]
    act: Node  # fields of `Policy`; None: as the run was trained to
    card: CardOptions


@trust_user_modules
def export(config: Node) -> None:
    """Export a run (see configs/export.yaml)."""
    options = read_options(ExportConfig, config)
    run = Path(options.run)
    path = Path(options.path or run / options.format)
    if options.format == "transformers":
        refuse_options(options, "part", "act", "card", reason="which are of a policy")
        export_language_model(run, path)
    elif options.format == "hub":
        refuse_options(options, "part", "act", reason="which are chosen where the policy is loaded")
        export_hub_folder(run, path, options.card)
    else:
        refuse_options(options, "card", reason="which is written by format=hub")
        export_onnx(options, run, path)


def refuse_options(options: ExportConfig, *groups: str, reason: str) -> None:
    """Raise a ValueError if options are given that the format has no use for."""
    values = asdict(options)
    got = []
    for group in groups:
        value = values[group]
        if isinstance(value, dict):
            got += [f"{group}.{name}" for name, each in value.items() if each not in (None, [])]
        elif value is not None:
            got.append(group)
    if got:
        raise ValueError(
            f"format={options.format}: expected no {' and no '.join(groups)}, {reason}, got "
            f"{', '.join(got)}"
        )


def export_onnx(options: ExportConfig, run: Path, path: Path) -> None:
    """Write a policy as ONNX graphs, and print by how much its actions differ."""
    policy = loading.load_policy(run, part=options.part, **options.act)
    write_onnx(policy, path, policy.info, name=run.name)
    largest_difference = measure_difference(policy, path)
    print(
        f"exported {run} to {path}, {folder_megabytes(path):.1f} MB; over 20 random histories its "
        f"actions differ from policy.act by at most {largest_difference:.1e} of their range",
        flush=True,
    )


def export_hub_folder(run: Path, path: Path, card: CardOptions) -> None:
    """Write a run as a folder of the hub, and print what it holds; see `write_hub_folder`."""
    base, num_scores = write_hub_folder(run, path, card)
    print(
        f"exported {run} to {path}, {folder_megabytes(path):.1f} MB; base model: {base}; "
        f"{num_scores} scores in its README.md",
        flush=True,
    )


def export_language_model(run: Path, path: Path) -> None:
    """Write the language model of a run as a folder that transformers reads alone.

    See `export_hf.save_merged`.

    Args:
        run: the run directory.
        path: a new folder.

    Raises:
        FileExistsError: the path is there already.
        ValueError: a baseline, or the run is damaged.
    """
    path = new_path(path)
    config, info = read_trained_run(run)
    check_writable(path.parent, option="path=...")
    backbone = checkpoint.load_model(run, config, info).backbone
    with explain_write_errors(path), atomic_folder(path) as partial:
        largest_difference = save_merged(backbone, partial)
    merged = ", adapters merged in float32" if backbone.tune == "lora" else ""
    print(
        f"exported the language model of {run} to {path}, {folder_megabytes(path):.1f} "
        f"MB{merged}; loaded by transformers alone its hidden states differ from the run's by at "
        f"most {largest_difference:.1e} of the largest",
        flush=True,
    )
