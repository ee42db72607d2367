"""Known defects of the published implementations: docs/fidelity.md names a test of each."""

from __future__ import annotations

import ast
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from entropix_jax.engine.decode import decode
from entropix_jax.engine.state import Program, Recording
from entropix_jax.model.config import ModelConfig
from tests.support.models import TINY
from tests.support.samplers import LITERAL, PARTS, Job, params_of, start, tiny_model

ROOT = Path(__file__).parents[1]
TREES = {
    path.relative_to(ROOT / "entropix_jax").as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in (ROOT / "entropix_jax").rglob("*.py")
}
ROW = re.compile(r"^\| (\d+) \|.*\| `([\w/]+\.py)`: `(\w+)` \|$", re.MULTILINE)


def test_each_defect_has_a_test() -> None:
    rows = ROW.findall((ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8"))
    assert [int(number) for number, _, _ in rows] == [*range(1, 18)]
    for _, file, name in rows:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


def test_no_numeric_defaults_of_arguments() -> None:
    """The factor of RoPE and the epsilon of the norm come from the configuration."""
    modules = [f"model/{name}" for name in ("linear", "rope", "cache", "attention", "llama")]
    for module in (*modules, "sampler/metrics"):
        for node in ast.walk(TREES[f"{module}.py"]):
            if isinstance(node, ast.FunctionDef | ast.Lambda):
                defaults = [*node.args.defaults, *node.args.kw_defaults]
                values = [one.value for one in defaults if isinstance(one, ast.Constant)]
                assert not [value for value in values if type(value) in (int, float)]


def test_every_field_of_a_dataclass_is_annotated() -> None:
    """A field without an annotation is a class attribute: the constructor cannot set it."""
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef) and any(
            "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
        ):
            assert not [item for item in node.body if isinstance(item, ast.Assign)], node.name
    for field in fields(ModelConfig):
        value: Any = object()
        assert getattr(replace(TINY, **{field.name: value}), field.name) is value
        assert not getattr(ModelConfig, field.name, None), field.name


def primitives(jaxpr: Any) -> set[str]:
    """Returns the names of all operations of a traced function and its inner functions."""
    names: set[str] = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                names |= primitives(inner)
    return names


def on_host(names: set[str]) -> set[str]:
    return {name for name in names if "callback" in name or "debug" in name or "feed" in name}


def test_a_step_has_no_host_callback() -> None:
    """Forward, metrics, regime, draw and commit are one compiled loop without callbacks."""

    def planted(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: None, x)
        return jax.lax.cond(x > 0, lambda: jax.pure_callback(lambda y: y, x, x), lambda: x)

    found = on_host(primitives(jax.make_jaxpr(jax.jit(planted))(1.0).jaxpr))
    assert len(found) >= 2  # the search finds callbacks, also in inner functions

    config, params = tiny_model()
    state = start(config, params, [Job([1, 2, 3], params_of(LITERAL))], 16)
    program = Program(PARTS, 16, lanes=True, recording=Recording(top=2, layers=True))
    step: Any = decode
    jaxpr = step.trace(
        params, state, jnp.int32(5), config=config, max_steps=5, program=program
    ).jaxpr
    names = primitives(jaxpr.jaxpr)
    assert {"while", "dot_general", "top_k"} <= names
    assert not on_host(names)
    assert not jaxpr.effects
