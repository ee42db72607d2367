"""Host-side inputs of the compiled programs: shapes, prompts as token ids, sampler parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from entropix_jax.engine.state import Recording
from entropix_jax.errors import UserError
from entropix_jax.host.resources import resource_folder
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.find import SUFFIX
from entropix_jax.model.loading import CALIBRATION_FILE, LanguageModel
from entropix_jax.sampler.calibration import Calibration, generic_calibration, read_calibration
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.sampler.settings import Parts, SamplerSettings
from entropix_jax.text.chat_template import plain_messages

PREFILL_WINDOW = 128  # cache positions that are read with several tokens, at least
# Cache positions that a step reads, at least: each number is a program of its own.
DECODE_WINDOW = 512
MIN_CAPACITY = 256  # cache positions of a row, at least
MAX_PREFILL = 512  # most tokens of a prompt that are read in one call
MAX_STEPS = 32  # most steps between two looks of the host
MAX_TOP = 1024  # of the most likely tokens in a record
_MIN_CHUNK = 16
_SCORES_BYTES = 1 << 28  # most memory for one layer's attention scores in one call

Prompt = str | Sequence[Mapping[str, str]]


@dataclass(frozen=True, eq=False)
class CalibratedSampler:
    """A sampler resolved for one model, see `calibrate_sampler`."""

    sampler: Sampler  # its percentiles resolved
    settings: SamplerSettings  # the same as arrays, of one row
    calibration: Calibration  # the tables that resolved it
    # Names of other samplers' mechanisms to compile into the step, so that these samplers share
    # one program.
    others: frozenset[str] = frozenset()

    def __deepcopy__(self, memo: Any) -> "CalibratedSampler":
        """Returns the sampler itself, which is immutable and holds functions without a name."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise UserError("rows cannot be pickled with their sampler: use save_trace or to_json")

    @property
    def name(self) -> str:
        """The preset's or file's name."""
        return self.sampler.name

    @property
    def values(self) -> Mapping[str, Any]:
        """All settings, read-only."""
        return self.sampler.values

    @cached_property
    def parts(self) -> Parts:
        """What its compiled step is made of."""
        own = self.sampler.parts(self.settings)
        return replace(own, used=own.used | self.others)

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
    """Refuses (UserError) to record more of the most likely tokens than there are, or than memory
    is kept for."""
    asked = f"the {recording.top} most likely tokens cannot be recorded"
    if recording.top > MAX_TOP:
        raise UserError(f"{asked}: the maximum is {MAX_TOP}")
    if not 0 <= recording.top <= model.config.vocab_size:
        raise UserError(f"{asked}: the model has {model.config.vocab_size} tokens")


def encode_prompt(
    model: LanguageModel,
    prompt: Prompt,
    *,
    chat: bool,
    system: str | None = None,
    escape_special: bool = False,
) -> list[int]:
    """A prompt as token ids: a text, or a conversation of messages with a `role` and a `content`.
    With `chat` a text is one turn of a chat, which `system`, a system message, needs. With
    `escape_special` control tokens that the prompt spells are ordinary text. UserError if
    the prompt is empty, or is a chat where no template is, or none is wanted."""
    if prompt == "":
        raise UserError("the prompt is empty")
    if not chat and (system is not None or not isinstance(prompt, str)):
        what = "a system message" if isinstance(prompt, str) else "a conversation"
        raise UserError(f"{what} needs a chat (--chat)")
    if not chat:
        return model.tokenizer.encode(str(prompt), add_bos=True, escape=escape_special)
    return model.tokenizer.apply_chat(_as_messages(prompt, system), escape=escape_special)


def prompt_messages(
    prompt: Prompt, *, chat: bool, system: str | None = None
) -> list[dict[str, str]] | None:
    """Returns the roles and texts of a prompt's messages, for a trace; None without `chat`. Call it
    after `encode_prompt`, with the same arguments."""
    found = plain_messages(_as_messages(prompt, system)) if chat else None
    return found and [{name: one[name] for name in ("role", "content")} for one in found]


def _as_messages(prompt: Prompt, system: str | None) -> Any:
    """Returns a chat's messages, with any content that a file of messages holds."""
    messages: Any = prompt
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, Sequence):
        messages = list(prompt)
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def calibrate_sampler(sampler: Sampler, model: LanguageModel) -> CalibratedSampler:
    """Resolves a sampler's percentiles with the model's quantile tables, or with the generic ones.

    Raises:
        UserError: the model's calibration file is damaged, of another format or of another model,
            thresholds cross after resolution, or see `sampler_settings`.
    """
    path, renew = _find_tables(model), f"entropix-jax calibrate --model {model.folder}"
    if path is not None:
        calibration, where = read_calibration(path, renew), str(path)
        calibration.check_model(model_shape(model), where, renew)
    else:
        calibration, where = generic_calibration(), "the generic table"
    notes = sampler.notes
    if calibration.generic and sampler.follows_tables:
        own = f"`{renew}` measures its own"
        notes = (*notes, f"the model has no calibration: the generic table is used; {own}")
    resolved = replace(sampler.resolve(calibration, where), notes=notes)
    return CalibratedSampler(resolved, sampler_settings(model, resolved), calibration)


def _find_tables(model: LanguageModel) -> Path | None:
    """Returns the model's calibration file, else the package's for a GGUF file of that name."""
    if (own := model.calibration_file).exists():
        return own
    shipped = resource_folder("weights") / model.folder.stem.lower() / CALIBRATION_FILE
    return shipped if model.folder.suffix.lower() == SUFFIX and shipped.exists() else None


def model_shape(model: LanguageModel) -> dict[str, int]:
    """Returns the shape that identifies a model in its calibration file. Fine-tunes of one model,
    also with added tokens, share it."""
    config = model.config
    return {"layers": config.num_layers, "width": config.width, "heads": config.num_heads}


def start_of_text(model: LanguageModel) -> list[int]:
    """Returns the tokens that a text begins with, at least one.

    Where the tokenizer adds none: the checkpoint's beginning-of-text token, an end token (training
    puts it between two texts), or a line break.
    """
    tokenizer = model.tokenizer
    if start := tokenizer.encode("", add_bos=True):
        return start
    named = (tokenizer.named_token_id(name) for name in ("bos_token", "eos_token"))
    found = [i for i in (*named, *model.eos_ids) if i is not None]
    return (found or tokenizer.encode_within("\n") or [0])[:1]


def sampler_settings(model: LanguageModel, sampler: Sampler) -> SamplerSettings:
    """A sampler's settings as arrays, for one row of a model. UserError if a thought, layer
    weights, bans or biases do not fit the model."""
    size = model.config.vocab_size

    def encode(text: str) -> list[int]:
        tokens = model.tokenizer.encode_within(text)
        if (largest := max(tokens, default=0)) >= size:
            raise UserError(f"contains {describe_token(model, largest)}")
        return tokens

    return sampler.settings(
        num_layers=model.config.num_layers,
        epsilon=float(jnp.finfo(model.precision.activations).eps),
        encode=encode,
        token_texts=lambda: model.tokenizer.token_texts[:size],
        vocab_size=size,
    )


def describe_token(model: LanguageModel, token: Any) -> str:
    """Returns the words for an id that is not one of the model's tokens, for an error."""
    name = model.tokenizer.token_string(token) if isinstance(token, int) and token >= 0 else None
    if name is None:
        return f"{token!r}, which is not a token id"
    return f"{name!r} (token {token}), for which the model has no row"
