"""Host-side inputs of the compiled programs: shapes, prompts as token ids, sampler parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from entropix_jax.engine.state import Recording
from entropix_jax.errors import UserError
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.sampler.settings import SamplerSettings

PREFILL_WINDOW = 128  # cache positions that are read with several tokens, at least
# Cache positions that a step reads, at least: each number is a program of its own.
DECODE_WINDOW = 512
MIN_CAPACITY = 256  # cache positions of a row, at least
MAX_PREFILL = 512  # most tokens of a prompt that are read in one call
MAX_STEPS = 32  # most steps between two looks of the host
MAX_TOP = 1024  # of the likeliest tokens in a record
_MIN_CHUNK = 16
_SCORES_BYTES = 1 << 28  # most memory for one layer's attention scores in one call

Prompt = str | Sequence[Mapping[str, str]]


@dataclass(frozen=True, eq=False)
class CalibratedSampler:
    """A sampler as it runs on one model, see `calibrated.calibrate_sampler`."""

    sampler: Sampler  # with the model's thresholds
    settings: SamplerSettings  # the same as arrays, of one row

    @property
    def name(self) -> str:
        """The preset's or file's name."""
        return self.sampler.name

    @property
    def values(self) -> Mapping[str, Any]:
        """All settings, read-only."""
        return self.sampler.values

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """Its arms, rules and transforms."""
        return self.sampler.mechanisms

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that a user should see."""
        return self.sampler.notes


def bucket(length: int, smallest: int) -> int:
    """The next power of two, so that few shapes are ever compiled."""
    return max(smallest, 1 << (length - 1).bit_length())


def chunk_size(config: ModelConfig, length: int, batch: int, largest: int) -> int:
    """Tokens that `batch` rows of `length` tokens may read in one call: fewer in long contexts and
    large batches, whose attention scores take room."""
    scores = bucket(length, PREFILL_WINDOW) * batch * config.num_heads
    room = 1 << max(_SCORES_BYTES // (4 * scores), 1).bit_length() - 1
    return min(largest, max(_MIN_CHUNK, room))


def check_recording(model: LanguageModel, recording: Recording) -> None:
    """Refuses (UserError) to record more of the likeliest tokens than there are, or than memory is
    kept for."""
    asked = f"the {recording.top} likeliest tokens are asked for"
    if recording.top > MAX_TOP:
        raise UserError(f"{asked}, at most {MAX_TOP} are possible")
    if not 0 <= recording.top <= model.config.vocab_size:
        raise UserError(f"{asked}, the model has {model.config.vocab_size}")


def encode_prompt(
    model: LanguageModel, prompt: Prompt, *, chat: bool, system: str | None = None
) -> list[int]:
    """A prompt as token ids: a text, or a conversation of messages with a `role` and a `content`.
    With `chat` a text is one turn of a chat, which `system`, a system message, needs. UserError if
    the prompt is empty, or is a chat where no template is, or none is wanted."""
    if prompt == "":
        raise UserError("the prompt is empty")
    if not chat and (system is not None or not isinstance(prompt, str)):
        what = "a system message" if isinstance(prompt, str) else "a conversation"
        raise UserError(f"{what} needs a chat (--chat)")
    if not chat:
        return model.tokenizer.encode(str(prompt), add_bos=True)
    messages: Any = prompt  # whatever a file of messages holds: `apply_chat` checks it
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, Sequence):
        messages = list(prompt)
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return model.tokenizer.apply_chat(messages)


def sampler_settings(model: LanguageModel, sampler: Sampler) -> SamplerSettings:
    """A sampler's settings as arrays, for one row of a model. UserError if a thought, layer
    weights, bans or biases do not fit the model."""
    biased = [token for token, _ in sampler.values["draw.bias"]]
    for key, tokens in (("draw.bans", sampler.values["draw.bans"]), ("draw.bias", biased)):
        wrong = [token for token in tokens if token >= model.config.vocab_size]
        if wrong:
            raise UserError(f"sampler '{sampler.name}': {key} holds {wrong[0]}, which is no token")
    return sampler.settings(
        num_layers=model.config.num_layers,
        epsilon=float(jax.numpy.finfo(model.precision.activations).eps),
        encode=model.tokenizer.encode_within,
    )


def for_rows(settings: SamplerSettings, rows: int) -> SamplerSettings:
    """The same settings for each row."""
    stacked = jax.tree.map(lambda x: np.broadcast_to(x, (rows, *np.shape(x))), settings)
    placed: SamplerSettings = jax.device_put(stacked)
    return placed
