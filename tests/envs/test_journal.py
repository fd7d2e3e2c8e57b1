"""The journal's file: a stop leaves one file, a copy of a live one is whole, and it is read where
nothing can be written.
"""

import sqlite3
from contextlib import closing

import pytest

from decisionllm.domains.auction.journal import Journal, opened, ticked
from tests.conftest import command

SETTINGS = {"budget": 900.0, "target_cpa": 60.0, "horizon": 2}


def written(path, ticks=30):
    journal = Journal(path)
    journal.write([opened("c", None, SETTINGS)])
    for step in range(ticks):
        journal.write([ticked("c", step, "{}", '{"a": 1}')])
    return journal


def alone(path, to):
    """A copy of the file without what SQLite keeps beside it."""
    to.write_bytes(path.read_bytes())
    return Journal(to).steps("c")


def test_a_closed_journal_is_one_file(tmp_path):
    journal = written(tmp_path / "j")
    assert (tmp_path / "j-wal").exists()
    journal.close()
    assert [p.name for p in tmp_path.iterdir()] == ["j"] and alone(
        tmp_path / "j", tmp_path / "copy"
    ) == 30


def test_a_live_journal_is_backed_up_whole(tmp_path, capsys):
    journal = written(tmp_path / "j")
    assert command("backup", f"journal={tmp_path}/j", f"to={tmp_path}/b/copy") == 0
    assert "1 campaigns" in capsys.readouterr().out
    assert alone(tmp_path / "b" / "copy", tmp_path / "again") == 30
    journal.write([ticked("c", 30, "{}", "{}")])  # it goes on
    assert command("backup", f"journal={tmp_path}/j", f"to={tmp_path}/b/copy") == 1
    assert "expected a new file" in capsys.readouterr().err
    assert (
        command("backup", f"journal={tmp_path}/none", f"to={tmp_path}/c") == 1
        and not (tmp_path / "none").exists()
    )


def test_the_decisions_of_a_shadow_policy_are_backed_up_with_the_journal(tmp_path, capsys):
    journal = written(tmp_path / "j")
    # as a server has it open: its row lies in the log
    with closing(sqlite3.connect(journal.shadow_path)) as shadow:
        shadow.execute("PRAGMA journal_mode=WAL")
        shadow.execute("CREATE TABLE decisions (campaign TEXT, step INTEGER)")
        shadow.execute("INSERT INTO decisions VALUES ('c', 29)")
        shadow.commit()
        assert command("backup", f"journal={tmp_path}/j", f"to={tmp_path}/b/copy") == 0
    assert "shadow" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["copy", "copy.shadow"]
    with closing(sqlite3.connect(tmp_path / "b" / "copy.shadow")) as copy:
        assert copy.execute("SELECT * FROM decisions").fetchall() == [("c", 29)]
    (tmp_path / "b" / "copy").unlink()
    assert command("backup", f"journal={tmp_path}/j", f"to={tmp_path}/b/copy") == 1
    assert (
        "copy.shadow, which exists" in capsys.readouterr().err
        and not (tmp_path / "b" / "copy").exists()
    )


def test_a_journal_is_read_where_nothing_can_be_written(tmp_path):
    written(tmp_path / "j").close()
    # folders in their places, as good as a file system without write access, also for root
    for beside in ("j-wal", "j-shm"):
        (tmp_path / beside).mkdir()
    with pytest.raises(ValueError, match="expected a file to write"):
        Journal(tmp_path / "j")
    journal = Journal(tmp_path / "j", read_only=True)
    assert journal.steps("c") == 30
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        journal.write([ticked("c", 30, "{}", "{}")])


def test_a_journal_with_damaged_pages_or_without_room_is_found_out(tmp_path):
    written(tmp_path / "j", 300).close()
    content = bytearray((tmp_path / "j").read_bytes())
    content[3 * 4096 : -4096] = b"\xff" * (len(content) - 4 * 4096)
    (tmp_path / "damaged").write_bytes(content)
    with pytest.raises(sqlite3.DatabaseError):
        Journal(tmp_path / "damaged").verify()
    journal = Journal(tmp_path / "j")
    journal.verify()
    journal.check_room()
    journal._writer.execute("VACUUM")
    pages = journal._writer.execute("PRAGMA page_count").fetchone()[0]
    journal._writer.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        journal.check_room()
    assert journal.steps("c") == 300
