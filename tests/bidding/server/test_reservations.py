"""What bids may still cost, checked by hand: reserved, won, lost, expired, and shared between
processes.
"""

import asyncio
import math
import sqlite3
from contextlib import closing

import pytest

from decisionllm.bidding.server.reservations import (
    Reservations,
    ReservationsBusyError,
    ReservationsError,
    new_id,
)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("decisionllm.bidding.server.reservations.time.time", lambda: now[0])
    return now


@pytest.fixture
def steps():
    """The index of the last tick of each campaign."""
    return {"c": 0, "other": 0}


class Turns:
    """Reservations of which each call has a turn of the event loop of its own."""

    def __init__(self, *where, steps):
        self.made = Reservations(*where, expiry=60, last_step=steps.__getitem__)

    def __getattr__(self, name):
        async def call(*arguments, **options):
            result = getattr(self.made, name)(*arguments, **options)
            await self.made.wait_written()
            return result

        return lambda *arguments, **options: asyncio.run(call(*arguments, **options))

    def close(self):
        self.made.close()


@pytest.fixture
def bids(clock, steps):
    return Turns(steps=steps)


def test_a_bid_reserves_its_price_until_its_result_is_known(bids):
    assert bids.committed_amount("c", 0) == 0
    lost, won, _, free = bids.reserve("c", 0, 15, [1.0, 2.0, 4.0, 8.0])
    assert bids.committed_amount("c", 0) == 15 and bids.committed_amount("other", 0) == 0
    assert bids.settle(lost, 0.0) and not bids.settle(lost, 0.0), "a result counts once"
    assert bids.settle(won, 0.5) and bids.settle(free, 100.0), "what is paid is at most the bid"
    assert bids.committed_amount("c", 0) == 4 + 0.5 + 8
    assert bids.count() == 1


def test_a_tick_has_the_wins_before_it(bids, steps):
    won, still_open = bids.reserve("c", 0, 10, [2.0, 4.0])
    bids.settle(won, 2.0)
    steps["c"] = 1
    assert bids.committed_amount("c", 1) == 4
    assert bids.reserve("c", 1, 6, [2.0]) and bids.committed_amount("c", 1) == 6


def test_a_win_that_is_noticed_after_a_tick_counts_until_the_next_one(bids, steps):
    (won,) = bids.reserve("c", 0, 10, [9.0])
    steps["c"] = 1
    bids.settle(won, 8.0)  # no bid since the tick
    assert bids.committed_amount("c", 1) == 8
    assert bids.reserve("c", 1, 10, [3.0]) is None
    assert bids.committed_amount("c", 2) == 0


def test_a_bid_without_a_notice_counts_as_won_until_the_next_tick(bids, clock, steps):
    (unknown,) = bids.reserve("c", 0, 10, [4.0])
    clock[0] += 60
    assert (
        bids.committed_amount("c", 0) == 4 and not bids.settle(unknown, 1.0) and bids.count() == 0
    )
    steps["c"] = 1
    assert bids.committed_amount("c", 1) == 0


def test_a_win_after_its_bid_expired_counts_once(bids, clock, steps):
    (unknown,) = bids.reserve("c", 0, 10, [4.0])
    clock[0] += 60
    assert bids.committed_amount("c", 0) == 4
    steps["c"] = 1
    assert bids.committed_amount("c", 1, reported=1.0) == 0
    for _ in range(2):
        bids.settle(unknown, 3.0)
        assert bids.committed_amount("c", 1, reported=1.0) == 2, "3 were won, 1 is reported"
        assert bids.committed_amount("c", 1, reported=3.0) == 0
    assert not bids.settle(unknown, 0.0) and bids.committed_amount("c", 1, reported=1.0) == 2


def test_wins_beyond_what_results_report_reserve_the_budget(bids, steps):
    ids = bids.reserve("c", 0, 20, [3.0] * 3)
    for id in ids:
        bids.settle(id, 3.0)
    steps["c"] = 1
    assert bids.committed_amount("c", 1, reported=4.0) == 5
    assert bids.reserve("c", 1, 16, [12.0], reported=4.0) is None, "9 of 20 are won, not 4"
    assert bids.reserve("c", 1, 16, [11.0], reported=4.0)
    assert bids.committed_amount("c", 1, reported=4.0) == 16
    steps["c"] = 2
    assert bids.committed_amount("c", 2, reported=9.0) == 11, "the result has all wins"


def test_a_bid_is_forgotten_an_hour_after_it_expired(bids, clock):
    lost, late = bids.reserve("c", 0, 100, [1.0, 2.0])
    assert bids.settle(lost, 0.0) and bids.settle(late, 0.0)
    for seconds, counts in ((3660, True), (0.002, False)):
        clock[0] += seconds
        (other,) = bids.reserve("c", 0, 100, [1.0])
        bids.settle(other, 0.0)
        assert bids.settle(late, 2.0) == counts
        late = lost
    assert bids.committed_amount("c", 0) == 2


def test_an_older_file_without_the_sum_of_wins_is_refused(tmp_path, steps):
    with closing(sqlite3.connect(tmp_path / "bids")) as file, file:
        file.execute("CREATE TABLE totals (campaign TEXT PRIMARY KEY, open, spent, step)")
    with pytest.raises(ValueError, match=r"bids: expected a file of ours, .*column: won\); remove"):
        Turns(tmp_path / "bids", steps=steps)


def test_expired_bids_are_booked_faster_than_bids_come(bids, clock):
    for _ in range(4):
        bids.reserve("c", 0, 1000, [1.0] * 20)
    clock[0] += 60
    for open_bids in (60, 40):
        bids.committed_amount("c", 0, bids=20)
        bids.reserve("c", 0, 1000, [1.0] * 20)
        assert bids.count() == open_bids
    assert bids.committed_amount("c", 0) == 120, "what has expired is spent until the next tick"


def test_no_two_bids_take_the_same_money(bids):
    assert bids.reserve("c", 0, 10, [6.0])
    assert bids.reserve("c", 0, 10, [3.0, 2.0]) is None, "4 are left"
    assert bids.committed_amount("c", 0) == 6
    assert bids.reserve("c", 0, 10, [4.0])


@pytest.mark.parametrize("paid", [9.0, 0.0], ids=["a win", "a loss"])
def test_a_bid_on_the_tick_before_takes_no_money_that_its_result_has_spent(bids, steps, paid):
    won, noticed_late = bids.reserve("c", 0, 100, [90.0, 9.0])
    bids.settle(won, 90.0)
    # another replica answers the tick with this win in its result, and 10 are left
    steps["c"] = 1
    bids.settle(noticed_late, paid)
    assert bids.reserve("c", 0, 100, [80.0]) is None
    assert bids.committed_amount("c", 1) == paid


def test_a_budget_above_the_largest_integer_is_bid_for(bids):
    assert bids.reserve("c", 0, 1e300, [6.0]) and bids.committed_amount("c", 0) == 6
    assert bids.reserve("c", 0, 1e300, [1e299]) is None


def test_another_process_and_a_restart_know_them(tmp_path, steps):
    first, second = (Turns(tmp_path / "bids", steps=steps) for _ in range(2))
    (id,) = first.reserve("c", 0, 10, [6.0])
    assert second.committed_amount("c", 0) == 6 and second.reserve("c", 0, 10, [6.0]) is None
    assert second.settle(id, 0.0) and first.committed_amount("c", 0) == 0
    assert first.settle(id, 2.0) and second.committed_amount("c", 0) == 2, "a win after a loss"
    assert not second.settle(id, 2.0) and not second.settle(id, 0.0)
    first.reserve("c", 0, 10, [5.0])
    for each in (first, second):
        each.close()
    assert Turns(tmp_path / "bids", steps=steps).committed_amount("c", 0) == 7


def test_a_file_that_is_none_of_ours_is_named_with_the_remedy(tmp_path, steps):
    (tmp_path / "bids").write_bytes(b"no database" * 100)
    with pytest.raises(ValueError, match="bids: expected a file of ours, .*remove the file"):
        Reservations(tmp_path / "bids", expiry=60, last_step=steps.__getitem__)


def statements(file):
    """The statements that a connection runs from here on."""
    seen = []
    file.set_trace_callback(seen.append)
    return seen


def test_bids_of_one_turn_know_each_other_and_share_a_commit(tmp_path, steps):
    first, second = (
        Reservations(tmp_path / "bids", expiry=60, last_step=steps.__getitem__) for _ in range(2)
    )
    seen = statements(first.file)

    async def bid(price):
        ids = first.reserve("c", 0, 10, [price])
        await first.wait_written()
        return ids, second.committed_amount("c", 0)

    async def play():
        return await asyncio.gather(*[bid(price) for price in (6.0, 5.0, 4.0)])

    (one, at_one), (two, _), (three, _) = asyncio.run(play())
    assert one and three and two is None, "6 + 4 are the budget of 10"
    assert at_one == 10, "another process knows them before an answer is sent"
    assert seen.count("COMMIT") == 1


def test_a_turn_that_cannot_be_written_reserves_nothing(tmp_path, steps):
    bids = Reservations(tmp_path / "bids", expiry=60, last_step=steps.__getitem__)

    async def bid(campaign, step):
        bids.reserve(campaign, step, 10, [6.0])
        await bids.wait_written()

    async def play():
        # a step that is none breaks the rule of the table
        return await asyncio.gather(bid("c", 0), bid("other", None), return_exceptions=True)

    errors = asyncio.run(play())
    assert [type(error) for error in errors] == [ReservationsError, ReservationsError]
    assert bids.committed_amount("c", 0) == 0 and not bids.file.in_transaction
    asyncio.run(bid("c", 0))
    assert bids.committed_amount("c", 0) == 6, "the next turn goes on"


def test_a_notice_whose_campaign_cannot_be_read_undoes_nothing_of_its_turn(bids, steps):
    (id,) = bids.reserve("other", 0, 10, [6.0])
    del steps["other"]

    async def bid():
        bids.made.reserve("c", 0, 10, [4.0])
        with pytest.raises(KeyError):
            bids.made.settle(id, 0.0)
        await bids.made.wait_written()

    asyncio.run(bid())
    assert bids.committed_amount("c", 0) == 4 and bids.committed_amount("other", 0) == 6


def test_all_are_told_if_a_turn_can_neither_be_written_nor_undone(tmp_path, steps):
    bids = Reservations(tmp_path / "bids", expiry=60, last_step=steps.__getitem__)

    def forbid(action, what, *_):
        denied = action == sqlite3.SQLITE_TRANSACTION and what != "BEGIN"
        return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK

    async def bid():
        bids.reserve("c", 0, 10, [1.0])
        await bids.wait_written()

    async def play():
        return await asyncio.gather(bid(), bid(), return_exceptions=True)

    bids.file.set_authorizer(forbid)
    for _ in range(2):
        errors = asyncio.run(play())
        assert [type(error) for error in errors] == [ReservationsError, ReservationsError]


def test_a_full_disk_is_logged_once_and_passes(tmp_path, steps, caplog):
    bids = Turns(tmp_path / "bids", steps=steps)
    file = bids.made.file
    ((pages,),) = file.execute("PRAGMA page_count")
    file.execute(f"PRAGMA max_page_count={pages}")
    for _ in range(2):
        with pytest.raises(ReservationsError, match="disk is full"):
            bids.reserve("c", 0, 1000, [1.0] * 100)
        assert bids.made.check() == "database or disk is full"
    assert sum("there are no bids" in line for line in caplog.messages) == 1
    file.execute(f"PRAGMA max_page_count={pages + 100}")
    bids.reserve("c", 0, 1000, [1.0] * 100)
    assert bids.made.check() == "" and bids.committed_amount("c", 0) == 100


def test_a_file_that_was_removed_takes_no_bids(tmp_path, steps):
    bids = Turns(tmp_path / "bids", steps=steps)
    (tmp_path / "bids").rename(tmp_path / "elsewhere")
    assert "removed or replaced" in bids.made.check()
    Turns(tmp_path / "bids", steps=steps).close()
    with pytest.raises(ReservationsError, match="removed or replaced"):
        bids.reserve("c", 0, 10, [1.0])


def test_after_one_wait_in_vain_nothing_waits_until_the_lock_is_free(tmp_path, steps):
    bids = Turns(tmp_path / "bids", steps=steps)
    seen = statements(bids.made.file)
    with closing(sqlite3.connect(tmp_path / "bids", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for _ in range(2):
            with pytest.raises(ReservationsBusyError):
                bids.reserve("c", 0, 10, [1.0])
            assert seen[-1] == "PRAGMA busy_timeout=0"
        assert not bids.settle("unknown", 0.0), "it needs no lock"
        other.execute("ROLLBACK")
    for _ in range(2):
        assert bids.reserve("c", 0, 10, [1.0])
    assert seen.count("PRAGMA busy_timeout=50") == 1 and bids.made.check() == ""


def test_bids_that_cannot_be_counted_fail_nothing(bids):
    bids.made.counting.close()
    assert math.isnan(bids.made.count())


def test_ids_lie_in_the_order_of_time_and_are_not_alike():
    first, same, later = new_id(1000.0), new_id(1000.0), new_id(1000.001)
    assert first != same and max(first, same) < later
