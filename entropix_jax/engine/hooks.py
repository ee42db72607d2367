"""Hooks of a request: the host's answers to a row that waits for a text or a choice."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Row
from entropix_jax.engine.trace import BranchRecord
from entropix_jax.errors import UserError
from entropix_jax.text.intents import intent_entropy
from entropix_jax.text.tokenizer import Tokenizer


class Insertion(NamedTuple):
    """The tokens that the host forces on a row."""

    tokens: list[int]  # empty: the row samples
    action: int  # of the tokens, an index into the sampler's mechanisms


NOTHING = Insertion([], 0)


def retrieve_thought(
    request: Request, tokenizer: Tokenizer, text: str, turn: int, remaining: int
) -> Insertion:
    """Calls `Request.retrieve` with the row's text. Returns its text, else the sampler's own
    thought: the first of the two that fits into the remaining budget and contains no token that is
    never drawn. `turn` is the number of earlier calls."""
    assert request.retrieve is not None
    settings = request.sampler.settings
    found = request.retrieve(text)
    if not isinstance(found, str):
        raise UserError(f'retrieve returned {found!r}: it must return a text, "" for no thought')
    # The name of a control token in a text is not that token: it must not end a row or a turn.
    special = tokenizer.special_ids
    retrieved = [i for i in tokenizer.encode_within(found) if i not in special]
    thoughts = [ids[ids >= 0].tolist() for ids in settings.own["inject"].thought if ids[0] >= 0]
    turn %= max(len(thoughts), 1)
    candidates = (retrieved, *thoughts[turn : turn + 1])
    fitting = (tokens for tokens in candidates if 0 < len(tokens) <= remaining)
    never = {*settings.unwritable.tolist()}
    allowed = (tokens for tokens in fitting if never.isdisjoint(tokens))
    return Insertion(next(allowed, []), request.sampler.parts.action("inject"))


def choose_branch(
    row: Row, branches: Sequence[BranchRecord], ambiguous: bool, remaining: int
) -> tuple[list[BranchRecord], Insertion]:
    """Returns the branches with the chosen one marked, and the tokens of that one to force. If the
    fork is ambiguous, `Request.ask` chooses between the two best branches."""
    request = row.request
    assert request.ask is not None
    chosen = next(i for i, branch in enumerate(branches) if branch.chosen)
    if ambiguous:
        two = two_best(branches)
        started = time.perf_counter()
        answer = request.ask(row.number, [branch.text for branch in two])
        row.waited += time.perf_counter() - started
        if answer not in (None, 0, 1):
            raise UserError(f"ask returned {answer!r}: it must return 0, 1, or None for the better")
        if answer is not None:
            chosen = next(i for i, branch in enumerate(branches) if branch is two[answer])
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
