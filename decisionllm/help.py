"""The text of `decisionllm COMMAND --help`: the choices of the command, and its options."""

from collections.abc import Sequence

from decisionllm.command_line import HYDRA_KEYS, config_folder, list_choices


def format_help(command: str, about: str, *, usage: str, words: Sequence[str]) -> str:
    """Return the help of a command.

    Args:
        command: one of `decisionllm COMMAND`.
        about: what it does.
        usage: the command with the action that it takes, if it takes one.
        words: of the command line, without flags. The options of a choice are shown where it is
            made, as in `decisionllm data dataset=auction --help`.
    """
    import hydra
    import yaml
    from omegaconf import OmegaConf

    source = (config_folder() / f"{command}.yaml").read_text(encoding="utf-8")
    described = yaml.safe_load(source)
    groups = choice_groups(described["defaults"])
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = hydra.compose(command, [*words])

    parts = [f"decisionllm {command}: {about}", f"usage: {usage} [key=value ...]"]
    if groups:
        choices = list_choices()
        named = [f"  {group}: {', '.join(sorted(choices[group]))}" for group in groups]
        parts.append("\n".join(["choices, as group=choice:", *named]))
    parts.append("options and their defaults, as key=value or key.option=value:")
    parts.append(drop_hydra_keys(source))
    # of dataclasses and of the choices that were made
    elsewhere = [str(key) for key in config if key not in described]
    if elsewhere:
        parts.append(OmegaConf.to_yaml(OmegaConf.masked_copy(config, elsewhere)).rstrip())
    return "\n\n".join(parts)


def choice_groups(defaults: Sequence[str | dict[str, str | None]]) -> list[str]:
    """The groups of a Hydra defaults list in which a user chooses."""
    keys = [key for entry in defaults if isinstance(entry, dict) for key in entry]
    return [key for key in keys if not key.startswith("override ")]


def drop_hydra_keys(source: str) -> str:
    """The text of a config file without its keys for Hydra, so that its comments remain."""
    lines = []
    is_option = True
    for line in source.splitlines():
        if line[:1].isalpha():  # a key of the top level
            is_option = line.partition(":")[0] not in HYDRA_KEYS
        if is_option:
            lines.append(line)
    return "\n".join(lines).strip()
