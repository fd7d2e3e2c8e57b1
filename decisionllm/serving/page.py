"""The page for people: three files that the server hands out as they are. They hold no data; what they show they ask the API for."""

from pathlib import Path

HERE = Path(__file__).parent
FILES = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript")}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HEADERS = {
    "content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}  # fmt: skip


def router():
    """Routes for the three files, with the headers that a page needs."""
    from fastapi import APIRouter, Response  # pip install decisionllm[serve]

    routes = APIRouter(include_in_schema=False)
    for path, (name, kind) in FILES.items():
        routes.add_api_route(path, _handed_out(Response((HERE / name).read_bytes(), media_type=kind, headers=HEADERS)))
    return routes


def _handed_out(response):
    return lambda: response
