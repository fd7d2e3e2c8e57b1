"""The task text of an agent of a team, and its facts for other wordings."""

from decisionllm.schema import Json

TEXTS = ("none", "constant", "informative", "paraphrased", "shuffled")


def task_text(meta: Json, n: int = 1, agent_type: str = "", text: str = "informative") -> str:
    """Write the task text of an agent of a team of n. agent_type: a name in meta["types"].

    `constant` says neither size nor role.
    """
    if text == "none":
        return ""
    sentences = [meta.get("name", "")]
    if text != "constant":
        sentences.append(f"A team of {n}" if n > 1 else "Alone")
    sentences.append(meta.get("task", ""))
    sentences.append(f"At most {meta['horizon']} steps")
    if meta.get("reward_rule"):
        sentences.append(f"Reward: {meta['reward_rule']}")
    role = get_role(meta, agent_type)
    if text != "constant" and role:
        sentences.append(f"Role: {role}")
    punctuated = [sentence.strip().rstrip(".") + "." for sentence in sentences if sentence]
    return " ".join(punctuated)


def get_role(meta: Json, agent_type: str) -> str:
    """Return the role of a type in meta; without one, its name if there are several types."""
    role: str = meta["types"].get(agent_type, {}).get("role", "")
    if not role and len(meta["types"]) > 1:
        role = agent_type
    return role


def team_facts(meta: Json, n: int, agent_type: str) -> Json:
    """Return the facts of a task for `wordings`, as in `task_text`; the role is the name of the
    type, `agent` where there is one type.
    """
    role = agent_type if len(meta["types"]) > 1 else "agent"
    facts = {"library": "teams", "size": n, "role": role, "steps": meta["horizon"]}
    texts = {
        "name": meta.get("name", ""),
        "goal": meta.get("task", ""),
        "reward": meta.get("reward_rule", ""),
    }
    for name, text in texts.items():
        if text:
            facts[name] = text.strip().rstrip(".")
    return facts
