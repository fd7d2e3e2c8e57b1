"""The verb `serve`: a trained run behind HTTP, with a journal of what it was asked and what it answered."""

import os
import socket
from hashlib import blake2b
from pathlib import Path

from decisionllm.envs.auction.journal import Journal
from decisionllm.envs.auction.observation import ObservationSpec
from decisionllm.policy import checkpoint
from decisionllm.serving import replicas
from decisionllm.serving.app import create_app
from decisionllm.serving.middleware import loopback


def serve(config):
    """Answer until interrupted (see configs/serve.yaml)."""
    try:
        import uvicorn
    except ImportError as error:
        raise ImportError("serve needs FastAPI and uvicorn: pip install 'decisionllm[serve]'") from error
    host, port, token = config["host"], config["port"], os.environ.get("DECISIONLLM_TOKEN")
    if not loopback(host) and not token:
        raise ValueError(
            f"host={host}: others can reach it, so a token is required: set DECISIONLLM_TOKEN, or take host=127.0.0.1"
        )
    if config["replicas"] != 1:
        return replicated(config, host, port)
    app = application(config, token=token)
    try:
        door = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(f"host={host} port={port}: cannot listen there ({error.strerror}); choose another port=...") from error
    with door:
        print(f"serving {config['run']} on http://{host}:{door.getsockname()[1]}, journal {journal_of(config)}", flush=True)
        options = {"log_level": "warning", "access_log": False, "server_header": False, "timeout_graceful_shutdown": 10}
        uvicorn.Server(uvicorn.Config(app, **options)).run(sockets=[door])


def replicated(config, host, port):
    """Answer until interrupted, in several processes."""
    if config["replicas"] < 1 or port == 0:
        raise ValueError(f"replicas, port: expected numbers from 1, got {config['replicas']} and {port}")
    config = config | {"run": str(Path(config["run"]).resolve()), "journal": str(Path(journal_of(config)).resolve())}
    checkpoint.read(config["run"])  # or an error, before anything is started
    build = lambda: application(config, token=os.environ.get("DECISIONLLM_TOKEN"))  # noqa: E731  nor is the token sent about
    print(
        f"serving {config['run']} on http://{host}:{port} by {config['replicas']} replicas, journal {config['journal']}",
        flush=True,
    )
    replicas.run(build, host=host, port=port, replicas=config["replicas"], queue=config["queue"])


def application(config, *, token=None):
    """The app of this config, which needs no server to be asked."""
    for name in ("deadline", "batch", "queue", "body"):
        if config[name] <= 0:
            raise ValueError(f"{name}: expected a number above 0, got {config[name]}")
    acting = config["act"]
    policy, trained, facts = checkpoint.load(config["run"], device=config["device"], **acting)
    auction = facts["dataset"].get("env") in ("auction", "journal")
    return create_app(
        policy, card(config["run"], policy, trained, facts), ObservationSpec.of(facts["dataset"]) if auction else None,
        Journal(journal_of(config)) if auction else None, token=token, body=config["body"],
        exchange={"currency": config["currency"], "seat": config["seat"]},
        desk={"cache": int(config["cache"] * 1e6), "kept": config["kept"], "horizon": config["horizon"], "pacing": config["pacing"]},
        size=config["batch"], queue=config["queue"], wait=config["wait"] / 1000, deadline=config["deadline"] / 1000,
    )  # fmt: skip


def journal_of(config):
    return config["journal"] or Path(config["run"]) / "journal.sqlite"


def card(run, policy, trained, facts):
    """What /v1/model says."""
    weights = checkpoint.find(checkpoint.weights_folder(run, trained)) / "model.safetensors"
    return {
        "run": Path(run).name, "model": blake2b(weights.read_bytes(), digest_size=6).hexdigest(), "dataset": facts["dataset"]["name"],
        "fingerprint": facts["fingerprint"], "spec": facts["spec"], "window": policy.window, "stride": policy.stride,
        "decode": policy.decode, "target_return": policy.target_return, "return_conditioned": policy.return_conditioned,
        "backbone": trained["backbone"] | {"folder": None} if "folder" in trained["backbone"] else trained["backbone"],
        "text": facts["dataset"].get("text", "none"), "parameters": sum(p.numel() for p in policy.model.parameters()),
        "versions": facts["versions"],
    }  # fmt: skip
