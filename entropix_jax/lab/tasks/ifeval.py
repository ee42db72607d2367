"""IFEval: prompts with instructions that a program can check, from the published JSON Lines file
(Zhou et al. 2023, arXiv:2311.07911).

An entry is an object with the integer `key`, the text `prompt`, the texts `instruction_id_list`,
and an object of arguments for each of them, `kwargs`. The checkers are the official ones.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path

from entropix_jax.errors import UserError
from entropix_jax.lab.tasks.files import Entry, FileTask, read_lines
from entropix_jax.lab.tasks.instructions import (
    Instruction,
    check,
    describe_checkers,
    find_problem,
    load_checkers,
)
from entropix_jax.lab.tasks.task import Item


class IfEval(FileTask):
    """The prompts. An answer is the list of instructions that a text follows, as JSON; right is one
    that follows all. A prompt's score is its strict accuracy."""

    name = "ifeval"
    max_new_tokens = 512
    votes = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        load_checkers()

    def read(self, *, chat: bool) -> Iterator[Item]:
        return map(_parse, read_lines(self.path))

    def identity(self) -> Mapping[str, str]:
        """The versions of the checkers and of what they use, and how sentences are split."""
        return describe_checkers()

    def extract(self, item: Item, text: str) -> str | None:
        """The instructions that the text follows."""
        instructions = _instructions(item)
        followed = _check(item, text)
        return _write([i for i, done in zip(instructions, followed, strict=True) if done])

    def measures(self, item: Item, text: str) -> Mapping[str, tuple[float, float]]:
        """The other three accuracies: of whole prompts, loose, and of instructions."""
        strict = _check(item, text)
        loose = check(_instructions(item), _asked(item), text, loose=True)
        return {
            "prompt_loose": (float(all(loose)), 1.0),
            "instructions_strict": (float(sum(strict)), float(len(strict))),
            "instructions_loose": (float(sum(loose)), float(len(loose))),
        }


def _parse(entry: Entry) -> Item:
    match entry.value:
        case {
            "key": int(key),
            "prompt": str(prompt),
            "instruction_id_list": [str(), *_] as names,
            "kwargs": [*arguments],
        } if prompt.strip() and len(names) == len(arguments):
            # A form of the data has all arguments there are, null where they do not apply.
            instructions = [
                (name, {key: value for key, value in given.items() if value is not None})
                for name, given in zip(names, arguments, strict=True)
                if isinstance(name, str) and isinstance(given, dict)
            ]
            if len(instructions) == len(names):
                item = Item(str(key), prompt, _write(instructions))
                if problem := _find_problem(item):
                    raise UserError(f"{entry.where}: {problem}")
                return item
    raise UserError(
        f"{entry.where}: an entry is an object with the integer 'key', the text 'prompt', the texts"
        " 'instruction_id_list', and as many objects 'kwargs'"
    )


@cache  # a study reads its items several times
def _find_problem(item: Item) -> str:
    return find_problem(_instructions(item), _asked(item))


def _write(instructions: Sequence[Instruction]) -> str:
    return json.dumps(instructions, ensure_ascii=False)


def _instructions(item: Item) -> list[Instruction]:
    return [(name, arguments) for name, arguments in json.loads(item.answer)]


@lru_cache(maxsize=1)  # `measures` follows `extract`
def _check(item: Item, text: str) -> list[bool]:
    return check(_instructions(item), _asked(item), text)


def _asked(item: Item) -> str:
    assert isinstance(item.prompt, str)
    return item.prompt
