"""Traced programs in the cache folder: read in place of tracing, and never a stale one."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from entropix_jax.engine import traced
from entropix_jax.engine.state import ForkEnd
from entropix_jax.engine.traced import find_traced
from entropix_jax.host import compile_cache
from entropix_jax.packed import Packed, pack
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.settings import Parts

TRACES: list[str] = []


def results(a: Any, state: Any, by: int) -> Any:
    TRACES.append("")
    end = ForkEnd(a > by, a * by, a, None, a)  # type: ignore[arg-type]
    return jax.tree.map(lambda x: x * 2, state), (pack(end, 1), {"sum": [jnp.sum(a)]})


@partial(jax.jit, static_argnames=("by", "parts"), donate_argnames="state")
def function(a: Any, state: Any, *, by: int, parts: Parts | None = None) -> Any:
    return results(a, state, by)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each test has a folder of its own, and a process that has traced nothing."""
    monkeypatch.setattr(compile_cache, "traced_folder", lambda: tmp_path)
    start_again()
    yield tmp_path
    start_again()


def start_again() -> None:
    """Forgets what the process has traced and read."""
    jax.clear_caches()
    traced._PROGRAMS.clear()
    traced._environment.cache_clear()
    TRACES.clear()


def run(by: int = 2, size: int = 3, **static: Any) -> tuple[Any, Any]:
    """Returns the results of the program and of the function itself."""
    given = jnp.arange(size), {"one": jnp.ones(size), "two": jnp.arange(2)}
    wanted = jax.jit(partial(results, by=by))(*given)
    TRACES.clear()
    program = find_traced(function, given, {"by": by, **static})
    return program(*given), wanted


def test_a_second_start_does_not_trace(folder: Path) -> None:
    for traces in (1, 0):
        found, wanted = run()
        assert len(TRACES) == traces
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        packed: Packed[ForkEnd] = found[1][0]
        assert packed.unpack().scores is None
        assert len([*folder.iterdir()]) == 1
        start_again()


def test_arguments_are_donated() -> None:
    """Also those of a program that was read."""
    for _ in range(2):
        given = jnp.arange(3), {"one": jnp.ones(3)}
        find_traced(function, given, {"by": 1})(*given)
        assert given[1]["one"].is_deleted()
        assert not given[0].is_deleted()
        start_again()


CHANGES = "by size environment source version processor mechanisms".split()


@pytest.mark.parametrize("change", CHANGES)
def test_another_program_has_another_file(
    change: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"parts": Parts(MECHANISMS, frozenset({"argmax"}))}
    run(**options)
    start_again()
    read = Path.read_bytes
    match change:
        case "by" | "size":
            options[change] = 7
        case "environment":
            monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=")
        case "source":
            changed = {"draw.py": b"#"}
            monkeypatch.setattr(Path, "read_bytes", lambda p: read(p) + changed.get(p.name, b""))
        case "version":
            monkeypatch.setattr(jax, "__version__", "0.0.1")
        case "processor":
            monkeypatch.setattr("platform.machine", lambda: "another")
        case _:
            options["parts"] = Parts(MECHANISMS, frozenset({"argmax", "branch"}))
    run(**options)
    assert TRACES
    assert len([*folder.iterdir()]) == 2


@pytest.mark.parametrize("damage", ["empty", "short", "bit"])
def test_a_damaged_file_is_traced_again(
    damage: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says so, and the file is whole afterwards."""
    run()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    other = bytes([whole[-1] ^ 1])
    damaged = {"empty": b"", "short": whole[: len(whole) // 2], "bit": whole[:-1] + other}
    path.write_bytes(damaged[damage])
    start_again()
    found, wanted = run()
    assert TRACES
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert capsys.readouterr().err.count("\n") == 1
    assert len(path.read_bytes()) == len(whole)


def test_a_folder_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder / "file"
    place.write_text("")
    monkeypatch.setattr(compile_cache, "traced_folder", lambda: place)
    found, wanted = run()
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_own_mechanisms_are_traced_in_each_run(folder: Path) -> None:
    """No hash covers a user's function, nor one of the package that was changed."""
    for own in (Mechanism("own"), replace(MECHANISMS[0])):
        found, wanted = run(parts=Parts((*MECHANISMS, own)))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert not [*folder.iterdir()]


@struct.dataclass
class Own:
    """A part with a static field."""

    x: jax.Array
    name: str = struct.field(pytree_node=False)


@pytest.mark.parametrize("name", ["same", "other"])
def test_static_fields_of_results(name: str, folder: Path) -> None:
    """A part with static fields is kept if an argument has it. Else each run traces the program."""
    given = {"part": Own(jnp.zeros(3), "same")}
    found = find_traced(jax.jit(lambda one: [Own(one["part"].x, name)]), (given,), {})(given)
    assert found[0].name == name
    assert len([*folder.iterdir()]) == (name == "same")
