"""The command `finetune`: a bidder plays days of our own market, its episodes are appended to its data, training goes on on them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from decisionllm.config import merged, ranges, with_defaults
from decisionllm.datasets.auction import campaign_row
from decisionllm.datasets.mixture import stores
from decisionllm.datasets.store import Store, columns_of, open_store, write
from decisionllm.envs.auction.observation import OBSERVATIONS, ObservationSpec
from decisionllm.eval.report import interval
from decisionllm.eval.rollout import rollout
from decisionllm.files import atomic
from decisionllm.policy import checkpoint
from decisionllm.policy.buffer import ALL, Rows
from decisionllm.policy.session import Session
from decisionllm.protocols import Source
from decisionllm.registry import build, choice
from decisionllm.schema import Episode
from decisionllm.train import train

MAY_DIFFER = ("rounds", "device", "cache_dir")  # when a folder is continued


class Exploring(Session):
    """Campaigns whose bids are the policy's times one random factor each, within the bounds of the data."""

    factor: np.ndarray  # (N,)

    def decide(self, rows: Rows = ALL) -> np.ndarray:
        spec = self.policy.model.spec
        return np.asarray(np.clip(super().decide(rows) * self.factor[rows, None], spec.low, spec.high))

    def select(self, rows: Rows) -> None:
        super().select(rows)
        self.factor = self.factor[rows]


def finetune(config: dict[str, Any]) -> Path:
    """Fine-tune a run online, see configs/finetune.yaml. A folder that holds the same rounds is continued.

    Args:
        config: plain dicts of the form of configs/finetune.yaml; an option left out has its default.

    Returns:
        The run of the round that was kept last.

    Raises:
        ValueError: an option or the run cannot be, or the folder holds other rounds.
        KeyboardInterrupt: interrupted; the same command continues.
    """
    config, console = with_defaults("finetune", config), Console(soft_wrap=True, markup=False, highlight=False)
    out, (run_config, info) = Path(config["out"]), checkpoint.read(config["run"])
    spec, days = ObservationSpec.of(info.get("dataset", {})), ranges("days", config["days"])
    guard, size = ranges("guard_days", config["guard_days"]), config["days_per_round"]
    if {*days} & {*guard} or not 0 < size * config["rounds"] <= len(days):
        expected = f"{size} x {config['rounds']} periods or more, none of guard_days={config['guard_days']}"
        raise ValueError(f"days: expected {expected}, got {config['days']}")
    with checkpoint.locked(out):
        settings, file = {k: v for k, v in config.items() if k not in MAY_DIFFER}, out / "rounds.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        if rows and rows[0]["config"] != settings:
            raise ValueError(f"{out} holds other rounds, of {rows[0]['config']}: choose another out=...")
        store = stores(run_config["dataset"], config["cache_dir"], run_config["data"])[""]
        if store.fingerprint != info["fingerprint"]:
            raise ValueError(f"{config['run']} was trained on data {info['fingerprint']}, {store.path} is {store.fingerprint}")
        if not rows:
            scores, _ = play(Path(config["run"]), guard, config)
            rows.append({"round": 0, "run": config["run"], "kept": True, "config": settings, "scores": scores.tolist()})
            save(file, rows)
        for k in range(1, config["rounds"] + 1):
            path, kept = out / f"store-{k}", [row for row in rows[:k] if row["kept"]]
            if (path / "card.json").is_file():
                store = open_store(path)
            if k < len(rows):
                continue
            current, played = Path(kept[-1]["run"]), days[(k - 1) * size : k * size]
            if store.path != path:
                _, episodes = play(current, played, config, noise=config["noise"], seed=config["seed"] + k)
                store = append(path, store, episodes, spec)
            new = train(merged(run_config, config["train"]) | {
                "run": str(out / f"round-{k}"), "resume_on": str(current), "init_from": "", "fresh": False, "device": config["device"],
                "minutes": 0.0, "steps": checkpoint.trained_steps(current) + config["steps"], "dataset": choice("dataset", "store", path=str(path)),
            })  # fmt: skip
            scores, _ = play(new, guard, config)
            above = scores - np.array(rows[0]["scores"])
            good = bool(scores.mean() >= max(np.mean(row["scores"]) for row in kept) - config["margin"])
            rows.append({"round": k, "run": str(new), "kept": good, "days": played, "scores": scores.tolist()})
            low, high = interval(above)
            console.print(f"round {k}: score {scores.mean():.2f} on guard days, {above.mean():+.2f} [{low:+.2f}, {high:+.2f}] above "
                          f"{config['run']}, {len(store.lengths):,} episodes; {'kept' if good else 'undone'}")  # fmt: skip
            save(file, rows)
    return Path(next(row["run"] for row in reversed(rows) if row["kept"]))


def save(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows of the rounds, all or nothing."""
    with atomic(file) as partial:
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))


def play(
    run: Path, days: list[int], config: dict[str, Any], *, noise: float | None = None, seed: int = 0
) -> tuple[np.ndarray, list[Episode]]:
    """The scores (N,) and episodes of a run in the market of these days. noise: of `Exploring`; None: none, and expected conversions."""
    policy, run_config, info = checkpoint.load(run, device=config["device"])
    market = ObservationSpec.of(info["dataset"]).info() | {"frames": run_config["text_wordings"], "protocol": "market"}
    market |= {"draws": "expected" if noise is None else "bernoulli", "periods": ",".join(map(str, days))}
    env = build(choice("env", "auction", **market | config["env"]), 1)

    def begin(tasks: Any) -> Session:
        session = Exploring(policy, tasks, env.horizon)
        session.factor = np.exp((noise or 0.0) * np.random.default_rng(seed).standard_normal(len(tasks)))
        return session

    episodes = rollout(begin, env, seed=seed, observation_dim=policy.model.spec.observation_dim)
    return np.asarray(env.score(episodes)), episodes


def append(path: Path, old: Store, episodes: list[Episode], spec: ObservationSpec) -> Store:
    """The store with these episodes of the market behind its own. A period is a group, as in the logs."""
    column, columns = OBSERVATIONS[spec.observation].index("value now"), columns_of(old)

    def stored(e: Episode) -> Episode:
        given: dict[str, Any] = {"loss_mask": e.observations[:, column] > 0, "final_observation": e.final_observation}
        kept: dict[str, Any] = {name: x if name in columns else None for name, x in given.items()}
        return replace(e, group=int(e.outcome["period"]), **kept)

    facts = ("period", "advertiser", "category", "budget", "target_cpa")
    table = [campaign_row((e.outcome[name].item() for name in facts), e) for e in episodes]
    known = [*old.info.get("campaigns", []), *table]
    info = old.info | {"campaigns": known, "online": old.info.get("online", 0) + len(episodes)}
    every = (*map(old.episode, range(len(old.lengths))), *map(stored, episodes))
    return write(path, Source(old.spec, every, info), old=old)
