"""What the project wants to reach, held against what was measured."""

from functools import partial
from typing import Any

from rich.table import Table

Row = dict[str, Any]


def goals_of_model(rows: list[Row]) -> list[Row]:
    """The goals for greedy decoding of one row of a real model, see `goals_at_1b`."""
    goals: list[Row] = []
    for weights, peer, wanted in (
        ("bfloat16", "transformers", 3.0),
        ("float32", "transformers", 3.0),
        ("int8", "llama.cpp", 0.8),
    ):
        what = {"weights": weights, "batch": 1}
        ours = _find(rows, "decode", "greedy", **what)
        other = _find(rows, "decode", peer, **what)
        found = ours and other and other["times_as_long"] / ours["times_as_long"]
        name = other and other["engine"]
        _add(goals, f"greedy, {weights}, batch 1: times as fast as {name}", wanted, found)
    return goals


def _find(rows: list[Row], kind: str, engine: str, **what: Any) -> Any:
    """The row of an engine, whose name may go on after a comma, or None."""
    for row in rows:
        same = all(row.get(key) == value for key, value in what.items())
        if row["kind"] == kind and same and engine in (row["engine"], row["engine"].split(",")[0]):
            return row
    return None


def _add(
    goals: list[Row], what: str, wanted: float, found: float | None, *, at_most: bool = False
) -> None:
    """One goal more, where there is a figure for it."""
    if found is None:
        return
    met = found <= wanted if at_most else found >= wanted
    sign = "at most" if at_most else "at least"
    goals.append({"goal": what, "wanted": f"{sign} {wanted:g}", "found": found, "met": met})


def goals_at_1b(machine: Row, rows: list[Row]) -> list[Row]:
    """Each goal at Llama-3.2-1B's shape that the run has figures for: what, the wanted bound, the
    figure, whether it is met."""
    cpu = machine["platform"] == "cpu"
    goals: list[Row] = []
    find, add = partial(_find, rows), partial(_add, goals)

    def speed(peer: str, kind: str, **what: Any) -> float | None:
        row = find(kind, peer, **what)
        return None if row is None else row["times_as_long"]

    def overhead(batch: int) -> float | None:
        weights = "float32" if cpu and batch > 1 else "bfloat16"
        row = find("decode", "greedy", weights=weights, batch=batch)
        return None if row is None else 1 / row["times_as_long"]

    bf16 = {"weights": "bfloat16", "batch": 1}
    f32 = {"weights": "float32", "batch": 1}
    if cpu:
        found = speed("transformers", "decode", **bf16)
        add("decode, bfloat16, batch 1: times as fast as transformers", 1.4, found)
        found = speed("llama.cpp", "decode", **bf16)
        add("decode, bfloat16, batch 1: times as fast as llama.cpp", 0.6, found)
        found = speed("transformers", "decode", **f32)
        add("decode, float32, batch 1: times as fast as transformers", 1.8, found)
        alone = find("decode", "products alone", weights="float32", batch=16)
        found = alone and alone["times_as_long"]
        add("decode, float32, batch 16: of the rate of the products alone", 0.7, found)
        found = speed("transformers", "prefill", weights="float32", context=512)
        add("prefill of 512, float32: times as fast as transformers", 1.5, found)
        add("full sampler over greedy, batch 1", 1.03, overhead(1), at_most=True)
        add("full sampler over greedy, batch 64", 1.10, overhead(64), at_most=True)
        for name, bound in (("cold", 20.0), ("from the cache", 2.0)):
            row = find("compile", name)
            found = row and row["seconds"]
            add(f"compile of step and prefill, {name}: seconds", bound, found, at_most=True)
    else:
        row = find("context", "entropix", **bf16, context=1024)
        # What is read at the rate at which the machine copies, reads and writes counted.
        share = row and row["floor"] * machine["read_bandwidth"] / machine["copy_bandwidth"]
        found = share and row and share / row["seconds"]
        add("decode, batch 1, context 1024: of the copy bandwidth", 0.75, found)
        found = speed("gpt-fast", "context", **bf16, context=1024)
        add("decode, batch 1, context 1024: times as fast as gpt-fast", 1.0, found)
        found = speed("transformers", "context", **bf16, context=1024)
        add("decode, batch 1, context 1024: times as fast as transformers", 5.0, found)
        row = find("decode", "entropix", weights="bfloat16", batch=64)
        add("decode, batch 64: of the floor", 0.6, row and row["share_of_floor"])
        add("full sampler over greedy, batch 1", 1.10, overhead(1), at_most=True)
    row = find("capacity", "16384 slots")
    found = row and row["times_as_long"]
    add("a step in 16,384 slots over one in 256, both with 128 used", 1.05, found, at_most=True)
    read = find("load", "read")
    found = read and 1 / read["times_as_long"]
    add("loading over reading the file", 1.5, found, at_most=True)
    return goals


def goals_table(goals: list[Row]) -> Table:
    """The goals for reading."""
    table = Table("goal", "wanted", "measured", "met")
    for goal in goals:
        met = "yes" if goal["met"] else "[bold]no[/bold]"
        table.add_row(goal["goal"], goal["wanted"], f"{goal['found']:.2f}", met)
    return table
