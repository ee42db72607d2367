"""The live page: its document, and the scripts and style sheets that it shares with reports."""

import mimetypes
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

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

# Browsers run no script of another type, and the system's table may name one.
mimetypes.add_type("text/javascript", ".js")


class PageFiles(StaticFiles):
    """The files of the page, an ASGI application."""

    def __init__(self) -> None:
        own = [("entropix_jax.serve", "static"), ("entropix_jax.serve", "templates")]
        super().__init__(packages=[("entropix_jax.report", "static"), *own])

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        """Returns a file, or nothing (304) if the browser has it."""
        response = super().file_response(*arguments, **options)
        response.headers.update(_HEADERS)
        return response

    async def document(self, request: Request) -> Response:
        """`GET /`."""
        return await self.get_response("live.html", request.scope)
