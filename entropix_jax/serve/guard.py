"""Who may ask: keys, and no request from a page elsewhere."""

import hmac
import re
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from entropix_jax.errors import UserError
from entropix_jax.host.files import read_text
from entropix_jax.serve.schema import ApiError
from entropix_jax.serve.wire import error_answer

_HOST = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\])(:\d*)?")  # of a request's header
_OPEN = ("/health", "/", "/favicon.ico")  # paths that need no key: the page asks for one
_OPEN_FOLDER = "/static/"
_PORTS = {"http": 80, "https": 443}


class Guard:
    """Lets requests through to `app` that have a key, where there are any, and come from no page of
    another origin.

    A page's script can reach a server on the reader's machine under a name of its own (DNS
    rebinding), so names other than this server's are refused; a number is no such name.
    """

    def __init__(
        self, app: ASGIApp, *, host: str, keys: Sequence[str], origins: Sequence[str]
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._origins = origins
        self._names = {
            "localhost",
            host.lower(),
            *(urlsplit(origin).hostname for origin in origins),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers or passes on."""
        answer: ASGIApp = self._app
        if scope["type"] == "http":
            try:
                self._check(Headers(scope=scope), scope["path"], scope["scheme"])
            except ApiError as error:
                answer = error_answer(error)
        await answer(scope, receive, send)

    def _check(self, headers: Headers, path: str, scheme: str) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_own(host):
            told = f"the host {host!r} is not this server's: add it with --allow-origin"
            raise ApiError(told, status=403, code="foreign_host")
        if origin is not None and origin not in (*self._origins, f"{scheme}://{host}"):
            told = f"the origin {origin!r} is not allowed: add it with --allow-origin"
            raise ApiError(told, status=403, code="foreign_origin")
        if self._keys and path not in _OPEN and not path.startswith(_OPEN_FOLDER):
            kind, _, given = headers.get("authorization", "").partition(" ")
            key = given.strip().encode("latin-1", "replace")
            # All of them, so that the time tells nothing.
            found = sum(hmac.compare_digest(key, own) for own in self._keys)
            if not found or kind.lower() != "bearer":
                raise ApiError(
                    "the API key is missing or wrong: send 'Authorization: Bearer KEY'",
                    status=401,
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )

    def _is_own(self, host: str) -> bool:
        if _HOST.fullmatch(host) is None:
            return False
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            ip_address(name)
        except ValueError:
            return name in self._names
        return True


def read_keys(path: Path) -> list[str]:
    """The keys of a file, one a line. UserError if there is none, or one that no header holds."""
    keys = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not keys:
        raise UserError(f"{path}: no API key: write one per line")
    for number, key in enumerate(keys, 1):
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise UserError(f"{path}: key {number} must be printable ASCII without spaces")
    return keys


def read_origin(origin: str) -> str:
    """An origin as browsers send it: in small letters, without its scheme's usual port. UserError
    for what is none."""
    told = origin.lower()
    try:
        parts = urlsplit(told)
        fits = parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits or "@" in told or told != f"{parts.scheme}://{parts.netloc}":
        raise UserError(f"--allow-origin {origin}: expected SCHEME://HOST[:PORT], without a path")
    return told.removesuffix(f":{_PORTS[parts.scheme]}").removesuffix(":")
