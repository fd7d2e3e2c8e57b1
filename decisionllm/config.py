"""Options: the typed configuration of training, and the table of what cannot be."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from decisionllm import registry
from decisionllm.checks import check_seed, unknown_key_message
from decisionllm.registry import Node
from decisionllm.schema import Json

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass
class DataOptions:
    """The episodes of the dataset that are trained on."""

    fraction: float = 1.0  # data volume: share of the groups that is kept
    # data quality: drop episodes whose return is below this quantile
    min_return_quantile: float = 0.0
    # below 1: draw early steps more often, step t with relative frequency step_discount^t
    step_discount: float = 1.0
    # windows of a batch that share a text: where texts differ, fewer of them are read
    rows_per_text: int = 1
    held_out: float = 0.02  # share of the groups never trained on
    seed: int = 0  # of the choice of groups, and of what a transform changes


@dataclass
class ModelOptions:
    """The return that the model conditions on."""

    # a return-to-go token before each observation; none: behaviour cloning
    condition_on: str = "return_to_go"
    return_horizon: int = 0  # a return counts this many next steps; 0: to the end of the episode


@dataclass
class TeamOptions:
    """Agents whose episodes share a group."""

    # each agent reads its own episode; joint: one token list a team; both: half of each
    execution: str = "per_agent"


@dataclass
class OptimOptions:
    """The optimiser."""

    batch_size: int = 64  # windows a step, over all processes
    accumulate: int = 1  # micro-batches into which each process divides its share of a step
    lr: float = 1e-3  # peak learning rate; linear warm-up, then a cosine down to 5 % of it
    # peak learning rate of the backbone, or of its LoRA adapters
    lr_backbone: float = "${optim.lr}"  # type: ignore[assignment]
    weight_decay: float = 1e-2  # weight decay of AdamW
    warmup: int = 100  # steps until the peak learning rate
    clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    # the backward pass computes each block again: less memory, a third more time
    gradient_checkpointing: bool = False
    # `no`: float32; `bf16`; `auto`: bf16 where the processor supports it natively
    precision: str = "auto"


@dataclass
class LogOptions:
    """Validation, checkpoints and trackers."""

    every: int = 100  # steps between log lines, each with a held-out loss
    save_every: int = 1000  # steps between checkpoints; also one at the end and at Ctrl-C
    validation_batches: int = 4  # held-out batches of each log line; 0: none
    # steps between short rollouts in the run's environment, whose score is logged; 0: none
    rollout_every: int = 0
    rollout_episodes: int = 20  # episodes of each of these rollouts, in each environment
    # act with the weights of the lowest held-out loss, `loss`, or of the highest score of a rollout,
    # `score`; empty: with the last ones
    keep_best: str = ""
    tracker: str = "tensorboard"  # curves: `tensorboard`, `wandb`, `trackio` or `none`


@dataclass
class ActOptions:
    """Defaults of the trained policy, unless evaluate or serve give others."""

    # the headline target return: this quantile of the training returns
    target_quantile: float = 0.9
    stride: int = 0  # old steps that leave a full window at once; 0: half the window
    decode: str = "mode"  # action from the distribution: `mode`, `mean`, `sample` or `unclipped`


@dataclass
class TrainConfig:
    """Everything that a training run depends on; the options of `decisionllm train`.

    Make nodes with registry.choice.
    """

    dataset: Node  # the logged episodes that are trained on
    backbone: Node  # the language model that reads text and trajectory
    head: Node  # the distribution over actions
    # maps the steps of a trajectory to tokens of the language model
    tokenizer: Node = field(default_factory=lambda: registry.choice("tokenizer", "trajectory"))
    # where `evaluate` rolls the run out, by default the environment of the dataset's name; none:
    # nowhere
    env: Node = field(default_factory=registry.no_choice)
    name: str = "policy"  # of the policy, in results
    run: str = "runs/policy"  # the run directory
    # folder of the datasets that were read once
    cache_dir: str = '${oc.env:DECISIONLLM_HOME,"~/.cache/decisionllm"}'
    # start with the weights of this run: of its backbone, and of each embodiment of the data's
    # space
    init_from: str = ""
    # changes the log before it is read: removes actions, or corrupts a column
    transform: Node = field(default_factory=registry.no_choice)
    # fills in the actions that the log lacks
    fill_actions: Node = field(default_factory=registry.no_choice)
    # varies the training windows as the environment allows
    augment: Node = field(default_factory=registry.no_choice)
    # the loss that is minimised
    objective: Node = field(default_factory=lambda: registry.choice("objective", "likelihood"))
    # plans each action in a learned model of the environment; none: the policy acts alone
    planner: Node = field(default_factory=registry.no_choice)
    # task text of every episode: one that the dataset offers, see its option `text`; `auto`: the
    # texts that a log or an environment of yours has, no texts of our environments; `none`: no texts
    text: str = "auto"
    text_wordings: int = 0  # with text=paraphrased, train on so many sentence frames; 0: all
    # another reader of the texts than the backbone: features of a frozen language model
    text_encoder: Node = field(default_factory=registry.no_choice)
    window: int = 20  # T, the most steps of history that a decision reads
    steps: int = 2000  # optimiser steps
    # stop after so many minutes, if that is sooner; the schedule follows; 0: no limit
    minutes: float = 0.0
    seed: int = 0  # of the weights and of the order of windows
    device: str = "auto"  # `cpu`, `cuda`, or `auto`: cuda where there is one
    fresh: bool = False  # begin again in a run directory that holds a run
    # modules whose code the runs of init_from, backbone.folder and dataset.run may execute, such as
    # [mylab]
    trust: list[str] = field(default_factory=list)
    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    team: TeamOptions = field(default_factory=TeamOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    log: LogOptions = field(default_factory=LogOptions)
    act: ActOptions = field(default_factory=ActOptions)


CHOICES = [each for each in fields(TrainConfig) if each.type == Node]
# the groups of choices, and those without a choice by default
GROUPS = tuple(each.name for each in CHOICES)
OPTIONAL = tuple(each.name for each in CHOICES if each.default_factory is registry.no_choice)


def default_options() -> Node:
    """The options of `train` by default, as plain dicts; a choice that has to be made is {}."""
    return asdict(TrainConfig(dataset={}, backbone={}, head={}))


def to_plain_dicts(config: "TrainConfig | DictConfig | Json") -> Node:
    """A TrainConfig, or a dict of its form, as resolved plain dicts."""
    from omegaconf import OmegaConf

    options: Any = asdict(config) if isinstance(config, TrainConfig) else config
    if not OmegaConf.is_config(options):
        options = OmegaConf.create(options)
    resolved = OmegaConf.to_container(options, resolve=True)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def train_config(options: TrainConfig | Node) -> TrainConfig:
    """Options in their types; one left out has its default, and references are resolved.

    Args:
        options: plain dicts of the form of a TrainConfig, or one.

    Raises:
        ValueError: an unknown option, one of another type, or options that cannot be, see `check`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    check_nodes(vars(options) if isinstance(options, TrainConfig) else options)
    values = asdict(options) if isinstance(options, TrainConfig) else options
    try:
        schema = OmegaConf.structured(TrainConfig)
        for group, node in values.items():
            # the default may be of another callable, whose options are not this one's
            if isinstance(node, Mapping) and "_target_" in node:
                schema[group] = node
        config = OmegaConf.to_object(OmegaConf.merge(schema, values))
    except ConfigKeyError as error:
        keys = flatten(default_options())
        raise ValueError(unknown_key_message(str(error.full_key), keys)) from error
    except OmegaConfBaseException as error:
        place = f"{error.full_key}: " if error.full_key else ""
        raise ValueError(place + str(error).splitlines()[0]) from error
    assert isinstance(config, TrainConfig)
    check(config)
    return config


def check_nodes(values: Mapping[str, Any]) -> None:
    """Raise a ValueError for a choice that is no config node, such as its name or a model."""
    for group in GROUPS:
        node = values.get(group)
        if node is None or isinstance(node, Mapping):
            continue
        if isinstance(node, str) and (node == "???" or "${" in node):
            continue  # missing, or a reference
        got = type(node).__name__
        fix = f'choice("{group}", NAME, ...) makes one'
        if isinstance(node, str):
            got = repr(node)
            fix = f'take choice("{group}", {node!r})'
        elif group == "backbone":
            fix = (
                "decisionllm.save_backbone(model, tokenizer, folder) makes one of a model in memory"
            )
        raise ValueError(f"{group}: expected a config node, got {got}; {fix}")


@dataclass(frozen=True)
class Range:
    """The range of a number: in words for the message, and as a test."""

    expected: str
    holds: Callable[[float], bool]


@dataclass(frozen=True)
class Rule:
    """A condition on several options together.

    Attributes:
        names: of the options, for the message.
        expected: what they must be, for the message.
        holds: whether they are, given a resolved config.
    """

    names: tuple[str, ...]
    expected: str
    holds: Callable[[TrainConfig], bool]


def one_agent_reads(config: TrainConfig) -> bool:
    """Return whether each agent of a team reads its own episode alone."""
    return config.team.execution == "per_agent"


DECODES = ("mode", "mean", "sample", "unclipped")  # how an action is chosen of a distribution
POSITIVE = Range("more than 0", lambda number: number > 0)
NOT_NEGATIVE = Range("0 or more", lambda number: number >= 0)
SHARE = Range("a share within 0 .. 1", lambda number: 0 <= number <= 1)
POSITIVE_SHARE = Range("above 0 and at most 1", lambda number: 0 < number <= 1)
NUMBERS = {
    "window": POSITIVE,
    "steps": POSITIVE,
    "data.rows_per_text": POSITIVE,
    "optim.batch_size": POSITIVE,
    "optim.accumulate": POSITIVE,
    "optim.lr": POSITIVE,
    "log.every": POSITIVE,
    "log.save_every": POSITIVE,
    "log.rollout_episodes": POSITIVE,
    "log.rollout_every": NOT_NEGATIVE,
    "log.validation_batches": NOT_NEGATIVE,
    "text_wordings": NOT_NEGATIVE,
    "minutes": NOT_NEGATIVE,
    "model.return_horizon": NOT_NEGATIVE,
    "optim.weight_decay": NOT_NEGATIVE,
    "optim.lr_backbone": NOT_NEGATIVE,
    "optim.warmup": NOT_NEGATIVE,
    "optim.clip": NOT_NEGATIVE,
    "act.stride": NOT_NEGATIVE,
    "seed": NOT_NEGATIVE,
    "data.seed": NOT_NEGATIVE,
    "act.target_quantile": SHARE,
    "data.held_out": SHARE,
    "data.min_return_quantile": SHARE,
    "data.step_discount": POSITIVE_SHARE,
    "data.fraction": POSITIVE_SHARE,
}
WORDS = {
    "act.decode": DECODES,
    "team.execution": ("per_agent", "joint", "both"),
    "model.condition_on": ("return_to_go", "none"),
    "optim.precision": ("auto", "no", "bf16"),
    "log.tracker": ("tensorboard", "wandb", "trackio", "none"),
    "device": ("auto", "cpu", "cuda"),
    "log.keep_best": ("", "loss", "score"),
}
# What several options must be together. act.stride is held against the window of each embodiment,
# see `mixture.embodiment_config`.
RULES = (
    Rule(
        ("log.keep_best", "log.rollout_every"),
        "with log.keep_best=score log.rollout_every above 0",
        lambda config: config.log.keep_best != "score" or config.log.rollout_every > 0,
    ),
    Rule(
        ("log.keep_best", "data.held_out", "log.validation_batches"),
        "with log.keep_best=loss data.held_out and log.validation_batches above 0",
        lambda config: (
            config.log.keep_best != "loss"
            or (config.data.held_out > 0 and config.log.validation_batches > 0)
        ),
    ),
    Rule(
        ("data.rows_per_text", "team.execution"),
        "data.rows_per_text=1 unless team.execution=per_agent, since a team shares a text",
        lambda config: config.data.rows_per_text == 1 or one_agent_reads(config),
    ),
    Rule(
        ("text", "team.execution"),
        "team.execution=per_agent with text=paraphrased, since a team shares a text",
        lambda config: config.text != "paraphrased" or one_agent_reads(config),
    ),
)


def check(config: TrainConfig) -> None:
    """Raise a ValueError for the first entry of `NUMBERS`, `WORDS` and `RULES` that a resolved config
    breaks: all that it can be wrong about without a look at the data or into the nodes of choices.
    """
    for name, allowed in NUMBERS.items():
        number = attrgetter(name)(config)
        if not allowed.holds(number):
            raise ValueError(f"{name}: expected {allowed.expected}, got {number}")
    for name in ("seed", "data.seed"):
        check_seed(name, attrgetter(name)(config))
    for name, words in WORDS.items():
        word = attrgetter(name)(config)
        if word not in words:
            *others, last = [each or "nothing" for each in words]
            raise ValueError(f"{name}: expected {', '.join(others)} or {last}, got {word}")
    for rule in RULES:
        if not rule.holds(config):
            got = ", ".join(f"{name}={attrgetter(name)(config)}" for name in rule.names)
            raise ValueError(f"{rule.names[0]}: expected {rule.expected}, got {got}")


def flatten(config: Json, at: str = "") -> Node:
    """Nested options as {"optim.lr": 1e-3, ...}; an empty dict is a value."""
    flattened: Json = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flattened |= flatten(value, f"{at}{key}.")
        else:
            flattened[f"{at}{key}"] = value
    return flattened


def merge(config: Node, changes: Json) -> Node:
    """A config with these changes, nested dicts merged."""
    result = config | changes
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            result[key] = merge(config[key], value)
    return result


def resolve_env_options(run_config: Node, options: Node) -> Node:
    """Options given for an environment; those that a choice by its name takes from a run, such as
    its text, from this one.
    """
    return to_plain_dicts(run_config | {"env": options})["env"]  # type: ignore[no-any-return]
