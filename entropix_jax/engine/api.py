"""The public functions: generate, stream, score."""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from entropix_jax.engine.generation import Generation
from entropix_jax.engine.preparation import (
    CalibratedSampler,
    Prompt,
    calibrate_sampler,
    encode_prompt,
    prompt_messages,
)
from entropix_jax.engine.results import MAX_SAMPLES, Ask, Request, Retrieve, Rows
from entropix_jax.engine.score import ScoredToken, score_tokens
from entropix_jax.engine.state import Recording
from entropix_jax.errors import UserError
from entropix_jax.host.integers import check_integer
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler

AnySampler = CalibratedSampler | Sampler | str | Path


def generate(
    model: LanguageModel,
    prompt: Prompt | Sequence[Prompt],
    sampler: AnySampler = "entropix",
    **options: Any,
) -> Rows:
    """Generates texts from one prompt, or from several in one batch, and returns the finished rows
    in the order of the prompts.

    Arguments and errors are those of `stream`. If a row fails, its `error` says why.
    """
    return stream(model, prompt, _calibrated(sampler, model), **options).run()


def stream(
    model: LanguageModel,
    prompt: Prompt | Sequence[Prompt],
    sampler: AnySampler = "entropix",
    *,
    max_new_tokens: int = 256,
    samples: int = 1,
    seed: int = 0,
    chat: bool | None = None,
    system: str | None = None,
    stop: str | Sequence[str] | None = (),
    ignore_eos: bool = False,
    escape_special: bool = False,
    recording: Recording | None = None,
    retrieve: Retrieve | None = None,
    ask: Ask | None = None,
) -> Generation:
    """Returns a run that advances as it is iterated. It yields events, token by token, whose
    `pieces` are newly final text. Its `rows` have the results.

    Args:
        prompt: a text, a conversation (messages with a `role` and a `content`), or a list of
            either. Rows of one prompt do not depend on the others. Equal prompts get different
            random numbers, as do `samples`.
        sampler: a preset's name, a file that ends in .toml, or a sampler.
        max_new_tokens: maximum number of tokens to generate.
        samples: rows per prompt, with different random numbers.
        seed: of all random numbers.
        chat: whether a text is a turn of a chat; None: depends on the model.
        system: a system message, for a chat only.
        stop: one or several texts that end a row and are not part of it.
        ignore_eos: continue past end tokens.
        escape_special: encode control tokens in the prompt as ordinary text.
        recording: optional parts of each token's record.
        retrieve, ask: see `Request`.

    UserError if an input is invalid.
    """
    samples = check_integer("samples", samples, 1, MAX_SAMPLES)
    budget = check_integer("max_new_tokens", max_new_tokens, 1)
    seed = check_integer("seed", seed)
    stops: Any = () if stop is None else stop if isinstance(stop, list | tuple) else [stop]
    calibrated = _calibrated(sampler, model)
    seen: Counter[tuple[int, ...]] = Counter()
    requests = []
    for one in _as_prompts(prompt):
        as_chat = model.is_chat_model or not isinstance(one, str) if chat is None else chat
        tokens = encode_prompt(
            model, one, chat=as_chat, system=system, escape_special=escape_special
        )
        messages = prompt_messages(one, chat=as_chat, system=system)
        for _ in range(samples):
            seen[tuple(tokens)] += 1
            request = Request(
                tokens,
                calibrated,
                max_new_tokens=budget,
                row_id=str(seen[tuple(tokens)] - 1),
                seed=seed,
                eos_ids=() if ignore_eos else model.end_ids(chat=as_chat),
                stop=stops,
                retrieve=retrieve,
                ask=ask,
                messages=messages,
            )
            requests.append(request)
    return Generation(model, requests, recording=recording)


def _as_prompts(prompt: Any) -> list[Any]:
    """Returns the prompts: a list or column of texts, or a list of conversations, is several."""
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # of NumPy or pandas
    several = isinstance(prompt, list | tuple) and prompt and not isinstance(prompt[0], Mapping)
    return list(prompt) if several else [prompt]


def score(
    model: LanguageModel,
    text: str,
    sampler: AnySampler = "entropix",
    *,
    context: int | None = None,
    recording: Recording | None = None,
) -> Iterator[ScoredToken]:
    """Scores a given text: the model's uncertainty, token by token. Generates nothing.

    The regimes are the sampler's; for `context`, `recording` and errors see `score_tokens`.
    """
    calibrated = _calibrated(sampler, model)
    tokens = model.tokenizer.encode(text, add_bos=True)
    return score_tokens(model, tokens, calibrated, context=context, recording=recording)


def _calibrated(sampler: Any, model: Any) -> CalibratedSampler:
    """Resolves a sampler for the model and issues its notes as warnings, unless it is already
    resolved."""
    if not isinstance(model, LanguageModel):
        raise UserError(f"the model must be one that `load` returns, not {model!r}")
    if isinstance(sampler, CalibratedSampler):
        return sampler
    if isinstance(sampler, str | Path):
        sampler = load_sampler(str(sampler))
    if not isinstance(sampler, Sampler):
        raise UserError(f"no preset's name, file or Sampler: {sampler!r}")
    calibrated = calibrate_sampler(sampler, model)
    for note in calibrated.notes:
        warnings.warn(note, stacklevel=3)
    return calibrated
