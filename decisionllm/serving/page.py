"""The page for people: three files that the server hands out as they are. They hold no data; what they show they ask the API for."""

from pathlib import Path

HERE = Path(__file__).parent / "static"
FILES = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript")}


def router():
    """Routes for the three files."""
    from fastapi import APIRouter, Response  # pip install decisionllm[serve]

    routes = APIRouter(include_in_schema=False)
    for path, (name, kind) in FILES.items():
        routes.add_api_route(path, _handed_out(Response, (HERE / name).read_bytes(), kind))
    return routes


def _handed_out(answer, content, kind):
    return lambda: answer(content, media_type=kind)
