"""A fake hub on loopback, with the requests of the hub's client for one repository."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPO = "owner/name"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_stand_in"
NONE: Mapping[str, str] = {}


class Hub:
    """A repository and the requests for it."""

    def __init__(self, folder: Path) -> None:
        self.files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        self.lost: set[str] = set()  # files that are listed but missing
        self.gated = False  # it needs the token
        self.asked: list[tuple[str, str]] = []  # method, path
        self.address = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0]
        self.asked.append((handler.command, path))
        if self.gated and handler.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _send(handler, 401, b"{}", {"X-Error-Code": "GatedRepo"})
        if re.fullmatch(rf"/api/models/{REPO}(/revision/(main|{COMMIT}))?", path):
            names = [{"rfilename": name} for name in self.files]
            about = {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": names}
            return _send(handler, 200, json.dumps(about).encode())
        if path in (f"/api/models/{REPO}/tree/{place}" for place in (COMMIT, "main")):
            sizes = {name: {"size": len(x), "oid": _oid(x)} for name, x in self.files.items()}
            tree = [{"type": "file", "path": name, **about} for name, about in sizes.items()]
            return _send(handler, 200, json.dumps(tree).encode())
        found = re.fullmatch(rf"/{REPO}/resolve/(?:main|{COMMIT})/([\w./-]+)", path)
        if found is None or found[1] not in self.files.keys() - self.lost:
            code = "EntryNotFound" if found else "RepoNotFound"
            return _send(handler, 404, b"{}", {"X-Error-Code": code})
        data = self.files[found[1]]
        return _send(handler, 200, data, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": COMMIT})


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serves the fake hub at `hub.address`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.answer(self)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _send(
    handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: Mapping[str, str] = NONE
) -> None:
    handler.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command == "GET":
        handler.wfile.write(body)


def _oid(data: bytes) -> str:
    """Returns git's object id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
