"""Warm-up: the requests that compile the server's programs."""

from __future__ import annotations

from entropix_jax.engine.generation import Generation
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.serve.wanted import Served
from entropix_jax.serve.warm_up import _batches


def test_one_request_forks(tiny: LanguageModel) -> None:
    """Into two branches, whatever the sampler admits: a single one needs no lane, and so would not
    compile the program with lanes."""
    sampler = load_sampler("entropix").with_values({"branch.min_p": 1.0})
    served = Served("tiny", tiny, sampler, 64, 0)
    _, (request,), *_ = _batches(served, 1)
    (row,) = Generation(tiny, [request]).run()
    assert any(len(token.branches or ()) > 1 for token in row.tokens)
