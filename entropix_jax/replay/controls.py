"""Controls: what an action requires, and what each control makes of a drawn token."""

from collections.abc import Sequence

import numpy as np

from entropix_jax.replay import formulas, sentences
from entropix_jax.replay.formulas import ends_in, log_softmax
from entropix_jax.replay.state import Plan, RowState, Seen, Verdict, as_list


def may_inject(row: RowState) -> bool:
    """A thought that fits, at the end of a sentence, without cooldown, within the budget."""
    v, states, texts = row.v, row.tally.states, row.texts["inject.thought"]
    thought = texts[int(states["inject.begun"]) % len(texts)] if texts else []
    fits = 0 < len(thought) <= row.remaining and row.unwritable.isdisjoint(thought)
    marks = [mark for mark in as_list(v["inject.after"]) if mark]
    return bool(
        fits
        and not any(ends_in(row.tokens, text) for text in texts)
        and states["inject.cooldown"] == 0
        and states["inject.begun"] < v["inject.per_row"]
        and row.generated >= v["inject.earliest"]
        and (not marks or sentences.has_ended([row.model.texts[t] for t in row.tokens], marks))
    )


def may_look_up(row: RowState) -> bool:
    """A lookup function, without cooldown, within the budget."""
    v, states = row.v, row.tally.states
    return bool(
        row.request["lookup"]
        and states["lookup.cooldown"] == 0
        and states["lookup.begun"] < v["lookup.per_row"]
        and row.generated >= v["lookup.earliest"]
    )


def may_branch(row: RowState) -> bool:
    """Budget for forks and for their forward passes."""
    v, states = row.v, row.tally.states
    affordable = np.float32(v["branch.max_share"]) * np.float32(row.generated)
    has_forks = states["branch.begun"] < v["branch.per_row"]
    return has_forks and bool(states["branch.forwards"] <= affordable)


def may_clarify(row: RowState) -> bool:
    """A row that may ask, budget, and room for the prompt of the question."""
    states, prompt = row.tally.states, next(iter(row.texts["clarify.prompt"]), [])
    fits = 0 < len(prompt) < row.remaining and row.unwritable.isdisjoint(prompt)
    is_free = not states["clarify.measured"] and not states["question"]
    has_forks = states["clarify.begun"] < row.v["clarify.per_row"]
    return row.request["clarify"] and fits and is_free and has_forks


def may_backspace(row: RowState) -> bool:
    """A token in doubt within reach."""
    return bool(row.in_doubt())


MAY = {
    "inject": may_inject,
    "lookup": may_look_up,
    "branch": may_branch,
    "clarify": may_clarify,
    "backspace": may_backspace,
}


def inject(row: RowState, plan: Plan, seen: Seen) -> Verdict | None:
    """Writes the next thought."""
    v, states, texts = row.v, row.tally.states, row.texts["inject.thought"]
    marks = [mark for mark in as_list(v["inject.after"]) if mark]
    last, token = row.model.texts[row.tokens[-1]], row.model.texts[plan.token]
    if marks and (plan.token in row.end_ids or not sentences.begins_word(last, token)):
        return None
    begun = {"inject.begun": states["inject.begun"] + 1}
    return Verdict("force", tokens=texts[int(states["inject.begun"]) % len(texts)], states=begun)


def lookup(row: RowState, plan: Plan, seen: Seen) -> Verdict | None:
    """Waits for the result from the host."""
    begun = row.tally.states["lookup.begun"] + 1
    cooldown = row.v["lookup.cooldown"]
    return Verdict("wait", states={"lookup.begun": begun, "lookup.cooldown": cooldown})


def branch(row: RowState, plan: Plan, seen: Seen) -> Verdict | None:
    """Forks the row. `tokens` are the possible widths if candidates are drawn."""
    v, widths = row.v, [row.v["branch.width"]]
    narrow, wide = v["branch.narrow"], v["branch.wide"]
    if wide > narrow:
        share = (formulas.entropies(log_softmax(plan.left))[0] - narrow) / (wide - narrow)
        exact = (v["branch.width"] - 1) * np.clip(share, 0.0, 1.0)
        near = row.tolerance * (1 + exact)
        widths = [1 + int(x) for x in (exact, exact - near, exact + near)]
        line = row.line_here()
        if 1 in widths and (line is None or line["branches"] is None):
            return None
    return Verdict(
        "fork", tokens=widths, states={"branch.begun": row.tally.states["branch.begun"] + 1}
    )


def clarify(row: RowState, plan: Plan, seen: Seen) -> Verdict | None:
    """Forks the row into sampled continuations."""
    states = {"clarify.begun": row.tally.states["clarify.begun"] + 1, "clarify.measured": 1}
    return Verdict("fork", tokens=[row.v["clarify.width"]], states=states)


def question(row: RowState, plan: Plan, seen: Seen) -> Verdict | None:
    """Ends a row with the last token of its question."""
    count, text = row.tally.states["question"], row.model.texts[plan.token]
    is_last = "?" in text or "\n" in text or count >= row.v["clarify.length"]
    return Verdict("end") if count > 0 and is_last else None


def backspace(row: RowState, plan: Plan, seen: Seen) -> Verdict | None:
    """Goes back to the last token in doubt."""
    back = row.in_doubt()
    states = {"backspace": row.tally.states["backspace"] + 1}
    return Verdict("rewind", back=back[0], states=states) if back else None


def think_end(row: RowState, plan: Plan, seen: Seen) -> Verdict | None:
    """Ends thinking after several certain tokens in a row."""
    patience = row.v["think_end.patience"]
    calm = 0 < patience <= row.tally.states["think_end"]
    text = next(iter(row.texts["think_end.text"]), [])
    return Verdict("force", tokens=text) if calm and _may_write(row, text, text) else None


def budget_forcing(row: RowState, plan: Plan, seen: Seen) -> Verdict | None:
    """Ends thinking that is too long, and prolongs thinking that is too short."""
    v, own = row.v, "budget_forcing"
    end, wait = (next(iter(row.texts[f"{own}.{name}"]), []) for name in ("end", "wait"))
    waited = row.tally.states[own]
    late = 0 < v[f"{own}.max_tokens"] <= row.generated
    stops = plan.token in row.end_ids or plan.token in end[:1]
    early = stops and row.generated < v[f"{own}.min_tokens"] and waited < v[f"{own}.times"]
    text = end if late else wait
    if not (late or early) or not _may_write(row, text, end):
        return None
    return Verdict("force", tokens=text, states={own: waited + (not late)})


def phrases(row: RowState, plan: Plan, seen: Seen) -> Verdict | None:
    """Goes back to the start of a banned phrase that the token completes."""
    text, used = [*row.tokens, plan.token], row.tally.states["phrases"]
    found = [len(one) for one in row.texts["phrases.banned"] if ends_in(text, one)]
    if not found or used >= row.v["phrases.per_row"]:
        return None
    back = min(max(found) - 1, row.reach)
    return Verdict("rewind", back=back, states={"phrases": used + 1})


def low_confidence(row: RowState, plan: Plan, seen: Seen) -> Verdict | None:
    """Ends a row whose last tokens have a low mean confidence."""
    v, window = row.v, row.v["confidence.window"]
    past = [entry.line["token_confidence"] for entry in row.live]
    mean = sum([*past, seen.metrics["token_confidence"]][-window:]) / window
    is_low = v["confidence.threshold"] > 0 and np.float32(mean) < v["confidence.threshold"]
    return Verdict("end") if is_low and len(past) + 1 >= window else None


def _may_write(row: RowState, text: Sequence[int], last: Sequence[int]) -> bool:
    """Whether a row may write a text: none of it is banned, and `last` is not written yet."""
    own = row.tokens[len(row.prompt) :]
    written = any(ends_in(own, last, before) for before in range(len(own)))
    return len(text) > 0 and row.unwritable.isdisjoint(text) and not written


CONTROLS = {
    "inject": inject,
    "lookup": lookup,
    "branch": branch,
    "clarify": clarify,
    "backspace": backspace,
    "think_end": think_end,
    "budget_forcing": budget_forcing,
    "phrases": phrases,
    "question": question,
    "confidence": low_confidence,
}
