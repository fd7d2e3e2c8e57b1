"""`decisionllm journal`: it reports on a journal, checks it, shortens it and restores it."""

import asyncio
import json
import sqlite3
import time
from contextlib import closing

import pytest

from decisionllm.bidding.journal import checks as journal_checks
from decisionllm.bidding.journal.checks import SIDECAR_TABLES, check_rows
from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.journal.rows import end_campaign, insert_campaign, insert_tick
from decisionllm.bidding.journal.sqlite_files import open_sidecar
from decisionllm.bidding.server import reservations, shading, shadow
from decisionllm.bidding.server.reservations import Reservations
from decisionllm.bidding.server.shading import BidShading
from tests.conftest import command

try:
    import resource
except ImportError:  # Windows
    resource = None

SETTINGS = {"name": None, "budget": 900.0, "target_cpa": 60.0, "category": 0, "horizon": 3}
ANSWER = {"index": 2, "spend": 90.0, "conversions": 2.0, "model": "a@1"}


def written(path, ids="abc", ticks=3):
    journal = Journal(path)
    for id in ids:
        journal.write([insert_campaign(id, f"key-{id}", SETTINGS, "a@1")])
        for step in range(ticks):
            journal.write([insert_tick(id, step, '{"x": 9}', json.dumps(ANSWER), "a@1")])
    return journal


def changed(path, statement, *values):
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(statement, values)


def test_a_sound_journal_is_verified_beside_a_server(tmp_path, capsys):
    journal = written(tmp_path / "j")
    assert command("journal", "verify", f"journal={tmp_path}/j") == 0
    assert "3 campaigns, 9 ticks: as they were written" in capsys.readouterr().out
    changed(tmp_path / "j", "UPDATE ticks SET sum = NULL WHERE step = 0")
    assert command("journal", "action=verify", f"journal={tmp_path}/j") == 1
    assert "3 faults in 3 campaigns, 9 ticks" in capsys.readouterr().err
    journal.close()


FAULTS = {
    "UPDATE ticks SET answer = answer || ' ' WHERE campaign = 'b' AND step = 1": (
        "tick 1 of campaign b is damaged"
    ),
    "UPDATE campaigns SET facts = '{}' WHERE id = 'c'": "campaign c is damaged",
    "UPDATE campaigns SET model = 'b@1' WHERE id = 'b'": "campaign b is damaged",
    "DELETE FROM ticks WHERE campaign = 'b' AND step < 2": "ticks 0 to 1 of campaign b are missing",
    "DELETE FROM ticks WHERE campaign = 'c' AND step = 1": "ticks 1 to 1 of campaign c are missing",
    "DELETE FROM campaigns WHERE id = 'a'": "campaign a, which has ticks, is missing",
    "UPDATE counts SET open = 4": "4 open campaigns were counted, 3 are there",
}


@pytest.mark.parametrize("statement", FAULTS, ids=range(len(FAULTS)))
def test_a_damaged_or_missing_row_is_a_fault(tmp_path, statement, capsys):
    written(tmp_path / "j").close()
    changed(tmp_path / "j", statement)
    assert command("journal", "verify", f"journal={tmp_path}/j") == 1
    messages = capsys.readouterr().err
    assert "faults in" in messages and FAULTS[statement] in messages


def test_old_campaigns_are_pruned_with_what_lies_beside(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(journal_checks, "PRUNE_BATCH", 1)
    old = time.time() - 31 * 86_400
    with monkeypatch.context() as then:
        then.setattr("time.time", lambda: old)
        journal = written(tmp_path / "j", "abd")
    written(tmp_path / "j", "c").close()
    tables = {"shadow": ["decisions"], "bids": ["totals"], "shading": ["counts"]}
    for beside, names in tables.items():
        with closing(sqlite3.connect(f"{tmp_path}/j.{beside}")) as file, file:
            for name in names:
                file.execute(f"CREATE TABLE {name} (campaign TEXT)")
                file.executemany(f"INSERT INTO {name} VALUES (?)", [("a",), ("d",)])
    journal.write([end_campaign(id, "over") for id in "abc"])
    assert command("journal", "prune", f"journal={tmp_path}/j", "days=30") == 0
    assert "2 campaigns" in capsys.readouterr().out
    assert [campaign["id"] for campaign in journal.campaigns()] == ["d", "c"], "d is open"
    assert (
        journal.count_ticks("a") == 0
        and journal.count_ticks("d") == 3
        and journal.count_open() == 1
    )
    for beside, names in tables.items():
        with closing(sqlite3.connect(f"{tmp_path}/j.{beside}")) as file:
            for name in names:
                assert file.execute(f"SELECT * FROM {name}").fetchall() == [("d",)]
    assert command("journal", "prune", f"journal={tmp_path}/j", "days=0") == 1
    assert "days: expected a number above 0" in capsys.readouterr().err
    journal.close()
    assert command("journal", "prune", f"journal={tmp_path}/no/j") == 1
    assert "expected a journal of a server, got" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_nothing_is_pruned_that_a_damaged_file_beside_would_keep(tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as then:
        then.setattr("time.time", lambda: 0.0)
        journal = written(tmp_path / "j", "a")
    journal.write([end_campaign("a", "over")])
    (tmp_path / "j.shading").write_bytes(b"no database" * 100)
    assert command("journal", "prune", f"journal={tmp_path}/j") == 1
    assert "j.shading cannot be written (file is not a database)" in capsys.readouterr().err
    assert journal.count_ticks("a") == 3
    journal.close()


@pytest.mark.parametrize(
    ("name", "schema"),
    [("shadow", shadow.TABLE), ("bids", reservations.SCHEMA), ("shading", shading.SCHEMA)],
)
def test_a_prune_finds_the_rows_beside_without_reading_all(name, schema):
    with closing(open_sidecar(":memory:", schema, wait=0.0)) as file:
        for table in SIDECAR_TABLES[name]:
            delete = f"EXPLAIN QUERY PLAN DELETE FROM {table} WHERE campaign = 'a'"
            ((*_, plan),) = file.execute(delete)
            assert plan.startswith("SEARCH"), table


def test_a_backup_is_restored_and_the_journal_kept(tmp_path, capsys):
    journal = written(tmp_path / "j")
    assert command("backup", f"journal={tmp_path}/j", f"to={tmp_path}/copy") == 0
    journal.write([insert_tick("a", 3, "{}", "{}", "a@1")])
    restore = "journal", "restore", f"journal={tmp_path}/j", f"from={tmp_path}/copy"
    assert command(*restore) == 1
    assert "is in use" in capsys.readouterr().err
    assert journal.write([insert_tick("a", 4, "{}", "{}", "a@1")]) == [True], "the server goes on"
    journal.close()
    for name in ("j.snapshot", "j.snapshot-wal"):
        (tmp_path / name).write_text("ahead of the copy", encoding="utf-8")
    assert command(*restore) == 0
    assert "j.replaced" in capsys.readouterr().out
    assert not (tmp_path / "j.snapshot").exists()
    assert not (tmp_path / "j.snapshot-wal").exists()
    with closing(Journal(tmp_path / "j")) as again:
        assert again.count_ticks("a") == 3 and check_rows(again).faults == []
    assert Journal(tmp_path / "j.replaced").count_ticks("a") == 5
    assert command(*restore) == 1
    assert "from an earlier restore" in capsys.readouterr().err


def test_what_shading_learned_is_backed_up_and_restored(tmp_path, capsys):
    written(tmp_path / "j").close()
    learning = BidShading(tmp_path / "j.shading", expiry=60.0)
    learning.record_sent("a", ["1", "2"], [0.01, 0.02])
    learning.settle("1", won=True, least=None)
    assert command("backup", f"journal={tmp_path}/j", f"to={tmp_path}/copy") == 0
    assert "what bid shading learned" in capsys.readouterr().out
    learning.settle("2", won=True, least=None)
    learning.close()
    assert command("journal", "restore", f"journal={tmp_path}/j", f"from={tmp_path}/copy") == 0
    assert "j.replaced.shading" in capsys.readouterr().out
    for path, auctions in (("copy", 1), ("j", 1), ("j.replaced", 2)):
        with closing(sqlite3.connect(f"{tmp_path}/{path}.shading")) as file:
            assert file.execute("SELECT SUM(won) FROM counts").fetchone() == (auctions,), path
    (tmp_path / "copy").unlink()
    assert command("backup", f"journal={tmp_path}/j", f"to={tmp_path}/copy") == 1
    assert "copy.sh" in capsys.readouterr().err, "an earlier copy is not overwritten"


def test_wins_count_until_the_next_tick_of_a_restored_journal(tmp_path):
    journal = written(tmp_path / "j", "a")
    assert command("backup", f"journal={tmp_path}/j", f"to={tmp_path}/copy") == 0
    journal.write([insert_tick("a", 3, "{}", "{}", "a@1")])
    journal.close()

    async def bid():
        bids = Reservations(tmp_path / "j.bids", expiry=60, last_step=lambda id: 3)
        won, _ = bids.reserve("a", 3, 10, [2.0, 4.0])
        await bids.wait_written()
        bids.settle(won, 2.0)
        bids.close()

    asyncio.run(bid())
    assert command("journal", "restore", f"journal={tmp_path}/j", f"from={tmp_path}/copy") == 0
    bids = Reservations(tmp_path / "j.bids", expiry=60, last_step=lambda id: 2)
    assert [bids.committed_amount("a", step) for step in (2, 3)] == [6, 4]
    bids.close()


def test_a_journal_is_restored_where_its_link_leads_to(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data/j")
    written(tmp_path / "link").close()
    assert command("backup", f"journal={tmp_path}/link", f"to={tmp_path}/copy") == 0
    (tmp_path / "data" / "j.snapshot").write_text("ahead of the copy", encoding="utf-8")
    assert command("journal", "restore", f"journal={tmp_path}/link", f"from={tmp_path}/copy") == 0
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "j",
        "j.replaced",
        "j.replaced.snapshot",
    ]
    with closing(Journal(tmp_path / "link")) as again:
        assert again.count_ticks("a") == 3


def test_a_damaged_journal_is_replaced(tmp_path, capsys):
    written(tmp_path / "j").close()
    assert command("backup", f"journal={tmp_path}/j", f"to={tmp_path}/copy") == 0
    restore = "journal", "restore", f"journal={tmp_path}/j", f"from={tmp_path}/copy"
    (tmp_path / "j").write_bytes(b"no database" * 1000)
    assert command(*restore) == 0
    assert Journal(tmp_path / "j", read_only=True).count_ticks("a") == 3
    assert command("journal", "restore", f"journal={tmp_path}/new") == 1
    assert "from: expected a file" in capsys.readouterr().err
    (tmp_path / "j.replaced").unlink()
    restore = "journal", "restore", f"journal={tmp_path}/j", f"from={tmp_path}/none"
    assert command(*restore) == 1 and (tmp_path / "j").exists()


def test_a_journal_with_a_damaged_row_is_backed_up_and_restored_with_a_warning(tmp_path, caplog):
    written(tmp_path / "j").close()
    changed(tmp_path / "j", "UPDATE ticks SET answer = 'x' WHERE campaign = 'b' AND step = 2")
    assert command("backup", f"journal={tmp_path}/j", f"to={tmp_path}/copy") == 0
    messages = "copy has 1 faults, as its journal had: tick 2 of campaign b is damaged"
    assert messages in caplog.text
    caplog.clear()
    assert command("journal", "restore", f"journal={tmp_path}/j", f"from={tmp_path}/copy") == 0
    assert messages in caplog.text
    with closing(Journal(tmp_path / "j")) as journal:
        assert journal.tick("a", 2) == ('{"x": 9}', json.dumps(ANSWER))


@pytest.mark.parametrize(
    "words",
    [
        ["journal", "verify"],
        ["journal", "report"],
        ["journal", "prune"],
        ["backup", "to={0}/copy"],
        ["data", "dataset=journal", "dataset.path={0}/j"],
    ],
    ids=["verify", "report", "prune", "backup", "data"],
)
def test_a_command_says_what_to_do_with_a_damaged_file(tmp_path, words, capsys):
    written(tmp_path / "j", ticks=200).close()
    with open(tmp_path / "j", "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (tmp_path.joinpath("j").stat().st_size - 4096))
    journal = [] if words[0] == "data" else [f"journal={tmp_path}/j"]
    assert command(*[word.format(tmp_path) for word in words], *journal) == 1
    assert "put a backup in its place" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()


def test_a_damaged_file_of_bids_is_refused_before_the_journal_is_replaced(tmp_path, capsys):
    written(tmp_path / "copy", "a").close()
    written(tmp_path / "j", "b").close()
    (tmp_path / "j.bids").write_bytes(b"no database" * 100)
    assert command("journal", "restore", f"journal={tmp_path}/j", f"from={tmp_path}/copy") == 1
    assert "bids: expected a file of ours" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "j", "j.bids"]
    with closing(Journal(tmp_path / "j")) as journal:
        assert journal.count_ticks("b") == 3


@pytest.mark.skipif(resource is None, reason="no limit on the size of a file")
def test_without_room_for_the_copy_the_journal_stays(tmp_path, capsys):
    written(tmp_path / "j", "a").close()
    written(tmp_path / "copy", "abc", ticks=200).close()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        assert command("journal", "restore", f"journal={tmp_path}/j", f"from={tmp_path}/copy") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "; make room; the journal is as it was" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "j"]
    with closing(Journal(tmp_path / "j", read_only=True)) as journal:
        assert journal.count_ticks("a") == 3


def test_a_report_is_printed_as_text_or_json(tmp_path, capsys):
    journal = written(tmp_path / "j")
    journal.write([end_campaign("a", "over")])
    journal.close()
    assert command("journal", "report", f"journal={tmp_path}/j") == 0
    assert "left out: 2 open campaigns" in capsys.readouterr().out
    assert command("journal", "report", f"journal={tmp_path}/j", "json=true") == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["cpa"] == 45.0


def test_an_action_that_does_not_exist_is_named(tmp_path, capsys):
    assert command("journal", "action=burn", f"journal={tmp_path}/j") == 1
    messages = capsys.readouterr().err
    assert "journal: expected one of report, verify, prune, restore, got 'burn'" in messages
