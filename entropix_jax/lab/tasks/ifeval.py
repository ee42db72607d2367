"""IFEval: prompts with instructions that a program can check, from the published JSON Lines file
(Zhou et al. 2023, arXiv:2311.07911).

The checkers are the official ones, as shipped by the lm-evaluation-harness. Verdicts depend only on
package versions. Punkt splits sentences without the data that the original downloads. Two checks
are random in the original: languages are guessed by sampling, and a `letter` that is not a letter
is replaced by a random one. Both draws are seeded.
"""

import importlib
import io
import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from entropix_jax.errors import require
from entropix_jax.host.arguments import as_integer
from entropix_jax.lab.tasks.files import JsonTask
from entropix_jax.lab.tasks.task import Item

Instruction = tuple[str, Mapping[str, Any]]
"""An instruction's id and its arguments."""


def check(
    instructions: Sequence[Instruction], prompt: str, text: str, *, loose: bool = False
) -> list[bool]:
    """Returns whether a text follows each instruction of a prompt. `loose` also accepts a text that
    does so without its first line, its last line, or asterisks."""
    utils = load_checkers()
    kind = (
        utils.test_instruction_following_loose if loose else utils.test_instruction_following_strict
    )
    names, arguments = zip(*instructions, strict=True)
    with _seeded():
        found = kind(utils.InputExample(0, list(names), prompt, list(arguments)), text)
    followed: list[bool] = found.follow_instruction_list
    return followed


@cache
def load_checkers() -> Any:
    """Returns lm_eval's module of the checkers, with seeded draws and without downloads. UserError
    if a package is missing."""
    require("harness", "lm_eval", "langdetect", "immutabledict", "nltk")
    import langdetect
    import nltk
    from nltk.tokenize import NLTKWordTokenizer, PunktSentenceTokenizer, RegexpTokenizer

    # The import would download the data of Punkt, and print that it did.
    with mock.patch.object(nltk, "download"), redirect_stdout(io.StringIO()):
        utils = importlib.import_module("lm_eval.tasks.ifeval.utils")
        helpers: Any = importlib.import_module("lm_eval.tasks.ifeval.instructions_util")
    langdetect.DetectorFactory.seed = 0
    # The original accepts a text without a language, and logs an error.
    logging.getLogger("lm_eval.tasks.ifeval.instructions").setLevel(logging.CRITICAL)
    sentences, words = PunktSentenceTokenizer(), NLTKWordTokenizer()

    def split_words(text: str) -> list[str]:
        return [word for part in sentences.tokenize(text) for word in words.tokenize(part)]

    # These need the data.
    helpers._get_sentence_tokenizer = lambda: sentences
    helpers.nltk = SimpleNamespace(
        tokenize=SimpleNamespace(RegexpTokenizer=RegexpTokenizer), word_tokenize=split_words
    )
    return utils


@contextmanager
def _seeded() -> Iterator[None]:
    """Seeds Python's shared generator, and restores its state at the end."""
    state = random.getstate()
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(state)


class IfEval(JsonTask):
    """The prompts of IFEval. An answer is the list of instructions that a text follows, as JSON. It
    is right if the text follows all. A prompt's score is its strict accuracy."""

    name = "ifeval"
    published = "ifeval.jsonl"
    max_new_tokens = 512
    votes = False
    form = (
        "an object with the integer 'key', the text 'prompt', the texts 'instruction_id_list', and"
        " as many objects 'kwargs'"
    )

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        load_checkers()

    def parse(self, value: Any, number: int, *, chat: bool) -> Item | None:
        match value:
            case {
                "key": key,
                "prompt": str(prompt),
                "instruction_id_list": [str(), *_] as names,
                "kwargs": [*arguments],
            } if prompt.strip() and len(names) == len(arguments) and as_integer(key) is not None:
                # A form of the data has all arguments there are, null where they do not apply.
                instructions = [
                    (name, {key: value for key, value in given.items() if value is not None})
                    for name, given in zip(names, arguments, strict=True)
                    if isinstance(name, str) and isinstance(given, dict)
                ]
                if len(instructions) == len(names):
                    return Item(str(as_integer(key)), prompt, _write(instructions))
        return None

    def identity(self) -> Mapping[str, str]:
        """The versions of the checkers and of the packages that they use."""
        versions = {name: version(name) for name in ("lm_eval", "nltk", "langdetect")}
        return versions | {"punkt": "without data"}

    def extract(self, item: Item, text: str) -> str | None:
        """The instructions that the text follows."""
        instructions = _instructions(item)
        followed = _check(item, text)
        return _write([i for i, done in zip(instructions, followed, strict=True) if done])

    def measures(self, item: Item, text: str) -> Mapping[str, tuple[float, float]]:
        """Returns the other accuracies: loose for prompts, both for instructions."""
        strict = _check(item, text)
        loose = check(_instructions(item), str(item.prompt), text, loose=True)
        return {
            "prompt_loose": (float(all(loose)), 1.0),
            "instructions_strict": (float(sum(strict)), float(len(strict))),
            "instructions_loose": (float(sum(loose)), float(len(loose))),
        }


def _write(instructions: Sequence[Instruction]) -> str:
    return json.dumps(instructions, ensure_ascii=False)


def _instructions(item: Item) -> list[Instruction]:
    return [(name, arguments) for name, arguments in json.loads(item.answer)]


@lru_cache(maxsize=1)  # `measures` follows `extract`
def _check(item: Item, text: str) -> list[bool]:
    return check(_instructions(item), str(item.prompt), text)
