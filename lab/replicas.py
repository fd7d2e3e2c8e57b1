"""Two replicas: a campaign has the same answers from either replica as from one process, and how
many ticks a second they answer.

`python -m lab.replicas runs/auction/nano-0` starts the command with replicas=2, plays
campaigns over its port, half of them on one kept connection and half on another one at each tick,
and compares the answers with a manager in this process. Then one process on one core, one process
on any core and two replicas answer requests of 64 ticks in a closed loop over 16 connections, in
alternating rounds; a client of so few requests needs little of a core. Two rows go to serve.jsonl
and are printed.
"""

import argparse
import json
import os
import tempfile
import time
from contextlib import ExitStack

import httpx
import numpy as np

from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.policy import loading
from decisionllm.runs import directory
from lab import load
from lab.serve import ROWS, drawn
from tests.bidding.server.in_process import CampaignManager

CAMPAIGNS, TICKS = 16, 24
ROUNDS, SECONDS = 3, 4.0  # of the closed loop


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run")
    parser.add_argument("--loop-only", action="store_true", help="the closed loop alone")
    options = parser.parse_args()
    rows = (
        [throughput(options.run)]
        if options.loop_only
        else [same_answers(options.run), throughput(options.run)]
    )
    with ROWS.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row | {"versions": directory.versions()}) + "\n")
            print(json.dumps(row, indent=1))


def throughput(run):
    """Ticks a second in a closed loop: medians of alternating rounds."""
    kinds = {"one on one core": (1, "0"), "one": (1, ""), "two": (2, "")}
    rates, cpu = {kind: [] for kind in kinds}, []
    with ExitStack() as stack:
        servers = {}
        for kind, (replicas, cores) in kinds.items():
            # the journal on a true disk
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=ROWS.parent))
            words = [
                f"port={load.free_port()}",
                f"replicas={replicas}",
                "deadline_ms=60000",
                "max_campaigns=100000",
            ]
            servers[kind] = load.Server(run, folder, cores, words)
            stack.callback(servers[kind].stop)
        for turn in range(ROUNDS):
            for kind in list(servers)[:: 1 if turn % 2 else -1]:
                began = time.process_time()
                rates[kind].append(load.ticks_per_second(servers[kind].port, SECONDS))
                cpu.append((time.process_time() - began) / (load.WARM + SECONDS))
    medians = {kind: float(np.median(rate)) for kind, rate in rates.items()}
    ratios = {
        f"two / {kind}": float(np.median(np.divide(rates["two"], rates[kind])))
        for kind in ("one on one core", "one")
    }
    return (
        {
            "benchmark": "replicas",
            "case": "closed loop",
            "unit": "ticks/s",
            "rates": rates,
            "load": os.getloadavg()[0],
        }
        | medians
        | ratios
        | {
            "client_cores": float(np.median(cpu)),
            "met": ratios["two / one on one core"] >= 1.8,
        }
    )


def same_answers(run):
    """Answers of two replicas against a manager in this process."""
    policy = loading.load(run)
    manager = CampaignManager(policy, ObservationSpec.from_info(policy.info["dataset"]))
    began = time.monotonic()
    os.environ["DECISIONLLM_TOKEN"] = "the secret of this benchmark"
    with tempfile.TemporaryDirectory() as folder:
        server = load.Server(run, folder, "", [f"port={load.free_port()}", "replicas=2"])
        try:
            row = {"benchmark": "replicas", "start_s": round(time.monotonic() - began, 1)}
            with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as client:
                row |= play(client, manager)
        finally:
            row["exit"] = server.stop()
            del os.environ["DECISIONLLM_TOKEN"]
    assert (
        row["exit"] == 0
        and row["apart"] < 1e-5
        and max(row["rebuilt"]) > 0
        and row["unauthorised"] == 401
    )
    return row


def play(client, manager):
    refused = client.get("/v1/campaigns").status_code
    client.headers["authorization"] = "Bearer the secret of this benchmark"
    opening = {"budget": 900.0, "target_cpa": 60.0, "horizon": TICKS}
    ids = [
        client.post("/v1/campaigns", json=opening).raise_for_status().json()["id"]
        for _ in range(CAMPAIGNS)
    ]
    alone = [manager.open(**opening) for _ in range(CAMPAIGNS)]
    seconds, apart = {"own": [], "any": []}, 0.0
    for step in range(TICKS):
        for i, id in enumerate(ids):
            tick = drawn(i, step)
            how = "any" if i % 2 else "own"
            began = time.perf_counter()
            fresh = {"connection": "close"} if how == "any" else {}
            answer = (
                client.post(f"/v1/campaigns/{id}/tick", json=tick, headers=fresh)
                .raise_for_status()
                .json()
            )
            seconds[how].append(time.perf_counter() - began)
            expected = manager.tick(alone[i], **tick)
            assert (
                answer["fallback"] is None
                and answer["guards"] == expected["guards"]
                and answer["remaining"] == expected["remaining"]
            )
            apart = max(apart, abs(answer["multiplier"] / expected["multiplier"] - 1))
    rebuilt = set()
    for _ in range(20):  # of either replica
        lines = client.get("/metrics", headers={"connection": "close"}).text.splitlines()
        rebuilt |= {
            float(line.split()[-1])
            for line in lines
            if line.startswith("decisionllm_rebuilt_total")
        }
    return {
        "campaigns": CAMPAIGNS,
        "ticks": TICKS,
        "apart": apart,
        "unauthorised": refused,
        "rebuilt": sorted(rebuilt),
        "own_ms": round(1000 * float(np.median(seconds["own"])), 2),
        "any_ms": round(1000 * float(np.median(seconds["any"])), 2),
    }


if __name__ == "__main__":
    main()
