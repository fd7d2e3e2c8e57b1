"""Every example runs, with few steps."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
FEW = {
    "train_on_minari": ["--episodes=20", "--steps=2", "--rollouts=3"],
    "bid_in_auctionnet": ["--periods=0", "--steps=2", "--opportunities=3000"],
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.setattr(sys, "argv", [str(path), *FEW[path.stem], f"--run={tmp_path}/run"])
    runpy.run_path(str(path), run_name="__main__")
    assert (tmp_path / "run" / "checkpoint").is_dir()
    printed = capsys.readouterr().out.splitlines()[-1]
    assert "results.jsonl" in printed or "conversions" in printed


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("steps=600", "steps=2")
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    assert all(not cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells), "outputs are not committed"
