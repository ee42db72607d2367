"""The page of several runs of one prompt, side by side."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from entropix_jax.errors import UserError
from entropix_jax.report.embedding import packed
from entropix_jax.report.page import render, run_facts
from entropix_jax.report.reading import TraceReader

_UNSHOWN = ("layers", "top", "branches")  # most of a trace's size, and nothing that is compared
_SHOWN_PROMPT = 60  # characters of a prompt in an error


def comparison_page(traces: Sequence[Path]) -> str:
    """Several traces of one prompt as one page; of a single trace, its texts.

    Without the layers, likeliest tokens and branches of the traces, whose place is the page of a
    run.

    Raises:
        UserError: one is not a trace, they are of different prompts, or there is one text alone.
    """
    payloads, facts = {}, []
    first: TraceReader | None = None
    for number, trace in enumerate(traces):
        reader = TraceReader(trace)
        payloads[f"trace-{number}"] = packed(_compared(reader))
        first = first or reader
        _check_prompt(first, reader)
        facts.append(run_facts(reader, trace))
    if len(traces) == 1 and len(facts[0]["rows"]) < 2:
        raise UserError(f"{traces[0]}: one text alone: nothing to compare it with")
    return render("compare", {"facts": {"traces": facts}}, payloads)


def _compared(reader: TraceReader) -> Iterator[bytes]:
    """The tokens, as lines of JSON."""
    for line in reader:
        if line.record["type"] in ("token", "retracted"):
            kept = {k: v for k, v in line.record.items() if k not in _UNSHOWN}
            yield json.dumps(kept).encode() + b"\n"


def _check_prompt(first: TraceReader, other: TraceReader) -> None:
    """Refuses another prompt. Models may have vocabularies of their own, for which a prompt has
    other tokens; one model has the same."""
    name = "prompt_tokens" if first.header["model"] == other.header["model"] else "prompt"
    if first.header[name] == other.header[name]:
        return
    ours, theirs = (_shown(reader.header["prompt"]) for reader in (other, first))
    raise UserError(
        f"{other.path}: another prompt than that of {first.path}: {ours}, not {theirs}: give"
        " traces of one prompt"
    )


def _shown(prompt: str) -> str:
    short = prompt if len(prompt) <= _SHOWN_PROMPT else f"{prompt[: _SHOWN_PROMPT - 3]}..."
    return json.dumps(short, ensure_ascii=False)
