"""The public functions refuse what they cannot use, each in one line of the documented class."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import entropix_jax
from entropix_jax import Recording, Retriever, Sampler, UserError
from entropix_jax.engine.preparation import encode_prompt
from entropix_jax.engine.results import Rows
from entropix_jax.host import memory as free_memory
from entropix_jax.lab.tasks.gsm8k import Gsm8k
from entropix_jax.lab.tasks.registry import find_task
from entropix_jax.model.loading import LanguageModel
from entropix_jax.model.mesh import parse_mesh
from entropix_jax.sampler.proposal import draw
from tests.support.model_folders import write_model
from tests.support.runs import Spec, run_specs
from tests.support.samplers import calibrated

pytestmark = pytest.mark.filterwarnings("ignore:.*never calibrated")


@dataclass
class Place:
    """What a cause may use: the embedded model, a folder of its own, and ways to change things."""

    model: LanguageModel
    folder: Path
    patch: pytest.MonkeyPatch

    def file(self, name: str, content: str | bytes = "") -> str:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    def rows(self, prompt: tuple[int, ...] = (1,), **options: Any) -> Rows:
        """Of a run that has not begun."""
        return run_specs(self.model, [Spec(prompt)], "greedy", **options).rows

    def without_memory(self) -> Place:
        """No device has anything to give."""
        self.patch.setattr(free_memory, "free_bytes", lambda device: 0)
        return self

    def stream(self, *arguments: Any, **options: Any) -> Any:
        return entropix_jax.stream(self.model, *arguments, **options)

    def params(self, **changes: Any) -> Any:
        return changed(**changes).settings(
            num_layers=2, epsilon=0.0, encode=self.model.tokenizer.encode_within
        )


def sampler_of(name: str) -> Sampler:
    return entropix_jax.load_sampler(name)


def changed(preset: str = "entropix", **changes: Any) -> Sampler:
    return sampler_of(preset).with_values({k.replace("__", "."): v for k, v in changes.items()})


def calibrate(place: Place, thresholds: dict[str, float], **changes: Any) -> None:
    place.file("calibration.json", json.dumps({"thresholds": thresholds}))
    calibrated(changed(**changes), place.folder)


def not_finite(place: Place) -> None:
    """A checkpoint in which one weight is infinite."""
    folder = place.folder / "model"
    write_model(folder, lambda p: replace(p, final_norm=p.final_norm.at[0].set(jnp.inf)))
    entropix_jax.load(str(folder), check=True)


def no_repository(place: Place) -> None:
    place.patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    entropix_jax.load("nobody/no-such-model")


def no_device(place: Place) -> None:
    def fails() -> str:
        raise RuntimeError("no such platform")

    place.patch.setattr(jax, "default_backend", fails)
    entropix_jax.load("tiny")


def uneven_mesh(place: Place) -> None:
    devices = np.array(jax.devices()[:1] * 7).reshape(1, 7)
    entropix_jax.load("tiny", mesh=Mesh(devices, ("data", "model")))


def unreadable(place: Place) -> None:
    """A folder that even a superuser may not read, as it looks to the one who reads."""
    (place.folder / "below").mkdir()
    plain = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path).name == "below":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    place.patch.setattr(os, "scandir", refuse)
    Retriever(place.folder)


def rows_of_two_prompts(place: Place) -> None:
    rows = place.rows()
    rows.append(replace(rows[0], request=replace(rows[0].request, prompt=[1, 2])))
    rows.save_trace(place.folder / "trace.jsonl")


def without_template(place: Place) -> LanguageModel:
    tokenizer = copy.copy(place.model.tokenizer)
    tokenizer.chat_template = None
    return replace(place.model, tokenizer=tokenizer)


CONVERSATION = [{"role": "user", "content": "?"}]
FITTING = {"h1": 0.5, "h2": 2.0, "u1": 1.0, "u2": 2.0}
CROSSED = ["entropy < 1", "entropy > 2"]
OTHER_MODEL = '{"model_type": "gpt2"}'

# A name, the call, and the line.
CAUSES: list[tuple[str, Callable[[Place], Any], str]] = [
    ("no model", lambda at: entropix_jax.load("no folder"), "no such model"),
    ("no repository", no_repository, "nobody/no-such-model: no such folder, and not downloaded"),
    (
        "another architecture",
        lambda at: (at.file("config.json", OTHER_MODEL), entropix_jax.load(str(at.folder))),
        "config.json: .*gpt2",
    ),
    (
        "a type",
        lambda at: entropix_jax.load("tiny", dtype="float64"),
        "'float64', only float32",
    ),
    (
        "weights beyond memory",
        lambda at: (at.without_memory(), entropix_jax.load("tiny")),
        "its weights do not fit into memory: 7.3 MB of 0 kB",
    ),
    ("a weight", not_finite, "model.norm.weight"),
    ("a mesh", uneven_mesh, "7"),
    ("a device", no_device, "JAX finds no device .*no such platform"),
    ("no preset", lambda at: sampler_of("gredy"), "no sampler preset 'gredy'.*mean 'greedy'"),
    ("no file", lambda at: sampler_of(str(at.folder / "none.toml")), "none.toml: no such file"),
    (
        "no sampler",
        lambda at: sampler_of(at.file("other.toml", "title = 'a'")),
        "other.toml: no sampler key 'title'",
    ),
    ("a key", lambda at: changed(base__top_q=1), "no sampler key 'base.top_q', did you mean"),
    ("a value", lambda at: changed(base__top_k=0.5), "base.top_k = 0.5: must be an integer"),
    ("a range", lambda at: changed(base__top_p=1.5), r"base.top_p = 1.5: must lie in \["),
    (
        "bounds",
        lambda at: changed("document-001", regimes__lelv=CROSSED),
        "no entropy is above 2 and below 1",
    ),
    (
        "bounds beside the model's",
        lambda at: calibrate(at, FITTING, thresholds__h1=2.5),
        "thresholds.h1 = 2.5 is above thresholds.h2 = 2.0",
    ),
    (
        "the model's bounds",
        lambda at: calibrate(at, {**FITTING, "h1": 3.0}),
        "thresholds.h1 = 3.0 is above thresholds.h2 = 2.0",
    ),
    (
        "a threshold",
        lambda at: sampler_of("entropix").with_thresholds({"h1": -1.0}, "some file"),
        "some file: thresholds.h1 = -1.0: must lie in",
    ),
    (
        "an arm's name",
        lambda at: sampler_of("entropix").with_arm("branch", lambda *_: draw("sample", _[1])),
        "there is an arm 'branch' already",
    ),
    (
        "a long thought",
        lambda at: at.params(inject__thought="well, " * 65),
        "inject.thought is .* tokens long, at most 64",
    ),
    (
        "layer weights",
        lambda at: at.params(metrics__layers=[1.0, 1.0, 1.0]),
        "metrics.layers has 3 weights, the model has 2 layers",
    ),
    ("no folder", lambda at: Retriever(at.folder / "none"), "no such folder: "),
    ("a file", lambda at: Retriever(Path(at.file("a.txt", "text"))), "no such folder: "),
    ("unreadable", unreadable, "cannot be read: Permission"),
    (
        "not UTF-8",
        lambda at: (at.file("a.txt", b"caf\xe9"), Retriever(at.folder)),
        "a.txt: not UTF-8 at byte 3",
    ),
    ("no text", lambda at: (at.file("a.txt", " \n"), Retriever(at.folder)), "no text: "),
    (
        "no place for a trace",
        lambda at: at.rows().save_trace(at.folder / "none" / "trace.jsonl"),
        "trace.jsonl: cannot be written",
    ),
    ("two prompts", rows_of_two_prompts, "a trace is of one run with one prompt"),
    ("no run", lambda at: Rows().save_trace(at.folder / "a"), "a trace is of one run with one"),
    (
        "no place for a page",
        lambda at: at.rows().save_report(at.folder / "none" / "page.html"),
        "page.html: ",
    ),
    ("no page", lambda at: Rows().save_report(at.folder / "a.html"), "a trace is of one run with"),
    (
        "a banned token",
        lambda at: at.stream("Once", changed("greedy", draw__bans=[2**30])),
        "draw.bans holds 1073741824, which is no token",
    ),
    (
        "a recording",
        lambda at: at.rows(recording=Recording(top=10**6)),
        "the 1000000 likeliest tokens are asked for",
    ),
    (
        "rows beyond memory",
        lambda at: at.without_memory().rows(),
        "1 row of 256 tokens would not fit into memory: cache ",
    ),
    ("no prompt", lambda at: at.stream(""), "the prompt is empty"),
    ("no messages", lambda at: at.stream([]), "messages must be a non-empty list"),
    ("no samples", lambda at: at.stream("Once", samples=0), "samples must be at least 1, not 0"),
    ("a preset", lambda at: at.stream("Once", "gredy"), "no sampler preset 'gredy'"),
    ("no tokens", lambda at: at.stream("Once", max_new_tokens=0), "must be at least 1, not 0"),
    ("no chat", lambda at: at.stream(CONVERSATION, chat=False), "a conversation needs a chat"),
    ("a short text", lambda at: entropix_jax.score(at.model, ""), "the text is too short"),
    ("a context", lambda at: entropix_jax.score(at.model, "Once", context=10**9), "the context"),
    (
        "no template",
        lambda at: encode_prompt(without_template(at), "Hello", chat=True),
        "no chat template",
    ),
    (
        "a system message",
        lambda at: encode_prompt(at.model, "Hello", chat=False, system="Be kind."),
        "a system message needs a chat",
    ),
    *(
        (f"a split of {name}", lambda at, name=name: list(split_of(name)), "no split 'x'")
        for name in ("sums", "facts", "forks", "documents")
    ),
    (
        "a task's file",
        lambda at: list(Gsm8k(Path(at.file("a.jsonl", "{}"))).items("test", chat=False)),
        "a.jsonl",
    ),
]


def split_of(name: str) -> Any:
    return find_task(name).items("x", chat=False)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return entropix_jax.load("tiny")


@pytest.fixture
def place(model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(model, tmp_path, monkeypatch)


@pytest.mark.parametrize(("name", "call", "line"), CAUSES, ids=[name for name, *_ in CAUSES])
def test_an_error(name: str, call: Callable[[Place], Any], line: str, place: Place) -> None:
    with pytest.raises(UserError, match=line) as error:
        call(place)
    assert "\n" not in str(error.value)


def test_errors_of_a_program(place: Place) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        place.stream("x", max_tokens=1)
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        place.stream("x", seed=1.0)
    place.file("a.txt", "text")
    with pytest.raises(ValueError, match="a passage cannot have 0 characters"):
        Retriever(place.folder, longest=0)


def test_generate_refuses_what_stream_does(place: Place) -> None:
    wrong: list[Any] = [{"samples": 0}, {"max_new_tokens": 0}, {"sampler": "gredy"}]
    for options in wrong:
        with pytest.raises(UserError) as one:
            entropix_jax.stream(place.model, "Once", **options)
        with pytest.raises(UserError) as other:
            entropix_jax.generate(place.model, "Once", **options)
        assert str(one.value) == str(other.value)


def test_public_names() -> None:
    """Each is there, and listed for completion."""
    assert all(hasattr(entropix_jax, name) for name in entropix_jax.__all__)
    assert set(entropix_jax.__all__) < set(dir(entropix_jax))
    with pytest.raises(AttributeError, match="has no attribute 'inspect_text'"):
        entropix_jax.inspect_text  # noqa: B018


def test_a_mesh_that_is_named_wrongly() -> None:
    """What `load` is given as a mesh: of `mesh.parse_mesh`."""
    for text, line in (
        ("data", "not of the form"),
        ("rows=2", "not of the form"),
        ("data=3", "3 x 1 = 3 devices, but there are 2"),
    ):
        with pytest.raises(UserError, match=line):
            parse_mesh(text, jax.devices()[:2])


# What JAX says


DEPRECATED = """
import warnings


def old(level):
    warnings.warn("jax.old is deprecated", DeprecationWarning, stacklevel=level)
"""
CALLED = """
import importlib.util
import warnings

import pytest


def loaded(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("level", [1, 2])
def test_jax(level):
    loaded("entropix_jax.ours", "ours.py").call(loaded("jax._src.old", "jax_old.py").old, level)


def test_another_library():
    loaded("other.ours", "ours.py").call(loaded("other.old", "jax_old.py").old, 1)
"""


def test_a_deprecated_call_of_jax_is_an_error(tmp_path: Path) -> None:
    """Wherever JAX says that the call stands: in our module, or, as it often does, in its own."""
    (tmp_path / "jax_old.py").write_text(DEPRECATED)
    (tmp_path / "ours.py").write_text("def call(old, level):\n    old(level)\n")
    (tmp_path / "test_it.py").write_text(CALLED)
    settings = Path(__file__).parents[2] / "pyproject.toml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-c", str(settings), "--rootdir", str(tmp_path), "test_it.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("E       DeprecationWarning: jax.old is deprecated") == 2
