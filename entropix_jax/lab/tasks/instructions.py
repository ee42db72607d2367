"""The official checkers of IFEval's instructions, as the lm-evaluation-harness ships them, without
its download of nltk's Punkt data.

Two verdicts are random in the original: languages are guessed by sampling, and where the wanted
`letter` is none, one is drawn. Both draws are seeded, so that verdicts repeat.
"""

import importlib
import io
import logging
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from unittest import mock

from entropix_jax.errors import Note, require

Instruction = tuple[str, Mapping[str, Any]]
"""An instruction's id and its arguments."""


def check(
    instructions: Sequence[Instruction], prompt: str, text: str, *, loose: bool = False
) -> list[bool]:
    """Whether a text follows each instruction of a prompt. `loose` accepts a text that follows it
    without its first line, its last line, or asterisks."""
    utils = load_checkers()
    kind = (
        utils.test_instruction_following_loose if loose else utils.test_instruction_following_strict
    )
    names, arguments = zip(*instructions, strict=True)
    with _seeded():
        found = kind(utils.InputExample(0, list(names), prompt, list(arguments)), text)
    followed: list[bool] = found.follow_instruction_list
    return followed


def find_problem(instructions: Sequence[Instruction], prompt: str) -> str:
    """What is wrong with instructions that cannot be checked; empty where nothing is."""
    known = load_checkers().instructions_registry.INSTRUCTION_DICT
    for name, arguments in instructions:
        if name not in known:
            return f"no instruction '{name}'"
        try:
            with _seeded():
                checker = known[name](name)
                checker.build_description(**arguments)
                if "prompt" in (checker.get_instruction_args() or ()):
                    checker.build_description(prompt=prompt)
        except Exception as error:  # of whatever kind its arguments cause
            return f"instruction '{name}': {type(error).__name__}: {error}"
    return ""


@cache
def load_checkers() -> Any:
    """lm_eval's module of the checkers, with splitters that work here. Warns (`Note`) once which
    splitter of sentences that is. UserError if a package is missing."""
    require("harness", "lm_eval", "langdetect", "immutabledict", "nltk")
    import langdetect
    import nltk

    # The import would download the data where there is none, and say that it did.
    with mock.patch.object(nltk, "download"), redirect_stdout(io.StringIO()):
        utils = importlib.import_module("lm_eval.tasks.ifeval.utils")
        helpers = importlib.import_module("lm_eval.tasks.ifeval.instructions_util")
    langdetect.DetectorFactory.seed = 0
    # A text of no language is no error: the original lets it pass.
    logging.getLogger("lm_eval.tasks.ifeval.instructions").setLevel(logging.CRITICAL)
    if _has_punkt():
        splitter = "nltk's data of Punkt, as in the original"
    else:
        _stand_in(helpers)
        splitter = "Punkt without its data, as nltk has none here: it knows no abbreviations"
    warnings.warn(f"ifeval: sentences are split by {splitter}", Note, stacklevel=2)
    return utils


def describe_checkers() -> dict[str, str]:
    """What verdicts depend on: versions, and whether sentences are split by nltk's data."""
    versions = {name: version(name) for name in ("lm_eval", "nltk", "langdetect")}
    return versions | {"punkt": "nltk's data" if _has_punkt() else "without data"}


def _has_punkt() -> bool:
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
    except LookupError:
        return False
    return True


def _stand_in(helpers: Any) -> None:
    """Replaces what needs Punkt's data in lm_eval's module: the splitters into sentences, and into
    words, which splits sentences first."""
    from nltk.tokenize import NLTKWordTokenizer, PunktSentenceTokenizer, RegexpTokenizer

    sentences, words = PunktSentenceTokenizer(), NLTKWordTokenizer()

    def split_words(text: str) -> list[str]:
        return [word for part in sentences.tokenize(text) for word in words.tokenize(part)]

    helpers._get_sentence_tokenizer = lambda: sentences
    helpers.nltk = SimpleNamespace(
        tokenize=SimpleNamespace(RegexpTokenizer=RegexpTokenizer), word_tokenize=split_words
    )


@contextmanager
def _seeded() -> Iterator[None]:
    """The same draws of Python's shared generator each time; its state is kept."""
    state = random.getstate()
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(state)
