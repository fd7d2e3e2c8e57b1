"""Progress: a line a minute where there is no terminal, a bar where there is one."""

import sys
from types import SimpleNamespace

import rich

from decisionllm import progress


def clock(monkeypatch, seconds):
    """Let each look of this module at the time be the next of these seconds."""
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=iter(seconds).__next__))


def test_a_file_gets_a_line_a_minute(monkeypatch, capsys):
    clock(monkeypatch, [0.0, 30.0, 90.0, 120.0, 150.0])
    assert list(progress.track(range(4), "planner: values")) == [0, 1, 2, 3]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "planner: values: 2 of 4, 2 min left",
        "planner: values: 4 of 4, 0 min left",
    ]


def test_short_work_says_nothing(capsys):
    assert list(progress.track("ab", "letters")) == ["a", "b"]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_a_bar_also_within_another(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    rich.reconfigure(force_terminal=True)  # the console of all tests of this process
    try:
        seen = []
        for outer in progress.track("ab", "outer"):
            for inner in progress.track("cd", "inner"):
                seen.append(outer + inner)
    finally:
        rich.reconfigure()
    assert seen == ["ac", "ad", "bc", "bd"]
    printed = capsys.readouterr()
    assert "outer" in printed.out
    assert printed.err == ""
