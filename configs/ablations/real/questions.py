"""Simple questions of this project's own, as a task beside those of NQ-open."""

from pathlib import Path

from entropix_jax.lab.tasks.nq_open import NqOpen


class Questions(NqOpen):
    """In NQ-open's form, asked and judged as they are."""

    name = "questions"


QUESTIONS = Questions(Path(__file__).with_name("easy.jsonl"))
