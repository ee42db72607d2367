"""Converts the device's records of a chunk of steps to typed records on the host."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import jax
import numpy as np

from entropix_jax.engine.slots import Layout
from entropix_jax.engine.state import Extras, ForkEnd, Recording, StepRecord
from entropix_jax.engine.trace import TokenRecord, plain
from entropix_jax.errors import check_range
from entropix_jax.host.arguments import check_type
from entropix_jax.model.loading import LanguageModel
from entropix_jax.names import REGIMES
from entropix_jax.sampler.metrics import Metrics

MAX_TOP = 1024  # maximum number of most likely tokens in a record

Decode = Callable[[Sequence[int]], str]  # a tokenizer's `decode_within`
_REQUIRED = [field.name for field in fields(TokenRecord) if field.default is MISSING]
_OPTIONAL = [field.name for field in fields(TokenRecord) if field.default is not MISSING]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of one step for one row or one branch of it.

    Attributes:
        slot: the row's slot.
        live: whether the row or branch took the step; False if the record only ends a fork.
        token: the committed token, without its text. If the row waits for the host or is forked,
            the step's proposal; if it failed, the failed position.
        branch: index of the branch in the row's fork; -1: the row itself.
        candidates: if the row is forked, the branches' first tokens and their log-probabilities.
        joined: if all branches have ended, the end of the fork, as Python values.
        status: see `DecodeState`.
        rewinds: whether the row goes back to the token's position, without a token.
        settled: the position that the next steps cannot go back beyond.
    """

    slot: int
    live: bool
    token: TokenRecord
    branch: int
    candidates: list[tuple[int, float]]
    joined: ForkEnd | None
    status: int
    rewinds: bool
    settled: int


def outcomes(
    layout: Layout,
    numbers: Sequence[int],
    actions: Sequence[str],
    records: StepRecord,
    recording: Recording,
    decode: Decode,
) -> Iterator[StepOutcome]:
    """Returns the outcomes of a chunk, step by step. Within a step lanes come first, so that a
    fork's branches are known when it ends.

    Args:
        layout: of the state.
        numbers: the row number of each slot, [B].
        actions: the names of the sampler's mechanisms.
        records: fields [steps, P, ...], NumPy.
    """
    slot_of = layout.slot_of
    if records.live.shape[1] == len(slot_of):  # the lanes took part
        lanes_first = np.argsort(slot_of >= 0, kind="stable")
        records = jax.tree.map(lambda x: x[:, lanes_first], records)
    reports = records.live | records.joined.joins
    records = jax.tree.map(lambda x: x[reports], records)
    slot = slot_of[records.parent]
    indices, end = range(len(slot)), records.joined
    return map(
        StepOutcome,
        slot.tolist(),
        plain(records.live),
        _step_tokens([numbers[i] for i in slot], actions, records, recording, decode),
        plain(records.branch),
        [_candidates(records, i) for i in indices],
        [jax.tree.map(lambda x, i=i: plain(x[i]), end) if end.joins[i] else None for i in indices],
        plain(records.status),
        plain(records.rewinds),
        plain(records.settled),
    )


def _step_tokens(
    rows: Sequence[int],
    actions: Sequence[str],
    records: StepRecord,
    recording: Recording,
    decode: Decode,
) -> list[TokenRecord]:
    """The token of each record, whose fields are [n, ...]."""
    choice, proposal = records.choice, records.choice.proposal
    observation = choice.observation
    columns: dict[str, Sequence[Any]] = {
        "row": rows,
        "position": plain(records.position),
        "token_id": plain(choice.token),
        "text": [""] * len(rows),
        "action": [actions[action] for action in plain(proposal.action)],
        "logprob": plain(choice.logprob),
        "temperature": plain(proposal.temperature),
        "top_k": plain(proposal.top_k),
        "top_p": plain(proposal.top_p),
        "min_p": plain(proposal.min_p),
        "forwards": plain(records.forwards),
        "loop": plain(observation.rounds > 0),
        "confidence": plain(observation.confidence),
        **measured(
            observation.regime,
            observation.sequence_varentropy,
            observation.metrics,
            (observation.token_confidence, observation.self_certainty, observation.max_prob),
            observation.p_wrong,
        ),
        **extras_fields(records.extras, recording, decode),
    }
    if recording.state:
        leaves, tree = jax.tree.flatten(records.tally)
        columns["state"] = [jax.tree.unflatten(tree, one) for one in zip(*leaves, strict=True)]
    # In order, without a dictionary for each token: this is most of what the host does for one.
    ordered = [columns.pop(name) for name in _REQUIRED]
    ordered += [columns.pop(name, [None] * len(rows)) for name in _OPTIONAL]
    assert not columns
    return [TokenRecord(*values) for values in zip(*ordered, strict=True)]


def _candidates(records: StepRecord, i: int) -> list[tuple[int, float]]:
    """The branches' first tokens in record `i`, with log-probabilities; empty if it has no fork."""
    if not (width := records.width[i]):
        return []
    ids, logprobs = plain(records.candidates[i, :width]), plain(records.logprobs[i, :width])
    return list(zip(ids, logprobs, strict=True))


def measured(
    regime: Any,
    sequence_varentropy: Any,
    metrics: Metrics,
    confidences: Iterable[Any],
    p_wrong: Any,
) -> dict[str, list[Any]]:
    """Returns the fields of `MeasuredToken` that are measured, of n tokens, and `p_wrong`, None
    where it is NaN. `confidences` are those of `metrics.measure_confidence`. Arrays are [n]."""
    names = "token_confidence", "self_certainty", "max_prob"
    return {
        "regime": [REGIMES[index] for index in plain(regime)],
        "sequence_varentropy": plain(sequence_varentropy),
        **{name: plain(values) for name, values in vars(metrics).items()},
        **dict(zip(names, map(plain, confidences), strict=True)),
        "p_wrong": [None if math.isnan(p) else p for p in plain(p_wrong)],
    }


def extras_fields(extras: Extras, recording: Recording, decode: Decode) -> dict[str, list[Any]]:
    """The optional fields of n tokens' records, where they are recorded; the fields of `extras` are
    [n, ...]."""
    fields: dict[str, list[Any]] = {}
    if recording.top:
        pairs = zip(plain(extras.top_ids), plain(extras.top_probs), strict=True)
        fields["top"] = [
            [(i, decode([i]), p) for i, p in zip(ids, probs, strict=True)] for ids, probs in pairs
        ]
    if recording.layers:
        for name in ("layers", "layers_varentropy"):
            values = getattr(extras, name)
            fields[name] = [*values] if recording.raw_layers else plain(values)
    if extras.looks is not None:
        looks = extras.looks
        columns = looks.layer, looks.head, looks.positions, extras.looked, looks.weights
        fields["attention"] = [
            [_look(decode, *head) for head in zip(*token, strict=True)]
            for token in zip(*map(plain, columns), strict=True)
        ]
    return fields


def _look(
    decode: Decode, layer: int, head: int, at: list[int], ids: list[int], weights: list[float]
) -> dict[str, Any]:
    """Where a head looks: positions with their tokens' texts and weights."""
    places = zip(at, ids, weights, strict=True)
    return {"layer": layer, "head": head, "to": [(i, decode([t]), w) for i, t, w in places if w]}


def check_recording(model: LanguageModel, recording: Recording | None) -> Recording:
    """Returns the recording, by default an empty one. UserError if a field has another type, or
    more most likely tokens are to be recorded than the model has, or than memory is reserved for.
    """
    given, types = vars(recording or Recording()), Recording.__annotations__
    recording = Recording(**{name: check_type(name, given[name], types[name]) for name in types})
    most = min(MAX_TOP, model.config.vocab_size)
    check_range("the number of recorded most likely tokens", recording.top, 0, most)
    return recording
