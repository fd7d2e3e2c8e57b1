"""Draws the pictures of docs/images whose sources changed: python -m docs.pictures

`--all` draws every picture. `--accept NAME` records that a picture still shows what its source
draws. docs/images/digests.json has the digest of the sources of each picture when it was drawn, so
that a test finds one that is older.
"""

import argparse
import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from decisionllm.registry import read_definition

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
DIGESTS = IMAGES / "digests.json"
CHANCE = 1 / 7  # umaze has seven cells, one of which is the goal


@dataclass(frozen=True)
class Picture:
    """The sources of a picture.

    Attributes:
        draws: path of the function that draws it; with a `command`, of its part that decides how it
            looks. Without one it is called with the path of the picture.
        files: of its data, from the root of the repository.
        command: words behind `python -m` that draw it from trained runs.
        runs: that the command reads.
    """

    draws: str
    files: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()


STATIC = "decisionllm/bidding/server/static"
PAGE_RUNS = ("runs/auction/logs-0", "runs/auction/nano-0")
ROOM_RUNS = ("runs/babyai/words-pretrained-0", "runs/babyai/words-shuffled-0")
PICTURES = {
    "words.png": Picture(
        draws="docs.pictures.draw_words",
        files=("docs/images/words.json", "docs/images/words-panels.png"),
    ),
    "load.svg": Picture(draws="lab.load.figure", files=("lab/rows/load.jsonl",)),
    "page.png": Picture(
        draws="docs.page.play",
        files=tuple(f"{STATIC}/page.{kind}" for kind in ("html", "css", "js")),
        command=("docs.page", f"run={PAGE_RUNS[0]}", f"shadow={PAGE_RUNS[1]}"),
        runs=PAGE_RUNS,
    ),
    "babyai.png": Picture(
        draws="examples.words_in_a_room.main",
        command=("examples.words_in_a_room", *ROOM_RUNS, "--out", "docs/images/babyai.png"),
        runs=ROOM_RUNS,
    ),
}
BY_HAND = ("tick.svg", "tokens.svg")


def digest(picture: Picture) -> str:
    """Return the digest of what a picture is drawn from: its data, and the code but its comments."""
    made = blake2b(ast.unparse(read_definition(picture.draws)).encode(), digest_size=8)
    for file in picture.files:
        made.update((ROOT / file).read_bytes())
    return made.hexdigest()


def read_digests() -> dict[str, str | None]:
    """Return the digest of each picture when it was drawn; None: it was drawn before there were any."""
    recorded: dict[str, str | None] = json.loads(DIGESTS.read_text(encoding="utf-8"))
    return recorded


def outdated() -> list[str]:
    """Return the pictures whose sources changed after they were drawn."""
    recorded = read_digests()
    return [name for name, picture in PICTURES.items() if recorded.get(name) != digest(picture)]


def draw(name: str) -> bool:
    """Draw a picture. Return whether it was drawn, which takes its runs."""
    picture = PICTURES[name]
    missing = [run for run in picture.runs if not (ROOT / run / "run.json").is_file()]
    if missing:
        print(f"{name}: expected the runs {', '.join(missing)}, found none; it stays as it is")
        return False
    if picture.command:
        subprocess.run([sys.executable, "-m", *picture.command], cwd=ROOT, check=True)
    else:
        module, _, function = picture.draws.rpartition(".")
        vars(import_module(module))[function](IMAGES / name)
    print(f"docs/images/{name}")
    return True


def draw_words(path: Path) -> None:
    """Draw the panels of `examples.words_on_a_maze` under titles in words, beside the share of new
    sentences that each policy follows.
    """
    words = json.loads((IMAGES / "words.json").read_text(encoding="utf-8"))
    panels = np.asarray(Image.open(IMAGES / "words-panels.png").convert("RGB"))
    titles, rows = words["titles"], words["rows"]
    size = panels.shape[0] // len(rows)
    figure = Figure(figsize=(10.8, 7.6), layout="constrained", dpi=100)
    left, right = figure.subfigures(1, 2, width_ratios=[3.1, 1])
    axes = left.subplots(len(rows), len(titles))
    for i, (line, row) in enumerate(zip(axes, rows, strict=True)):
        for k, axis in enumerate(line):
            axis.imshow(panels[i * size : (i + 1) * size, k * size : (k + 1) * size])
            axis.set(xticks=[], yticks=[], xlabel=f"{row['arrived'][k]} of 8 at the goal")
        line[0].set_title(f"“{row['sentence']}” {row['note']}".rstrip(), fontsize=10, loc="left")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.annotate(
            title,
            (0.5, 1),
            xytext=(0, 24),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="center",
            fontsize=12,
            fontweight="bold",
        )
    bars = right.subplots()
    shares = words["followed"]  # of each title, one of each seed
    bars.bar(titles, [np.mean(each) for each in shares], color=["C0", "C1", "C2"], alpha=0.6)
    for k, each in enumerate(shares):
        bars.plot([k] * len(each), each, "k.", markersize=5)
    bars.axhline(CHANCE, color="grey", linestyle=":")
    beside = ("axes fraction", "data")
    bars.annotate("chance", (1.02, CHANCE), xycoords=beside, va="center", color="grey")
    bars.set(ylim=(0, 1), title="all new sentences:\nshare that leads to the goal")
    bars.tick_params("x", rotation=30)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.pictures", description=__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--accept", nargs="+", default=[], choices=PICTURES)
    options = parser.parse_args()
    recorded = read_digests()
    names = list(PICTURES) if options.all else outdated()
    if options.accept:
        names = []
        for name in options.accept:
            recorded[name] = digest(PICTURES[name])
    for name in names:
        if draw(name):
            recorded[name] = digest(PICTURES[name])
    DIGESTS.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
