"""The command line: `decisionllm COMMAND [key=value ...]`.

The only place that calls Hydra's entry point.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dis import opmap
from importlib import import_module
from importlib.metadata import entry_points
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decisionllm import __version__
from decisionllm.checks import unknown_name_message
from decisionllm.command_line import (
    UsageError,
    check_options,
    config_folder,
    explain_dashes,
    explain_error,
    find_undecodable,
    store_choices,
)
from decisionllm.help import format_help
from decisionllm.registry import PACKAGE
from decisionllm.sweep import run_directory, split_flags, swept_keys

if TYPE_CHECKING:
    from omegaconf import DictConfig

# the function of a command, which takes its config; one that is not there is no command
FUNCTIONS = {
    "data": "commands.data:data",
    "train": "commands.train:train",
    "baseline": "commands.baseline:baseline",
    "evaluate": "commands.evaluate:evaluate_runs",
    "compare": "estimates.compare:compare",
    "serve": "bidding.serve:serve",
    "export": "export.export:export",
    "backup": "bidding.backup:backup",
    "journal": "bidding.journal_command:journal",
    "scale": "scaling.scale:scale",
}
EXPLANATIONS = {
    "data": "make or import a dataset and print its card",
    "train": "fit a policy to a dataset",
    "baseline": "fit AWAC, CQL, IQL, ReBRAC or TD3+BC to a dataset, by d3rlpy",
    "evaluate": "roll runs out, append to results.jsonl, write the report",
    "compare": "rank runs from a log alone, without a simulator",
    "serve": "serve a policy over HTTP, with a journal",
    "export": "write a policy as ONNX, which acts without torch, or for the Hugging Face Hub",
    "backup": "copy the journal of a server, also while it runs",
    "journal": "report, verify, prune or restore the journal of a server",
    "scale": (
        "plan and run a study of model size, data volume and quality, fit a scaling law, "
        "write the report"
    ),
}
COMMANDS = {
    name: EXPLANATIONS[name]
    for name, function in FUNCTIONS.items()
    if (PACKAGE / function.partition(":")[0].replace(".", "/")).with_suffix(".py").exists()
}
HELP = {"-h", "--help"}
IN_A_DIRECTORY = ("train", "baseline")  # commands that write a run directory
# the first word behind these commands may be an action instead of key=value
ACTIONS = {"journal": ("report", "verify", "prune", "restore")}
USAGE = f"""decisionllm {__version__}: offline decision-sequence modelling beside a text

usage: decisionllm COMMAND [key=value ...]

{chr(10).join(f"  {name:10s}{what}" for name, what in COMMANDS.items())}

  decisionllm COMMAND --help      its keys and choices
  decisionllm COMMAND --cfg job   the whole configuration, resolved
  decisionllm train dataset=synthetic --multirun seed=0,1,2
"""


def main() -> int:
    """Run the command of sys.argv.

    Exit codes: 0; 1 the command failed; 2 wrong usage; 130 interrupted.
    """
    arguments = sys.argv[1:]
    try:
        if not arguments or arguments[0] in {*HELP, "help"}:
            print(USAGE, flush=True)
            return 0 if arguments else 2
        if arguments[0] in ("-V", "--version"):
            print(__version__, flush=True)
            return 0
        words, flags = split_flags(arguments)  # a flag may stand before the command too
        command = words[0] if words else arguments[0]
        if command not in COMMANDS:
            return fail(2, unknown_name_message("command", command, COMMANDS))
        dashes = explain_dashes(arguments)
        if dashes:
            return fail(2, dashes)
        code = run(command, [*words[1:], *flags])
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # such as `decisionllm train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def with_action(command: str, words: list[str]) -> list[str]:
    """The words behind a command, its action as key=value: `journal verify` is action=verify."""
    if words and words[0] in ACTIONS.get(command, ()):
        return [f"action={words[0]}", *words[1:]]
    return words


def run(command: str, overrides: list[str]) -> int:
    """Compose the config of a command and call its function. Returns the exit code."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(sys.stdout, TextIOWrapper):  # a terminal may lack a letter
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        store_choices()
    except ValueError as error:  # of a package that registers a choice
        return fail(1, error)
    words, flags = split_flags(overrides)
    # Hydra takes the words of a command line together, so that flags between them are errors
    overrides = [*with_action(command, words), *flags]
    if command in ACTIONS and overrides and is_bare(overrides[0]):
        return fail(2, unknown_name_message(f"{command} action", overrides[0], ACTIONS[command]))
    codes = []

    def job(config: "DictConfig") -> None:
        codes.append(call_command(command, config, overrides))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors are printed here, in one line
    sys.argv = [f"decisionllm {command}", *overrides]
    try:
        dispatch(command, overrides, job)
    except (HydraException, OmegaConfBaseException) as error:
        return fail(2, explain_error(command, overrides) or error)
    except ValueError as error:
        if isinstance(error, UnicodeDecodeError) and (fault := find_undecodable(overrides)):
            return fail(2, fault)
        if not str(error).startswith("Only one of --run, --multirun, --cfg"):  # Hydra's
            raise
        one_value = "leave --multirun out and give each key one value"
        return fail(2, f"--cfg and --info print the configuration of one job: {one_value}")
    except KeyboardInterrupt as error:
        return fail(130, str(error) or "interrupted")
    return max(codes, default=0)


def dispatch(command: str, overrides: list[str], job: Callable[["DictConfig"], None]) -> None:
    """Print the help of a command, or call `job` with each config that these words compose."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    if not HELP.isdisjoint(overrides):
        return print_help(command, overrides)
    state = HydraConfig.instance()
    before = state.cfg
    try:
        if is_for_hydra(overrides):
            of_command = {"config_path": str(config_folder()), "config_name": command}
            hydra.main(version_base="1.3", **of_command)(job)()
        else:
            compose_and_run(command, overrides, job)
    finally:
        state.cfg = before  # that of the command is over


def print_help(command: str, overrides: Sequence[str]) -> None:
    """Print the choices and the options of a command."""
    actions = ["|".join(ACTIONS[command])] if command in ACTIONS else []
    usage = " ".join(["decisionllm", command, *actions])
    words = [word for word in overrides if word not in HELP]
    print(format_help(command, COMMANDS[command], usage=usage, words=words))


def call_command(command: str, config: "DictConfig", overrides: list[str]) -> int:
    """Call the function of a command with the config that Hydra composed of these words, or of one
    job of their sweep. Returns the exit code.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

    state = HydraConfig.get()
    words = state.overrides.task
    try:
        if state.mode is RunMode.MULTIRUN and command in IN_A_DIRECTORY:
            config.run = run_directory(config, swept_keys(overrides), words)
        options = check_options(config, command, state.runtime.choices, words)
        module, _, function = FUNCTIONS[command].partition(":")
        vars(import_module(f"decisionllm.{module}"))[function](options)
    except InterpolationKeyError as error:
        return fail(
            2, f"{', '.join(find_unresolved(config))}: expected values of their own; {error}"
        )
    except (UsageError, OmegaConfBaseException) as error:
        return fail(2, error)
    except (ValueError, OSError, FloatingPointError, ImportError) as error:
        if os.environ.get("DECISIONLLM_TRACEBACK") or isinstance(error, BrokenPipeError):
            raise
        if isinstance(error, ValueError | ArithmeticError) and not is_raised_on_purpose(error):
            traceback.print_exception(error)
        return fail(1, error)
    return 0


def is_raised_on_purpose(error: Exception) -> bool:
    """Return whether a `raise` statement of this package or of a user's class made an error.

    Another error is a library's, or that of an operation such as float("x"), which nobody explained.
    """
    entry = error.__traceback__
    while entry and entry.tb_next:
        entry = entry.tb_next
    if entry is None:
        return False
    code = entry.tb_frame.f_code
    package = entry.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    extensions = {each.value.partition(".")[0] for each in entry_points(group="decisionllm")}
    is_installed = {"site-packages", "dist-packages"} & {*Path(code.co_filename).parts}
    is_library = is_installed or package in sys.stdlib_module_names
    is_ours = package == "decisionllm" or package in extensions or not is_library
    # compiled modules have no instructions
    is_raise = code.co_code[entry.tb_lasti :][:1] == bytes([opmap["RAISE_VARARGS"]])
    return is_ours and is_raise


def find_unresolved(config: "DictConfig") -> list[str]:
    """The options whose defaults name another option that is not there, such as one that the chosen
    backbone does not have.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationKeyError

    from decisionllm.config import flatten

    keys = []
    as_given: Any = OmegaConf.to_container(config, resolve=False)
    for key in flatten(as_given):
        try:
            OmegaConf.select(config, key)
        except InterpolationKeyError:
            keys.append(key)
    return keys


def is_bare(word: str) -> bool:
    """Return whether a word behind a command is neither key=value nor a flag."""
    return "=" not in word and not word.startswith(("-", "~"))


def is_for_hydra(overrides: list[str]) -> bool:
    """Return whether the words have a flag, such as --multirun, or an option of Hydra's own."""
    return any(word.startswith("-") or "hydra" in word.partition("=")[0] for word in overrides)


def compose_and_run(
    command: str, overrides: list[str], job: Callable[["DictConfig"], None]
) -> None:
    """Compose the config of a command and call `job` with it.

    Hydra's entry point does the same for one job, but composes everything once more before, to
    learn whether the config asks for a sweep. That takes longer than a short command.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3", job_name=command):
        config = hydra.compose(command, overrides, return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
        job(config)


def fail(code: int, message: object) -> int:
    """Print a message in one line to standard error. Returns the exit code."""
    print(f"decisionllm: {' '.join(str(message).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
