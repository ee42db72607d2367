"""From what the device recorded of a step to the records of a trace."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from entropix_jax.decode_state import BranchLog, Extras, Recording, StepRecord
from entropix_jax.sampler.arms import ACTIONS
from entropix_jax.sampler.branch import Branches
from entropix_jax.sampler.params import REGIMES
from entropix_jax.sampler.sample import Observation
from entropix_jax.trace import TokenRecord, plain

Decode = Callable[..., str]  # a tokenizer's


def token_record(row: int, record: StepRecord, recording: Recording, decode: Decode) -> TokenRecord:
    """The record of one row's step, its text yet to come; fields of `record` are scalars."""
    choice = record.choice
    return TokenRecord(
        row=row,
        position=int(record.position),
        token_id=int(choice.token),
        text="",
        action=ACTIONS[choice.proposal.action],
        logprob=plain(choice.logprob),
        sequence_varentropy=plain(choice.sequence_varentropy),
        temperature=plain(choice.proposal.temperature),
        top_k=int(choice.proposal.top_k),
        top_p=plain(choice.proposal.top_p),
        min_p=plain(choice.proposal.min_p),
        forwards=int(record.forwards),
        **_observed(choice.observation),
        **extras_fields(record.extras, recording, decode),
    )


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

    def at(tree: Any, depth: int) -> Any:
        return jax.tree.map(lambda x: x[depth], tree)

    tokens = [
        replace(
            first,
            position=first.position + depth,
            token_id=int(branches.tokens[branches.best, depth]),
            logprob=plain(branches.logprobs[depth]),
            sequence_varentropy=plain(entry.sequence_varentropy[depth]),
            **_observed(at(branches.observation, depth)),
            **extras_fields(at(branches.notes, depth), recording, decode),
        )
        for depth in range(int(entry.committed))
    ]
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


def two_best(futures: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The two futures with the highest scores, the better one first."""
    scored = [future for future in futures if future["score"] is not None]
    return sorted(scored, key=lambda future: -future["score"])[:2]


def differ(futures: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the two best futures are two texts."""
    return len({future["text"] for future in two_best(futures)}) == 2


def extras_fields(extras: Extras, recording: Recording, decode: Decode) -> dict[str, Any]:
    """The fields `top` and `layers` of a token's record, None where they were not asked for."""
    top: list[tuple[int, str, float]] | None = None
    if recording.top:
        top = [
            (int(i), decode([int(i)], skip_special=False), plain(p))
            for i, p in zip(extras.top_ids, extras.top_probs, strict=True)
        ]
    return {"top": top, "layers": plain(extras.layers) if recording.layers else None}


def _observed(observation: Observation) -> dict[str, Any]:
    """The fields of a token's record that tell of the distribution it came from."""
    return {
        "regime": REGIMES[observation.regime],
        "loop": bool(observation.looping),
        "confidence": plain(observation.confidence),
        **{name: plain(value) for name, value in vars(observation.metrics).items()},
    }
