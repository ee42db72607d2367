"""NQ-open: short questions of users of a search engine, with lists of right answers, from the
published JSON Lines file (Kwiatkowski et al. 2019; Lee et al. 2019, arXiv:1906.00300).

An entry is an object with the text `question` and the list of texts `answer`. Prompts start with
five questions of this project's own.
"""

import re
import string
import unicodedata
from collections.abc import Iterator

from entropix_jax.errors import UserError
from entropix_jax.lab.tasks.examples import ask_after
from entropix_jax.lab.tasks.files import Entry, FileTask, read_lines
from entropix_jax.lab.tasks.task import Item

# In lower case, as in the data, which has no question marks.
EXEMPLARS = (
    ("which planet of the solar system has the most mass?", "Jupiter"),
    ("who wrote the novel pride and prejudice?", "Jane Austen"),
    ("what do you call a polygon with seven sides?", "a heptagon"),
    ("in which year did the berlin wall fall?", "1989"),
    ("what is the capital city of new zealand?", "Wellington"),
)
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class NqOpen(FileTask):
    """The questions; right is exactly one of the answers, after `normalize_answer`."""

    name = "nq-open"
    stop = ("\n",)
    max_new_tokens = 16

    def read(self, *, chat: bool) -> Iterator[Item]:
        return (_parse(entry, chat) for entry in read_lines(self.path))

    def extract(self, item: Item, text: str) -> str | None:
        """The whole text, normalized; None if nothing is left of it."""
        return normalize_answer(text) or None

    def score(self, item: Item, answer: str | None) -> float:
        """1 for one of the answers, else 0. Of two published ones nothing is left, so that no
        answer is right there: as in the published evaluation."""
        return float((answer or "") in item.accepted)


def normalize_answer(text: str) -> str:
    """Lower case without punctuation, articles and superfluous white space, as in the evaluation of
    Lee et al., which is that of SQuAD (Rajpurkar et al. 2016) on decomposed characters."""
    text = unicodedata.normalize("NFD", text).lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", text).split())


def _parse(entry: Entry, chat: bool) -> Item:
    match entry.value:
        case {"question": str(question), "answer": [str(), *_] as answers} if (
            question.strip() and all(isinstance(answer, str) for answer in answers)
        ):
            accepted = tuple(dict.fromkeys(map(normalize_answer, answers)))
            prompt = ask_after(EXEMPLARS, f"{question.strip()}?", chat=chat)
            return Item(f"nq-open-{entry.number}", prompt, "", accepted=accepted)
    raise UserError(
        f"{entry.where}: an entry is an object with the text 'question' and the list of texts"
        " 'answer'"
    )
