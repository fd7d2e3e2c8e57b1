"""A start from a snapshot has the same campaigns as one that replays every tick."""

import sqlite3
from contextlib import closing

import numpy as np
import pytest

from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.server.app import create_app
from decisionllm.bidding.server.snapshot import Snapshot
from tests.bidding.server.in_process import CampaignManager
from tests.bidding.server.test_campaigns import SPEC, STEPS, drawn, policy_of, settings
from tests.bidding.server.test_http import MODEL_INFO, begun, serving

pytestmark = pytest.mark.numeric


def played(journal, steps):
    """A manager whose campaigns have so many ticks: (manager, ids)."""
    manager = CampaignManager(policy_of(), SPEC, journal)
    ids = [manager.open(**settings(i)) for i in range(len(steps))]
    for i, id in enumerate(ids):
        for t in range(steps[i]):
            manager.tick(id, **drawn(i, t))
    return manager, ids


def snapshot_of(manager, path):
    return Snapshot(Journal(path), lambda: [*manager.campaigns.values()], 60.0)


def started(path, monkeypatch):
    """A manager that starts from the snapshot, and the first tick that each replay read."""
    read, ticks = [], Journal.ticks

    def watched(journal, id, first=0, **more):
        read.append(first)
        return ticks(journal, id, first, **more)

    monkeypatch.setattr(Journal, "ticks", watched)
    manager = CampaignManager(policy_of(), SPEC, Journal(path))
    manager.load_open(snapshot_of(manager, path).begin)
    monkeypatch.setattr(Journal, "ticks", ticks)
    return manager, read


def equal(a, b):
    np.testing.assert_array_equal(a.state(), b.state())
    for name in ("step", "earned", "last_spend", "task", "settings", "ended", "model"):
        assert vars(a)[name] == vars(b)[name], name


def test_a_start_goes_on_from_the_snapshot_with_the_same_bits(tmp_path, monkeypatch):
    manager, ids = played(Journal(tmp_path / "j"), (1, 4, 7, STEPS))
    snapshot_of(manager, tmp_path / "j").write([*manager.campaigns.values()])
    manager.tick(ids[1], **drawn(1, 4))  # after the snapshot
    again, read = started(tmp_path / "j", monkeypatch)
    assert read == [1, 4, 7, STEPS]
    plain = CampaignManager(policy_of(), SPEC, Journal(tmp_path / "j"))
    plain.load_open()
    for id in ids:
        equal(again.campaigns[id], plain.campaigns[id])
    for i, step in ((0, 1), (1, 5), (2, 7)):
        request = drawn(i, step)
        assert again.tick(ids[i], **request) == plain.tick(ids[i], **request)
    assert len({*map(str, manager.campaigns[ids[2]].state())}) > 50, "the numbers differ"


BROKEN = {
    "a flipped byte": (
        "UPDATE campaigns SET state = CAST(substr(state, 1, length(state) - 2) || x'7777' AS BLOB)"
    ),
    "another specification": "UPDATE campaigns SET spec = '{}'",
    "a later step": "UPDATE campaigns SET step = step + 1",
    "no table": "DROP TABLE campaigns",
}


@pytest.mark.parametrize("statement", BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_in_the_file_is_replayed(tmp_path, monkeypatch, statement):
    manager, ids = played(Journal(tmp_path / "j"), (3,))
    snapshot_of(manager, tmp_path / "j").write([*manager.campaigns.values()])
    with closing(sqlite3.connect(tmp_path / "j.snapshot")) as file, file:
        file.execute(statement)
    again, read = started(tmp_path / "j", monkeypatch)
    assert read == [0]
    equal(again.campaigns[ids[0]], manager.campaigns[ids[0]])


def test_many_campaigns_are_read_together_and_are_as_when_replayed(tmp_path, monkeypatch):
    monkeypatch.setattr("decisionllm.bidding.journal.journal.READ_BATCH", 3)
    manager, ids = played(Journal(tmp_path / "j"), (0, 1, 2, 3, 4, 5, 6, 7))
    snapshot_of(manager, tmp_path / "j").write([*manager.campaigns.values()])
    manager.tick(ids[2], **drawn(2, 2))  # after the snapshot
    manager.close(ids[3])
    changes = {
        "j": [f"UPDATE campaigns SET facts = '{{}}' WHERE id = '{ids[4]}'"],
        "j.snapshot": [f"UPDATE campaigns SET tick = tick + 1 WHERE id = '{ids[5]}'"],
    }
    for name, statements in changes.items():
        with closing(sqlite3.connect(tmp_path / name)) as file, file:
            for statement in statements:
                file.execute(statement)
    again = CampaignManager(policy_of(), SPEC, Journal(tmp_path / "j"))
    snapshot = snapshot_of(again, tmp_path / "j")
    statements = []
    snapshot.file.set_trace_callback(statements.append)
    again.load_open(snapshot.begin)
    plain = CampaignManager(policy_of(), SPEC, Journal(tmp_path / "j"))
    plain.load_open()
    assert list(again.campaigns) == list(plain.campaigns) == [ids[i] for i in (0, 1, 2, 5, 6, 7)]
    for id in again.campaigns:
        equal(again.campaigns[id], plain.campaigns[id])
    assert len(statements) == 2, "six campaigns, three at a time"
    assert snapshot.written == {ids[i]: i for i in (1, 2, 6, 7)}
    snapshot.clean()
    with closing(sqlite3.connect(tmp_path / "j.snapshot")) as file:
        rows = file.execute("SELECT id FROM campaigns").fetchall()
    assert {id for (id,) in rows} == {ids[i] for i in (1, 2, 4, 5, 6, 7)}, "3 has ended"


def test_a_file_that_is_no_database_is_made_anew(tmp_path, monkeypatch):
    manager, ids = played(Journal(tmp_path / "j"), (3,))
    (tmp_path / "j.snapshot").write_bytes(b"x" * 5000)
    again, read = started(tmp_path / "j", monkeypatch)
    assert read == [0] and again.campaigns[ids[0]].step == 3
    snapshot_of(again, tmp_path / "j").write([*again.campaigns.values()])
    assert started(tmp_path / "j", monkeypatch)[1] == [3]


def test_a_journal_that_is_older_than_the_snapshot_counts(tmp_path, monkeypatch):
    manager, ids = played(Journal(tmp_path / "j"), (4,))
    snapshot_of(manager, tmp_path / "j").write([*manager.campaigns.values()])
    with closing(sqlite3.connect(tmp_path / "j")) as file, file:  # as an older copy has it
        file.execute("DELETE FROM ticks WHERE step = 3")
    again, read = started(tmp_path / "j", monkeypatch)
    assert read == [0] and again.campaigns[ids[0]].step == 3


def test_only_what_went_on_is_written_and_what_ended_forgotten(tmp_path):
    manager, ids = played(Journal(tmp_path / "j"), (2, 2, 2, 1))
    snapshot, rows = snapshot_of(manager, tmp_path / "j"), []
    write = snapshot._write_rows
    snapshot._write_rows = lambda some: (rows.append([one.id for one in some]), write(some))
    snapshot.write([*manager.campaigns.values()])
    manager.tick(ids[1], **drawn(1, 2))
    manager.close(ids[0])
    manager.campaigns.pop(ids[2])  # evicted: it is open yet
    snapshot.write([*manager.campaigns.values()])
    assert rows == [ids, [ids[1]]]
    with closing(sqlite3.connect(tmp_path / "j.snapshot")) as file:
        entries = file.execute("SELECT id, step FROM campaigns ORDER BY step").fetchall()
    assert entries == [(ids[3], 1), (ids[2], 2), (ids[1], 3)]
    manager.close(ids[1])
    snapshot_of(manager, tmp_path / "j").clean()
    with closing(sqlite3.connect(tmp_path / "j.snapshot")) as file:
        entries = file.execute("SELECT id FROM campaigns ORDER BY step").fetchall()
    assert entries == [(ids[3],), (ids[2],)]


def test_a_server_writes_snapshots_and_starts_from_them(tmp_path, monkeypatch):
    def app():
        return create_app(policy_of(), MODEL_INFO, SPEC, Journal(tmp_path / "j"), snapshot_s=0.05)

    with serving(app()) as client:
        id = begun(client)
        client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 0)).raise_for_status()
        with closing(sqlite3.connect(tmp_path / "j.snapshot")) as file:
            while not file.execute("SELECT * FROM campaigns").fetchall():
                pass
        client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 1)).raise_for_status()
    monkeypatch.setattr(Journal, "ticks", lambda *_: [])  # no tick is needed
    with serving(app()) as client:
        assert client.app.state.service.manager.campaigns[id].step == 2
        tick = client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 2))
        assert tick.status_code == 200 and tick.json()["index"] == 2
    assert not (tmp_path / "j.snapshot-wal").exists()


def test_a_horizon_of_other_length_is_no_state():
    manager, ids = played(Journal(), (5,))
    campaign = manager.campaigns[ids[0]]
    numbers = campaign.state()
    fresh = type(campaign).begin(campaign.settings | {"horizon": 4}, SPEC)
    for wrong in (numbers, numbers[:-1]):
        with pytest.raises(ValueError, match="expected .* numbers, got"):
            fresh.restore_state(wrong)
