"""Tasks in the asking world: facts that need a lookup, and questions about one of two people."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from random import Random

from entropix_jax.lab.tasks.task import Item, Split, Task, check_split
from entropix_jax.lab.tasks.tiny import as_chat, choose_split, digest, read_fact
from entropix_jax.lab.world import facts, lexicon
from entropix_jax.lab.world.asking import ABOUT_TWO, format_result

_PEOPLE = facts.create(facts.WORLD_SEED).people
_QUESTIONS = (("Where", " does {} live?"), ("What", " is the job of {}?"))
_RESULT = re.compile(r" ?\[[^\]]*\]")


@cache
def facts_of_all() -> Mapping[str, tuple[str, str]]:
    """Returns the town and the job of each person, by name. Those of strangers are in no text that
    the model was trained on."""
    rng = Random("strangers 0")
    strangers = {
        name: (rng.choice(lexicon.TOWNS), rng.choice(lexicon.JOBS)) for name in lexicon.STRANGERS
    }
    return {name: (one.town, one.job) for name, one in _PEOPLE.items()} | strangers


def lookup_table() -> dict[str, str]:
    """Returns the result of a lookup for each name."""
    return {name: format_result(name, *told) for name, told in facts_of_all().items()}


class _AskingFacts(Task):
    """Questions about the town and the job of known people, and about the town of strangers, for
    which the model needs a lookup."""

    name = "asking-facts"
    chat = True
    max_new_tokens = 24

    def items(self, split: Split, *, chat: bool) -> Iterator[Item]:
        check_split(split)
        answers: dict[str, str] = {}
        for name, told in facts_of_all().items():
            forms = _QUESTIONS[:1] if name in lexicon.STRANGERS else _QUESTIONS
            for (word, rest), answer in zip(forms, told, strict=False):
                answers[word + rest.format(name)] = answer
        kept = (asked for asked in sorted(answers, key=digest) if choose_split(asked) == split)
        for number, question in enumerate(kept, 1):
            yield Item(f"{self.name}-{split}-{number}", as_chat(question), answers[question])

    def extract(self, item: Item, text: str) -> str | None:
        """The fact in the first statement outside brackets."""
        return read_fact(item, _RESULT.sub("", text))


class _AskingAmbiguous(Task):
    """Questions about one of two people, `Anna met Nora. Where does she live?`, with different
    answers. The simulated user means one of both, and says which if the model asks."""

    name = "asking-ambiguous"
    chat = True
    max_new_tokens = 24
    has_user = True
    size = 200  # of each split

    def items(self, split: Split, *, chat: bool) -> Iterator[Item]:
        check_split(split)
        rng = Random(f"{self.name} 0")
        women = set(lexicon.WOMEN)
        groups = (lexicon.WOMEN, tuple(name for name in lexicon.PEOPLE if name not in women))
        found: set[str] = set()
        while len(found) < self.size:
            group, topic = rng.randrange(2), rng.choice([*ABOUT_TWO])
            one, other = rng.sample(groups[group], 2)
            before, after, _, attribute = ABOUT_TWO[topic]
            question = f"{one} met {other}. {topic}{before} {('she', 'he')[group]}{after}"
            answers = [getattr(_PEOPLE[name], attribute) for name in (one, other)]
            meant = rng.choice(answers)
            if answers[0] == answers[1] or choose_split(question) != split or question in found:
                continue
            found.add(question)
            truth = dict.fromkeys(answers, 0.5)
            yield Item(f"{self.name}-{split}-{len(found)}", as_chat(question), meant, truth)

    def extract(self, item: Item, text: str) -> str | None:
        return read_fact(item, text)

    def reply(self, item: Item, question: str) -> str | None:
        """Names the person whose fact is the answer, if the question names both."""
        assert item.truth is not None
        assert not isinstance(item.prompt, str)
        people = re.findall(r"[A-Z]\w+", item.prompt[-1]["content"])[:2]
        meant = people[[*item.truth].index(item.answer)]
        return f"{meant}." if all(re.search(rf"\b{name}\b", question) for name in people) else None


FACTS = _AskingFacts()
AMBIGUOUS = _AskingAmbiguous()
