"""A file or a folder is replaced as a whole, or not at all; bytes that are not those that were
written are found.
"""

import json
import os
from pathlib import Path

import pytest

from decisionllm.files import (
    DIGESTS,
    append_line,
    atomic,
    atomic_folder,
    check_all,
    check_bytes,
    check_writable,
    read_lines,
    seal,
)


def test_a_file_appears_when_the_block_ends(tmp_path):
    path = tmp_path / "new" / "a.json"
    with atomic(path) as partial:
        assert partial.suffix == ".json"
        partial.write_text("1", encoding="utf-8")
        assert not path.exists()
    assert path.read_text(encoding="utf-8") == "1" and list(path.parent.iterdir()) == [path]


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "store"
    for name in ("first", "second"):
        with atomic(path) as partial:
            partial.mkdir()
            (partial / name).write_text(name, encoding="utf-8")
    assert [file.name for file in path.iterdir()] == ["second"] and list(tmp_path.iterdir()) == [
        path
    ]


@pytest.mark.parametrize("folder", [False, True])
def test_a_failure_keeps_the_old_content(tmp_path, folder):
    path = tmp_path / "x"
    path.mkdir() if folder else path.write_text("old", encoding="utf-8")
    with pytest.raises(ValueError, match="broken"), atomic(path) as partial:
        partial.mkdir() if folder else partial.write_text("half", encoding="utf-8")
        raise ValueError("broken")
    assert list(tmp_path.iterdir()) == [path] and (
        folder or path.read_text(encoding="utf-8") == "old"
    )


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    with atomic(tmp_path / "x") as first, atomic(tmp_path / "x") as second:
        first.write_text("first", encoding="utf-8")
        second.write_text("second", encoding="utf-8")
    assert (tmp_path / "x").read_text(encoding="utf-8") == "first"


@pytest.mark.parametrize("moment", ["before the old one is moved", "before the new one is"])
def test_two_writers_of_one_folder_do_not_meet(moment, tmp_path, monkeypatch):
    path, rename, others = tmp_path / "x", Path.rename, iter(range(1))

    def overtaken(source, target):
        if (source == path) == (moment == "before the old one is moved") and next(
            others, None
        ) is not None:
            with atomic(path) as partial:
                partial.mkdir()
                (partial / "theirs").touch()
        return rename(source, target)

    path.mkdir()
    monkeypatch.setattr(Path, "rename", overtaken)
    with atomic(path) as partial:
        partial.mkdir()
        (partial / "ours").touch()
    assert [file.name for file in path.iterdir()] == ["ours"] and list(tmp_path.iterdir()) == [path]


def flipped(file, start):
    """Flip every bit of 100 bytes of a file."""
    content = bytearray(file.read_bytes())
    content[start : start + 100] = bytes(byte ^ 255 for byte in content[start : start + 100])
    file.write_bytes(content)


def truncated(file, start):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flipped, truncated])
def test_a_damaged_file_of_a_sealed_folder_is_found(damage, tmp_path):
    with atomic_folder(tmp_path / "made") as partial:
        (partial / "below").mkdir()
        for name in ("a.bin", "below/b.bin"):
            (partial / name).write_bytes(bytes(600_000))  # longer than what is read at a time
    check_all(tmp_path / "made")
    damage(tmp_path / "made" / "below" / "b.bin", 599_000)
    check_bytes(tmp_path / "made", "a.bin")
    with pytest.raises(
        ValueError,
        match="its bytes are not those that were written: expected 600000 bytes, CRC-32 .*, got",
    ):
        check_bytes(tmp_path / "made", "below/b.bin")
    with pytest.raises(ValueError, match="below/b.bin is damaged or missing"):
        check_all(tmp_path / "made")


def test_a_digest_is_the_size_and_the_crc_32_of_a_file(tmp_path):
    """0xcbf43926 is the check value of CRC-32: that of these nine characters."""
    (tmp_path / "digits").write_text("123456789", encoding="utf-8")
    seal(tmp_path)
    assert json.loads((tmp_path / DIGESTS).read_text(encoding="utf-8")) == {
        "digits": "9 bytes, CRC-32 cbf43926"
    }


@pytest.mark.parametrize("place", [0, 1_048_576, 1_199_999])
def test_a_change_in_any_part_that_is_read_is_found(place, tmp_path):
    content = bytearray(1_200_000)
    (tmp_path / "a").write_bytes(content)
    seal(tmp_path)
    content[place] = 1
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match="its bytes are not those that were written"):
        check_bytes(tmp_path, "a")


def test_a_file_without_a_digest_is_not_checked(tmp_path):
    (tmp_path / "a").write_text("a", encoding="utf-8")
    check_bytes(tmp_path, "a")
    check_all(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"b": "1 bytes, CRC-32 71beeff9"}'])
def test_damaged_digests_are_one_clear_error(content, tmp_path):
    (tmp_path / "a").write_text("a", encoding="utf-8")
    (tmp_path / DIGESTS).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="checksums.json"):
        check_bytes(tmp_path, "a")


@pytest.mark.parametrize(
    ("last", "numbers"),
    [("", [1]), ('{"a"', [1]), ('{"a": {"b": 2}', [1]), ('{"a": 2}', [1, 2])],
    ids=["none", "cut short", "cut short behind a brace", "without its newline"],
)
def test_a_last_line_that_was_cut_short_spoils_no_other(last, numbers, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"a": 1}\n' + last, encoding="utf-8")
    assert [line["a"] for line in read_lines(log)] == numbers
    append_line(log, {"a": 3})
    assert [line["a"] for line in read_lines(log)] == [*numbers, 3]


def test_the_first_line_makes_the_file(tmp_path):
    append_line(tmp_path / "log.jsonl", {"a": 1})
    assert (tmp_path / "log.jsonl").read_text(encoding="utf-8") == '{"a": 1}\n'


def test_a_damaged_line_is_named(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"a": 1}\n{"a"{"a": 2}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="log.jsonl: line 2 is damaged .*delete the line"):
        read_lines(log)
    for wrong, why in (
        (b"\xff\xfe\n", "can't decode byte"),
        (b"[1]\n", "expected {KEY: VALUE}, got"),
    ):
        log.write_bytes(b'{"a": 1}\n' + wrong)
        with pytest.raises(ValueError, match=f"log.jsonl: line 2 is damaged .*{why}"):
            read_lines(log)


def test_a_folder_of_results_is_tried_and_nothing_is_left(tmp_path):
    (tmp_path / "results.jsonl").write_text("{}\n", encoding="utf-8")
    for folder in (tmp_path, tmp_path / "new" / "below"):
        check_writable(folder, "results.jsonl", "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]
    assert (tmp_path / "results.jsonl").read_text(encoding="utf-8") == "{}\n"


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "out" / "results.jsonl").mkdir(parents=True)
    places = ("file", "file/below", "link", "link/below", "out", "out/" + "x" * 300)
    for place in places:
        with pytest.raises(OSError, match="could not be written .*choose another out=..."):
            check_writable(tmp_path / place, "results.jsonl")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link", "out"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_closed_folder_and_a_closed_file_cannot_be_written(tmp_path):
    (tmp_path / "results.jsonl").touch(0o444)
    with pytest.raises(OSError, match="results.jsonl"):
        check_writable(tmp_path, "results.jsonl")
    (tmp_path / "closed").mkdir(mode=0o555)
    for folder in (tmp_path / "closed", tmp_path / "closed" / "below"):
        with pytest.raises(OSError, match="Permission denied"):
            check_writable(folder)
