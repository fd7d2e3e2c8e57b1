"""The environment that a run is evaluated in, and how it and the acting differ from the run's own."""

from collections.abc import Mapping

from decisionllm.config import merge, resolve_env_options
from decisionllm.eval.result_groups import nearest_choice, resolve_default
from decisionllm.policy.open_runs import OpenedRun
from decisionllm.registry import Node, is_none, needs_text, resolve_text

# options of acting that a result row has in a column, or in the name of its policy
IN_COLUMNS = ("act.decode", "act.planning_horizon", "team.execution")


def build_env_node(run: OpenedRun, env_options: Node) -> tuple[Node, list[str]]:
    """Build the config node of the environment that a run is rolled out in.

    Args:
        run: the run.
        env_options: the option env of `evaluate`, in place of the run's own.

    Returns:
        The node, and how it differs from the run's own, such as ["goal=south"].

    Raises:
        ValueError: there is no environment.
    """
    own = resolve_text(run.config["env"])
    changes = resolve_env_options(run.config, env_options)
    if is_none(own) and not changes:
        raise ValueError(
            f"{run.path}: env=none, there is no environment to roll out in; give one, such as "
            "env=gymnasium env.id=CartPole-v1"
        )
    is_same = changes.get("_target_", own["_target_"]) == own["_target_"]
    emptied = {key: value for key, value in changes.items() if value == {}}  # instead of merged
    node = resolve_text(merge(own if is_same else {}, changes) | emptied)
    if not is_same and needs_text(node, run.config["text"]):
        node["text"] = run.config["text"]
    if not changes:
        return node, []
    return node, env_differences(own, changes, node, run.config)


def env_differences(own: Node, changes: Node, node: Node, run_config: Node) -> list[str]:
    """Return how the environment of an evaluation differs from the run's own.

    Args:
        own: the run's environment.
        changes: the options in its place.
        node: both together, which is built.
        run_config: of the run, which defaults of options may refer to.
    """
    name, options = nearest_choice("env", node)
    before = {key: resolve_default(value, run_config) for key, value in options.items()}
    differences = []
    if node["_target_"] == own["_target_"]:
        before |= own
        after = node
    else:
        after = changes
        changes = {key: value for key, value in changes.items() if key != "_target_"}
        differences.append(f"env={name}")
    for key, value in changes.items():
        if after[key] != before.get(key):
            differences.append(f"{key}={value}")
    return differences


def acting_differences(run_config: Node, acting: Mapping[str, Node]) -> list[str]:
    """Return the options of acting that are not the run's own and in no column of a result row,
    such as ["act.stride=1"].

    acting: the groups act and team of `evaluate`.
    """
    differences = []
    for group, options in acting.items():
        own = run_config.get(group, {})
        for key, value in options.items():
            name = f"{group}.{key}"
            if name not in IN_COLUMNS and value is not None and value != own.get(key):
                differences.append(f"{name}={value}")
    return differences
