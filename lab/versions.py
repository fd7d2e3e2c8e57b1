"""The server of this checkout against that of another checkout: ratios of short turns, taken in the
same minutes on the same machine.

`git worktree add ../before COMMIT`, then `python -m lab.versions RUN ../before`. Both servers
run with the packages of this environment and answer the same requests of the same client, one turn
after the other, and which one begins changes each time. Measured are ticks and bids a second in a closed
loop, the p99 of bids at a constant rate without and with a model that is switched all the time, and
the ticks a second of two replicas. A row of each ratio goes to versions.jsonl and is printed.

Where the other version does not read this one's runs, `--other-run` names one that it trained with
the same options. What it has no option for is left out: a version without `models_dir` is measured
without changes of the model.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import yaml

from lab import load

ROWS = Path(__file__).parent / "rows" / "versions.jsonl"
HERE = Path(__file__).parents[1]
WORDS = ("deadline_ms=60000", "max_campaigns=100000", "max_tick_age_s=1e9", "log=none")
SWITCHED = "p99 of bids while a model is switched"
# what both versions are compared by: measurement -> its unit
UNITS = {
    "ticks": "ticks/s",
    "bids": "bids/s",
    "p99 of bids": "ms",
    SWITCHED: "ms",
    "ticks of two replicas": "ticks/s",
}
RECORDED = ("rounds", "seconds", "rate", "campaigns", "cores")  # options that a row has
# what each version is compared with itself by: (measurement, the one it is divided by)
WITHIN = (
    (SWITCHED, "p99 of bids"),
    ("ticks of two replicas", "ticks"),
)


class Version:
    """The servers of one checkout: one process, one whose model is switched, and two replicas."""

    def __init__(self, checkout, run, folder, stack, options):
        self.checkout = checkout.resolve()
        self.commit = commit_of(self.checkout)
        self.options = options
        self.stack = stack
        known = yaml.safe_load(
            (self.checkout / "configs" / "serve.yaml").read_text(encoding="utf-8")
        )
        self.words = [word for word in WORDS if word.partition("=")[0] in known]
        self.switches = "models_dir" in known
        models = folder / "models"
        for name in ("a", "b"):
            shutil.copytree(run, models / name)
        self.one = self.server(run, folder / "one", options.cores)
        switched_words = [f"models_dir={models}"] if self.switches else []
        self.switched = self.server(
            models / "a", folder / "switched", options.cores, *switched_words
        )
        # of no core in particular: two processes and the client share those there are
        self.two = self.server(run, folder / "two", "", "replicas=2")
        self.count = max(int(options.rate * options.seconds), 10 * load.TURNS)
        self.bids = {
            server: load.requests_of("openrtb", server.port, self.count, options.campaigns)
            for server in (self.one, self.switched)
        }

    def server(self, run, folder, cores, *words):
        folder.mkdir(parents=True)
        given = [f"port={load.free_port()}", *self.words, *words]
        server = load.Server(run, folder, cores, given, checkout=self.checkout)
        self.stack.callback(server.stop)
        return server

    def measured(self, what):
        """One turn of a measurement."""
        seconds = self.options.seconds
        if what == "ticks":
            return load.ticks_per_second(self.one.port, seconds)
        if what == "ticks of two replicas":
            return load.ticks_per_second(self.two.port, seconds)
        if what == "bids":
            return load.bids_per_second(self.one.port, self.bids[self.one], seconds)
        return load.run(self.p99(switching=what == SWITCHED))

    async def p99(self, *, switching):
        """ms of bids at a constant rate, from the moment that they were due."""
        server = self.switched
        client = load.Client(server.port, spin=self.options.spin)
        over = asyncio.Event()
        work = [take_turns(server.port, over)] if switching else []
        operator = asyncio.gather(*work)
        await client.run(self.bids[server], self.options.rate)
        over.set()
        await operator
        answered = client.statuses[200] + client.statuses[204]  # of 204 there is no bid
        assert answered == self.count, client.statuses
        return float(np.percentile(client.took, 99))


async def take_turns(port, over):
    """Let each of two models take over from the other, again and again."""
    names = ["b", "a"]
    while not over.is_set():
        await asyncio.to_thread(take_over, port, names[0])
        names.reverse()


def take_over(port, run):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/models",
        json.dumps({"run": run, "campaigns": "move"}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def commit_of(checkout):
    git = ["git", "-C", checkout, "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(git, capture_output=True, text=True, encoding="utf-8").stdout.strip()


def turns(versions, rounds):
    """{(version, measurement): the numbers of its turns}; both versions in alternating order."""
    found = {(name, what): [] for name in versions for what in UNITS}
    for turn in range(rounds):
        order = list(versions)
        if turn % 2:
            order.reverse()
        for what in UNITS:
            for name in order:
                if what == SWITCHED and not versions[name].switches:
                    continue
                number = versions[name].measured(what)
                found[name, what].append(number)
                print(f"{turn + 1}/{rounds} {name}: {what} {number:.1f} {UNITS[what]}", flush=True)
    return found


def ratios(found):
    """A row of each comparison. ratio: the median of those of the turns."""
    rows = []
    for what, unit in UNITS.items():
        if found["other", what]:
            case = f"{what}, this / other"
            rows.append(ratio(case, unit, found["this", what], found["other", what]))
    for name in ("this", "other"):
        for upper, lower in WITHIN:
            if found[name, upper]:
                case = f"{upper} / {lower}, {name}"
                rows.append(ratio(case, UNITS[upper], found[name, upper], found[name, lower]))
    return rows


def ratio(case, unit, upper, lower):
    each = [a / b for a, b in zip(upper, lower, strict=True)]
    return {
        "benchmark": "versions",
        "case": case,
        "unit": unit,
        "upper": upper,
        "lower": lower,
        "ratio": statistics.median(each),
        "least": min(each),
        "largest": max(each),
    }


def main():
    parser = argparse.ArgumentParser(
        prog="python -m lab.versions", description=__doc__.splitlines()[0]
    )
    parser.add_argument("run", type=Path, help="of an auction")
    parser.add_argument("other", type=Path, help="another checkout, such as a git worktree")
    parser.add_argument(
        "--other-run", type=Path, help="that the other checkout serves; default RUN"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    parser.add_argument("--rate", type=float, default=500.0, help="bids a second, for their p99")
    parser.add_argument("--campaigns", type=int, default=200, help="that bid")
    parser.add_argument("--cores", default="1", help="of a server of one process; empty: any")
    parser.add_argument("--out", type=Path, default=ROWS)
    options = parser.parse_args()
    run = options.run.resolve()
    other_run = (options.other_run or run).resolve()
    options.spin = False
    if options.cores and hasattr(os, "sched_setaffinity"):
        free = os.sched_getaffinity(0) - {int(core) for core in options.cores.split(",")}
        if free:
            options.spin = True  # on cores of its own the client need not sleep
            os.sched_setaffinity(0, free)
    with ExitStack() as stack:
        # the journals on a true disk
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir=options.out.resolve().parent))
        )
        versions = {
            "this": Version(HERE, run, folder / "this", stack, options),
            "other": Version(options.other, other_run, folder / "other", stack, options),
        }
        rows = ratios(turns(versions, options.rounds))
    machine = {
        "commits": {name: version.commit for name, version in versions.items()},
        "load": os.getloadavg()[0],
        "options": {name: getattr(options, name) for name in RECORDED},
    }
    with options.out.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row | machine) + "\n")
            print("{case}: {ratio:.2f} ({least:.2f} .. {largest:.2f})".format(**row))


if __name__ == "__main__":
    main()
