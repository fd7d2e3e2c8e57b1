"""Budgets, target CPAs and industries of AuctionNet's 48 published advertisers.

Source: AuctionNet (arXiv 2412.10798), `simul_bidding_env`; `published/README.md` lists the files.
"""

import json
from pathlib import Path

import numpy as np

import decisionllm
from decisionllm.schema import Json

DATA = Path(decisionllm.__file__).parent / "bidding" / "published"
PUBLISHED: Json = json.loads((DATA / "constants.json").read_text(encoding="utf-8"))
CATEGORIES: int = PUBLISHED["categories"]
BUDGETS = np.array(PUBLISHED["budgets"], float)  # of the 48 published advertisers, currency
TARGET_CPA = np.array(PUBLISHED["target_cpa"], float)  # theirs, currency per conversion


def industries(advertisers: int) -> np.ndarray:
    """The industry of each advertiser, (N,) int, six blocks of neighbours: 48 -> 0 eight
    times ...
    """
    return np.arange(advertisers) * CATEGORIES // advertisers
