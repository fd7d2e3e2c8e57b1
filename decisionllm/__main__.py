"""verb -> function: `decisionllm <verb> [key=value ...]`. The only place that knows Hydra's entry point."""

import os
import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from decisionllm import __version__, registry

VERBS = {
    "data": "make or import a dataset and print its card",
    "train": "fit a policy to a dataset",
    "evaluate": "roll a run out, append to results.jsonl, write the report",
}
USAGE = f"""decisionllm {__version__}: offline decision-sequence modelling beside a text

usage: decisionllm <verb> [key=value ...]

{chr(10).join(f"  {verb:10s}{what}" for verb, what in VERBS.items())}

  decisionllm <verb> --help      its keys and choices
  decisionllm <verb> --cfg job   the whole configuration, resolved
  decisionllm train --multirun seed=0,1,2
"""


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
    verb = arguments[0]
    if verb not in VERBS:
        near = get_close_matches(verb, VERBS, 1)
        print(f"decisionllm: no verb {verb!r}; {f'did you mean {near[0]}? ' if near else ''}there are {', '.join(VERBS)}", file=sys.stderr)
        return 2
    return run(verb, arguments[1:])


def run(verb, overrides):
    """Compose the verb's config and call its function. Exit codes: 0; 1 the run failed; 2 usage; 130 interrupted."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for group, choices in registry.discover().items():
        for name, node in choices.items():
            ConfigStore.instance().store(group=group, name=name, node=node)
    ConfigStore.instance().store(group="env", name="none", node={"_target_": "none"})

    def job(config):
        config = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        getattr(import_module(f"decisionllm.{verb}"), verb)(config)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that errors come to us, who say them in one line
    sys.argv = [f"decisionllm {verb}", *overrides]
    try:
        hydra.main(version_base="1.3", config_path=str(configs()), config_name=verb)(job)()
    except (HydraException, OmegaConfBaseException) as error:
        return fail(2, " ".join(str(error).split()))
    except KeyboardInterrupt as error:
        return fail(130, str(error) or "interrupted")
    except (ValueError, OSError, FloatingPointError, ImportError) as error:
        if os.environ.get("DECISIONLLM_TRACEBACK"):
            raise
        return fail(1, str(error))
    return 0


def fail(code, message):
    print(f"decisionllm: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
