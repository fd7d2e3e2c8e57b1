"""Hours of traffic against `decisionllm serve` with faulty clients and killed servers: no bid may
change by them.

`python -m lab.soak runs/auction/nano-0 [--campaigns 200] [--ticks 20000] [--kills 3]`.
Clients tick campaigns at random and, between ticks, repeat some, send others out of order or
malformed, and hang up on others; memory is too small for all, so that campaigns are evicted and
replayed all the time; the server is killed with -9 and started again. Then each campaign's bids are
compared with those of an undisturbed manager in this process.

With `--rate`, further campaigns tick at this constant rate meanwhile, and others attack: heads
without end, silence, half a body, large, malformed and cross-site requests, pipelines, answers that
are not read, and tokens that are wrong. With `--switch`, a copy of the run takes over and is rolled
back again and again, so that models change and bids must not. With `--replicas`, replicas are
killed too. Every tick that was answered must be in the journal, as it was answered. A row goes to
serve.jsonl.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, deque
from pathlib import Path

import numpy as np

from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.policy import loading
from decisionllm.runs import directory
from lab import load
from lab.serve import ROWS, drawn
from tests.bidding.server.in_process import CampaignManager

CLIENTS = 4
TOKEN = "the token of the soak"
HEADERS = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
SWITCH_EVERY = 10.0  # seconds between two changes of the model
PIPELINED = 4000  # requests in one write
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
    """The program as a process, on one port, with one journal, through all of its lives.

    Its token is `TOKEN`, so that a request without it is refused before anything is read.
    """

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
        self.log = Path(folder) / "log"
        self.process = None
        self.port = 0
        self.up = threading.Event()
        self.start()

    def start(self):
        with self.log.open("a", encoding="utf-8") as log:
            command = [*self.command, f"port={self.port}"]
            environment = os.environ | {"DECISIONLLM_TOKEN": TOKEN}
            self.process = subprocess.Popen(
                command,
                text=True,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                encoding="utf-8",
            )
        line = self.process.stdout.readline()
        assert " on http://" in line, f"the server did not start, see {self.log}"
        address = line.split(" on http://")[1].split(",")[0].split()[0]
        self.port = int(address.rpartition(":")[2])
        answers = 0
        while answers < 20:  # of all replicas
            answers = answers + 1 if self.is_ready() else 0
            assert self.process.poll() is None, f"the server ended, see {self.log}"
            time.sleep(0.05)
        self.up.set()

    def is_ready(self):
        url = f"http://127.0.0.1:{self.port}/readyz"
        try:
            with urllib.request.urlopen(url, timeout=60):
                return True
        except OSError:
            return False

    def kill(self):
        """Kill all of it and start it again."""
        self.up.clear()
        killed = self.replicas()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for replica in killed:  # they end with their parent, a moment later
            while Path(f"/proc/{replica}").exists():
                time.sleep(0.05)
        self.start()

    def kill_replica(self):
        """Kill one replica, which the program replaces."""
        os.kill(self.replicas()[0], signal.SIGKILL)

    def replicas(self):
        """Process ids of the replicas; none where the program serves by itself."""
        pid = self.process.pid
        found = []
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split():
            with contextlib.suppress(FileNotFoundError):
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
        return found

    def serving(self):
        return self.replicas() or [self.process.pid]

    def memory(self):
        """Resident, in MB."""
        pages = 0
        for pid in self.serving():
            with contextlib.suppress(FileNotFoundError, IndexError):  # it was just killed
                pages += int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def descriptors(self):
        """Open sockets."""
        count = 0
        for pid in self.serving():
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                count += entry.is_symlink() and os.readlink(entry).startswith("socket:")
        return count


class Client(threading.Thread):
    """Some of the campaigns, ticked at random until each has had its ticks."""

    pause = 0.0  # seconds between ticks

    def __init__(self, server, campaigns, steps, counts, seed):
        super().__init__(daemon=True)
        self.server = server
        self.now = dict.fromkeys(campaigns, 0)
        self.steps = steps
        self.counts = counts
        self.rng = random.Random(seed)
        self.answers = {}
        self.ids = {}
        self.error = None

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
                    answer = http.post(path, content=body, headers=HEADERS, **options)
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
            step = self.now[campaign]
            path = f"/v1/campaigns/{self.ids[campaign]}/tick"
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
        self.server = server
        self.steps = steps
        self.sent = {}
        self.given = {}
        self.over = False

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
            body = json.dumps(drawn(int(id[:8], 16) % 1000, step)).encode()
            request = load.http(f"/v1/campaigns/{id}/tick", body, token=TOKEN)
            self.sent[request] = id, step
            yield request

    def play(self, rate, campaigns):
        ids = load.opened(self.port, campaigns, horizon=self.steps, token=TOKEN)
        self.ready = deque((id, 0) for id in ids)
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
    """Requests that no client sends, twenty a second; the statuses of what is answered are counted.

    The last hundred connections stay open, silent or with answers that nobody reads.
    """

    def __init__(self, server, counts):
        super().__init__(daemon=True)
        self.server = server
        self.counts = counts
        self.over = False
        self.kept = deque(maxlen=100)

    def run(self):
        for attack, answered in itertools.cycle(attacks()):
            if self.over:
                break
            time.sleep(0.05)
            with contextlib.suppress(OSError):
                self.send(attack, answered)
        self.kept.clear()

    def send(self, attack, answered):
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=5)
        self.kept.append(connection)
        connection.settimeout(1)
        connection.sendall(attack)
        if answered:
            self.counts[connection.recv(100)[9:12].decode() or "closed"] += 1


def attacks():
    """(bytes of an attack, whether its sender reads an answer)."""
    large = {"campaign": "none", "timeStepIndex": 0, "pValues": [0.001] * 300_000}
    surrogate = b'{"ticks": {"\\ud800": {"index": 0, "coming": {"value": 0.1, "volume": 1}}}}'
    no_bid = (
        b'{"id": "1", "tmax": 1, "imp": [{"id": "1", "ext": {"value": true}}], "ext": '
        b'{"campaign": "x"}}'
    )
    opens = load.http("/v1/campaigns", b"{}", token=TOKEN)
    announced = load.http("/v1/ticks", b"x", token=TOKEN)
    page = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    return [
        (b"POST /v1/ticks HTTP/1.1\r\nx: " + b"a" * 1_000_000, True),
        (b"POST /v1/ticks HTTP/1.1\r\nhost: 127.0.0.1", False),
        (b"", False),
        (load.http("/v1/ticks", b"{" * 1000, token=TOKEN)[:-500], False),
        (load.http("/v1/bid", json.dumps(large).encode(), token=TOKEN), True),
        (load.http("/v1/ticks", surrogate, token=TOKEN), True),
        (opens.replace(b"host", b"origin: https://elsewhere\r\nhost"), True),
        (load.http("/v1/act", b"[" * 100_000, token=TOKEN), True),
        (load.http("/openrtb/2.6/bid", no_bid, token=TOKEN), True),
        (announced.replace(b"content-length: 1", b"content-length: 99999999"), True),
        (b"\x16\x03\x01" + bytes(200), True),
        (page * PIPELINED, True),
        (page * PIPELINED, False),  # and reads no answer
        (load.http("/metrics", b"", "GET", token=TOKEN), False),
        (load.http("/v1/campaigns", b"", "GET", token="wrong") * 8, True),
    ]


class Operator(threading.Thread):
    """Lets run b take over from a, with all campaigns, and takes that back, again and again."""

    def __init__(self, server, counts):
        super().__init__(daemon=True)
        self.server = server
        self.counts = counts
        self.over = False

    def run(self):
        changes = [
            ("/v1/models", {"run": "b", "campaigns": "move"}),
            ("/v1/models/rollback", {"campaigns": "move"}),
        ]
        for path, body in itertools.cycle(changes):
            until = time.monotonic() + SWITCH_EVERY
            while time.monotonic() < until:
                if self.over:
                    return
                time.sleep(0.2)
            self.change(path, body)

    def change(self, path, body):
        """Send it until it is answered: 409 says that it was done before the server died."""
        import httpx

        while not self.over:
            self.server.up.wait(60)
            url = f"http://127.0.0.1:{self.server.port}{path}"
            try:
                answer = httpx.post(url, json=body, headers=HEADERS, timeout=60)
            except httpx.TransportError:
                self.counts["broken"] += 1
                time.sleep(0.5)
                continue
            self.counts[answer.status_code] += 1
            if answer.status_code in (200, 409):
                return
            time.sleep(0.5)


class Soak:
    """One soak: the server, its clients, and what disturbs them."""

    def __init__(self, options, folder):
        self.options = options
        self.folder = Path(folder)
        self.steps = options.ticks // options.campaigns
        self.counts = Counter()
        self.attacks = Counter()
        self.changes = Counter()
        self.memory = []  # (kills, share of the ticks, MB)
        self.killed = 0
        kept = max(options.campaigns // 3, 1)
        if options.rate:
            kept = 2500
        words = [f"max_campaigns={kept}", f"cache_mb={options.cache}", f"horizon={self.steps}"]
        run = options.run.resolve()
        if options.switch:
            for name in ("a", "b"):
                shutil.copytree(run, self.folder / "runs" / name)
            run = self.folder / "runs" / "a"
            words.append(f"models_dir={self.folder}/runs")
        if options.replicas > 1:
            words.append(f"replicas={options.replicas}")
        self.server = Server(run, folder, words)
        Client.pause = 0.1 if options.rate else 0.0
        self.clients = []
        for i in range(CLIENTS):
            campaigns = range(i, options.campaigns, CLIENTS)
            self.clients.append(Client(self.server, campaigns, self.steps, self.counts, i))
        self.steady = Steady(self.server, self.steps)
        self.disturbing = []
        if options.rate:
            self.disturbing.append(Attacker(self.server, self.attacks))
            given = (options.rate, 2000)
            self.disturbing.append(
                threading.Thread(target=self.steady.play, args=given, daemon=True)
            )
        if options.switch:
            self.disturbing.append(Operator(self.server, self.changes))

    def done(self):
        """Share of the ticks that are answered."""
        answered = sum(len(client.answers) for client in self.clients)
        return answered / (self.options.campaigns * self.steps)

    def run(self):
        """Play all ticks, with kills between them. Returns the seconds and the descriptors."""
        began = time.time()
        for thread in [*self.clients, *self.disturbing]:
            thread.start()
        descriptors = {"at the start": self.server.descriptors()}
        while any(client.is_alive() for client in self.clients):
            time.sleep(0.5)
            self.memory.append((self.killed, self.done(), self.server.memory()))
            if self.killed < self.options.kills:
                self.kill()
        self.steady.over = True
        for thread in self.disturbing:
            thread.over = True
        for thread in [*self.clients, *self.disturbing]:
            thread.join()
        if self.options.rate:
            time.sleep(12)  # connections that send nothing are closed
        took = time.time() - began
        descriptors["at the end"] = self.server.descriptors()
        self.server.process.terminate()
        self.server.process.wait()
        errors = [client.error for client in self.clients if client.error]
        assert not errors, errors
        return took, descriptors

    def kill(self):
        """Kill the server, or a replica and then the server in turn, where it is time to."""
        if self.done() <= (self.killed + 1) / (self.options.kills + 1.5):
            return
        if self.options.replicas > 1 and self.killed % 2 == 0:
            self.server.kill_replica()
        else:
            self.server.kill()
        self.killed += 1
        print(f"{self.done():.0%}: killed and started again; {dict(self.counts)}", flush=True)

    def compare(self, journal):
        """Compare all bids with those of an undisturbed manager.

        Returns:
            The largest relative difference, and the number of fallbacks.
        """
        policy = loading.load(self.options.run)
        observation = ObservationSpec.from_info(policy.info["dataset"])
        alone = CampaignManager(policy, observation, horizon=self.steps)
        largest = 0.0
        fallbacks = 0
        for client in self.clients:
            for campaign in client.now:
                mine = alone.open(**settings(campaign, self.steps))
                ticks = list(journal.ticks(client.ids[campaign]))
                assert [tick["index"] for tick in ticks] == list(range(self.steps))
                for t, tick in enumerate(ticks):
                    given = json.loads(client.answers[campaign, t])
                    wanted = alone.tick(mine, **drawn(campaign, t))
                    assert given == tick["answer"] and given["spend"] == wanted["spend"]
                    fallbacks += given["fallback"] is not None
                    scale = max(abs(wanted["multiplier"]), 1e-9)
                    difference = abs(given["multiplier"] - wanted["multiplier"]) / scale
                    largest = max(largest, difference)
                alone.campaigns.pop(mine)
        return largest, fallbacks


def tracebacks(log):
    """{last line of a traceback in a log: how often}."""
    found = Counter()
    inside = False
    for line in log.splitlines():
        inside = inside or line.startswith("Traceback")
        if inside and line and not line.startswith((" ", "Traceback")):
            found[line[:200]] += 1
            inside = False
        if '"message"' in line and "Traceback" in line:  # a line of JSON
            found[line[-200:]] += 1
    return dict(found)


def main():
    parser = argparse.ArgumentParser(prog="python -m lab.soak", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--campaigns", type=int, default=200)
    parser.add_argument("--ticks", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--cache", type=float, default=1000, help="MB; 0: none")
    parser.add_argument(
        "--rate",
        type=float,
        default=0,
        help="ticks a second of 2,000 further campaigns, with attacks",
    )
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--switch", action="store_true", help="change the model all the time")
    parser.add_argument("--out", type=Path, default=ROWS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.out.parent) as folder:
        soak = Soak(options, folder)
        took, descriptors = soak.run()
        journal = Journal(f"{folder}/journal.sqlite")
        largest, fallbacks = soak.compare(journal)
        lost = soak.steady.wrong(journal)
        log = soak.server.log.read_text(encoding="utf-8")
    last = [mb for kills, _, mb in soak.memory if kills == options.kills]
    half = len(last) // 2
    steady = soak.steady
    errors = soak.counts[500] + soak.attacks["500"] + steady.statuses[500] + soak.changes[500]
    row = {
        "benchmark": "soak",
        "case": f"cache {options.cache} MB",
        "campaigns": options.campaigns,
        "ticks": options.campaigns * soak.steps,
        "kills": soak.killed,
        "replicas": options.replicas,
        "seconds": round(took, 1),
        "answers": {str(k): v for k, v in sorted(soak.counts.items(), key=str)},
        "fallbacks": fallbacks,
        "largest_difference": largest,
        "errors_500": errors,
        "tracebacks": tracebacks(log),
        "memory_mb": {
            "after warm-up": float(np.median(last[half // 2 : half])),
            "at the end": float(np.median(last[-half // 2 :])),
        },
        "rate": options.rate,
        "steady": {str(k): v for k, v in steady.statuses.items()},
        "attacks": dict(soak.attacks),
        "changes": {str(k): v for k, v in soak.changes.items()},
        "descriptors": descriptors,
        "lost_or_doubled": lost,
        "steady_p99_ms": float(np.percentile(steady.took, 99)) if steady.took else None,
        "met": bool(
            largest <= 1e-5
            and lost == 0
            and errors == 0
            and fallbacks == 0
            and soak.killed == options.kills
        ),
        "versions": directory.versions(),
    }
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
