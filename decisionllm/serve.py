"""`decisionllm serve`: a trained run behind HTTP, with a journal of requests and answers."""

import os
import socket
from hashlib import blake2b
from pathlib import Path
from typing import Any

from decisionllm.config import one_of
from decisionllm.envs.auction.journal import Journal
from decisionllm.envs.auction.observation import ObservationSpec
from decisionllm.files import explained
from decisionllm.policy import checkpoint
from decisionllm.policy.policy import Policy
from decisionllm.serving import replicas


def serve(config: dict[str, Any]) -> None:
    """Serve until interrupted (see configs/serve.yaml)."""
    with explained("serve needs FastAPI and uvicorn: pip install 'decisionllm[serve]'", ImportError, raised=ImportError):
        from decisionllm.serving import logs, protocol
        from decisionllm.serving.middleware import loopback
    host, port = config["host"], config["port"]
    if not loopback(host) and not os.environ.get("DECISIONLLM_TOKEN"):
        raise ValueError(f"host={host}: others can reach it: set a token, DECISIONLLM_TOKEN, or take host=127.0.0.1")
    one_of("log", config["log"], logs.KINDS)
    for name in ("deadline_ms", "max_batch_size", "max_queue", "max_body_bytes", "bid_expiry_s", "bid_wait_ms",
                 "max_campaigns", "horizon", "pacing"):  # fmt: skip
        if config[name] is not None and config[name] <= 0:
            raise ValueError(f"{name}: expected a number above 0, got {config[name]}")
    if not 0 <= port <= 65535:
        raise ValueError(f"port: expected 0 .. 65535, got {port}")
    for run in filter(None, (config["run"], config["shadow"])):
        if "policy" in checkpoint.read(run)[0]:
            raise ValueError(f"run={run}: expected a run of `decisionllm train`, got a baseline")
    count, many = config["replicas"], config["replicas"] > 1
    if count < 1 or (many and not hasattr(socket, "SO_REUSEPORT")):
        raise ValueError(f"replicas: expected a number from 1, and 1 on a system without SO_REUSEPORT; got {count}")
    app = None if many else application(config)
    with explained(f"host={host} port={port}: cannot listen there", OSError, remedy="choose another port=...", raised=OSError):
        listener = listen(host, port)
    port = listener.getsockname()[1]
    by = f" by {count} replicas" if many else ""
    print(f"serving {config['run']} on http://{host}:{port}{by}, journal {journal_path(config)}", flush=True)
    if many:
        listener.close()
        return replicas.run(replica, config | {"port": port}, replicas=count)
    with listener:
        protocol.server(app).run(sockets=[listener])


def replica(config: dict[str, Any]) -> None:
    """Serve until interrupted, as one of several processes."""
    import torch

    from decisionllm.serving import protocol

    torch.set_num_threads(max(torch.get_num_threads() // config["replicas"], 1))
    app = application(config)
    with listen(config["host"], config["port"], reuse_port=True) as listener:
        protocol.server(app).run(sockets=[listener])


def listen(host: str, port: int, **options: Any) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, **options)


def application(config: dict[str, Any]) -> Any:
    """The FastAPI app of this config; a token is read from the environment of its process."""
    from decisionllm.serving.app import create_app
    from decisionllm.serving.shadow import Shadow

    run = config["run"]
    policy, run_config, run_info = checkpoint.load(run, part=config["part"], device=config["device"], **config["act"])
    auction = run_info["dataset"].get("env") in ("auction", "journal")
    cache_bytes = int(config["cache_mb"] * 1e6)
    known, shadow = model_info(run, policy, run_config, run_info), None
    observation, journal = (ObservationSpec.of(run_info["dataset"]), Journal(journal_path(config))) if auction else (None, None)
    campaigns = {k: config[k] for k in ("max_campaigns", "horizon", "pacing")} | {"cache_bytes": cache_bytes}
    if config["shadow"]:
        if observation is None or journal is None:
            raise ValueError(f"shadow: expected campaigns, which a run of an auction has; run={run} is of {known['dataset']}")
        other, other_config, other_info = checkpoint.load(config["shadow"], device=config["device"])
        about = model_info(config["shadow"], other, other_config, other_info)
        seen = ObservationSpec.of(other_info["dataset"])
        shadow = Shadow(other, seen, journal, observation, name=about["model"], max_queue=config["max_queue"], **campaigns)
        known["shadow"] = {name: about[name] for name in ("run", "model", "dataset", "fingerprint")}
    return create_app(
        policy, known, observation, journal, token=os.environ.get("DECISIONLLM_TOKEN") or None, campaigns=campaigns, shadow=shadow,
        exchange={k: config[k] for k in ("currency", "seat", "bid_expiry_s", "notice_url")} | {"bid_wait": config["bid_wait_ms"] / 1000},
        log=config["log"], batch_wait=config["batch_wait_ms"] / 1000,
        deadline=config["deadline_ms"] / 1000, **{k: config[k] for k in ("max_body_bytes", "max_batch_size", "max_queue")},
    )  # fmt: skip


def journal_path(config: dict[str, Any]) -> Path:
    return Path(config["journal"] or Path(config["run"]) / "journal.sqlite")


def model_info(run: str | Path, policy: Policy, run_config: dict[str, Any], run_info: dict[str, Any]) -> dict[str, Any]:
    """The answer of /v1/model."""
    folder, backbone = checkpoint.checkpoint_folder(checkpoint.weights_folder(run, run_config)), run_config["backbone"]
    return {
        "run": Path(run).name, "model": blake2b((folder / "model.safetensors").read_bytes(), digest_size=6).hexdigest(),
        "dataset": run_info["dataset"]["name"],
        "fingerprint": run_info["fingerprint"], "spec": run_info["spec"], "window": policy.window, "stride": policy.stride,
        "decode": policy.decode, "target_return": policy.target_return, "return_conditioned": policy.return_conditioned,
        "backbone": backbone | {"folder": None} if "folder" in backbone else backbone,
        "text": run_info["dataset"].get("text", "none"), "parameters": sum(p.numel() for p in policy.model.parameters()),
        "versions": run_info["versions"],
    }  # fmt: skip
