"""The players of the other teams of an environment of PettingZoo, by their names."""

from collections.abc import Iterator
from pathlib import Path

from decisionllm import registry
from decisionllm.trust import Import

# packages of the extra `marl`, whose environments are named by their module
ENVIRONMENT_PACKAGES = ("mpe2", "pettingzoo")
SCRIPTED_PARTNERS = ("random", "noop")


def pettingzoo_imports(node: registry.Node) -> Iterator[Import]:
    """Yield the imports of an environment of PettingZoo: its id is a module, and a partner may be a
    function.
    """
    module = str(node.get("id"))
    if module.partition(".")[0] not in ENVIRONMENT_PACKAGES:
        yield Import("id", module, module)
    partners = node.get("partners")
    if not isinstance(partners, dict):
        return
    for agents, policy in partners.items():
        text = str(policy)
        scripted = (*SCRIPTED_PARTNERS, *registry.function_targets("partner"))
        if text not in scripted and not is_run(text):
            yield Import(f"partners.{agents}", text, text)


def is_run(policy: str) -> bool:
    """Return whether the policy of a partner is the folder of a run, not a dotted path."""
    return "/" in policy or Path(policy, "run.json").is_file()
