"""Answers that all routes share: JSON texts, and errors in one form."""

from typing import Annotated

from fastapi import Header, Response
from fastapi.responses import JSONResponse

from decisionllm.bidding.server import schemas
from decisionllm.bidding.server.campaigns import RequestError
from decisionllm.bidding.server.middleware import error_response
from decisionllm.schema import Json

INTERNAL_ERROR = "internal server error; see the server log"
ERROR_MEANINGS = {
    400: "not JSON",
    401: "missing or wrong token",
    403: "sent by a page of another origin, or the token lacks the right",
    404: "no such campaign",
    409: "out of order, ended, or answered otherwise",
    413: "body too long",
    415: "a content type other than application/json",
    421: "without a token: the host is no name of this machine",
    422: "a field is wrong",
    429: "more requests than the token may send",
    503: "busy, late, or the journal failed",
}
Deadline = Annotated[
    int | None, Header(ge=1, le=600_000, description="ms, if shorter than the server's own")
]


def errors(
    *codes: int, usual: tuple[int, ...] = (400, 401, 413, 415, 422, 503)
) -> dict[int | str, Json]:
    """The error answers of a route for the OpenAPI document: these codes and the usual ones."""
    return {
        code: {"model": schemas.Error, "description": ERROR_MEANINGS[code]}
        for code in (*usual, *codes)
    }


def refusal_response(error: RequestError, where: str) -> JSONResponse:
    return error_response(
        error.status, [where, error.field], error.message, expected=error.expected
    )


def json_response(text: str | bytes, status: int = 200) -> Response:
    return Response(text, status, media_type="application/json")
