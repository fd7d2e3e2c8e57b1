"""Options: the typed configuration of training, composing and checking what a user wrote, nearest
names in errors.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from decisionllm import registry

Node = dict[str, Any]  # of a registered choice: `_target_` and its options, see registry.choice


@dataclass
class DataOptions:
    """Which episodes of the dataset are trained on."""

    fraction: float = 1.0  # data volume: share of the groups that is kept
    # data quality: drop episodes whose return is below this quantile
    min_return_quantile: float = 0.0
    # below 1: draw early steps more often, step t with relative frequency step_discount^t
    step_discount: float = 1.0
    # windows of a batch that share a text: where texts differ, fewer of them are read
    rows_per_text: int = 1
    # turn and mirror each window at random; the log says which of its numbers are vectors in a
    # plane
    symmetries: bool = False
    # how often parts of a mixture are drawn; []: all alike
    part_weights: list[float] = field(default_factory=list)
    held_out: float = 0.02  # share of the groups never trained on
    seed: int = 0  # of the choice of groups, and of what a transform changes
    # or inverse_dynamics: fill in missing actions by the observations before and after
    fill_actions: str = "none"


@dataclass
class ModelOptions:
    """What the model reads and learns."""

    # a return-to-go token before each observation; none: behaviour cloning
    condition_on: str = "return_to_go"
    return_horizon: int = 0  # a return counts this many next steps; 0: to the end of the episode
    embedding: str = "linear"  # or mlp
    timesteps: str = "learned"  # or none
    # root mean square of a token of the trajectory at the beginning of training
    token_scale: float = 1.0
    # attention layers between the entities of an observation, where the data has an entity schema
    entity_layers: int = 0
    # the model never reads these numbers of an observation
    hide_observations: list[int] = field(default_factory=list)
    # a past action is hidden from its agent with this probability in training; 1: also when it acts
    hide_actions: float = 0.0
    # the backward pass computes each block again: less memory, a third more time
    gradient_checkpointing: bool = False


@dataclass
class TeamOptions:
    """Agents whose episodes share a group."""

    # each agent reads its own episode; joint: one token list a team; both: half of each
    execution: str = "per_agent"


@dataclass
class OptimOptions:
    """The optimiser."""

    batch_size: int = 64  # windows a step, over all processes
    accumulate: int = 1  # micro-batches a step and process
    lr: float = 1e-3
    lr_backbone: float = "${optim.lr}"  # type: ignore[assignment]  # an interpolation: of the backbone or its adapters
    weight_decay: float = 1e-2
    warmup: int = 100  # steps
    clip: float = 1.0  # of the gradient's norm; 0: none
    precision: str = "auto"  # no, bf16, auto: bf16 where the processor supports it natively


@dataclass
class LogOptions:
    """Validation, checkpoints and trackers."""

    every: int = 100  # steps
    save_every: int = 1000  # steps
    validation_batches: int = 4
    # steps between short rollouts in the run's environment, whose score is logged; 0: none
    rollout_every: int = 0
    rollout_episodes: int = 20  # of each of these rollouts
    # act with the weights of the lowest held-out loss, `loss`, or of the highest score of a rollout,
    # `score`; empty: with the last ones
    keep_best: str = ""
    tracker: str = "tensorboard"  # wandb, none


@dataclass
class ActOptions:
    """How the trained policy acts, unless evaluate or serve say otherwise."""

    # the headline target return: this quantile of the training returns
    target_quantile: float = 0.9
    stride: int = 0  # old steps that leave a full window at once; 0: half the window
    decode: str = "mode"  # mean, sample, unclipped


@dataclass
class TrainConfig:
    """Everything that a training run depends on; the options of `decisionllm train`.

    Make nodes with registry.choice.
    """

    dataset: Node
    backbone: Node
    head: Node
    # where `evaluate` rolls the run out
    env: Node = field(default_factory=lambda: {"_target_": "none"})
    name: str = "policy"  # of the policy, in results
    run: str = "runs/policy"  # the run directory
    # where data stores are kept
    cache_dir: str = '${oc.env:DECISIONLLM_HOME,"~/.cache/decisionllm"}'
    # start with the weights of this run: of its backbone, and of each embodiment of the data's
    # space
    init_from: str = ""
    # change the log before it is read: unlabelled, corrupted
    transform: Node = field(default_factory=lambda: {"_target_": "none"})
    # what is minimised
    objective: Node = field(default_factory=lambda: registry.choice("objective", "likelihood"))
    # value: plan to a value learned in a learned model
    planner: Node = field(default_factory=lambda: {"_target_": "none"})
    text: str = "none"  # task text of every episode: none, or what the dataset offers
    text_wordings: int = 0  # with text=paraphrased, train on so many sentence frames; 0: all
    # features: of a frozen language model
    text_encoder: Node = field(default_factory=lambda: {"_target_": "none"})
    window: int = 20  # T, steps of history
    steps: int = 2000
    # stop after so many minutes, if that is sooner; the schedule follows; 0: no limit
    minutes: float = 0.0
    seed: int = 0
    device: str = "auto"  # cpu, cuda, auto
    fresh: bool = False  # begin again in a run directory that holds a run
    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    team: TeamOptions = field(default_factory=TeamOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    log: LogOptions = field(default_factory=LogOptions)
    act: ActOptions = field(default_factory=ActOptions)


KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "keys with values",
}


PLACES = ("run", "out", "init_from")  # options of commands that are paths


OPTIONAL = ("text_encoder", "transform", "planner")  # groups of choices that are none by default


class UsageError(Exception):
    """The command line names what does not exist, or gives a value that cannot be."""


def plain(config: Any) -> dict[str, Any]:
    """A TrainConfig, or a dict of its form, as resolved plain dicts."""
    from omegaconf import OmegaConf

    given = asdict(config) if isinstance(config, TrainConfig) else config
    resolved = OmegaConf.to_container(
        given if OmegaConf.is_config(given) else OmegaConf.create(given), resolve=True
    )
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def train_config(options: dict[str, Any]) -> TrainConfig:
    """Resolved plain dicts as a TrainConfig; an option left out has its default."""
    groups: dict[str, Any] = {
        f.name: f.default_factory for f in fields(TrainConfig) if is_dataclass(f.default_factory)
    }
    return TrainConfig(
        **options | {name: group(**options.get(name, {})) for name, group in groups.items()}
    )


def flat(config: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Nested options as {"optim.lr": 1e-3, ...}; an empty dict is a value."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= (
            flat(value, f"{at}{key}.")
            if isinstance(value, dict) and value
            else {f"{at}{key}": value}
        )
    return found


def merged(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config with these changes, nested dicts merged."""
    nested = {
        k: merged(config[k], v)
        for k, v in changes.items()
        if isinstance(v, dict) and isinstance(config.get(k), dict)
    }
    return {**config, **changes, **nested}


def env_options_of(run_config: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Options given for an environment; those that a choice by its name takes from a run, such as
    its text, from this one.
    """
    return plain(run_config | {"env": given})["env"]  # type: ignore[no-any-return]


def configs() -> Path:
    """The folder of YAML files: beside the package in a checkout, inside it in a wheel."""
    here = Path(__file__).resolve().parent
    return next(folder for folder in (here / "configs", here.parent / "configs") if folder.is_dir())


def with_defaults(command: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options of a command, those left out as in configs/COMMAND.yaml; a ValueError for
    an unknown one.
    """
    import yaml

    options = yaml.safe_load((configs() / f"{command}.yaml").read_text())
    options = {key: value for key, value in options.items() if key not in ("defaults", "hydra")}
    if wrong := next((key for key in given if key not in options), None):
        raise ValueError(unknown_key(wrong, options))
    return merged(options, given)


@cache
def store_choices() -> None:
    """File every registered choice, and the defaults of `train`, in Hydra's ConfigStore."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    found, store, none = registry.discover(), ConfigStore.instance().store, {"_target_": "none"}
    # a dataset without an env of its name has none
    envs = dict.fromkeys(["none", *found["dataset"]], none) | found["env"]
    groups = {**found, "env": envs} | {group: {"none": none} | found[group] for group in OPTIONAL}
    for group, choices in groups.items():
        for name, node in choices.items():
            store(group=group, name=name, node=node)
    # until one is chosen, see `checked_options`; --help and --cfg job need none
    store(group="dataset", name="none", node=none)
    defaults = asdict(TrainConfig(dataset={}, backbone={}, head={}))
    store(
        name="train_options",
        node={key: value for key, value in defaults.items() if key not in groups},
    )
    OmegaConf.register_new_resolver("policy_name", policy_name, replace=True)


def policy_name(choice: str, *, _root_: Any) -> str:
    """The name of a policy by default: of the backbone that is built, safe in a path.

    Args:
        choice: of the group `backbone`.
        _root_: the config, as OmegaConf passes it.

    Returns:
        The last word of backbone._target_ if it is not that of the choice; the name of
        backbone.folder or backbone.hub_id; or the choice.
    """
    from omegaconf import OmegaConf

    target, folder, hub_id = (
        OmegaConf.select(_root_, f"backbone.{key}") for key in ("_target_", "folder", "hub_id")
    )
    if target != registry.discover()["backbone"].get(choice, {}).get("_target_"):
        return str(target).rpartition(".")[2]
    source = str(folder or hub_id or "")
    name = Path(source).expanduser().absolute().name if source else ""
    safe = re.sub(r"[^\w.+-]+", "-", name.removesuffix(".gguf")).strip("-.")
    return safe or choice


def checked_options(
    config: Any, command: str, chosen: Mapping[str, Any], words: Iterable[str]
) -> dict[str, Any]:
    """The config as plain dicts: a value for every key, in the type of its default, and no key that
    nothing reads.

    If `_target_` is replaced, only the options that the user gave are kept.

    Args:
        config: as Hydra composed it.
        command: whose config it is.
        chosen: the choice of each group.
        words: of the command line.

    Raises:
        UsageError: a key is unknown, lacks a value, or has one of another type.
    """
    from omegaconf import OmegaConf

    choices = [f"{group}={name}" for group, name in chosen.items() if name and "/" not in group]
    defaults = defaults_of(command, *choices)
    given = {word.lstrip("+").partition("=")[0] for word in words}
    OmegaConf.set_struct(config, False)
    references = references_to_runs(config)
    known = leaves(defaults)
    for key in leaves(config):
        check_key(config, defaults, key, known=known, given=given)
    absent = [name for name in list(defaults) if name not in list(config)]
    if absent:
        raise UsageError(f"{', '.join(absent)}: expected a value, got none")
    options = plain(config)
    if options.get("dataset", {}).get("_target_") == "none":
        raise UsageError(no_dataset())
    for key in PLACES:
        if key in options:
            options[key] = expanded(options[key])
    if references:
        options["env"] |= references
    return options


def check_key(
    config: Any, defaults: Any, key: str, *, known: Collection[str], given: Collection[str]
) -> None:
    """Give a key of a config the type of its default, or raise a UsageError; a default of a choice
    that another `_target_` replaced is taken out.

    Args:
        config: as Hydra composed it; it is changed.
        defaults: the same without the words of the user.
        key: with dots.
        known: the keys of the defaults.
        given: the keys that the user gave.
    """
    from omegaconf import OmegaConf

    at, _, name = key.rpartition(".")
    node = OmegaConf.select(config, at) if at else config
    replaced = bool(at) and is_replaced(config, defaults, at)
    if replaced and key in known and key not in given and name != "_target_":
        del node[name]
        return
    if OmegaConf.is_missing(node, name):
        raise UsageError(f"{key}: expected a value, got none; give {key}=...")
    if replaced:
        return
    if key in known:
        value = typed(key, selected(config, key, strict=True), selected(defaults, key))
        OmegaConf.update(config, key, value)
    elif not takes_any_keys(config, defaults, at):
        raise UsageError(unknown_key(key, known))


def is_replaced(config: Any, defaults: Any, node: str) -> bool:
    """Whether the user gave a node another `_target_` than that of its choice."""
    target = f"{node}._target_"
    return bool(selected(config, target, strict=True) != selected(defaults, target))


@cache
def defaults_of(command: str, *choices: str) -> Any:
    """The config of a command with these choices and no other word, such as "dataset=synthetic".

    The jobs of a sweep, and the cells of a study, share one. It is only read.
    """
    import hydra

    return hydra.compose(command, [*choices])


def selected(node: Any, key: str, *, strict: bool = False) -> Any:
    """The value of a key of a config, nested configs as plain containers. strict: a reference that
    leads nowhere is an error.
    """
    from omegaconf import OmegaConf

    found = OmegaConf.select(node, key, throw_on_resolution_failure=strict)
    return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found


def references_to_runs(config: Any) -> dict[str, Any]:
    """Take out and return the options of an env named in `evaluate` that refer to options of each
    run, see `env_options_of`.
    """
    from omegaconf import OmegaConf

    if "env" not in config or "dataset" in config:
        return {}
    names = [key for key in config.env if OmegaConf.is_interpolation(config.env, key)]
    references = {key: config.env._get_node(key)._value() for key in names}
    config.env = {key: config.env[key] for key in config.env if key not in references}
    return references


def takes_any_keys(config: Any, defaults: Any, at: str) -> bool:
    """Whether a node, or one above it, is {} by default, or an option of a registered choice that
    is null or missing by default.
    """
    for above in accumulate(at.split("."), "{}.{}".format):
        if selected(defaults, above) == {}:
            return True
        parent, _, name = above.rpartition(".")
        if not parent:
            continue
        target = selected(config, f"{parent}._target_", strict=True)
        for choices in registry.discover().values():
            for node in choices.values():
                if node["_target_"] == target and node.get(name, "") in (None, "???"):
                    return True
    return False


def expanded(path: Any) -> Any:
    """A path, or a list of paths, with the home folder in place of `~`."""
    if isinstance(path, list):
        return [expanded(each) for each in path]
    return str(Path(path).expanduser()) if isinstance(path, str) and path.startswith("~") else path


def typed(key: str, value: Any, default: Any) -> Any:
    """The value in the type of its default: 1 -> 1.0, 1e3 -> 1000, 7 -> "7". Where the default is
    null, any value.

    Raises:
        UsageError: the value is of another type, or a seed below 0.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and value < 0 and key.rpartition(".")[2] == "seed":
        raise UsageError(f"{key}: expected 0 or more, got {value}")
    kind = type(default)
    if default is None or type(value) is kind:
        return value
    if is_number and kind in (float, str):
        return kind(value)
    if is_number and kind is int and value % 1 == 0:
        return int(value)
    raise UsageError(f"{key}: expected {KINDS[kind]}, got {json.dumps(value)}")


def explain(command: str, overrides: list[str]) -> str | None:
    """What Hydra could not compose, in one line: the first choice or key that does not exist; None
    if it is something else.
    """
    import hydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    groups = choices_of_groups()
    chosen = []
    try:
        parsed = OverridesParser.create().parse_overrides(
            [text for text in overrides if not text.startswith("-")]
        )
        for override in parsed:
            group = override.key_or_group
            if group not in groups:
                continue
            swept = override.is_sweep_override()
            for name in override.sweep_string_iterator() if swept else [override.value()]:
                if name not in groups[group]:
                    return unknown(group, name, groups[group])
            chosen.append(f"{group}={name}")
        with hydra.initialize_config_dir(str(configs()), version_base="1.3"):
            keys = leaves(hydra.compose(command, chosen))
    except HydraException:
        return unquoted(overrides)
    for override in parsed:
        key = override.key_or_group
        if override.is_add() or key.partition(".")[0] == "hydra" or key in groups or key in keys:
            continue
        lacking = "dataset._target_" in keys and not any(
            each.startswith(("dataset=", "experiment=")) for each in chosen
        )
        if lacking and key.startswith("dataset."):
            return no_dataset()
        return unknown_key(key, [*groups, *keys])
    return None


def choices_of_groups() -> dict[str, list[str]]:
    """The names that each group of the command line has."""
    groups = {group: [*found] for group, found in registry.discover().items()}
    for group in ("env", *OPTIONAL):
        groups[group].append("none")
    for group in ("experiment", "study"):
        groups[group] = sorted(path.stem for path in (configs() / group).glob("*.yaml"))
    return groups


def no_dataset() -> str:
    """The message where no dataset was chosen, with those there are."""
    known = ", ".join(registry.discover()["dataset"])
    return (
        "dataset: expected one, got none; give dataset=synthetic for a first try, "
        f"experiment=..., or dataset=... of {known}"
    )


def unquoted(overrides: Iterable[str]) -> str | None:
    """The first override whose value Hydra reads in quotes alone, and how to write it; None if all
    are read, or for another reason.
    """
    for text in overrides:
        key, _, value = text.partition("=")
        special = re.search(r"[=~#!&;<>^`]|(?<=.){", value)
        if not special or text.startswith("-") or _is_read(text):
            continue
        inner = (
            [word.strip() for word in value[1:-1].split(",")]
            if value.startswith("[") and value.endswith("]")
            else [value]
        )
        quoted = [word if _is_read(f"x={word}") else f'"{word}"' for word in inner]
        written = f"{key}=[{','.join(quoted)}]" if value.startswith("[") else f"{key}={quoted[0]}"
        if _is_read(written):
            return (
                f"{text}: Hydra reads a value with {special[0]} in quotes alone; write '{written}'"
            )
    return None


def _is_read(override: str) -> bool:
    """Whether Hydra's parser reads this override."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True


def leaves(config: Any) -> list[str]:
    """The keys of a config of Hydra, those of its nodes with dots: ["steps", "head.deviation",
    ...].
    """
    from omegaconf import OmegaConf

    nested: Any = OmegaConf.to_container(config)
    return [*flat(nested)]


def unknown(kind: str, name: Any, known: Iterable[str]) -> str:
    """The message for an unknown name, with the nearest that is known."""
    known = list(known)
    near = get_close_matches(str(name), known, 1)
    return (
        f"no {kind} {name!r}; {f'did you mean {near[0]}? ' if near else ''}there are "
        f"{', '.join(known) or 'none'}"
    )


def unknown_key(key: str, keys: Iterable[str]) -> str:
    """The message for an unknown key, with the nearest: in the same group if there is one, or else
    anywhere; of a group, the same name.
    """
    keys = list(keys)
    at, _, name = key.rpartition(".")
    anywhere = {k.rpartition(".")[2]: k for k in keys}
    beside = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == at}
    searched = (beside, 0.6), (anywhere, 1.0 if at and beside else 0.6)
    near = next(
        (
            known[found[0]]
            for known, alike in searched
            if (found := get_close_matches(name, known, 1, alike))
        ),
        None,
    )
    others = (
        f"there are {', '.join(beside.values())}"
        if at and beside
        else "--cfg job shows those there are"
    )
    return f"no key {key!r} in the config; {f'did you mean {near}?' if near else others}"


def one_of(name: str, value: Any, known: Iterable[Any]) -> None:
    """Raise a ValueError that names the known values unless `value` is one of them."""
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")


def listed(given: Any) -> list[str]:
    """A list, or words separated by commas, as a list of words; "" -> []."""
    words = (
        given if isinstance(given, list | tuple) else str(given).split(",") if str(given) else []
    )
    return [str(x).strip() for x in words]


def ranges(name: str, given: Any, *, nothing: str = "", within: range | None = None) -> list[int]:
    """ "4,0-2" -> [4, 0, 1, 2], each once.

    Args:
        name: of the option, for messages.
        given: as the user wrote it.
        nothing: what an empty value stands for; "": an empty value is an error.
        within: the numbers that exist.

    Raises:
        ValueError: not a list of ranges, or a number outside `within`.
    """
    parts = listed(given)
    matches = [match for part in parts if (match := re.fullmatch(r"(\d+)(?:-(\d+))?", part))]
    if len(matches) < len(parts) or not (parts or nothing):
        or_nothing = f", or nothing for {nothing}" if nothing else ""
        raise ValueError(f"{name}: expected such as 0-6 or 7,8{or_nothing}, got {given!r}")
    pairs = [(int(match[1]), int(match[2] or match[1])) for match in matches]
    if any(first > last for first, last in pairs):
        raise ValueError(f"{name}: expected ranges that go up, got {given!r}")
    found: dict[int, None] = {}  # as a set that keeps the order
    for first, last in pairs:
        found |= dict.fromkeys(range(first, last + 1))
    wrong = [number for number in found if within and number not in within]
    if within and wrong:
        raise ValueError(f"{name}: expected {within[0]} .. {within[-1]}, got {wrong[0]}")
    return list(found)
