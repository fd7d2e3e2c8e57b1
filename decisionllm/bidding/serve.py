"""`decisionllm serve`: a trained run behind HTTP, with a journal of requests and answers."""

import json
import math
import os
import re
import socket
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from decisionllm.bidding.journal.journal import Journal
from decisionllm.bidding.market.observation import ObservationSpec
from decisionllm.bidding.server import logs, replicas
from decisionllm.checks import check_one_of, check_share
from decisionllm.config import train_config
from decisionllm.files import explain_errors
from decisionllm.policy import loading
from decisionllm.policy.policy import Policy
from decisionllm.runs import checkpoint, directory
from decisionllm.schema import Json
from decisionllm.trust import trust_user_modules

if TYPE_CHECKING:
    from fastapi import FastAPI

    from decisionllm.bidding.server.middleware import Access
    from decisionllm.bidding.server.model_folder import ModelFolder
    from decisionllm.bidding.server.shadow import Shadow
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
EXCHANGE_OPTIONS = (
    "currency",
    "seat",
    "bid_expiry_s",
    "notice_url",
    "shading",
)  # options of OpenRTB
POSITIVE_OPTIONS = (
    "deadline_ms",
    "max_batch_size",
    "max_queue",
    "max_body_bytes",
    "bid_expiry_s",
    "bid_wait_ms",
    "max_tick_age_s",
    "log_slow_ms",
    "max_campaigns",
    "horizon",
    "pacing",
)
NON_NEGATIVE_OPTIONS = ("cache_mb", "snapshot_s", "batch_wait_ms")


@trust_user_modules
def serve(config: Json) -> None:
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
    check_options(config)
    several = config["replicas"] > 1
    app = None if several else build_app(config)
    host = config["host"]
    where = f"host={host} port={config['port']}: cannot listen there"
    with explain_errors(where, OSError, fix="choose another port=...", raised=OSError):
        listener = listen(host, config["port"])
    port = listener.getsockname()[1]
    by = f" by {config['replicas']} replicas" if several else ""
    shown = f"[{host}]" if ":" in host else host  # an IPv6 address in a URL
    print(
        f"serving {config['run']} on http://{shown}:{port}{by}, journal {journal_path(config)}",
        flush=True,
    )
    if app is None:
        listener.close()
        with logs.write_logs(config["log"]):
            replicas.run_replicas(
                serve_replica, config | {"port": port}, replicas=config["replicas"]
            )
        return
    with listener:
        protocol.server(app).run(sockets=[listener])


def check_options(config: Json) -> None:
    """Raise a ValueError for an option that cannot be."""
    check_reach(config)
    check_needs(config)
    check_exchange(config)
    check_numbers(config)
    for run in (config["run"], config["shadow"]):
        if run and "policy" in directory.read(run)[0]:
            raise ValueError(f"run={run}: expected a run of `decisionllm train`, got a baseline")


def check_reach(config: Json) -> None:
    """Raise a ValueError if others can reach the server and need no token, or a short one."""
    from decisionllm.bidding.server.middleware import is_loopback
    from decisionllm.bidding.server.tokens import SHORTEST

    host = config["host"]
    token = os.environ.get("DECISIONLLM_TOKEN", "")
    if token and len(token.encode()) < SHORTEST:
        raise ValueError(f"DECISIONLLM_TOKEN: expected at least {SHORTEST} bytes, got fewer")
    has_token = token or config["tokens"]
    if not is_loopback(host) and not has_token:
        raise ValueError(
            f"host={host}: others can reach it: set a token, DECISIONLLM_TOKEN, give a file,"
            " tokens=, or take host=127.0.0.1"
        )


def check_exchange(config: Json) -> None:
    """Raise a ValueError for an option with which an exchange would have no bids or no notices."""
    currency, notice_url = config["currency"], config["notice_url"]
    if not re.fullmatch("[A-Z]{3}", str(currency)):
        raise ValueError(f"currency: expected three capitals such as USD, got {currency!r}")
    if notice_url is not None and not re.fullmatch(r"https?://[^\s?#]+", notice_url):
        raise ValueError(
            "notice_url: expected http:// or https:// and a host without a query, such as"
            f" https://bidder.example, got {notice_url!r}"
        )


def check_needs(config: Json) -> None:
    """Raise a ValueError for an option that needs another one."""
    if config["models"] and not config["models_dir"]:
        raise ValueError("models: expected models_dir=..., the folder of these runs, got none")
    if config["shading"] and not config["notice_url"]:
        raise ValueError("shading: expected notice_url=..., whose notices it learns from, got none")


def check_numbers(config: Json) -> None:
    """Raise a ValueError for a number or a word that cannot be."""
    check_one_of("log", config["log"], logs.KINDS)
    check_share("log_sample", config["log_sample"])
    for name in POSITIVE_OPTIONS:
        if config[name] is not None and not 0 < config[name] < math.inf:
            raise ValueError(f"{name}: expected a number above 0, got {config[name]}")
    for name in NON_NEGATIVE_OPTIONS:
        if config[name] is not None and not 0 <= config[name] < math.inf:
            raise ValueError(f"{name}: expected a number from 0, got {config[name]}")
    if not 0 <= config["port"] <= 65535:
        raise ValueError(f"port: expected 0 .. 65535, got {config['port']}")
    count = config["replicas"]
    if count < 1 or (count > 1 and not hasattr(socket, "SO_REUSEPORT")):
        raise ValueError(
            "replicas: expected a number from 1, and 1 on a system without SO_REUSEPORT;"
            f" got {count}"
        )


def serve_replica(config: Json, number: int, beat: replicas.Beat) -> None:
    """Serve until interrupted, as one of several processes."""
    import torch

    from decisionllm.bidding.server import protocol

    torch.set_num_threads(max(torch.get_num_threads() // config["replicas"], 1))
    app = build_app(config, number)
    with listen(config["host"], config["port"], reuse_port=True) as listener:
        protocol.server(app, beat=beat).run(sockets=[listener])


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, reuse_port=reuse_port)


def build_app(config: Json, replica: int | None = None) -> "FastAPI":
    """The FastAPI app of this config; a token is read from the environment of its process.

    Args:
        replica: number of this process among several.
    """
    from decisionllm.bidding.server.app import create_app

    policy, description, dataset = load_run(
        config, config["run"], part=config["part"], **config["act"]
    )
    options: Json = {}
    if dataset.get("env") in ("auction", "journal"):
        options = build_bidding_options(config, description, ObservationSpec.from_info(dataset))
    elif config["shadow"]:
        got = f"run={config['run']} is of {description['dataset']}"
        raise ValueError(f"shadow: expected campaigns, which a run of an auction has; {got}")
    return create_app(
        policy,
        description,
        access=build_access(config),
        replica=replica,
        traces=build_traces(config),
        log=config["log"],
        log_sample=config["log_sample"],
        log_slow=config["log_slow_ms"] / 1000,
        batch_wait=config["batch_wait_ms"] / 1000,
        deadline=config["deadline_ms"] / 1000,
        max_body_bytes=config["max_body_bytes"],
        max_batch_size=config["max_batch_size"],
        max_queue=config["max_queue"],
        **options,
    )


def build_bidding_options(config: Json, description: Json, observation: ObservationSpec) -> Json:
    """Options of `create_app` for a run of an auction. `description` is given the shadow's
    description.
    """
    journal = Journal(journal_path(config))
    campaigns = {name: config[name] for name in ("max_campaigns", "horizon", "pacing")}
    campaigns["cache_bytes"] = int(config["cache_mb"] * 1e6)
    exchange = {name: config[name] for name in EXCHANGE_OPTIONS}
    exchange["bid_wait"] = config["bid_wait_ms"] / 1000
    exchange["max_tick_age"] = config["max_tick_age_s"]
    options: Json = {
        "observation": observation,
        "journal": journal,
        "campaigns": campaigns,
        "exchange": exchange,
        "move_campaigns": config["move_campaigns"],
        "snapshot_s": config["snapshot_s"],
    }
    if config["shadow"]:
        shadow, about = load_shadow(config, journal, observation, campaigns)
        description["shadow"] = {
            name: about[name] for name in ("run", "model", "dataset", "fingerprint")
        }
        options["shadow"] = shadow
    if config["models_dir"]:
        options["folder"] = build_model_folder(config, journal, campaigns)
    return options


def build_model_folder(config: Json, journal: Journal, campaigns: Json) -> "ModelFolder":
    """The folder of runs that may take over while the server runs."""
    from decisionllm.bidding.server.campaigns import CampaignManager
    from decisionllm.bidding.server.model_folder import ModelFolder
    from decisionllm.bidding.server.models import Model

    directory_of_models = Path(config["models_dir"]).resolve()

    def load(path: Path) -> Model:
        policy, info, dataset = load_run(config, path, **config["act"])
        observation = ObservationSpec.from_info(dataset)
        manager = CampaignManager(policy, observation, journal, name=info["model"], **campaigns)
        run = path
        if path.is_relative_to(directory_of_models):
            run = path.relative_to(directory_of_models)
        return Model(info["model"], str(run), policy, manager, info)

    return ModelFolder(
        directory_of_models,
        load,
        run=config["run"],
        choice_file=journal.sidecar_path("models"),
        shares=config["models"] or [],
    )


def build_traces(config: Json) -> "Traces | None":
    """The sender of the spans of ticks; None: there are no spans."""
    if not config["tracing"]:
        return None
    with explain_errors(
        "tracing needs OpenTelemetry: pip install -e '.[otel]'",
        ImportError,
        raised=ImportError,
    ):
        from decisionllm.bidding.server import otel
    return otel.build_otlp_traces(config["tracing"])


def build_access(config: Json) -> "Access":
    """Access for holders of the token of the environment and of the tokens of the file."""
    from decisionllm.bidding.server.access import LocalAccess, TokenAccess

    single = os.environ.get("DECISIONLLM_TOKEN")
    if single or config["tokens"]:
        return TokenAccess(single, config["tokens"])
    return LocalAccess()


def load_shadow(
    config: Json,
    journal: Journal,
    observation: ObservationSpec,
    campaigns: Json,
) -> tuple["Shadow", Json]:
    """The policy that decides without answering, and its description, see `model_info`."""
    from decisionllm.bidding.server.shadow import Shadow

    policy, about, dataset = load_run(config, config["shadow"])
    made = Shadow(
        policy,
        ObservationSpec.from_info(dataset),
        journal,
        observation,
        name=about["model"],
        max_queue=config["max_queue"],
        **campaigns,
    )
    return made, about


def load_run(
    config: Json, run: str | Path, *, part: str | None = None, **acting: object
) -> tuple[Policy, Json, Json]:
    """Load a run: its policy, its description, see `model_info`, and the info of its dataset.

    Raises:
        ValueError: the run's agents decide in turn alone.
    """
    # here, since replicas are other processes and a server loads runs in other threads
    policy = loading.load_policy(
        run, part=part, device=config["device"], trust=config.get("trust", ()), **acting
    )
    if policy.config["team"]["execution"] == "joint":
        raise ValueError(
            f"run={run}: expected one whose agents can decide alone, since a request names no team,"
            " got team.execution=joint; train with team.execution=both or per_agent"
        )
    policy.execution = "per_agent"
    about = model_info(run, policy, policy.config, policy.info)
    return policy, about, policy.info["dataset"]


def journal_path(config: Json) -> Path:
    return Path(config["journal"] or Path(config["run"]) / "journal.sqlite")


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
