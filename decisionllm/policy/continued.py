"""A run that goes on from the checkpoint of another one, on a store that has grown: what must agree, and what it forgot."""

import json
from collections.abc import Mapping
from pathlib import Path

from decisionllm.config import TrainConfig
from decisionllm.datasets.mixture import spaces
from decisionllm.datasets.store import Store, prefix, sizes
from decisionllm.files import atomic
from decisionllm.policy import checkpoint
from decisionllm.schema import Spec


def continued(c: TrainConfig, stores: Mapping[str, Store], *, begun: bool) -> list[int]:
    """The numbers of episodes of the stores that a run with resume_on was trained on before its own, ascending.

    Raises:
        FileNotFoundError: there is no such run, or no checkpoint.
        ValueError: it is of another space, of data that do not begin this store, or has trained these steps already.
    """
    if begun:
        known: list[int] = checkpoint.read(c.run)[1].get("resumed", {}).get("stages", [])
        return known
    before, info = checkpoint.read(c.resume_on)
    step = checkpoint.content(checkpoint.checkpoint_folder(c.resume_on) / "trainer.json")["step"]
    why = ""
    if c.init_from or Path(c.run).resolve() == Path(c.resume_on).resolve():
        why = f"another run=... and no init_from, got run={c.run} and init_from={c.init_from!r}"
    elif "policy" in before or "episodes" not in info or "" not in stores:
        why = "a run of `decisionllm train` of this version, on a dataset of one space"
    elif sizes(spec := Spec.of(info["spec"])) != sizes(own := stores[""].spec):
        why = f"a run of the data's space, got {spaces({'the data': own, 'the run': spec})}"
    elif len(stores[""].lengths) < (E := info["episodes"]) or prefix(stores[""], E, spec) != info["fingerprint"]:
        why = (
            f"data that begin with the {info['episodes']:,} episodes of this run ({info['fingerprint']}), got {stores[''].path}"
        )
    elif step >= c.steps:
        why = f"more steps than the {step:,} that this run has trained, got steps={c.steps:,}"
    if why:
        raise ValueError(f"resume_on={c.resume_on}: expected {why}")
    return [*info.get("resumed", {}).get("stages", []), info["episodes"]]


def forgotten(run: Path) -> str:
    """Write the held-out losses before and after into run.json. Returns them in words."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {key.partition("/")[2]: [rows[0][key], rows[-1][key]] for key in rows[0] if key.startswith("held_out_nll/")}
    info = checkpoint.read(run)[1]
    info["resumed"]["held_out_nll"] = losses
    with atomic(run / "run.json") as partial:
        partial.write_text(json.dumps(info, indent=1))
    each = (f"{label} episodes: {before:.4f} before, {after:.4f} after" for label, (before, after) in losses.items())
    return (
        f"held-out loss of {', of '.join(each)}" if losses else "nothing is held out (data.held_out): what it forgot is unknown"
    )
