"""SVAMP: one-step word problems, from the published JSON file (Patel et al. 2021,
arXiv:2103.07191).

An entry is an object with the texts `ID`, `Body` and `Question`, and the number `Answer`. Prompts
start with worked exemplars of this project's own, the first four of GSM8K's.
"""

import math
from collections.abc import Iterator
from decimal import Decimal

from entropix_jax.errors import UserError
from entropix_jax.lab.tasks.examples import ask_after
from entropix_jax.lab.tasks.files import Entry, FileTask, read_list
from entropix_jax.lab.tasks.gsm8k import read_number, worked_examples, write_number
from entropix_jax.lab.tasks.task import Item

EXAMPLES = 4


class Svamp(FileTask):
    """The problems; right is the number after `####`, else the last one."""

    name = "svamp"
    stop = ("\nQuestion:",)
    max_new_tokens = 128

    def read(self, *, chat: bool) -> Iterator[Item]:
        return (_parse(entry, chat) for entry in read_list(self.path))

    def extract(self, item: Item, text: str) -> str | None:
        """See `read_number`."""
        return read_number(text)


def _parse(entry: Entry, chat: bool) -> Item:
    match entry.value:
        case {"ID": str(name), "Body": str(body), "Question": str(question), "Answer": answer} if (
            isinstance(answer, int | float)
            and not isinstance(answer, bool)
            and (isinstance(answer, int) or math.isfinite(answer))
        ):
            problem = f"{body.strip()} {question.strip()}"
            prompt = ask_after(worked_examples()[:EXAMPLES], problem, chat=chat)
            return Item(name, prompt, write_number(Decimal(repr(answer))))
    raise UserError(
        f"{entry.where}: a problem is an object with the texts 'ID', 'Body' and 'Question', and the"
        " number 'Answer'"
    )
