"""The tasks of a training between two steps: log lines, held-out windows, rollouts, checkpoints."""

from dataclasses import dataclass

from decisionllm.config import LogOptions


@dataclass(frozen=True, kw_only=True)
class Due:
    """The tasks that are due after a step."""

    log: bool  # a log line is written
    held_out: bool  # with the loss on held-out windows
    roll_out: bool  # with the score of a rollout
    save: bool  # a checkpoint
    say: bool  # the line is printed, however short ago the last one was


def due_after(log: LogOptions, step: int, progress: float, *, stopped: bool) -> Due:
    """Return the tasks that are due after a step.

    Args:
        log: the options.
        step: its number.
        progress: share of the run that is done; 1: its end.
        stopped: the run is interrupted. That is no reason for a rollout or for held-out windows: a
            continued run has the same ones, and so the same best weights, as one that was never
            interrupted.
    """

    def is_due(every: int) -> bool:
        return every > 0 and step % every == 0

    is_over = progress >= 1 or stopped
    roll_out = progress >= 1 or is_due(log.rollout_every)
    save = is_due(log.save_every)
    held_out = roll_out or save or is_due(log.every)
    return Due(
        log=held_out or is_over,
        held_out=held_out,
        roll_out=roll_out,
        save=save or is_over,
        say=is_over,
    )
