"""From a name, a folder, a GGUF file or a hub id to a model that can run."""

import os
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
from jax.sharding import Mesh

from entropix_jax.errors import Note, UserError
from entropix_jax.host.arguments import checked
from entropix_jax.host.memory import as_size, free_share
from entropix_jax.host.resources import resource_folder
from entropix_jax.model.checkpoint import (
    EMBEDDING,
    ModelFiles,
    fingerprint,
    open_folder,
    read_params,
)
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.find import SMOLLM2, find_model, find_smollm2
from entropix_jax.model.gguf import open_gguf
from entropix_jax.model.hub import snapshot
from entropix_jax.model.mesh import param_shardings, weights_bytes
from entropix_jax.model.params import Params, count_params
from entropix_jax.model.precision import AUTO, INT8, WEIGHTS, Precision, choose_precision
from entropix_jax.text.added_tokens import TURN_ENDS
from entropix_jax.text.tokenizer import Tokenizer
from entropix_jax.text.turns import stop_ids, turn_end_id

CALIBRATION_FILE = "calibration.json"  # of a model's folder


@dataclass(frozen=True, eq=False, repr=False)
class LanguageModel:
    """A loaded checkpoint: weights, architecture, tokenizer, and precision."""

    folder: Path  # or a GGUF file
    config: ModelConfig
    eos_ids: tuple[int, ...]  # the end tokens of a text, possibly none
    params: Params
    precision: Precision
    tokenizer: Tokenizer
    mesh: Mesh | None = None  # of several devices; None: on the default device

    def __repr__(self) -> str:
        number, weights = count_params(self.config), self.precision.weights
        return f"<LanguageModel {str(self.folder)!r}: {number:,} parameters, {weights}>"

    @property
    def calibration_file(self) -> Path:
        """The path of the model's quantile tables, if it has any: in its folder, next to its GGUF
        file as `FILE.calibration.json`, or for `smollm2` in this package."""
        if self.folder == find_smollm2():
            return resource_folder("weights") / SMOLLM2 / CALIBRATION_FILE
        if self.folder.is_dir():
            return self.folder / CALIBRATION_FILE
        return self.folder.with_name(f"{self.folder.name}.{CALIBRATION_FILE}")

    @cached_property
    def fingerprint(self) -> str:
        """Content hash of the model, see `checkpoint.fingerprint`."""
        return fingerprint(self.folder)

    @cached_property
    def turn_end_id(self) -> int | None:
        """The token that ends an assistant's turn in the chat template, see `turns.turn_end_id`."""
        return turn_end_id(self.tokenizer, self.eos_ids)

    @property
    def is_chat_model(self) -> bool:
        """Whether prompts are sent as chats by default: the chat template ends turns with one of
        the model's end tokens. A base model may have a template, but does not end texts so."""
        if self.tokenizer.chat_template is None:
            return False
        named = stop_ids(self.tokenizer, TURN_ENDS)
        ends = named if self.turn_end_id is None else [self.turn_end_id]
        return not {*ends}.isdisjoint(self.eos_ids)

    @cached_property
    def turn_end_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn of a chat: the end tokens, the token with which the template ends
        a turn, and control tokens with such a name."""
        ends = (self.turn_end_id, *stop_ids(self.tokenizer, TURN_ENDS))
        ids = (*self.eos_ids, *(i for i in ends if i is not None))
        return tuple(dict.fromkeys(i for i in ids if i < self.config.vocab_size))

    def end_ids(self, *, chat: bool) -> tuple[int, ...]:
        """Returns the tokens that end a row. The end of a turn ends a chat, and any text of a chat
        model, because its prompt may be a chat that the caller formatted."""
        return self.turn_end_ids if chat or self.is_chat_model else self.eos_ids

    def turn_note(self) -> str | None:
        """Returns a line for the user if the end tokens or the default for prompts differ from
        those of common Instruct and base models, else None."""
        if not self.turn_end_ids:
            return f"{self.folder}: no end token is named: rows end at their budget or at --stop"
        packaged = self.folder.parent == resource_folder("weights")
        if self.tokenizer.chat_template is None or packaged:
            return None
        end, why = self.turn_end_id, "its chat template ends turns with"
        name = None if end is None else self.tokenizer.token_string(end)
        if not self.is_chat_model:
            found = f"'{name}', which is not one of its end tokens" if name else "no control token"
            note = f"taken for a base model, since {why} {found} (--chat: prompts are chats)"
        elif end is None or end in stop_ids(self.tokenizer, TURN_ENDS):
            return None
        else:
            found = f"its end token '{name}'"
            note = f"prompts are sent as chats, since {why} {found} (--no-chat: plain text)"
        return f"{self.folder}: {note}"


def open_model(path: Path) -> ModelFiles:
    """Opens the files of a model at a path of `resolve_model`, without reading its weights."""
    return open_folder(path) if path.is_dir() else open_gguf(path)


@checked
def load(
    model: str | Path | None = None,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    *,
    precision: str = AUTO,
    check: bool = False,
) -> LanguageModel:
    """Loads a model.

    Args:
        model: "smollm2", "tiny", "asking", a folder in the Hugging Face layout, a GGUF file, or a
            hub id `owner/name`; None is `default_model`.
        dtype: "float32", "bfloat16" or "int8" (see `linear.Quantized`), the type of the weights in
            memory; None is the checkpoint's own (float32 for float16, bfloat16 for a GGUF file).
        mesh: the devices over which the weights are split; None is the default device only.
        precision: "float32" or "bfloat16", the type of hidden states and, except on a CPU, of the
            cache; "auto" is that of the weights where this device is fast with it, see
            `choose_precision`.
        check: look for NaN and infinity in all weights.

    Warns of unknown configuration keys. UserError if the model or the device is missing, a file is
    damaged or not implemented, weights do not fit into memory or are not finite, or the mesh cannot
    split the model.
    """
    check_backend()
    folder = resolve_model(model)
    files = open_model(folder)
    config, eos_ids, tokenizer = files.config, files.eos_ids, files.tokenizer()
    for note in files.notes:
        warnings.warn(note, Note, stacklevel=3)
    # A tokenizer may add tokens that the model has no rows for, such as one for padding.
    if (size := tokenizer.own_size) > config.vocab_size:
        sizes = f"the tokenizer has {size} tokens, the model only {config.vocab_size}"
        raise UserError(f"{folder}: {sizes}")
    if too_large := [i for i in eos_ids if i >= config.vocab_size]:
        raise UserError(f"{folder}: the end token {too_large[0]} is not in the vocabulary")
    eos = tokenizer.named_token_id("eos_token")
    if eos is not None and eos not in eos_ids and eos < config.vocab_size:
        eos_ids = (*eos_ids, eos)
    weights = weights_dtype(files, dtype)
    dtypes = choose_precision(weights, activations=precision)
    needed, free = weights_bytes(config, dtypes.weights, mesh), free_share(mesh)
    if free is not None and needed > free:
        sizes = f"{as_size(needed)} of {as_size(free)}"
        smaller = "" if weights == INT8 else "; --weights int8 takes less"
        raise UserError(f"{folder}: its weights do not fit into memory: {sizes}{smaller}")
    mesh = None if mesh is None or mesh.size == 1 else mesh
    shardings = None if mesh is None else param_shardings(mesh, config)
    params = read_params(files.tensors, config, weights, shardings, check=check)
    loaded = LanguageModel(folder, config, eos_ids, params, dtypes, tokenizer, mesh)
    if (about_turns := loaded.turn_note()) is not None:
        warnings.warn(about_turns, Note, stacklevel=3)
    return loaded


def weights_dtype(files: ModelFiles, dtype: str | None = None) -> str:
    """Returns the dtype of a model's weights in memory: `dtype`, or its own."""
    if dtype is not None and dtype not in WEIGHTS:
        raise UserError(f"weights cannot be of type {dtype!r}, only {', '.join(WEIGHTS)}")
    stored = files.config.dtype or str(files.tensors[EMBEDDING].dtype)
    return dtype or ("float32" if stored == "float16" else stored)


def resolve_model(model: str | Path | None) -> Path:
    """Returns the folder or GGUF file of a model, see `find_model`; of a hub id its snapshot."""
    return find_model(model) or snapshot(str(model))


def check_backend() -> None:
    """Starts JAX's backend. UserError if it has no device."""
    try:
        jax.default_backend()
    except (RuntimeError, AssertionError) as error:
        wanted = os.environ.get("JAX_PLATFORMS", "")
        raise UserError(f"JAX finds no device (JAX_PLATFORMS='{wanted}'): {error}") from None
