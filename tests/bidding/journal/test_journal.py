"""The journal's file: a stop leaves one file, a copy of a live one is whole, and it is read where
nothing can be written.
"""

import sqlite3
import threading
import time
from contextlib import closing

import pytest

from decisionllm.bidding.backup import copy_journal
from decisionllm.bidding.journal import journal as journals
from decisionllm.bidding.journal.journal import DamagedRowError, Journal
from decisionllm.bidding.journal.rows import end_campaign, insert_campaign, insert_tick
from decisionllm.bidding.journal.sqlite_files import open_sidecar
from tests.conftest import PATIENCE, command

SETTINGS = {"budget": 900.0, "target_cpa": 60.0, "horizon": 2}


def written(path, ticks=30):
    journal = Journal(path)
    journal.write([insert_campaign("c", None, SETTINGS)])
    for step in range(ticks):
        journal.write([insert_tick("c", step, "{}", '{"a": 1}')])
    return journal


def alone(path, to):
    """A copy of the file without what SQLite keeps beside it."""
    to.write_bytes(path.read_bytes())
    return Journal(to).count_ticks("c")


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
    journal.write([insert_tick("c", 30, "{}", "{}")])  # it goes on
    assert command("backup", f"journal={tmp_path}/j", f"to={tmp_path}/b/copy") == 1
    assert "expected a new file" in capsys.readouterr().err
    assert (
        command("backup", f"journal={tmp_path}/none", f"to={tmp_path}/c") == 1
        and not (tmp_path / "none").exists()
    )


def test_the_decisions_of_a_shadow_policy_are_backed_up_with_the_journal(tmp_path, capsys):
    journal = written(tmp_path / "j")
    # as a server has it open: its row lies in the log
    with closing(sqlite3.connect(journal.sidecar_path("shadow"))) as shadow:
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


CHANGES = {
    "digit": "CAST(replace(CAST({column} AS TEXT), '9', '8') AS TEXT)",
    "byte": "CAST(replace(CAST({column} AS BLOB), '9', x'ff') AS TEXT)",
    "end": "substr({column}, 1, 5)",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_damaged_row_is_named_and_left_out(tmp_path, change, caplog):
    journal = Journal(tmp_path / "j")
    answer = '{"index": 0, "spend": 9.5}'
    for id in ("a", "b", "c", "d"):
        journal.write([insert_campaign(id, f"key-{id}", SETTINGS | {"name": id})])
        journal.write([insert_tick(id, step, '{"x": 9}', answer) for step in range(3)])
    with sqlite3.connect(tmp_path / "j") as file:
        for table, column, row in (
            ("campaigns", "facts", "id = 'a'"),
            ("ticks", "answer", "campaign = 'b' AND step = 2"),
            ("ticks", "request", "campaign = 'c' AND step = 1"),
        ):
            changed = CHANGES[change].format(column=column)
            file.execute(f"UPDATE {table} SET {column} = {changed} WHERE {row}")
    file.close()
    rows, _ = journal.list_latest(5)
    assert [campaign["id"] for campaign, _ in rows] == ["d", "c"]
    assert [campaign["id"] for campaign in journal.campaigns()] == ["b", "c", "d"]
    rows, _ = journal.list_latest(5, search="d")
    assert [campaign["id"] for campaign, _ in rows] == ["d"]
    for read, row in (
        (lambda: journal.campaign("a"), "campaign a"),
        (lambda: journal.find_by_key("key-a"), "campaign a"),
        (lambda: journal.campaign_and_answer("b"), "tick 2 of campaign b"),
        (lambda: journal.tick("c", 1), "tick 1 of campaign c"),
        (lambda: journal.ticks("c"), "tick 1 of campaign c"),
    ):
        with pytest.raises(DamagedRowError, match=f"^{row} is damaged"):
            read()
    assert [tick["index"] for tick in journal.ticks("c", damaged="skip")] == [0, 2]
    assert journal.tick("c", 2) == ('{"x": 9}', answer) and len(journal.ticks("d")) == 3
    named = {"campaign a", "tick 2 of campaign b", "tick 1 of campaign c"}
    assert journal.damaged == named and len(caplog.records) == 3, "each is logged once"
    assert journal.open_models() == [("", 3, 2)]
    assert journal.open_ids(9, "") == ["d", "c", "b"]


def test_a_journal_that_was_removed_or_replaced_takes_no_write(tmp_path):
    journal = written(tmp_path / "j", 3)
    (tmp_path / "j").rename(tmp_path / "moved")
    for _ in range(2):
        for work in (journal.check_file, journal.check_room):
            with pytest.raises(sqlite3.DatabaseError, match="was removed or replaced"):
                work()
        with pytest.raises(sqlite3.DatabaseError, match="was removed or replaced"):
            journal.write([insert_tick("c", 3, "{}", "{}")])
        written(tmp_path / "j", 1)
    journal.close()
    assert Journal(tmp_path / "j").count_ticks("c") == 1


def test_a_search_delays_no_other_read(tmp_path):
    """Its thread waits within SQLite, as long as the others need."""
    journal = written(tmp_path / "j", 3)
    read, result = threading.Event(), []
    connections = [x for x in vars(journal).values() if isinstance(x, sqlite3.Connection)]
    search = threading.Thread(target=lambda: result.append(journal.list_latest(5, search="none")))
    others = threading.Thread(
        target=lambda: (journal.campaign_and_answer("c"), journal.count_ticks("c"), read.set())
    )

    def wait_if_searching():
        if threading.current_thread() is search:
            read.wait(PATIENCE)

    for connection in connections:
        connection.set_progress_handler(wait_if_searching, 1)
    search.start()
    while not search.is_alive():
        time.sleep(0.001)
    time.sleep(0.1)
    others.start()
    others.join(5)
    late = not read.is_set()
    read.set()
    search.join()
    others.join()
    assert not late and result == [([], None)]


def test_a_search_looks_at_so_many_campaigns_and_says_where_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "MAX_SEARCHED", 10)
    journal = Journal(tmp_path / "j")
    for i in range(25):
        named = SETTINGS | {"name": "shoes" if i in (3, 14) else f"hats {i}"}
        journal.write([insert_campaign(f"id-{i}", f"key-{i}", named)])

    def ids(*arguments, **more):
        rows, older = journal.list_latest(*arguments, **more)
        return [campaign["id"] for campaign, _ in rows], older

    assert ids(5, search="shoes") == ([], "id-15")
    assert ids(5, search="shoes", before="id-15") == (["id-14"], "id-5")
    assert ids(5, search="shoes", before="id-5") == (["id-3"], None)
    assert ids(2, search="hats") == (["id-24", "id-23"], "id-23")
    assert ids(5, search="id-0") == (["id-0"], "id-15"), "a whole id or key is found at once"
    assert ids(5, search="key-0") == (["id-0"], "id-15")
    assert ids(30)[1] is None and ids(2, before="id-1") == (["id-0"], None)


def test_open_campaigns_are_counted_as_they_are_written(tmp_path):
    journal = Journal(tmp_path / "j")
    for id, key in (("a", "k"), ("b", "k"), ("c", None), ("d", None)):
        journal.write([insert_campaign(id, key, SETTINGS)])
    journal.write([end_campaign("a", "closed"), end_campaign("a", "over")])
    with pytest.raises(sqlite3.OperationalError):
        journal.write([end_campaign("c", "closed"), ("no statement", ())])
    assert Journal(tmp_path / "j").count_open() == 2


def test_a_journal_is_read_where_nothing_can_be_written(tmp_path):
    written(tmp_path / "j").close()
    # folders in their places, as good as a file system without write access, also for root
    for beside in ("j-wal", "j-shm"):
        (tmp_path / beside).mkdir()
    with pytest.raises(ValueError, match="expected a file to write"):
        Journal(tmp_path / "j")
    journal = Journal(tmp_path / "j", read_only=True)
    assert journal.count_ticks("c") == 30
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        journal.write([insert_tick("c", 30, "{}", "{}")])


def test_a_journal_with_damaged_pages_or_without_room_is_found_out(tmp_path):
    written(tmp_path / "j", 300).close()
    content = bytearray((tmp_path / "j").read_bytes())
    content[3 * 4096 : -4096] = b"\xff" * (len(content) - 4 * 4096)
    (tmp_path / "damaged").write_bytes(content)
    with pytest.raises(sqlite3.DatabaseError):
        Journal(tmp_path / "damaged").check_pages()
    journal = Journal(tmp_path / "j")
    journal.check_pages()
    journal.check_room()
    journal._writer.execute("VACUUM")
    pages = journal._writer.execute("PRAGMA page_count").fetchone()[0]
    journal._writer.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        journal.check_room()
    assert journal.count_ticks("c") == 300


def test_two_processes_look_for_room_at_the_same_time(tmp_path):
    journal, other = written(tmp_path / "j", 1), Journal(tmp_path / "j")
    checked = []

    def check_too(statement):
        if statement.startswith("DROP") and not checked:
            checked.append("begun")
            other.check_room()
            checked.append("done")

    journal._writer.set_trace_callback(check_too)
    journal.check_room()
    assert checked == ["begun", "done"]


def test_all_names_of_a_journal_have_the_same_files_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "linked").symlink_to("folder")
    (tmp_path / "link").symlink_to("linked/j")  # dangles until the first server makes the file
    names = ("link", "linked/j", "linked/../folder/j", tmp_path / "folder" / "j")
    for read_only in (False, True):
        for name in names:
            with closing(Journal(name, read_only=read_only)) as journal:
                assert journal.sidecar_path("bids") == str(tmp_path / "folder" / "j.bids")
    assert Journal().sidecar_path("bids") == ":memory:"


def test_a_server_whose_link_is_led_to_another_journal_writes_no_more(tmp_path):
    written(tmp_path / "other", 1).close()
    written(tmp_path / "j", 1).close()
    (tmp_path / "link").symlink_to("j")
    journal = Journal(tmp_path / "link")
    (tmp_path / "new").symlink_to("other")
    (tmp_path / "new").replace(tmp_path / "link")
    with pytest.raises(sqlite3.DatabaseError, match="removed or replaced"):
        journal.write([insert_tick("c", 1, "{}", "{}")])
    journal.close()


def test_a_journal_with_a_hard_link_is_refused_unless_it_is_a_copy_to_read(tmp_path, capsys):
    journal = written(tmp_path / "j")
    copy_journal(journal, tmp_path / "copy")
    for name in ("j", "copy"):
        (tmp_path / f"{name}2").hardlink_to(tmp_path / name)
    named = r"expected a file with one name, got 2 hard links of .*/j2; copy it"
    for read_only in (False, True):  # a server's last rows lie beside the other name
        with pytest.raises(ValueError, match=named):
            Journal(tmp_path / "j2", read_only=read_only)
    assert not (tmp_path / "j2-wal").exists()
    with closing(Journal(tmp_path / "copy2", read_only=True)) as copy:
        assert copy.count_ticks("c") == 30
    with pytest.raises(ValueError, match="hard links of"):
        Journal(tmp_path / "copy2")
    journal.write([insert_tick("c", 30, "{}", "{}")])  # the server goes on
    journal.close()
    assert command("journal", "restore", f"journal={tmp_path}/j2", f"from={tmp_path}/copy") == 1
    assert "hard links of" in capsys.readouterr().err


def open_bids(path):
    return open_sidecar(path, "CREATE TABLE IF NOT EXISTS bids (id TEXT)", wait=0.0)


@pytest.mark.parametrize("opens", [Journal, open_bids])
def test_a_new_file_that_another_process_begins_to_write_is_waited_for(
    tmp_path, monkeypatch, opens
):
    with closing(sqlite3.connect(tmp_path / "new", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr("time.sleep", lambda seconds: other.execute("COMMIT"))
        opens(tmp_path / "new").close()
        assert not other.in_transaction


def test_the_last_answer_is_kept_until_something_is_written_by_whatever_process(tmp_path):
    journal = written(tmp_path / "j", 2)
    other = Journal(tmp_path / "j")
    read = []
    journal._reader.set_trace_callback(read.append)
    for _ in range(3):
        campaign, answer = journal.campaign_and_answer("c")
        assert campaign["ended"] is None and answer == {"a": 1}
    assert sum("FROM ticks" in statement for statement in read) == 1, "the row is read once"
    other.write([insert_tick("c", 2, "{}", '{"a": 2}')])
    assert journal.campaign_and_answer("c")[1] == {"a": 2}
    journal.write([insert_tick("c", 3, "{}", '{"a": 3}')])
    assert journal.campaign_and_answer("c")[1] == {"a": 3}
    other.write([end_campaign("c", "finished")])
    assert journal.campaign_and_answer("c")[0]["ended"] == "finished"
    assert journal.campaign_and_answer("unknown") is None
    other.write([insert_campaign("unknown", None, SETTINGS)])
    assert journal.campaign_and_answer("unknown")[1] is None, "opened, without a tick"
    assert (journal.count_ticks("c") - 1, journal.count_ticks("unknown") - 1) == (3, -1)
    memory = Journal()  # the connection that reads is the one that writes
    memory.write([insert_campaign("c", None, SETTINGS)])
    assert memory.campaign_and_answer("c")[1] is None
    memory.write([insert_tick("c", 0, "{}", '{"a": 1}')])
    assert memory.campaign_and_answer("c")[1] == {"a": 1}


def test_no_more_answers_are_kept_than_there_is_room_for(tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "MAX_REMEMBERED", 2)
    journal = written(tmp_path / "j", 1)
    for id in ("d", "e", "f"):
        journal.write([insert_campaign(id, None, SETTINGS)])
    for id, retained in (("c", ["c"]), ("d", ["c", "d"]), ("e", ["d", "e"]), ("f", ["e", "f"])):
        assert journal.campaign_and_answer(id)[0]["id"] == id
        assert list(journal._remembered) == retained
