"""A raw traffic log of one AuctionNet period, 24 million rows of text: seconds and memory of
reading it.

    python -m lab.raw_traffic [--rows 24_000_000] [--folder ...]

The log is made, 3.4 GB of it, and deleted. A row appended to raw_traffic.jsonl holds wall and CPU
seconds of reading it and the peak of resident memory beside the page cache.
"""

import json
import tempfile
import time
from pathlib import Path

import numpy as np

from decisionllm.bidding.logs import auctionnet_columns, traffic_log
from decisionllm.bidding.market.campaigns import STEPS
from decisionllm.runs import directory
from lab.large_log import options_of, resident_mb, watched

RESULTS = Path(__file__).parent / "rows" / f"{Path(__file__).stem}.jsonl"
ADVERTISERS, LIMIT_MB, LIMIT_SECONDS = 48, 2000, 60
NAMES = [
    *auctionnet_columns.CAMPAIGN_KEY,
    *auctionnet_columns.FIXED_COLUMNS,
    "timeStepIndex",
    "remainingBudget",
    "isEnd",
    "pvIndex",
    "pValue",
    "pValueSigma",
    "bid",
    "xi",
    "adSlot",
    "cost",
    "isExposed",
    "conversionAction",
    "leastWinningCost",
]


def write(path, rows):
    """A log of so many rows, as many for each advertiser and step, and the sum of its bids."""
    rng = np.random.default_rng(0)
    n = rows // (ADVERTISERS * STEPS)
    value = rng.uniform(0, 0.002, n)
    bid = rng.uniform(0, 0.2, n)
    price = rng.uniform(0, 0.2, n)
    won = bid > price
    columns = (
        range(n),
        value,
        value / 5,
        bid,
        won.astype(int),
        won.astype(int),
        price * won,
        won.astype(int),
        rng.random(n) < value,
        price,
    )
    ends = [
        ",".join(str(int(x) if isinstance(x, np.bool_) else x) for x in row)
        for row in zip(*columns, strict=True)
    ]
    with path.open("w", encoding="utf-8") as file:
        file.write(",".join(NAMES))
        for advertiser in range(ADVERTISERS):
            budget = 2000 + 10 * advertiser
            for step in range(STEPS):
                left = budget - step * float((price * won).sum())
                begin = f"\n7,{advertiser},{advertiser // 8},{budget},{60 + advertiser},{step},{left + 1e6},{int(step == STEPS - 1)},"
                file.write(begin + begin.join(ends))
        file.write("\n")
    return n, float(bid.sum())


def main():
    options = options_of(RESULTS, __doc__, rows=24_000_000)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "period-7.csv"
        n, bids = write(path, options.rows)
        row = {
            "rows": n * ADVERTISERS * STEPS,
            "gb": path.stat().st_size / 1e9,
            "imports_mb": resident_mb(),
        }
        cpu = time.process_time()
        with watched() as reading:
            sums, _ = traffic_log.sum_traffic(path)
        row |= reading | {"cpu_seconds": time.process_time() - cpu}
    assert (
        len(sums["bid"]) == ADVERTISERS * STEPS
        and np.allclose(sums["bid"], bids)
        and (sums["volume"] == n).all()
    )
    row |= {
        "met": row["mb"] <= LIMIT_MB and row["seconds"] <= LIMIT_SECONDS,
        "versions": directory.versions(),
    }
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
