"""Hours of traffic against `decisionllm serve` with faulty clients and killed servers: no bid may change by them.

`python -m benchmarks.soak runs/auction/nano-0 [--campaigns 200] [--ticks 20000] [--kills 3]`. Clients tick campaigns at random
and, between ticks, repeat some, send others out of order or malformed, and hang up on others; memory is too small for all, so
that campaigns are evicted and replayed all the time; the server is killed with -9 and started again. Then each campaign's bids
are compared with those of an undisturbed manager in this process. A row goes to serve.jsonl.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.serve import ROWS, drawn
from decisionllm.envs.auction.journal import Journal
from decisionllm.envs.auction.observation import ObservationSpec
from decisionllm.policy import checkpoint
from decisionllm.serving.campaigns import CampaignManager

CLIENTS = 4
MALFORMED = (
    b"",
    b"{",
    b"\xff",
    b"[]",
    b"null",
    b'{"index": NaN}',
    b'{"index": 1e999}',
    b'{"coming": {"value": -1}}',
    b"[" * 5000,
)


def settings(campaign, horizon):
    return {
        "budget": 3000.0,
        "target_cpa": 60.0 + campaign % 70,
        "category": campaign % 6,
        "horizon": horizon,
        "key": f"soak-{campaign}",
    }


class Server:
    """The program as a process, on one port, with one journal, through all of its lives."""

    def __init__(self, run, folder, words):
        self.command = [
            sys.executable,
            "-m",
            "decisionllm",
            "serve",
            f"run={run}",
            f"journal={folder}/journal.sqlite",
            "deadline_ms=60000",
            *words,
        ]
        self.log, self.process, self.port = Path(folder) / "log", None, 0
        self.up = threading.Event()
        self.start()

    def start(self):
        with self.log.open("a") as log:
            command = [*self.command, f"port={self.port}"]
            self.process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=log)
        line = self.process.stdout.readline()
        assert " on http://" in line, f"the server did not start, see {self.log}"
        self.port = int(line.split(" on http://")[1].split(",")[0].rpartition(":")[2])
        self.up.set()

    def kill(self):
        self.up.clear()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.start()

    def memory(self):
        """Resident, in MB."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Client(threading.Thread):
    """Some of the campaigns, ticked at random until each has had its ticks."""

    def __init__(self, server, campaigns, steps, counts, seed):
        super().__init__(daemon=True)
        self.server, self.now, self.steps, self.counts = server, dict.fromkeys(campaigns, 0), steps, counts
        self.rng, self.answers, self.ids, self.error = random.Random(seed), {}, {}, None

    def run(self):
        try:
            self.play()
        except BaseException as error:
            self.error = error
            raise

    def send(self, path, body, **options):
        """The answer, however often the server dies meanwhile; None if it was not waited for."""
        import httpx

        if isinstance(body, dict):
            body = json.dumps(body).encode()
        while True:
            self.server.up.wait(60)
            try:
                with (
                    httpx.Client(base_url=f"http://127.0.0.1:{self.server.port}", timeout=60)
                    if options
                    else contextlib.nullcontext(self.http) as http
                ):
                    answer = http.post(path, content=body, headers={"content-type": "application/json"}, **options)
            except httpx.TransportError:
                self.counts["broken"] += 1
                if options:
                    return None
                time.sleep(0.05)
                continue
            self.counts[answer.status_code] += 1
            if answer.status_code != 503:
                return answer
            time.sleep(float(answer.headers["retry-after"]) / 10)

    def play(self):
        import httpx

        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.server.port}", timeout=60)
        for campaign in self.now:
            self.ids[campaign] = self.send("/v1/campaigns", settings(campaign, self.steps)).json()["id"]
        while left := [campaign for campaign, step in self.now.items() if step < self.steps]:
            campaign = self.rng.choice(left)
            step, path = self.now[campaign], f"/v1/campaigns/{self.ids[campaign]}/tick"
            trick = self.rng.random()
            if trick < 0.05:
                wrong = self.send(path, drawn(campaign, step + self.rng.randint(1, 3)))
                assert wrong.status_code == 409 and wrong.json()["expected"] == step, wrong.text
            elif trick < 0.10:
                wrong = self.send(path, self.rng.choice(MALFORMED))
                assert wrong.status_code in (400, 422), wrong.text
            elif trick < 0.12:
                self.send(path, drawn(campaign, step), timeout=httpx.Timeout(5, read=0.001))  # and hang up
                self.counts["hung up"] += 1
            elif trick < 0.14 and step:
                wrong = self.send(path, drawn(campaign, step - 1) | {"key": "other"})
                assert wrong.status_code == 409 and wrong.json()["expected"] == step, wrong.text
            answer = self.send(path, drawn(campaign, step))
            assert answer.status_code == 200, answer.text
            self.answers[campaign, step] = answer.content
            self.now[campaign] += 1
            if trick > 0.93:
                again = self.rng.randrange(step + 1)
                assert self.send(path, drawn(campaign, again)).content == self.answers[campaign, again]
                self.counts["repeated"] += 1


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--campaigns", type=int, default=200)
    parser.add_argument("--ticks", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--cache", type=float, default=None, help="MB; by default room for a third of the campaigns, 0: none")
    parser.add_argument("--out", type=Path, default=ROWS)
    options = parser.parse_args()
    policy, _, run_info = checkpoint.load(options.run)
    steps, campaigns = options.ticks // options.campaigns, options.campaigns
    alone = CampaignManager(policy, ObservationSpec.of(run_info["dataset"]), horizon=steps)
    kept = max(options.campaigns // 3, 1)
    cache = options.cache if options.cache is not None else 1000
    counts, memory, began = Counter(), [], time.time()
    with tempfile.TemporaryDirectory(dir=options.out.parent) as folder:
        server = Server(options.run.resolve(), folder, [f"max_campaigns={kept}", f"cache_mb={cache}", f"horizon={steps}"])
        clients = [Client(server, range(i, campaigns, CLIENTS), steps, counts, i) for i in range(CLIENTS)]
        for client in clients:
            client.start()
        done = lambda: sum(len(client.answers) for client in clients) / (campaigns * steps)  # noqa: E731
        killed = 0
        while any(client.is_alive() for client in clients):
            time.sleep(0.5)
            memory.append((killed, done(), server.memory()))
            if killed < options.kills and done() > (killed + 1) / (options.kills + 1.5):
                server.kill()
                killed += 1
                print(f"{done():.0%}: killed and started again; {dict(counts)}", flush=True)
        for client in clients:
            client.join()
        took = time.time() - began
        server.process.kill()
        server.process.wait()
        assert not any(client.error for client in clients), [client.error for client in clients if client.error]
        journal, wrong, fallbacks = Journal(f"{folder}/journal.sqlite"), 0.0, 0
        ids = {campaign: id for client in clients for campaign, id in client.ids.items()}
        for client in clients:
            for campaign in client.now:
                mine = alone.open(**settings(campaign, steps))
                kept_ticks = list(journal.ticks(ids[campaign]))
                assert [tick["index"] for tick in kept_ticks] == list(range(steps))
                for t, tick in enumerate(kept_ticks):
                    given, wanted = json.loads(client.answers[campaign, t]), alone.tick(mine, **drawn(campaign, t))
                    assert given == tick["answer"] and given["spend"] == wanted["spend"]
                    fallbacks += given["fallback"] is not None
                    wrong = max(wrong, abs(given["multiplier"] - wanted["multiplier"]) / max(abs(wanted["multiplier"]), 1e-9))
                alone.campaigns.pop(mine)
        log = (Path(folder) / "log").read_text()
    last = [mb for lives, _, mb in memory if lives == options.kills]
    half = len(last) // 2
    row = {
        "benchmark": "soak", "case": f"cache {cache} MB", "campaigns": campaigns, "ticks": campaigns * steps, "kills": killed, "seconds": round(took, 1),
        "answers": {str(k): v for k, v in sorted(counts.items(), key=str)}, "fallbacks": fallbacks, "largest_difference": wrong,
        "errors_500": counts[500], "tracebacks": log.count("Traceback"),
        "memory_mb": {"after warm-up": float(np.median(last[half // 2 : half])), "at the end": float(np.median(last[-half // 2 :]))},
        "met": bool(wrong <= 1e-5 and counts[500] == 0 and fallbacks == 0 and killed == options.kills),
        "versions": checkpoint.versions(),
    }  # fmt: skip
    with options.out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
