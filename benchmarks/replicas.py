"""Two replicas: a campaign has the same answers from either replica as from one process.

`python -m benchmarks.replicas runs/auction/nano-0` starts the command with replicas=2, plays campaigns over its port, half of them
on one kept connection and half on another one at each tick, compares the answers with a manager in this process, appends a row to
serve.jsonl and prints it.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

import httpx
import numpy as np

from benchmarks.serve import ROWS, drawn
from decisionllm.envs.auction.observation import ObservationSpec
from decisionllm.policy import checkpoint
from tests.serving.in_process import CampaignManager

CAMPAIGNS, TICKS = 16, 24


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    run = parser.parse_args().run
    policy, _, run_info = checkpoint.load(run)
    manager = CampaignManager(policy, ObservationSpec.of(run_info["dataset"]))
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        door.close()
        command = [
            sys.executable,
            "-m",
            "decisionllm",
            "serve",
            f"run={run}",
            f"port={port}",
            "replicas=2",
            f"journal={folder}/j",
        ]
        began, row = time.monotonic(), {"benchmark": "replicas"}
        server = subprocess.Popen(command, env=os.environ | {"DECISIONLLM_TOKEN": "secret"}, stdout=subprocess.DEVNULL)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                wait(client, server)
                row |= {"start_s": round(time.monotonic() - began, 1)} | play(client, manager)
        finally:
            server.send_signal(signal.SIGTERM)
            row["exit"] = server.wait(60)
    with ROWS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))
    assert row["exit"] == 0 and row["apart"] < 1e-5 and max(row["rebuilt"]) > 0 and row["unauthorised"] == 401


def wait(client, server):
    while True:
        assert server.poll() is None, "the server ended"
        try:
            if client.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)


def play(client, manager):
    refused = client.get("/v1/campaigns").status_code
    client.headers["authorization"] = "Bearer secret"
    opening = {"budget": 900.0, "target_cpa": 60.0, "horizon": TICKS}
    ids = [client.post("/v1/campaigns", json=opening).raise_for_status().json()["id"] for _ in range(CAMPAIGNS)]
    alone = [manager.open(**opening) for _ in range(CAMPAIGNS)]
    seconds, apart = {"own": [], "any": []}, 0.0
    for step in range(TICKS):
        for i, id in enumerate(ids):
            tick, how = drawn(i, step), "any" if i % 2 else "own"
            began = time.perf_counter()
            fresh = {"connection": "close"} if how == "any" else {}
            answer = client.post(f"/v1/campaigns/{id}/tick", json=tick, headers=fresh).raise_for_status().json()
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
        rebuilt |= {float(line.split()[-1]) for line in lines if line.startswith("decisionllm_rebuilt_total")}
    return {
        "campaigns": CAMPAIGNS, "ticks": TICKS, "apart": apart, "unauthorised": refused, "rebuilt": sorted(rebuilt),
        "own_ms": round(1000 * float(np.median(seconds["own"])), 2), "any_ms": round(1000 * float(np.median(seconds["any"])), 2),
    }  # fmt: skip


if __name__ == "__main__":
    main()
