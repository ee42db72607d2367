"""The live page: its document, and the scripts and style sheets that it shares with reports."""

from hashlib import blake2b
from importlib.resources import files
from itertools import chain
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from entropix_jax.report.tokens import STATIC
from entropix_jax.serve.schema import ApiError

_OWN = files("entropix_jax.serve")
_KINDS = {".js": "text/javascript", ".css": "text/css"}
# Nothing from elsewhere, no script or style within the document, and in no other page's frame.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# Read once; a name is looked up, never a path.
_DOCUMENT = (_OWN / "templates" / "live.html").read_bytes()
_PARTS: dict[str, tuple[bytes, str]] = {
    file.name: (file.read_bytes(), kind)
    for file in chain(STATIC.iterdir(), (_OWN / "static").iterdir())
    for end, kind in _KINDS.items()
    if file.name.endswith(end)
}


async def document(request: Request) -> Response:
    """`GET /`."""
    return _answer(request, _DOCUMENT, "text/html")


async def static(request: Request) -> Response:
    """`GET /static/NAME`. ApiError if there is no such part."""
    name: Any = request.path_params["name"]
    if name not in _PARTS:
        raise ApiError(f"no such part of the page: {name}", status=404)
    return _answer(request, *_PARTS[name])


async def icon(request: Request) -> Response:
    """`GET /favicon.ico`: the document has its own icon."""
    return Response(status_code=204, headers={"Cache-Control": "max-age=86400"})


def _answer(request: Request, content: bytes, kind: str) -> Response:
    """A part of the page, or nothing (304) if the browser has it."""
    tag = f'"{blake2b(content, digest_size=16).hexdigest()}"'
    headers = {**_HEADERS, "ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, 200, headers, f"{kind}; charset=utf-8")
