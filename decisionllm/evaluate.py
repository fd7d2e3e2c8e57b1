"""The verb `evaluate`: load runs, roll them out beside scripted baselines, append to results.jsonl, write the report."""

import json
import re
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from decisionllm.eval import report
from decisionllm.eval.rollout import rollout
from decisionllm.policy import checkpoint
from decisionllm.registry import build
from decisionllm.schema import Report


def evaluate(config):
    """Roll out every run of config["run"] (see configs/evaluate.yaml). Returns the path of results.jsonl."""
    console = Console(soft_wrap=True, markup=False, highlight=False)
    runs = [Path(str(run)) for run in (config["run"] if isinstance(config["run"], list) else [config["run"]])]
    if not runs or config["episodes"] < 1:
        raise ValueError(f"run, episodes: expected at least one of each, got {config['run']} and {config['episodes']}")
    out = Path(config["out"]) if config["out"] else runs[0].parent
    acting = config["act"] | config["team"]
    acting["generator"] = torch.Generator(checkpoint.usable(config["device"])).manual_seed(
        config["seed"]
    )  # of act.decode=sample
    loaded = [checkpoint.load(run, device=config["device"], **acting) for run in runs]  # all of them, before any work is lost
    results, drawn, versions = out / "results.jsonl", set(), checkpoint.versions()
    out.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        for run, (policy, trained, facts) in zip(runs, loaded, strict=True):
            if trained["env"]["_target_"] == "none" and not config["env"]:
                raise ValueError(f"{run}: env=none, there is no world to roll out in; give one, such as +env._target_=...")
            env = build(trained["env"] | config["env"], config["episodes"])
            if hasattr(env, "execution"):  # it names its rows after it
                env.execution = policy.execution.replace("_", " ")
            told = policy.return_conditioned
            headline = policy.target_return if told else None
            targets = {headline: headline}  # as a row calls it: one for all, or one each
            for quantile in config["target_quantiles"] if told else []:
                each = (
                    env.target_returns(facts["dataset"], quantile)
                    if hasattr(env, "target_returns")
                    else checkpoint.target(facts, quantile)
                )
                targets.setdefault(float(np.mean(each)), each)
            targets |= {float(target): float(target) for target in config["target_returns"] if told}
            own = (
                trained["name"]
                + f"+plan{policy.planning_horizon}" * bool(policy.planning_horizon)
                + "+joint" * (policy.execution == "joint")
            )
            players = [
                (
                    f"{own}+reach" if told and target is None else own,
                    target,
                    lambda tasks, p=policy, e=env, t=each: p.begin(tasks, e.horizon, t, getattr(e, "groups", None)),
                    True,
                )
                for target, each in targets.items()
            ]
            if config["baselines"] and hasattr(env, "baselines") and facts["dataset"]["name"] not in drawn:
                players += [(name, None, begin, False) for name, begin in env.baselines(config["seed"]).items()]
            for name, target, begin, ours in players:
                with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
                    task = bar.add_task(f"{name} {target or ''}", total=env.horizon)
                    began = time.monotonic()
                    episodes = rollout(
                        begin, env, seed=config["seed"], progress=lambda n, bar=bar, task=task: bar.advance(task, n)
                    )
                seconds = time.monotonic() - began
                extra = {"env_seed": config["seed"]}
                if ours:
                    extra |= {
                        "run": str(run),
                        "decode": policy.decode,
                        "planning_horizon": policy.planning_horizon,
                        "execution": policy.execution,
                        "fingerprint": facts["fingerprint"],
                        "versions": versions,
                    }
                whole = {env.protocol if ours else "scripted": range(len(episodes))}
                parts = env.conditions() if hasattr(env, "conditions") else whole
                for protocol, members in parts.items():
                    part = [episodes[i] for i in members]
                    scores = env.score(part) if hasattr(env, "score") else [float(e.rewards.sum()) for e in part]
                    low, high = report.interval(scores)
                    row = Report(
                        dataset=facts["dataset"]["name"], policy=name, protocol=protocol, text=env.text if ours else "none",
                        seed=trained["seed"] if ours else config["seed"], target_return=target,
                        headline=not ours or target == headline, n=len(part), score=float(sum(scores) / len(scores)), low=low,
                        high=high, mean_return=float(sum(e.rewards.sum() for e in part) / len(part)), seconds=round(seconds, 2),
                        extra=extra | (env.metrics(part) if hasattr(env, "metrics") else {}),
                    )  # fmt: skip
                    file.write(json.dumps(row.row()) + "\n")
                    file.flush()
                    about = "" if len(parts) == 1 else f"  {protocol}"
                    console.print(
                        f"{name:24s} target {'-' if target is None else format(target, '.1f'):>6s}  score {row.score:6.1f}  [{low:.1f}, {high:.1f}]  {seconds:.1f} s{about}"
                    )
                    label = re.sub(r"[^\w.+-]+", "-", f"{name}-{protocol}-{row.seed}")
                    if hasattr(env, "draw") and label not in drawn and row.headline and protocol == next(iter(parts)):
                        drawn.add(label)
                        report.save(out / f"rollout-{label}.png", env.draw(part, f"{name}, {protocol}: {row.score:.1f}"))
            drawn.add(facts["dataset"]["name"])
    console.print(report.table(report.summarise(report.read_rows(out))))
    if config["report"]:
        console.print(f"report: {report.write_report(out, getattr(env, 'published', {}), getattr(env, 'unit', ''))}")
    return results
