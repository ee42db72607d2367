"""A model's own answers to a list of prompts: the metrics of their tokens, for a calibration."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from entropix_jax.batch.output import Store
from entropix_jax.batch.records import Record, content_hash
from entropix_jax.batch.sidecar import find_difference, read_sidecar
from entropix_jax.engine.engine import Engine
from entropix_jax.engine.preparation import (
    MIN_CAPACITY,
    CalibratedSampler,
    bucket,
    encode_prompt,
    model_shape,
    sampler_settings,
)
from entropix_jax.engine.results import Request
from entropix_jax.engine.running import check_request
from entropix_jax.errors import UserError
from entropix_jax.host.files import read_text
from entropix_jax.lab.tasks import writing
from entropix_jax.lab.tasks.task import Item
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.calibration import FORMAT, TABLES, generic_calibration
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.version import __version__

SAMPLER = "min-p"  # its answers' quantiles are nearer to those of `entropix` than greedy's
MAX_NEW_TOKENS = 128  # of an answer

_PROMPTS = Path(__file__).with_name("calibration_prompts.jsonl")
_BEGINNINGS = Path(__file__).with_name("calibration_beginnings.jsonl")


def packaged_prompts(model: LanguageModel) -> list[Item]:
    """Returns the package's prompts: requests for a chat model, beginnings of texts for others."""
    return read_prompts(_PROMPTS if model.is_chat_model else _BEGINNINGS)


def read_prompts(path: Path) -> list[Item]:
    """Reads prompts from a file: one per line of a .txt file, else the records of `batch`.

    Raises:
        UserError: the file cannot be read, holds no prompt, or has an invalid record.
    """
    if path.suffix.lower() == ".txt":
        lines = enumerate(read_text(path).removeprefix("\ufeff").split("\n"), 1)
        prompts = [Item(str(number), line.strip(), "") for number, line in lines if line.strip()]
    else:
        prompts = list(writing.read_prompts(str(path)))
    if not prompts:
        raise UserError(f"{path}: contains no prompt")
    return prompts


def measuring_sampler(name: str, model: LanguageModel) -> CalibratedSampler:
    """Returns a preset for measurements, resolved with the generic table: the model's own may be
    missing or invalid."""
    generic = generic_calibration()
    sampler = load_sampler(name).resolve(generic)
    return CalibratedSampler(sampler, sampler_settings(model, sampler), generic)


class AnswerRun:
    """Answers prompts in one batch and stores the metrics of each answer.

    `tokens` counts the tokens of this run.
    """

    def __init__(
        self, model: LanguageModel, prompts: Sequence[Item], *, seed: int, slots: int
    ) -> None:
        """Encodes the prompts.

        Raises:
            UserError: a prompt does not fit the model, or the rows do not fit into memory.
        """
        self.tokens = 0
        self._model = model
        self._seed = seed
        sampler = measuring_sampler(SAMPLER, model)
        self.requests = [self._request(i, prompt, sampler) for i, prompt in enumerate(prompts)]
        longest = max(len(request.prompt) for request in self.requests) + MAX_NEW_TOKENS
        capacity = min(bucket(longest, MIN_CAPACITY), model.config.max_positions)
        self.engine = Engine(model, slots=min(slots, len(prompts)), capacity=capacity)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that determine the answers, as JSON."""
        digests = "".join(request.tag.digest for request in self.requests)
        return {
            "calibration_format": FORMAT,
            "model": self._model.fingerprint,
            "shape": model_shape(self._model),
            "precision": self._model.precision.to_json(),
            "prompts": content_hash(digests.encode()),
            "sampler": SAMPLER,
            "max_new_tokens": MAX_NEW_TOKENS,
            "seed": self._seed,
            "version": __version__,
        }

    def run(self, store: Store, on_event: Callable[[], None]) -> None:
        """Answers the prompts without a result in the store. Calls `on_event` after each token.

        Raises:
            UserError: an answer failed, for example by NaN logits.
        """
        pending = [request for request in self.requests if not store.is_done(request.tag)]
        for event in self.engine.run(pending):
            row = event.row
            self.tokens += event.token is not None
            if row.error is not None:
                raise UserError(f"prompt {row.request.row_id}: {row.error}")
            if row.finish_reason is not None:
                values = {name: [getattr(t, name) for t in row.tokens] for name in TABLES}
                store.write(row.request.tag, values)
            on_event()

    def stop(self) -> None:
        """Asks the run to end after the current event. A signal handler may call it."""
        self.engine.stop()

    def _request(self, number: int, prompt: Item, sampler: CalibratedSampler) -> Request:
        chat = self._model.is_chat_model or not isinstance(prompt.prompt, str)
        ends = self._model.end_ids(chat=chat)
        try:
            tokens = encode_prompt(self._model, prompt.prompt, chat=chat)
            digest = content_hash(repr((tokens, ends)).encode())
            request = Request(
                tokens,
                sampler,
                max_new_tokens=MAX_NEW_TOKENS,
                row_id=prompt.id,
                seed=self._seed,
                eos_ids=ends,
                tag=Record(number + 1, prompt.id, digest),
            )
            check_request(self._model, request)
        except UserError as error:
            raise UserError(f"prompt {prompt.id}: {error}") from None
        return request


def discard_other_run(partial: Path, identity: dict[str, Any]) -> None:
    """Removes the stored answers of an interrupted calibration with other settings."""
    sidecar = read_sidecar(str(partial))
    stored = {} if sidecar is None else sidecar["identity"]
    if "calibration_format" in stored and find_difference(stored, identity):
        remove_answers(partial)


def remove_answers(partial: Path) -> None:
    """Removes stored answers and their sidecar."""
    for path in (partial, Path(f"{partial}.run.json")):
        with suppress(FileNotFoundError):
            path.unlink()


def read_answers(partial: Path) -> dict[str, np.ndarray]:
    """Returns the stored metrics of all answers, float32 [n] for each of `TABLES`."""
    with partial.open(encoding="utf-8") as file:
        answers = [json.loads(line) for line in file]
    return {name: _joined(answer[name] for answer in answers) for name in TABLES}


def _joined(parts: Iterable[list[float]]) -> np.ndarray:
    return np.asarray([value for part in parts for value in part], np.float32)
