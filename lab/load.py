"""The server under a constant arrival rate: how latency and the share of late answers grow with the
rate.

`python -m lab.load RUN [--kinds ticks openrtb act bid one] [--rates 100 200 ...] [--seconds
10] [--replicas 1]` starts `decisionllm serve` pinned to one core, and sends from another. The load
is open: request i is due at i / rate, whatever was answered, and its latency counts from then, so
that a queue is part of it.
Kinds: `ticks` of campaigns in turn, `act` on a history of 24 steps, `bid` with all rows of a
period, `openrtb` bid requests, `one` warm tick at a time. A row of each rate goes to load.jsonl;
`--figure docs/images/load.svg` draws them all.
"""

import argparse
import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import timeit
import urllib.request
from collections import Counter, deque
from itertools import cycle
from pathlib import Path

import numpy as np

from decisionllm.runs import directory
from lab.serve import drawn

ROWS = Path(__file__).parent / "rows" / "load.jsonl"
LATE = {"ticks": 100.0, "one": 100.0, "openrtb": 80.0, "act": 100.0, "bid": 1000.0}  # ms
RATES = {
    "ticks": (100, 250, 500, 750, 1000, 1250),
    "openrtb": (1000, 2000, 3000, 4000, 5000),
    "act": (100, 200, 300),
    "bid": (1, 4, 8),
}
HORIZON, OPPORTUNITIES, CONNECTIONS = 48, 10_000, 256
TURNS, TOGETHER, WARM = 16, 64, 1.0  # of a closed loop: connections, ticks of a request, seconds
ROUNDS = 12  # campaigns of `one`; before and after each the machine's speed is measured


class Connection(asyncio.Protocol):
    """A kept connection with one request at a time."""

    def __init__(self, client):
        self.client = client
        self.buffer = b""
        self.call = None
        self.lost = False

    def connection_made(self, transport):
        self.transport = transport

    def send(self, call):
        self.call = call
        self.transport.write(call[1])

    def data_received(self, data):
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if found:
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            if len(body) >= length:
                call = self.call
                self.call = None
                self.buffer = b""
                self.client.answered(self, call, int(head[9:12]), body)

    def connection_lost(self, error):
        self.lost = True
        if self.call is not None:
            self.client.answered(self, self.call, 0, b"")


class Client:
    """Sends requests at a constant rate over as many connections as it takes, and notes each
    latency and status.
    """

    def __init__(self, port, spin=True):
        self.port = port
        self.spin = spin
        self.idle = []
        self.waiting = deque()
        self.open = 0
        self.took = []
        self.statuses = Counter()
        self.bodies = []
        self.left = 0
        # ms that each request was sent after its moment, by no fault of the server
        self.lag = [0.0]

    def answered(self, connection, call, status, body):
        self.took.append(1000 * (time.perf_counter() - call[0]))
        self.statuses[status] += 1
        self.bodies.append(body)
        self.left -= 1
        if connection.lost:
            self.open -= 1
        elif self.waiting:
            connection.send(self.waiting.popleft())
        else:
            self.idle.append(connection)

    async def send(self, due, request):
        while self.idle:
            if not (connection := self.idle.pop()).lost:
                return connection.send((due, request))
            self.open -= 1
        if self.open >= CONNECTIONS:
            return self.waiting.append((due, request))
        self.open += 1
        connection = Connection(self)
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: connection, "127.0.0.1", self.port
            )
            connection.send((due, request))
        except OSError:
            connection.lost = True
            self.answered(connection, (due, request), 0, b"")

    async def run(self, requests, rate):
        """Send all requests, the i-th i / rate seconds from now, and wait for their answers."""
        began = time.perf_counter() + 0.01
        for i, request in enumerate(requests):
            due = began + i / rate
            while (wait := due - time.perf_counter()) > 0:  # timers are of whole milliseconds
                await asyncio.sleep(wait - 0.0015 if wait > 0.002 or not self.spin else 0)
            if request is None:  # nothing to send at this moment
                continue
            self.left += 1
            self.lag.append(1000 * (time.perf_counter() - due))
            if self.idle or self.open >= CONNECTIONS:
                await self.send(due, request)
            else:
                asyncio.create_task(self.send(due, request))
        end = time.perf_counter() + 30
        while self.left and time.perf_counter() < end:
            await asyncio.sleep(0.01)
        self.statuses["lost"] += self.left
        return time.perf_counter() - began

    async def in_turn(self, requests, probe):
        """Send each request when the one before is answered, and call `probe` after those of a
        campaign.
        """
        for count, request in enumerate(requests, 1):
            self.left += 1
            await self.send(time.perf_counter(), request)
            while len(self.took) < count:
                await asyncio.sleep(0)
            if count % (HORIZON - 1) == 0:
                probe()
        return sum(self.took) / 1000


class ClosedLoop:
    """Connections that each send their next request when the one before is answered.

    Args:
        port: of the server.
        requests: an iterator of requests for each connection.
        worth: what one answer counts.
        is_answer: (status, body) -> whether it is an answer; any other ends the loop with an error.
        seconds: that are counted, after WARM.
    """

    def __init__(self, port, requests, worth, is_answer, seconds):
        self.port = port
        self.requests = requests
        self.worth = worth
        self.is_answer = is_answer
        self.seconds = seconds
        self.count = 0
        self.left = len(requests)
        self.next_of = {}
        self.refused = None

    def answered(self, connection, call, status, body):
        now = time.perf_counter()
        if not self.is_answer(status, body):
            self.refused = status, body[:300]
            return
        if self.begin <= now < self.begin + self.seconds:
            self.count += self.worth
        if now < self.begin + self.seconds:
            connection.send((now, next(self.next_of[connection])))
        else:
            self.left -= 1

    async def run(self):
        """Answers of one second."""
        self.begin = time.perf_counter() + WARM
        for requests in self.requests:
            connection = Connection(self)
            self.next_of[connection] = requests
            await asyncio.get_running_loop().create_connection(
                lambda connection=connection: connection, "127.0.0.1", self.port
            )
            connection.send((0.0, next(requests)))
        while self.left and self.refused is None:
            await asyncio.sleep(0.05)
        assert self.refused is None, self.refused
        return self.count / self.seconds


def ticks_per_second(port, seconds):
    """Ticks of new campaigns that a server answers in a closed loop, TOGETHER in a request."""
    ids = opened(port, TURNS * TOGETHER)
    known = [[json.dumps(drawn(kind, step)) for step in range(HORIZON)] for kind in range(8)]
    of_connections = []
    for first in range(TURNS):
        requests = []
        for step in range(HORIZON):
            ticks_of = [f'"{id}": {known[i % 8][step]}' for i, id in enumerate(ids[first::TURNS])]
            body = f'{{"ticks": {{{", ".join(ticks_of)}}}}}'
            requests.append(http("/v1/ticks", body.encode()))
        of_connections.append(iter(requests))

    def is_answer(status, body):
        return status == 200 and body.count(b'"fallback": null') == TOGETHER

    return run(ClosedLoop(port, of_connections, TOGETHER, is_answer, seconds).run())


def bids_per_second(port, requests, seconds):
    """Bid requests that a server answers in a closed loop, these again and again."""
    of_connections = [cycle(requests[first::TURNS]) for first in range(TURNS)]

    def is_answer(status, body):
        return status in (200, 204)  # of 204 there is no bid

    return run(ClosedLoop(port, of_connections, 1, is_answer, seconds).run())


class Server:
    """`decisionllm serve` as a process on these cores, with a journal of its own.

    checkout: folder of the package; None: this one.
    """

    def __init__(self, run, folder, cores, words, checkout=None):
        command = [
            sys.executable,
            "-m",
            "decisionllm",
            "serve",
            f"run={run}",
            f"journal={folder}/journal.sqlite",
            *words,
        ]
        pinned = ["taskset", "-c", cores, *command] if cores else command
        environment = None
        if checkout is not None:
            environment = os.environ | {"PYTHONPATH": str(checkout)}
        self.process = subprocess.Popen(
            pinned,
            text=True,
            stdout=subprocess.PIPE,
            cwd=checkout,
            env=environment,
            encoding="utf-8",
        )
        line = self.process.stdout.readline()
        assert " on http://" in line, "the server did not start"
        self.port = int(line.split(" on http://")[1].split(",")[0].split()[0].rpartition(":")[2])
        answers = 0
        while answers < 20:  # of all replicas
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=60):
                    answers += 1
            except OSError:
                answers = 0
                assert self.process.poll() is None, "the server ended"
            time.sleep(0.05)

    def cpu(self):
        """CPU seconds of the process and its children."""
        known = subprocess.run(
            ["ps", "--ppid", str(self.process.pid), "-o", "pid="],
            capture_output=True,
            text=True,
            encoding="utf-8",
        ).stdout.split()
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            for pid in (self.process.pid, *known)
        )
        return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")

    def stop(self):
        self.process.terminate()
        return self.process.wait(60)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def run(work):
    """The result of a coroutine, in the faster loop."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def http(path, body, method="POST", token=""):
    """The bytes of a request."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: 127.0.0.1",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    if token:
        lines.append(f"authorization: Bearer {token}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def played(port, requests, rate=500):
    """The answers to these requests, as they come."""
    client = Client(port)
    run(client.run(requests, rate))
    assert not set(client.statuses) - {200, 201, "lost"} and not client.statuses["lost"], (
        client.statuses
    )
    return client.bodies


def opened(port, count, horizon=HORIZON, token=""):
    """Ids of new campaigns."""
    requests = []
    for i in range(count):
        settings = {
            "budget": 1e9,
            "target_cpa": 60.0 + i % 70,
            "category": i % 6,
            "horizon": horizon,
        }
        requests.append(http("/v1/campaigns", json.dumps(settings).encode(), token=token))
    return [json.loads(body)["id"] for body in played(port, requests)]


def ticks(ids, count, first=0):
    """Ticks of these campaigns in turn, `count` in all, from this step on."""
    known = [
        [json.dumps(drawn(kind, step)).encode() for step in range(HORIZON)] for kind in range(8)
    ]
    return [
        http(f"/v1/campaigns/{ids[i % len(ids)]}/tick", known[i % 8][first + i // len(ids)])
        for i in range(count)
    ]


def requests_of(kind, port, count, campaigns):
    """The requests of a kind, made before the clock starts; campaigns are opened and have had a
    tick.
    """
    if kind == "one":
        ids = opened(port, max(count // (HORIZON - 1), 1))
        played(port, ticks(ids, len(ids)))
        return [request for id in ids for request in ticks([id], HORIZON - 1, 1)]
    if kind == "ticks":
        ids = opened(port, max(campaigns, count // (HORIZON - 3) + 1))
        played(port, ticks(ids, len(ids)))
        return ticks(ids, min(count, (HORIZON - 1) * len(ids)), 1)
    rng = np.random.default_rng(0)
    if kind == "act":
        info = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/model"))
        seen = rng.normal(10, 5, (24, info["spec"]["observation_dim"])).round(4).tolist()
        body = {"observations": seen, "actions": [[50.0]] * 23, "rewards": [1.0] * 23}
        return [http("/v1/act", json.dumps(body).encode())] * count
    if kind == "bid":
        ids, n = opened(port, count), OPPORTUNITIES
        values = rng.uniform(0, 1e-3, n).tolist()
        last = {
            "historyPValueInfo": [np.stack([values, rng.uniform(0, 1e-4, n)], 1).tolist()],
            "historyBid": [rng.uniform(0, 0.1, n).tolist()],
            "historyAuctionResult": [[[1, 1, 0.03]] * n],
            "historyImpressionResult": [[[1, 0]] * n],
            "historyLeastWinningCost": [rng.uniform(0, 0.1, n).tolist()],
        }
        text = json.dumps({"pValues": values} | last)[1:]
        played(
            port,
            [
                http(
                    "/v1/bid",
                    json.dumps({"campaign": id, "timeStepIndex": 0, "pValues": [1e-3]}).encode(),
                )
                for id in ids
            ],
        )
        return [
            http("/v1/bid", f'{{"campaign": "{id}", "timeStepIndex": 1, {text}'.encode())
            for id in ids
        ]
    ids = opened(port, campaigns)
    played(port, ticks(ids, len(ids)))
    parts = [
        {
            "id": "1",
            "bidfloor": 0.0,
            "bidfloorcur": "USD",
            "banner": {"w": 300, "h": 250},
            "ext": {"value": v},
        }
        for v in rng.uniform(0, 1e-3, 8)
    ]
    return [
        http(
            "/openrtb/2.6/bid",
            json.dumps(
                {
                    "id": f"r{i}",
                    "at": 2,
                    "tmax": 80,
                    "cur": ["USD"],
                    "imp": [parts[i % 8]],
                    "bcat": ["IAB25", "IAB26"],
                    "site": {"id": "102855", "domain": "www.example.com", "cat": ["IAB15"]},
                    "device": {"ip": "192.0.2.1", "os": "iOS", "language": "en"},
                    "user": {"id": "55816b39711f9b5acf3b90e313ed29e51665623f"},
                    "ext": {"campaign": ids[i % len(ids)]},
                }
            ).encode(),
        )
        for i in range(count)
    ]


def measure(kind, rate, server, options):
    """One row: latencies from the intended moment, at this rate."""
    count = int(rate * options.seconds) if rate else ROUNDS * (HORIZON - 1)
    requests = requests_of(kind, server.port, count, options.campaigns)
    loops = [seconds_of_a_loop(options.cores)]
    client = Client(server.port, spin=not options.replicas > 1)
    cpu = server.cpu()
    if kind == "one":
        took = run(client.in_turn(requests, lambda: loops.append(seconds_of_a_loop(options.cores))))
        rate = len(requests) / took
    else:
        took = run(client.run(requests, rate))
        loops.append(seconds_of_a_loop(options.cores))
    cpu, loops = server.cpu() - cpu, np.array(loops)
    parts = np.array_split(client.took, len(loops) - 1)  # each between two measurements of the core
    slower = np.maximum(loops[:-1], loops[1:])
    quiet = np.concatenate(
        [part for part, seconds in zip(parts, slower, strict=True) if seconds < 1.15 * loops.min()]
        or [[]]
    )
    p50, p99, most = (float(np.percentile(client.took, q)) for q in (50, 99, 100))
    return {
        "benchmark": "load",
        "case": kind,
        "rate": round(rate),
        "p50": p50,
        "p99": p99,
        "max": most,
        "unit": "ms",
        "late": float(np.mean(np.array(client.took) > LATE[kind])),
        "late_after": LATE[kind],
        "client_lag": max(client.lag),
        "speed_ms": 1000 * loops.max(),
        "sent": len(requests),
        "answered": len(requests) / took,
        "statuses": {str(k): v for k, v in client.statuses.items() if v},
        "fallbacks": sum(b'"fallback": "' in body for body in client.bodies),
        "cpu": 1000 * cpu / len(requests),
        "full_speed_ms": 1000 * loops.min(),
        "p50_at_full_speed": float(np.median(quiet)) if len(quiet) else None,
        "share_at_full_speed": len(quiet) / len(client.took),
    }


def seconds_of_a_loop(cores):
    """Time a fixed loop now on the slowest of the server's cores, which others may share;
    of none, on any.
    """
    if not cores:
        return min(timeit.repeat("sum(i * i for i in range(500_000))", number=1, repeat=3))
    mine, took = os.sched_getaffinity(0), []
    for core in map(int, cores.split(",")):
        os.sched_setaffinity(0, {core})
        took.append(seconds_of_a_loop(""))
    os.sched_setaffinity(0, mine)
    return max(took)


def figure(path):
    """Latency and late share against rate; of a rate that was measured repeatedly, the row that the
    machine disturbed least.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    shown = [kind for kind in RATES if any(row["case"] == kind for row in rows)]
    made = Figure(figsize=(3.2 * len(shown), 5.4), layout="constrained")
    labels = list(dict.fromkeys(row["label"] for row in rows))
    colors = {label: f"C{i}" for i, label in enumerate(labels)}  # the same in all panels
    for column, kind in enumerate(shown):
        above, below = (
            made.add_subplot(2, len(shown), 1 + column + k * len(shown)) for k in (0, 1)
        )
        for label in dict.fromkeys(row["label"] for row in rows if row["case"] == kind):
            best = {}
            for row in rows:
                if (row["case"], row["label"]) == (kind, label) and row["p99"] < best.get(
                    row["rate"], {"p99": np.inf}
                )["p99"]:
                    best[row["rate"]] = row
            part = [
                (rate, row["p50"], row["p99"], 100 * row["late"])
                for rate, row in sorted(best.items())
            ]
            rate, p50, p99, late = zip(*part, strict=True)
            shape = {"marker": "o", "markersize": 3, "color": colors[label]}
            above.plot(rate, p99, label=label, **shape)
            above.plot(rate, p50, linestyle=":", color=colors[label])
            below.plot(rate, late, **shape)
        above.set(
            title=kind, yscale="log", ylabel="ms from the intended moment" if not column else ""
        )
        below.set(
            xlabel="requests a second", ylabel=f"% later than {LATE[kind]:g} ms", ylim=(-2, 102)
        )
    # below the panels, whose curves it would hide
    lines = {}
    for axis in made.axes:
        handles, names = axis.get_legend_handles_labels()
        lines |= dict(zip(names, handles, strict=True))
    title = "full: 99 of 100 answers are faster; dotted: half of them"
    made.legend(lines.values(), lines, loc="outside lower center", ncols=len(lines), title=title)
    # the same bytes whenever it is drawn
    with rc_context({"svg.hashsalt": "decisionllm"}):
        made.savefig(path, metadata={"Date": None})


def main():
    gc.disable()  # a collection would delay requests
    parser = argparse.ArgumentParser(prog="python -m lab.load", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--kinds", nargs="+", default=["ticks", "openrtb", "act", "bid", "one"], choices=LATE
    )
    parser.add_argument(
        "--rates", nargs="+", type=float, help="a second; by default some of each kind"
    )
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--campaigns", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--cores", default="1", help="of the server; empty: any")
    parser.add_argument("--words", nargs="*", default=[], help="options of `decisionllm serve`")
    parser.add_argument("--label", default="one core")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--out", type=Path, default=ROWS)
    options = parser.parse_args()
    machine = {
        "label": options.label,
        "replicas": options.replicas,
        "campaigns": options.campaigns,
        "command": " ".join(sys.argv[1:]),
        "versions": directory.versions(),
    }
    if options.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(
            0, os.sched_getaffinity(0) - {int(core) for core in options.cores.split(",")}
        )
    for kind in options.kinds:
        # the journal on a true disk
        with tempfile.TemporaryDirectory(dir=options.out.parent) as folder:
            port = [
                f"port={8900 + os.getpid() % 1000}" if options.replicas > 1 else "port=0",
                f"replicas={options.replicas}",
            ]
            server = Server(options.run, folder, options.cores, [*port, *options.words])
            try:
                for rate in (options.rates or RATES[kind]) if kind != "one" else [0]:
                    row = (
                        measure(kind, rate, server, options)
                        | {"load": os.getloadavg()[0]}
                        | machine
                    )
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                    print(
                        "{case} {rate}/s: p50 {p50:.2f} p99 {p99:.2f} max {max:.1f} ms (client "
                        "{client_lag:.1f}, machine {speed_ms:.0f}), late {late:.2%}, "
                        "{statuses}, fallbacks {fallbacks}, "
                        "answered {answered:.0f}/s, CPU {cpu:.2f} ms; at full speed ({full_speed_ms:.0f}) p50 {p50_at_full_speed}".format(
                            **row
                        ),
                        flush=True,
                    )
            finally:
                server.stop()
    if options.figure:
        figure(options.figure)


if __name__ == "__main__":
    main()
