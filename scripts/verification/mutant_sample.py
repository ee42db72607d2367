"""What mutants there are of a source: the operators, what is left alone, and a seeded sample.

Cosmic Ray gives most operators. Of its replacements of an operator by any other only those are
taken that yield the same kind of value: `<<` between floats is an error at the first call, and to
count such mutants as found would flatter the tests. What it has no operators for, and what errors
in array code look like, stands here: `minimum` for `maximum`, the two sides of a `where`, a field
that is not replaced.
"""

import ast
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider

# Calls that are each other's likeliest mistakes.
_SWAPPED_NAMES = {
    "all": "any",
    "any": "all",
    "argmax": "argmin",
    "argmin": "argmax",
    "ceil": "floor",
    "expm1": "exp",
    "floor": "ceil",
    "log1p": "log",
    "log_softmax": "softmax",
    "max": "min",
    "maximum": "minimum",
    "min": "max",
    "minimum": "maximum",
    "ones": "zeros",
    "ones_like": "zeros_like",
    "repeat": "tile",
    "round": "floor",
    "softmax": "log_softmax",
    "sorted": "list",
    "zeros": "ones",
    "zeros_like": "ones_like",
}
_SELECTIONS = {"where", "where_rows", "_either"}  # condition, one, other

_COSMIC_RAY = (
    *("ReplaceComparisonOperator_Lt_LtE", "ReplaceComparisonOperator_Lt_GtE"),
    *("ReplaceComparisonOperator_LtE_Lt", "ReplaceComparisonOperator_LtE_Gt"),
    *("ReplaceComparisonOperator_Gt_GtE", "ReplaceComparisonOperator_Gt_LtE"),
    *("ReplaceComparisonOperator_GtE_Gt", "ReplaceComparisonOperator_GtE_Lt"),
    *("ReplaceComparisonOperator_Eq_NotEq", "ReplaceComparisonOperator_NotEq_Eq"),
    *("ReplaceComparisonOperator_Is_IsNot", "ReplaceComparisonOperator_IsNot_Is"),
    *("ReplaceBinaryOperator_Add_Sub", "ReplaceBinaryOperator_Sub_Add"),
    *("ReplaceBinaryOperator_Mul_Div", "ReplaceBinaryOperator_Div_Mul"),
    *("ReplaceBinaryOperator_FloorDiv_Mul", "ReplaceBinaryOperator_Pow_Mul"),
    *("ReplaceBinaryOperator_Mod_FloorDiv", "ReplaceBinaryOperator_BitXor_BitAnd"),
    *("ReplaceBinaryOperator_RShift_LShift", "ReplaceBinaryOperator_LShift_RShift"),
    *("ReplaceBinaryOperator_BitAnd_BitOr", "ReplaceBinaryOperator_BitOr_BitAnd"),
    *("ReplaceUnaryOperator_Delete_USub", "ReplaceUnaryOperator_Delete_Invert"),
    "ReplaceUnaryOperator_Delete_Not",
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
    *("ExceptionReplacer", "NumberReplacer", "RemoveDecorator", "ZeroIterationForLoop"),
)


class _OneMutation:
    """An operator that can do at most one thing to a node."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if self.fits(node):
            yield node.start_pos, node.end_pos

    def fits(self, node: Any) -> bool:
        raise NotImplementedError


class SwapName(_OneMutation):
    """`minimum(...)` to `maximum(...)`, and the like."""

    def fits(self, node: Any) -> bool:
        return node.type == "name" and node.value in _SWAPPED_NAMES and _is_called(node)

    def mutate(self, node: Any, index: int) -> Any:
        node.value = _SWAPPED_NAMES[node.value]
        return node


class SwapSelection(_OneMutation):
    """`where(condition, one, other)` to `where(condition, other, one)`."""

    def fits(self, node: Any) -> bool:
        if node.type != "arglist" or any(child.type == "argument" for child in node.children):
            return False
        arguments = node.children[::2]
        return len(arguments) == 3 and _called_name(node) in _SELECTIONS

    def mutate(self, node: Any, index: int) -> Any:
        node.children[2], node.children[4] = node.children[4], node.children[2]
        return node


class DropReplacement:
    """`replace(x, a=1, b=2)` to `replace(x, b=2)`: a field is forgotten."""

    def mutation_positions(self, node: Any) -> list[tuple[Any, Any]]:
        fields = [node.children[at] for at in self._fields(node)]
        return [(field.start_pos, field.end_pos) for field in fields]

    def mutate(self, node: Any, index: int) -> Any:
        at = self._fields(node)[index]
        del node.children[at - 1 : at + 1]  # the comma before it, too
        return node

    @staticmethod
    def _fields(node: Any) -> list[int]:
        if node.type != "arglist" or _called_name(node) != "replace":
            return []
        return [
            at
            for at, child in enumerate(node.children)
            if child.type == "argument" and child.children[1] == "="
        ]


def _is_called(name: Any) -> bool:
    after = name.parent if name.parent.type == "trailer" else name
    following = after.get_next_sibling()
    return following is not None and following.type == "trailer" and following.children[0] == "("


def _called_name(arguments: Any) -> str:
    called = arguments.parent.get_previous_sibling()
    return "" if called is None else str(called.get_last_leaf().value)


def _operators() -> dict[str, Any]:
    provided = OperatorProvider()
    own = (SwapName, SwapSelection, DropReplacement)
    return {name: provided[name]() for name in _COSMIC_RAY} | {one.__name__: one() for one in own}


OPERATORS: Mapping[str, Any] = _operators()


@dataclass(frozen=True)
class Mutant:
    """A place in a module's source, and what is done to it.

    It goes by what it says, not by its line: `key` is the same after lines above it have moved.
    """

    module: str  # its path below the package
    definition: str  # the function or class that it is in, with dots; "" outside of any
    operator: str
    occurrence: int  # among the operator's in the module
    line: str  # its first one, stripped
    column: int  # where in it
    choice: int  # among the operator's mutations of that place
    number: int  # among those of the definition that are alike in all of this
    start: tuple[int, int]  # line and column in the file
    end: tuple[int, int]

    @property
    def key(self) -> str:
        """What a result is kept by."""
        parts = (self.module, self.definition, self.operator, self.line, self.column)
        text = "\0".join(map(str, (*parts, self.choice, self.number)))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @cache  # noqa: B019 - as many as there are mutants in the sample
    def apply(self, source: str) -> str:
        """The module's source with the mutation."""
        mutated = mutate_code(source, OPERATORS[self.operator], self.occurrence)
        assert isinstance(mutated, str), f"{self.module}: no occurrence {self.occurrence}"
        return mutated


def mutants_of(module: str, source: str, definitions: tuple[str, ...] = ()) -> list[Mutant]:
    """All mutants of a module, or of some of its functions and classes."""
    left_alone = _left_alone(source)
    lines = source.splitlines()
    nodes = list(ast_nodes(get_ast(source)))
    found: list[Mutant] = []
    numbers: dict[tuple[Any, ...], int] = {}
    for name, operator in OPERATORS.items():
        places = ((node, *place) for node in nodes for place in operator.mutation_positions(node))
        choices: dict[tuple[int, int], int] = {}
        for occurrence, (node, start, end) in enumerate(places):
            choice = choices[start] = choices.get(start, -1) + 1
            definition = _definition(node)
            if node.parent is not None and node.parent.type == "parameters":
                continue  # the `*` or `/` of a signature is no operator
            if any(first <= start < last for first, last in left_alone):
                continue
            if definitions and definition.split(".")[0] not in definitions:
                continue
            text = lines[start[0] - 1]
            line, column = text.strip(), start[1] - (len(text) - len(text.lstrip()))
            alike = (definition, name, line, column, choice)
            number = numbers[alike] = numbers.get(alike, -1) + 1
            found.append(
                Mutant(
                    module=module,
                    definition=definition,
                    operator=name,
                    occurrence=occurrence,
                    line=line,
                    column=column,
                    choice=choice,
                    number=number,
                    start=start,
                    end=end,
                )
            )
    return found


def sample(
    mutants: Mapping[str, list[Mutant]], size: int, seed: int, valid: Callable[[Mutant], bool]
) -> list[Mutant]:
    """`size` mutants, of each module in proportion to how many it has.

    Each mutant has its place in a seeded order of its own, so that a change of a source changes
    the sample little. Returned in that order, all modules mixed.
    """

    def place(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed}:{mutant.key}".encode()).hexdigest()

    total = sum(map(len, mutants.values()))
    size = min(size, total)
    shares = {module: size * len(all_) / total for module, all_ in mutants.items()}
    numbers = {module: int(share) for module, share in shares.items()}
    by_rest = sorted(shares, key=lambda module: (numbers[module] - shares[module], module))
    for module in by_rest[: size - sum(numbers.values())]:
        numbers[module] += 1
    chosen = [
        mutant
        for module, all_ in mutants.items()
        for mutant in islice(filter(valid, sorted(all_, key=place)), numbers[module])
    ]
    return sorted(chosen, key=place)


def is_valid(source: str, mutated: str) -> bool:
    """Whether the mutated source is Python, and not the same program."""
    try:
        return ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def _definition(node: Any) -> str:
    names: list[str] = []
    while node is not None:
        if node.type in ("funcdef", "classdef"):
            names.append(node.name.value)
        node = node.parent
    return ".".join(reversed(names))


def _left_alone(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """From where to where there is nothing but types: annotations, aliases, what is imported for
    them; and decorators that make dataclasses, without which nothing could be imported."""
    nodes: list[ast.expr | ast.stmt] = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            nodes.append(node.annotation)
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            nodes.append(node.returns)
        elif isinstance(node, ast.ClassDef):
            nodes += [d for d in node.decorator_list if "dataclass" in ast.unparse(d)]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes.append(node)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and re.match(
            "_?[A-Z][a-z]", ast.unparse(statement.targets[0])
        ):
            nodes.append(statement)
    # A decorator's own position is that of its "@".
    return [
        (
            (node.lineno, max(node.col_offset - 1, 0)),
            (node.end_lineno or 0, node.end_col_offset or 0),
        )
        for node in nodes
    ]
