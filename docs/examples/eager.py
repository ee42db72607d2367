"""EAGer (arXiv 2510.11170): a row parts in two where the model is in doubt, and all are kept.

It is the paper's first stage. Where the entropy of a token's distribution exceeds a threshold, and
there are fewer rows than wanted, the row is forked before that token, and the fork takes the
most likely other one. What rows share is computed once, and a prompt without doubt gets one row.

    python docs/examples/eager.py
"""

import entropix_jax
from entropix_jax import Engine, Recording, Request, Row

PROMPT, THRESHOLD, ROWS, TOKENS = "Question: ", 3.0, 8, 60  # bits; rows at most; tokens of a row


def sample_eagerly(engine: Engine, request: Request, threshold: float, most: int) -> list[Row]:
    """Runs a request and its forks, at most `most` rows. `threshold` is in bits. The engine must
    record states and the two most likely tokens."""
    rows = [engine.new_row(request)]
    for event in engine.run([request]):
        token = event.token
        if token is None or token.top is None or len(rows) == most:
            continue
        # A token that was forced is already the other one.
        if token.entropy <= threshold or token.action == "inject":
            continue
        other = next(i for i, _, _ in token.top if i != token.token_id)
        (fork,) = engine.fork(event.row, 1, position=token.position)
        engine.force(fork, [other])
        rows.append(fork)
    return rows


def main() -> None:
    """Prints the rows, and what they cost beside independent samples."""
    model = entropix_jax.load("tiny")
    sampler = entropix_jax.calibrate_sampler(entropix_jax.load_sampler("min-p"), model)
    prompt = model.tokenizer.encode(PROMPT, add_bos=True)
    request = Request(prompt, sampler, max_new_tokens=TOKENS, eos_ids=model.end_ids(chat=False))
    recording = Recording(top=2, state=True)

    engine = Engine(model, slots=ROWS, capacity=256, recording=recording)
    rows = sample_eagerly(engine, request, THRESHOLD, ROWS)
    for row in rows:
        print(f"{row.request.row_id}: {row.text!r}")

    plain = Engine(model, slots=ROWS, capacity=256, recording=recording)
    samples = [
        Request(prompt, sampler, TOKENS, row_id=f"s{i}", eos_ids=request.eos_ids)
        for i in range(len(rows))
    ]
    list(plain.run(samples))
    print(f"{len(rows)} rows, {engine.useful} forward passes; samples: {plain.useful}")


if __name__ == "__main__":
    main()
