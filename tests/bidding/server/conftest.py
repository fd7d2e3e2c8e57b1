"""A run that several modules of server tests serve: it is trained once."""

from pathlib import Path

import pytest

from tests.conftest import NANO, command

FIXTURES = Path(__file__).parents[2] / "fixtures" / "auctionnet"


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """A run of the auction, trained for two steps."""
    path = tmp_path_factory.mktemp("auction")
    words = (
        "dataset=auction",
        f"dataset.path={FIXTURES}/trajectories_period-7.csv.gz",
        "head=gaussian",
        "dataset.observation=minimal",
        "dataset.context_features=budget_and_cpa",
        "dataset.reward=expected_value",
        "objective=max_return",
        "objective.expectile=0.9",
        "window=16",
        "steps=2",
        "optim.warmup=1",
        "optim.batch_size=8",
        "optim.precision=no",
        "log.tracker=none",
        "data.held_out=0",
        "log.validation_batches=1",
        f"cache_dir={path}/data",
        f"run={path}/run",
    )
    assert command("train", *words, *NANO) == 0
    return path / "run"
