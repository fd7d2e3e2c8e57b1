"""A server's journal as a dataset: an episode is a campaign that was served, its observations to the bit what the policy was shown.

A step is an episode's if it is known what it brought, which the tick after it said. Each campaign is a group by itself.
"""

from pathlib import Path

import numpy as np

from decisionllm.config import one_of
from decisionllm.envs.auction.campaign import Campaigns
from decisionllm.envs.auction.journal import Journal
from decisionllm.envs.auction.observation import MIN_REMAINING, ObservationSpec
from decisionllm.protocols import Source
from decisionllm.registry import register
from decisionllm.schema import Episode, Spec


@register("dataset", "journal", text="${text}")
def load(
    *, path: str, text: str = "none", observation: str = "auctionnet", context_features: str = "none", reward: str = "conversions",
    unfinished: bool = False,
) -> Source:  # fmt: skip
    """The campaigns of a journal.

    text: `none`; `served`, the text each policy was given; `constant`, `informative`, as of an auction. observation, context_features, reward: as of an auction;
    what the policy was shown is what its run was trained with. unfinished: also campaigns that go on, with what came so far.
    """
    one_of("dataset.text", text, ("none", "served", "constant", "informative"))
    shown = ObservationSpec(observation=observation, context_features=context_features, reward=reward, text=text)
    (file, *_), episodes, table = files(path=path), [], []
    journal = Journal(file)
    served = list(journal.campaigns())
    for number, campaign in enumerate(served):
        ticks = list(journal.ticks(campaign["id"]))
        finished = campaign["ended"] or len(ticks) >= campaign["horizon"]
        if len(ticks) < 2 or not (finished or unfinished):
            continue
        who = campaign["budget"], campaign["target_cpa"], campaign["category"]
        task = campaign["text"] if text == "served" else shown.task(*who)
        episodes.append(episode(campaign, ticks, task, number, shown))
        earned = float(f"{episodes[-1].rewards.sum():.4g}")
        table.append([number, number, campaign["category"], campaign["budget"], campaign["target_cpa"], earned])
    journal.close()
    if not episodes:
        raise ValueError(
            f"{path}: expected campaigns that have ended, got {len(served)} of which none has; dataset.unfinished=true takes what came so far"
        )
    high = max(float(e.actions.max()) for e in episodes) or 1.0
    horizon = max(campaign["horizon"] for campaign in served)
    spec = Spec(observation_dim=episodes[0].observations.shape[1], action_dim=1, horizon=horizon, low=(0.0,), high=(high,))
    info = {
        "name": f"journal@{file.stem}", "env": "journal", **shown.info(),
        "unfinished": unfinished, "path": path, "campaigns": table,
    }  # fmt: skip
    return Source(spec, episodes, info)


def episode(campaign, ticks, task, group, spec):
    """A campaign and its ticks, as the journal has them, as an Episode. What was answered in place of the policy is not to be imitated."""
    world = Campaigns([campaign["budget"]], [campaign["target_cpa"]], steps=campaign["horizon"])
    rows, earned = [], [0.0]
    for tick in ticks:
        result, coming, answer = tick["request"]["result"], tick["request"]["coming"], tick["answer"]
        if result is not None:
            world.record(**result)
            earned.append(spec.total_reward(world)[0])
        if coming is not None:
            seen = spec.observe(world, coming["value"], coming["volume"])[0]
            meant = world.remaining[0] >= MIN_REMAINING and coming["value"] > 0 and answer["fallback"] is None
            rows.append((seen, [answer["multiplier"]], meant))
    n = len(earned) - 1  # what the last step brought may not be known
    seen, done, meant = (np.array(column[:n]) for column in zip(*rows, strict=True))
    spent = bool(world.remaining[0] < MIN_REMAINING)
    return Episode(
        seen.astype(np.float32), done.astype(np.float32), np.diff(earned).astype(np.float32), terminated=spent, truncated=not spent, task=task,
        group=group, loss_mask=meant,
    )  # fmt: skip


def files(*, path, **options):
    """What `load` would read with these options: the journal, and what was last written to it, which stands beside it."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"dataset.path: expected a journal that a server wrote, got {path}: there is no such file")
    return [f for f in (file, file.with_name(f"{file.name}-wal")) if f.exists()]
