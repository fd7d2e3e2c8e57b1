"""Scripts of the lab run from the data to the rows, at a tiny size. No time is asserted."""

import asyncio
import json
from dataclasses import replace
from importlib import import_module

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks import measure
from decisionllm.bidding.market import simulation
from decisionllm.datasets.arrays import from_episodes
from decisionllm.datasets.store import open_store
from decisionllm.scaling import law
from decisionllm.teams.learned_world import own_first
from tests.conftest import NANO, command, episode

pytestmark = [pytest.mark.numeric, pytest.mark.slow]


def test_a_day_of_auctions_is_timed_on_the_same_work():
    auction_period = import_module("lab.auction_period")
    assert auction_period.gates(total=4000)
    for case in auction_period.cases(total=4000):
        row = measure.compare(case, rounds=1)
        assert row["ours"] > 0 and row["peer"] > 0


def test_a_policy_of_teams_is_judged_by_its_rows():
    from lab.multiagent import CRASHES, verdicts

    def row(protocol, score, policy="nano"):
        return {"protocol": protocol, "score": score, "policy": policy} | (
            {"run": "x"} if policy == "nano" else {}
        )

    plain = [
        row(f"per agent, {n} agents", s) for n, s in {2: 90, 3: 90, 4: 80, 5: 77, 6: 60}.items()
    ]
    crashed = [
        row(f"per agent, crash at {c}", s, p)
        for c in CRASHES
        for p, s in (("nano", 70 + c), ("expert", 75 + c), ("random", 0))
    ]
    asked = {
        quality: [row("per agent", s)]
        for quality, s in {"random": 20, "medium": 70, "expert": 88}.items()
    }
    assert all(met for met, _ in verdicts(plain, crashed, asked, [row("per agent", 60)]).values())
    plain[3]["score"] = 76
    crashed[0]["score"] = 60
    asked["medium"][0]["score"] = 90
    assert not any(
        met for met, _ in verdicts(plain, crashed, asked, [row("per agent", 71)]).values()
    )


def test_the_largest_isoflop_budgets_are_predicted_by_law_and_parabola():
    """Nine simulated budgets of Chinchilla's published law."""
    isoflops = import_module("lab.isoflops")
    budget, size = (
        x.ravel() for x in np.meshgrid(np.geomspace(6e18, 3e21, 9), np.geomspace(0.25, 4, 9))
    )
    N = size * np.sqrt(budget / 6 / 20)
    D = budget / 6 / N
    loss = law.Law(E=1.69, A=406.4, alpha=0.34, B=410.7, beta=0.28)(N, D)
    row = isoflops.predict(
        pd.DataFrame({"params": N, "tokens": D, "loss": loss, "budget": budget}),
        starts=isoflops.STARTS[:3],
    )
    assert (row["fitted_budgets"], len(row["predicted"])) == (6, 3)
    assert (
        row["ours"]["losses"] < 1e-4 and row["direct"]["losses"] < 1e-2 and row["ours"]["N"] < 0.05
    )
    assert row["parabola"]["least"] < 1e-3


@pytest.fixture(autouse=True)
def no_days_of_a_small_market():
    """Days that were played in a market of another size are not kept for the tests after."""
    yield
    simulation.load_day.cache_clear()
    simulation.load_priced_period.cache_clear()


@pytest.fixture(scope="module")
def small_days(tmp_path_factory):
    """A folder of two days of a small market."""
    from decisionllm.bidding.market.advertisers import PUBLISHED

    days = tmp_path_factory.mktemp("market") / "days"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PUBLISHED, "opportunities", 2000)
        words = ("dataset.periods=0-1", f"export=replay:{days}", f"cache_dir={days.parent}")
        assert command("data", "dataset=auction", *words) == 0
    return days


@pytest.fixture
def small_market(monkeypatch):
    """The size of those days."""
    from decisionllm.bidding.market.advertisers import PUBLISHED

    monkeypatch.setitem(PUBLISHED, "opportunities", 2000)


def train_bidder(days, run, *words):
    """Train a bidder on those days."""
    train = (
        "experiment=auction",
        f"dataset.path={days}",
        f"run={run}",
        f"cache_dir={run.parent}",
        "device=cpu",
        "dataset.behaviour=oracle",
        "dataset.num_campaigns=20",
        "steps=2",
        "optim.batch_size=8",
        "log.tracker=none",
        *NANO,
        *words,
    )
    assert command("train", *train) == 0


@pytest.fixture(scope="module")
def bidder(small_days, tmp_path_factory):
    """A run on those days."""
    from decisionllm.bidding.market.advertisers import PUBLISHED

    run = tmp_path_factory.mktemp("bidder") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PUBLISHED, "opportunities", 2000)
        train_bidder(small_days, run)
    return run


@pytest.mark.usefixtures("small_market")
def test_bidders_are_compared_campaign_by_campaign(
    bidder, small_days, tmp_path, monkeypatch, capsys
):
    """From days of a small market to the rows: a run's difference to pooled OnlineLP is that of the
    two rows' scores.
    """
    from lab import auction_bidders

    monkeypatch.setattr(auction_bidders, "BUDGETS", "0.5,1.5")
    words = [
        str(bidder),
        "--replay",
        f"{small_days}:1",
        "--repeats",
        "1",
        "--out",
        f"{tmp_path}/rows.jsonl",
    ]
    monkeypatch.setattr("sys.argv", ["auction_bidders", *words])
    auction_bidders.main()
    rows = [
        json.loads(line)
        for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(rows) == 2 * 13 and {row["protocol"].split(",")[0] for row in rows} == {"replay 1"}
    half = {
        row["policy"]: row["score"]
        for row in rows
        if row["protocol"].endswith("50 %") and "150" not in row["protocol"]
    }
    difference = half["nano"] - half["OnlineLP, pooled"]
    (kept,) = [row for row in rows if ", 50 %, above OnlineLP, pooled" in row["protocol"]]
    assert kept["apart"] == pytest.approx(difference)
    assert kept["low"] <= kept["apart"] <= kept["high"] and kept["campaigns"] == 48
    assert (
        f"replay 1, own market prices, 50 %: {half['nano']:.1f}, {difference:+.2f} ["
        in capsys.readouterr().out
    )


@pytest.mark.usefixtures("small_market")
def test_the_public_protocol_has_a_row_for_each_budget_beside_those_of_others(
    bidder, small_days, tmp_path, monkeypatch, capsys
):
    """From days of a small market: nobody bids better than the best constant by much, and a larger
    budget is never worth less in hindsight.
    """
    from lab import auctionnet_public

    budgets = [*auctionnet_public.BUDGETS.items()][::2]
    monkeypatch.setattr(auctionnet_public, "BUDGETS", dict(budgets))
    out = tmp_path / "rows.jsonl"
    words = [str(bidder), "--days", f"{small_days}:1", "--repeats", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["auctionnet_public", *words])
    auctionnet_public.main()
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["budget"] for row in rows] == [*auctionnet_public.BUDGETS] * 2
    assert all(row["campaigns"] == 2 * 48 for row in rows)
    assert all(row["low"] <= row["score"] <= row["high"] for row in rows)
    best = [row["score"] for row in rows if row["policy"] == auctionnet_public.HINDSIGHT]
    assert best == sorted(best)
    shown = capsys.readouterr().out
    assert "GUIDE, published" in shown and f"{rows[0]['score']:.1f} (" in shown


@pytest.mark.usefixtures("small_market")
def test_words_are_compared_campaign_by_campaign(small_days, tmp_path, monkeypatch, capsys):
    """A bidder that reads words, and thirty instructions, from days of a small market to
    the rows.
    """
    from lab import auction_words, instructions

    monkeypatch.setattr(auction_words, "BUDGETS", "0.5,1")
    words = ("text=paraphrased", "dataset.context_features=outcomes", "data.rows_per_text=4")
    train_bidder(small_days, tmp_path / "run", *words)
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(
        "sys.argv",
        [
            "auction_words",
            f"{tmp_path}/run",
            "--days",
            f"{small_days}:1",
            "--repeats",
            "1",
            "--out",
            str(out),
        ],
    )
    auction_words.main()
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["campaigns"] for row in rows] == [48] * 4
    assert all(
        row["apart"] == pytest.approx(row["own_words"] - row["anothers_words"], abs=1e-9)
        for row in rows
    )
    out.unlink()
    monkeypatch.setattr(instructions, "EPISODES", 1)  # of each text, rounded up to a day of all
    monkeypatch.setattr(
        "sys.argv",
        ["instructions", f"{tmp_path}/run", "--days", f"{small_days}:1", "--out", str(out)],
    )
    instructions.main()
    (row,) = (json.loads(line) for line in out.read_text(encoding="utf-8").splitlines())
    assert len(row["effects"]) == 15 and row["right"] + row["wrong"] <= 15
    assert "of 15 do what they say beyond the interval" in capsys.readouterr().out


def test_an_instruction_is_measured_in_its_direction():
    """The ball ends in row 3, column 1; half of the spend was in the first half of the day."""
    from lab import instructions

    ends = [
        replace(episode([0.0], S=4), final_observation=np.array([3.0, 1.0, 0.0, 0.0], np.float32))
    ]
    assert [instructions.of_maze(ends, name).tolist() for name in ("row", "column")] == [[3], [1]]
    outcome = {
        "step_spend": np.array([1.0, 4.0, 6.0, 8.0]),
        "step_multipliers": np.array([10.0, 20.0, 30.0, 40.0]),
        "spend": np.array(8.0),
        "budget": np.array(16.0),
        "conversions": np.array(4.0),
    }
    day = [replace(ends[0], outcome=outcome)]
    found = {
        name: instructions.of_auction(day, name).item()
        for name in ("morning", "cost", "spent", "bid")
    }
    assert found == {"morning": 0.5, "cost": 2.0, "spent": 0.5, "bid": 25.0}


def test_latency_counts_from_the_intended_moment(monkeypatch):
    """A server that answers nothing before the last of three requests is due, 200 a second on one
    connection: each waits for it.
    """
    load = import_module("lab.load")
    monkeypatch.setattr(load, "CONNECTIONS", 1)
    due = asyncio.Event()

    async def serve(reader, writer):
        for _ in range(3):
            await reader.readuntil(b"body")
            await due.wait()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()
        await writer.wait_closed()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = load.Client(server.sockets[0].getsockname()[1])
        asyncio.get_running_loop().call_later(0.02, due.set)
        await client.run([load.http("/", b"body")] * 3, 200)
        server.close()
        await server.wait_closed()
        return client

    client = asyncio.run(main())
    assert client.statuses[200] == 3 and client.bodies == [b"ok"] * 3
    assert sorted(client.took, reverse=True) == client.took and client.took[0] > 9, (
        "the first is due at 10 ms, the answer comes at 20"
    )


def test_versions_are_compared_turn_by_turn():
    """The machine is half as fast in the second turn: both ratios are those of one turn."""
    from lab import versions

    found = {(name, what): [1.0, 2.0] for name in ("this", "other") for what in versions.UNITS}
    found["this", "ticks"] = [300.0, 150.0]
    found["other", "ticks"] = [200.0, 100.0]
    found["this", "ticks of two replicas"] = [600.0, 300.0]
    rows = {row["case"]: row["ratio"] for row in versions.ratios(found)}
    assert rows["ticks, this / other"] == 1.5
    assert rows["ticks of two replicas / ticks, this"] == 2.0
    assert rows["p99 of bids, this / other"] == 1.0


def test_windows_of_a_log_of_any_size_are_drawn(tmp_path):
    large_log = import_module("lab.large_log")
    stores = []
    for steps in (600, 1200):
        from_episodes(
            large_log.episodes(steps), tmp_path / str(steps), name="large", spec=large_log.SPEC
        )
        stores.append(open_store(tmp_path / str(steps)))
    assert [len(store.rewards) for store in stores] == [600, 1200]
    assert all(
        time > 0
        for time in large_log.window_us([large_log.sampler(store) for store in stores], rounds=1)
    )


def test_a_raw_traffic_log_has_its_sums(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sys.argv",
        [
            "raw_traffic",
            "--rows",
            "5000",
            "--folder",
            str(tmp_path),
            "--out",
            str(tmp_path / "rows.jsonl"),
        ],
    )
    import_module("lab.raw_traffic").main()
    assert json.loads((tmp_path / "rows.jsonl").read_text(encoding="utf-8"))["rows"] == 2 * 48 * 48


def test_shading_is_compared_over_the_same_campaigns():
    from lab.shading import compare

    rows = list(compare([0.2], [7], [0], 1000, positions=(0, 8)))
    assert [(row["bidder"], row["arm"]) for row in rows] == [
        (bidder, arm) for bidder in ("target CPA", "PID") for arm in ("none", "outcome", "price")
    ]
    plain, outcome, price = rows[:3]
    assert plain["surplus"] == pytest.approx(0, abs=1e-3), "target CPA x value is paid in full"
    assert plain["n"] == 2 and "surplus_gain" not in plain
    for row in (outcome, price):
        assert row["spend"] > 0 and row["surplus"] > 0.01
        assert row["surplus_gain"][0] <= row["surplus"] - plain["surplus"] <= row["surplus_gain"][1]


def test_omars_logs_are_read_as_they_were_played(tmp_path, monkeypatch):
    from decisionllm.teams import dataset as team
    from lab import omar

    monkeypatch.setattr(omar, "MEDIUM", -1e9)
    monkeypatch.setattr(
        "sys.argv",
        ["omar", f"{tmp_path}/logs", "--rounds", "21", "--worlds", "16", "--episodes", "24"],
    )
    omar.main()
    logs = {}
    for name in ("random", "medium-replay", "medium", "expert"):
        found = team.load(path=f"{tmp_path}/logs/{name}", meta=f"{tmp_path}/logs/meta.json")
        logs[name] = list(found.episodes)
        assert found.spec.entity_schema[0] == ("own", 4, 1) and {
            len(e.rewards) for e in logs[name]
        } == {omar.HORIZON}
    assert {name: len(log) for name, log in logs.items()} == {
        "random": 72,
        "medium-replay": 48,
        "medium": 72,
        "expert": 72,
    }
    rewards = np.mean(
        [np.load(tmp_path / f"logs/expert/rews_{i}.npy") for i in range(3)], 0
    ).reshape(24, -1)
    assert [e.rewards.tolist() for e in logs["expert"][::3]] == [
        pytest.approx(row) for row in rewards.tolist()
    ]
    columns = omar.play(None, np.arange(4), np.random.default_rng(0), 0.0)
    world = omar.Spread(np.arange(4), 3, "omar")
    assert (world.observe().reshape(4, 3, -1) == columns["obs"][0]).all()
    assert (world.step(columns["acs"][0]).astype(np.float32) == columns["rews"][0]).all()
    assert (columns["obs"][1:] == columns["next_obs"][:-1]).all()
    x = torch.arange(6.0).view(1, 3, 2)
    assert own_first(x)[0].tolist() == [
        [0, 1, 2, 3, 4, 5],
        [2, 3, 4, 5, 0, 1],
        [4, 5, 0, 1, 2, 3],
    ]
