"""Writes the prompts for `calibrate` of the two worlds, and the asking world's table of results.

    python scripts/tiny_prompts.py

The prompts, `weights/NAME/calibration_prompts.jsonl`, are the first items of the tasks' tuning
splits, in a random but fixed order. The table, `weights/asking/lookup.jsonl`, has the result of a
lookup for each person.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random

from entropix_jax.host.files import replacing
from entropix_jax.lab.tasks.asking import AMBIGUOUS, lookup_table
from entropix_jax.lab.tasks.asking import FACTS as ASKING_FACTS
from entropix_jax.lab.tasks.task import Task
from entropix_jax.lab.tasks.tiny import DOCUMENTS, FACTS, FORKS, SUMS, WORD_PROBLEMS

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"
_TEXTS = ((DOCUMENTS, 12), (FORKS, 12), (SUMS, 8), (WORD_PROBLEMS, 8))
COUNTS: Mapping[str, tuple[tuple[Task, int], ...]] = {
    "tiny": (*_TEXTS, (FACTS, 8)),
    "asking": (*_TEXTS, (ASKING_FACTS, 16), (AMBIGUOUS, 8)),
}


def prompts(name: str) -> list[dict[str, object]]:
    """Returns the records of the file with the prompts of a model."""
    records: list[dict[str, object]] = []
    for task, count in COUNTS[name]:
        for item, _ in zip(task.items("tuning", chat=False), range(count), strict=False):
            kind = "prompt" if isinstance(item.prompt, str) else "messages"
            records.append({"id": item.id, kind: item.prompt})
    Random(0).shuffle(records)
    return records


def table() -> list[dict[str, object]]:
    """Returns the records of the asking world's table."""
    return [{"key": name, "value": value} for name, value in lookup_table().items()]


def write_records(path: Path, records: Iterable[dict[str, object]]) -> None:
    """Writes records as JSON Lines."""
    with replacing(path) as scratch:
        scratch.write_text("".join(f"{json.dumps(each)}\n" for each in records), "utf-8")


if __name__ == "__main__":
    for name in COUNTS:
        write_records(WEIGHTS / name / "calibration_prompts.jsonl", prompts(name))
    write_records(WEIGHTS / "asking" / "lookup.jsonl", table())
