"""`decisionllm serve`: a trained run behind HTTP, with a journal of requests and answers."""

import json
import os
import re
import socket
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.bidding.serve_options import ServeConfig, check_options
from decisionllm.bidding.server import logs, replicas
from decisionllm.commands.options import read_options
from decisionllm.config import train_config
from decisionllm.files import explain_errors
from decisionllm.policy import loading
from decisionllm.policy.policy import Policy
from decisionllm.registry import Node
from decisionllm.runs import checkpoint
from decisionllm.schema import Json
from decisionllm.trust import trust_user_modules

if TYPE_CHECKING:
    from fastapi import FastAPI

    from decisionllm.bidding.server.middleware import Access
    from decisionllm.bidding.server.model_folder import ModelFolder
    from decisionllm.bidding.server.tracing import Traces


# fields of a policy that change its answers
ACTING_FIELDS = (
    "window",
    "stride",
    "decode",
    "target_return",
    "execution",
    "planning_horizon",
    "planning_value",
)


@trust_user_modules
def serve(config: Node) -> None:
    """Serve until interrupted (see configs/serve.yaml).

    Raises:
        ValueError: an option cannot be, or a run is none of `decisionllm train`.
        OSError: the address is taken.
    """
    with explain_errors(
        "serve needs FastAPI and uvicorn: pip install -e '.[serve]'",
        ImportError,
        raised=ImportError,
    ):
        from decisionllm.bidding.server import protocol
    options = read_options(ServeConfig, config)
    check_options(options)
    several = options.replicas > 1
    app = None if several else build_app(options)
    host = options.host
    where = f"host={host} port={options.port}: cannot listen there"
    with explain_errors(where, OSError, fix="choose another port=...", raised=OSError):
        listener = listen(host, options.port)
    port = listener.getsockname()[1]
    by = f" by {options.replicas} replicas" if several else ""
    shown = f"[{host}]" if ":" in host else host  # an IPv6 address in a URL
    print(
        f"serving {options.run} on http://{shown}:{port}{by}, journal {options.journal_path}",
        flush=True,
    )
    if app is None:
        listener.close()
        with logs.write_logs(options.log):
            replicas.run_replicas(
                serve_replica, replace(options, port=port), replicas=options.replicas
            )
        return
    with listener:
        protocol.server(app).run(sockets=[listener])


def serve_replica(options: ServeConfig, number: int, beat: replicas.Beat) -> None:
    """Serve until interrupted, as one of several processes."""
    import torch

    from decisionllm.bidding.server import protocol

    torch.set_num_threads(max(torch.get_num_threads() // options.replicas, 1))
    app = build_app(options, number)
    with listen(options.host, options.port, reuse_port=True) as listener:
        protocol.server(app, beat=beat).run(sockets=[listener])


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, reuse_port=reuse_port)


def build_app(options: ServeConfig, replica: int | None = None) -> "FastAPI":
    """The FastAPI app of these options; a token is read from the environment of its process.

    Args:
        replica: number of this process among several.
    """
    from decisionllm.bidding.server.access import LocalAccess, TokenAccess
    from decisionllm.bidding.server.app import create_app

    policy, description, dataset = load_run(
        options.run,
        part=options.part,
        device=options.device,
        trust=options.trust,
        **options.act,
    )
    bidding: Json = {}
    if dataset.get("env") in ("auction", "journal"):
        bidding = build_bidding_options(options, description, ObservationSpec.from_info(dataset))
    elif options.shadow:
        got = f"run={options.run} is of {description['dataset']}"
        raise ValueError(f"shadow: expected campaigns, which a run of an auction has; {got}")
    token = os.environ.get("DECISIONLLM_TOKEN")
    access: Access = LocalAccess()
    if token or options.tokens:
        access = TokenAccess(token, options.tokens)
    return create_app(
        policy,
        description,
        access=access,
        replica=replica,
        docs=options.docs,
        traces=build_traces(options.tracing),
        log=options.log,
        log_sample=options.log_sample,
        log_slow=options.log_slow_ms / 1000,
        batch_wait=options.batch_wait_ms / 1000,
        deadline=options.deadline_ms / 1000,
        max_body_bytes=options.max_body_bytes,
        max_batch_size=options.max_batch_size,
        max_queue=options.max_queue,
        **bidding,
    )


def build_bidding_options(
    options: ServeConfig, description: Json, observation: ObservationSpec
) -> Json:
    """Options of `create_app` for a run of an auction. `description` is given the shadow's
    description.
    """
    journal = Journal(options.journal_path)
    campaigns: Json = {
        "max_campaigns": options.max_campaigns,
        "horizon": options.horizon,
        "pacing": options.pacing,
        "cache_bytes": int(options.cache_mb * 1e6),
    }
    bidding: Json = {
        "observation": observation,
        "journal": journal,
        "campaigns": campaigns,
        "exchange": {
            "currency": options.currency,
            "seat": options.seat,
            "bid_expiry_s": options.bid_expiry_s,
            "bid_wait": options.bid_wait_ms / 1000,
            "max_tick_age": options.max_tick_age_s,
            "notice_url": options.notice_url,
            "shading": options.shading,
        },
        "move_campaigns": options.move_campaigns,
        "snapshot_s": options.snapshot_s,
    }
    if options.shadow:
        from decisionllm.bidding.server.shadow import Shadow

        policy, about, dataset = load_run(
            options.shadow, device=options.device, trust=options.trust
        )
        description["shadow"] = {
            name: about[name] for name in ("run", "model", "dataset", "fingerprint")
        }
        bidding["shadow"] = Shadow(
            policy,
            ObservationSpec.from_info(dataset),
            journal,
            observation,
            name=about["model"],
            max_queue=options.max_queue,
            **campaigns,
        )
    if options.models_dir:
        bidding["folder"] = build_model_folder(options, journal, campaigns)
    return bidding


def build_model_folder(options: ServeConfig, journal: Journal, campaigns: Json) -> "ModelFolder":
    """The folder of runs that may take over while the server runs."""
    from decisionllm.bidding.server.campaigns import CampaignManager
    from decisionllm.bidding.server.model_folder import ModelFolder
    from decisionllm.bidding.server.models import Model

    assert options.models_dir is not None
    directory_of_models = Path(options.models_dir).resolve()

    def load(path: Path) -> Model:
        policy, info, dataset = load_run(
            path, device=options.device, trust=options.trust, **options.act
        )
        observation = ObservationSpec.from_info(dataset)
        manager = CampaignManager(policy, observation, journal, name=info["model"], **campaigns)
        run = path
        if path.is_relative_to(directory_of_models):
            run = path.relative_to(directory_of_models)
        return Model(info["model"], str(run), policy, manager, info)

    return ModelFolder(
        directory_of_models,
        load,
        run=options.run,
        choice_file=journal.sidecar_path("models"),
        shares=options.models or [],
    )


def build_traces(address: str | None) -> "Traces | None":
    """The sender of the spans of ticks; None: there are no spans. address: of the collector."""
    if not address:
        return None
    with explain_errors(
        "tracing needs OpenTelemetry: pip install -e '.[otel]'",
        ImportError,
        raised=ImportError,
    ):
        from decisionllm.bidding.server import otel
    return otel.build_otlp_traces(address)


def load_run(run: str | Path, **options: Any) -> tuple[Policy, Json, Json]:
    """Load a run: its policy, its description, see `model_info`, and the info of its dataset.

    options: of `load_policy`, with `trust`, since replicas are other processes and a server loads
        runs in other threads.

    Raises:
        ValueError: the run's agents decide in turn alone.
    """
    policy = loading.load_policy(run, **options)
    if policy.config["team"]["execution"] == "joint":
        raise ValueError(
            f"run={run}: expected one whose agents can decide alone, since a request names no team,"
            " got team.execution=joint; train with team.execution=both or per_agent"
        )
    policy.execution = "per_agent"
    about = model_info(run, policy, policy.config, policy.info)
    return policy, about, policy.info["dataset"]


def model_info(run: str | Path, policy: Policy, run_config: Json, run_info: Json) -> Json:
    """The answer of /v1/model. `model` names the run and what decides its answers: a digest of its
    weights and of how the policy acts.
    """
    folder = checkpoint.checkpoint_folder(checkpoint.weights_folder(run, train_config(run_config)))
    weights = (folder / "model.safetensors").read_bytes()
    acting = {name: getattr(policy, name) for name in ACTING_FIELDS} | {"spec": run_info["spec"]}
    digest = blake2b(weights + json.dumps(acting, sort_keys=True).encode(), digest_size=6)
    # a header, which names the model in each answer, has no other letters
    name = re.sub(r"[^\w.-]", "_", Path(run).name, flags=re.ASCII)
    backbone = dict(run_config["backbone"])
    if "folder" in backbone:
        backbone["folder"] = None  # a path of this machine
    return {
        "run": Path(run).name,
        "model": f"{name}@{digest.hexdigest()}",
        "weights": blake2b(weights, digest_size=6).hexdigest(),
        "dataset": run_info["dataset"]["name"],
        "fingerprint": run_info["fingerprint"],
        "spec": run_info["spec"],
        "window": policy.window,
        "stride": policy.stride,
        "decode": policy.decode,
        "target_return": policy.target_return,
        "return_conditioned": policy.return_conditioned,
        "backbone": backbone,
        "text": run_info["dataset"].get("text", "none"),
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "versions": run_info["versions"],
    }
