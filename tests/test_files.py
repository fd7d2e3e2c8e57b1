"""atomic: a file or a folder is replaced as a whole, or not at all."""

from pathlib import Path

import pytest

from decisionllm.files import atomic


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
    assert [file.name for file in path.iterdir()] == ["second"] and list(tmp_path.iterdir()) == [path]


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
        if (source == path) == (moment == "before the old one is moved") and next(others, None) is not None:
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
