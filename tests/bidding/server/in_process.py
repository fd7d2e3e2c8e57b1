"""A campaign manager for callers in this process, who wait for each answer: the reference of tests
and benchmarks.
"""

import json

from decisionllm.bidding.market.campaigns import STEPS
from decisionllm.bidding.server import campaigns


class CampaignManager(campaigns.CampaignManager):
    def open(self, *, key=None, **settings):
        """Open a campaign of these SETTINGS, budget and target_cpa at least. Returns its id."""
        return at_once(
            self.open_async({"category": 0, "horizon": STEPS} | settings, key, self._write)
        )["id"]

    def tick(self, id, *, index, coming, result=None, key=""):
        """What to bid in step `index`, see `schemas.Tick`."""
        request = {"index": index, "key": key, "result": result, "coming": coming}
        return json.loads(at_once(self.tick_async(id, request, self._decide, self._write)))

    def close(self, id):
        """End a campaign. Its ticks stay in the journal."""
        at_once(self.close_async(id, self._write))

    async def _decide(self, request):
        return self.decide([request])[0]

    async def _write(self, entries):
        return self.journal.write(entries)[0]


def at_once(work):
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")
