"""A server's journal as a dataset: one episode per served campaign, its observations bit by bit
those the policy acted on.

A step belongs to the episode once its result is known, which the next tick reports. Each campaign
is a group of its own.
"""

from pathlib import Path

import numpy as np

from decisionllm.bidding.dataset import campaigns_source
from decisionllm.bidding.journal.campaign_history import Campaign
from decisionllm.bidding.journal.journal import DamagedRowError, Journal, explain_journal_errors
from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.checks import check_one_of
from decisionllm.datasets.dataset_reader import DatasetReader
from decisionllm.protocols import Source
from decisionllm.schema import Episode, Json


def load(
    *,
    path: str,
    text: str = "none",
    observation: str = "auctionnet",
    context_features: str = "none",
    reward: str = "conversions",
    unfinished: bool = False,
) -> Source:
    """Read the campaigns of a journal.

    Args:
        path: a journal that a server wrote.
        text: `none`; `served`, the text each campaign was served with; `constant` or `informative`,
            as of dataset=auction.
        observation, context_features, reward: see `ObservationSpec`. Take those of the served run.
        unfinished: also read campaigns that have not ended.

    Returns:
        Episodes of bid multipliers. Steps without opportunities, without budget or answered by a
        fallback have loss mask 0.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an unknown option, or no campaign has ended.
    """
    check_one_of("dataset.text", text, ("none", "served", "constant", "informative"))
    spec = ObservationSpec(
        observation=observation,
        context_features=context_features,
        reward=reward,
        text=text,
    )
    file = files(path=path)[0]
    episodes = []
    campaigns = []
    journal = Journal(file, read_only=True)
    with explain_journal_errors(file):
        journal.check_pages()
    served = journal.campaigns()
    for number, campaign in enumerate(served):
        try:
            ticks = journal.ticks(campaign["id"])
        except DamagedRowError:  # the journal logs it
            continue
        finished = campaign["ended"] or len(ticks) >= campaign["horizon"]
        if len(ticks) < 2 or not (finished or unfinished):
            continue
        settings = campaign | {"text": campaign["text"] if text == "served" else None}
        episodes.append(episode(Campaign.begin(settings, spec), ticks, number))
        facts = (campaign["category"], campaign["budget"], campaign["target_cpa"])
        campaigns.append((number, number, *facts))
    journal.close()
    if not episodes:
        none = f"none among {len(served)}; dataset.unfinished=true reads open ones too"
        raise ValueError(f"{path}: expected campaigns that have ended, got {none}")
    info: Json = {"name": f"journal@{file.stem}", "env": "journal"}
    info |= spec.info()
    info |= {"unfinished": unfinished, "path": path}
    horizon = max(campaign["horizon"] for campaign in served)
    return campaigns_source(episodes, campaigns, horizon, info)


def episode(campaign: Campaign, ticks: list[Json], group: int) -> Episode:
    """The Episode of a campaign, replayed from its ticks. Answers of a fallback are not
    imitated."""
    loss_mask = []
    for tick in ticks:
        request, answer = tick["request"], tick["answer"]
        campaign = campaign.advance(request["result"], request["coming"])
        value = 0.0 if request["coming"] is None else request["coming"]["value"]
        loss_mask.append(campaign.can_bid and value > 0 and answer["fallback"] is None)
        campaign = campaign.record_action(answer["multiplier"])
    n = campaign.totals.now  # steps whose result is known
    return Episode(
        campaign.observations[:n],
        campaign.actions[:n],
        campaign.rewards[:n].astype(np.float32),
        terminated=not campaign.can_bid,
        truncated=campaign.can_bid,
        task=campaign.task,
        group=group,
        loss_mask=np.array(loss_mask[:n]),
    )


def files(*, path: str, **options: object) -> list[Path]:
    """The files that `load` reads with these options: the journal, and SQLite's write-ahead log
    beside it.

    Raises:
        FileNotFoundError: there is no such file.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        what = "dataset.path: expected a journal that a server wrote"
        raise FileNotFoundError(f"{what}, got {path}: there is no such file")
    log = file.with_name(f"{file.name}-wal")
    return [file, log] if log.exists() else [file]


READER = DatasetReader(files=files)
