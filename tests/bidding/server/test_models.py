"""Another model takes over while the server runs, for all campaigns or a share, and a restart keeps
to it.
"""

import json
import shutil
import signal
import socket
import sys
import threading
from collections import Counter
from functools import lru_cache

import numpy as np
import pytest
import torch
from filelock import FileLock

from decisionllm.bidding.journal.campaign_history import SETTINGS
from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.journal.rows import insert_campaign
from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.bidding.serve import load_run, serve
from decisionllm.bidding.server.app import create_app
from decisionllm.bidding.server.campaigns import CampaignManager, new_id
from decisionllm.bidding.server.model_folder import ModelFolder, parse_shares
from decisionllm.bidding.server.model_routes import ModelChanges
from decisionllm.bidding.server.models import Model, assign_model, set_share
from decisionllm.command_line import fill_defaults
from decisionllm.config import GROUPS
from decisionllm.runs import directory
from decisionllm.tokenizers.text import own_tokenizer
from tests.bidding.server.test_campaigns import SPEC, STEPS, drawn, policy_of
from tests.bidding.server.test_campaigns import settings as settings_of
from tests.bidding.server.test_http import begun, program, restarted, serving
from tests.conftest import PATIENCE

OTHER_SPEC = ObservationSpec("auctionnet", "progress", "expected_value", "constant")


@lru_cache
def policy_named(name):
    """A policy with weights of its own for each name."""
    policy = policy_of()
    torch.manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for weights in policy.model.parameters():
            weights += 0.1 * torch.randn_like(weights)
            if name == "broken":
                weights[...] = torch.nan
    return policy


class Server:
    """A server whose runs are folders `a`, `b`, ... with a journal."""

    def __init__(self, path):
        self.path = path
        self.runs = path / "runs"
        for name in ("a", "b", "c", "broken", "blind", "short"):
            (self.runs / name).mkdir(parents=True)
            (self.runs / name / "run.json").touch()
        (path / "secret").mkdir()
        (path / "secret" / "run.json").touch()
        (self.runs / "link").symlink_to(path / "secret")

    def model(self, path, journal):
        name = path.name
        spec = OTHER_SPEC if name == "blind" else SPEC
        horizon = STEPS - 1 if name == "short" else None
        policy = policy_named(name)
        manager = CampaignManager(
            policy, spec, journal, name=f"{name}@1", cache_bytes=10**7, horizon=horizon
        )
        info = {"run": name, "model": f"{name}@1", "dataset": "auction", "fingerprint": "f"}
        return Model(f"{name}@1", name, policy, manager, info)

    def app(self, run="a", shares=(), **options):
        journal = Journal(self.path / "j")
        folder = ModelFolder(
            self.runs,
            lambda path: self.model(path, journal),
            run=self.runs / run,
            choice_file=journal.sidecar_path("models"),
            shares=shares,
        )
        info = self.model(self.runs / run, journal).info
        campaigns = {"cache_bytes": 10**7}
        return create_app(
            policy_named(run),
            info,
            SPEC,
            journal,
            campaigns=campaigns,
            folder=folder,
            deadline=PATIENCE,
            **options,
        )


@pytest.fixture
def server(tmp_path):
    return Server(tmp_path)


def ticked(client, id, campaign, step):
    answer = client.post(f"/v1/campaigns/{id}/tick", json=drawn(campaign, step))
    answer.raise_for_status()
    assert answer.headers["x-model"] == answer.json()["model"]
    return answer.json()


def taken(client, run, **more):
    answer = client.post("/v1/models", json={"run": run} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def alone(name, campaign, steps):
    """The answers of one model to a campaign that it has alone."""
    from tests.bidding.server.in_process import CampaignManager

    manager = CampaignManager(policy_named(name), SPEC, name=f"{name}@1", cache_bytes=10**7)
    id = manager.open(**settings_of(campaign))
    return [manager.tick(id, **drawn(campaign, t)) for t in range(steps)]


@pytest.mark.numeric
def test_open_campaigns_keep_their_model_and_new_ones_have_the_other(server):
    with serving(server.app()) as client:
        old = begun(client, 0)
        first = [ticked(client, old, 0, t) for t in range(2)]
        response = taken(client, "b")
        assert (response["checked"], response["moved"], response["before"]) == (1, 0, {"a@1": 1.0})
        new = begun(client, 0)
        retained = first + [ticked(client, old, 0, t) for t in range(2, 5)]
        others = [ticked(client, new, 0, t) for t in range(5)]
        for got, name in ((retained, "a"), (others, "b")):
            expected = [answer["multiplier"] for answer in alone(name, 0, 5)]
            assert {answer["model"] for answer in got} == {f"{name}@1"}
            np.testing.assert_allclose(
                [answer["multiplier"] for answer in got], expected, rtol=1e-5
            )
        assert retained[4]["multiplier"] != others[4]["multiplier"]
        listed = client.get("/v1/models").json()["models"]
        rows = [(row["model"], row["share"], row["open"]) for row in listed]
        assert rows == [("b@1", 1.0, 1), ("a@1", 0.0, 1)]
        assert client.get("/v1/model").json()["model"] == "b@1"
        assert client.get("/healthz").headers["x-model"] == "b@1"
        both = client.post("/v1/ticks", json={"ticks": {old: drawn(0, 5), new: drawn(0, 5)}})
        assert both.headers["x-model"] in ("a@1, b@1", "b@1, a@1")
        metrics = client.get("/metrics").text
        assert 'decisionllm_model_ticks_total{model="a@1"} 6.0' in metrics
        assert 'decisionllm_model_share{model="b@1"} 1.0' in metrics
        assert "decisionllm_bids_total 12.0" in metrics


@pytest.mark.numeric
def test_all_campaigns_move_between_two_ticks_and_back_again(server):
    """The other model answers as if the campaign were replayed for it."""
    with serving(server.app()) as client:
        ids = [begun(client, i) for i in range(3)]
        for i, id in enumerate(ids):
            ticked(client, id, i, 0)
        assert taken(client, "b", campaigns="move")["moved"] == 3
        before = client.app.state.service.manager.counts["rebuilt", ""]
        moved = [ticked(client, id, i, 1) for i, id in enumerate(ids)]
        assert {answer["model"] for answer in moved} == {"b@1"}
        after = client.app.state.service.manager.counts["rebuilt", ""]
        assert after == before, "they are handed over in memory"
        replayed = server.model(server.runs / "b", Journal(server.path / "j")).manager
        for i, id in enumerate(ids):
            campaign = replayed.replay_from_journal(id, until=1)
            request = drawn(i, 1)
            campaign = campaign.advance(request["result"], request["coming"])
            expected = policy_named("b").act([campaign.history()])[0, 0]
            assert moved[i]["multiplier"] == pytest.approx(float(expected), rel=1e-4)
        response = client.post("/v1/models/rollback", json={}).json()
        assert (response["moved"], response["before"]) == (3, None)
        assert {ticked(client, id, i, 2)["model"] for i, id in enumerate(ids)} == {"a@1"}
        assert [row["model"] for row in response["models"]] == ["a@1"], "b answers nothing any more"
        again = client.post("/v1/models/rollback", json={})
        assert (again.status_code, again.json()["detail"][0]["loc"]) == (409, ["body", "models"])


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_change_that_is_sent_twice_is_rolled_back_once(server, share):
    with serving(server.app(shares=["a:0.2", "c:0.4", "b:0.4"])) as client:
        for _ in range(2):
            response = taken(client, "b", share=share)
            assert response["before"] == {"a@1": 0.2, "c@1": 0.4, "b@1": 0.4}
        response = client.post("/v1/models/rollback", json={}).json()
        shares = {row["model"]: row["share"] for row in response["models"]}
        assert shares == {"a@1": 0.2, "c@1": 0.4, "b@1": 0.4}


def test_a_share_of_the_only_model_changes_nothing(server):
    with serving(server.app()) as client:
        assert taken(client, "a", share=0.5)["before"] is None
        assert client.post("/v1/models/rollback", json={}).status_code == 409


def test_a_rollback_may_leave_the_campaigns_where_they_are(server):
    with serving(server.app()) as client:
        taken(client, "b")
        id = begun(client)
        assert client.post("/v1/models/rollback", json={"campaigns": "keep"}).json()["moved"] == 0
        assert ticked(client, id, 0, 0)["model"] == "b@1"
        assert client.get(f"/v1/campaigns/{begun(client)}").json()["model"] == "a@1"


WRONG = {
    "../secret": "expected the name of a run in the folder of models",
    "link": "expected the name of a run in the folder of models",
    "none": "expected the name of a run in the folder of models",
    ".": "expected the name of a run in the folder of models",
    "\x00": "expected the name of a run in the folder of models",
    "a" * 500: "expected the name of a run in the folder of models",
    "blind": "expected a run that observes",
    "short": "expected a run of at least 12 steps, got 11",
    "broken": "is not finite",
}


@pytest.mark.parametrize("run", WRONG, ids=range(len(WRONG)))
def test_a_run_that_cannot_take_over_is_refused_and_the_old_one_goes_on(server, run):
    with serving(server.app()) as client:
        id = begun(client)
        ticked(client, id, 0, 0)
        for name in (run, str(server.path / "secret")):
            answer = client.post("/v1/models", json={"run": name})
            assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, ["body", "run"])
            assert str(server.path) not in answer.text.replace(name, "")
        answer = client.post("/v1/models", json={"run": run})
        assert WRONG[run] in answer.json()["detail"][0]["msg"]
        assert ticked(client, id, 0, 1)["model"] == "a@1"
        assert len(client.get("/v1/models").json()["models"]) == 1


def test_a_run_whose_files_are_broken_is_refused(server, monkeypatch):
    app = server.app()
    monkeypatch.setattr(server, "model", lambda *_: 1 / 0)
    with serving(app) as client:
        answer = client.post("/v1/models", json={"run": "b"})
        assert answer.status_code == 422
        assert "b: it cannot be loaded: division by zero" in answer.json()["detail"][0]["msg"]


def test_a_run_that_names_code_of_its_own_is_refused(server, tmp_path, monkeypatch):
    """Its module is not imported, and the request can't name it as trusted."""
    (tmp_path / "trap.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    own = server.model

    def read(path, journal):
        return own(path, journal) if path.name == "a" else load_run(path)

    monkeypatch.setattr(server, "model", read)
    with serving(server.app()) as client:
        for group in GROUPS:
            config = {group: {"_target_": "trap.spring"}}
            (server.runs / "b" / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
            (server.runs / "b" / "run.json").write_text(
                json.dumps({"format": directory.FORMAT}), encoding="utf-8"
            )
            answer = client.post("/v1/models", json={"run": "b"})
            assert answer.status_code == 422 and "trap.spring" in answer.text
        more = {"run": "b", "trust": ["trap"]}
        assert client.post("/v1/models", json=more).status_code == 422
    assert "trap" not in sys.modules


def test_a_restart_goes_on_with_the_last_choice(server):
    with serving(server.app()) as client:
        old = begun(client, 0)
        ticked(client, old, 0, 0)
        taken(client, "b")
        new = begun(client, 1)
        ticked(client, new, 1, 0)
    with serving(server.app()) as client:
        assert client.get("/v1/model").json()["model"] == "b@1"
        assert ticked(client, old, 0, 1)["model"] == "a@1"
        assert ticked(client, new, 1, 1)["model"] == "b@1"
        assert client.post("/v1/models/rollback", json={}).json()["moved"] == 1
    with serving(server.app()) as client:
        assert client.get("/v1/model").json()["model"] == "a@1"
        assert ticked(client, new, 1, 2)["model"] == "a@1"


def test_another_command_line_counts_and_its_campaigns_are_answered(server, caplog):
    with serving(server.app()) as client:
        taken(client, "b")
        id = begun(client)
        ticked(client, id, 0, 0)
    with serving(server.app("c")) as client:
        assert "the command line changed" in caplog.text
        assert client.get("/v1/model").json()["model"] == "c@1"
        assert ticked(client, id, 0, 1)["model"] == "b@1"


def test_a_choice_that_cannot_be_served_stops_the_start(server):
    with serving(server.app()) as client:
        taken(client, "b")
    (server.runs / "b" / "run.json").unlink()
    with pytest.raises(ValueError, match="the last choice cannot be served .* put the run back"):
        server.app()
    (server.path / "j.models").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="the file of the last choice is damaged"):
        server.app()


def test_replicas_follow_a_change(server, monkeypatch):
    monkeypatch.setattr("decisionllm.bidding.server.watched_file.CHECK_EVERY", 0.02)
    with serving(server.app()) as first, serving(server.app()) as second:
        id = begun(first)
        ticked(first, id, 0, 0)
        ticked(second, id, 0, 1)
        taken(first, "b", campaigns="move")
        while second.get("/v1/model").json()["model"] != "b@1":
            pass
        assert ticked(second, id, 0, 2)["model"] == "b@1"
        assert ticked(first, id, 0, 3)["model"] == "b@1"
        second.post("/v1/models/rollback", json={}).raise_for_status()
        while first.get("/v1/model").json()["model"] != "a@1":
            pass
        assert ticked(first, id, 0, 4)["model"] == "a@1"


def test_a_change_begins_with_the_last_one_of_all_replicas(server, monkeypatch):
    monkeypatch.setattr("decisionllm.bidding.server.watched_file.CHECK_EVERY", 3600)
    with serving(server.app()) as first, serving(server.app()) as second:
        taken(first, "b")
        of_b = begun(first)
        assert taken(second, "c", share=0.5)["before"] == {"b@1": 1.0}
        response = first.post("/v1/models/rollback", json={}).json()
        assert {row["model"]: row["share"] for row in response["models"]} == {"b@1": 1.0}
        taken(second, "a", share=0.25)
    with serving(server.app()) as restarted:
        response = restarted.get("/v1/models").json()
        assert {row["model"]: row["share"] for row in response["models"]} == {
            "b@1": 0.75,
            "a@1": 0.25,
        }
        assert response["before"] == {"b@1": 1.0}
        assert ticked(restarted, of_b, 0, 0)["model"] == "b@1"


def test_replicas_make_one_change_at_a_time(server, monkeypatch):
    monkeypatch.setattr("decisionllm.bidding.server.model_routes.PATIENCE", 0.1)
    with serving(server.app()) as client:
        with FileLock(f"{server.path}/j.models.lock"):
            for path, body in (("", {"run": "b"}), ("/rollback", {})):
                answer = client.post(f"/v1/models{path}", json=body)
                assert answer.status_code == 409 and "another change" in answer.text
        assert taken(client, "b")["before"] == {"a@1": 1.0}


def test_a_change_waits_for_a_replica_that_follows_the_last_one(server, monkeypatch):
    monkeypatch.setattr("decisionllm.bidding.server.model_routes.PATIENCE", PATIENCE)
    lock = FileLock(f"{server.path}/j.models.lock", thread_local=False)
    with serving(server.app()) as client:
        lock.acquire()
        threading.Timer(0.3, lock.release).start()
        assert taken(client, "b")["before"] == {"a@1": 1.0}


def test_a_campaign_that_a_replica_opens_before_it_follows_is_moved(server, monkeypatch):
    monkeypatch.setattr("decisionllm.bidding.server.watched_file.CHECK_EVERY", 0.02)
    monkeypatch.setattr("decisionllm.bidding.server.watched_file.SETTLED_SECONDS", 3600)
    journal = Journal(server.path / "j")
    complete = dict.fromkeys(SETTINGS) | settings_of(0) | {"text": ""}
    with serving(server.app()) as client:
        taken(client, "b")
        client.post("/v1/models/rollback", json={}).raise_for_status()
        journal.write([insert_campaign("late", None, complete, "b@1")])
        while journal.campaign("late")["model"] != "a@1":
            pass
        assert ticked(client, "late", 0, 0)["model"] == "a@1"


def test_a_replica_that_follows_unloads_models_and_keeps_the_counts_of_their_caches(
    server, monkeypatch
):
    monkeypatch.setattr("decisionllm.bidding.server.watched_file.CHECK_EVERY", 0.02)

    def loaded(client):
        return {row["model"] for row in client.get("/v1/models").json()["models"]}

    with serving(server.app()) as first, serving(server.app()) as second:
        id = begun(second)
        for t in range(3):
            ticked(second, id, 0, t)
        second.delete(f"/v1/campaigns/{id}").raise_for_status()
        for run in ("b", "c"):
            taken(first, run)
            while second.get("/v1/model").json()["model"] != f"{run}@1":
                pass
        assert loaded(first) == {"b@1", "c@1"}
        while loaded(second) != {"b@1", "c@1"}:
            pass
        assert 'decisionllm_cache_total{event="hits"} 2.0' in second.get("/metrics").text


def test_a_change_of_another_replica_beside_one_that_fails_is_followed(server, monkeypatch):
    monkeypatch.setattr("decisionllm.bidding.server.watched_file.CHECK_EVERY", 0.02)
    monkeypatch.setattr("decisionllm.bidding.server.watched_file.SETTLED_SECONDS", 0.0)
    began, looked = threading.Event(), threading.Event()
    made, load = server.model, ModelChanges._load

    def slow(path, journal):
        if path.name == "c":
            began.set()
            assert looked.wait(PATIENCE)
            raise ValueError("no run")
        return made(path, journal)

    def noted(self, selected):
        if selected.choice == {"a@1": 1.0}:
            looked.set()
        return load(self, selected)

    with serving(server.app()) as first, serving(server.app()) as second:
        taken(first, "b")
        while second.get("/v1/model").json()["model"] != "b@1":
            pass
        monkeypatch.setattr(server, "model", slow)
        answers = []
        change = threading.Thread(
            target=lambda: answers.append(second.post("/v1/models", json={"run": "c"}))
        )
        change.start()
        assert began.wait(PATIENCE)
        monkeypatch.setattr(ModelChanges, "_load", noted)
        first.post("/v1/models/rollback", json={}).raise_for_status()
        change.join()
        assert answers[0].status_code == 422
        while second.get("/v1/model").json()["model"] != "a@1":
            pass


def test_a_replica_without_the_new_model_asks_to_try_again(server, monkeypatch):
    monkeypatch.setattr("decisionllm.bidding.server.watched_file.CHECK_EVERY", 3600)
    with serving(server.app()) as first, serving(server.app()) as second:
        id = begun(first)
        ticked(first, id, 0, 0)
        taken(first, "b", campaigns="move")
        late = second.post(f"/v1/campaigns/{id}/tick", json=drawn(0, 1))
        assert late.status_code == 503 and "retry-after" in late.headers
        assert "model b@1 is being loaded; try again" in late.text
        assert ticked(first, id, 0, 1)["model"] == "b@1"
    with serving(server.app()) as third:
        assert ticked(third, id, 0, 2)["model"] == "b@1"


def test_ticks_are_answered_while_a_model_is_loaded(server, monkeypatch):
    app = server.app()
    gate = threading.Event()
    begins = threading.Event()
    made = server.model
    usual = sys.getswitchinterval()

    def slow(path, journal):
        begins.set()
        gate.wait(PATIENCE)
        return made(path, journal)

    monkeypatch.setattr(server, "model", slow)
    with serving(app) as client:
        id, answers = begun(client), []
        change = threading.Thread(target=lambda: answers.append(taken(client, "b")))
        change.start()
        assert begins.wait(PATIENCE)
        assert sys.getswitchinterval() < usual, "a tick waits less for the interpreter"
        for t in range(3):
            assert ticked(client, id, 0, t)["fallback"] is None
        assert client.post("/v1/models", json={"run": "c"}).status_code == 409
        gate.set()
        change.join()
        assert answers[0]["checked"] == 1 and sys.getswitchinterval() == usual


def test_ticks_that_come_all_the_time_survive_moves(server):
    """Campaigns tick while all of them move to and fro: each tick is answered once, by a model."""
    with serving(server.app()) as client:
        ids = [begun(client, i) for i in range(8)]
        for i, id in enumerate(ids):
            ticked(client, id, i, 0)
        stop = threading.Event()

        def change():
            while not stop.is_set():
                taken(client, "b", campaigns="move")
                client.post("/v1/models/rollback", json={}).raise_for_status()

        thread = threading.Thread(target=change)
        thread.start()
        models = Counter()
        for t in range(1, STEPS):
            many = {"ticks": {id: drawn(i, t) for i, id in enumerate(ids)}}
            answers = client.post("/v1/ticks", json=many).json()
            for id in ids:
                assert answers[id]["index"] == t and answers[id]["fallback"] is None, answers[id]
                models[answers[id]["model"]] += 1
        stop.set()
        thread.join()
        for i, id in enumerate(ids):
            ticks = client.get(f"/v1/campaigns/{id}").json()["ticks"]
            assert [tick["index"] for tick in ticks] == list(range(STEPS))
            spend = sum(drawn(i, t)["result"]["spend"] for t in range(1, STEPS))
            assert ticks[-1]["spend"] == pytest.approx(spend)
        assert set(models) <= {"a@1", "b@1"}


# -- the command --


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="replicas share a port")
def test_a_killed_server_of_two_replicas_goes_on_with_the_run_chosen_last(trained_run, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(trained_run, tmp_path / "runs" / name)
    first = tmp_path / "runs" / "a"
    options = {"models_dir": f"{tmp_path}/runs", "journal": f"{tmp_path}/j", "cache_mb": 1}

    def name_of(client):
        return client.get("/v1/model", headers={"connection": "close"}).json()["model"]

    words = [f"{name}={value}" for name, value in options.items()]
    with program(first, *words, "replicas=2") as (process, client):
        old = begun(client, 0)
        ticked(client, old, 0, 0)
        assert taken(client, "b", campaigns="move")["moved"] == 1
        # each connection goes to either replica by chance: so many do not all miss one of them
        while not all(name_of(client).startswith("b@") for _ in range(40)):
            pass
        new = begun(client, 1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with serving(restarted(first, **options)) as client:
        assert name_of(client).startswith("b@")
        answers = ticked(client, old, 0, 1), ticked(client, new, 1, 0)
        assert [answer["model"].split("@")[0] for answer in answers] == ["b", "b"]


def test_a_policy_without_text_never_loads_the_tokenizer(trained_run):
    """It would hold up ticks and bids while a model is switched."""
    from tests.bidding.server.in_process import CampaignManager

    own_tokenizer.cache_clear()
    policy, _, dataset = load_run(trained_run)
    policy.warm_up()
    for cache_bytes in (0, 10**7):
        manager = CampaignManager(
            policy, ObservationSpec.from_info(dataset), cache_bytes=cache_bytes
        )
        id = manager.open(**settings_of(0))
        answers = [manager.tick(id, **drawn(0, step)) for step in range(2)]
        assert [answer["fallback"] for answer in answers] == [None, None]
    assert own_tokenizer.cache_info().misses == 0


def test_a_split_without_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="models: expected models_dir=..., the folder of"):
        serve(fill_defaults("serve", {"run": str(tmp_path), "models": ["a:1"]}))


# -- a split --


def test_a_split_is_the_same_after_a_restart_and_has_its_shares(server):
    shares = ["a:0.75", "b:0.25"]
    with serving(server.app(shares=shares)) as client:
        ids = [begun(client, i) for i in range(40)]
        models = {id: client.get(f"/v1/campaigns/{id}").json()["model"] for id in ids}
        assert {assign_model(id, {"a@1": 0.75, "b@1": 0.25}) == models[id] for id in ids} == {True}
        assert set(models.values()) == {"a@1", "b@1"}
    with serving(server.app(shares=shares)) as client:
        for i, id in enumerate(ids[:10]):
            assert ticked(client, id, i, 0)["model"] == models[id]
        response = taken(client, "b", share=0.5)
        assert {row["model"]: row["share"] for row in response["models"]} == {
            "a@1": 0.5,
            "b@1": 0.5,
        }
        assert response["before"] == {"a@1": 0.75, "b@1": 0.25}


def test_a_campaign_is_assigned_by_its_id_alone():
    choice = {"a": 0.9, "b": 0.1}
    counts = Counter(assign_model(f"{i:016x}", choice) for i in range(20_000))
    assert abs(counts["b"] / 20_000 - 0.1) < 0.01
    # blake2b of eight bytes begins with 0x43 for c1 and 0x89 for c9: 0.27 and 0.54 of 2**64
    assert [assign_model(id, {"a": 0.5, "b": 0.5}) for id in ("c1", "c9")] == ["a", "b"]
    assert assign_model(new_id(), {"a": 1.0}) == "a"


def test_shares_of_the_others_keep_their_proportions():
    assert set_share({"a": 1.0}, "b", 0.25) == {"a": 0.75, "b": 0.25}
    assert set_share({"a": 0.6, "b": 0.2, "c": 0.2}, "c", 0.5) == {
        "a": pytest.approx(0.375),
        "b": pytest.approx(0.125),
        "c": 0.5,
    }
    assert set_share({"a": 0.9, "b": 0.1}, "b", 1.0) == {"b": 1.0}
    same = {"a": 0.2, "b": 0.4, "c": 0.4}
    assert set_share(same, "c", 0.4) == same, "no share is rounded again"
    assert set_share({"b": 1.0}, "b", 0.5) == {"b": 1.0}, "there is no other"
    assert parse_shares(["x/a:0.9", "b:0.1"]) == {"x/a": 0.9, "b": 0.1}
    for wrong in (["a"], ["a:x"], ["a:0.5"], ["a:1.5", "b:-0.5"], ["a:0.5", "a:0.5"], ["a:nan"]):
        with pytest.raises(ValueError, match="models: expected"):
            parse_shares(wrong)
