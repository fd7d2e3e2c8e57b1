"""Two replicas by Ray Serve: whichever is asked, a campaign has the answers that one process gives.

`python -m benchmarks.replicas runs/auction/nano-0` (needs `decisionllm[ray]`) starts the verb with replicas=2, plays campaigns over its
port, of which half always ask by their own id and half by another with each tick, holds the answers against a desk in this process,
appends a row to serve.jsonl and prints it. A minute, most of it Ray's start, so that it is no test.
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
from decisionllm.policy import checkpoint
from decisionllm.serving.campaigns import Desk

CAMPAIGNS, TICKS = 16, 24


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    run = parser.parse_args().run
    policy, _, facts = checkpoint.load(run)
    desk = Desk(policy, facts["dataset"])
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
                row |= {"start_s": round(time.monotonic() - began, 1)} | play(client, desk)
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


def play(client, desk):
    refused = client.get("/v1/campaigns").status_code
    client.headers["authorization"] = "Bearer secret"
    opening = {"budget": 900.0, "target_cpa": 60.0, "horizon": TICKS}
    ids = [client.post("/v1/campaigns", json=opening).raise_for_status().json()["id"] for _ in range(CAMPAIGNS)]
    alone = [desk.open(**opening) for _ in range(CAMPAIGNS)]
    seconds, apart = {"own": [], "any": []}, 0.0
    for step in range(TICKS):
        for i, id in enumerate(ids):
            asked, how = drawn(i, step), "any" if i % 2 else "own"
            began = time.perf_counter()
            session = {"x-session-id": id if how == "own" else f"{id}{step}"}
            answer = client.post(f"/v1/campaigns/{id}/tick", json=asked, headers=session).raise_for_status().json()
            seconds[how].append(time.perf_counter() - began)
            expected = desk.tick(alone[i], **asked)
            assert (
                answer["fallback"] is None
                and answer["guards"] == expected["guards"]
                and answer["remaining"] == expected["remaining"]
            )
            apart = max(apart, abs(answer["multiplier"] / expected["multiplier"] - 1))
    rebuilt = set()
    for session in range(20):  # whichever replica that is
        lines = client.get("/metrics", headers={"x-session-id": str(session)}).text.splitlines()
        rebuilt |= {float(line.split()[-1]) for line in lines if line.startswith("decisionllm_rebuilt_total")}
    return {
        "campaigns": CAMPAIGNS, "ticks": TICKS, "apart": apart, "unauthorised": refused, "rebuilt": sorted(rebuilt),
        "own_ms": round(1000 * float(np.median(seconds["own"])), 2), "any_ms": round(1000 * float(np.median(seconds["any"])), 2),
    }  # fmt: skip


if __name__ == "__main__":
    main()
