"""From a folder or a hub id to a model that can run."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from entropix_jax.checkpoint import check_format, checkpoint_dtype, fingerprint, load_params
from entropix_jax.config import (
    GenerationConfig,
    ModelConfig,
    load_generation_config,
    load_model_config,
)
from entropix_jax.errors import UserError
from entropix_jax.free_memory import as_size, free_share
from entropix_jax.hub import is_hub_id, snapshot
from entropix_jax.params import Params, count_params
from entropix_jax.precision import WEIGHTS, Precision, choose_precision
from entropix_jax.resources import resource_folder
from entropix_jax.sharding import Rules, rules_for, weights_bytes
from entropix_jax.tokenizer import Tokenizer, load_tokenizer

CALIBRATION_FILE = "calibration.json"  # of a model's folder

_TURN_ENDS = ("<|eot_id|>", "<|im_end|>")


@dataclass(frozen=True, eq=False, repr=False)
class LanguageModel:
    """A loaded checkpoint: weights, architecture, tokenizer, and how it computes."""

    folder: Path
    config: ModelConfig
    generation: GenerationConfig
    params: Params
    precision: Precision
    tokenizer: Tokenizer
    rules: Rules | None = None  # where it lies on a mesh; None: on the default device

    def __repr__(self) -> str:
        number = count_params(self.config)
        weights = jnp.dtype(self.precision.weights).name
        return f"<LanguageModel {str(self.folder)!r}: {number:,} parameters, {weights}>"

    @property
    def calibration_file(self) -> Path:
        """Where the model's own thresholds are, if it has any."""
        return self.folder / CALIBRATION_FILE

    @cached_property
    def fingerprint(self) -> str:
        """A hash that tells this model from another, see `checkpoint.fingerprint`.

        Raises:
            UserError: a file of the model cannot be read.
        """
        return fingerprint(self.folder)

    @property
    def is_chat_model(self) -> bool:
        """Whether a prompt is best put as a chat: a template is there, and the folder is an
        Instruct model's, which is told by an end-of-turn token among the end tokens."""
        ends = {self.tokenizer.token_id(token) for token in _TURN_ENDS}
        return self.tokenizer.chat_template is not None and any(
            token_id in ends for token_id in self.generation.eos_ids
        )

    @property
    def turn_end_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn of a chat: the end tokens, and those named for it."""
        named = (self.tokenizer.token_id(token) for token in _TURN_ENDS)
        ids = (*self.generation.eos_ids, *(i for i in named if i is not None))
        return tuple(dict.fromkeys(ids))


def load(
    model: str | None = None,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    *,
    check: bool = False,
) -> LanguageModel:
    """Loads a model.

    Args:
        model: a folder in the Hugging Face layout, or a hub id `owner/name`; None is the embedded
            one.
        dtype: "float32", "bfloat16" or "int8" (see `linear.Quantized`), the type of the weights in
            memory; None is the checkpoint's own (float32 for a float16 one).
        mesh: the devices that the weights are spread over, see `sharding.parse_mesh`; None is the
            default device alone.
        check: look for NaN and infinity in all weights.

    Raises:
        UserError: no such folder or repository, one that is not a Llama checkpoint, an unknown
            type, weights that memory has no room for, a weight that was looked at and is not
            finite, a mesh over which the model cannot be split, or a device that JAX was told to
            use and does not find.
    """
    check_backend()
    folder = resolve_model(model)
    check_format(folder)
    config = load_model_config(folder)
    generation = load_generation_config(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"the model only {config.vocab_size}"
        )
    if too_large := [i for i in generation.eos_ids if i >= config.vocab_size]:
        raise UserError(f"{folder}: the end token {too_large[0]} is none of {config.vocab_size}")
    weights = weights_dtype(folder, config, dtype)
    precision = choose_precision(weights)
    _check_memory(folder, config, precision, mesh)
    rules = None if mesh is None or mesh.size == 1 else rules_for(mesh, config)
    shardings = None if rules is None else rules.params(config)
    return LanguageModel(
        folder=folder,
        config=config,
        generation=generation,
        params=load_params(
            folder, config, weights, shardings, activations=precision.activations, check=check
        ),
        precision=precision,
        tokenizer=tokenizer,
        rules=rules,
    )


def _check_memory(
    folder: Path, config: ModelConfig, precision: Precision, mesh: Mesh | None
) -> None:
    """Refuses weights that do not fit before they are read."""
    needed, free = weights_bytes(config, precision.weights, mesh), free_share(mesh)
    if free is not None and needed > free:
        smaller = "" if precision.weights == jnp.int8 else "; --weights int8 takes less"
        raise UserError(
            f"{folder}: its weights do not fit into memory: {as_size(needed)} of {as_size(free)}"
            f"{smaller}"
        )


def weights_dtype(folder: Path, config: ModelConfig, dtype: str | None = None) -> str:
    """The type that a folder's weights take in memory, where `dtype` is what is asked for.

    Raises:
        UserError: no weights, or a type that is not read or not known.
    """
    if dtype is not None and dtype not in WEIGHTS:
        raise UserError(f"weights cannot be of type {dtype!r}, only {', '.join(WEIGHTS)}")
    stored = checkpoint_dtype(folder, config)
    return dtype or ("float32" if stored == "float16" else stored)


def resolve_model(model: str | None) -> Path:
    """The folder of a model: one that exists, or a snapshot of a hub repository.

    Raises:
        UserError: neither a folder nor of the form `owner/name`, or the hub refuses.
    """
    if model is None:
        return resource_folder("weights") / "tiny"
    if model and Path(model).is_dir():
        return Path(model)
    if model and Path(model).exists():
        raise UserError(f"{model}: a file, not a model folder")
    if not is_hub_id(model):
        raise UserError(f"no such model folder: '{model}' (a hub id has the form owner/name)")
    return snapshot(model)


def logits_epsilon(model: LanguageModel) -> float:
    """The machine epsilon of the type that the model's logits are computed from."""
    return float(jnp.finfo(model.precision.activations).eps)


def check_backend() -> None:
    """Starts JAX's backend.

    Raises:
        UserError: JAX finds no device of the kind that it was told to use.
    """
    try:
        jax.default_backend()
    except (RuntimeError, AssertionError) as error:
        wanted = os.environ.get("JAX_PLATFORMS", "")
        raise UserError(f"JAX finds no device (JAX_PLATFORMS='{wanted}'): {error}") from None
