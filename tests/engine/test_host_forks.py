"""Forks, rewinds, forced tokens and ends of rows of a run. Each moved row equals a fresh row with
the same text, for any other rows and however far ahead the device was."""

from __future__ import annotations

import itertools
import runpy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.api import Generation
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Event, Row, Rows
from entropix_jax.engine.slots import Layout, empty_slots, share_prefix
from entropix_jax.engine.state import Recording
from entropix_jax.engine.trace import TokenRecord, header
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.model.mesh import param_shardings
from entropix_jax.names import BOXES
from entropix_jax.replay import read_trace, replay
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.presets import load_sampler
from tests.support import runs
from tests.support.meshes import collectives_of, mesh_of_two
from tests.support.models import tiny_config
from tests.support.replays import CachedReader
from tests.support.runs import (
    Spec,
    as_requests,
    calibrated,
    ids_of,
    is_same,
    requests,
    run_rows,
    set_pace,
)
from tests.support.samplers import EVERYTHING, LITERAL, SHARED, params_of

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "eager.py"
SLOTS, CAPACITY = 4, 512  # as in `test_engine`
RECORDING = Recording(top=2, state=True)
FULL = load_sampler(LITERAL).with_values({**EVERYTHING, "loop.max_period": 0})
SAMPLERS = {"full": FULL, "min-p": load_sampler("min-p"), "mirostat": load_sampler("mirostat")}
PROMPTS = ("Once upon a time", "Mia has 12 apples", "On Sunday", "The capital of")


def request_of(
    model: LanguageModel, row_id: str, sampler: str = "full", budget: int = 40, **options: Any
) -> Request:
    prompt = model.tokenizer.encode(PROMPTS[len(row_id) % len(PROMPTS)], add_bos=True)
    options = {"ignore_eos": True, "others": SHARED, **options}
    return requests(model, [Spec(prompt, row_id, budget)], SAMPLERS[sampler], **options)[0]


def drive(
    model: LanguageModel,
    wanted: Iterable[Request | Row],
    look: Callable[[Engine, Event], None] = lambda engine, event: None,
) -> list[Row]:
    """Runs rows and calls `look` after each event. Returns them in order of first events."""
    engine = Engine(model, slots=SLOTS, capacity=CAPACITY, recording=RECORDING)
    rows: list[Row] = []
    for event in engine.run(as_requests(engine, wanted)):
        if not any(row is event.row for row in rows):
            rows.append(event.row)
        look(engine, event)
    assert all(row.finish_reason is not None for row in rows)
    return rows


def fresh_rows(
    model: LanguageModel, rows: Sequence[tuple[Request, Sequence[TokenRecord], int]]
) -> Any:
    """Runs rows that continue from given tokens, after a number of rewinds, without any moves. A
    row that branches comes first, so that all runs have lanes and thus share programs."""
    taken = [
        Row(replace(request, prefix=[(token, False) for token in tokens]), rewinds=rewinds)
        for request, tokens, rewinds in rows
    ]
    drive(model, [Row(request_of(model, "first")), *taken])
    return taken


def check_same(row: Row, other: Row, *, forwards: bool = True) -> None:
    told = [[(t.token_id, t.action, t.position) for t in one.tokens] for one in (row, other)]
    assert told[0] == told[1]
    for name in ("logprob", "entropy"):
        here, there = ([getattr(t, name) for t in one.tokens] for one in (row, other))
        np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-4)
    assert (row.text, row.finish_reason) == (other.text, other.finish_reason)
    if forwards:
        assert [t.forwards for t in row.tokens] == [t.forwards for t in other.tokens]


def check_bookkeeping(model: LanguageModel, row: Row) -> None:
    """Checks the log, positions and text of a row against its tokens."""
    first = len(row.request.prompt)
    assert [t.position for t in row.tokens] == [*range(first, first + len(row.tokens))]
    assert [id(t) for t, gone in row.log if not gone] == [*map(id, row.tokens)]
    assert {id(t) for t, gone in row.log if gone} == {*map(id, row.retracted_tokens)}
    assert {t.row for t, _ in row.log} <= {row.number}
    assert row.text == model.tokenizer.stream(after=row.request.prompt).run(ids_of(row))
    assert "".join(token.text for token in row.tokens) == row.text


@pytest.fixture(autouse=True)
def _pace(monkeypatch: pytest.MonkeyPatch) -> None:
    set_pace(monkeypatch, 4)


@pytest.fixture(scope="module")
def whole(tiny: LanguageModel) -> list[Row]:
    """Rows without moves."""
    with pytest.MonkeyPatch.context() as patch:
        set_pace(patch, 4)
        names = ("full", "full", "min-p", "mirostat", "full")
        wanted = [request_of(tiny, "x" * i, name) for i, name in enumerate(names)]
        rows = [Row(request, number=i) for i, request in enumerate(wanted)]
        drive(tiny, rows)
        return rows


def counts_between_actions(row: Row) -> list[int]:
    """Returns the token counts at which a row was between two actions."""
    return [
        n
        for n, (last, token) in enumerate(zip(row.tokens, row.tokens[1:], strict=False), 1)
        if last.state is not None
        and last.state.queued == 0
        and (token.action != "branch" or token.branches is not None)
    ]


def test_a_row_continues_from_any_of_its_tokens(tiny: LanguageModel, whole: list[Row]) -> None:
    """The random numbers are the same, too. The recorded state is all that the sampler needs."""
    actions = {token.action for row in whole for token in row.tokens}
    assert {"argmax", "inject", "branch", "backspace", "sample"} <= actions
    joined = [t for row in whole for t in row.tokens if t.action == "branch" and t.branches is None]
    assert len(joined) > 3
    assert sum(row.retracted for row in whole) > 10
    chosen = [(row, n) for row in whole for n in counts_between_actions(row)]
    chosen = chosen[::2]
    assert len(chosen) > 50
    taken = fresh_rows(tiny, [(row.request, row.tokens[:n], 0) for row, n in chosen])
    for (row, _), again in zip(chosen, taken, strict=True):
        check_same(again, row)
        check_bookkeeping(tiny, again)


def test_a_continued_row_does_not_depend_on_others(tiny: LanguageModel) -> None:
    """A row that continues from tokens of another run has the same last digits after the row with
    these tokens, whose slot it takes, as alone: it uses no tokens that other rows generated."""
    request = request_of(tiny, "x", "min-p")
    engine = Engine(tiny, slots=1, capacity=CAPACITY, recording=RECORDING)
    (first,) = run_rows(engine, [request])
    prefix = [(token, False) for token in first.tokens[:30]]
    rows = []
    for others in [], [request], [replace(request, prefix=prefix[:20])]:
        continued = replace(request, prefix=prefix, row_id="continued")
        rows.append(run_rows(engine, [*others, continued])[-1])
    for other in rows[1:]:
        assert [(t.token_id, t.logprob) for t in other.tokens] == [
            (t.token_id, t.logprob) for t in rows[0].tokens
        ]


def test_recording_states_does_not_change_results(tiny: LanguageModel, whole: list[Row]) -> None:
    engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY, recording=Recording(top=2))
    rows = run_rows(engine, [row.request for row in whole])
    for row, other in zip(rows, whole, strict=True):
        assert row.tokens == other.tokens
        assert all(token.state is None for token in row.tokens)
        assert [t.to_json() for t in row.tokens] == [t.to_json() for t in other.tokens]


def test_forks_come_before_requests(tiny: LanguageModel) -> None:
    """Rows are numbered in the order in which they arrive, so forks precede later requests."""
    ended: list[str] = []

    def look(engine: Engine, event: Event) -> None:
        if event.row.finish_reason is not None:
            ended.append(event.row.request.row_id)
            if len(ended) == 1:
                engine.fork(event.row, 3, position=event.row.tokens[-3].position)

    wanted = [request_of(tiny, str(i), budget=8 + 4 * i) for i in range(8)]
    rows = drive(tiny, iter(wanted), look)
    numbers = {row.request.row_id: row.number for row in rows}
    assert numbers == {
        **{str(i): i for i in range(5)},
        **{f"0.{k}": 4 + k for k in (1, 2, 3)},
        **{str(i): 3 + i for i in (5, 6, 7)},
    }
    assert {*ended[:5]} >= {"0", "0.1", "0.2", "0.3"}


def test_a_fork_may_have_another_budget(tiny: LanguageModel) -> None:
    """A row with a spent budget continues as a fork with a larger one."""
    row, forks = Row(request_of(tiny, "x", "min-p", budget=6)), []

    def look(engine: Engine, event: Event) -> None:
        if event.row is row and row.finish_reason is not None:
            with pytest.raises(UserError, match="no budget left"):
                engine.fork(row, 1)
            forks.extend(engine.fork(row, 1, max_new_tokens=15))
            with pytest.raises(UserError, match="no budget left"):
                engine.fork(row, 1, position=row.tokens[4].position, max_new_tokens=4)

    drive(tiny, [request_of(tiny, "first", budget=1), row], look)
    (fork,) = forks
    assert (len(row.tokens), len(fork.tokens), fork.finish_reason) == (6, 15, "length")
    (other,) = fresh_rows(tiny, [(fork.request, row.tokens, 0)])
    check_same(fork, other)


def test_moved_rows_hold_back_text_again(tiny: LanguageModel) -> None:
    """Forks and rewound rows hold back the start of a stop string. No row continues after one."""
    plain = fresh_rows(tiny, [(request_of(tiny, "x", "min-p"), [], 0)])[0]
    end = "".join(token.text for token in plain.tokens[:20])
    start = len(end) - len(plain.tokens[19].text) - 2
    stop = end[start:]
    assert plain.text.find(stop) == start
    row = Row(request_of(tiny, "x", "min-p", stop=stop))
    forks: list[Row] = []

    def look(engine: Engine, event: Event) -> None:
        if event.row is row and len(row.tokens) == 19 and not forks:
            forks.extend(engine.fork(row, 2))
            assert [fork.text for fork in forks] == [row.text] * 2 == [end[:start]] * 2
        if event.row is row and row.finish_reason is not None and not row.rewinds:
            assert row.text == end[:start]
            with pytest.raises(UserError, match="ends with a stop string: it can only"):
                engine.fork(row, 1)
            with pytest.raises(UserError, match="ends with a stop string: it can only"):
                engine.rewind(row, row.tokens[-1].position + 1)
            engine.rewind(row, row.tokens[19].position)
            assert row.text == end[:start]

    drive(tiny, [request_of(tiny, "y"), row], look)
    for one in (row, *forks):
        text = tiny.tokenizer.stream(after=row.request.prompt).run(ids_of(one))
        assert one.text == text.partition(stop)[0]


def test_cached_tokens_are_not_prefilled_again(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks and rewound rows use the cache of any slot. Tokens in no cache are prefilled."""
    calls = runs.prefills(monkeypatch)

    def look(engine: Engine, event: Event) -> None:
        row = event.row
        if row.number == 0 and len(row.tokens) == 12 and not row.forks:
            engine.fork(row, 6, position=row.tokens[8].position)
        if row.number == 0 and row.finish_reason is not None and not row.rewinds:
            engine.rewind(row, row.tokens[10].position)

    row = Row(request_of(tiny, "x", budget=30))
    drive(tiny, [row], look)
    assert len(calls) == 1
    fresh_rows(tiny, [(row.request, row.tokens[:9], 0)])
    assert len(calls) == 3


def test_the_example_forks_at_high_entropy(tiny: LanguageModel) -> None:
    sample_eagerly = runpy.run_path(str(EXAMPLE))["sample_eagerly"]
    engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY, recording=RECORDING)
    rows = sample_eagerly(engine, request_of(tiny, "first", "min-p"), 1.5, 7)
    assert [row.number for row in rows] == [*range(7)]
    by_id = {row.request.row_id: row for row in rows}
    for row in rows[1:]:
        parent = by_id[row.request.row_id.rpartition(".")[0]]
        at = next(
            i for i, (a, b) in enumerate(zip(ids_of(row), ids_of(parent), strict=False)) if a != b
        )
        forced, token = row.tokens[at], parent.tokens[at]
        assert forced.action == "inject"
        assert token.entropy > 1.5
        assert token.entropy == pytest.approx(forced.entropy, abs=1e-4)
        assert token.top is not None
        assert forced.token_id == next(i for i, _, _ in token.top if i != token.token_id)
    assert len(EXAMPLE.read_text().splitlines()) <= 60


def test_invalid_moves_are_rejected(tiny: LanguageModel) -> None:
    row, other = Row(request_of(tiny, "x", budget=12)), Row(request_of(tiny, "y"))
    engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY, recording=Recording(top=2))
    for call in (
        lambda: engine.fork(row, 1),
        lambda: engine.rewind(row, 9),
        lambda: engine.force(row, [5]),
    ):
        with pytest.raises(UserError, match="row 'x' is not one of a run in progress"):
            call()
    first = len(row.request.prompt)

    def refused(said: str, move: Callable[..., Any], *args: Any, **options: Any) -> None:
        before = [*row.tokens], row.text, [*row.log], row.finish_reason
        with pytest.raises(UserError, match=said) as error:
            move(*args, **options)
        assert "\n" not in str(error.value)
        assert before == ([*row.tokens], row.text, [*row.log], row.finish_reason)

    def look(engine: Engine, event: Event) -> None:
        if len(row.tokens) == 5:
            where = f"can continue from a position of {first} to {first + 5}, not"
            refused(f"{where} {first + 6}", engine.rewind, row, first + 6)
            refused(f"{where} {first - 1}", engine.fork, row, 1, position=first - 1)
            refused("'y' is not one of a run in progress", engine.rewind, other, first)
            refused("8 forced tokens exceed the budget of 7", engine.force, row, [5] * 8)
            refused("forced token 99999 is not a token id", engine.force, row, [5, 99999])
            refused("no mechanism is named 'injekt', did", engine.force, row, [5], action="injekt")
        if row.finish_reason is not None:
            refused(f"no budget left at position {first + 12}", engine.fork, row, 1)
            refused(f"no budget left at position {first + 12}", engine.rewind, row, first + 12)
            refused("has ended: rewind it", engine.force, row, [5])

    drive(tiny, [row], look)
    with pytest.raises(UserError, match="forced token 99999 is not a token id"):
        drive(tiny, [request_of(tiny, "z", forced=[5, 99999])])
    refused("is not one of a run in progress", engine.rewind, row, first)
    for event in engine.run([row.request]):  # without states
        if event.row.tokens:
            refused(r"use Recording\(state=True\)", engine.fork, event.row, 1)
            break
    with pytest.raises(UserError, match="no budget left"):
        drive(tiny, [replace(row.request, prefix=row.log)])
    (longer,) = drive(tiny, [replace(row.request, max_new_tokens=20, prefix=row.log)])
    assert ids_of(longer)[:12] == ids_of(row)
    assert len(longer.tokens) == 20


def test_a_run_can_stop_while_forks_wait(tiny: LanguageModel) -> None:
    engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY, recording=RECORDING)
    row = Row(request_of(tiny, "x"))
    forks: list[Row] = []
    wanted = as_requests(engine, [row, *(request_of(tiny, str(i)) for i in range(6))])
    for event in engine.run(wanted):
        if event.row is row and len(row.tokens) == 9:
            forks = engine.fork(row, 5)
            engine.stop()
    told = [event.row for event in engine.interrupt() if event.token is None]
    for one in (row, *forks):
        assert sum(one is other for other in told) == 1
        assert one.finish_reason == "interrupt"
        assert ids_of(one)[:9] == ids_of(row)[:9]
        check_bookkeeping(tiny, one)


def test_rows_move_between_devices(tiny: LanguageModel) -> None:
    """Forks of a row in the first shard run in the second one, too."""
    mesh = mesh_of_two("data=2")
    params = jax.device_put(tiny.params, param_shardings(mesh, tiny.config))
    model = replace(tiny, params=params, mesh=mesh)
    forks: list[Row] = []

    def look(engine: Engine, event: Event) -> None:
        row = event.row
        if row.number == 0 and len(row.tokens) == 12 and not forks:
            forks.extend(engine.fork(row, 5, position=row.tokens[8].position))
        if row.number == 0 and row.finish_reason is not None and not row.rewinds:
            engine.rewind(row, row.tokens[10].position)

    request = request_of(tiny, "x", "min-p", budget=24, others=frozenset())
    rows = drive(model, [request], look)
    again = fresh_rows(tiny, [(fork.request, fork.tokens[:8], 0) for fork in forks])
    for fork, other in zip(forks, again, strict=True):
        check_same(fork, other)
    (fresh,) = fresh_rows(tiny, [(rows[0].request, rows[0].tokens[:10], 1)])
    check_same(rows[0], fresh, forwards=False)


def test_devices_exchange_one_row_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices exchange only the shared row, not all caches. Each creates its own part."""
    config, layout, capacity = tiny_config(), Layout(SLOTS, 2, 2), 8
    where: Any = {"mechanisms": MECHANISMS, "capacity": capacity, "dtype": jnp.dtype("float32")}
    placed = Mock(wraps=jax.device_put)
    monkeypatch.setattr("entropix_jax.engine.slots.jax.device_put", placed)
    state = empty_slots(config, layout, params_of("top-p"), mesh=mesh_of_two("data=2"), **where)
    assert all(len(keys.sharding.device_set) == 2 for keys in placed.call_args[0][0].cache.keys)
    jitted: Any = share_prefix
    text = jitted.lower(state, *map(jnp.int32, (0, 3, 5))).compile().as_text()
    row = 2 * config.num_layers * config.num_kv_heads * capacity * config.head_dim
    # Plus the few other values of the row's state.
    assert 0 < sum(collective.elements for collective in collectives_of(text)) < row + 8


# Lanes


def forking(model: LanguageModel, row_id: str, width: int = 3) -> Request:
    """Returns a request of a row that branches in every step. A fork of the default width, which is
    that of `full`, takes all lanes."""
    values: dict[str, Any] = {f"regimes.{box}": ["entropy < -1"] for box in BOXES}
    values |= {"arms.mid": "branch", "branch.width": width, "branch.depth": 3}
    values |= {"branch.min_p": 0.0, "branch.top_p": 1.0, "branch.max_share": 1e6}
    values |= {"loop.max_period": 0}
    sampler = calibrated(model, load_sampler(LITERAL).with_values(values))
    sampler = replace(sampler, others=SHARED)
    return replace(request_of(model, row_id, budget=12), sampler=sampler)


def check_against_fresh_row(model: LanguageModel, row: Row, width: int = 3) -> None:
    engine = Engine(model, slots=SLOTS, capacity=CAPACITY, recording=RECORDING)
    (other,) = run_rows(engine, [row.request])
    check_same(row, other)
    assert {len(token.branches) for token in row.tokens if token.branches} == {width}


def test_a_later_row_can_need_more_lanes(tiny: LanguageModel) -> None:
    """The later row waits until there are enough lanes. Both rows equal fresh rows."""
    narrow, wide = Row(forking(tiny, "x", width=2)), Row(forking(tiny, "y"), number=1)

    def source() -> Any:
        yield narrow
        while len(narrow.tokens) < 2:
            yield None
        yield wide

    engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY, recording=RECORDING)
    list(engine.run(as_requests(engine, source())))
    check_against_fresh_row(tiny, narrow, width=2)
    check_against_fresh_row(tiny, wide)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_row_that_is_ended_frees_its_lanes(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    """Ends it while it waits for lanes, and amid its branches. The second row, which waits for the
    same lanes, and the last one, which replaces the first, equal fresh rows."""
    set_pace(monkeypatch, 1)
    rows = [Row(forking(tiny, str(i)), number=i) for i in range(SLOTS + 1)]
    engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY, recording=RECORDING)
    asked = 0

    def between() -> None:
        nonlocal asked
        asked += 1
        if asked == 1 + chunks:
            engine.end(rows[0])

    list(engine.run(as_requests(engine, rows), between))
    assert rows[0].finish_reason == "cancelled"
    assert len(rows[0].tokens) <= 3
    check_against_fresh_row(tiny, rows[1])
    check_against_fresh_row(tiny, rows[-1])


def test_a_row_rewound_after_its_end_reads_what_it_kept(tiny: LanguageModel) -> None:
    """Its end commits tokens that the device may have replaced since. They are read again."""
    rows = [Row(request_of(tiny, "x" * i, seed=5), number=i) for i in range(SLOTS)]
    engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY, recording=RECORDING)
    kept, turns = [], itertools.count()

    def between() -> None:
        if next(turns) == 4:
            for row in (row for row in rows if engine.end(row) and row.tokens):
                engine.rewind(row, len(row.request.prompt) + len(row.tokens))
                kept.append((row, [*row.tokens]))

    list(engine.run(as_requests(engine, rows), between))
    again = fresh_rows(tiny, [(row.request, tokens, 1) for row, tokens in kept])
    assert [is_same(row, other) for (row, _), other in zip(kept, again, strict=True)] == [True] * 4


def test_tokens_that_a_person_chose_are_marked(tiny: LanguageModel) -> None:
    """A rewind before them continues with the sampler's own tokens."""
    row = Row(request_of(tiny, "x", budget=6, forced=[5, 6], chosen=True, action="sample"))

    def look(engine: Engine, event: Event) -> None:
        if len(row.tokens) == 4 and not row.rewinds:
            engine.rewind(row, len(row.request.prompt))

    drive(tiny, [row], look)
    assert [token.chosen for token, gone in row.log if gone][:4] == [True, True, None, None]
    assert {token.chosen for token in row.tokens} == {None}


def test_a_fork_takes_no_number_of_a_later_sample(tiny: LanguageModel) -> None:
    engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY, recording=RECORDING)
    wanted = [request_of(tiny, "x" * i, budget=3) for i in range(SLOTS + 3)]  # two arrive later
    run = Generation(tiny, wanted, engine=engine)
    forks: list[Row] = []
    for event in run:
        forks = forks or engine.fork(event.row, 2)
    assert [row.number for row in (*run.rows, *forks)] == [*range(SLOTS + 5)]


# Random schedules


@dataclass
class Plain:
    """A plain model of a row: its ids, the forced ids that come next, and a retraction count."""

    tokens: list[int]
    forced: list[int] = field(default_factory=list)
    retracted: int = 0


class Schedule:
    """Random moves of rows, which depend only on the row and its text."""

    def __init__(self, model: LanguageModel, seed: int) -> None:
        self.model, self.moves = model, 0
        rng = np.random.default_rng([1, seed])
        names = rng.choice([*SAMPLERS], 3).tolist()
        self.wanted = [
            request_of(model, f"{seed}" + "x" * i, name, int(rng.integers(4, 25)), seed=seed)
            for i, name in enumerate(names)
        ]
        self.known: dict[str, Plain] = {}
        self.kept: dict[str, int] = {}  # tokens of each row after its last move

    def look(self, engine: Engine, event: Event) -> None:
        row, token, seed = event.row, event.token, event.row.request.seed
        name = row.request.row_id
        plain = self.known.setdefault(name, Plain([]))
        if token is not None and not event.retracted:
            if plain.forced:
                assert token.token_id == plain.forced.pop(0)
            plain.tokens.append(token.token_id)
        plain.retracted += event.retracted
        assert plain.tokens == ids_of(row)
        assert plain.retracted == row.retracted
        letters = np.frombuffer(name.encode(), np.uint8).tolist()
        rng = np.random.default_rng([seed, len(row.tokens), row.rewinds, row.retracted, *letters])
        if rng.random() > 0.12 or name.count(".") > 2 or row.rewinds + row.forks > 2:
            return
        kept = int(rng.integers(0, len(row.tokens) + (row.finish_reason is None)))
        position = len(row.request.prompt) + kept
        ahead = rng.integers(0, self.model.config.vocab_size, rng.integers(0, 4)).tolist()
        if (kind := rng.integers(3)) == 0:
            (one,) = engine.fork(row, 1, position=position)
            self.known[one.request.row_id] = plain = Plain(plain.tokens[:kept])
        elif kind == 1:
            engine.rewind(row, position)
            plain.retracted += len(plain.tokens) - kept
            plain.forced, one = [], row
            del plain.tokens[kept:]
        elif row.finish_reason is not None or not ahead:
            return
        else:
            one = row
        self.moves += 1
        ahead = ahead[: one.request.max_new_tokens - len(plain.tokens)]
        if ahead:
            engine.force(one, ahead, action=str(rng.choice(["inject", "sample"])))
            plain.forced = [*ahead]
        self.kept[one.request.row_id] = len(plain.tokens) + len(ahead)


def run_schedules(model: LanguageModel, schedules: Sequence[Schedule]) -> list[list[Row]]:
    """Runs several schedules in one engine. Returns each request's row with its forks."""
    first = request_of(model, "first", budget=1)
    by_name = {one.row_id: schedule for schedule in schedules for one in schedule.wanted}

    def look(engine: Engine, event: Event) -> None:
        if (name := event.row.request.row_id) != "first":
            by_name[name.partition(".")[0]].look(engine, event)

    wanted = [request for schedule in schedules for request in schedule.wanted]
    rows = [row for row in drive(model, [first, *wanted], look) if row.request.row_id != "first"]
    families: dict[str, list[Row]] = {name: [] for name in by_name}
    started: list[tuple[Row, int]] = []
    for row in rows:
        check_bookkeeping(model, row)
        name = row.request.row_id
        root, _, _ = name.partition(".")
        families[root].append(row)
        assert by_name[root].known[name].tokens == ids_of(row)
        kept = by_name[root].kept.get(name, 0)
        if kept < row.budget:
            started.append((row, kept))
    again = fresh_rows(model, [(row.request, row.tokens[:n], row.rewinds) for row, n in started])
    # Hardly any row depends on rounding.
    assert sum(not is_same(row, other) for (row, _), other in zip(started, again, strict=True)) < 2
    return [*families.values()]


def test_random_schedules(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rows of 40 schedules agree with plain bookkeeping, and from their last moves on with
    fresh rows. A fifth of them is replayed, too."""
    families: list[list[Row]] = []
    schedules = [Schedule(tiny, seed) for seed in range(40)]
    for i, pace in enumerate((1, 3, 8, 32)):
        set_pace(monkeypatch, pace)
        families += run_schedules(tiny, schedules[i::4])
    assert sum(schedule.moves for schedule in schedules) > 120
    reader, path, altered = CachedReader(tiny, CAPACITY), tmp_path / "run.jsonl", Counter[bool]()
    for rows in families[::5]:
        request = rows[0].request
        about = header(tiny, request.sampler, request.prompt, seed=request.seed)
        Rows(rows, about).save_trace(path)
        trace = read_trace(path)
        found = replay(trace, reader)
        assert str(found.doubt or "") == ""
        assert found.rounded <= 2
        for move in (moves := trace.footer["rows"][0]["request"]["moves"]):
            move["rewinds"] += 1
        altered[bool(moves) and replay(trace, reader).doubt is not None] += bool(moves)
    # Rows with other random numbers differ, unless they end before the next draw.
    assert altered[True] > 2 * altered[False]


# Rows that the caller ends, and requests that come later.


def test_ending_a_row_frees_its_slot(tiny: LanguageModel, whole: list[Row]) -> None:
    """The row keeps its final tokens, and the other rows do not change."""
    ends = {0: 5, 1: 17, 4: 26}  # the tokens of a row when it is ended
    wanted = [Row(row.request, number=row.number) for row in whole]
    last = Row(request_of(tiny, "last", "min-p", budget=6), number=len(whole))  # waits for a slot
    told: dict[int, list[Event]] = {}

    def look(engine: Engine, event: Event) -> None:
        row = event.row
        if not told and last.started is None and row.number == 0 and len(row.tokens) == 4:
            assert engine.end(wanted[4]) == [Event(wanted[4], None, ())]  # it waits for a slot
            told[4] = []
        if len(row.tokens) == ends.get(row.number) and row.number not in told:
            told[row.number] = events = engine.end(row)
            assert events[-1].token is None or events[-1].pieces
            assert engine.end(row) == []

    drive(tiny, [*wanted, last], look)
    assert sorted(told) == [0, 1, 4]
    assert (len(last.tokens), last.finish_reason) == (6, "length")
    assert wanted[4].tokens == []
    for row, other in zip(wanted, whole, strict=True):
        if row.number not in told:
            check_same(row, other)
            continue
        assert row.finish_reason == "cancelled"
        assert ids_of(row) == ids_of(other)[: len(row.tokens)]
        if row.number != 4:
            assert 0 <= len(row.tokens) - ends[row.number] < 8
            check_bookkeeping(tiny, row)
    with pytest.raises(UserError, match="row 'last' is not one of a run in progress"):
        Engine(tiny, slots=1, capacity=CAPACITY).end(last)


def test_a_source_may_yield_none(tiny: LanguageModel) -> None:
    """The engine asks the source again before each chunk of steps."""
    told: list[int] = []
    events: list[Event] = []
    engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY, recording=RECORDING)

    def source() -> Any:
        yield request_of(tiny, "x", "min-p", budget=12)
        while len(events) < 6:
            yield None
        yield request_of(tiny, "xx", "min-p", budget=6)

    for event in engine.run(source(), lambda: told.append(len(events))):
        events.append(event)
    rows = {event.row.request.row_id: len(event.row.tokens) for event in events}
    assert (rows, len(events)) == ({"x": 12, "xx": 6}, 18)
    # Chunks have four steps after the first two, and the hook is not called within one.
    assert told == sorted(told)
    assert {0, 2, 6, 10} <= {*told}
    assert not {3, 4, 5, 7, 8, 9} & {*told}
    assert list(engine.run(iter([None, request_of(tiny, "x")]))) == []
