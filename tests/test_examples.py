"""Every example runs, with few steps."""

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.schema import Spec
from tests.conftest import LOOP, NANO, PATIENCE, command, make_policy

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"
FEW = {
    "train_on_minari": ["--episodes=20", "--steps=2", "--rollouts=3"],
    "bid_in_auctionnet": ["--periods=0", "--steps=2", "--opportunities=3000"],
}


WITHOUT = EXAMPLES / "bid_without_torch.py"
JOURNEYS = EXAMPLES / "ten_journeys.py"
WORDS = EXAMPLES / "words_on_a_maze.py"
ROOM = EXAMPLES / "words_in_a_room.py"
OWN = EXAMPLES / "own_environment.py"
BLOCKED = ("torch", "transformers", "peft", "scipy", "pandas", "hydra", "omegaconf", "fastapi")
ALONE = (
    "import runpy, sys; sys.modules.update(dict.fromkeys({blocked})); sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


@pytest.mark.parametrize(
    "path",
    sorted({*EXAMPLES.glob("*.py")} - {WITHOUT, JOURNEYS, WORDS, ROOM, OWN}),
    ids=lambda path: path.stem,
)
def test_an_example_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.setattr(sys, "argv", [str(path), *FEW[path.stem], f"--run={tmp_path}/run"])
    runpy.run_path(str(path), run_name="__main__")
    assert (tmp_path / "run" / "checkpoint").is_dir()
    printed = capsys.readouterr().out.splitlines()[-1]
    assert "results.jsonl" in printed or "conversions" in printed


def test_a_policy_of_an_own_environment_does_better_than_its_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(OWN), f"--folder={tmp_path}"])
    runpy.run_path(str(OWN), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()[-1]
    found = re.match(r"return: (\S+) in the log, nano (\S+), random (\S+)$", printed)
    log, policy, _ = map(float, found.groups())
    assert policy > log + 0.5


def test_words_are_drawn_on_a_maze(tmp_path, monkeypatch):
    data = (
        "dataset=maze2d-umaze",
        "dataset.source=regenerate",
        "dataset.steps=1000",
        f"cache_dir={tmp_path}",
        *NANO,
    )
    few = (
        "steps=2",
        "optim.batch_size=8",
        "log.tracker=none",
        "device=cpu",
        "head=gaussian",
        "window=1",
    )
    for name, text in (("reads", "paraphrased"), ("reads-nothing", "none")):
        assert command("train", *data, *few, f"text={text}", f"run={tmp_path}/{name}") == 0
    out = tmp_path / "pictures" / "words.png"
    monkeypatch.setattr(
        sys, "argv", ["words", f"{tmp_path}/reads", f"{tmp_path}/reads-nothing", f"--out={out}"]
    )
    runpy.run_path(str(WORDS), run_name="__main__")
    assert out.stat().st_size > 10_000


def test_words_are_drawn_in_a_room(tmp_path, monkeypatch, capsys):
    data = ("dataset=babyai", "dataset.level=[GoToObj,PickupLoc]", "dataset.episodes=8", *NANO)
    few = ("head=discrete", "model.condition_on=none", f"cache_dir={tmp_path}")
    for text in ("paraphrased", "none"):
        assert command("train", *LOOP, *data, *few, f"text={text}", f"run={tmp_path}/{text}") == 0
    out = tmp_path / "pictures" / "babyai.png"
    runs = [f"{tmp_path}/paraphrased", f"{tmp_path}/none"]
    names = ["--names", "reads", "reads nothing"]
    monkeypatch.setattr(sys, "argv", ["room", *runs, f"--out={out}", "--episodes=4", *names])
    runpy.run_path(str(ROOM), run_name="__main__")
    assert out.stat().st_size > 10_000
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in printed[-3:-1]] == names[1:]


def journeys():
    """The module of examples/ten_journeys.py."""
    name = JOURNEYS.stem
    if name not in sys.modules:  # Gymnasium imports its environment by this name
        spec = importlib.util.spec_from_file_location(name, JOURNEYS)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name].JOURNEYS


@pytest.mark.parametrize("name", journeys())
def test_a_journey_arrives(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    journeys()[name](tmp_path)


def test_the_exported_bidder_needs_no_torch(tmp_path):
    pytest.importorskip("onnxscript")
    from decisionllm.export.onnx_policy import write_onnx

    spec = ObservationSpec("minimal", "progress", "expected_value", "none")
    policy = make_policy(
        Spec(spec.size, 1, 48, (0.0,), (300.0,)),
        target_return=20.0,
        window=4,
        stride=2,
        backbone="gpt2",
        backbone_options={"layers": 1},
    )
    policy.model.normalizer.fit(
        [(np.random.default_rng(0).random((50, spec.size)), np.arange(50.0))]
    )
    write_onnx(
        policy, tmp_path / "onnx", {"dataset": {"name": "drawn"} | spec.info()}, name="example"
    )
    words = [str(WITHOUT), str(tmp_path / "onnx"), "--opportunities=4800"]
    done = subprocess.run(
        [sys.executable, "-c", ALONE.format(blocked=BLOCKED), *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert (
        "policy example, trained on drawn" in done.stdout
        and "of 2900 spent" in done.stdout.splitlines()[-1]
    )


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("steps=600", "steps=2").replace(
            '"backbone", "nano"', '"backbone", "nano", width=32, layers=2'
        )
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    assert all(not cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells), (
        "outputs are not committed"
    )
