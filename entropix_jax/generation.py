"""Generation as a user calls it: prompts in, a stream of tokens and at the end the results out."""

import time
from collections.abc import Iterator, Sequence

from entropix_jax.calibration.automatic import calibrate_sampler
from entropix_jax.decode_state import Recording
from entropix_jax.engine import Engine
from entropix_jax.errors import UserError
from entropix_jax.loading import LanguageModel
from entropix_jax.preparation import MIN_CAPACITY, bucket, check_recording, sampler_params
from entropix_jax.results import Event, Request, Row, Rows
from entropix_jax.running import Ask, Retrieve, RunningRow, budget_of
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.slots import padded_ids
from entropix_jax.trace import header


class Generation:
    """A run over some rows. Iterate to make it go; `rows` then holds the results.

    Leaving the iteration early, or `stop`, leaves the rows as far as they came; `interrupt` then
    ends them.
    """

    def __init__(
        self,
        model: LanguageModel,
        requests: Sequence[Request],
        sampler: Sampler | str = "entropix",
        *,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        turn_end: bool = False,
        recording: Recording | None = None,
        retrieve: Retrieve | None = None,
        ask: Ask | None = None,
    ) -> None:
        """Checks everything that can be checked before anything is computed.

        Args:
            stop: a text that ends a row, or several.
            ignore_eos: no token ends a row.
            turn_end: the end of a chat's turn ends a row too, whether or not the model's folder
                says so.
            recording: what each token's record holds besides the usual.
            retrieve: is given a row's text whenever a thought is due, and returns the text to
                inject in its place. Where that is empty or does not fit the budget, the sampler's
                own thought is injected, and where that does not fit either the row just draws.
            ask: is given a row and the texts of the two best branches, the better one first, where
                their scores are too close to call, and returns which it shall be, or None for the
                better one.

        Raises:
            UserError: no request, an empty prompt, one that leaves no room for a token or holds
                what is no token, a sampler or recording that does not fit the model, or rows that
                memory has no room for.
        """
        if not requests:
            raise UserError("there is nothing to generate: no request")
        if isinstance(sampler, str):
            sampler = load_sampler(sampler)
        self.model = model
        self.sampler = calibrate_sampler(sampler, model)
        self.timings: dict[str, float] = {}
        prompt = requests[0].prompt
        self.rows = Rows(
            map(Row, requests),
            header(
                model=str(model.folder),
                model_config=model.config,
                precision=model.precision,
                sampler=self.sampler.name,
                sampler_values=self.sampler.values,
                seed=seed,
                prompt=model.tokenizer.decode(prompt, skip_special=False),
                prompt_tokens=prompt,
            ),
            self.timings,
        )
        recording = recording or Recording()
        check_recording(model, recording)
        params = sampler_params(model, self.sampler)
        ends = model.turn_end_ids if turn_end else model.generation.eos_ids
        padded_ids(ends)
        self._running = [
            RunningRow(
                number,
                row,
                model,
                self.sampler,
                params,
                budget=budget_of(model, row.request),
                seed=seed,
                eos_ids=() if ignore_eos else ends,
                stop=[stop] if isinstance(stop, str) else stop,
                retrieve=retrieve,
                ask=ask,
            )
            for number, row in enumerate(self.rows)
        ]
        longest = max(row.known + row.budget for row in self._running)
        self._engine = Engine(
            model,
            params,
            slots=len(requests),
            capacity=bucket(longest, MIN_CAPACITY),
            recording=recording,
        )
        self._start = time.perf_counter()
        self._iterator = self._iterate()

    def __iter__(self) -> Iterator[Event]:
        """The events, token by token: all rows of one step, then the next step. A second iteration
        goes on where the first was left."""
        return self._iterator

    def _iterate(self) -> Iterator[Event]:
        self._start = time.perf_counter()
        for event in self._engine.run(self._running):
            if event.token is not None:
                self.timings.setdefault("first_token", self.seconds())
            yield event
        if not any(row.running for row in self._running):
            self.timings["total"] = self.seconds()

    def stop(self) -> None:
        """Asks the run to end after the event that is on its way. A signal handler may call it."""
        self._engine.stop()

    def interrupt(self) -> list[Event]:
        """Ends the rows that had not ended, and gives the text that was still held back of them."""
        self.timings.setdefault("total", self.seconds())
        return [event for row in self._running for event in row.interrupt()]

    def run(self) -> Rows:
        """Runs to the end and gives the rows."""
        for _ in self:
            pass
        return self.rows

    def _repr_html_(self) -> str:
        return self.rows._repr_html_()

    def seconds(self) -> float:
        """Time since the start, without that in which a person was asked."""
        waited = sum(row.waited for row in self._running)
        return time.perf_counter() - self._start - waited
