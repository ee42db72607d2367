"""Requests: the inputs of a row, and their checks."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropix_jax.engine.calibrated import CalibratedSampler
from entropix_jax.engine.tokens import describe_token, find_no_token
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.errors import UserError, check_range
from entropix_jax.model.loading import LanguageModel
from entropix_jax.text.turns import stop_ids

MAX_SAMPLES = 1024  # rows of one prompt
_MAX_EOS = 32

# The text of a row so far to the text to insert, or None.
Lookup = Callable[[str], str | Future[str | None] | None]
# A row's number and the texts of its two best branches to the index of the one to commit, or None.
Ask = Callable[[int, Sequence[str]], int | Future[int | None] | None]


@dataclass(frozen=True, eq=False)
class Request:
    """One row to generate.

    Attributes:
        prompt: token ids, at least one.
        sampler: a sampler resolved for the model, see `calibrate_sampler`.
        max_new_tokens: the budget, `prefix` included.
        row_id: with `seed`, the key of the row's random numbers.
        seed: of the row's random numbers.
        eos_ids: tokens that end the row.
        stop: texts that end the row and are not part of its text.
        lookup: called with the row's text, prompt included, where the sampler's arm `lookup` serves
            it; returns the text to insert, or a future of it while other rows continue. The row
            samples after None, an empty text, an error, or a text that the row has or that exceeds
            its budget.
        ask: called with the row's number and the texts of the two best branches, better one first,
            when their scores are within the margin; returns the index of the branch to commit, None
            for the better one, or a future of either.
        clarify: whether the row may end with a question to the user, see the mechanism `clarify`.
        messages: the chat messages of the prompt, for the trace's header.
        tag: the caller's own; the engine passes it through.
        number: the row's number in results and traces. None: in order of arrival.
        prefix: the start of an earlier row's `log`, from a run that recorded states. The row
            continues after these tokens.
        forced: token ids that follow the prefix.
        action: name of the mechanism whose action the forced tokens have.
        chosen: whether a person chose the forced tokens.
    """

    prompt: Sequence[int]
    sampler: CalibratedSampler
    max_new_tokens: int = 256
    row_id: str = "0"
    seed: int = 0
    eos_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    lookup: Lookup | None = None
    ask: Ask | None = None
    clarify: bool = False
    messages: Sequence[Mapping[str, str]] | None = None
    tag: Any = None
    number: int | None = None
    prefix: Sequence[tuple[TokenRecord, bool]] = ()
    forced: Sequence[int] = ()
    action: str = "inject"
    chosen: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the settings of the row that the header of a trace lacks."""
        names = "row_id", "seed", "max_new_tokens"
        lists = {"eos_ids": [*map(int, self.eos_ids)], "stop": [*self.stop]}
        hooks = {name: getattr(self, name) is not None for name in ("lookup", "ask")}
        hooks["clarify"] = self.clarify
        return {**{name: getattr(self, name) for name in names}, **lists, **hooks}


def check_request(model: LanguageModel, request: Request, capacity: int | None = None) -> int:
    """Checks a request and returns the number of tokens that it may generate: `max_new_tokens`,
    limited by the model's positions and by `capacity`, the cache positions of a row, if given.
    UserError for a prompt that is empty, too long or has an invalid token id, a sampler that is not
    calibrated, a budget below one, or too many end tokens."""
    prompt, positions = len(request.prompt), model.config.max_positions
    if prompt == 0:
        raise UserError("the prompt is empty")
    if (strange := find_no_token(model, request.prompt)) is not None:
        raise UserError(f"the prompt holds {describe_token(model, strange)}")
    if not isinstance(request.sampler, CalibratedSampler):
        raise UserError("the sampler is not calibrated: see entropix_jax.calibrate_sampler")
    check_range("max_new_tokens", request.max_new_tokens, 1)
    if not all(isinstance(stop, str) and stop for stop in request.stop):
        raise UserError("stop strings must not be empty")
    padded_ids(all_end_ids(model, request))
    room = positions if capacity is None else min(positions, capacity)
    if prompt >= room:
        limit = "a row has room for" if room < positions else "the model has positions for"
        raise UserError(
            f"the prompt has {prompt} tokens, but {limit} {room}: shorten it to at most {room - 1}"
        )
    return min(request.max_new_tokens, room - prompt)


def all_end_ids(model: LanguageModel, request: Request) -> tuple[int, ...]:
    """Returns the request's end tokens and its stop strings that are control tokens."""
    stops = stop_ids(model.tokenizer, request.stop)
    return tuple(dict.fromkeys((*request.eos_ids, *stops)))


def padded_ids(ids: Sequence[int]) -> np.ndarray:
    """Returns end tokens as int32 [E] of fixed size; -1 matches no token. UserError if there are
    too many end tokens."""
    if len(ids) > _MAX_EOS:
        raise UserError(f"there are {len(ids)} end tokens, at most {_MAX_EOS} are possible")
    return np.array([*ids, *[-1] * (_MAX_EOS - len(ids))], np.int32)
