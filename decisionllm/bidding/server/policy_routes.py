"""Routes that every policy has: health, metrics, description and stateless actions."""

import asyncio
from contextlib import suppress

import numpy as np
from fastapi import APIRouter, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json

from decisionllm.bidding.server import schemas
from decisionllm.bidding.server.answers import Deadline, errors, json_response
from decisionllm.bidding.server.campaigns import RequestError
from decisionllm.bidding.server.metrics import Metrics
from decisionllm.bidding.server.service import Service
from decisionllm.policy.policy import Policy
from decisionllm.runs.directory import has_texts
from decisionllm.schema import History, Json


def policy_routes(app: FastAPI, service: Service, metrics: Metrics) -> APIRouter:
    """Routes that every policy has: its health, its metrics, its description and its actions."""
    routes = APIRouter()

    @routes.get("/healthz", tags=["server"])
    async def healthz() -> dict[str, str]:
        """Return whether the process is alive."""
        return {"status": "ok"}

    @routes.get(
        "/readyz",
        tags=["server"],
        responses={503: {"model": schemas.Error, "description": "not yet"}},
    )
    async def readyz() -> dict[str, str]:
        """Return whether the model is loaded and has made a decision, and the journal can be
        written.

        `degraded`: all is served except the named damaged rows or OpenRTB bids.
        """
        if not app.state.ready:
            raise RequestError(503, "model", "the model is being loaded")
        if service.manager is None:
            return {"status": "ready"}
        await service.check_journal()
        faults = {}
        damaged = sorted(service.manager.journal.damaged)
        if damaged:
            faults["damaged"] = "; ".join(damaged[:20])
        if service.reservations is not None:
            fault = service.reservations.check()
            if fault:
                faults["bids"] = fault
        status = "degraded" if faults else "ready"
        return {"status": status} | faults

    prometheus: dict[int | str, Json] = {
        200: {"content": {"text/plain": {}}},
        401: errors(401, usual=())[401],
    }

    @routes.get("/metrics", tags=["server"], responses=prometheus, response_class=Response)
    async def metrics_text() -> Response:
        """Metrics in the format of Prometheus."""
        text = await asyncio.to_thread(metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    @routes.get("/v1/model", tags=["policy"], responses=errors(401, 503, usual=()))
    async def model() -> Json:
        """The served model: its run, its data, its observations and its actions."""
        return service.models.current.info

    @routes.post("/v1/act", tags=["policy"], response_model=schemas.ActAnswer, responses=errors())
    async def act(request: schemas.ActRequest, x_deadline_ms: Deadline = None) -> Response:
        """An action for a history, without state: the reference for every other route."""
        action, togo = await service.act(
            parse_history(service.models.current.policy, vars(request)), service.due(x_deadline_ms)
        )
        if not np.isfinite(action).all():
            raise RequestError(
                422, "observations", "the policy has no finite action for these numbers"
            )
        return json_response(to_json({"action": action.tolist(), "return_to_go": togo}))

    return routes


def parse_history(policy: Policy, request: Json) -> History:
    """observations, actions, rewards, target_return, text and action_masks of a request ->
    History.
    """
    spec = policy.model.spec
    masks = request["action_masks"]
    t = len(request["observations"]) - 1
    if t >= spec.horizon and policy.model.tokenizer.timesteps is not None:
        message = f"expected at most {spec.horizon} steps, got {t + 1}"
        raise RequestError(422, "observations", message)
    if masks is not None and not spec.num_actions:
        message = "expected none: this policy's actions are continuous"
        raise RequestError(422, "action_masks", message)
    if request["target_return"] is not None and not policy.return_conditioned:
        raise RequestError(
            422, "target_return", "expected none: this policy conditions on no return"
        )
    if request["text"] and not has_texts(policy.info):
        message = "expected none: this policy was trained without task texts"
        raise RequestError(422, "text", message)
    arrays: dict[str, np.ndarray] = {
        "observations": parse_array(
            request, "observations", np.float32, t + 1, spec.observation_dim
        ),
        "actions": parse_array(request, "actions", np.float32, t, spec.action_dim),
        "rewards": parse_array(request, "rewards", np.float64, t),
    }
    if masks is not None:
        arrays["action_masks"] = parse_array(request, "action_masks", bool, t + 1, spec.num_actions)
        if not arrays["action_masks"].any(1).all():
            raise RequestError(422, "action_masks", "expected an allowed action in every step")
    return History(**arrays, target_return=request["target_return"], task=request["text"])


def parse_array(request: Json, name: str, dtype: type, *shape: int) -> np.ndarray:
    """The numbers of a field; a RequestError if they have another shape."""
    numbers = np.zeros(())
    with suppress(ValueError):  # rows of different lengths
        numbers = np.array(request[name] or np.zeros((0, *shape[1:])), dtype)
    if numbers.shape != shape:
        expected = " x ".join(map(str, shape))
        count = len(request["observations"])
        raise RequestError(422, name, f"expected {expected} numbers for {count} observations")
    return numbers
