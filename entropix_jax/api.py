"""The package from Python, in a few lines: generate, stream, inspect."""

import operator
import warnings
from collections.abc import Iterator, Sequence
from typing import TypedDict, Unpack

from entropix_jax.calibration.automatic import calibrate_sampler
from entropix_jax.decode_state import Recording
from entropix_jax.errors import check_range
from entropix_jax.generation import Generation
from entropix_jax.inspection import InspectedToken, inspect
from entropix_jax.loading import LanguageModel
from entropix_jax.preparation import Prompt, encode_prompt
from entropix_jax.results import Request, Rows
from entropix_jax.running import Ask, Retrieve
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler


class Options(TypedDict, total=False):
    """What `generate` and `stream` may be given by name.

    Attributes:
        max_new_tokens: most tokens to generate, 256 by default.
        samples: rows, 1 by default, whose random numbers differ.
        seed: of all random numbers, 0 by default.
        chat: put a text as a turn of a chat; None, the default, is the model's own way.
        system: a system message, which makes sense in a chat only.
        stop: a text, or several, that end a row and are not part of it.
        ignore_eos: no token ends a row.
        recording: what each token's record holds besides the usual.
        retrieve: a function from a row's text so far to the text to inject where a thought is due.
            Where that is empty or does not fit the budget, the sampler's own thought is injected,
            and where that does not fit either the row just draws.
        ask: a function from a row and the texts of its two best branches, the better one first, to
            the index of the one to take, or None for the better one. It is asked where their scores
            are too close to call.
    """

    max_new_tokens: int
    samples: int
    seed: int
    chat: bool | None
    system: str | None
    stop: str | Sequence[str]
    ignore_eos: bool
    recording: Recording | None
    retrieve: Retrieve | None
    ask: Ask | None


def generate(
    model: LanguageModel,
    prompt: Prompt,
    sampler: Sampler | str = "entropix",
    **options: Unpack[Options],
) -> Rows:
    """Generates texts from one prompt and gives them, a list, when all have ended.

    Arguments and errors are those of `stream`; an error within a row is that row's `error`.
    """
    return _run_of(model, prompt, sampler, options).run()


def stream(
    model: LanguageModel,
    prompt: Prompt,
    sampler: Sampler | str = "entropix",
    **options: Unpack[Options],
) -> Generation:
    """A run that goes as it is iterated over: events, token by token, whose `pieces` are the text
    that has become final. Its `rows` hold the results.

    Args:
        prompt: a text, or a conversation: messages with a `role` and a `content` each.
        sampler: a preset's name, a file that ends in .toml, or a sampler.
        options: see `Options`.

    Raises:
        TypeError: an unknown option, or a number that is no integer.
        UserError: an input that cannot be used.
    """
    return _run_of(model, prompt, sampler, options)


def inspect_text(
    model: LanguageModel,
    text: str,
    sampler: Sampler | str = "entropix",
    *,
    context: int | None = None,
    recording: Recording | None = None,
) -> Iterator[InspectedToken]:
    """The model's uncertainty about a given text, token by token; nothing is generated.

    Args:
        sampler: whose regimes are told.
        context: most tokens that the model sees at once, by default 1024 or as many as it has
            positions.
        recording: what each token's record holds besides the usual.

    Raises:
        UserError: a text without two tokens, or what `inspection.inspect` refuses.
    """
    calibrated = _calibrated(sampler, model, stacklevel=3)
    tokens = model.tokenizer.encode(text, add_bos=True)
    return inspect(model, tokens, calibrated, context=context, recording=recording)


def _run_of(
    model: LanguageModel, prompt: Prompt, sampler: Sampler | str, options: Options
) -> Generation:
    if unknown := set(options) - set(Options.__annotations__):
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    # NumPy's integers, too, as what they are.
    samples = operator.index(options.get("samples", 1))
    budget = operator.index(options.get("max_new_tokens", 256))
    seed = operator.index(options.get("seed", 0))
    chat = options.get("chat")
    check_range("samples", samples, 1)
    if chat is None:
        chat = model.is_chat_model or not isinstance(prompt, str)
    tokens = encode_prompt(model, prompt, chat=chat, system=options.get("system"))
    return Generation(
        model,
        [Request(tokens, str(i), budget) for i in range(samples)],
        _calibrated(sampler, model, stacklevel=4),
        seed=seed,
        stop=options.get("stop", ()),
        ignore_eos=options.get("ignore_eos", False),
        turn_end=chat,
        recording=options.get("recording"),
        retrieve=options.get("retrieve"),
        ask=options.get("ask"),
    )


def _calibrated(sampler: Sampler | str, model: LanguageModel, *, stacklevel: int) -> Sampler:
    """The sampler with the model's thresholds; what a user should know of it is a warning."""
    if isinstance(sampler, str):
        sampler = load_sampler(sampler)
    sampler = calibrate_sampler(sampler, model)
    for note in sampler.notes:
        warnings.warn(note, stacklevel=stacklevel)
    return sampler
