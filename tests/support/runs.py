"""Short ways to create requests and runs, with samplers by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from entropix_jax.engine import prompts
from entropix_jax.engine.api import Generation
from entropix_jax.engine.calibrated import CalibratedSampler, calibrate_sampler
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.prefill import prefill
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Row
from entropix_jax.engine.state import Recording
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler
from tests.support.samplers import LITERAL


class Spec(NamedTuple):
    """The fields that differ between the requests of most runs."""

    prompt: Sequence[int]
    row_id: str = "0"
    max_new_tokens: int = 1


def calibrated(model: LanguageModel, sampler: Sampler | str = LITERAL) -> CalibratedSampler:
    loaded = load_sampler(sampler) if isinstance(sampler, str) else sampler
    return calibrate_sampler(loaded, model)


def requests(
    model: LanguageModel,
    specs: Sequence[Spec],
    sampler: Sampler | str = LITERAL,
    *,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    turn_end: bool = False,
    others: frozenset[str] = frozenset(),
    **options: Any,
) -> list[Request]:
    """Returns requests with the same sampler, whose step has the mechanisms `others`, too."""
    fitted = replace(calibrated(model, sampler), others=others)
    return [
        Request(
            spec.prompt,
            fitted,
            max_new_tokens=spec.max_new_tokens,
            row_id=spec.row_id,
            eos_ids=() if ignore_eos else model.end_ids(chat=turn_end),
            stop=[stop] if isinstance(stop, str) else stop,
            **options,
        )
        for spec in specs
    ]


def run_specs(
    model: LanguageModel,
    specs: Sequence[Spec],
    sampler: Sampler | str = LITERAL,
    *,
    recording: Recording | None = None,
    **options: Any,
) -> Generation:
    return Generation(model, requests(model, specs, sampler, **options), recording=recording)


def as_requests(engine: Engine, wanted: Iterable[Request | Row | None]) -> Iterator[Request | None]:
    """Yields the requests of rows, which the engine then uses, besides other requests."""
    for one in wanted:
        if isinstance(one, Row):
            engine._new[id(one.request)] = one
        yield one.request if isinstance(one, Row) else one


def run_rows(engine: Engine, wanted: Iterable[Request]) -> list[Row]:
    """Runs requests and returns their rows."""
    rows = [Row(request) for request in wanted]
    list(engine.run(as_requests(engine, rows)))
    return rows


def ids_of(row: Row) -> list[int]:
    return [token.token_id for token in row.tokens]


def is_same(row: Row, other: Row) -> bool:
    """Compares text, finish reason, ids, actions and regimes of two rows exactly, and floats up to
    rounding, which the model amplifies at a few positions."""
    told, others = (
        (one.text, one.finish_reason, [(t.token_id, t.action, t.regime) for t in one.tokens])
        for one in (row, other)
    )
    here, there = ([[t.entropy, t.logprob] for t in one.tokens] for one in (row, other))
    return told == others and np.allclose(here, there, rtol=1e-3, atol=1e-3)


def unrun(prompt: Sequence[int] = (1,), row_id: str = "0", max_new_tokens: int = 1) -> Request:
    """Returns a request for rows without an engine."""
    sampler: Any = SimpleNamespace(values={"confidence.window": 16})
    return Request(prompt, sampler, max_new_tokens=max_new_tokens, row_id=row_id)


def prefills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Returns the shapes of the tokens of each prefill from here on."""
    shapes: list[tuple[int, int]] = []

    def noted(params: Any, state: Any, tokens: Any, *args: Any, **options: Any) -> Any:
        shapes.append(tokens.shape)
        return prefill(params, state, tokens, *args, **options)

    monkeypatch.setattr(prompts, "prefill", noted)
    return shapes


def set_pace(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Sets the number of steps per chunk to `steps`."""

    def pace(engine: Engine, waited: float) -> None:
        engine._chunk_steps = steps

    monkeypatch.setattr(Engine, "_pace", pace)
