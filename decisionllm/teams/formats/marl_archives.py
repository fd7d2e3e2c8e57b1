"""Public logs of many agents, as Logs of some whole worlds each: Vaults (OG-MARL), OMAR's folders
of .npy, PyMARL's padded .h5.

All three hold arrays of (steps, agents) for a fixed team and do not say which agents are alive. An
agent is gone, and has no row, after it terminated by itself, or when it has only action 0 from a
step on, which is what a dead unit of SMAC has. One that has only action 0 and later a choice again
is busy: its row is no training target. The reward of a team is the mean of its agents' rewards,
which most files repeat for each agent. Sources: flashbax `vault.py`, OMAR (arXiv 2111.11188),
PyMARL `episode_buffer.py`.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from decisionllm.teams.formats.fixed_team_worlds import to_log
from decisionllm.teams.formats.omar import read_omar
from decisionllm.teams.formats.pymarl import read_pymarl
from decisionllm.teams.formats.team_log import Log
from decisionllm.teams.formats.vault import read_vault


def read_archive(path: Path, kind: str, *, cut: int = 25) -> Iterator[Log]:
    """Return the parts of a public log, as they are read: Logs of some whole worlds each.

    The meta of each has the limits of its own worlds and the repairs of all that were read, see
    `log_meta.merge_meta`.

    Args:
        path: the folder or file.
        kind: see `detect_format`.
        cut: steps of a world in an OMAR log.
    """
    repairs = Counter[str]()
    if kind == "vault":
        parts = read_vault(path, repairs)
    elif kind == "omar":
        parts = read_omar(path, repairs, cut=cut)
    else:
        parts = read_pymarl(path, repairs)
    empty = True
    for worlds in parts:
        empty = False
        yield to_log(path, repairs, worlds)
    if empty:
        raise ValueError(f"{path}: expected a world that ended, got none")


def detect_format(path: str | Path) -> str:
    """Return the format of a path: ours, vault, omar or pymarl."""
    signs = {"ours": "meta.json", "vault": "manifest.ocdbt", "omar": "obs_0.npy"}
    root = Path(path).expanduser()
    if root.is_file() and root.suffix in (".h5", ".hdf5"):
        return "pymarl"
    kinds = [kind for kind, sign in signs.items() if (root / sign).is_file()]
    if not kinds:
        inner: set[str] = set()
        for sign in signs.values():
            inner |= {str(file.parent.relative_to(root)) for file in root.glob(f"*/**/{sign}")}
        contents = "no such thing"
        if inner:
            contents = f"a folder of logs: choose {', '.join(sorted(inner))}"
        raise FileNotFoundError(
            f"{path}: expected an .h5 file or a folder with {', '.join(signs.values())}, got "
            f"{contents}"
        )
    return kinds[0]
