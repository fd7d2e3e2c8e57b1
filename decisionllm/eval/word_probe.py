"""The option probe=words of `evaluate`: checks before the rollouts, rows, tables and a picture of an
instruction probe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from decisionllm.eval import intervals
from decisionllm.eval.instruction_probe import probe_texts
from decisionllm.eval.pictures import figure, wrap_name
from decisionllm.eval.text_variants import Pair, TaskTexts, check_pairs, read_pairs
from decisionllm.policy.open_runs import OpenedRun
from decisionllm.policy.policy import Policy
from decisionllm.protocols import Env
from decisionllm.runs import directory
from decisionllm.schema import Episode, Json

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

FILE = "word_probe.jsonl"
# scores and metrics of a result row are not those of its probe
ABOUT = (
    "world",
    "dataset",
    "policy",
    "protocol",
    "text",
    "seed",
    "target_return",
    "headline",
    "options",
    "run",
    "part",
    "changed",
    "env_seed",
    "fingerprint",
    "versions",
)


def check_reads_text(run: OpenedRun) -> None:
    """Raise a ValueError unless a policy was trained with task texts."""
    if isinstance(run.policy, Policy) and directory.has_texts(run.info):
        return
    raise ValueError(
        f"{run.path}: probe=words needs a policy that was trained with task texts, and this one "
        "reads no text; leave it out of run=, or train with texts, such as text=goal"
    )


def prepare_pairs(run: OpenedRun, env: Env, seed: int, path: str | Path | None) -> list[Pair]:
    """Read the pairs of the user's file, before the rollouts.

    Args:
        run: that is probed.
        env: which is reset: some environments say their texts then.
        seed: of the reset.
        path: of the file; None: no pairs.

    Raises:
        ValueError: the environment has no task texts, or the text of a pair is none of them.
    """
    env.reset(seed)
    if not any(env.tasks):
        raise ValueError(
            f"{run.path}: probe=words needs episodes with a task text, and its environment "
            f"{env.name} has none; give +env.text=... or +env.task_from=..., as in training"
        )
    if path is None:
        return []
    pairs = read_pairs(path)
    texts = [*env.tasks, *task_texts(run, env).all_texts()]
    check_pairs(pairs, list(dict.fromkeys(texts)), f"probe_pairs={path}")
    return pairs


def task_texts(run: OpenedRun, env: Env) -> TaskTexts:
    """Return the task texts of a run's data and of its environment, after a reset."""
    frames = None
    if run.config["text"] == "paraphrased":
        frames = run.config["text_wordings"]
    return TaskTexts([*run.info.get("tasks", []), *env.tasks], env.facts, frames=frames)


def probe_run(
    run: OpenedRun,
    env: Env,
    episodes: Sequence[Episode],
    result: Json,
    pairs: Sequence[Pair],
    *,
    limit: int,
    seed: int,
) -> Json:
    """Return the line of word_probe.jsonl about a run.

    Args:
        run: that is probed.
        env: of the episodes.
        episodes: N, of the run's headline target.
        result: the row of results.jsonl about the first condition of the environment.
        pairs: of the user's file.
        limit: the most episodes of this condition that are probed, a random sample.
        seed: of the sample and of the probe.
    """
    members = next(iter(env.conditions(run.policy.execution, False).values()))
    with_text = np.array([i for i in members if episodes[i].task])
    # drawn, since every third row may be the same agent of its team
    order = np.random.default_rng(seed).permutation(with_text)
    probed = np.sort(order[:limit])
    # the agents of a team act in one world
    clusters = env.groups if env.clusters is None else env.clusters
    assert isinstance(run.policy, Policy)
    variants = probe_texts(
        run.policy,
        [episodes[i] for i in probed],
        task_texts(run, env),
        pairs=pairs,
        clusters=None if clusters is None else clusters[probed],
        seed=seed,
    )
    about = {key: result[key] for key in ABOUT if key in result}
    return about | {"probe": "words", "n": len(probed), "variants": variants}


@dataclass(frozen=True)
class Share:
    """The share of episodes that a probe measured, with its 95 % interval."""

    share: float
    low: float
    high: float


@dataclass(frozen=True)
class WorldProbe:
    """The probes of policies in one world.

    Attributes:
        world: its name.
        should: what the actions should do under each variant, {variant: KEEP, ...}.
        shares: of each policy, {policy: {variant: Share}}.
    """

    world: str
    should: dict[str, str]
    shares: dict[str, dict[str, Share]]

    @property
    def policies(self) -> list[str]:
        return list(self.shares)

    def cells(self) -> list[list[str]]:
        """Return the rows of the table as texts: variant, what the actions should do, policies."""
        rows = []
        for variant, should in self.should.items():
            cells = [variant, should]
            for shares in self.shares.values():
                share = shares.get(variant)
                cells.append(
                    "" if share is None else f"{share.share:.2f}  {share.low:.2f}..{share.high:.2f}"
                )
            rows.append(cells)
        return rows

    def table(self) -> "Table":
        """Return the table for a terminal."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        title = f"{self.world}: share of episodes whose actions change with the text"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("variant of the text", overflow="fold")
        table.add_column("actions should", overflow="fold")
        for policy in self.policies:
            table.add_column(policy, justify="right", min_width=10, overflow="fold")
        for cells in self.cells():
            table.add_row(*cells)
        return table


def group_by_world(pools: Sequence[tuple[str, list[Json]]]) -> list[WorldProbe]:
    """Return the shares of each world.

    pools: the name of each policy, and its rows of word_probe.jsonl, one for each seed.
    """
    worlds: dict[str, WorldProbe] = {}
    for policy, rows in pools:
        first = rows[0]
        world = worlds.setdefault(first["world"], WorldProbe(first["world"], {}, {}))
        name = policy
        if name in world.shares:
            name = ", ".join(filter(None, [policy, first["protocol"], first.get("changed")]))
        by_variant: dict[str, list[Json]] = {}
        for row in {row["seed"]: row for row in rows}.values():
            for variant in row["variants"]:
                by_variant.setdefault(variant["variant"], []).append(variant)
                world.should.setdefault(variant["variant"], variant["should"])
        world.shares[name] = {variant: pool_seeds(each) for variant, each in by_variant.items()}
    return list(worlds.values())


def pool_seeds(variants: Sequence[Json]) -> Share:
    """Return the share of one variant over the runs of several seeds."""
    shares = [variant["share"] for variant in variants]
    low, high = variants[0]["low"], variants[0]["high"]
    if len(shares) > 1:
        low, high = intervals.over_runs(shares)
    return Share(float(np.mean(shares)), low, high)


def draw(probes: Sequence[WorldProbe]) -> "Figure":
    """Draw bars of the shares: a panel for each world, a colour for each policy."""
    heights = [1 + 0.12 * len(probe.should) * (1 + len(probe.shares)) for probe in probes]
    picture = figure(8, sum(heights))
    panels = picture.subplots(len(probes), squeeze=False, height_ratios=heights)[:, 0]
    for axis, probe in zip(panels, probes, strict=True):
        variants = list(probe.should)
        thickness = 0.8 / len(probe.shares)
        for k, (policy, shares) in enumerate(probe.shares.items()):
            places = np.array([variants.index(variant) for variant in shares])
            values = np.array([[each.share, each.low, each.high] for each in shares.values()]).T
            share, low, high = values
            y = places + (k + 0.5) * thickness - 0.4
            errors = [np.maximum(share - low, 0), np.maximum(high - share, 0)]
            axis.barh(y, share, thickness, xerr=errors, color=f"C{k % 10}", label=wrap_name(policy))
        labels = [f"{variant} ({should})" for variant, should in probe.should.items()]
        axis.set_yticks(range(len(variants)), labels, fontsize=7)
        axis.invert_yaxis()
        axis.set(xlim=(0, 1.02), xlabel="share of episodes", title=probe.world)
        axis.grid(axis="x", linewidth=0.3)
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return picture
