"""A trained run as a policy that acts."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from decisionllm.datasets.mixture_parts import ONLY
from decisionllm.hardware import resolve_device
from decisionllm.models.generalist import Model, members
from decisionllm.models.sequence import SequenceModel
from decisionllm.policy.policy import Policy
from decisionllm.registry import Node, build
from decisionllm.runs.checkpoint import checkpoint_folder, load_model
from decisionllm.runs.directory import part_config, read, read_file, target_return
from decisionllm.runs.hub import find_run
from decisionllm.schema import Json
from decisionllm.trust import trust_modules

if TYPE_CHECKING:
    from decisionllm.baselines.d3rlpy import Baseline


def load(
    run: str | Path,
    *,
    part: str | None = None,
    device: str = "cpu",
    trust: Sequence[str] = (),
    **acting: object,
) -> "Policy | Baseline":
    """Load the policy of a run, public as `decisionllm.load`.

    Args:
        run: the run directory; a folder that `decisionllm export format=hub` wrote; or the name of
            such a folder on the hub, such as me/policy, which is downloaded into its cache.
        part: label of a part, of a run on a mixture: acts with its targets.
        device: auto, cpu or cuda.
        trust: modules whose code the run may execute, such as ["mylab"], which covers mylab.heads.
            Without them a run that names anything but registered choices is refused.
        acting: target_return in raw reward units, and fields of `Policy` such as decode or
            planning_horizon, in place of the run's own.

    Returns:
        A `Policy`: `policy.act(histories)`, `policy.begin(tasks, horizon)`; the run's config is
        `policy.config`; `policy.info` is run.json with the spec, dataset and targets of the
        policy's own data. A run of `decisionllm baseline` gives a baseline with the same `begin`,
        `config` and `info`.

    Raises:
        FileNotFoundError: there is no run, or no checkpoint; the hub cannot be reached.
        ValueError: a file is damaged or does not fit the others, an option cannot be, or the run
            would execute code that is not trusted.
    """
    parts = [] if part is None else [part]
    with trust_modules(trust):
        return load_parts(find_run(run), parts, device=device, **acting)[-1]


def load_policy(
    run: str | Path,
    *,
    part: str | None = None,
    device: str = "cpu",
    trust: Sequence[str] = (),
    **acting: object,
) -> Policy:
    """`load` of a run that is not a baseline, which has a model and acts from histories.

    Raises:
        ValueError: the run is a baseline; and what `load` raises.
    """
    policy = load(run, part=part, device=device, trust=trust, **acting)
    if not isinstance(policy, Policy):
        raise ValueError(f"run={run}: expected a run of `decisionllm train`, got a baseline")
    return policy


def load_parts(
    path: str | Path, parts: Sequence[str] = (), *, device: str = "cpu", **acting: object
) -> "list[Policy] | list[Baseline]":
    """Load a run once, to act in each of several datasets that it was trained on.

    Args:
        path: the run directory.
        parts: labels of parts of a mixture; none: the run as a whole.
        device: auto, cpu or cuda.
        acting: target_return in raw reward units, None: the headline target of the run or the part;
            and other fields of `Policy`, such as decode or planning_horizon, None: as the run's
            config says.

    Returns:
        The policy of each part: its `config` and `info` have the env, dataset and targets of the
        part. It is a `Policy`, or what the config names under `policy` makes of (the checkpoint's
        tensors by name, device), which has its `begin`.

    Raises:
        FileNotFoundError: there is no run, or no checkpoint.
        ValueError: a file is damaged or does not fit the others, or an option or a part cannot be.
    """
    config, info = read(path)
    device = resolve_device(device)
    if "policy" in config:
        tensors = read_file(checkpoint_folder(path) / "model.safetensors")
        baseline: Baseline = build(config["policy"], tensors, device)
        baseline.config = config
        baseline.info = info | info["embodiments"][ONLY]
        return [baseline]
    info_by_part = info["parts"]
    for part in parts:
        if part not in info_by_part:
            labels = ", ".join(info_by_part) or "none, the run is of one dataset"
            raise ValueError(f"part: expected one of {labels}, got {part!r}")
    if ONLY not in info["embodiments"] and not parts:
        labels = ", ".join(info_by_part)
        raise ValueError(f"{path}: its parts have spaces of their own; give part=, one of {labels}")
    model = load_model(path, config, info).to(device)
    return build_policies(model, config, info, parts, acting | {"device": device})


def build_policies(
    model: Model, config: Node, info: Json, parts: Sequence[str], acting: Json
) -> list[Policy]:
    """Build the policy of a model for each of these parts of its data, or as a whole; see
    `load_parts`.
    """
    model_by_embodiment = members(model)
    embodiments = info["embodiments"]
    if not parts:
        return [build_policy(model_by_embodiment[ONLY], config, info | embodiments[ONLY], acting)]
    policies = []
    for part in parts:
        part_info = info["parts"][part]
        embodiment = part_info["embodiment"]
        policies.append(
            build_policy(
                model_by_embodiment[embodiment],
                part_config(config, part, part_info),
                info | embodiments[embodiment] | part_info,
                acting,
            )
        )
    return policies


def build_policy(model: SequenceModel, config: Node, info: Json, acting: Json) -> Policy:
    """Build the policy that a run's config describes; `acting` replaces fields of `Policy`."""
    act = config["act"]
    options: Node = {
        "stride": act["stride"],
        "decode": act["decode"],
        "execution": config["team"]["execution"],
        "target_return": None,
    }
    if options["execution"] == "both":
        options["execution"] = "joint"
    if model.planner is not None:
        options["planning_horizon"] = model.planner.horizon
        options["planning_value"] = model.planner.least_value
    options |= {key: value for key, value in acting.items() if value is not None}
    options["stride"] = options["stride"] or max(config["window"] // 2, 1)
    if options["target_return"] is None and not model.predicts_return:
        options["target_return"] = target_return(info, act["target_quantile"])
    return_horizon = config["model"]["return_horizon"]
    return Policy(
        model, config["window"], return_horizon=return_horizon, config=config, info=info, **options
    )
