"""The commands that are disturbed, each with little work, and what they need: inputs, and a server
of objects."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUCKET = "faults"


@dataclass(frozen=True)
class Command:
    """A command with little work."""

    module: str
    arguments: tuple[str, ...]
    resumes: bool = False
    grows: tuple[str, ...] = ()  # files that grow under their final name
    inputs: tuple[str, ...] = ()  # files of the place that are put beside it
    remote: bool = False


def batch_arguments(*more: str, output: str = "out.jsonl") -> tuple[str, ...]:
    """A batch of a few seconds."""
    work = ("--slots", "4", "--context", "128", "--max-new-tokens", "60", "--ignore-eos")
    return ("--input", "{inputs}/records.jsonl", "--output", output, *work, *more)


def _commands() -> dict[str, Command]:
    once = ("--prompt", "Once", "--max-new-tokens", "40", "--ignore-eos")
    parts = [f"out.part-{i:05}-of-00002.jsonl" for i in range(2)]
    merge = ("--input", "{inputs}/records.jsonl", "--output", "out.jsonl", "--merge", "2")
    sums = ("--task", "sums", "--sampler", "temperature", "greedy", "--items", "6", "--seeds", "2")
    shares = ("lelv=0.604", "helv=0.087", "lehv=0.038", "hehv=0.015")  # that the text allows
    return {
        "main": Command(
            "main",
            (*once, "--trace", "run.jsonl", "--report", "run.html"),
            grows=("run.jsonl",),
        ),
        "main-report": Command(
            "main",
            (*once, "--report", "run.html"),
        ),
        "batch": Command("batch", batch_arguments(), resumes=True, grows=("out.jsonl",)),
        "batch-trace": Command(
            "batch", batch_arguments("--trace", "traces"), resumes=True, grows=("out.jsonl",)
        ),
        "batch-s3": Command(
            "batch", batch_arguments(output="{bucket}/out.jsonl"), resumes=True, remote=True
        ),
        "merge": Command("batch", merge, inputs=(*parts, *(f"{part}.run.json" for part in parts))),
        "ablate": Command(
            "ablate",
            ("{inputs}/sweep.toml", "--output", "study", "--slots", "8"),
            resumes=True,
            grows=("study/test.jsonl",),
        ),
        "evaluate": Command(
            "evaluate",
            (*sums, "--tune", "2", "--tune-items", "4", "--output", "study", "--slots", "8"),
            resumes=True,
            grows=("study/test.jsonl", "study/tuning.jsonl"),
        ),
        "calibrate": Command(
            "calibrate",
            ("--texts", "{inputs}/text.txt", "--output", "mine.toml", "--wanted", *shares),
        ),
        "report": Command("report", ("run.jsonl", "--output", "page.html"), inputs=("run.jsonl",)),
        "inspect": Command("inspect", ("--text-file", "{inputs}/text.txt", "--format", "json")),
    }


COMMANDS = _commands()


def write_inputs(folder: Path) -> None:
    """What the commands read, as far as no other command has to write it."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = ("Guests:", "12 + 7 =", "Once", "Anna has 30 apples.", "Dear diary", "The")
    records = [{"id": f"r{i}", "prompt": prompts[i % len(prompts)], "seed": i} for i in range(36)]
    (folder / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    text = "Anna has 30 apples. Anna finds 4 apples. Once upon a time there was a king. "
    (folder / "text.txt").write_text(text * 12)
    (folder / "sweep.toml").write_text(
        'tasks = ["sums"]\nitems = 6\nseeds = [0, 1]\nbase = "entropix"\n\n'
        '[settings.no-branch]\n"arms.lehv" = "explore"\n'
    )


@contextmanager
def s3_server() -> Iterator[dict[str, str] | None]:
    """The environment in which commands find an S3 server on this machine; None where the packages
    for it are not installed."""
    try:
        import s3fs  # noqa: F401
        from moto.server import ThreadedMotoServer
    except ImportError:
        yield None
        return
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        files_of_server().mkdir(BUCKET)
        yield environment
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.stop()


def files_of_server() -> Any:
    """The objects of the server, as they are now."""
    import s3fs

    return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
