"""Runs in one line: requests from prompts, a sampler by name, and all options of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from entropix_jax.calibration.automatic import calibrate_sampler
from entropix_jax.decode_state import Recording
from entropix_jax.generation import Generation
from entropix_jax.loading import LanguageModel
from entropix_jax.preparation import CalibratedSampler
from entropix_jax.results import Request
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import Sampler


class Job(NamedTuple):
    """What differs between the rows of most runs."""

    prompt: Sequence[int]
    row_id: str = "0"
    max_new_tokens: int = 1


def calibrated(model: LanguageModel, sampler: Sampler | str = "entropix") -> CalibratedSampler:
    loaded = load_sampler(sampler) if isinstance(sampler, str) else sampler
    return calibrate_sampler(loaded, model)


def requests(
    model: LanguageModel,
    jobs: Sequence[Job],
    sampler: Sampler | str = "entropix",
    *,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    turn_end: bool = False,
    **options: Any,
) -> list[Request]:
    fitted = calibrated(model, sampler)
    return [
        Request(
            job.prompt,
            fitted,
            max_new_tokens=job.max_new_tokens,
            row_id=job.row_id,
            eos_ids=() if ignore_eos else model.end_ids(chat=turn_end),
            stop=[stop] if isinstance(stop, str) else stop,
            **options,
        )
        for job in jobs
    ]


def generation(
    model: LanguageModel,
    jobs: Sequence[Job],
    sampler: Sampler | str = "entropix",
    *,
    recording: Recording | None = None,
    **options: Any,
) -> Generation:
    return Generation(model, requests(model, jobs, sampler, **options), recording=recording)


def unrun(prompt: Sequence[int] = (1,), row_id: str = "0", max_new_tokens: int = 1) -> Request:
    """A request for rows that no engine made."""
    sampler: Any = None
    return Request(prompt, sampler, max_new_tokens=max_new_tokens, row_id=row_id)
