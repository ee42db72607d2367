"""From the device's records of a chunk of steps to typed records on the host."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from entropix_jax.engine.state import BranchLog, Extras, Recording, StepRecord
from entropix_jax.engine.trace import BranchRecord, TokenRecord, plain
from entropix_jax.names import REGIMES
from entropix_jax.sampler.rollout import Branches
from entropix_jax.sampler.state import Observation

Decode = Callable[[Sequence[int]], str]  # a tokenizer's `decode_within`


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step did to one row.

    Attributes:
        slot: the row's.
        tokens: the committed tokens, without their texts; several where a branch was committed.
            Where the row waits for the host the one token holds the step's proposal, and where it
            failed the failed position.
        branches: where the row branched.
        finish: see `DecodeState`.
        retractable: whether the next step may retract the last token.
        unsound: see `finite.first_unsound`.
    """

    slot: int
    tokens: list[TokenRecord]
    branches: list[BranchRecord] | None
    finish: int
    retractable: bool
    unsound: tuple[int, int]


def outcomes(
    numbers: Sequence[int],
    actions: Sequence[str],
    records: StepRecord,
    log: BranchLog | None,
    recording: Recording,
    decode: Decode,
) -> Iterator[Outcome]:
    """The outcomes of a chunk's steps, step by step and within a step slot by slot.

    Args:
        numbers: the row number of each slot, [B].
        actions: the names of the sampler's mechanisms.
        records: fields [steps, B, ...], NumPy.
        log: what branched in these steps, NumPy; None where nothing did.
    """
    slots = np.nonzero(records.live)[1].tolist()
    records = jax.tree.map(lambda x: x[records.live], records)
    tokens = _step_tokens([numbers[slot] for slot in slots], actions, records, recording, decode)
    paths: dict[int, tuple[list[TokenRecord], list[BranchRecord] | None]] = {}
    if log is not None:
        paths.update(_branch_paths(tokens, np.asarray(records.branch), log, recording, decode))
    ends = zip(
        plain(records.finish),
        plain(records.may_backspace),
        map(tuple, plain(records.unsound)),
        strict=True,
    )
    for i, (slot, token, end) in enumerate(zip(slots, tokens, ends, strict=True)):
        path, branches = paths.get(i, ([], None))
        yield Outcome(slot, path or [token], branches, *end)


def _step_tokens(
    rows: Sequence[int],
    actions: Sequence[str],
    records: StepRecord,
    recording: Recording,
    decode: Decode,
) -> list[TokenRecord]:
    """The token of each record, whose fields are [n, ...]."""
    choice, proposal = records.choice, records.choice.proposal
    fields = each(
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
    return [TokenRecord(text="", **one) for one in fields]


def _branch_paths(
    tokens: Sequence[TokenRecord],
    entries: np.ndarray,
    log: BranchLog,
    recording: Recording,
    decode: Decode,
) -> Iterator[tuple[int, tuple[list[TokenRecord], list[BranchRecord]]]]:
    """For each index of `entries[n]` that names an entry of the log: the committed tokens of its
    best branch, none where the row waits, and all its branches. `tokens[n]` are the steps' own."""
    at = np.flatnonzero(entries >= 0)
    used = jax.tree.map(lambda x: x[entries[at]], replace(log, count=log.committed))
    branches, committed = used.branches, used.committed
    taken = np.arange(branches.logprobs.shape[1]) < committed[:, None]  # [n, R]
    best = branches.tokens[np.arange(len(at)), branches.best]
    observation, notes = jax.tree.map(lambda x: x[taken], (branches.observation, branches.notes))
    fields = iter(
        each(
            token_id=plain(best[taken]),
            logprob=plain(branches.logprobs[taken]),
            sequence_varentropy=plain(used.sequence_varentropy[taken]),
            **_observed(observation),
            **extras_fields(notes, recording, decode),
        )
    )
    for i, number in enumerate(at.tolist()):
        all_ = _branches(jax.tree.map(lambda x: x[i], branches), decode)  # noqa: B023
        first = tokens[number]
        path = [
            replace(first, **next(fields), position=first.position + depth)
            for depth in range(committed[i])
        ]
        if path:
            ambiguous = bool(branches.ambiguous[i]) and differ(all_)
            path[0] = replace(path[0], branches=all_, ambiguous=ambiguous)
        yield number, (path, all_)


def _branches(branches: Branches, decode: Decode) -> list[BranchRecord]:
    """One row's branches; the fields of `branches` are [W, ...]."""
    records = []
    for i in np.flatnonzero(branches.length):
        ids = branches.tokens[i, : branches.length[i]].tolist()
        score = plain(branches.score[i]) if np.isfinite(branches.score[i]) else None
        records.append(BranchRecord(ids, decode(ids), score, chosen=bool(i == branches.best)))
    return records


def two_best(branches: Sequence[BranchRecord]) -> list[BranchRecord]:
    """The two branches with the highest scores, the better one first."""
    scored = [(branch.score, branch) for branch in branches if branch.score is not None]
    return [branch for _, branch in sorted(scored, key=lambda pair: -pair[0])[:2]]


def differ(branches: Sequence[BranchRecord]) -> bool:
    """Whether the two best branches are two texts."""
    return len({branch.text for branch in two_best(branches)}) == 2


def each(**columns: list[Any]) -> list[dict[str, Any]]:
    """From a list for each field to the fields of each."""
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def extras_fields(extras: Extras, recording: Recording, decode: Decode) -> dict[str, list[Any]]:
    """The fields `top` and `layers` of n tokens' records, where they are recorded; the fields of
    `extras` are [n, ...]."""
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
    """The fields of n tokens' records that describe the distributions they were drawn from."""
    return {
        "regime": [REGIMES[regime] for regime in observation.regime],
        "loop": plain(observation.looping),
        "confidence": plain(observation.confidence),
        **{name: plain(values) for name, values in vars(observation.metrics).items()},
    }
