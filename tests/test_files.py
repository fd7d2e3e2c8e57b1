"""A file or a folder is replaced as a whole, or not at all; bytes that are not those that were
written are found.
"""

import json
import zlib
from pathlib import Path

import pytest

from decisionllm.files import DIGESTS, atomic, check_all, check_bytes, seal, sealed


def test_a_file_appears_when_the_block_ends(tmp_path):
    path = tmp_path / "new" / "a.json"
    with atomic(path) as partial:
        assert partial.suffix == ".json"
        partial.write_text("1")
        assert not path.exists()
    assert path.read_text() == "1" and list(path.parent.iterdir()) == [path]


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "store"
    for name in ("first", "second"):
        with atomic(path) as partial:
            partial.mkdir()
            (partial / name).write_text(name)
    assert [file.name for file in path.iterdir()] == ["second"] and list(tmp_path.iterdir()) == [
        path
    ]


@pytest.mark.parametrize("folder", [False, True])
def test_a_failure_keeps_the_old_content(tmp_path, folder):
    path = tmp_path / "x"
    path.mkdir() if folder else path.write_text("old")
    with pytest.raises(ValueError, match="broken"), atomic(path) as partial:
        partial.mkdir() if folder else partial.write_text("half")
        raise ValueError("broken")
    assert list(tmp_path.iterdir()) == [path] and (folder or path.read_text() == "old")


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    with atomic(tmp_path / "x") as first, atomic(tmp_path / "x") as second:
        first.write_text("first")
        second.write_text("second")
    assert (tmp_path / "x").read_text() == "first"


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
    with sealed(tmp_path / "made") as partial:
        (partial / "below").mkdir()
        for name in ("a.bin", "below/b.bin"):
            (partial / name).write_bytes(bytes(600_000))  # longer than what is read at a time
    check_all(tmp_path / "made")
    damage(tmp_path / "made" / "below" / "b.bin", 599_000)
    check_bytes(tmp_path / "made", "a.bin")
    with pytest.raises(
        ValueError,
        match="its bytes are not those that were written: expected 600000 bytes, sums .*, got",
    ):
        check_bytes(tmp_path / "made", "below/b.bin")
    with pytest.raises(ValueError, match="below/b.bin is damaged or missing"):
        check_all(tmp_path / "made")


def test_a_digest_is_the_size_and_the_crc_32_of_the_sums(tmp_path):
    """Two words: their sum is that of the one row, they themselves are the sums of the first two
    columns.
    """
    (tmp_path / "words").write_bytes(b"\x01" + bytes(7) + b"\x02" + bytes(7))
    seal(tmp_path)
    rows = b"\x03" + bytes(8 * 64 - 1)
    columns = b"\x01" + bytes(7) + b"\x02" + bytes(8 * 512 - 9)
    wanted = f"16 bytes, sums {zlib.crc32(rows + columns):08x}"
    assert json.loads((tmp_path / DIGESTS).read_text()) == {"words": wanted}


@pytest.mark.parametrize(
    "change",
    [
        {8: b"\x01"},
        {8: b"\x01", 16: b"\xff" * 8},  # plus one and minus one in a row
        {8: b"\x01", 4104: b"\xff" * 8},  # in a column
        {0: b"\x00", 262_144: b"\x05"},  # a word that moved to the next part that is read
        {299_999: b"\x80"},
    ],
)
def test_changes_whose_sums_cancel_are_found(change, tmp_path):
    content = bytearray(300_000)
    content[0] = 5
    (tmp_path / "a").write_bytes(content)
    seal(tmp_path)
    for place, new in change.items():
        content[place : place + len(new)] = new
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match="its bytes are not those that were written"):
        check_bytes(tmp_path, "a")


def test_a_file_without_a_digest_is_not_checked(tmp_path):
    (tmp_path / "a").write_text("a")
    check_bytes(tmp_path, "a")
    check_all(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"b": "1 bytes, sums 71beeff9"}'])
def test_damaged_digests_are_one_clear_error(content, tmp_path):
    (tmp_path / "a").write_text("a")
    (tmp_path / DIGESTS).write_text(content)
    with pytest.raises(ValueError, match="digests.json"):
        check_bytes(tmp_path, "a")
