"""Public functions reject invalid arguments with a one-line error of the documented class."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest

import entropix_jax
from entropix_jax import Recording, UserError
from entropix_jax.engine.results import Rows
from entropix_jax.engine.tokens import encode_prompt
from entropix_jax.host import memory as free_memory
from entropix_jax.host.resources import resource_folder
from entropix_jax.lab.tasks.registry import find_task
from entropix_jax.model.loading import LanguageModel
from tests.support.runs import Spec, run_specs


@dataclass
class Place:
    """Fixtures for one case: the embedded model, an empty folder, and the monkeypatch."""

    model: LanguageModel
    folder: Path
    patch: pytest.MonkeyPatch

    def rows(self, prompt: tuple[int, ...] = (1,), **options: Any) -> Rows:
        """Returns the rows of a run that has not started."""
        return run_specs(self.model, [Spec(prompt)], "greedy", **options).rows

    def without_memory(self) -> Place:
        """Makes every device report 0 free bytes."""
        self.patch.setattr(free_memory, "free_bytes", lambda device: 0)
        return self

    def stream(self, *arguments: Any, **options: Any) -> Any:
        return entropix_jax.stream(self.model, *arguments, **options)


def other_architecture(place: Place) -> None:
    (place.folder / "config.json").write_text('{"model_type": "gpt2"}')
    entropix_jax.load(str(place.folder))


def no_device(place: Place) -> None:
    def fails() -> str:
        raise RuntimeError("no such platform")

    place.patch.setattr(jax, "default_backend", fails)
    entropix_jax.load("tiny")


def without_template(place: Place) -> None:
    tokenizer = copy.copy(place.model.tokenizer)
    tokenizer.chat_template = None
    encode_prompt(replace(place.model, tokenizer=tokenizer), "Hello", chat=True)


def split_of(name: str) -> Any:
    return list(find_task(name).items("x", chat=False))  # type: ignore[arg-type]


CONVERSATION = [{"role": "user", "content": "?"}]
GREEDY = entropix_jax.load_sampler("greedy")
TINY: Any = "tiny"  # a name in place of the model
FIVE: Any = 5
CONFIGS = resource_folder("configs")
BANNED = GREEDY.with_values({"draw.bans": [2**30]})
RAISED = GREEDY.with_values({"draw.bias": [[5, 1.0], [2**30, 1.0]]})

# The call, and its error message.
CAUSES: list[tuple[Callable[[Place], Any], str]] = [
    (lambda at: entropix_jax.load("no folder"), "no such model"),
    (other_architecture, "config.json: .*gpt2"),
    (lambda at: entropix_jax.load("tiny", dtype="float64"), "'float64', only float32"),
    (lambda at: (at.without_memory(), entropix_jax.load("tiny")), "memory: 7.3 MB of 0 kB"),
    (no_device, "JAX finds no device .*no such platform"),
    (lambda at: at.rows().save_trace(at.folder / "none" / "a.jsonl"), "a.jsonl: cannot be written"),
    (lambda at: Rows().save_trace(at.folder / "a"), "a trace needs rows of one run"),
    (lambda at: at.rows().save_report(at.folder / "none" / "page.html"), "page.html: "),
    (lambda at: Rows().save_report(at.folder / "a.html"), "a trace needs rows of one"),
    (lambda at: at.stream("Once", BANNED), "draw.bans holds 1073741824, which is not a token id"),
    (lambda at: at.stream("Once", RAISED), "draw.bias holds 1073741824, which is not a token id"),
    (lambda at: at.rows(recording=Recording(top=10**6)), "likely tokens must be at most 1024"),
    (lambda at: at.without_memory().rows(), "1 row of 256 tokens would not fit into memory: cache"),
    (lambda at: run_specs(at.model, []), "the list of requests is empty"),
    (lambda at: at.stream(""), "the prompt is empty"),
    (lambda at: at.stream(Path()), "prompt must be of type str or Sequence, not"),
    (lambda at: at.stream([]), "messages must be a non-empty list"),
    (lambda at: at.stream("Once", samples=0), "samples must be at least 1, not 0"),
    (lambda at: at.stream("Once", samples=1025), "samples must be at most 1024, not 1025"),
    (lambda at: at.stream("Once", stop=[5]), "stop strings must not be empty"),
    (lambda at: GREEDY.with_values(FIVE), "greedy: settings must be a dict of keys and values"),
    (lambda at: GREEDY.with_values({FIVE: 1}), "no sampler key '5'"),
    (lambda at: entropix_jax.load_sampler(FIVE), "name_or_path must be of type str or Path, not 5"),
    (lambda at: entropix_jax.load(at.folder / "none"), "no such model: '/"),
    (lambda at: entropix_jax.Engine(at.model, slots=0, capacity=1), "slots must be at least"),
    (lambda at: pickle.dumps(at.rows()), "rows cannot be pickled with their sampler"),
    (lambda at: at.stream("Once", max_new_tokens=0), "must be at least 1, not 0"),
    (lambda at: at.stream(CONVERSATION, chat=False), "a conversation needs a chat"),
    (lambda at: encode_prompt(at.model, "A", chat=False, system="B"), "message needs a chat"),
    (without_template, "no chat template"),
    (lambda at: entropix_jax.score(at.model, ""), "the text is too short"),
    (lambda at: entropix_jax.score(at.model, "Once", context=10**9), "context must be at most"),
    *((lambda at, n=n: split_of(n), "no split 'x'") for n in ("sums", "facts", "documents")),
]


@pytest.mark.parametrize(("call", "line"), CAUSES, ids=[line for _, line in CAUSES])
def test_user_errors_are_one_line(
    call: Callable[[Place], Any],
    line: str,
    tiny: LanguageModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match=line) as error:
        call(Place(tiny, tmp_path, monkeypatch))
    assert "\n" not in str(error.value)


WRONG = [
    *("x", b"x", 1.5, float("nan"), None, ["a", 1], {}, object(), 1j, np.float32(1.5)),
    *(np.array([1, 2]), 10**5000, len, Recording(top=TINY), pd.DataFrame({"a": ["x"]}), ...),
]
# Of these values, the valid ones of each function's arguments.
VALID = {
    "stream": (
        "prompt='x' ask=None chat=None recording=None lookup=None stop='x' stop=None "
        "system=None ask=<buil lookup=<buil"
    ),
    "score": "text='x' context=None recording=None",
    "load": "model=None dtype=None mesh=None",
    "calibrate_sampler": "",
}


@pytest.mark.parametrize("name", VALID)
def test_arguments_of_a_wrong_type_are_user_errors(name: str, tiny: LanguageModel) -> None:
    function, accepted = getattr(entropix_jax, name), set[str]()
    names = signature(function).parameters
    usual: dict[str, Any] = {"model": tiny, "sampler": GREEDY, "prompt": "Once", "text": "So be it"}
    usual = {"model": "tiny"} if name == "load" else {k: usual[k] for k in usual if k in names}
    for key, value in itertools.product(names, WRONG):
        with suppress(UserError):
            function(**usual | {key: value})
            accepted.add(f"{key}={value!r:.5}")
    assert accepted == {*VALID[name].split()}


def test_misuse_raises_type_errors(tiny: LanguageModel) -> None:
    wrong: Any = {"max_tokens": 1}
    with pytest.raises(TypeError, match="max_tokens"):
        entropix_jax.stream(tiny, "x", **wrong)


def test_what_is_converted_and_copied(tiny: LanguageModel) -> None:
    prompts: Any = np.array(["Once", "Twice"])
    options: Any = {"samples": 1.0, "max_new_tokens": np.int64(3), "stop": None}
    run = entropix_jax.stream(tiny, prompts, CONFIGS / "greedy.toml", **options)
    assert [row.request.max_new_tokens for row in run.rows] == [3, 3]
    values: Any = {"base.top_k": np.int64(3), "branch.width": 2.0, "draw.bans": np.array([5])}
    changed = entropix_jax.load_sampler(Path("greedy")).with_values(values)
    assert repr(changed) == "<Sampler 'greedy': base.top_k=3, branch.width=2, draw.bans=[5]>"
    assert copy.copy(changed) == pickle.loads(pickle.dumps(changed)) == changed
    copied = [row.request.prompt for row in copy.deepcopy(run.rows)]
    assert copied == [row.request.prompt for row in run.rows]
