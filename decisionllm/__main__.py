"""verb -> function: `decisionllm <verb> [key=value ...]`. The only place that knows Hydra's entry point."""

import json
import os
import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from decisionllm import __version__, registry

VERBS = {
    "data": "make or import a dataset and print its card",
    "train": "fit a policy to a dataset",
    "baseline": "fit CQL, IQL or TD3+BC to it, by d3rlpy",
    "evaluate": "roll a run out, append to results.jsonl, write the report",
    "serve": "answer bidders over HTTP, with a journal",
    "scale": "plan and run a study of size, data and quality, fit a law, write the report",
}
USAGE = f"""decisionllm {__version__}: offline decision-sequence modelling beside a text

usage: decisionllm <verb> [key=value ...]

{chr(10).join(f"  {verb:10s}{what}" for verb, what in VERBS.items())}

  decisionllm <verb> --help      its keys and choices
  decisionllm <verb> --cfg job   the whole configuration, resolved
  decisionllm train --multirun seed=0,1,2
"""


KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "keys with values"}


class Usage(Exception):
    """The command line asks for what does not exist or cannot be."""


def configs():
    """The folder of YAML files: beside the package in a checkout, inside it in a wheel."""
    here = Path(__file__).resolve().parent
    return next(folder for folder in (here / "configs", here.parent / "configs") if folder.is_dir())


def main():
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(__version__)
        return 0
    if arguments[0] not in VERBS:
        return fail(2, no("verb", arguments[0], VERBS))
    return run(arguments[0], arguments[1:])


def run(verb, overrides):
    """Compose the verb's config and call its function. Exit codes: 0; 1 the run failed; 2 usage; 130 interrupted."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    for group, choices in registry.discover().items():
        for name, node in choices.items():
            ConfigStore.instance().store(group=group, name=name, node=node)
    ConfigStore.instance().store(group="env", name="none", node={"_target_": "none"})
    codes = [0]

    def job(config):
        chosen, given = HydraConfig.get().runtime.choices, HydraConfig.get().overrides.task
        try:
            defaults = hydra.compose(verb, [f"{group}={name}" for group, name in chosen.items() if name and "/" not in group])
            config = settle(config, defaults, {override.lstrip("+").partition("=")[0] for override in given})
            getattr(import_module(f"decisionllm.{verb}"), verb)(config)
        except (Usage, OmegaConfBaseException) as error:
            codes.append(fail(2, error))
        except (ValueError, OSError, FloatingPointError, ImportError) as error:
            if os.environ.get("DECISIONLLM_TRACEBACK"):
                raise
            codes.append(fail(1, error))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that errors come to us, who say them in one line
    sys.argv = [f"decisionllm {verb}", *overrides]
    try:
        hydra.main(version_base="1.3", config_path=str(configs()), config_name=verb)(job)()
    except (HydraException, OmegaConfBaseException) as error:
        return fail(2, explain(verb, overrides) or error)
    except KeyboardInterrupt as error:
        return fail(130, str(error) or "interrupted")
    return max(codes)


def settle(config, defaults, given):
    """The config as plain dicts: a value for every key, in the type of its default, and no key that nothing reads.

    Where `_target_` names another callable than the choice did, the choice's options go, but for those that were given.
    """
    from omegaconf import OmegaConf

    def look(node, key):
        found = OmegaConf.select(node, key, throw_on_resolution_failure=node is config)
        return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found

    keys = leaves(defaults)
    OmegaConf.set_struct(config, False)
    for key in leaves(config):
        at, _, name = key.rpartition(".")
        foreign = at and look(config, f"{at}._target_") != look(defaults, f"{at}._target_")
        if foreign and key in keys and key not in given and name != "_target_":
            del OmegaConf.select(config, at)[name]
        elif OmegaConf.is_missing(OmegaConf.select(config, at) if at else config, name):
            raise Usage(f"{key}: expected a value, got none; give {key}=...")
        elif not foreign and key in keys:
            OmegaConf.update(config, key, typed(key, look(config, key), look(defaults, key)))
        elif not foreign and look(defaults, at) != {}:
            raise Usage(no_key(key, keys))
    if absent := [name for name in list(defaults) if name not in list(config)]:
        raise Usage(f"{', '.join(absent)}: expected a value, got none")
    return OmegaConf.to_container(config, resolve=True)


def typed(key, value, usual):
    """The value in the type of the usual one: 1 -> 1.0, 1e3 -> 1000, 7 -> "7". What is null by default may be anything."""
    kind, number = type(usual), isinstance(value, int | float) and not isinstance(value, bool)
    if usual is None or type(value) is kind:
        return value
    if number and (kind in (float, str) or (kind is int and value % 1 == 0)):
        return kind(value)
    raise Usage(f"{key}: expected {KINDS[kind]}, got {json.dumps(value)}")


def explain(verb, overrides):
    """What Hydra could not compose, in one line: the first choice or key that does not exist; None if it is something else."""
    import hydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    groups = {group: [*found] for group, found in registry.discover().items()}
    groups["env"].append("none")
    for group in ("experiment", "study"):
        groups[group] = sorted(path.stem for path in (configs() / group).glob("*.yaml"))
    try:
        parsed = OverridesParser.create().parse_overrides([text for text in overrides if not text.startswith("-")])
        chosen = []
        for o in (o for o in parsed if o.key_or_group in groups):
            for name in o.sweep_string_iterator() if o.is_sweep_override() else [o.value()]:
                if name not in (known := groups[o.key_or_group]):
                    return no(o.key_or_group, name, known)
            chosen.append(f"{o.key_or_group}={name}")
        with hydra.initialize_config_dir(str(configs()), version_base="1.3"):
            keys = leaves(hydra.compose(verb, chosen))
    except HydraException:
        return None
    unknown = [o.key_or_group for o in parsed if not o.is_add() and o.key_or_group.partition(".")[0] != "hydra"]
    return next((no_key(key, keys) for key in unknown if key not in (*groups, *keys)), None)


def leaves(node, at=""):
    """The keys of a config, those of its nodes with dots: ["steps", "head.deviation", ...]."""
    found = []
    for name in node:
        inner = node._get_node(name)
        found += leaves(inner, f"{at}{name}.") if hasattr(inner, "keys") and inner else [f"{at}{name}"]
    return found


def no(kind, name, known):
    near = get_close_matches(str(name), known, 1)
    return f"no {kind} {name!r}; {f'did you mean {near[0]}? ' if near else ''}there are {', '.join(known) or 'none'}"


def no_key(key, keys):
    """Near is a key of nearly that name, beside it if there is one, or else anywhere."""
    at, _, name = key.rpartition(".")
    anywhere = {k.rpartition(".")[2]: k for k in keys}
    beside = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == at}
    near = next((known[found[0]] for known in (beside, anywhere) if (found := get_close_matches(name, known, 1))), None)
    others = f"there are {', '.join(beside.values())}" if at and beside else "--cfg job shows those there are"
    return f"no key {key!r} in the config; {f'did you mean {near}?' if near else others}"


def fail(code, message):
    print(f"decisionllm: {' '.join(str(message).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
