"""From what the device recorded of a step to the records of a trace."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import jax
import numpy as np

from entropix_jax.decode_state import BranchLog, Extras, Recording, StepRecord
from entropix_jax.names import REGIMES
from entropix_jax.sampler.rollout import Branches
from entropix_jax.sampler.state import Observation
from entropix_jax.trace import plain

Decode = Callable[[Sequence[int]], str]  # a tokenizer's `decode_within`


# The fields of a token's record, but for its text: that is known once nothing takes it back.
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step did to one row."""

    token: Fields  # mean nothing where the row waits or failed
    finish: int  # see `decode_state`
    may_return: bool  # the next step may take the token back
    branch: int  # which record of the branch log belongs to it; -1: none
    unsound: tuple[int, int]  # see `health.first_unsound`


@dataclass(frozen=True, slots=True)
class Branching:
    """What one row did where it branched."""

    futures: list[dict[str, Any]]  # every branch, as the trace holds it
    path: list[Fields]  # of the committed tokens, what differs from the step's own
    close: bool  # the two best scores are closer than the margin


def outcomes(
    rows: Sequence[int],
    records: StepRecord,
    recording: Recording,
    decode: Decode,
    actions: Sequence[str],
) -> list[Outcome]:
    """What became of `rows`, one number for each of the records, whose fields are [n, ...].
    `actions` are the names of the sampler's mechanisms."""
    choice, proposal = records.choice, records.choice.proposal
    tokens = each(
        row=list(rows),
        position=plain(records.position),
        token_id=plain(choice.token),
        action=[actions[action] for action in proposal.action],
        logprob=plain(choice.logprob),
        sequence_varentropy=plain(choice.sequence_varentropy),
        temperature=plain(proposal.temperature),
        top_k=plain(proposal.top_k),
        top_p=plain(proposal.top_p),
        min_p=plain(proposal.min_p),
        forwards=plain(records.forwards),
        **_observed(choice.observation),
        **extras_fields(records.extras, recording, decode),
    )
    ends = each(
        finish=plain(records.finish),
        may_return=plain(records.may_backspace),
        branch=plain(records.branch),
        unsound=plain(records.unsound),
    )
    return [Outcome(token, **end) for token, end in zip(tokens, ends, strict=True)]


def branchings(log: BranchLog, recording: Recording, decode: Decode) -> list[Branching]:
    """What the log tells, in its order."""
    number = int(log.count)
    log = jax.tree.map(lambda x: x[:number], replace(log, count=log.committed))
    branches, depths = log.branches, np.arange(log.branches.logprobs.shape[1])
    taken = depths[None, :] < log.committed[:, None]  # [n, R]
    best = branches.tokens[np.arange(number), branches.best]
    observation, notes = jax.tree.map(lambda x: x[taken], (branches.observation, branches.notes))
    tokens = iter(
        each(
            token_id=plain(best[taken]),
            logprob=plain(branches.logprobs[taken]),
            sequence_varentropy=plain(log.sequence_varentropy[taken]),
            **_observed(observation),
            **extras_fields(notes, recording, decode),
        )
    )
    return [
        Branching(
            futures=_futures(jax.tree.map(lambda x: x[i], branches), decode),  # noqa: B023
            path=list(islice(tokens, int(log.committed[i]))),
            close=bool(branches.ambiguous[i]),
        )
        for i in range(number)
    ]


def branch_records(first: Fields, branching: Branching) -> list[Fields]:
    """The committed tokens of a branch; the first one holds all branches. `first` is the step's."""
    tokens = [
        {**first, **fields, "position": first["position"] + depth}
        for depth, fields in enumerate(branching.path)
    ]
    tokens[0]["branches"] = branching.futures
    tokens[0]["ambiguous"] = branching.close and differ(branching.futures)
    return tokens


def _futures(branches: Branches, decode: Decode) -> list[dict[str, Any]]:
    """One row's branches as the trace holds them."""
    futures = []
    for i in np.flatnonzero(branches.length):
        ids = branches.tokens[i, : branches.length[i]].tolist()
        score = branches.score[i]
        futures.append(
            {
                "tokens": ids,
                "text": decode(ids),
                "score": plain(score) if np.isfinite(score) else None,
                "chosen": bool(i == branches.best),
            }
        )
    return futures


def each(**columns: list[Any]) -> list[dict[str, Any]]:
    """From a list for each field to the fields of each."""
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def two_best(futures: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The two futures with the highest scores, the better one first."""
    scored = [future for future in futures if future["score"] is not None]
    return sorted(scored, key=lambda future: -future["score"])[:2]


def differ(futures: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the two best futures are two texts."""
    return len({future["text"] for future in two_best(futures)}) == 2


def extras_fields(extras: Extras, recording: Recording, decode: Decode) -> dict[str, list[Any]]:
    """The fields `top` and `layers` of n tokens' records, empty where they were not asked for; the
    fields of `extras` are [n, ...]."""
    fields: dict[str, list[Any]] = {}
    if recording.top:
        pairs = zip(plain(extras.top_ids), plain(extras.top_probs), strict=True)
        fields["top"] = [
            [(i, decode([i]), p) for i, p in zip(ids, probs, strict=True)] for ids, probs in pairs
        ]
    if recording.layers:
        fields["layers"] = plain(extras.layers)
    return fields


def _observed(observation: Observation) -> dict[str, list[Any]]:
    """The fields of tokens' records that tell of the distributions they came from."""
    return {
        "regime": [REGIMES[regime] for regime in observation.regime],
        "loop": plain(observation.looping),
        "confidence": plain(observation.confidence),
        **{name: plain(values) for name, values in vars(observation.metrics).items()},
    }
