"""Hours of traffic against `decisionllm serve` with faulty clients and killed servers: no bid may
change by them.

`python -m benchmarks.soak runs/auction/nano-0 [--campaigns 200] [--ticks 20000] [--kills 3]`.
Clients tick campaigns at random and, between ticks, repeat some, send others out of order or
malformed, and hang up on others; memory is too small for all, so that campaigns are evicted and
replayed all the time; the server is killed with -9 and started again. Then each campaign's bids are
compared with those of an undisturbed manager in this process. With `--rate`, further campaigns tick
at this constant rate meanwhile, and others attack: heads without end, silence, half a body, large,
malformed and cross-site requests. Every tick that was answered must be in the journal, as it was
answered. A row goes to serve.jsonl.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from pathlib import Path

import numpy as np

from benchmarks import load
from benchmarks.serve import ROWS, drawn
from decisionllm.domains.auction.journal import Journal
from decisionllm.domains.auction.observation import ObservationSpec
from decisionllm.policy import loading
from decisionllm.runs import directory
from tests.serving.in_process import CampaignManager

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
        return (
            int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
            * os.sysconf("SC_PAGE_SIZE")
            / 1e6
        )

    def descriptors(self):
        """Open sockets."""
        folder = Path(f"/proc/{self.process.pid}/fd")
        return sum(
            os.readlink(entry).startswith("socket:")
            for entry in folder.iterdir()
            if entry.is_symlink()
        )


class Client(threading.Thread):
    """Some of the campaigns, ticked at random until each has had its ticks."""

    pause = 0.0  # seconds between ticks

    def __init__(self, server, campaigns, steps, counts, seed):
        super().__init__(daemon=True)
        self.server, self.now, self.steps, self.counts = (
            server,
            dict.fromkeys(campaigns, 0),
            steps,
            counts,
        )
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
                    answer = http.post(
                        path, content=body, headers={"content-type": "application/json"}, **options
                    )
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
            self.ids[campaign] = self.send("/v1/campaigns", settings(campaign, self.steps)).json()[
                "id"
            ]
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
                # and hang up
                self.send(path, drawn(campaign, step), timeout=httpx.Timeout(5, read=0.001))
                self.counts["hung up"] += 1
            elif trick < 0.14 and step:
                wrong = self.send(path, drawn(campaign, step - 1) | {"key": "other"})
                assert wrong.status_code == 409 and wrong.json()["expected"] == step, wrong.text
            answer = self.send(path, drawn(campaign, step))
            assert answer.status_code == 200, answer.text
            self.answers[campaign, step] = answer.content
            self.now[campaign] += 1
            time.sleep(self.pause)
            if trick > 0.93:
                again = self.rng.randrange(step + 1)
                assert (
                    self.send(path, drawn(campaign, again)).content == self.answers[campaign, again]
                )
                self.counts["repeated"] += 1


class Steady(load.Client):
    """Ticks of further campaigns at a constant rate, whatever happens to the server; one without an
    answer is sent again.
    """

    def __init__(self, server, steps):
        super().__init__(server.port, spin=False)
        self.server, self.steps, self.sent, self.given, self.over = server, steps, {}, {}, False

    def answered(self, connection, call, status, body):
        id, step = self.sent.pop(call[1])
        if status == 200:
            self.given[id, step] = body
        if step + (status == 200) < self.steps:
            self.ready.append((id, step + (status == 200)))
        super().answered(connection, call, status, b"")

    def requests(self):
        while not self.over:
            if not self.ready:  # all wait for their answers
                yield None
                continue
            id, step = self.ready.popleft()
            request = load.http(
                f"/v1/campaigns/{id}/tick", json.dumps(drawn(int(id[:8], 16) % 1000, step)).encode()
            )
            self.sent[request] = id, step
            yield request

    def play(self, rate, campaigns):
        self.ready = deque((id, 0) for id in load.opened(self.port, campaigns, horizon=self.steps))
        load.run(self.run(self.requests(), rate))

    def wrong(self, journal):
        """Answered ticks that are not in the journal as they were answered, and campaigns with a
        tick that nobody sent.
        """
        kept = {
            id: [json.dumps(tick["answer"]).encode() for tick in journal.ticks(id)]
            for id in {id for id, _ in self.given}
        }
        lost = sum(
            step >= len(kept[id]) or kept[id][step] != body
            for (id, step), body in self.given.items()
        )
        last = Counter(id for id, _ in self.given)
        return lost + sum(
            not last[id] <= len(answers) <= last[id] + 1 for id, answers in kept.items()
        )


class Attacker(threading.Thread):
    """Requests that no client sends, twenty a second; the statuses of what is answered are
    counted.
    """

    def __init__(self, server, counts):
        super().__init__(daemon=True)
        self.server, self.counts, self.over, self.silent = server, counts, False, deque(maxlen=100)

    def run(self):
        large = json.dumps(
            {"campaign": "none", "timeStepIndex": 0, "pValues": [0.001] * 300_000}
        ).encode()
        surrogate = b'{"ticks": {"\\ud800": {"index": 0, "coming": {"value": 0.1, "volume": 1}}}}'
        attacks = [
            b"POST /v1/ticks HTTP/1.1\r\nx: " + b"a" * 1_000_000,
            b"POST /v1/ticks HTTP/1.1\r\nhost: 127.0.0.1",
            b"",
            load.http("/v1/ticks", b"{" * 1000)[:-500],
            load.http("/v1/bid", large),
            load.http("/v1/ticks", surrogate),
            load.http("/v1/campaigns", b"{}").replace(
                b"host", b"origin: https://elsewhere\r\nhost"
            ),
            load.http("/v1/act", b"[" * 100_000),
            load.http(
                "/openrtb/2.6/bid",
                b'{"id": "1", "tmax": 1, "imp": [{"id": "1", "ext": {"value": true}}], "ext": '
                b'{"campaign": "x"}}',
            ),
            load.http("/v1/ticks", b"x").replace(b"content-length: 1", b"content-length: 99999999"),
            b"\x16\x03\x01" + bytes(200),
        ]
        for attack in itertools.cycle(attacks):
            if self.over:
                return
            time.sleep(0.05)
            with contextlib.suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=5)
                self.silent.append(connection)  # the last hundred stay open
                connection.settimeout(1)
                connection.sendall(attack)
                if attack and attack is not attacks[1] and attack is not attacks[3]:
                    self.counts[connection.recv(100)[9:12].decode() or "closed"] += 1


def main():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__.splitlines()[0]
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--campaigns", type=int, default=200)
    parser.add_argument("--ticks", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument(
        "--cache",
        type=float,
        default=None,
        help="MB; by default room for a third of the campaigns, 0: none",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=0,
        help="ticks a second of 2,000 further campaigns, with attacks",
    )
    parser.add_argument("--out", type=Path, default=ROWS)
    options = parser.parse_args()
    policy, _, run_info = loading.load(options.run)
    steps, campaigns = options.ticks // options.campaigns, options.campaigns
    alone = CampaignManager(policy, ObservationSpec.of(run_info["dataset"]), horizon=steps)
    kept = 2500 if options.rate else max(options.campaigns // 3, 1)
    cache = options.cache if options.cache is not None else 1000
    counts, memory, began = Counter(), [], time.time()
    with tempfile.TemporaryDirectory(dir=options.out.parent) as folder:
        server = Server(
            options.run.resolve(),
            folder,
            [f"max_campaigns={kept}", f"cache_mb={cache}", f"horizon={steps}"],
        )
        clients = [
            Client(server, range(i, campaigns, CLIENTS), steps, counts, i) for i in range(CLIENTS)
        ]
        Client.pause = 0.1 if options.rate else 0.0
        for client in clients:
            client.start()
        steady, attacks = Steady(server, steps), Counter()
        attacker, pacer = (
            Attacker(server, attacks),
            threading.Thread(target=steady.play, args=(options.rate, 2000), daemon=True),
        )
        for thread in (attacker, pacer) if options.rate else ():
            thread.start()
        descriptors = {"at the start": server.descriptors()}
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
        steady.over = attacker.over = True
        for thread in (attacker, pacer) if options.rate else ():
            thread.join()
        attacker.silent.clear()
        time.sleep(12 if options.rate else 0)  # connections that send nothing are closed
        took, descriptors["at the end"] = time.time() - began, server.descriptors()
        server.process.kill()
        server.process.wait()
        assert not any(client.error for client in clients), [
            client.error for client in clients if client.error
        ]
        journal, wrong, fallbacks = Journal(f"{folder}/journal.sqlite"), 0.0, 0
        ids = {campaign: id for client in clients for campaign, id in client.ids.items()}
        for client in clients:
            for campaign in client.now:
                mine = alone.open(**settings(campaign, steps))
                kept_ticks = list(journal.ticks(ids[campaign]))
                assert [tick["index"] for tick in kept_ticks] == list(range(steps))
                for t, tick in enumerate(kept_ticks):
                    given, wanted = (
                        json.loads(client.answers[campaign, t]),
                        alone.tick(mine, **drawn(campaign, t)),
                    )
                    assert given == tick["answer"] and given["spend"] == wanted["spend"]
                    fallbacks += given["fallback"] is not None
                    wrong = max(
                        wrong,
                        abs(given["multiplier"] - wanted["multiplier"])
                        / max(abs(wanted["multiplier"]), 1e-9),
                    )
                alone.campaigns.pop(mine)
        log, wrong_ticks = (Path(folder) / "log").read_text(), steady.wrong(journal)
    last = [mb for lives, _, mb in memory if lives == options.kills]
    half = len(last) // 2
    row = {
        "benchmark": "soak",
        "case": f"cache {cache} MB",
        "campaigns": campaigns,
        "ticks": campaigns * steps,
        "kills": killed,
        "seconds": round(took, 1),
        "answers": {str(k): v for k, v in sorted(counts.items(), key=str)},
        "fallbacks": fallbacks,
        "largest_difference": wrong,
        "errors_500": counts[500],
        "tracebacks": log.count("Traceback"),
        "memory_mb": {
            "after warm-up": float(np.median(last[half // 2 : half])),
            "at the end": float(np.median(last[-half // 2 :])),
        },
        "rate": options.rate,
        "steady": {str(k): v for k, v in steady.statuses.items()},
        "attacks": dict(attacks),
        "descriptors": descriptors,
        "lost_or_doubled": wrong_ticks,
        "steady_p99_ms": float(np.percentile(steady.took, 99)) if steady.took else None,
        "met": bool(
            wrong <= 1e-5
            and wrong_ticks == 0
            and counts[500] + attacks["500"] + steady.statuses[500] == 0
            and fallbacks == 0
            and killed == options.kills
        ),
        "versions": directory.versions(),
    }
    with options.out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
