"""Access control: API keys, and no requests from other origins' pages."""

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

_HOST = r"([\w.-]+|\[[0-9A-Fa-f:.]+\])(:\d*)?"  # of a request's header
_OPEN = ("/health", "/")  # paths without a key, as /static/: the page asks for the key


class Guard:
    """Passes requests to `app` that have one of the `keys`, if there are any, and come from no page
    of another origin.

    A page's script can reach a server on the reader's machine under a host name of its own (DNS
    rebinding), so other host names than this server's are refused. IP addresses are safe.
    """

    def __init__(
        self, app: ASGIApp, *, host: str, keys: Sequence[str], origins: Sequence[str]
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._origins = origins
        self._names = {"localhost", host.lower(), *(urlsplit(one).hostname for one in origins)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request or passes it on."""
        answer: ASGIApp = self._app
        if scope["type"] == "http":
            try:
                self._check(Headers(scope=scope), scope["path"], scope["scheme"])
            except ApiError as error:
                answer = error_answer(error)
        await answer(scope, receive, send)

    def _check(self, headers: Headers, path: str, scheme: str) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        hint = "add it with --allow-origin"
        if not self._is_own(host):
            message = f"the host {host!r} is not this server's: {hint}"
            raise ApiError(message, status=403, code="foreign_host")
        if origin is not None and origin not in (*self._origins, f"{scheme}://{host}"):
            message = f"the origin {origin!r} is not allowed: {hint}"
            raise ApiError(message, status=403, code="foreign_origin")
        if self._keys and path not in _OPEN and not path.startswith("/static/"):
            kind, _, given = headers.get("authorization", "").partition(" ")
            key = given.strip().encode("latin-1", "replace")
            # Compares with all of them, so that the time does not depend on the key.
            found = sum(hmac.compare_digest(key, own) for own in self._keys)
            if not found or kind.lower() != "bearer":
                message = "the API key is missing or wrong: send 'Authorization: Bearer KEY'"
                challenge = {"WWW-Authenticate": "Bearer"}
                raise ApiError(message, status=401, code="invalid_api_key", headers=challenge)

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return bool(re.fullmatch(_HOST, host) and (name in self._names or ip_address(name)))
        except ValueError:  # no address
            return False


def read_keys(path: Path) -> list[str]:
    """Returns the keys of a file, one per line. UserError if there are none, or if a key cannot be
    sent in a header."""
    keys = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not keys:
        raise UserError(f"{path}: no API key: write one per line")
    for number, key in enumerate(keys, 1):
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise UserError(f"{path}: key {number} must be printable ASCII without spaces")
    return keys


def read_origin(origin: str) -> str:
    """Returns an origin as browsers send it: in lower case, without the scheme's default port.
    UserError if it is not an origin."""
    lower = origin.lower()
    if re.fullmatch(f"https?://{_HOST}", lower) is None:
        raise UserError(f"--allow-origin {origin}: expected SCHEME://HOST[:PORT], without a path")
    return lower.removesuffix(":443" if lower.startswith("https") else ":80").removesuffix(":")
