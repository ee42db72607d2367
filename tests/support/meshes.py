"""Meshes of two devices, and the collectives of a compiled program."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from entropix_jax.model.mesh import parse_mesh


def mesh_of_two(text: str) -> Mesh:
    return parse_mesh(text, jax.devices()[:2])


@dataclass(frozen=True)
class Collective:
    """A collective of a compiled program."""

    kind: str
    elements: int
    groups: frozenset[frozenset[int]]
    source: str
    line: int


def collectives_of(text: str) -> list[Collective]:
    found = []
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-(?:permute|broadcast)"
    for number, line in enumerate(text.splitlines()):
        match = re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line)
        if match is None:
            continue
        shapes = re.findall(r"[a-z]+\d+\[([\d,]*)\]", match[1]) or [""]
        elements = sum(math.prod(map(int, filter(None, s.split(",")))) for s in shapes)
        source = re.search(r'op_name="([^"]*)"', line)
        groups = frozenset(frozenset(group) for group in groups_of(line))
        found.append(Collective(match[2], elements, groups, source[1] if source else "", number))
    return found


def groups_of(line: str) -> list[list[int]]:
    """Returns the groups of devices of a collective, in any of XLA's formats: {{0,1},{2,3}},
    [2,2]<=[4] or, from JAX 0.11, mesh['data'=2,'model'=2] {'model'}."""
    listed = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line)
    if listed is not None:
        return [[*map(int, group.split(","))] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    named = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    if named is not None:
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        over = re.findall(r"'(\w+)'", named[2])
        devices = np.arange(math.prod(axes.values())).reshape(*axes.values())
        last = [[*axes].index(name) for name in over]
        devices = np.moveaxis(devices, last, range(-len(last), 0))
        return devices.reshape(-1, math.prod(axes[name] for name in over)).tolist()
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    assert iota is not None, line
    shape, dims, order = ([*map(int, part.split(","))] if part else [] for part in iota.groups())
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return numbers.transpose(order or range(len(dims))).reshape(shape).tolist()
