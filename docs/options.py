"""Writes docs/options.md from the dataclasses of decisionllm/config.py and from the registered
choices: python -m docs.options
"""

import ast
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decisionllm import config
from decisionllm.registry import discover

INTRO = """# Options

<!-- written by `python -m docs.options` from decisionllm/config.py; edit the comments there -->

```sh
decisionllm train --help
decisionllm train --cfg job
```

`--help` lists the choices of a command and its options, `--cfg job` prints the whole configuration, resolved. This page is written from the code. [Training](train.md)
explains the options in context."""
TITLES = {
    "TrainConfig": ("Run", ""),
    "DataOptions": ("Data", "data."),
    "ModelOptions": ("Model", "model."),
    "TeamOptions": ("Teams", "team."),
    "OptimOptions": ("Optimiser", "optim."),
    "LogOptions": ("Log", "log."),
    "ActOptions": ("Acting", "act."),
}
INTROS = {
    "Run": "Everything that a training run depends on (`TrainConfig`).",
    "Data": "Which episodes of the dataset are trained on.",
    "Model": "What the model conditions on.",
    "Teams": "For agents whose episodes share a `group`.",
    "Optimiser": "AdamW and its schedule.",
    "Log": "Validation, checkpoints and trackers.",
    "Acting": "How the trained policy acts. `evaluate` and `serve` take `act.stride` and `act.decode` too.",
}
MEANINGS = {  # where the comment in the source is short
    "dataset": "which data: see the choices below",
    "backbone": "which language model: see the choices below",
    "head": "which distribution over actions: see the choices below",
    "env": "where `evaluate` rolls the run out: see the choices below; `none`: nowhere",
    "steps": "optimiser steps",
    "seed": "of the weights and of the order of windows",
    "optim.lr": "peak learning rate; linear warm-up, then a cosine down to 5 % of it",
    "optim.lr_backbone": "peak learning rate of the backbone, or of its LoRA adapters",
    "optim.weight_decay": "of AdamW",
    "optim.warmup": "steps until the peak learning rate",
    "optim.clip": "largest norm of the gradient; 0: no clipping",
    "optim.precision": (
        "`no`: float32; `bf16`; `auto`: bf16 where the processor supports it natively"
    ),
    "log.every": "steps between log lines, each with a held-out loss",
    "log.save_every": "steps between checkpoints; also one at the end and at Ctrl-C",
    "log.validation_batches": "held-out batches of each log line; 0: none",
    "log.tracker": "`tensorboard`, `wandb` or `none`",
    "act.decode": "action from the distribution: `mode`, `mean`, `sample` or `unclipped`",
}


def comment_above(lines: Sequence[str], line: int) -> str:
    """The comment that ends above this line, as one text."""
    comments: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("# "):
        line -= 1
        comments.insert(0, lines[line].strip().removeprefix("# "))
    return " ".join(comments)


def rows(name: str, prefix: str) -> list[tuple[str, str, str]]:
    """(option, default, meaning) of each field of a dataclass, as its source says it; a meaning is
    the comment on its line, or the lines of comment above it.
    """
    source = inspect.getsource(vars(config)[name])
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    text, options = source.splitlines(), []
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        key = node.target.id
        default = "" if node.value is None else ast.unparse(node.value)
        if "Options" in ast.unparse(node.annotation):
            continue
        if "lambda" in default:
            default_choice = re.search(r"choice\('\w+', '(\w+)'\)", default)
            default = default_choice[1] if default_choice else "none"
        default = default.replace("field(default_factory=registry.no_choice)", "none")
        default = default.replace("field(default_factory=list)", "[]")
        default = {"True": "true", "False": "false"}.get(default, default)
        on_its_line = text[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :]
        comment = on_its_line.rpartition("# ")[2].strip() or comment_above(text, node.lineno - 1)
        options.append((key, default.strip("'\""), MEANINGS.get(f"{prefix}{key}", comment)))
    return options


def cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def table(header: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> list[str]:
    return [
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(map(cell, line)) + " |" for line in lines),
    ]


def page() -> str:
    """The text of docs/options.md."""
    parts = [INTRO]
    for name, (title, prefix) in TITLES.items():
        described = [
            (f"`{prefix}{key}`", f"`{default}`" if default else "", meaning)
            for key, default, meaning in rows(name, prefix)
        ]
        parts += [
            "",
            f"## {title}",
            "",
            INTROS[title],
            "",
            *table(("option", "default", "meaning"), described),
        ]
    parts += [
        "",
        "## Choices",
        "",
        "`dataset=NAME` chooses; `dataset.OPTION=` sets one of its options. `???` must be given; "
        "`${text}` takes the value of the option `text`.",
        "",
    ]
    for group, choices in discover().items():
        targets: dict[str, dict[str, dict[str, Any]]] = {}  # presets of one callable share a row
        for name, node in choices.items():
            targets.setdefault(node["_target_"], {})[name] = node
        lines = []
        for presets in targets.values():
            keys = [key for key in next(iter(presets.values())) if key != "_target_"]
            values = [
                f"`{key}={'/'.join(dict.fromkeys(shown(node[key]) for node in presets.values()))}`"
                for key in keys
            ]
            lines.append((", ".join(f"`{name}`" for name in presets), ", ".join(values) or "none"))
        parts += [f"### {group}", "", *table(("choice", "options"), lines), ""]
    return "\n".join(parts).rstrip() + "\n"


def shown(value: Any) -> str:
    """A default as one writes it on the command line."""
    value = (
        re.sub(r"^\$\{oc\.select:([\w.]+),.*\}$", r"${\1}", value)
        if isinstance(value, str)
        else value
    )
    return (
        str(value).lower()
        if isinstance(value, bool)
        else "null"
        if value is None
        else '""'
        if value == ""
        else str(value)
    )


if __name__ == "__main__":
    (Path(__file__).parent / "options.md").write_text(page(), encoding="utf-8")
