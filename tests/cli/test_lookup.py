"""Sources of lookups: tables, web addresses and executables."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from entropix_jax.errors import UserError
from entropix_jax.host import lookup as module
from entropix_jax.host.lookup import MAX_BYTES, open_lookup

TABLE = """key,value
Nora,Nora lives in Cork.
New York,a large city
York,"a city,
in England"
C++,a language
nobody,
"""


def write(folder: Path, text: str, name: str = "facts.csv") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def found(source: str, text: str = "Nora") -> Any:
    """Returns a source's result, also that of a future."""
    result = open_lookup(source)(text)
    return result.result(timeout=60) if isinstance(result, Future) else result


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Where does Nora live?", "Nora lives in Cork."),
        ("Nora in York", "a city,\nin England"),
        ("York for Nora.", "Nora lives in Cork."),
        ("Nora in New York", "a large city"),
        ("in C++?", "a language"),
        ("Noras nora, Yorkshire", None),
        ("Nora is nobody", ""),
        ("", None),
    ],
)
def test_a_table_returns_the_value_of_the_last_key(tmp_path: Path, text: str, value: Any) -> None:
    assert found(write(tmp_path, TABLE), text) == value
    pairs = [("Nora", "Nora lives in Cork."), ("New York", "a large city"), ("C++", "a language")]
    pairs += [("York", "a city,\nin England"), ("nobody", "")]
    lines = [json.dumps({"key": key, "value": value}) for key, value in pairs]
    assert found(write(tmp_path, "\n\n".join(lines), "facts.jsonl"), text) == value


def test_identity_of_a_source(tmp_path: Path) -> None:
    first, second = (open_lookup(write(tmp_path, text)) for text in (TABLE, f"{TABLE}a,b\n"))
    assert first.identity != second.identity
    hidden, other = (open_lookup(f"http://localhost/a?token={name}") for name in ("xy", "z"))
    assert "xy" not in hidden.identity
    assert hidden.identity != other.identity


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.csv", "key,value\nx,1\ny,2\nx,3\n", "line 4: the key 'x' is repeated: .* in line 2"),
        ("a.csv", "key,value\n ,1\n", "line 2: the key is empty"),
        ("a.csv", "name,value\nx,1\n", "line 1: needs the columns 'key' and 'value'"),
        ("a.csv", "key,value\nx\n", "line 2: needs a text as 'key' and as 'value'"),
        ("a.csv", 'key,value\n"x,1\n', "line 2: unexpected end of data"),
        ("a.csv", "", "line 1: needs the columns"),
        ("a.csv", "key,value\n", "has no keys"),
        ("a.jsonl", '{"key": "x"}', "line 1: needs a text as 'key' and as 'value'"),
        ("a.jsonl", '{"key": "x", "value": 5}', "line 1: needs a text as"),
        ("a.jsonl", "[]", "line 1: needs a text as"),
        ("a.jsonl", "\n{", "line 2: not valid JSON"),
        ("a.txt", "", "must be a table FILE.csv or FILE.jsonl, a URL, or exec:PATH"),
    ],
)
def test_invalid_tables_are_user_errors(tmp_path: Path, name: str, text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as error:
        open_lookup(write(tmp_path, text, name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("none.csv", "no such file"),
        (".csv/..", "must be a table"),
        ("http://", "not a valid URL"),
        ("http://a:99999/", "not a valid URL"),
        ("http://a b/", "not a valid URL"),
        ("exec:none", "no such file"),
        (f"exec:{__file__}", r"not executable: run chmod \+x"),
    ],
)
def test_invalid_sources_are_user_errors(source: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        open_lookup(source)


# Executables


def script(folder: Path, body: str) -> str:
    path = Path(write(folder, f"#!/bin/sh\n{body}\n", "find"))
    path.chmod(0o755)
    return f"exec:{path}"


def test_an_executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the text and need not read it. Its result is limited in size and time."""
    assert found(script(tmp_path, "cat; echo '!'"), "äb") == "äb!\n"
    assert found(script(tmp_path, "echo x"), "y" * 10**6) == "x\n"
    with pytest.raises(ValueError, match="find ended with status 3"):
        found(script(tmp_path, "echo x; exit 3"))
    with pytest.raises(ValueError, match=f"more than {MAX_BYTES} bytes"):
        found(script(tmp_path, "yes"))
    with pytest.raises(UnicodeDecodeError):
        found(script(tmp_path, r"printf '\377'"))
    monkeypatch.setattr(module, "SECONDS", 0.3)
    with pytest.raises(TimeoutError, match="no result within 10 s"):
        found(script(tmp_path, "echo x; sleep 600 & wait"))


# Web addresses


@pytest.fixture
def address() -> Iterator[str]:
    """The address of a server whose paths are kinds of answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
            kind, data, status = {
                "/text": ("text/plain", f"{text}!", 200),
                "/json": ("application/json; charset=utf-8", json.dumps({"text": text}), 200),
                "/null": ("application/json", '{"text": null}', 200),
                "/number": ("application/json", '{"text": 5}', 200),
                "/list": ("application/json", "[", 200),
                "/large": ("text/plain", "x" * 10**7, 200),
                "/moved": ("text/plain", "", 302),
                "/lost": ("text/plain", "", 404),
                "/late": ("text/plain", "x" * 100, 200),
            }[self.path]
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Location", "/text")
            self.end_headers()
            if self.path == "/late":
                stopped.wait(60)
            self.wfile.write(data.encode())

        def log_message(self, *args: Any) -> None:
            """Prints nothing."""

    stopped = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    stopped.set()
    server.shutdown()
    server.server_close()


def test_a_web_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(f"{address}/text", "ä\n") == "ä\n!"
    assert found(f"{address}/json", "ä") == "ä"
    assert found(f"{address}/null") == ""
    for path, problem in (
        ("/number", "'text' is not a text"),
        ("/list", "not valid JSON"),
        ("/large", f"more than {MAX_BYTES} bytes"),
        ("/moved", "302"),
        ("/lost", "404"),
    ):
        with pytest.raises((ValueError, OSError, UserError), match=problem):
            found(address + path)
    monkeypatch.setattr(module, "SECONDS", 0.3)
    with pytest.raises(TimeoutError):
        found(f"{address}/late")
