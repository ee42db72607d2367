"""Every error that a public function documents happens as it says: one line for each, or more."""

from __future__ import annotations

import copy
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import entropix_jax
from entropix_jax import (
    Generation,
    LanguageModel,
    Recording,
    Request,
    Retriever,
    Sampler,
    UserError,
    free_memory,
)
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms.plain import EdtSettings, sample
from entropix_jax.sampler.proposal import draw
from entropix_jax.sharding import parse_mesh
from entropix_jax.tasks.gsm8k import Gsm8k
from entropix_jax.tasks.registry import find_task
from entropix_jax.tasks.task import Item, Task
from tests.folders import write_model
from tests.samplers import calibrated

pytestmark = pytest.mark.filterwarnings("ignore:.*never calibrated")

# What the README shows besides the names of the package: by the name that it is known by here.
SHOWN: Mapping[str, Any] = {"draw": draw, "Item": Item, "Task": Task}


# What is documented


def public() -> dict[str, Any]:
    """Public functions, and methods that a public class has itself, by qualified name."""
    objects = {**{name: getattr(entropix_jax, name) for name in entropix_jax.__all__}, **SHOWN}
    found = {}
    for name, one in objects.items():
        if inspect.isfunction(one):
            found[name] = one
        elif inspect.isclass(one):
            members = vars(one).items()
            special = ("__init__", "__call__", "__iter__", "__next__")
            found |= {
                f"{name}.{member}": function
                for member, function in members
                if inspect.isfunction(function) and (member[0] != "_" or member in special)
            }
    return found


def errors_of(function: Any) -> dict[str, str]:
    """What a docstring's "Raises:" says of each class of errors, in one line."""
    told: dict[str, str] = {}
    _, _, section = (inspect.getdoc(function) or "").partition("\nRaises:\n")
    for line in section.splitlines():
        if line and not line.startswith("    "):
            break
        if match := re.match(r" {4}(\w+): (.*)", line):
            told[match[1]] = match[2]
        elif line.strip() and told:
            told[[*told][-1]] += " " + line.strip()
    return told


DOCUMENTED = {
    (name, kind): text
    for name, function in public().items()
    for kind, text in errors_of(function).items()
}


# What causes it


@dataclass
class Place:
    """What a cause may use: the embedded model, a folder of its own, and ways to change things."""

    model: LanguageModel
    folder: Path
    patch: pytest.MonkeyPatch

    def file(self, name: str, content: str | bytes = "") -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    def row(self, prompt: list[int], budget: int = 1) -> Generation:
        return Generation(self.model, [Request(prompt, "0", budget)], "greedy")

    def without_memory(self) -> Place:
        """No device has anything to give."""
        self.patch.setattr(free_memory, "free_bytes", lambda device: 0)
        return self

    def rows(self) -> entropix_jax.Rows:
        """Of a run that has not begun."""
        return self.row([1]).rows

    def settings(self, **changes: Any) -> Any:
        changes = {key.replace("__", "."): value for key, value in changes.items()}
        sampler = sampler_of("entropix").with_values(changes)
        encode = self.model.tokenizer.encode
        return sampler.settings(
            num_layers=2, epsilon=0.0, encode=lambda text: encode(text, add_bos=False)
        )


def sampler_of(name: str) -> Sampler:
    return entropix_jax.load_sampler(name)


def without_template(place: Place) -> LanguageModel:
    tokenizer = copy.copy(place.model.tokenizer)
    tokenizer.chat_template = None
    return replace(place.model, tokenizer=tokenizer)


def calibrate(place: Place, content: str, preset: str = "entropix", **changes: Any) -> None:
    place.file("calibration.json", content)
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    calibrated(sampler_of(preset).with_values(changes), place.folder)


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
    place.file("below/one.txt", "text")
    plain = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path).name == "below":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    place.patch.setattr(os, "scandir", refuse)
    Retriever(place.folder)


def rows_of_two_prompts(place: Place) -> None:
    rows = place.rows()
    rows.append(replace(rows[0], request=Request([1, 2], "1", 1)))
    rows.save_trace(place.folder / "trace.jsonl")


CONVERSATION = [{"role": "user", "content": "?"}]


def asked(task: Task, split: Any = "x") -> list[Item]:
    return list(task.items(split, chat=False))


THRESHOLDS = json.dumps({"thresholds": {"h1": 3.0, "h2": 2.0, "u1": 1.0, "u2": 2.0}})
FITTING = json.dumps({"thresholds": {"h1": 0.5, "h2": 2.0, "u1": 1.0, "u2": 2.0}})

Cause = tuple[str, Callable[[Place], Any], str]  # the words of the docstring, the call, the line
CAUSES: dict[tuple[str, str], list[Cause]] = {
    ("load", "UserError"): [
        ("no such model", lambda at: entropix_jax.load("no folder"), "no such model"),
        (
            "repository",
            no_repository,
            "nobody/no-such-model: no such folder, and not downloaded",
        ),
        (
            "one of an architecture that is not implemented",
            lambda at: (
                at.file("config.json", '{"model_type": "gpt2"}'),
                entropix_jax.load(str(at.folder)),
            ),
            "config.json: .*gpt2",
        ),
        (
            "an unknown type",
            lambda at: entropix_jax.load("tiny", dtype="float64"),
            "'float64', only float32",
        ),
        (
            "weights that memory has no room for",
            lambda at: (at.without_memory(), entropix_jax.load("tiny")),
            "its weights do not fit into memory: 7.3 MB of 0 kB",
        ),
        ("a weight that was looked at and is not finite", not_finite, "model.norm.weight"),
        ("a mesh over which the model cannot be split", uneven_mesh, "7"),
        (
            "a device that JAX was told to use and does not find",
            no_device,
            "JAX finds no device .*no such platform",
        ),
    ],
    ("load_sampler", "UserError"): [
        ("no such preset", lambda at: sampler_of("entropi"), "no sampler preset 'entropi'"),
        (
            "file",
            lambda at: sampler_of(str(at.folder / "none.toml")),
            "none.toml: no such file",
        ),
        ("(the nearest name is given)", lambda at: sampler_of("gredy"), "did you mean 'greedy'"),
        (
            "a file that is not a sampler",
            lambda at: sampler_of(at.file("other.toml", "title = 'a'")),
            "other.toml: no sampler key 'title'",
        ),
    ],
    ("Sampler.with_values", "UserError"): [
        (
            "an unknown key (the nearest known one is named)",
            lambda at: sampler_of("entropix").with_values({"base.top_q": 1}),
            "no sampler key 'base.top_q', did you mean 'base.top_p'",
        ),
        (
            "a value of the wrong type",
            lambda at: sampler_of("entropix").with_values({"base.top_k": 0.5}),
            "base.top_k = 0.5: must be an integer",
        ),
        (
            "out of range",
            lambda at: sampler_of("entropix").with_values({"base.top_p": 1.5}),
            r"base.top_p = 1.5: must lie in \[",
        ),
        (
            "bounds that nothing can lie between",
            lambda at: sampler_of("document-001").with_values(
                {"regimes.lelv": ["entropy < 1", "entropy > 2"]}
            ),
            "no entropy is above 2 and below 1",
        ),
        (
            "Thresholds that may only fit beside a model's own are checked by `with_thresholds`",
            lambda at: calibrate(at, FITTING, thresholds__h1=2.5),
            "thresholds.h1 = 2.5 is above thresholds.h2 = 2.0",
        ),
    ],
    ("Sampler.with_mechanism", "UserError"): [
        (
            "the name is taken",
            lambda at: sampler_of("entropix").with_mechanism(Mechanism("base", sample)),
            "there is a section 'base' already",
        ),
        (
            "a setting has no default or one that does not fit it",
            lambda at: sampler_of("entropix").with_mechanism(Mechanism("own", sample, EdtSettings)),
            "own.base = None: must be a number",
        ),
    ],
    ("Sampler.with_arm", "UserError"): [
        (
            "the name is taken",
            lambda at: sampler_of("entropix").with_arm("branch", lambda *_: draw("sample", _[1])),
            "there is an arm 'branch' already",
        )
    ],
    ("Sampler.with_thresholds", "UserError"): [
        (
            "a threshold is out of range",
            lambda at: sampler_of("entropix").with_thresholds({"h1": -1.0}, "some file"),
            "some file: thresholds.h1 = -1.0: must lie in",
        ),
        (
            "the bounds leave nothing between them",
            lambda at: calibrate(at, THRESHOLDS),
            "thresholds.h1 = 3.0 is above thresholds.h2 = 2.0",
        ),
    ],
    ("Sampler.settings", "UserError"): [
        (
            "a text with too many tokens",
            lambda at: at.settings(inject__thought="well, " * 65),
            "inject.thought is .* tokens long, at most 64",
        ),
        (
            "weights of layers that the model does not have",
            lambda at: at.settings(metrics__layers=[1.0, 1.0, 1.0]),
            "metrics.layers has 3 weights, the model has 2 layers",
        ),
    ],
    ("Retriever.__init__", "UserError"): [
        ("no such folder", lambda at: Retriever(at.folder / "none"), "no such folder: "),
        (
            "a file in its place",
            lambda at: Retriever(Path(at.file("a.txt", "text"))),
            "a file, not a folder",
        ),
        ("a file or folder below it that cannot be read", unreadable, "cannot be read: Permission"),
        (
            "is not UTF-8",
            lambda at: (at.file("a.txt", b"caf\xe9"), Retriever(at.folder)),
            "a.txt: not UTF-8 at byte 3",
        ),
        ("no text", lambda at: (at.file("a.txt", " \n"), Retriever(at.folder)), "no text: "),
    ],
    ("Retriever.__init__", "ValueError"): [
        (
            "`longest` is not positive",
            lambda at: (at.file("a.txt", "text"), Retriever(at.folder, longest=0)),
            "a passage cannot have 0 characters",
        )
    ],
    ("Rows.save_trace", "UserError"): [
        (
            "the file cannot be written",
            lambda at: at.rows().save_trace(at.folder / "none" / "trace.jsonl"),
            "trace.jsonl: cannot be written",
        ),
        (
            "the rows are not of one run with one prompt",
            rows_of_two_prompts,
            "a trace is of one run with one prompt",
        ),
        (
            "the rows are not of one run with one prompt",
            lambda at: entropix_jax.Rows().save_trace(at.folder / "trace.jsonl"),
            "a trace is of one run with one prompt",
        ),
    ],
    ("Rows.save_report", "UserError"): [
        (
            "as `save_trace`",
            lambda at: at.rows().save_report(at.folder / "none" / "page.html"),
            "page.html: ",
        ),
        (
            "as `save_trace`",
            lambda at: entropix_jax.Rows().save_report(at.folder / "page.html"),
            "a trace is of one run with one prompt",
        ),
    ],
    ("Generation.__init__", "UserError"): [
        ("no request", lambda at: Generation(at.model, [], "greedy"), "no request"),
        ("an empty prompt", lambda at: at.row([]), "the prompt is empty"),
        (
            "one that leaves no room for a token",
            lambda at: at.row([1] * at.model.config.max_positions),
            "leave room for an answer",
        ),
        (
            "holds what is no token",
            lambda at: at.row([at.model.config.vocab_size]),
            "which is no token",
        ),
        (
            "a sampler",
            lambda at: Generation(
                at.model,
                [Request([1], "0", 1)],
                sampler_of("greedy").with_values({"draw.bans": [2**30]}),
            ),
            "draw.bans holds 1073741824, which is no token",
        ),
        (
            "recording that does not fit the model",
            lambda at: Generation(
                at.model, [Request([1], "0", 1)], "greedy", recording=Recording(top=10**6)
            ),
            "the 1000000 likeliest tokens are asked for",
        ),
        (
            "rows that memory has no room for",
            lambda at: (at.without_memory(), at.row([1])),
            "1 row of 256 tokens would not fit into memory: cache ",
        ),
    ],
    ("stream", "TypeError"): [
        (
            "an unknown option",
            lambda at: entropix_jax.stream(at.model, "x", max_tokens=1),  # type: ignore[call-arg]
            "no such option: max_tokens",
        ),
        (
            "a number that is no integer",
            lambda at: entropix_jax.stream(at.model, "x", seed=1.0),  # type: ignore[arg-type]
            "'float' object cannot be interpreted as an integer",
        ),
    ],
    ("stream", "UserError"): [
        ("an input that cannot be used", lambda at: entropix_jax.stream(at.model, ""), "is empty"),
        (
            "an input that cannot be used",
            lambda at: entropix_jax.stream(at.model, "Once", samples=0),
            "samples must be at least 1, not 0",
        ),
        (
            "an input that cannot be used",
            lambda at: entropix_jax.stream(at.model, "Once", "gredy"),
            "no sampler preset 'gredy'",
        ),
        (
            "an input that cannot be used",
            lambda at: entropix_jax.stream(at.model, "Once", max_new_tokens=0),
            "max_new_tokens must be at least 1, not 0",
        ),
        (
            "an input that cannot be used",
            lambda at: entropix_jax.stream(at.model, CONVERSATION, chat=False),
            "a conversation needs a chat",
        ),
    ],
    ("inspect_text", "UserError"): [
        (
            "a text without two tokens",
            lambda at: entropix_jax.inspect_text(at.model, ""),
            "the text is too short",
        ),
        (
            "what `inspection.inspect` refuses",
            lambda at: entropix_jax.inspect_text(at.model, "Once upon", context=10**9),
            "context",
        ),
    ],
    ("encode_prompt", "UserError"): [
        (
            "an empty prompt",
            lambda at: entropix_jax.encode_prompt(at.model, "", chat=False),
            "the prompt is empty",
        ),
        (
            "a chat without a chat template",
            lambda at: entropix_jax.encode_prompt(without_template(at), "Hello", chat=True),
            "no chat template",
        ),
        (
            "a chat where none is wanted",
            lambda at: entropix_jax.encode_prompt(at.model, "Hello", chat=False, system="Be kind."),
            "a system message needs a chat",
        ),
    ],
    ("Task.items", "UserError"): [
        *(
            ("there is no such split", lambda at, name=name: asked(find_task(name)), "no split 'x'")
            for name in ("sums", "facts", "forks", "documents")
        ),
        (
            "there is no such split",
            lambda at: asked(Gsm8k(at.folder / "none.jsonl", at.folder / "none.jsonl")),
            "no split 'x'",
        ),
        (
            "its file cannot be used",
            lambda at: asked(Gsm8k(Path(at.file("a.jsonl", "{}"))), "test"),
            "a.jsonl",
        ),
        (
            "Perhaps while iterating",
            lambda at: find_task("facts").items("x", chat=False).__next__(),  # type: ignore[arg-type]
            "no split 'x'",
        ),
    ],
}


# The comparison


def uncovered(text: str, words: list[str]) -> str:
    """What is left of a docstring's line without the causes and what joins them."""
    for part in sorted(set(words), key=len, reverse=True):
        assert part in text, f"not in the docstring: {part!r}"
        text = text.replace(part, "", 1)
    return " ".join(word for word in re.findall(r"\w+", text) if word not in ("or", "and"))


def test_every_documented_error_has_a_cause() -> None:
    assert set(CAUSES) == set(DOCUMENTED)
    for where, text in DOCUMENTED.items():
        assert uncovered(text, [words for words, _, _ in CAUSES[where]]) == "", where


def test_what_the_comparison_finds() -> None:
    text = "no such folder, a file in its place or no text."
    assert uncovered(text, ["no such folder", "no text", "a file in its place"]) == ""
    assert uncovered(text, ["no such folder", "no text"]) == "a file in its place"
    with pytest.raises(AssertionError, match="not in the docstring: 'no file'"):
        uncovered(text, ["no file"])


def test_all_that_the_readme_imports_is_looked_at() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    imported = {
        name.strip()
        for names in re.findall(r"^from entropix_jax\S* import (.+)$", text, re.MULTILINE)
        for name in names.split(",")
    }
    assert imported == set(SHOWN)
    used = set(re.findall(r"entropix_jax\.(\w+)\(", text))
    assert used <= set(entropix_jax.__all__)
    assert {"load", "generate", "stream", "inspect_text", "Retriever"} <= used


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return entropix_jax.load("tiny")


@pytest.fixture
def place(model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(model, tmp_path, monkeypatch)


CALLS = [
    pytest.param(kind, call, line, id=f"{name}: {words}")
    for (name, kind), causes in CAUSES.items()
    for words, call, line in causes
]


@pytest.mark.parametrize(("kind", "call", "line"), CALLS)
def test_a_documented_error(
    kind: str, call: Callable[[Place], Any], line: str, place: Place
) -> None:
    """Of the class that is documented, in one line."""
    expected = {"UserError": UserError, "ValueError": ValueError, "TypeError": TypeError}[kind]
    with pytest.raises(expected, match=line) as error:
        call(place)
    assert type(error.value) is expected
    assert "\n" not in str(error.value)


def test_generate_refuses_what_stream_does(place: Place) -> None:
    wrong: list[Any] = [{"samples": 0}, {"max_new_tokens": 0}, {"sampler": "gredy"}]
    for options in wrong:
        with pytest.raises(UserError) as one:
            entropix_jax.stream(place.model, "Once", **options)
        with pytest.raises(UserError) as other:
            entropix_jax.generate(place.model, "Once", **options)
        assert str(one.value) == str(other.value)


def test_a_mesh_that_is_named_wrongly() -> None:
    """What `load` is given as a mesh: of `sharding.parse_mesh`."""
    for text, line in (
        ("data", "not of the form"),
        ("rows=2", "no such axis"),
        ("data=0", "must be at least 1"),
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
    settings = Path(__file__).parents[1] / "pyproject.toml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-c", str(settings), "--rootdir", str(tmp_path), "test_it.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("E       DeprecationWarning: jax.old is deprecated") == 2
