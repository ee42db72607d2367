"""Hooks of a request: the host's answers to a row that waits for a lookup or a choice."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Row
from entropix_jax.engine.trace import BranchRecord
from entropix_jax.errors import Note, UserError
from entropix_jax.text.intents import intent_entropy
from entropix_jax.text.tokenizer import Tokenizer

LOOKUP_SECONDS = 15.0  # after which a row continues without a result
_CHARACTERS = 32  # of a result for each of its tokens; the others are not encoded


class Insertion(NamedTuple):
    """The tokens that the host forces on a row."""

    tokens: list[int]  # empty: the row samples
    action: int  # of the tokens, an index into the sampler's mechanisms


NOTHING = Insertion([], 0)


@dataclass(frozen=True)
class Pending:
    """An answer that a row waits for."""

    future: Future[Any]
    take: Callable[[Future[Any]], None]  # called once the future is done or late
    deadline: float = math.inf  # by `time.monotonic`

    @property
    def is_over(self) -> bool:
        """Whether the row need not wait any longer."""
        return self.future.done() or time.monotonic() >= self.deadline


def call(hook: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Calls a hook and returns its future, or its result or error as a future that is done."""
    done: Future[Any] = Future()
    try:
        result = hook(*arguments)
        if isinstance(result, Future):
            return result
        done.set_result(result)
    except Exception as error:
        done.set_exception(error)
    return done


def found_text(future: Future[Any]) -> str:
    """Returns the result of a lookup, empty without one. A lookup that failed or is late has none,
    which a `Note` reports. UserError for another type."""
    try:
        found = future.result(timeout=0)
    except Exception as error:
        late = isinstance(error, TimeoutError) and not future.done()
        why = f"no result within {LOOKUP_SECONDS:g} s" if late else str(error)
        lines = why.strip().splitlines() or [type(error).__name__]
        note = f"a lookup failed: {lines[0]}: the row continues without it"
        warnings.warn(note, Note, stacklevel=2)
        return ""
    if not isinstance(found, str | None):
        raise UserError(f"lookup returned {found!r}: it must return a text, None or a Future")
    return found or ""


def result_tokens(tokenizer: Tokenizer, values: Mapping[str, Any], found: str) -> list[int]:
    """Returns the tokens of a lookup's result in the form of a sampler's `values`: `lookup.before`,
    the whole words of the first `lookup.most` tokens, and `lookup.after`. Empty without a result.
    """
    # The name of a control token in a text is not that token: it must not end a row or a turn.
    special, most = tokenizer.special_ids, values["lookup.most"]
    shown = found.strip()[: most * _CHARACTERS].encode("utf-8", "replace").decode()
    tokens = [i for i in tokenizer.encode_within(shown) if i not in special]
    if len(tokens) > most or len(shown) < len(found.strip()):
        shown = "".join(tokenizer.decode_within(tokens[:most]).strip().rsplit(maxsplit=1)[:-1])
    if not shown or not tokens:
        return []
    before, after = ("".join(values[f"lookup.{name}"]) for name in ("before", "after"))
    return [i for i in tokenizer.encode_within(before + shown + after) if i not in special]


def insert_result(
    request: Request, tokenizer: Tokenizer, ids: Sequence[int], remaining: int, found: str
) -> Insertion:
    """Returns the result of a lookup as tokens to force on a row with the text `ids`. Empty if they
    exceed the remaining budget, occur in the text, or contain a token that is never drawn."""
    sampler = request.sampler
    tokens = result_tokens(tokenizer, sampler.values, found)
    never = {*sampler.settings.unwritable.tolist()}
    starts = range(len(ids) - len(tokens) + 1)
    occurs = any([*ids[start : start + len(tokens)]] == tokens for start in starts)
    if len(tokens) > remaining or occurs or not never.isdisjoint(tokens):
        tokens = []
    return Insertion(tokens, sampler.parts.action("lookup"))


def ask_choice(row: Row, branches: Sequence[BranchRecord], ambiguous: bool) -> Future[Any]:
    """Returns the answer of `Request.ask` about the two best branches, None if the fork is not
    ambiguous."""
    ask = row.request.ask
    assert ask is not None
    if not ambiguous:
        return call(lambda: None)
    started = time.perf_counter()
    answer = call(ask, row.number, [branch.text for branch in two_best(branches)])
    row.waited += time.perf_counter() - started
    return answer


def choose_branch(
    request: Request, branches: Sequence[BranchRecord], answer: Any, remaining: int
) -> tuple[list[BranchRecord], Insertion]:
    """Returns the branches with the chosen one marked, and the tokens of that one to force.
    `answer` is that of `Request.ask`. UserError for an invalid one."""
    if answer not in (None, 0, 1):
        raise UserError(f"ask returned {answer!r}: it must return 0, 1, or None for the better")
    chosen = next(i for i, branch in enumerate(branches) if branch.chosen)
    if answer is not None:
        chosen = next(i for i, one in enumerate(branches) if one is two_best(branches)[answer])
    whole = request.sampler.values["branch.commit_all"]
    tokens = branches[chosen].tokens[: None if whole else 1][:remaining]
    marked = [replace(branch, chosen=i == chosen) for i, branch in enumerate(branches)]
    return marked, Insertion(tokens, request.sampler.parts.action("branch"))


def ask_question(request: Request, texts: Sequence[str]) -> tuple[float, Insertion]:
    """Returns the entropy over the intents of the branches of `clarify`, in bits, and the tokens to
    force: the prompt for a question if the entropy is within the bounds, else none."""
    values, entropy = request.sampler.values, intent_entropy(texts)
    asks = values["clarify.least"] <= entropy <= values["clarify.most"]
    prompt = request.sampler.settings.own["clarify"].prompt[0]
    tokens = prompt[prompt >= 0].tolist() if asks else []
    return entropy, Insertion(tokens, request.sampler.parts.action("clarify"))


def two_best(branches: Sequence[BranchRecord]) -> list[BranchRecord]:
    """Returns the two branches with the highest scores, the better one first."""
    scored = [(branch.score, branch) for branch in branches if branch.score is not None]
    return [branch for _, branch in sorted(scored, key=lambda pair: -pair[0])[:2]]
