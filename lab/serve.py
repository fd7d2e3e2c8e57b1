"""Ticks of campaigns through the server's service, journal on the disk included: a warm cache
against full windows.

`python -m lab.serve [tiny base] [--ticks 24] [--out serve.jsonl]`. Random weights of the
true shapes, the window the whole day, a task text, both paths the same requests in turn, wall time,
and where it says so CPU time, which the neighbours do not disturb. Rows: a tick of one campaign by
itself; 48 campaigns that tick at once against one at a time; for the smallest, the same over HTTP
on this machine. Minutes and, for `base` (0.5B), gigabytes: no test.
"""

import argparse
import asyncio
import http.client
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks import measure
from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.bidding.server.app import create_app
from decisionllm.bidding.server.campaigns import CampaignManager
from decisionllm.bidding.server.models import Model, Models
from decisionllm.bidding.server.service import Service
from decisionllm.models.sequence import SequenceModel
from decisionllm.policy.policy import Policy
from decisionllm.registry import build, discover
from decisionllm.runs import directory
from decisionllm.schema import Spec

ROWS = Path(__file__).parent / "rows" / "serve.jsonl"
OBSERVED = ObservationSpec("minimal", "budget_and_cpa", "expected_value", "informative")
SPEC = Spec(observation_dim=7, action_dim=1, horizon=48, low=(0.0,), high=(300.0,))
MODEL_INFO = {"run": "random", "model": "random", "dataset": "none", "fingerprint": "none"}
CAMPAIGNS = 48


def policy_of(backbone, dtype):
    choices = discover()
    torch.manual_seed(0)
    model = SequenceModel(
        SPEC,
        build(choices["backbone"][backbone], 0),
        choices["head"]["gaussian"],
        choices["tokenizer"]["trajectory"] | {"timesteps": "none"},
    )
    model.normalizer.fit(
        [
            (
                np.random.default_rng(0).normal(50, 50, (100, 7)).astype(np.float32),
                np.linspace(0, 40, 100),
            )
        ]
    )
    model.backbone.model.to(dtype)
    return Policy(model, 48, 24, 20.0)


def drawn(campaign, step):
    """A tick whose results are the same, whatever was bid."""
    rng = np.random.default_rng([campaign, step])
    result = {
        "bid": rng.uniform(0.01, 0.1),
        "market_price": rng.uniform(0.05, 0.2),
        "value": rng.uniform(0.0002, 0.001),
        "conversion": rng.uniform(0, 0.001),
        "won": rng.uniform(0, 0.1),
        "volume": 9000.0,
        "spend": rng.uniform(0, 50),
        "conversions": float(rng.integers(4)),
        "exposed_value": rng.uniform(0, 2),
    }
    coming = {"value": rng.uniform(0.0002, 0.001), "volume": float(rng.integers(5000, 20000))}
    return {
        "index": step,
        "key": f"{campaign}-{step}",
        "result": result if step else None,
        "coming": coming,
    }


def settings(campaign):
    return {
        "budget": 3000.0,
        "target_cpa": 60.0 + campaign,
        "category": campaign % 6,
        "horizon": 48,
        "text": None,
    }


class Side:
    """A campaign manager with its journal, campaigns ticked in one way, and the seconds of each
    answer.
    """

    def __init__(self, policy, folder, name, cache):
        journal = Journal(Path(folder) / f"{name}.sqlite")
        self.manager = CampaignManager(
            policy, OBSERVED, journal, cache_bytes=cache, max_campaigns=CAMPAIGNS
        )
        self.decided, decide = [], self.manager.decide  # CPU time of the model's thread

        def timed(requests):
            began = time.thread_time()
            made = decide(requests)
            self.decided.append(time.thread_time() - began)
            return made

        self.manager.decide = timed
        models = Models(Model(self.manager.name, "", policy, self.manager))
        self.service = Service(models, deadline=60)
        self.ids = []
        self.now = []
        self.took = []
        self.bids = {}

    async def open(self, count, steps):
        """Campaigns of which so many steps are over, their answers given."""
        for i in range(count):
            id = (await self.service.open(settings(i)))["id"]
            entries = []
            campaign = self.manager.replay(id)
            for t in range(steps):
                request = drawn(i, t)
                answer = {"index": t, "multiplier": 50.0 + t}
                entries.append(
                    (
                        "INSERT INTO ticks VALUES (?, ?, ?, ?)",
                        (id, t, json.dumps(request, sort_keys=True), json.dumps(answer)),
                    )
                )
            self.manager.journal.write(entries)
            self.manager.campaigns.pop(campaign.id, None)
            self.ids.append(id)
            self.now.append(steps)

    async def tick(self, i):
        request = drawn(i, self.now[i])
        self.now[i] += 1
        began = time.perf_counter(), time.process_time()
        answer = json.loads(await self.service.tick(self.ids[i], request))
        self.took.append((time.perf_counter() - began[0], time.process_time() - began[1]))
        assert answer["fallback"] is None and not answer["guards"], answer
        self.bids[i, answer["index"]] = answer["multiplier"]


def row(case, unit, ours, peer, target=None, **more):
    """Times of both, in ms -> a row: medians, their ratio, the hundredth that took longest."""
    mine = statistics.median(ours)
    theirs = statistics.median(peer)
    far = {"p99": float(np.percentile(ours, 99)), "peer_p99": float(np.percentile(peer, 99))}
    ratio = theirs / mine
    met = None if target is None else ratio >= target
    return (
        {
            "benchmark": "serve",
            "case": case,
            "unit": unit,
            "ours": mine,
            "peer": theirs,
            "ratio": ratio,
            "target": target,
            "limit": None,
            "met": met,
            "spread": measure.spread(peer),
            "noisy": measure.spread(peer) > measure.SPREAD,
            "rounds": len(peer),
        }
        | far
        | more
    )


async def alone(policy, folder, name, ticks):
    """One campaign, tick by tick, both ways in turn."""
    sides = [
        Side(policy, folder, f"{name}-{kind}", cache)
        for kind, cache in (("cached", 10**9), ("plain", 0))
    ]
    async with sides[0].service.run(), sides[1].service.run():
        for side in sides:
            await side.open(1, 0)
        for t in range(ticks):
            for side in sides[:: 1 if t % 2 else -1]:
                await side.tick(0)
    cached, plain = sides
    wrong = max(abs(cached.bids[at] - bid) / bid for at, bid in plain.bids.items())
    # the first tick reads the text, and there is little to read again in the first ones
    warm = slice(ticks // 4, None)
    wall, cpu = ([[1000 * x[kind] for x in side.took[warm]] for side in sides] for kind in (0, 1))
    return [
        row(f"{name}, a tick, cache warm", "ms/tick", *wall, target=3, largest_difference=wrong),
        row(f"{name}, a tick, cache warm, CPU time", "ms/tick", *cpu, target=3),
        row(
            f"{name}, its decision, CPU time",
            "ms/tick",
            *([1000 * x for x in side.decided[warm]] for side in sides),
            target=3,
        ),
    ]


async def together(policy, folder, name, step, rounds):
    """48 campaigns from this step on: all at once, one at a time, and one at a time the
    plain way.
    """
    at_once = Side(policy, folder, f"{name}-at-once", 10**9)
    in_turn = Side(policy, folder, f"{name}-in-turn", 10**9)
    plain = Side(policy, folder, f"{name}-in-turn-plain", 0)
    times = {at_once: [], in_turn: [], plain: []}
    async with at_once.service.run(), in_turn.service.run(), plain.service.run():
        for side, count in ((at_once, CAMPAIGNS), (in_turn, CAMPAIGNS), (plain, 8)):
            await side.open(count, step)
        for r in range(1 + rounds):
            for side in times:
                began = time.perf_counter()
                if side is at_once:
                    await asyncio.gather(*(side.tick(i) for i in range(CAMPAIGNS)))
                else:
                    for i in range(len(side.ids)):
                        await side.tick(i)
                if r:  # the first one warms the caches
                    times[side].append(1000 * (time.perf_counter() - began) / len(side.ids))
    ours = times[at_once]
    return [
        row(
            f"{name}, 48 campaigns at once, against one at a time", "ms/tick", ours, times[in_turn]
        ),
        row(
            f"{name}, 48 campaigns at once, against one at a time read again",
            "ms/tick",
            ours,
            times[plain],
            target=10,
        ),
    ]


class Client(http.client.HTTPConnection):
    """A connection that is kept, and costs little beside what it asks: JSON out, JSON back."""

    def post(self, path, body):
        self.request("POST", path, json.dumps(body).encode(), {"content-type": "application/json"})
        return json.loads(self.getresponse().read())


def over_http(policy, folder, name, ticks):
    """The same from a client of its own thread: one campaign, and 48 in one request against 48
    requests.
    """
    import uvicorn

    clients, servers = {}, []
    for kind, cache in (("cached", 10**9), ("plain", 0)):
        journal = Journal(Path(folder) / f"{name}-http-{kind}.sqlite")
        app = create_app(
            policy,
            MODEL_INFO,
            OBSERVED,
            journal,
            campaigns={"cache_bytes": cache, "max_campaigns": CAMPAIGNS},
            deadline=60.0,
        )
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.05)
        servers.append((server, thread))
        clients[kind] = Client("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
    try:
        ids = {
            kind: client.post("/v1/campaigns", settings(0))["id"]
            for kind, client in clients.items()
        }
        took = {kind: [] for kind in clients}
        for t in range(ticks):
            for kind, client in clients.items():
                began = time.perf_counter()
                answer = client.post(f"/v1/campaigns/{ids[kind]}/tick", drawn(0, t))
                took[kind].append(1000 * (time.perf_counter() - began))
                assert answer["fallback"] is None
        yield row(
            f"{name}, HTTP, a tick, cache warm",
            "ms/tick",
            *(x[ticks // 4 :] for x in took.values()),
            target=3,
        )
        client, one, many = clients["cached"], [], []
        ids = [client.post("/v1/campaigns", settings(i))["id"] for i in range(CAMPAIGNS)]
        for t in range(0, 16, 2):
            began = time.perf_counter()
            answers = client.post(
                "/v1/ticks", {"ticks": {id: drawn(i, t) for i, id in enumerate(ids)}}
            )
            many.append(1000 * (time.perf_counter() - began) / CAMPAIGNS)
            assert all(answer["index"] == t for answer in answers.values())
            began = time.perf_counter()
            for i, id in enumerate(ids):
                client.post(f"/v1/campaigns/{id}/tick", drawn(i, t + 1))
            one.append(1000 * (time.perf_counter() - began) / CAMPAIGNS)
        yield row(
            f"{name}, HTTP, 48 campaigns in one request, against one at a time",
            "ms/tick",
            many[1:],
            one[1:],
        )
    finally:
        for server, thread in servers:
            server.should_exit = True
            thread.join()


def main():
    parser = argparse.ArgumentParser(
        prog="python -m lab.serve", description=__doc__.splitlines()[0]
    )
    parser.add_argument("backbones", nargs="*", default=["tiny"])
    parser.add_argument("--ticks", type=int, default=48)
    parser.add_argument(
        "--rounds", type=int, default=5, help="of 48 campaigns; 0: one campaign alone"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--out", type=Path, default=ROWS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = {"load": os.getloadavg()[0], "versions": directory.versions()}
    # the journal on a true disk
    with tempfile.TemporaryDirectory(dir=options.out.parent) as folder:
        for backbone in options.backbones:
            policy = policy_of(backbone, getattr(torch, options.dtype))
            name = f"{backbone}, {options.dtype}"
            rows = asyncio.run(alone(policy, folder, name, options.ticks))
            rows += (
                asyncio.run(together(policy, folder, name, 24, options.rounds))
                if options.rounds
                else []
            )
            if backbone == "tiny" and options.rounds:
                rows += over_http(policy, folder, name, options.ticks)
            with options.out.open("a", encoding="utf-8") as file:
                for found in rows:
                    file.write(json.dumps(found | machine) + "\n")
                    print(
                        "{case}: {ours:.2f} {unit}, {peer:.2f}: {ratio:.1f} x; p99 {p99:.1f}, {peer_p99:.1f}".format(
                            **found
                        )
                    )


if __name__ == "__main__":
    main()
