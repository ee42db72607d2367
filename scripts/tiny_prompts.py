"""Writes weights/tiny/calibration_prompts.jsonl: prompts of the tiny world, for `calibrate`.

    python scripts/tiny_prompts.py

They are the first items of the tasks' tuning splits, in a random but fixed order.
"""

import json
from pathlib import Path
from random import Random

from entropix_jax.host.files import replacing
from entropix_jax.lab.tasks.tiny import DOCUMENTS, FACTS, FORKS, SUMS, WORD_PROBLEMS

OUTPUT = Path(__file__).resolve().parent.parent / "weights" / "tiny" / "calibration_prompts.jsonl"
COUNTS = ((DOCUMENTS, 12), (FORKS, 12), (SUMS, 8), (WORD_PROBLEMS, 8), (FACTS, 8))


def prompts() -> list[dict[str, object]]:
    """Returns the records of the file."""
    records: list[dict[str, object]] = []
    for task, count in COUNTS:
        for item, _ in zip(task.items("tuning", chat=False), range(count), strict=False):
            name = "prompt" if isinstance(item.prompt, str) else "messages"
            records.append({"id": item.id, name: item.prompt})
    Random(0).shuffle(records)
    return records


if __name__ == "__main__":
    with replacing(OUTPUT) as scratch:
        scratch.write_text("".join(f"{json.dumps(each)}\n" for each in prompts()), "utf-8")
