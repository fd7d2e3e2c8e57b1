"""AuctionNet's logs: a day worked by hand, the original's own conversion, every form a file may
have, and every way it may be broken.
"""

import ast
import csv
import gzip
import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from decisionllm.bidding import dataset, teacher
from decisionllm.bidding.dataset import (
    files,
    load,
    log_name,
    nearest_returns,
    observations,
    relabel_log,
    rewards,
    save,
)
from decisionllm.bidding.logs import auctionnet, auctionnet_columns
from decisionllm.bidding.logs.auctionnet_columns import TRAFFIC, TRAJECTORIES
from decisionllm.bidding.logs.replay_days import find_day_files, read_day
from decisionllm.bidding.market.advertisers import PUBLISHED
from decisionllm.bidding.market.bidders import behaviour_roster
from decisionllm.bidding.market.campaigns import CONTEXT, STATE, Campaigns, score
from decisionllm.bidding.market.market import Market
from decisionllm.bidding.market.observation import ObservationSpec, task_text
from decisionllm.bidding.market.traffic import scaled_traffic
from decisionllm.commands.data import card, data
from decisionllm.datasets.store_cache import prepare_store
from decisionllm.datasets.store_writer import write_store
from tests.conftest import episode, make_store, near, node

FIXTURES = Path(__file__).parents[1] / "fixtures" / "auctionnet"
TRAFFIC_LOG = FIXTURES / "traffic_period-7.csv.gz"
ITS_TRAJECTORIES = FIXTURES / "trajectories_period-7.csv.gz"
TRAJECTORY_LOG = FIXTURES / "trajectories_periods_7_8.csv.gz"


def traffic(period=3):
    """The columns of a day of two advertisers, with one opportunity in even steps (value 0.1) and
    two in odd ones (0.1, 0.4).

    Advertiser 0 bids 50 x value, holds a slot of the first one at a price of 2, and is exposed in
    even steps; steps 0 and 2 convert. Advertiser 1 is exposed twice, at a price of 2, and has no
    budget left from step 2 on.
    """
    rows = []
    for t in range(48):
        for pv, (value, market_price) in enumerate([(0.1, 1), (0.4, 3)][: 1 + t % 2]):
            first, alive = pv == 0, t < 2
            rows.append(
                (
                    period,
                    0,
                    0,
                    100,
                    10,
                    t,
                    100 - 2 * -(-t // 2),
                    pv,
                    value,
                    0.01,
                    50 * value,
                    first,
                    first,
                    2 * first,
                    first and t % 2 == 0,
                    first and t in (0, 2),
                    market_price,
                    0,
                )
            )
            rows.append(
                (
                    period,
                    1,
                    5,
                    4,
                    5,
                    t,
                    max(4 - 2 * t, 0),
                    pv,
                    value,
                    0.01,
                    60 * value * alive,
                    first and alive,
                    2 * (first and alive),
                    2 * (first and alive),
                    first and alive,
                    0,
                    market_price,
                    not alive,
                )
            )
    return dict(
        zip(TRAFFIC, (list(map(float, column)) for column in zip(*rows, strict=True)), strict=True)
    )


def put(path, columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(columns)
        rows.writerows(zip(*columns.values(), strict=True))
    return path


def trajectories(tmp_path, period=3):
    """The same day as the columns of a trajectory log."""
    return auctionnet.trajectory_columns(
        auctionnet.read(put(tmp_path / "source" / f"traffic-{period}.csv", traffic(period)))
    )


def episodes(path, **options):
    return list(load(path=str(path), **options).episodes)


def numbers(table, name):
    """A column of text as an array; a state is the text of a tuple."""
    if name not in ("state", "next_state"):
        return np.array([float(x) for x in table[name]])
    return np.array(
        [ast.literal_eval(re.sub(r"np\.float64\(([^)]*)\)", r"\1", x)) for x in table[name] if x]
    )


def test_a_day_by_hand(tmp_path):
    path = put(tmp_path / "log.csv", traffic())
    first, second = episodes(path, context_features="progress")
    state = dict(zip((*STATE, *CONTEXT), first.observations[2].tolist(), strict=True))
    expected = {
        "time left": 46 / 48,
        "budget left": 0.98,
        "bid": (5 + 12.5) / 2,
        "bid, last 3": (5 + 12.5) / 2,
        "market price": (1 + 2) / 2,
        "value": (0.1 + 0.25) / 2,
        "conversion": (1 + 0) / 2,
        "won": (1 + 0.5) / 2,
        "market price, last 3": 1.5,
        "value, last 3": 0.175,
        "conversion, last 3": 0.5,
        "won, last 3": 0.75,
        "value now": 0.1,
        "volume now": 1,
        "volume, last 3": 3,
        "volume, all": 3,
        "log budget": math.log(100),
        "target cpa": 10,
        "spend / target cpa": 0.2,
        "conversions": 1,
        "value exposed": 0.1,
    }
    assert state == pytest.approx(expected), (
        "means of the steps' means, and no price of ads that were not exposed"
    )
    assert first.actions[:, 0].tolist() == pytest.approx([50.0] * 48)
    assert first.rewards.tolist() == [1, 0, 1] + [0] * 45
    assert len(second.rewards) == 3 and second.loss_mask.tolist() == [True, True, False], (
        "its budget was used up before step 2"
    )
    assert second.actions[:, 0].tolist() == pytest.approx([60, 60, 0])
    assert second.observations[:, 1].tolist() == [1.0, 0.5, 0.0]
    for one in (first, second):
        assert (one.group, one.terminated, one.truncated, one.final_observation) == (
            3,
            False,
            True,
            None,
        )
    assert first.loss_mask.all() and first.observations.shape == (48, 21)
    assert auctionnet.read(path).done.tolist() == [
        [False] * 47 + [True],
        [False] * 2 + [True] * 46,
    ], "the day ends as well"


def test_a_step_without_value_is_no_training_target(tmp_path):
    columns = traffic()
    for i in range(144):
        if columns["timeStepIndex"][i] == 4:
            columns["pValue"][i] = columns["bid"][i] = 0.0
    first, _ = episodes(put(tmp_path / "log.csv", columns))
    assert np.flatnonzero(~first.loss_mask).tolist() == [4] and first.actions[4] == 0, (
        "no multiplier is known there"
    )


def test_the_rewards_by_hand(tmp_path):
    path = put(tmp_path / "log.csv", traffic())
    pay = {
        reward: episodes(path, reward=reward)[0].rewards
        for reward in ("conversions", "expected_value", "score")
    }
    assert pay["expected_value"].tolist() == pytest.approx([0.1, 0] * 24)
    assert pay["score"].tolist() == pytest.approx([0.025, 0] * 24), (
        "each 0.1 cost 2, a quarter of it is left at a limit of 10"
    )
    assert pay["conversions"].sum() == 2


@pytest.mark.parametrize("path", [TRAFFIC_LOG, TRAJECTORY_LOG])
def test_the_increments_of_the_score_add_up_to_the_days(path):
    log = auctionnet.read(path)
    near(rewards(log, "score").sum(1), score(log.exposed_value.sum(1), log.spend, log.target_cpa))
    assert any((e.rewards < 0).any() for e in episodes(path, reward="score")), (
        "a step can cost more than it brings"
    )


def test_converted_traffic_is_auctionnets_trajectory_log():
    made = auctionnet.trajectory_columns(auctionnet.read(TRAFFIC_LOG))
    with gzip.open(ITS_TRAJECTORIES, "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(made) == list(rows[0])
    assert [x is None for x in made["next_state"]] == [row["next_state"] == "" for row in rows]
    for name, column in made.items():
        assert len(column) == len(rows) == 6 * 48
        theirs = {name: [row[name] for row in rows]}
        tolerance = 0 if name == "done" else 1e-9
        np.testing.assert_allclose(
            numbers(made, name), numbers(theirs, name), rtol=tolerance, atol=tolerance, err_msg=name
        )


def test_trajectories_and_their_traffic_are_the_same_episodes():
    for a, b in zip(
        *(
            episodes(p, context_features="progress", reward="score")
            for p in (TRAFFIC_LOG, ITS_TRAJECTORIES)
        ),
        strict=True,
    ):
        near(a.observations, b.observations, 1e-6, axis=0)
        near(a.actions, b.actions, 1e-6)
        near(a.rewards, b.rewards)
        assert a.loss_mask.tolist() == b.loss_mask.tolist() and a.group == b.group


def test_context_features_are_those_of_live_campaigns():
    log = auctionnet.read(TRAJECTORY_LOG)
    seen = observations(log, ObservationSpec(context_features="progress"))[:, :, 16:]
    live = Campaigns(log.budget, log.target_cpa)
    zeros = np.zeros(len(log.period))
    spend = np.append(-np.diff(log.remaining, axis=1), zeros[:, None], 1)
    for t in range(48):
        near(seen[:, t], live.context(), axis=0)
        live.record(
            bid=zeros,
            market_price=zeros,
            value=zeros,
            conversion=zeros,
            won=zeros,
            volume=zeros,
            spend=spend[:, t],
            conversions=log.conversions[:, t],
            exposed_value=log.exposed_value[:, t],
        )


def test_a_store_lists_its_campaigns_in_episode_order(tmp_path):
    source = load(path=str(put(tmp_path / "some.csv.gz", traffic())), text="informative")
    store = write_store(tmp_path / "store", source)
    assert store.info["name"] == "auction@some-periods-3" and store.info["env"] == "auction"
    assert (
        store.info["campaigns"] == [[3, 0, 0, 100.0, 10.0, 2.0], [3, 1, 5, 4.0, 5.0, 0.0]]
        and store.info["repairs"] == {}
    )
    assert store.spec.horizon == 48 and (store.spec.low, store.spec.high) == (
        (0.0,),
        (float(np.float32(60)),),
    )
    assert [store.tasks[i] for i in store.task] == [task_text(100, 10, 0), task_text(4, 5, 5)]
    assert prepare_store(
        node("dataset", "auction", path=str(tmp_path / "some.csv.gz")), tmp_path / "home"
    ).lengths.tolist() == [
        48,
        3,
    ]


def test_the_real_logs_end_where_their_first_done_row_is():
    with gzip.open(TRAJECTORY_LOG, "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [rows[48 * k]["done"] for k in range(16)] == ["0"] * 16 and len(rows) == 768
    lengths = [next(t for t in range(48) if rows[48 * k + t]["done"] == "1") + 1 for k in range(16)]
    assert [len(e.rewards) for e in episodes(TRAJECTORY_LOG)] == lengths and min(lengths) == 12
    assert [e.group for e in episodes(TRAJECTORY_LOG)] == [7] * 8 + [8] * 8


def test_the_texts(tmp_path):
    tasks = {
        text: [e.task for e in episodes(TRAJECTORY_LOG, text=text)]
        for text in ("none", "constant", "informative", "shuffled")
    }
    assert set(tasks["none"]) == {""} and set(tasks["constant"]) == {task_text()}
    assert (
        tasks["informative"][1]
        == task_text(4350, 70, 0)
        == (
            "Auction, advertiser of category 0. Bid for impressions over one day of 48 steps. Get "
            "as many conversions as you can "
            "within a large budget of 4350, at a strict cost limit of 70 for each."
        )
    )
    assert "a small budget of 2000, at a loose cost limit of 130 " in task_text(2000, 130, 1)
    assert "a medium budget of 2900, at a moderate cost limit of 100 " in task_text(2900, 100, 1)
    for period in (slice(8), slice(8, 16)):
        assert (
            sorted(tasks["shuffled"][period])
            == sorted(tasks["informative"][period])
            != tasks["shuffled"][period]
        )
    assert tasks["shuffled"][:8] != tasks["shuffled"][8:], (
        "or the text would still name the advertiser"
    )
    assert tasks["shuffled"] == [e.task for e in episodes(TRAJECTORY_LOG, text="shuffled")]


def same(a, b):
    for one, other in zip(a, b, strict=True):
        assert all(
            (getattr(one, f) == getattr(other, f)).all()
            for f in ("observations", "actions", "rewards", "loss_mask")
        )
        assert (one.group, one.task) == (other.group, other.task)


def same_logs(a, b):
    """Every field of two logs but their repairs; quotients and products within rounding."""
    for name, x in vars(a).items():
        if name in ("states", "remaining"):
            near(
                x, vars(b)[name], 1e-12, axis=tuple(range(x.ndim - 1)) if name == "states" else None
            )
        elif name != "repairs":
            np.testing.assert_array_equal(x, vars(b)[name], err_msg=name)


def shuffled(columns, seed=0):
    order = np.random.default_rng(seed).permutation(len(columns["budget"]))
    return {name: [column[i] for i in order] for name, column in columns.items()}


def test_the_order_of_columns_and_traffic_rows_does_not_matter(tmp_path):
    plain = episodes(put(tmp_path / "a.csv", traffic()))
    reordered = dict(reversed(traffic().items()))
    same(plain, episodes(put(tmp_path / "b.csv", reordered | {"extra": [0] * 144})))
    same(plain, episodes(put(tmp_path / "c.csv", traffic() | {"pvIndex": list(range(144))})))
    for one, other in zip(
        plain, episodes(put(tmp_path / "d.csv", shuffled(traffic()))), strict=True
    ):
        near(one.observations, other.observations, 1e-6, axis=0)
    columns = trajectories(tmp_path)
    same(
        episodes(put(tmp_path / "e.csv", columns)),
        episodes(put(tmp_path / "f.csv", dict(reversed(columns.items())))),
    )


def test_both_texts_of_a_state_are_read(tmp_path):
    columns = trajectories(tmp_path)
    wrapped = [
        str(tuple(f"np.float64({x})" for x in ast.literal_eval(s))).replace("'", "")
        for s in columns["state"]
    ]
    assert wrapped[0].startswith("(np.float64(1.0), np.float64(1.0), ")
    same(
        episodes(put(tmp_path / "a.csv", columns)),
        episodes(put(tmp_path / "b.csv", columns | {"state": wrapped})),
    )


def test_files_folders_and_patterns_of_several_periods(tmp_path):
    for period in (2, 3, 5):
        put(
            tmp_path / "logs" / f"period-{period}.csv{'.gz' if period == 3 else ''}",
            traffic(period),
        )
    put(tmp_path / "logs" / "readme.txt", {"a": []})
    folder = load(path=str(tmp_path / "logs"))
    assert [e.group for e in folder.episodes] == [2, 2, 3, 3, 5, 5] and folder.info[
        "name"
    ] == "auction@logs-periods-2-3,5"
    assert [e.group for e in episodes(tmp_path / "logs" / "*.csv")] == [2, 2, 5, 5]
    for periods, groups in (("2-3", [2, 2, 3, 3]), ("5,2", [2, 2, 5, 5]), (3, [3, 3])):
        assert [e.group for e in episodes(tmp_path / "logs", periods=periods)] == groups
    assert [f.name for f in files(path=str(tmp_path / "logs"))] == [
        "period-2.csv",
        "period-3.csv.gz",
        "period-5.csv",
    ]
    assert files(path="") == []
    put(tmp_path / "logs" / "again.csv", traffic(5))
    with pytest.raises(ValueError, match=r"period-5.csv: period 5 is in .*again.csv too"):
        load(path=str(tmp_path / "logs"))
    with pytest.raises(
        FileNotFoundError,
        match="nowhere: no log there; expected a file, a folder or a pattern of .csv",
    ):
        load(path=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("kind", [".csv", ".csv.gz", ".parquet"])
def test_a_log_is_written_as_trajectories_and_read_again(tmp_path, kind, capsys):
    source = put(tmp_path / "log.csv", traffic())
    target = tmp_path / "out" / f"trajectories{kind}"
    config = {
        "dataset": node("dataset", "auction", path=str(source)),
        "cache_dir": str(tmp_path / "home"),
        "model": {"return_horizon": 0},
        "window": 4,
        "seed": 0,
        "export": f"trajectories:{target}",
    }
    data(config)
    assert f"written: trajectories:{target}" in capsys.readouterr().out
    same_logs(auctionnet.read(source), auctionnet.read(target))
    if kind == ".csv":
        text = target.read_text(encoding="utf-8")
        assert "np." not in text and text.splitlines()[0] == ",".join(TRAJECTORIES)
        row = text.splitlines()[1]
        assert (
            row.startswith('3.0,0.0,0.0,100.0,10.0,48.0,2.0,0.0,"(1.0, 1.0, 0.0,')
            and ',1.0,0.1,0,"(0.979' in row
        )
    with pytest.raises(FileExistsError, match="is there already"):
        data(config)
    assert [p.name for p in target.parent.iterdir()] == [target.name]


def test_wrong_exports_are_refused(tmp_path):
    config = {
        "dataset": node("dataset", "synthetic", episodes=6),
        "cache_dir": str(tmp_path / "home"),
        "model": {"return_horizon": 0},
        "window": 4,
        "seed": 0,
        "export": f"trajectories:{tmp_path / 'x.csv'}",
    }
    with pytest.raises(
        ValueError, match="export=trajectories: expected an auction dataset, got synthetic"
    ):
        data(config)
    auction = node("dataset", "auction", path=str(TRAFFIC_LOG))
    with pytest.raises(
        ValueError, match=r"x.json: expected a path that ends with .csv, .csv.gz, .parquet"
    ):
        data(config | {"dataset": auction, "export": f"trajectories:{tmp_path / 'x.json'}"})
    with pytest.raises(
        ValueError, match="export=trajectories: expected dataset.relabel=0, .* got 2"
    ):
        data(config | {"dataset": auction | {"relabel": 2}})
    assert not (tmp_path / "x.csv").exists()


def test_blocks_do_not_change_a_log_or_its_row_numbers(tmp_path, monkeypatch):
    a = put(tmp_path / "a.csv", traffic())
    b = put(tmp_path / "b.csv", trajectories(tmp_path))
    auctionnet.write(tmp_path / "c.parquet", auctionnet.read(b))
    whole = [auctionnet.read(path) for path in (a, b, tmp_path / "c.parquet")]
    monkeypatch.setattr(auctionnet_columns, "BLOCK", 1000)
    for path, before in zip((a, b, tmp_path / "c.parquet"), whole, strict=True):
        same_logs(before, auctionnet.read(path))
    for name, value, message in (
        ("pValue", -1, "row 100, pValue: expected a number from 0, got -1"),
        ("pValue", "x", "row 100, pValue: not a readable log"),
    ):
        with pytest.raises(ValueError, match=message):
            auctionnet.read(put(a, changed(traffic(), name, 100, value)))
    for name, value, message in (
        ("state", "(1.0, 0.5)", "row 80, state: expected 16 numbers"),
        ("state", str((0.5,) * 15 + ("x",)), "row 80, state: expected 16 numbers"),
        (
            "timeStepIndex",
            0,
            "row 80, timeStepIndex: period 3, advertiser 1: expected step 31, got 0",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            auctionnet.read(put(b, changed(trajectories(tmp_path), name, 80, value)))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_log_is_not_held_as_a_whole(kind, tmp_path, monkeypatch):
    import pyarrow as pa
    from pyarrow import csv as arrow_csv
    from pyarrow import parquet

    # 286,000 rows, 41 MB; pyarrow reads up to 32 blocks ahead, as many as the machine lets it
    table = pa.concat_tables([arrow_csv.read_csv(TRAFFIC_LOG)] * 16)
    path, size = tmp_path / f"log.{kind}", table.nbytes
    arrow_csv.write_csv(table, path) if kind == "csv" else parquet.write_table(
        table, path, row_group_size=5000
    )
    del table
    monkeypatch.setattr(auctionnet_columns, "BLOCK", 1 << 18)
    before, held = pa.total_allocated_bytes(), []
    for _, columns in auctionnet_columns.read_blocks(path, TRAFFIC, missing=True):
        held.append(pa.total_allocated_bytes() - before)
        del columns
    assert len(held) > 20 and max(held) < size / 2


def test_an_opportunity_without_a_number_is_left_out_and_counted(tmp_path):
    columns = traffic()
    row = next(
        i for i in range(144) if columns["timeStepIndex"][i] == 1 and columns["pvIndex"][i] == 1
    )
    columns["bid"][row], columns["pValue"][row + 1] = "", "NaN"
    store = write_store(tmp_path / "store", load(path=str(put(tmp_path / "log.csv", columns))))
    assert store.info["repairs"] == {"rows without a number, left out": 2}
    assert not any("campaigns" in line for line in card(store)), "which would be a line for each"
    assert any(line == "  repairs      rows without a number, left out: 2" for line in card(store))
    assert store.observations[1, [12, 13]].tolist() == [np.float32(0.1), 1], (
        "without the opportunity of value 0.4"
    )
    assert store.observations[2, 15] == 2 and store.observations[3, 13] == 2


def test_costs_that_the_budget_does_not_show_are_counted(tmp_path):
    columns = traffic()
    columns["cost"][0] = 3.0
    log = auctionnet.read(put(tmp_path / "log.csv", columns))
    assert log.repairs == {"steps whose costs are not what the budget fell by": 1}
    assert (
        log.remaining[0, :2].tolist() == [100, 98]
        and log.states[0, 1, 1] == 0.98
        and log.spend[0] == 49
    )
    other = make_store(tmp_path / "other", [episode([1.0])])
    assert not any("repairs" in line for line in card(other))


def changed(columns, name, row, value):
    """The columns with another value in this row, counted from 1."""
    return columns | {name: [value if i == row - 1 else x for i, x in enumerate(columns[name])]}


def rows(columns, selected):
    return {name: [column[i] for i in selected] for name, column in columns.items()}


IN_TRAFFIC = [
    ("budget", 5, 0, r"row 5, budget: expected a number above 0, got 0"),
    ("CPAConstraint", 5, 0, r"row 5, CPAConstraint: expected a number above 0, got 0"),
    ("pValue", 5, -0.1, r"row 5, pValue: expected a number from 0, got -0.1"),
    ("bid", 5, "inf", r"row 5, bid: expected a number from 0, got inf"),
    ("bid", 5, "much", r"row 5, bid: not a readable log \(.*'much'\)"),
    ("timeStepIndex", 5, 48, r"row 5, timeStepIndex: expected a step from 0 to 47, got 48"),
    (
        "advertiserNumber",
        5,
        1.5,
        r"row 5, advertiserNumber: expected a whole number from 0 to 2\^53, got 1.5",
    ),
    (
        "deliveryPeriodIndex",
        5,
        1_700_000_000_000_000_001,
        r"row 5, deliveryPeriodIndex: expected a whole number from 0 to 2\^53, got 1.7e\+18",
    ),
    ("isExposed", 5, 2, r"row 5, isExposed: expected 0 or 1, got 2"),
    (
        "remainingBudget",
        5,
        77,
        r"remainingBudget: period 3, advertiser 0: expected one value in step 1, got 77 and 98",
    ),
    (
        "budget",
        5,
        99,
        r", budget: period 3, advertiser 0: expected one value in step 1, got 99 and 100",
    ),
    (
        "advertiserCategoryIndex",
        1,
        4,
        r"advertiserCategoryIndex: period 3, advertiser 0: .* got 4 and, in step 1, 0",
    ),
]
IN_TRAJECTORIES = [
    ("budget", 5, 0, r"row 5, budget: expected a number above 0, got 0"),
    ("budget", 5, "nan", r"row 5, budget: expected a number, got none"),
    ("CPAConstraint", 5, 0, r"row 5, CPAConstraint: expected a number above 0, got 0"),
    ("action", 5, -1, r"row 5, action: expected a number from 0, got -1"),
    ("reward", 5, "", r"row 5, reward: expected a number, got none"),
    ("reward", 5, "many", r"row 5, reward: not a readable log \(.*'many'\)"),
    ("done", 5, 0.5, r"row 5, done: expected 0 or 1, got 0.5"),
    (
        "timeStepIndex",
        5,
        7,
        r"row 5, timeStepIndex: period 3, advertiser 0: expected step 4, got 7",
    ),
    ("state", 5, "(1.0, 0.5)", r"row 5, state: expected 16 numbers from 0, got \(1.0, 0.5\)"),
    ("state", 5, "", r"row 5, state: expected 16 numbers from 0, got "),
    (
        "state",
        5,
        str((0.5,) * 15 + ("x",)),
        r"row 5, state: expected 16 numbers from 0, got \(0.5, .*'x'\)",
    ),
    (
        "state",
        5,
        str((0.5,) * 15) + ", nan",
        r"row 5, state: expected 16 numbers from 0, got \(0.5, .*nan",
    ),
    (
        "state",
        5,
        str((0.5,) * 15 + (-1,)),
        r"row 5, state: expected 16 numbers from 0, got \(0.5, .*-1\)",
    ),
    (
        "state",
        5,
        str((1.0,) * 16),
        r"period 3, advertiser 0: expected a remaining budget that never grows, got 96 before step 3 and 100",
    ),
    (
        "realAllCost",
        50,
        7,
        r"realAllCost: period 3, advertiser 1: expected one value for the day, got 4 and, in step 1, 7",
    ),
]


@pytest.mark.parametrize(("name", "row", "value", "message"), IN_TRAFFIC)
def test_a_wrong_number_of_a_traffic_log_is_named(tmp_path, name, row, value, message):
    with pytest.raises(ValueError, match=r"log.csv.*" + message):
        auctionnet.read(put(tmp_path / "log.csv", changed(traffic(), name, row, value)))


@pytest.mark.parametrize(("name", "row", "value", "message"), IN_TRAJECTORIES)
def test_a_wrong_number_of_a_trajectory_log_is_named(tmp_path, name, row, value, message):
    with pytest.raises(ValueError, match=r"log.csv.*" + message):
        auctionnet.read(
            put(tmp_path / "log.csv", changed(trajectories(tmp_path), name, row, value))
        )


def test_an_advertiser_without_a_budget_is_refused(tmp_path):
    columns = traffic()
    columns["budget"] = [
        "" if a == 1 else b
        for a, b in zip(columns["advertiserNumber"], columns["budget"], strict=True)
    ]
    message = (
        "row 2, budget: expected a number, got none; so it is in every row of period 3, "
        "advertiser 1"
    )
    with pytest.raises(ValueError, match=message):
        auctionnet.read(put(tmp_path / "log.csv", columns))
    with pytest.raises(ValueError, match="expected rows with all their numbers, got none"):
        auctionnet.read(put(tmp_path / "log.csv", traffic() | {"advertiserNumber": [""] * 144}))
    early = [
        "" if t == 5 else b
        for t, b in zip(traffic()["timeStepIndex"], traffic()["bid"], strict=True)
    ]
    with pytest.raises(
        ValueError,
        match=r"advertiser 0: expected step 5, got 6 \(rows without a number, left out: 4\)",
    ):
        auctionnet.read(put(tmp_path / "log.csv", traffic() | {"bid": early}))


def test_steps_that_are_missing_twice_or_out_of_order(tmp_path):
    columns = trajectories(tmp_path)
    order = list(range(96))
    for selected, message in (
        (
            [*order[:20], *order[21:]],
            "row 21, timeStepIndex: period 3, advertiser 0: expected step 20, got 21",
        ),
        (
            [*order[:20], 21, 20, *order[22:]],
            "row 21, timeStepIndex: period 3, advertiser 0: expected step 20, got 21",
        ),
        (
            [*order[:20], *order[19:]],
            "row 21, timeStepIndex: period 3, advertiser 0: expected step 20, got 19",
        ),
        (
            [*order, *order],
            "row 97, timeStepIndex: period 3, advertiser 0: expected step 48, got 0",
        ),
        (
            order[:80],
            "log.csv: period 3, advertiser 1 has 32 steps, expected 48; the log is cut short",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            auctionnet.read(put(tmp_path / "log.csv", rows(columns, selected)))
    table = traffic()
    for retained, message in (
        (
            lambda t: t != 20,
            "log.csv, timeStepIndex: period 3, advertiser 0: expected step 20, got 21",
        ),
        (
            lambda t: t < 30,
            "log.csv: period 3, advertiser 0 has 30 steps, expected 48; the log is cut short",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            auctionnet.read(
                put(
                    tmp_path / "log.csv",
                    rows(table, [i for i in range(144) if retained(table["timeStepIndex"][i])]),
                )
            )


@pytest.mark.parametrize(
    ("repeated", "message"),
    [
        (range(144), "step 0, got 2 rows with pvIndex 0 to 0"),
        ([2], "step 1, got 3 rows with pvIndex 0 to 1"),
    ],
    ids=["the whole file", "one row"],
)
def test_rows_that_repeat_are_refused(tmp_path, monkeypatch, repeated, message):
    monkeypatch.setattr(auctionnet_columns, "BLOCK", 2000)  # the second one is in another block
    path = put(tmp_path / "log.csv", rows(traffic(), [*range(144), *repeated]))
    who = "log.csv: period 3, advertiser 0"
    with pytest.raises(ValueError, match=f"{who}: expected one row for each pvIndex of {message};"):
        auctionnet.read(path)


def test_a_budget_that_grows_is_two_days_in_one(tmp_path):
    columns = traffic()
    for i in range(144):
        if columns["advertiserNumber"][i] == 0 and columns["timeStepIndex"][i] >= 10:
            columns["remainingBudget"][i] = 95.0
    with pytest.raises(
        ValueError,
        match=(
            "advertiser 0: expected a remaining budget that never grows, got 90 before step 9 "
            "and 95"
        ),
    ):
        auctionnet.read(put(tmp_path / "log.csv", columns))


@pytest.mark.parametrize(
    ("make", "name", "kind"),
    [(traffic, "leastWinningCost", "traffic"), (trajectories, "reward_continuous", "trajectory")],
)
def test_a_missing_or_renamed_column_is_named(tmp_path, make, name, kind):
    columns = make() if make is traffic else make(tmp_path)
    for table, besides in (
        ({k: v for k, v in columns.items() if k != name}, "nothing"),
        ({"price" if k == name else k: v for k, v in columns.items()}, "price"),
    ):
        message = (
            f"expected the columns of a {kind} log, {name} not among them; it has {besides} "
            "besides the known ones"
        )
        with pytest.raises(ValueError, match=message):
            auctionnet.read(put(tmp_path / "log.csv", table))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"", "x.csv: the file is empty; expected a header and rows"),
        ("x.csv.gz", gzip.compress(b"", mtime=0), "the file is empty"),
        ("x.csv.gz", b"not gzipped", r"x.csv.gz: not a readable log \(Not a gzipped file"),
        ("x.csv", bytes(range(256)), "x.csv: not a readable log"),
        (
            "x.csv",
            ",".join(TRAFFIC).encode() + b"\n",
            "x.csv: expected rows below the header, got none",
        ),
        (
            "x.csv",
            ",".join(TRAJECTORIES).encode() + b"\n",
            "x.csv: expected rows below the header, got none",
        ),
        (
            "x.csv",
            ",".join(TRAFFIC).encode() + b"\n1,2\n",
            r"x.csv, row 1: not a readable log \(Expected 18 columns, got 2",
        ),
        ("x.parquet", b"PAR1", "x.parquet: not a readable log"),
        (
            "x.csv.gz",
            TRAFFIC_LOG.read_bytes()[:200_000],
            r"x.csv.gz: not a readable log \(Truncated compressed stream\)",
        ),
        (
            "x.csv.gz",
            TRAJECTORY_LOG.read_bytes()[:50_000],
            r"x.csv.gz: not a readable log \(Truncated compressed stream\)",
        ),
    ],
    ids=[
        "empty",
        "empty archive",
        "no archive",
        "bytes",
        "traffic header",
        "trajectory header",
        "two of 18 columns",
        "no Parquet",
        "cut traffic",
        "cut trajectories",
    ],
)
def test_a_file_that_is_no_log_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        auctionnet.read(tmp_path / name)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1"])
def test_a_log_in_another_encoding_is_named_and_a_byte_order_mark_is_read(tmp_path, encoding):
    text = gzip.decompress(TRAJECTORY_LOG.read_bytes()).decode()
    file = tmp_path / "x.csv"
    if encoding == "utf-8-sig":
        file.write_text(text, encoding=encoding)
        same_logs(auctionnet.read(TRAJECTORY_LOG), auctionnet.read(file))
        return
    file.write_text(text.replace("next_state", "Zuständ,next_state", 1), encoding=encoding)
    with pytest.raises(ValueError, match=r"x.csv: not a readable log \('utf-8' codec") as refused:
        auctionnet.read(file)
    assert not isinstance(refused.value, UnicodeError)


def parquet_log(file, name, column):
    """Write the fixture's first day of a trajectory log as Parquet with this column."""
    from pyarrow import parquet

    log = auctionnet.read(TRAJECTORY_LOG).rows(np.array([0]))
    auctionnet.write(file, log)
    table = parquet.read_table(file)
    made = column(log) if callable(column) else column
    parquet.write_table(table.set_column(table.column_names.index(name), name, made), file)
    return log


def state_rows(log):
    return log.states[0].tolist()


LISTS = {
    "lists": lambda log: pa.array(state_rows(log)),
    "large lists": lambda log: pa.array(state_rows(log), pa.large_list(pa.float64())),
    "lists of 16": lambda log: pa.array(state_rows(log), pa.list_(pa.float64(), 16)),
    "lists of texts": lambda log: pa.array([[str(x) for x in row] for row in state_rows(log)]),
    "dictionary": lambda log: pa.array(
        [str(tuple(r)) for r in state_rows(log)]
    ).dictionary_encode(),
    "large texts": lambda log: pa.array(
        [str(tuple(r)) for r in state_rows(log)], pa.large_string()
    ),
}


@pytest.mark.parametrize("kind", LISTS)
def test_states_of_parquet_may_be_lists_of_numbers(tmp_path, kind):
    log = parquet_log(tmp_path / "x.parquet", "state", LISTS[kind])
    same_logs(log, auctionnet.read(tmp_path / "x.parquet"))


def with_second(state):
    """States whose second row is this one."""
    return pa.array([[0.5] * 16, state, *[[0.5] * 16] * 46])


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        (
            "state",
            with_second([0.5] * 15),
            r"row 2, state: expected 16 numbers from 0, got \[0.5, ",
        ),
        ("state", with_second(None), "row 2, state: expected 16 numbers from 0, got None"),
        ("state", with_second([]), r"row 2, state: expected 16 numbers from 0, got \[\]"),
        ("state", with_second([None] + [0.5] * 15), r"row 2, state: .*got \[nan, 0.5"),
        ("state", with_second([np.inf] + [0.5] * 15), r"row 2, state: .*got \[inf, 0.5"),
        ("state", with_second([-1.0] + [0.5] * 15), r"row 2, state: .*got \[-1.0, 0.5"),
        ("state", pa.array([[[0.5] * 16]] * 48), "lists of 16 numbers.*got list<element: list"),
        ("state", pa.array([{"a": 0.5}] * 48), "lists of 16 numbers.*got struct<a: double>"),
        (
            "state",
            pa.array([[0.5] * 16] * 48, pa.list_view(pa.float64())),
            "lists of 16 numbers.*got list_view<",
        ),
        ("state", pa.nulls(48), "row 1, state: expected 16 numbers from 0, got None"),
        (
            "budget",
            pa.array([0] * 48, pa.timestamp("s")),
            "budget: expected numbers, got timestamp",
        ),
        ("budget", pa.array([[1.0]] * 48), "budget: expected numbers, got list<element: double>"),
        ("budget", pa.array(["much"] * 48), "budget: expected numbers, got string .*'much'"),
        ("budget", pa.nulls(48), "row 1, budget: expected a number, got none"),
    ],
)
def test_a_column_of_parquet_that_is_not_numbers_is_refused(tmp_path, name, column, message):
    parquet_log(tmp_path / "x.parquet", name, column)
    with pytest.raises(ValueError, match=rf"x\.parquet, .*{message}") as refused:
        auctionnet.read(tmp_path / "x.parquet")
    assert not isinstance(refused.value, pa.ArrowException)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"text": "goal"},
            "dataset.text: expected one of none, constant, informative, paraphrased, shuffled, got "
            "'goal'",
        ),
        (
            {"context_features": "all"},
            "context_features: expected one of none, budget_and_cpa, progress, outcomes, got 'all'",
        ),
        (
            {"reward": "value"},
            "reward: expected one of conversions, expected_value, score, got 'value'",
        ),
        ({"observation": "all"}, "observation: expected one of auctionnet, minimal, got 'all'"),
        (
            {"periods": "a-b"},
            "dataset.periods: expected such as 0-6 or 7,8, or nothing for all, got 'a-b'",
        ),
        ({"periods": "8-7"}, "dataset.periods: expected ranges that go up, got '8-7'"),
        ({"periods": "7,9-10"}, r"dataset.periods: .* has no period 9-10, only 7-8"),
        (
            {"path": "", "behaviour": "kind"},
            "behaviour: expected one of reference, shuffled_bidders, constant_bidders, oracle, "
            "teacher, got 'kind'",
        ),
        (
            {"behaviour": "oracle", "relabel": 2},
            "dataset.relabel: expected 0 with behaviour=oracle, .* got 2",
        ),
        ({"relabel": -1}, "dataset.relabel: expected 0 or more, got -1"),
        ({"num_campaigns": 0}, "dataset.num_campaigns: expected 1 or more, got 0"),
        (
            {"num_campaigns": 9},
            "dataset.num_campaigns: expected 4000 unless dataset.behaviour is oracle or teacher, "
            "got 9",
        ),
    ],
)
def test_unknown_options_are_refused_with_the_known_ones(options, message):
    with pytest.raises(ValueError, match=message):
        load(**{"path": str(TRAJECTORY_LOG)} | options)


def full_traffic(period=3):
    """A traffic log of 48 advertisers: in step t, 1 + t % 2 opportunities with values of
    (advertiser + 1) / 1000, at prices of t + 1, t + 2.
    """
    rows = [
        (
            period,
            i,
            i // 8,
            100,
            10,
            t,
            100,
            pv,
            (i + 1) / 1000,
            i / 1e4,
            0,
            0,
            0,
            0,
            0,
            0,
            t + 1 + pv,
            0,
        )
        for i in reversed(range(48))
        for t in range(48)
        for pv in range(1 + t % 2)
    ]
    return dict(
        zip(TRAFFIC, (list(map(float, column)) for column in zip(*rows, strict=True)), strict=True)
    )


def export(tmp_path, path, **options):
    config = {
        "dataset": node("dataset", "auction", path=str(path), **options),
        "export": f"replay:{tmp_path / 'days'}",
    }
    assert (
        data(
            config
            | {
                "cache_dir": str(tmp_path / "home"),
                "model": {"return_horizon": 0},
                "window": 4,
                "seed": 0,
            }
        )
        is None
    )
    return {day.period: day for day in map(read_day, find_day_files(tmp_path / "days").values())}


def test_traffic_logs_become_replayable_days(tmp_path, capsys):
    for period in (3, 4):
        put(tmp_path / "logs" / f"{period}.csv", full_traffic(period))
    result = export(tmp_path, tmp_path / "logs", periods="3")
    assert (
        list(result) == [3]
        and "period_3.npz, 72 opportunities, prices: logs" in capsys.readouterr().out
    )
    day = result[3]
    assert (
        day.volume.tolist() == [1, 2] * 24
        and day.market_price[:6].tolist() == [1, 2, 3, 3, 4, 5]
        and day.total == 0
    )
    near(day.values, np.broadcast_to(np.arange(1, 49) / 1000, (72, 48)), 1e-12)
    near(day.sigmas[5], np.arange(48) / 1e4, 1e-6)
    near(day.mean_value, np.broadcast_to(np.arange(1, 49) / 1000, (48, 48)), 1e-12)
    with pytest.raises(ValueError, match="dataset.periods: .*logs has no period 7"):
        export(tmp_path, tmp_path / "logs", periods="7")
    # advertiser 47, step 3, the second opportunity
    lacking = changed(full_traffic(4), "pValue", 5, "")
    put(tmp_path / "logs" / "4.csv", lacking)
    assert (
        export(tmp_path, tmp_path / "logs" / "4.csv")[4].volume.tolist()
        == [1, 2, 1, 1] + [1, 2] * 22
    ), "left out"


def test_market_prices_of_the_published_traffic_become_replayable_days(tmp_path, monkeypatch):
    import pyarrow as pa
    from pyarrow import parquet

    monkeypatch.setitem(PUBLISHED, "opportunities", 2000)
    prices = [np.linspace(1, 9, len(values)) for values, _ in scaled_traffic(7, 2000)]

    def put_prices(prices, name="lwc_period_7.parquet", **columns):
        steps = np.repeat(np.arange(48), [len(p) for p in prices]).astype(np.int8)
        parquet.write_table(
            pa.table(
                {"timeStepIndex": steps, "leastWinningCost": np.concatenate(prices)} | columns
            ),
            tmp_path / name,
        )
        return tmp_path / name

    day = export(tmp_path, put_prices(prices))[7]
    assert (
        day.total == 2000
        and np.array_equal(day.market_price, np.concatenate(prices))
        and not len(day.values)
    )
    for message, columns in (
        (
            r"period_7.parquet: expected \d+ market prices in step 47 of period 7, got \d+",
            {"prices": [*prices[:-1], prices[-1][1:]]},
        ),
        (
            "leastWinningCost: expected a number above 0, got 0",
            {"prices": [prices[0] * 0, *prices[1:]]},
        ),
        (
            "period_7.parquet: timeStepIndex: expected steps in order",
            {"prices": prices, "timeStepIndex": np.arange(len(day.market_price)) % 48},
        ),
        (
            "expected a name that ends with the period's number",
            {"prices": prices, "name": "prices.parquet"},
        ),
    ):
        with pytest.raises(ValueError, match=message):
            export(tmp_path, put_prices(**columns))
    unknown = put(tmp_path / "log.csv", {"bid": [1.0], "xi": [1.0]})
    with pytest.raises(
        ValueError,
        match="expected the columns of a traffic log, .*leastWinningCost.* not among them",
    ):
        export(tmp_path, unknown)
    # the fixture has eight of the advertisers
    with pytest.raises(ValueError, match=f"{TRAJECTORY_LOG.name}: period 7: expected each of the"):
        export(tmp_path, TRAJECTORY_LOG)


def test_days_of_our_own_market_are_those_of_its_prices(tmp_path, monkeypatch):
    monkeypatch.setitem(PUBLISHED, "opportunities", 2000)
    result = export(tmp_path, "", periods="3,5", behaviour="constant_bidders", seed=2)
    market = Market(
        behaviour_roster("constant_bidders", 5, seed=2),
        traffic=lambda p: scaled_traffic(p, 2000),
        seed=2,
    ).play(5)
    assert list(result) == [3, 5] and np.array_equal(
        result[5].market_price, np.concatenate(market.market_prices)
    )
    with pytest.raises(ValueError, match="export=replay: expected dataset=auction, got"):
        data({"dataset": node("dataset", "synthetic"), "export": "replay:x"})


def test_the_oracles_campaigns_are_a_log_like_any_other(tmp_path, monkeypatch):
    monkeypatch.setitem(PUBLISHED, "opportunities", 2000)
    export(tmp_path, "", periods="3,5")
    options = {
        "path": str(tmp_path / "days"),
        "behaviour": "oracle",
        "num_campaigns": 30,
        "context_features": "progress",
        "seed": 4,
    }
    source = load(**options)
    assert (
        source.info["name"] == "auction@days-oracle-seed4-30-campaigns-periods-3,5"
        and source.spec.observation_dim == 21
    )
    made = list(source.episodes)
    assert {e.group for e in made} == {3, 5} and len(source.info["campaigns"]) == 30
    names = (*STATE, *CONTEXT)
    for e in made:
        state = dict(zip(names, e.observations.T, strict=True))
        assert (
            (np.diff(state["budget left"]) <= 1e-6).all()
            and state["budget left"][0] == 1
            and (e.actions <= 420.001).all()
        )
        near(state["conversions"], np.cumsum(np.append(0, e.rewards))[:-1], 1e-6, scale=10)
        spent = (1 - state["budget left"]) * np.exp(state["log budget"])
        near(state["spend / target cpa"] * state["target cpa"], spent, 1e-4, scale=1000)
    assert [f.name for f in files(**options)] == ["period_3.npz", "period_5.npz"]
    with pytest.raises(
        FileNotFoundError, match="expected period_7.npz in .*there are periods 3, 5"
    ):
        load(**options | {"periods": "7"})
    same(made, list(load(**options).episodes))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"behaviour": "oracle"}, "auction@x-oracle-periods-7"),
        ({"behaviour": "oracle", "seed": 1}, "auction@x-oracle-seed1-periods-7"),
        ({"num_campaigns": 9}, "auction@x-periods-7"),
        ({"seed": 1}, "auction@x-periods-7"),
        ({"seed": 1, "relabel": 2}, "auction@x-seed1-periods-7-relabelled-2"),
        (
            {"path": "", "behaviour": "reference", "seed": 1},
            "auction@market-reference-seed1-periods-7",
        ),
    ],
)
def test_a_name_says_what_was_drawn_unless_by_default(options, name):
    defaults = {"path": "x/log.csv", "behaviour": "", "seed": 0, "relabel": 0}
    assert log_name(**{**defaults, "num_campaigns": 4000, "periods": "7"} | options) == name


def test_a_teacher_is_fitted_once_for_all_wordings(tmp_path, monkeypatch):
    monkeypatch.setitem(PUBLISHED, "opportunities", 2000)
    export(tmp_path, "", periods="3")
    fit, fitted = teacher.fit_network, []

    def counted(curves, **options):
        fitted.append(options)
        return fit(
            curves,
            **options,
            rounds=1,
            campaigns=8,
            updates=1,
            gradient_updates=1,
            gradient_campaigns=4,
        )

    monkeypatch.setattr(teacher, "fit_network", counted)
    taught = node(
        "dataset", "auction", path=str(tmp_path / "days"), behaviour="teacher", num_campaigns=5
    )
    stores = [
        prepare_store(taught | {"text": text}, tmp_path / "home")
        for text in ("none", "informative", "paraphrased")
    ]
    assert fitted == [{"seed": 0}] and len({store.path for store in stores}) == 1
    bare, named, paraphrased = stores
    assert (
        bare.tasks == ("",)
        and len(named.tasks) == 5
        and named.tasks == paraphrased.tasks == (*paraphrased.info["wordings"],)
    )
    budget, target_cpa, category = (named.info["campaigns"][4][k] for k in (3, 4, 2))
    assert named.episode(4).task == task_text(budget, target_cpa, category)


def test_target_returns_come_from_similar_budgets_and_cpas():
    days = [
        [0, 0, 0, budget, limit, budget / 10 + limit]
        for budget in (100, 110, 1000, 1100)
        for limit in (10, 100)
    ]
    result = nearest_returns(
        days, np.array([105.0, 1050.0, 105.0]), np.array([10.0, 90.0, 200.0]), 1.0, nearest=2
    )
    assert result.tolist() == [21, 210, 111]
    assert nearest_returns(days, np.array([105.0]), np.array([10.0]), 0.0, nearest=2).tolist() == [
        20
    ]


def test_a_generated_log_survives_its_export(tmp_path, monkeypatch):
    small_market = partial(Market, traffic=partial(scaled_traffic, total=2000))
    monkeypatch.setattr(dataset, "Market", small_market)
    store = write_store(
        tmp_path / "store",
        load(periods="3", behaviour="shuffled_bidders", context_features="progress", seed=5),
    )
    period = small_market(behaviour_roster("shuffled_bidders", 3, seed=5), seed=5).play(3)
    assert (
        store.info["name"] == "auction@market-shuffled_bidders-seed5-periods-3"
        and len(store.lengths) == 48
    )
    for e in (0, 17, 47):
        n = store.lengths[e]
        assert n == (period.done[:, e].argmax() + 1)
        np.testing.assert_allclose(store.episode(e).rewards, period.conversions[:n, e])
        near(store.episode(e).actions[:, 0], period.multipliers[:n, e], 1e-6)
        near(store.episode(e).observations[:, :16], period.states[:n, e], 1e-6, axis=0)
    save(tmp_path / "log.parquet", store)
    again = episodes(tmp_path / "log.parquet", context_features="progress")
    for e, made in enumerate(again):
        near(made.observations, store.episode(e).observations, axis=0)


def test_bidders_are_shuffled_in_each_period():
    def names(name, period, seed=0):
        made = [None] * 48
        for positions, bidder in behaviour_roster(name, period, seed=seed):
            for i in positions:
                made[i] = bidder.name
        return made

    assert names("reference", 0) == names("reference", 1)
    assert (
        sorted(names("shuffled_bidders", 0))
        == sorted(names("shuffled_bidders", 1))
        == sorted(names("reference", 0))
    )
    assert names("shuffled_bidders", 0) != names("shuffled_bidders", 1) and names(
        "shuffled_bidders", 0
    ) == names("shuffled_bidders", 0) != names("shuffled_bidders", 0, seed=1)
    constant = names("constant_bidders", 0)
    assert constant.count("Constant") >= 24 and len(set(constant)) > 4


def test_observations_are_chosen_by_name(tmp_path):
    path = put(tmp_path / "log.csv", traffic())
    every, minimal = (
        episodes(path, observation=o, context_features="progress")[0].observations
        for o in ("auctionnet", "minimal")
    )
    columns = [*STATE, *CONTEXT]
    retained = [
        columns.index(name)
        for name in ("time left", "budget left", "value now", "volume now", "volume, all", *CONTEXT)
    ]
    np.testing.assert_array_equal(minimal, every[:, retained])
    context = episodes(path, observation="minimal", context_features="budget_and_cpa")[
        0
    ].observations
    np.testing.assert_array_equal(context, minimal[:, :7])
    np.testing.assert_allclose(context[0, 5:], [math.log(100), 10], rtol=1e-6)
    outcomes = episodes(path, observation="minimal", context_features="outcomes")[0].observations
    np.testing.assert_array_equal(outcomes, minimal[:, [0, 1, 2, 3, 4, 8, 9]])


def test_a_relabelled_day_has_another_budget(tmp_path):
    """Advertiser 0 spends 2 in each even step, of 100; as one with less, it ends where that is used
    up, in the middle of a step.
    """
    path = put(tmp_path / "log.csv", traffic())
    log = auctionnet.read(path)
    days = relabel_log(log, 60)
    assert len(days.period) == 2 + 2 * 60
    rows = [k for k in range(2, 122) if days.advertiser[k] == 0]
    assert np.ptp(days.budget[rows]) > 50 and np.ptp(days.target_cpa[rows]) > 3
    spent = lambda t: 2 * -(-t // 2)  # noqa: E731 before step t, if there is enough
    for k in rows:
        budget = days.budget[k]
        expected = np.maximum([budget - spent(t) for t in range(48)], 0)
        near(days.remaining[k], expected, 1e-9, scale=budget)
        near(days.states[k, :, STATE.index("budget left")], expected / budget, 1e-9, scale=1)
        assert days.spend[k] == min(48, budget)
        near(days.exposed_value[k, ::2], 0.1 * np.minimum(expected[::2] / 2, 1), 1e-9, scale=budget)
        assert days.done[k].tolist() == [left < 0.1 for left in expected[:-1]] + [True]
    np.testing.assert_array_equal(days.remaining[:2], log.remaining)


def test_relabelled_episodes_have_texts_and_rewards_of_their_budget(tmp_path):
    path = put(tmp_path / "log.csv", traffic())

    def made_with(seed):
        options = {
            "text": "informative",
            "observation": "minimal",
            "context_features": "budget_and_cpa",
            "reward": "score",
        }
        source = load(path=str(path), relabel=5, seed=seed, **options)
        return source.info, list(source.episodes)

    info, made = made_with(3)
    assert (
        len(made) == 12 and info["name"].endswith("-relabelled-5") and len(info["campaigns"]) == 12
    )
    for e, (_, _, category, budget, target_cpa, total) in zip(made, info["campaigns"], strict=True):
        assert e.task == task_text(budget, target_cpa, category)
        assert e.rewards.sum() == pytest.approx(total, rel=1e-3)
        np.testing.assert_allclose(e.observations[0, 5:], [math.log(budget), target_cpa], rtol=1e-6)
    *_, budget, target_cpa, _ = info["campaigns"][2]
    bought, spend = 0.1 * min(24, budget / 2), min(48, budget)
    assert made[2].rewards.sum() == pytest.approx(score(bought, spend, target_cpa), rel=1e-4)
    again, other = ([e.task for e in made_with(seed)[1]] for seed in (3, 4))
    assert again == [e.task for e in made] != other


def test_paraphrased_texts_keep_the_informative_ones_and_save_their_facts():
    source, entries = (
        load(path=str(TRAJECTORY_LOG), text=text) for text in ("paraphrased", "informative")
    )
    tasks = [e.task for e in source.episodes]
    assert tasks == [e.task for e in entries.episodes] and "wordings" not in entries.info
    _, _, category, budget, cpa, _ = source.info["campaigns"][0]
    assert (
        list(source.info["wordings"]) == list(dict.fromkeys(tasks))
        and f"budget of {budget:g}," in tasks[0]
    )
    size = "small" if budget < 2500 else "medium" if budget < 3500 else "large"
    limit = "strict" if cpa < 85 else "moderate" if cpa < 105 else "loose"
    facts = {
        "library": "bidding",
        "category": category,
        "budget": budget,
        "cpa": cpa,
        "steps": 48,
        "size": size,
        "limit": limit,
    }
    assert source.info["wordings"][tasks[0]] == facts
