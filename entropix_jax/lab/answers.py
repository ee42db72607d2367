"""Metrics of a model's own answers to a list of prompts or to a task, for calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from entropix_jax.batch.records import BadRecord, read_records
from entropix_jax.engine.api import Generation
from entropix_jax.engine.calibrated import CalibratedSampler, sampler_settings
from entropix_jax.engine.request import Request, check_request
from entropix_jax.engine.results import Rows
from entropix_jax.engine.tokens import encode_prompt
from entropix_jax.errors import UserError
from entropix_jax.host.files import read_text
from entropix_jax.lab.tasks.task import Item
from entropix_jax.lab.tasks.writing import to_item
from entropix_jax.lab.trials import Question, extract_answer, score_answer
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.calibration import AT_ENTROPY, TABLES, generic_calibration
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.wrong import MEASURES

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
        UserError: the file cannot be read, contains no prompt, or has an invalid record.
    """
    if path.suffix.lower() == ".txt":
        lines = enumerate(read_text(path).split("\n"), 1)
        prompts = [Item(str(number), line.strip(), "") for number, line in lines if line.strip()]
    else:
        prompts = []
        for record in read_records(str(path)):
            if isinstance(record, BadRecord):
                raise UserError(f"{path}: line {record.line}: {record.error}")
            prompts.append(to_item(record))
    if not prompts:
        raise UserError(f"{path}: contains no prompt")
    return prompts


def measure_answers(
    model: LanguageModel,
    prompts: Sequence[Item],
    seeds: Sequence[int],
    on_answer: Callable[[], None],
) -> dict[str, np.ndarray]:
    """Answers each prompt once per seed, in one batch, and measures the distribution of each token.
    Calls `on_answer` after each answer.

    Returns:
        float32 [n] for each of `calibration.TABLES` and `AT_ENTROPY`, answer by answer in order.

    Raises:
        UserError: a prompt does not fit the model, or an answer failed, for example by NaN logits.
    """
    # The model's own table may be missing or invalid.
    generic = generic_calibration()
    sampler = load_sampler(SAMPLER).resolve(generic)
    drawn = CalibratedSampler(sampler, sampler_settings(model, sampler), generic)
    requests = [_request(model, prompt, drawn, seed) for seed in seeds for prompt in prompts]
    tokens = [token for row in _run(model, requests, on_answer) for token in row.tokens]
    names = dict.fromkeys((*TABLES, *AT_ENTROPY))
    return {name: np.array([getattr(t, name) for t in tokens], np.float32) for name in names}


def measure_task(
    model: LanguageModel,
    questions: Sequence[Question],
    sampler: CalibratedSampler,
    seed: int,
    on_answer: Callable[[], None],
) -> tuple[list[np.ndarray], np.ndarray]:
    """Answers each question of a task, in one batch. Calls `on_answer` after each answer.

    Returns:
        `wrong.MEASURES` at the tokens of each answer, float64 [T, 4], and whether each answer is
        wrong: its score is below 0.5.

    Raises:
        UserError: see `measure_answers`, or the task's code fails or returns no score.
    """
    requests = [
        Request(
            question.prompt,
            sampler,
            max_new_tokens=question.max_new_tokens,
            row_id=question.item.id,
            seed=seed,
            eos_ids=question.ends,
            stop=question.task.stop,
        )
        for question in questions
    ]
    measures, scores = [], []
    rows = _run(model, requests, on_answer)
    for question, row in zip(questions, rows, strict=True):
        measured = [[getattr(token, name) for name in MEASURES] for token in row.tokens]
        measures.append(np.array(measured, np.float64).reshape(-1, len(MEASURES)))
        scores.append(score_answer(question, extract_answer(question, row.text)))
    if np.isnan(scores).any():
        raise UserError(f"task '{questions[0].task.name}': its answers have no score")
    return measures, np.array(scores) < 1


def _run(model: LanguageModel, requests: Sequence[Request], on_answer: Callable[[], None]) -> Rows:
    """Runs requests to their ends and returns the rows."""
    answers = Generation(model, requests)
    for event in answers:
        row = event.row
        if row.error is not None:
            raise UserError(f"prompt {row.request.row_id}: {row.error}")
        if row.finish_reason is not None:
            on_answer()
    return answers.rows


def _request(model: LanguageModel, prompt: Item, sampler: CalibratedSampler, seed: int) -> Request:
    chat = model.is_chat_model or not isinstance(prompt.prompt, str)
    try:
        request = Request(
            encode_prompt(model, prompt.prompt, chat=chat),
            sampler,
            max_new_tokens=MAX_NEW_TOKENS,
            row_id=prompt.id,
            seed=seed,
            eos_ids=model.end_ids(chat=chat),
        )
        check_request(model, request)
    except UserError as error:
        raise UserError(f"prompt {prompt.id}: {error}") from None
    return request
