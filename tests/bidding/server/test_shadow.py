"""A shadow policy decides on the answered ticks as it would alone; it changes no answer, and what
it decided outlives the server.
"""

import threading
import time

import numpy as np
import pytest

from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.bidding.server.app import create_app
from decisionllm.bidding.server.shadow import Shadow
from tests.bidding.server.in_process import CampaignManager
from tests.bidding.server.test_campaigns import SPEC, STEPS, drawn, play, policy_of
from tests.bidding.server.test_campaigns import settings as settings_of
from tests.bidding.server.test_http import MODEL_INFO, serving
from tests.conftest import PATIENCE, near

pytestmark = pytest.mark.numeric


def other():
    """A second policy with other weights."""
    policy = policy_of(target_return=2.0)
    for weight in policy.model.head.parameters():
        weight.data.neg_()
    return policy


def shadow_of(journal, policy=None, **options):
    return Shadow(
        policy or other(), SPEC, journal, SPEC, name="other", cache_bytes=10**7, **options
    )


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def ticked(client, id, steps):
    return [
        client.post(f"/v1/campaigns/{id}/tick", json=drawn(0, t))
        .raise_for_status()
        .json()["multiplier"]
        for t in steps
    ]


def test_it_decides_as_it_would_alone_and_changes_no_answer(tmp_path):
    alone = play(CampaignManager(policy_of(), SPEC))[0]
    journal = Journal(tmp_path / "j")
    shadow = shadow_of(journal)
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, journal, shadow=shadow)) as client:
        id = client.post("/v1/campaigns", json=settings_of(0)).json()["id"]
        answered = ticked(client, id, range(6))
        repeated = ticked(client, id, [5])
        until(lambda: shadow.counts["decided"] == 6 and not shadow.waiting)
        rows = client.get(f"/v1/campaigns/{id}").json()["ticks"]
        text = client.get("/metrics").text
    assert answered == alone[:6].tolist() and repeated == answered[5:]
    manager, expected = CampaignManager(other(), SPEC), []
    same = manager.open(**settings_of(0))
    for t in range(6):  # its own bids, after the actions that were answered
        expected.append(manager.tick(same, **drawn(0, t))["multiplier"])
        manager.campaigns[same].actions[t] = answered[t]
    result = [row["shadow"]["multiplier"] for row in rows]
    near(result, expected, scale=300.0)
    assert np.abs(np.array(result) - answered).min() > 1
    assert (
        'decisionllm_shadow_ticks_total{outcome="decided"} 6.0' in text
        and "decisionllm_shadow_difference_count 6.0" in text
    )
    assert f"decisionllm_shadow_higher_total {float(np.greater(result, answered).sum())}" in text
    journal = Journal(tmp_path / "j")  # after a restart it goes on
    shadow = shadow_of(journal)
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, journal, shadow=shadow)) as client:
        assert ticked(client, id, [6]) == alone[6:7].tolist()
        until(lambda: shadow.counts["decided"] == 1)
        rows = client.get(f"/v1/campaigns/{id}").json()["ticks"]
    assert [row["shadow"]["multiplier"] for row in rows[:6]] == result and rows[6]["shadow"]


def test_a_failing_shadow_touches_no_answer(tmp_path, caplog):
    alone = play(CampaignManager(policy_of(), SPEC))[0]
    journal = Journal(tmp_path / "j")
    shadow = shadow_of(journal)
    shadow.manager.decide = lambda requests: [ValueError("broken")]
    with serving(create_app(policy_of(), MODEL_INFO, SPEC, journal, shadow=shadow)) as client:
        id = client.post("/v1/campaigns", json=settings_of(0)).json()["id"]
        assert ticked(client, id, range(3)) == alone[:3].tolist()
        until(lambda: shadow.counts["failed"] == 3)
        del shadow.manager.decide  # every attempt raises now
        assert ticked(client, id, [3]) == alone[3:4].tolist()
        until(lambda: shadow.counts["failed"] == 4)
        shadow.file.execute("DROP TABLE decisions")
        assert [row["shadow"] for row in client.get(f"/v1/campaigns/{id}").json()["ticks"]] == [
            None
        ] * 4


def test_under_load_its_decisions_are_dropped_first():
    shadow = shadow_of(Journal(), max_queue=2)
    waiting = threading.Event()
    with shadow.run(lambda: not waiting.is_set()):  # ticks wait for their answers all the time
        for index in range(5):
            shadow.offer("id", drawn(0, index), '{"multiplier": 1.0}')
        shadow.offer("id", {"coming": None}, "")
        time.sleep(0.05)
        assert len(shadow.waiting) == 2 and shadow.counts == {"dropped": 3}
    assert shadow.counts == {"dropped": 5}


def test_it_observes_by_its_own_specification():
    journal = Journal()
    CampaignManager(policy_of(), SPEC, journal).open(**settings_of(0) | {"target_return": 7.0})
    (entries,) = journal.campaigns()
    seen = ObservationSpec("auctionnet", "progress", "expected_value", "constant")

    def replayed(observation, answering):
        shadow = Shadow(other(), observation, journal, answering, name="other")
        return shadow.manager.replay(entries["id"], shadow.changed, until=0)

    campaign = replayed(seen, SPEC)
    assert (
        "category" in entries["text"]
        and "category" not in campaign.task
        and campaign.settings["target_return"] == 7.0
    )
    campaign = replayed(ObservationSpec(*SPEC.info().values()), seen)
    assert campaign.task == entries["text"] and campaign.settings["horizon"] == STEPS
    counted = ObservationSpec("auctionnet", "progress", "conversions", "informative")
    campaign = replayed(counted, SPEC)
    assert campaign.settings["target_return"] is None, "it was given in other units"


def test_a_file_of_something_else_is_refused(tmp_path):
    journal = Journal(tmp_path / "j")
    (tmp_path / "j.shadow").write_bytes(b"something else" * 1000)
    with pytest.raises(
        ValueError,
        match="shadow: expected a file to write, or one of an earlier shadow, got .*j.shadow",
    ):
        shadow_of(journal)
