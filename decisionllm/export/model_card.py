"""The model card of an exported run: metadata of the Hugging Face Hub, and a page about the policy,
its data and its scores.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from decisionllm.eval.conclusions import format_number
from decisionllm.eval.report import format_target, read_rows
from decisionllm.registry import Node, is_none
from decisionllm.runs.hub import BASE, LIBRARY
from decisionllm.schema import Json, Spec

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCard


TASK = "reinforcement-learning"  # the hub's name
TAGS = ("offline-reinforcement-learning", "decision-transformer")
RELATIONS = {"lora": "adapter", "full": "finetune"}  # of a policy to its base model, by `tune`
MOST_TASKS = 5  # task texts that the page shows

TEMPLATE = """---
{{ card_data }}
---

# {{ name }}

A policy for sequential decisions, trained on logged episodes with
[decisionllm](https://arxiv.org/abs/2601.10148): a language model reads {% if tasks %}a text that says what the
task is beside {% endif %}the trajectory, and a head predicts the next action.

## Use

```python
import decisionllm

policy = decisionllm.load("{{ repo_id }}"{% if parts %}, part="{{ parts[0] }}"{% endif %})
session = policy.begin([{{ example_task }}], horizon={{ data[0].horizon }})
action = session.act(observations)  # (1, {{ data[0].observation_dim }}) numbers -> (1, {{ data[0].action_dim }}), raw units
```

{% if base == own_base %}`base/` has the base model, which transformers loads alone.
{% elif base %}The base model is [{{ base }}](https://huggingface.co/{{ base }}).
{% endif %}{% if tune == "lora" %}The adapter is in peft's layout:
`PeftModel.from_pretrained(base_model, "{{ repo_id }}", subfolder="adapter")`.
{% endif %}{% if reader %}Task texts are read by another language model, {{ reader }}, which is not in this folder.
{% endif %}
## Data

| data | episodes | observation | action | longest episode |
|---|---|---|---|---|
{% for row in data -%}
| {{ row.name }} | {{ row.episodes }} | {{ row.observation_dim }} numbers | {{ row.action }} | {{ row.horizon }} steps |
{% endfor %}
{% if parts %}Its parts are {{ parts | join(", ") }}.

{% endif %}{% if tasks %}Some of its task texts:

{% for task in tasks -%}
- {{ task }}
{% endfor %}
{% endif %}## Training

{{ steps }} steps{% if not finished %} of {{ all_steps }}, when it was stopped{% endif %}; window {{ window }}, seed {{ seed }},
backbone `{{ backbone }}` (tune={{ tune }}), head `{{ head }}`. `config.json` has every option.
{% if command %}
```sh
decisionllm {{ command }}
```
{% endif %}
## Scores

{% if rows -%}
| world | protocol | target return | score | 95 % interval | mean return | episodes |
|---|---|---|---|---|---|---|
{% for row in rows -%}
| {{ row.world }} | {{ row.protocol }} | {{ row.target }} | {{ row.score }} | {{ row.low }} to {{ row.high }} | {{ row.returned }} | {{ row.n }} |
{% endfor %}
Intervals are over the episodes of this one training seed.
{%- else -%}
Not evaluated.
{%- endif %}
"""


@dataclass(frozen=True, kw_only=True)
class CardOptions:
    """What a model card says and a run does not know; configs/export.yaml explains them."""

    repo_id: str | None
    license: str | None
    base_model: str | None
    datasets: list[str]
    tags: list[str]
    results: str | None


def check_hub_ids(card: CardOptions) -> None:
    """Raise a ValueError for a name that the hub does not take."""
    names = {"card.repo_id": [card.repo_id], "card.base_model": [card.base_model]}
    names["card.datasets"] = list(card.datasets)
    for option, hub_ids in names.items():
        for hub_id in filter(None, hub_ids):
            fault = hub_id_fault(hub_id)
            if fault:
                raise ValueError(f"{option}: expected a name on the hub ({fault})")


def hub_id_fault(name: str) -> str:
    """Return why the hub does not take a name; "" if it does."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return str(error)
    return ""


def make_card(
    run: Path,
    folder: str,
    config: Node,
    info: Json,
    state: Json,
    *,
    base: str,
    card: CardOptions,
) -> "tuple[ModelCard, int]":
    """Return the model card of a run, and how many scores it has.

    Args:
        run: the run directory.
        folder: name of the exported folder.
        config, info: of `directory.read`.
        state: "step" of the weights, and whether the training is "finished".
        base: see `hub_folder.name_base_model`.
        card: options.
    """
    from huggingface_hub import ModelCard, ModelCardData

    rows = find_scores(run, card.results)
    tune = config["backbone"].get("tune", "")
    reader = text_encoder_name(config["text_encoder"])
    datasets = card.datasets or [name for name in dataset_names(info) if not hub_id_fault(name)]
    named_base = "" if base == BASE else base
    metadata = ModelCardData(
        license=card.license or "unknown",
        library_name=LIBRARY,
        pipeline_tag=TASK,
        base_model=named_base or None,
        base_model_relation=RELATIONS.get(tune) if named_base else None,
        datasets=datasets or None,
        tags=[*TAGS, *(["lora"] if tune == "lora" else []), *card.tags],
        model_name=(card.repo_id or folder) if rows else None,
        eval_results=eval_results(rows) or None,
    )
    tasks = task_texts(info)
    page = ModelCard.from_template(
        metadata,
        template_str=TEMPLATE,
        name=(card.repo_id or folder).rpartition("/")[2],
        repo_id=card.repo_id or folder,
        tasks=tasks,
        example_task=repr(tasks[0] if tasks else ""),
        parts=list(info["parts"]),
        data=describe_data(info),
        base=base,
        own_base=BASE,
        reader=reader,
        steps=f"{state['step']:,}",
        all_steps=f"{config['steps']:,}",
        finished=state["finished"],
        window=config["window"],
        seed=config["seed"],
        tune=tune,
        backbone=config["backbone"]["_target_"].rpartition(".")[2],
        head=config["head"]["_target_"].rpartition(".")[2],
        command=command_words(info),
        rows=[describe_score(row) for row in rows],
    )
    return page, len(rows)


def find_scores(run: Path, results: str | None) -> list[Json]:
    """Return the headline rows about a run in results.jsonl.

    results: its folder; None: that of the run, where `evaluate` writes it.
    """
    folder = run.parent if results is None else Path(results)
    if results is not None and not (folder / "results.jsonl").is_file():
        raise FileNotFoundError(f"card.results={results}: expected results.jsonl in it, found none")
    if not (folder / "results.jsonl").is_file():
        return []
    rows = []
    for row in read_rows(folder):
        is_of_run = row.get("run") and Path(row["run"]).resolve() == run.resolve()
        if is_of_run and row["headline"]:
            rows.append(row)
    return rows


def eval_results(rows: Sequence[Json]) -> "list[EvalResult]":
    """Return the scores of rows as the hub's metadata has them, with their intervals."""
    from huggingface_hub import EvalResult

    results = []
    for row in rows:
        common = {
            "task_type": TASK,
            "task_name": TASK,
            "dataset_type": re.sub(r"[^\w.-]+", "-", row["world"]),
            "dataset_name": row["world"],
            "dataset_config": protocol_words(row) or None,
        }
        interval = {"low": row["low"], "high": row["high"], "episodes": row["n"]}
        score = EvalResult(
            **common,
            metric_type="score",
            metric_name="mean score, with its 95 % interval over episodes",
            metric_value=row["score"],
            metric_args=interval,
        )
        mean_reward = EvalResult(
            **common,
            metric_type="mean_reward",
            metric_name="mean return, raw reward units",
            metric_value=row["return"],
        )
        results += [score, mean_reward]
    return results


def describe_score(row: Json) -> Json:
    """Return the cells of a result row in the table of the page."""
    numbers = {name: format_number(row[name]) for name in ("score", "low", "high")}
    return numbers | {
        "world": row["world"],
        "protocol": protocol_words(row),
        "target": format_target(row["target_return"]),
        "returned": format_number(row["return"]),
        "n": row["n"],
    }


def protocol_words(row: Json) -> str:
    """Return the protocol of a result row, and what was changed for it."""
    return ", ".join(filter(None, [row["protocol"], row.get("changed")]))


def describe_data(info: Json) -> list[Json]:
    """Return a row for the data of each embodiment of a run."""
    rows = []
    for each in info["embodiments"].values():
        spec = Spec.of(each["spec"])
        action = f"{spec.action_dim} numbers"
        if spec.num_actions:
            action = f"one of {spec.num_actions}"
        rows.append(
            {
                "name": each["dataset"]["name"],
                "episodes": f"{each['episodes']:,}",
                "observation_dim": spec.observation_dim,
                "action_dim": spec.action_dim,
                "action": action,
                "horizon": spec.horizon,
            }
        )
    return rows


def dataset_names(info: Json) -> list[str]:
    """Return the names of the datasets of a run, each once."""
    described = [*info["embodiments"].values(), *info["parts"].values()]
    return list(dict.fromkeys(each["dataset"]["name"] for each in described))


def task_texts(info: Json) -> list[str]:
    """Return some of the task texts that a run was trained on, as far as run.json names them."""
    texts: list[str] = []
    for each in info["embodiments"].values():
        texts += [" ".join(task.split()) for task in each.get("tasks", []) if task]
    return texts[:MOST_TASKS]


def text_encoder_name(encoder: Node) -> str:
    """Return the language model that reads texts in place of the backbone; "": there is none."""
    if is_none(encoder):
        return ""
    return str(encoder.get("folder") or encoder.get("hub_id") or "SmolLM2-135M-Instruct")


def command_words(info: Json) -> str:
    """Return the command that trained a run; "": it was called from Python."""
    made_by = info.get("made_by") or {}
    return " ".join([made_by["command"], *made_by["overrides"]]) if made_by else ""
