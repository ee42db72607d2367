"""From what the device recorded of a step to the records of a trace."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from entropix_jax.decode_state import BranchLog, Extras, Recording, StepRecord
from entropix_jax.sampler.arms import ACTIONS
from entropix_jax.sampler.branch import Branches
from entropix_jax.sampler.params import REGIMES
from entropix_jax.sampler.sample import Observation
from entropix_jax.trace import TokenRecord, plain

Decode = Callable[..., str]  # a tokenizer's


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step did to one row."""

    token: TokenRecord  # its text yet to come; means nothing where the row waits or failed
    finish: int  # see `decode_state`
    may_return: bool  # the next step may take the token back
    branch: int  # which record of the branch log belongs to it; -1: none


def outcomes(
    rows: Sequence[int], records: StepRecord, recording: Recording, decode: Decode
) -> list[Outcome]:
    """What became of `rows`, one number for each of the records, whose fields are [n, ...]."""
    choice, proposal = records.choice, records.choice.proposal
    tokens = each(
        row=list(rows),
        position=plain(records.position),
        token_id=plain(choice.token),
        action=[ACTIONS[action] for action in proposal.action],
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
        may_return=plain(records.may_return),
        branch=plain(records.branch),
    )
    return [
        Outcome(TokenRecord(**token, text=""), **end)
        for token, end in zip(tokens, ends, strict=True)
    ]


def branch_records(
    first: TokenRecord,
    futures: list[dict[str, Any]],
    entry: BranchLog,
    recording: Recording,
    decode: Decode,
) -> list[TokenRecord]:
    """The records of a branch's committed tokens; the first one holds all branches.

    `first` is the step's record, `entry` one row of the log.
    """
    branches = entry.branches
    path = each(
        position=[first.position + depth for depth in range(len(branches.logprobs))],
        token_id=plain(branches.tokens[branches.best]),
        logprob=plain(branches.logprobs),
        sequence_varentropy=plain(entry.sequence_varentropy),
        **_observed(branches.observation),
        **extras_fields(branches.notes, recording, decode),
    )
    tokens = [replace(first, **fields) for fields in path[: int(entry.committed)]]
    close = bool(branches.ambiguous) and differ(futures)
    return [replace(tokens[0], branches=futures, ambiguous=close), *tokens[1:]]


def futures_of(branches: Branches, decode: Decode) -> list[dict[str, Any]]:
    """One row's branches as the trace holds them."""
    futures = []
    for i in np.flatnonzero(branches.length):
        ids = branches.tokens[i, : branches.length[i]].tolist()
        score = branches.score[i]
        futures.append(
            {
                "tokens": ids,
                "text": decode(ids, skip_special=False),
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
            [(i, decode([i], skip_special=False), p) for i, p in zip(ids, probs, strict=True)]
            for ids, probs in pairs
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
