"""Rows of a journal: its tables, the checksums of its rows, and the entries that are written to it.

A journal has one row per campaign and one per tick. An entry is an SQL statement and its values.
"""

import json
import time
import zlib
from functools import lru_cache
from typing import Any

from decisionllm.schema import Json

Columns = tuple[Any, ...]  # a row as SQLite reads it
Entry = tuple[str, tuple[object, ...]]  # an SQL statement and its values

APPLICATION_ID = 0x444C4C4D  # SQLite's application_id: DLLM
VERSION = 3  # SQLite's user_version: the only one that is read
SCHEMA = (
    # facts: the settings in JSON; sum: see `checksum`; model: that answers the campaign;
    # model_sum: the checksum of the model, which changes
    "CREATE TABLE campaigns (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT UNIQUE,"
    " opened REAL NOT NULL, facts TEXT NOT NULL, ended TEXT, model TEXT, sum INTEGER,"
    " model_sum INTEGER)",
    # at: seconds since 1970
    "CREATE TABLE ticks (campaign TEXT NOT NULL REFERENCES campaigns (id), step INTEGER NOT NULL,"
    " request TEXT NOT NULL, answer TEXT NOT NULL, sum INTEGER, at REAL NOT NULL DEFAULT 0,"
    " PRIMARY KEY (campaign, step)) WITHOUT ROWID",
    # Counted as it is written: /metrics and the page ask for it all the time.
    "CREATE TABLE counts (open INTEGER NOT NULL)",
    "INSERT INTO counts VALUES (0)",
    "CREATE TRIGGER campaign_opened AFTER INSERT ON campaigns"
    " BEGIN UPDATE counts SET open = open + 1; END",
    "CREATE TRIGGER campaign_ended AFTER UPDATE OF ended ON campaigns"
    " WHEN OLD.ended IS NULL AND NEW.ended IS NOT NULL"
    " BEGIN UPDATE counts SET open = open - 1; END",
    "CREATE INDEX open_campaigns ON campaigns (number) WHERE ended IS NULL",
)
# columns of a row of each table, as they are read
CAMPAIGN = "id, key, opened, facts, sum, ended, model, model_sum"
TICK = "campaign, step, request, answer, at, sum"


def insert_campaign(id: str, key: str | None, settings: Json, model: str = "") -> Entry:
    """The entry of a new campaign. Of several with the same key only the first is written."""
    values = id, key, time.time(), json.dumps(settings)
    columns = "id, key, opened, facts, sum, model, model_sum"
    return (
        f"INSERT OR IGNORE INTO campaigns ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (*values, checksum(*values), model, checksum(model)),
    )


def insert_tick(id: str, step: int, request: str, answer: str, model: str = "") -> Entry:
    """The entry of a tick of a campaign that has not ended and is this model's.

    Request and answer are JSON and read back unchanged.
    """
    still_open = "EXISTS (SELECT 1 FROM campaigns WHERE id = ? AND ended IS NULL AND model = ?)"
    values = id, step, request, answer, time.time()
    return (
        f"INSERT OR IGNORE INTO ticks ({TICK}) SELECT ?, ?, ?, ?, ?, ? WHERE {still_open}",
        (*values, checksum(*values), id, model),
    )


def end_campaign(id: str, how: str) -> Entry:
    """The entry of the end of a campaign."""
    return "UPDATE campaigns SET ended = ? WHERE id = ? AND ended IS NULL", (how, id)


def end_by_tick(tick: Entry) -> Entry:
    """The entry of the end of a campaign by its last tick, an entry of `insert_tick` before it.

    A tick that is not written, as another one of its step was, or another model's, ends nothing.
    """
    _, (id, step, _, _, _, sum, *_) = tick
    written = "EXISTS (SELECT 1 FROM ticks WHERE campaign = ? AND step = ? AND sum = ?)"
    return (
        f"UPDATE campaigns SET ended = 'over' WHERE id = ? AND ended IS NULL AND {written}",
        (id, id, step, sum),
    )


def move_campaigns(model: str, old_model: str) -> Entry:
    """The entry after which a model answers all campaigns of another one that have not ended."""
    which = "ended IS NULL AND model = ?"
    return (
        f"UPDATE campaigns SET model = ?, model_sum = ? WHERE {which}",
        (model, checksum(model), old_model),
    )


def move_campaign(id: str, model: str, old_model: str) -> Entry:
    """The entry after which a model answers a campaign of another one, if it has not ended."""
    which = "id = ? AND ended IS NULL AND model = ?"
    return (
        f"UPDATE campaigns SET model = ?, model_sum = ? WHERE {which}",
        (model, checksum(model), id, old_model),
    )


def is_sound(row: Columns) -> bool:
    """Return whether a row that begins with CAMPAIGN is as it was written."""
    _, _, _, _, sum, _, model, model_sum, *_ = row
    return bool(sum == checksum(*row[:4]) and model_sum == model_checksum(model))


def checksum(*values: str | float | None) -> int:
    """The checksum of the values of a row that never change."""
    return zlib.crc32(repr(values).encode())


@lru_cache(64)
def model_checksum(model: str) -> int:
    """Return the checksum of the name of a model, cached since many campaigns share it."""
    return checksum(model)
