"""The options of `compare`, checked."""

from dataclasses import dataclass

from decisionllm.checks import unknown_name_message
from decisionllm.commands.options import matching, number_from, option, seed_number
from decisionllm.registry import Node, function_names


def read_estimators(key: str, estimators: list[str]) -> list[str]:
    """Return the names of one estimator or more; a ValueError for one that there is not."""
    names = function_names("estimator")
    if not estimators:
        raise ValueError(f"{key}: expected one or more of {', '.join(names)}, got none")
    for name in estimators:
        if name not in names:
            raise ValueError(f"{key}: {unknown_name_message('estimator', name, names)}")
    return estimators


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """The options of `compare`; configs/compare.yaml explains them and has their defaults."""

    run: str | list[str]
    out: str | None
    estimators: list[str] = option(read_estimators)
    options: Node  # of each estimator by its name
    dataset: Node
    text: str | None
    discount: float = matching("above 0 and at most 1", lambda value: 0 < value <= 1)
    held_out: float | None = matching(
        "a share above 0 and below 1", lambda share: share is None or 0 < share < 1
    )
    episodes: int = number_from(1)
    fit_episodes: int = number_from(1)
    least_episodes: int = number_from(1)
    most_far: float
    picture: bool
    seed: int = seed_number()
    device: str
    trust: list[str]
    act: Node  # fields of `Policy`; None: as the run says
