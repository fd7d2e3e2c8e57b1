"""Files of a few hundred MB in each format that is read in parts: seconds and memory until the last
episode.

    python -m lab.large_files [--megabytes 200] [--folder ...]

A row appended to large_files.jsonl holds, for each format, the file's MB, wall seconds, and the
peak of resident memory beside the page cache (RssAnon, Linux) above that before.
"""

import json
import tempfile
from pathlib import Path

import h5py
import numpy as np

from decisionllm.runs import directory
from decisionllm.teams import dataset as team
from decisionllm.worlds.maze2d import dataset as maze2d
from lab.large_log import options_of, resident_mb, watched

RESULTS = Path(__file__).parent / "rows" / f"{Path(__file__).stem}.jsonl"
AGENTS, S, LENGTH = 5, 80, 100


def columns(n, *shape):
    """Numbers that cost no time to compress: (n, ...) float32."""
    return np.broadcast_to(
        np.arange(1, 1 + n, dtype=np.float32).reshape(n, *[1] * len(shape)) % 7 / 7 + 0.1,
        (n, *shape),
    )


def vault(path, size):
    import tensorstore as ts

    n = size // (4 * AGENTS * S) // LENGTH * LENGTH
    ends = np.repeat((np.arange(n) % LENGTH == LENGTH - 1)[:, None], AGENTS, 1)
    whole = {
        "observations.": columns(n, AGENTS, S),
        "actions.": columns(n, AGENTS, 2),
        "rewards.": columns(n, AGENTS),
        "terminals.": ends,
        "truncations.": ends & False,
    }
    for name, column in {
        **{name: x[None] for name, x in whole.items()},
        "vault_index": np.array([n], np.int32),
    }.items():
        chunks = (
            [1, max(2**20 // column[0, 0].size, 1), *column.shape[2:]] if column.ndim > 1 else [1]
        )
        metadata = {
            "shape": column.shape,
            "chunks": chunks,
            "dtype": column.dtype.str,
            "compressor": {"id": "gzip", "level": 1},
        }
        kvstore = {"driver": "ocdbt", "base": f"file://{path}/", "path": f"{name}/"}
        ts.open(
            {"driver": "zarr", "kvstore": kvstore, "metadata": metadata}, create=True
        ).result().write(column).result()
    card = {"version": 1.2, "structure_shape": {name.rstrip("."): "" for name in whole}}
    (path / "metadata.json").write_text(json.dumps(card), encoding="utf-8")


def omar(path, size):
    path.mkdir()
    for i in range(AGENTS):
        for name, shape in (("obs", (S,)), ("acs", (2,)), ("rews", ())):
            np.save(path / f"{name}_{i}.npy", columns(size // (4 * AGENTS * S) // 25 * 25, *shape))


def pymarl(path, size):
    E = size // (4 * AGENTS * S * LENGTH)
    with h5py.File(path, "w") as file:
        for name, shape in (("obs", (AGENTS, S)), ("reward", (1,))):
            file.create_dataset(name, data=columns(E, LENGTH, *shape))
        file["actions"] = np.ones((E, LENGTH, AGENTS, 1), np.int64)
        file["filled"], file["terminated"] = (np.full((E, LENGTH, 1), x, np.uint8) for x in (1, 0))
        file["terminated"][:, -1] = 1


def maze(path, size):
    n = size // (4 * 10)
    made = {
        "observations": columns(n, 4) / 20,
        "actions": columns(n, 2),
        "rewards": columns(n),
        "goals": columns(n, 2),
    }
    maze2d.write_hdf5(path, made | {"ends": np.arange(n) % LENGTH == 0})


FORMATS = {
    "vault": (vault, "a.vlt", lambda path: team.load(path=path)),
    "omar": (omar, "seed_0", lambda path: team.load(path=path)),
    "pymarl": (pymarl, "a.h5", lambda path: team.load(path=path)),
    "maze2d": (maze, "a.hdf5", lambda path: maze2d.load(maze="umaze", path=path, text="goal")),
}


def main():
    options = options_of(RESULTS, __doc__, megabytes=200)
    row = {}
    for name, (make, file, load) in FORMATS.items():
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            make(path := Path(folder) / file, options.megabytes << 20)
            before = resident_mb()
            with watched() as reading:
                reading["episodes"] = sum(1 for _ in load(str(path)).episodes)
            size = (
                sum(each.stat().st_size for each in [path, *path.rglob("*")] if each.is_file())
                / 2**20
            )
            row[name] = reading | {"mb": reading["mb"] - before, "file_mb": size}
            print(name, row[name], flush=True)
    row |= {"megabytes": options.megabytes, "versions": directory.versions()}
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
