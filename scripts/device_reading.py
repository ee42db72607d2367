"""Reads compiled programs: the text of an XLA module, and the sequence of a GPU's launches.

Both are what XLA writes for people to read; `tests/devices/test_reading.py` has examples of what is
relied on.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

# They compute nothing and move nothing.
FREE = frozenset(
    "parameter get-tuple-element tuple bitcast constant opt-barrier after-all partition-id "
    "replica-id domain add-dependency".split()
)
# What runs other computations, and how their names are given.
CALLS = ("while", "conditional", "call", "async-start")
_CALLED = re.compile(
    r"\b(?:body|condition|to_apply|calls|true_computation|false_computation)=%([\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}"
)
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
COLLECTIVES = (
    "all-gather all-reduce all-to-all reduce-scatter collective-permute collective-broadcast"
).split()
# What makes each element of one element of each operand: within a kernel they are made where they
# are used, so that of a gather's operand no more is read than what it takes.
ELEMENTWISE = frozenset(
    "bitcast convert bitcast-convert reshape not negate abs exponential log add subtract multiply "
    "divide maximum minimum and or xor select compare copy pad".split()
)
# What may write into an array that it is given.
UPDATES = ("dynamic-update-slice", "scatter")
# What a kernel of the package says that it moves, where its arrays do not say it, and which of its
# outputs take the place of operands.
_TOLD_BYTES = re.compile(
    r'serialized_metadata = "\{\\22bytes\\22: \\22(\d+)|"bytes_accessed":"(\d+)"'
)
_ALIASED = re.compile(r"output_to_operand_aliasing=\{(.*?\}\))\}")
# Of a GPU's sequence, what launches nothing itself.
CONTROL = ("kConditional", "kWhile", "kCommandBuffer", "kSequential", "kAsyncDone")


@dataclass(frozen=True)
class Array:
    """An array of a program: its type and shape, and whether it lies in the device's main memory
    (or, on a TPU, in the fast memory beside the processor)."""

    dtype: str
    shape: tuple[int, ...]
    is_near: bool = False

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes, without padding."""
        digits = re.search(r"\d+", self.dtype)  # none: a bool or a token
        return self.size * (int(digits[0]) if digits else 8) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Instruction:
    """One instruction: what it makes, of which operands."""

    name: str
    operation: str
    arrays: tuple[Array, ...]  # several where it makes a tuple
    operands: tuple[str, ...]
    rest: str  # its attributes
    is_root: bool

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs."""
        names: list[str] = []
        for one, several in _CALLED.findall(self.rest):
            names += [one] if one else re.findall(r"%([\w.\-]+)", several)
        return tuple(names)

    @property
    def source(self) -> str:
        """Where in the program's own code it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


Computation = dict[str, Instruction]


@dataclass(frozen=True)
class Placed:
    """An instruction of a step, and how often it runs: in every step, only in a branch of a
    conditional, or in each pass of an inner loop."""

    instruction: Instruction
    within: Computation
    in_branch: bool
    in_loop: bool


@dataclass
class Module:
    """A compiled module."""

    computations: dict[str, Computation]
    entry: str
    places: dict[str, str]  # file and function of each stack frame, by its number

    @classmethod
    def parse(cls, text: str) -> "Module":
        """Reads the text of a module."""
        computations: dict[str, Computation] = {}
        entry, current = "", {}
        for line in text.splitlines():
            if line.endswith("{") and (head := re.match(r"(ENTRY )?%([\w.\-]+) \(", line)):
                current = computations[head[2]] = {}
                entry = head[2] if head[1] else entry
            elif (instruction := _instruction(line)) is not None:
                current[instruction.name] = instruction
        return cls(computations, entry, _places(text[: text.find("\n%")]))

    def place(self, instruction: Instruction) -> str:
        """The file and the function that an instruction comes from; of a fusion that does not say,
        those of what it holds."""
        named = [instruction]
        if instruction.operation == "fusion":
            named += reversed(self.computations[instruction.called[0]].values())
        for one in named:
            found = re.search(r"stack_frame_id=(\d+)", one.rest)
            if found and found[1] in self.places:
                return self.places[found[1]]
        is_transfer = instruction.operation.endswith("-start")
        return "transfers" if is_transfer else instruction.operation

    def all(self) -> list[Placed]:
        """What stands in the module."""
        return [*self._walk(self.entry)]

    def step(self) -> list[Placed]:
        """What stands in the module's loop, its condition included."""
        entry = self.computations[self.entry].values()
        loops = [instruction for instruction in entry if instruction.operation == "while"]
        # The longest: a compiler may put short ones before and after it.
        passes = [[one for name in loop.called for one in self._walk(name)] for loop in loops]
        return max(passes, key=len)

    def outside(self) -> list[Placed]:
        """What stands before and after loops."""
        return [placed for placed in self._walk(self.entry) if not placed.in_loop]

    def _walk(self, name: str, in_branch: bool = False, in_loop: bool = False) -> Iterator[Placed]:
        within = self.computations[name]
        for instruction in within.values():
            yield Placed(instruction, within, in_branch, in_loop)
            if instruction.operation in CALLS:
                branch = in_branch or instruction.operation == "conditional"
                loop = in_loop or instruction.operation == "while"
                for called in instruction.called:
                    yield from self._walk(called, branch, loop)

    def moved_bytes(self, placed: Placed) -> int:
        """Bytes that an instruction reads and writes in main memory: of a slice what is taken, of
        an update in place what is put."""
        instruction, within = placed.instruction, placed.within
        if instruction.operation in FREE or instruction.operation in CALLS:
            return 0
        if told := _TOLD_BYTES.search(instruction.rest):
            return int(told[1] or told[2])
        if instruction.operation.endswith("-done"):  # its start is counted
            return 0
        if instruction.operation.endswith("-start"):
            return _started_bytes(instruction, within)
        inner = self._inner(instruction, within)
        read = 0
        for number, operand in enumerate(instruction.operands):
            arrays = within[operand].arrays if operand in within else ()
            if not any(array.is_near for array in arrays):
                read += _read_of(inner, number, sum(array.nbytes for array in arrays))
        return read + _written(inner, instruction.arrays)

    def _inner(self, instruction: Instruction, within: Computation) -> Computation:
        """What a fusion computes; another instruction as a computation of its own."""
        if instruction.operation == "fusion":
            return self.computations[instruction.called[0]]
        inner = {}
        for number, operand in enumerate(instruction.operands):
            arrays = within[operand].arrays if operand in within else ()
            name = f"parameter {number}"
            inner[name] = Instruction(name, "parameter", arrays, (str(number),), "", False)
        whole = replace(instruction, operands=tuple(inner), is_root=True)
        return inner | {instruction.name: whole}

    def makes_anew(self, placed: Placed) -> list[Array]:
        """The arrays in main memory that an instruction makes, but for those that it updates in
        place."""
        instruction = placed.instruction
        operation = instruction.operation
        if operation in FREE or operation in CALLS or operation.endswith("-done"):
            return []
        made = [*instruction.arrays]
        if operation.endswith("-start"):
            made = [_target(instruction)]
        else:
            inner = self._inner(instruction, placed.within)
            made = [
                array
                for number, (array, root) in enumerate(_outputs(inner, made))
                if not _is_update(inner, root) and number not in _aliased(instruction)
            ]
        return [array for array in made if not array.is_near]

    def with_inner(self, placed: Placed) -> list[Instruction]:
        """An instruction, and what a fusion holds."""
        instruction = placed.instruction
        fused = self._inner(instruction, placed.within) if instruction.operation == "fusion" else {}
        return [instruction, *fused.values()]

    def inputs(self, placed: Placed, one: Instruction) -> list[Array]:
        """What an instruction is given; `one` is `placed` itself, or what its fusion holds."""
        within = placed.within
        if one is not placed.instruction:
            within = self._inner(placed.instruction, within)
        return [a for name in one.operands if name in within for a in within[name].arrays]


def _places(head: str) -> dict[str, str]:
    """The tables at the beginning of a module: frames to locations to files and functions."""
    names = re.compile(r'^(\d+) "(.*)"$', re.M)
    at = [head.find(f"\n{title}\n") for title in _TABLES]
    if min(at) < 0:
        return {}
    files, functions, locations, frames = (
        head[start:end] for start, end in zip(at, [*at[1:], len(head)], strict=True)
    )
    file_of, function_of = dict(names.findall(files)), dict(names.findall(functions))
    location_of = {
        number: f"{_short(file_of[file])} {function_of[function].rpartition('.')[2]}"
        for number, file, function in re.findall(
            r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+)", locations, re.M
        )
    }
    found = re.findall(r"^(\d+) \{file_location_id=(\d+)", frames, re.M)
    return {frame: location_of[location] for frame, location in found}


def _short(path: str) -> str:
    """The path within the package; else the name."""
    return path.partition("/entropix_jax/")[2] or path.rpartition("/")[2]


def _instruction(line: str) -> Instruction | None:
    match = re.match(r"\s+(ROOT )?%([\w.\-]+) = ", line)
    if match is None:
        return None
    rest = line[match.end() :]
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opened = rest.index("(")
    operation, rest = rest[:opened], rest[opened:]
    end = _closing(rest)
    arrays = tuple(
        Array(dtype, tuple(map(int, filter(None, sizes.split(",")))), "S(1)" in layout)
        for dtype, sizes, layout in re.findall(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?", shape)
    )
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[:end]))
    if operation == "parameter":
        operands = (rest[1:end],)
    return Instruction(match[2], operation, arrays, operands, rest[end + 1 :], bool(match[1]))


def _closing(text: str) -> int:
    """Where the parenthesis closes that the text begins with."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place
    raise ValueError(f"no end: {text[:80]}")


def _target(start: Instruction) -> Array:
    """What an asynchronous transfer fills."""
    return start.arrays[0 if start.operation == "copy-start" else -2]


def _started_bytes(start: Instruction, within: Computation) -> int:
    """Bytes that an asynchronous transfer reads and writes in main memory."""
    target = _target(start)
    source = within[start.operands[0]].arrays if start.operands[0] in within else ()
    ends = [target.is_near, any(array.is_near for array in source)]
    return target.nbytes * ends.count(False)


def _users(inner: Computation, name: str) -> list[tuple[Instruction, int]]:
    """The instructions that use one, and as which operand, seen through what is elementwise."""
    found, names, seen = [], [name], {name}
    while names:
        name = names.pop()
        for instruction in inner.values():
            if instruction.operation == "parameter" or name not in instruction.operands:
                continue
            if instruction.operation in ELEMENTWISE and not instruction.is_root:
                if instruction.name not in seen:
                    seen.add(instruction.name)
                    names.append(instruction.name)
                continue
            places = enumerate(instruction.operands)
            found += [(instruction, place) for place, operand in places if operand == name]
    return found


def _read_of(inner: Computation, number: int, whole: int) -> int:
    """Bytes that a computation reads of its parameter."""
    parameter = next(
        (x for x in inner.values() if x.operation == "parameter" and x.operands == (str(number),)),
        None,
    )
    if parameter is None:
        return whole
    read = 0
    for user, place in _users(inner, parameter.name):
        if place == 0 and user.operation in ("dynamic-slice", "gather", "slice"):
            read += user.arrays[0].nbytes
        elif place == 0 and user.operation in ("dynamic-update-slice", "scatter"):
            continue
        else:
            return whole
    return min(read, whole)


def _outputs(inner: Computation, arrays: Sequence[Array]) -> list[tuple[Array, Instruction]]:
    """The arrays that a computation makes, and the instruction that makes each."""

    def of(root: Instruction) -> list[Instruction]:
        if root.operation == "tuple":
            return [one for name in root.operands for one in of(inner[name])]
        return [root] * len(root.arrays)

    root = next(one for one in inner.values() if one.is_root)
    roots = of(root)
    return [*zip(arrays, roots if len(roots) == len(arrays) else [root] * len(arrays), strict=True)]


def _unwrapped(inner: Computation, root: Instruction) -> Instruction:
    while root.operation in ("bitcast", "copy", "reshape", "get-tuple-element"):
        root = inner[root.operands[0]]
    return root


def _is_update(inner: Computation, root: Instruction) -> bool:
    """Whether it puts values into an array that the computation is given."""
    root = _unwrapped(inner, root)
    if root.operation not in UPDATES:
        return False
    return _unwrapped(inner, inner[root.operands[0]]).operation == "parameter"


def _aliased(kernel: Instruction) -> set[int]:
    """Which outputs take the place of operands."""
    found = _ALIASED.search(kernel.rest)
    return (
        {int(number or 0) for number in re.findall(r"\{(\d*)\}: \(", found[1])} if found else set()
    )


def _written(inner: Computation, arrays: Sequence[Array]) -> int:
    """Bytes of main memory that a computation writes."""
    written = 0
    for array, root in _outputs(inner, arrays):
        if array.is_near:
            continue
        put = [array]
        if _is_update(inner, root):
            root = _unwrapped(inner, root)
            place = 1 if root.operation == "dynamic-update-slice" else -1
            put = [*inner[root.operands[place]].arrays]
        written += sum(one.nbytes for one in put)
    return written


# Launches of a GPU.


@dataclass
class Launch:
    """A line of a GPU's sequence: a kernel or copy, a graph, a loop or conditional, or the name of
    one of its parts."""

    kind: str
    text: str
    indent: int
    parts: list["Launch"] = field(default_factory=list)


def read_launches(text: str) -> Launch:
    """The sequence as a tree, by its indentation."""
    root = Launch("module", "", -1)
    path, loop = [root], root
    # "No thunks." has no line of its own.
    for line in re.sub(r"No thunks\.\s*(?=\w+:)", "", text).splitlines():
        words = line.strip()
        if not words or words == "No thunks.":
            continue
        numbered = re.match(r"\d+: (k\w+)", words)
        one = Launch(numbered[1] if numbered else words.rstrip(":"), words, _indent(line))
        if one.kind == "condition":  # it is written without indentation
            one.indent = loop.indent + 1
        while path[-1].indent >= one.indent:
            path.pop()
        path[-1].parts.append(one)
        path.append(one)
        loop = one if one.kind == "kWhile" else loop
    return root


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


@dataclass
class Launches:
    """What a step of a GPU consists of: in each step, and besides where branches are taken or inner
    loops are run (each branch and each loop counted once)."""

    kernels: int = 0  # kernels and copies
    sort_kernels: int = 0  # of them: those of sorts
    graphs: int = 0  # none where the loop itself is part of one
    syncs: int = 0  # loops and conditionals outside of graphs: the host waits for what they read
    branch_kernels: int = 0
    branch_syncs: int = 0


def count_launches(sequence: Launch, in_loop: bool) -> Launches:
    """Counts what a program, or with `in_loop` a pass of its longest loop, launches."""
    found = Launches()
    start, in_graph = sequence, False
    if in_loop:
        start, in_graph = max(_loops(sequence), key=lambda loop: _number(loop[0]))
        found.syncs = int(not in_graph)

    def count(launch: Launch, in_branch: bool, in_graph: bool) -> None:
        for one in launch.parts:
            leaf = not one.parts and one.kind.startswith("k") and one.kind not in CONTROL
            if leaf and in_branch:
                found.branch_kernels += 1
            elif leaf:
                found.kernels += 1
                found.sort_kernels += bool(re.search(r"\bsort_|Sort", one.text))
            elif one.kind in ("kConditional", "kWhile") and not in_graph:
                found.syncs += not in_branch
                found.branch_syncs += in_branch
            elif one.kind == "kCommandBuffer" and not in_branch:
                found.graphs += 1
            count(
                one,
                in_branch or one.kind in ("kConditional", "kWhile"),
                in_graph or one.kind == "kCommandBuffer",
            )

    count(start, False, in_graph)
    return found


def _loops(launch: Launch, in_graph: bool = False) -> Iterator[tuple[Launch, bool]]:
    """The loops, each with whether it is part of a graph."""
    for one in launch.parts:
        if one.kind == "kWhile":
            yield one, in_graph
        yield from _loops(one, in_graph or one.kind == "kCommandBuffer")


def _number(launch: Launch) -> int:
    return 1 + sum(map(_number, launch.parts))


# The figures of a program.


@dataclass
class Figures:
    """What a compiled program does in a step, or in all where it has no loop. What stands in the
    branch of a conditional or in an inner loop is left out of all but `sorts` and `top_ks`."""

    bytes_moved: int  # read and written in main memory, without padding
    # By file and function: those bytes, `kernels` without a GPU's copies and sorts, and `cycles`.
    by_place: dict[str, tuple[int, int, int]]
    copies: dict[str, int]  # of whole arrays of the cache or of weights, by what makes them
    copied_bytes: int  # written by those
    call_copies: dict[str, int]  # the same before and after the loop, once in each call
    sorts: int  # of all of a row's vocabulary, at once or in pieces
    top_ks: int  # the same by a kernel that finds the first k
    collectives: dict[str, int]
    collective_bytes: int  # that a device receives
    kernels: int  # launches of kernels and copies; on a TPU instructions that make an array
    cycles: int = 0  # of a TPU, as its compiler estimates them
    # Of a GPU, see `Launches`.
    sort_kernels: int = 0
    graphs: int = 0
    syncs: int = 0
    branch_kernels: int = 0
    branch_syncs: int = 0


def read_program(
    text: str, sequence: str | None, *, in_loop: bool, large: Callable[[Array], bool], vocab: int
) -> Figures:
    """Reads a compiled program.

    Args:
        text: the compiled module.
        sequence: a GPU's sequence of launches.
        in_loop: the loop is what counts.
        large: whether an array that is made anew is as large as one of the cache or a weight.
        vocab: how many numbers a row's logits are.
    """
    module = Module.parse(text)
    copies: Counter[str] = Counter()
    exchanged: dict[str, tuple[str, Array]] = {}
    by_place: dict[str, tuple[int, int, int]] = {}
    on_gpu = sequence is not None
    copied, sorts, top_ks = 0, 0, 0
    for placed in module.step() if in_loop else module.all():
        instruction = placed.instruction
        for one in module.with_inner(placed):
            target, given = _custom_target(one), module.inputs(placed, one)
            # A compiler may sort a row in pieces.
            wide = any(array.size > 0 and array.size % vocab == 0 for array in given)
            sorts += wide and (one.operation == "sort" or "sort" in target)
            top_ks += wide and "topk" in target
        if placed.in_branch or placed.in_loop:
            continue
        operation = instruction.operation
        is_work = operation not in (*FREE, *CALLS) and not operation.endswith(("-done", "-update"))
        is_kernel = is_work and (on_gpu or max(array.size for array in instruction.arrays) > 1)
        estimate = re.search(r'"estimated_cycles":"(\d+)"', instruction.rest)
        cost = module.moved_bytes(placed), int(is_kernel), int(estimate[1]) if estimate else 0
        if any(cost):
            place = module.place(instruction)
            before = by_place.get(place, (0, 0, 0))
            by_place[place] = before[0] + cost[0], before[1] + cost[1], before[2] + cost[2]
        made = _copies(module, placed, large)
        copied += sum(array.nbytes for array in made)
        copies.update(f"{array} {module.place(instruction)}" for array in made)
        for one in module.with_inner(placed):
            kind = one.operation.removesuffix("-start")
            if kind in COLLECTIVES:
                # One that other work overlaps with stands in several fusions.
                channel = re.search(r"channel_id=\d+", one.rest)
                key = channel[0] if channel and one is not instruction else one.name
                exchanged[key] = kind, one.arrays[-1]
    outside = module.outside() if in_loop else []
    moved, kernels, cycles = map(sum, zip(*by_place.values(), strict=True))
    figures = Figures(
        bytes_moved=moved,
        by_place=dict(sorted(by_place.items(), key=lambda item: item[1], reverse=True)),
        copies=dict(copies),
        copied_bytes=copied,
        call_copies=dict(
            Counter(
                f"{array} {module.place(placed.instruction)}"
                for placed in outside
                for array in _copies(module, placed, large)
            )
        ),
        sorts=sorts,
        top_ks=top_ks,
        collectives=dict(Counter(kind for kind, _ in exchanged.values())),
        collective_bytes=sum(array.nbytes for _, array in exchanged.values()),
        kernels=kernels,
        cycles=cycles,
    )
    if sequence is None:
        return figures
    return replace(figures, **vars(count_launches(read_launches(sequence), in_loop)))


def _copies(module: Module, placed: Placed, large: Callable[[Array], bool]) -> list[Array]:
    """The large arrays that an instruction makes. What a product makes is no copy."""
    if placed.instruction.source.endswith("dot_general"):
        return []
    return [array for array in module.makes_anew(placed) if large(array)]


def _custom_target(instruction: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', instruction.rest)
    return found[1].lower() if found else ""
