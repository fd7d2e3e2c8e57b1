"""The pictures of the docs are those that their sources draw."""

from dataclasses import replace

from docs import pictures


def test_no_picture_is_older_than_its_source():
    """One without a digest was drawn before they were recorded, and its runs are not at hand."""
    recorded = pictures.read_digests()
    assert recorded.keys() == pictures.PICTURES.keys()
    late = [name for name in pictures.outdated() if recorded[name] is not None]
    assert late == [], "run: python -m docs.pictures"


def test_every_picture_of_the_docs_has_its_source():
    images = {path.name for path in pictures.IMAGES.iterdir() if path.suffix in (".png", ".svg")}
    data = {file.rpartition("/")[2] for each in pictures.PICTURES.values() for file in each.files}
    assert images - data == {*pictures.PICTURES, *pictures.BY_HAND}


def test_a_change_of_data_or_of_code_is_another_digest(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    (tmp_path / "rows").write_text("1", encoding="utf-8")
    picture = pictures.Picture(draws="docs.pictures.draw_words", files=("rows",))
    digests = {pictures.digest(picture)}
    digests.add(pictures.digest(replace(picture, draws="docs.pictures.main")))
    (tmp_path / "rows").write_text("2", encoding="utf-8")
    digests.add(pictures.digest(picture))
    assert len(digests) == 3


def test_a_picture_whose_runs_are_not_there_stays(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    assert not pictures.draw("page.png")
    assert "expected the runs runs/auction/logs-0, runs/auction/nano-0" in capsys.readouterr().out
