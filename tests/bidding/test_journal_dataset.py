"""A served journal as a dataset: training reads, bit by bit, the observations, multipliers and
rewards that were served.
"""

import sqlite3

import numpy as np
import pytest

from decisionllm.bidding.env import Auction
from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.journal.rows import checksum
from decisionllm.bidding.journal_dataset import load
from decisionllm.bidding.market.observation import ObservationSpec
from tests.bidding.server.in_process import CampaignManager
from tests.bidding.server.test_auctionnet_strategy import OPTIONS, run
from tests.conftest import LOOP, NANO, command, near

pytestmark = pytest.mark.numeric

POSITIONS = "0,9,20,31"


def serve(path, options=OPTIONS, *, steps=48, close=True, positions=POSITIONS):
    """Serve campaigns of a replayed day.

    Returns the observations and multipliers of each, and their environment.
    """
    loaded = run(options)
    env = Auction(
        1,
        periods="3",
        positions=positions,
        budgets="0.3",
        opportunities=2000,
        text="informative",
        **options,
    )
    env.reset(0)
    manager = CampaignManager(
        loaded, ObservationSpec.from_info(loaded.info["dataset"]), Journal(path)
    )
    N = len(env.budgets)
    observations = [[] for _ in range(N)]
    done = [[] for _ in range(N)]
    result = [None] * N

    act = loaded.act_with_returns

    def watched(histories):
        observations[now].append(histories[0].observations[-1].tolist())
        return act(histories)

    loaded.act_with_returns = watched
    who = zip(env.budgets.tolist(), env.target_cpa.tolist(), env.category.tolist(), strict=True)
    ids = [
        manager.open(budget=b, target_cpa=c, category=int(k), name=f"campaign {i}")
        for i, (b, c, k) in enumerate(who)
    ]
    for step in range(steps):
        value, volume = env.simulation.next_opportunities(step)
        for now in range(N):
            coming = {"value": float(value[now]), "volume": float(volume[now])}
            done[now].append(
                manager.tick(ids[now], index=step, result=result[now], coming=coming)["multiplier"]
            )
        brought = env.simulation.step(
            step, np.array([m[-1] for m in done]), env.campaigns.remaining
        )
        env.campaigns.record(**brought)
        result = [
            {name: float(np.broadcast_to(x, N)[i]) for name, x in brought.items()} for i in range(N)
        ]
    for now in range(N if close else 0):
        manager.tick(ids[now], index=steps, result=result[now], coming=None)
    manager.journal.close()
    return observations, done, env


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        {
            "observation": "minimal",
            "context_features": "budget_and_cpa",
            "reward": "expected_value",
        },
    ],
)
def test_training_reads_what_was_served_to_the_last_bit(tmp_path, options):
    observations, done, env = serve(tmp_path / "j.sqlite", options)
    source = load(path=str(tmp_path / "j.sqlite"), text="served", **options)
    episodes = list(source.episodes)
    assert len(episodes) == 4 and source.spec.horizon == 48
    for i, episode in enumerate(episodes):
        decided = [
            row
            for row, meant in zip(episode.observations.tolist(), episode.loss_mask, strict=True)
            if meant
        ]
        assert decided == observations[i] and len(decided) > 3, (
            "the policy decides while budget remains"
        )
        assert (
            episode.actions[:, 0].tolist() == np.float32(done[i]).tolist()
            and len(episode.rewards) == 48
        )
        assert (
            episode.task == env.tasks[i]
            and episode.terminated == (env.campaigns.remaining[i] < 0.1) != episode.truncated
        )
    near([e.rewards.sum() for e in episodes], env.total_reward())
    assert [row[2:5] for row in source.info["campaigns"]] == [
        list(x) for x in zip(env.category, env.budgets, env.target_cpa, strict=True)
    ]
    assert len({e.group for e in episodes}) == 4


def test_a_step_belongs_to_an_episode_once_its_result_is_known(tmp_path):
    serve(tmp_path / "j.sqlite", steps=5, close=False)
    with pytest.raises(
        ValueError,
        match=(
            "expected campaigns that have ended, got none among 4; dataset.unfinished=true reads "
            "open ones"
        ),
    ):
        load(path=str(tmp_path / "j.sqlite"))
    assert [
        len(e.rewards) for e in load(path=str(tmp_path / "j.sqlite"), unfinished=True).episodes
    ] == [4] * 4
    serve(tmp_path / "j.sqlite", steps=7, positions="3")
    assert [len(e.rewards) for e in load(path=str(tmp_path / "j.sqlite")).episodes] == [7], (
        "of those that have ended"
    )
    serve(tmp_path / "j.sqlite", steps=48, positions="3", close=False)
    assert [len(e.rewards) for e in load(path=str(tmp_path / "j.sqlite")).episodes] == [7, 47], (
        "a campaign of 48 steps has ended with its last tick"
    )


def test_a_fallback_is_not_imitated(tmp_path):
    serve(tmp_path / "j.sqlite", positions="3")
    (before,) = load(path=str(tmp_path / "j.sqlite")).episodes
    with sqlite3.connect(tmp_path / "j.sqlite") as file:
        file.create_function("checksum", -1, checksum)
        answer = "json_set(answer, '$.fallback', 'deadline')"
        file.execute(
            f"UPDATE ticks SET answer = {answer},"
            f" sum = checksum(campaign, step, request, {answer}, at) WHERE step = 2"
        )
    (after,) = load(path=str(tmp_path / "j.sqlite")).episodes
    assert before.loss_mask[2] and np.flatnonzero(before.loss_mask != after.loss_mask).tolist() == [
        2
    ]
    assert before.actions.tolist() == after.actions.tolist()


@pytest.mark.slow
def test_the_commands_read_a_journal_and_its_later_ticks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    serve("j.sqlite")
    options = [
        "dataset=journal",
        "dataset.path=j.sqlite",
        "dataset.observation=minimal",
        "dataset.context_features=budget_and_cpa",
        "text=served",
    ]
    assert command("data", *options) == 0 and "4 in 4 groups, 192 steps" in capsys.readouterr().out
    loop = [option for option in LOOP if not option.startswith("dataset")]
    env = "env=none"  # it has no texts like those that campaigns were served with
    assert (
        command("train", *options, *NANO, *loop, env, "run=runs/again", "data.held_out=0.25") == 0
    )
    assert (tmp_path / "runs" / "again" / "checkpoint").is_dir()
    server = Journal("j.sqlite")  # one that runs: what is written lies beside the file
    serve("j.sqlite", positions="3")
    assert command("data", *options) == 0 and "5 in 5 groups, 240 steps" in capsys.readouterr().out
    server.close()


def test_another_file_is_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=(
            "dataset.path: expected a journal that a server wrote, got .*no.sqlite: there is no "
            "such file"
        ),
    ):
        load(path=str(tmp_path / "no.sqlite"))
    assert not (tmp_path / "no.sqlite").exists()
    with pytest.raises(
        ValueError,
        match="dataset.text: expected one of none, served, constant, informative, got 'shuffled'",
    ):
        load(path="j", text="shuffled")
