"""Each neighbour of the core can be taken away."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
NEIGHBOURS = ("worlds", "teams", "bidding", "scaling", "estimates", "export")


@pytest.mark.slow
@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_the_core_trains_without_a_neighbour(neighbour, tmp_path):
    package = ROOT / "decisionllm"
    assert (package / neighbour).is_dir()

    def left_out(folder, names):
        return {"__pycache__", neighbour if Path(folder) == package else ""} & set(names)

    shutil.copytree(package, tmp_path / "decisionllm", ignore=left_out)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "log.npz",
        observations=rng.normal(size=(200, 3)).astype(np.float32),
        actions=rng.uniform(-1, 1, (200, 2)).astype(np.float32),
        rewards=rng.normal(size=200).astype(np.float32),
        terminals=np.arange(200) % 20 == 19,
    )
    words = "train dataset=arrays dataset.path=log.npz dataset.low=[-1,-1] dataset.high=[1,1]"
    options = "backbone=nano steps=1 run=run log.tracker=none cache_dir=data"
    done = subprocess.run(
        [sys.executable, "-m", "decisionllm", *words.split(), *options.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "run.json").is_file()
