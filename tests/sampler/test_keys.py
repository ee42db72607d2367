"""A random number is a function of its name: seed, row, position, attempt, stream, index."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from entropix_jax.sampler.keys import (
    STREAM_CANDIDATE,
    STREAM_DRAW,
    STREAM_NOISE,
    STREAM_ROLLOUT,
    STREAM_XTC,
    row_key,
    uniforms,
)

STREAMS = (STREAM_DRAW, STREAM_CANDIDATE, STREAM_ROLLOUT, STREAM_NOISE, STREAM_XTC)

uniforms_of = jax.jit(uniforms, static_argnums=4)


def numbers(names: list[tuple[np.ndarray, int, int, int]], number: int = 4) -> np.ndarray:
    """[B, number] of (key, position, attempt, stream)."""
    keys, *path = zip(*names, strict=True)
    columns = [jnp.asarray(column, jnp.int32) for column in path]
    return np.asarray(uniforms_of(jnp.asarray(np.stack(keys)), *columns, number))


def threefry(key: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011), in Python's integers."""
    mask = 0xFFFFFFFF
    schedule = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (block[0] + key[0]) & mask, (block[1] + key[1]) & mask
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = (x + y) & mask
            y = ((y << rotation | y >> (32 - rotation)) & mask) ^ x
        x = (x + schedule[(group + 1) % 3]) & mask
        y = (y + schedule[(group + 2) % 3] + group + 1) & mask
    return x, y


def test_the_numbers_stay_what_they_are() -> None:
    """A change of the generator would change every text that a seed stands for."""
    assert STREAMS == (0, 1, 2, 3, 4)
    rows = {(0, "0"): (0, 0, 0), (5, "récord"): (9, 2, 1), (-1, ""): (70_000, 1, 0)}
    drawn = numbers([(row_key(*row), *path) for row, path in rows.items()], 3)
    for (seed, row_id), path, found in zip(rows, rows.values(), drawn, strict=True):
        digest = hashlib.sha256(f"{seed}:{row_id}".encode()).digest()
        for index in range(3):
            key = (int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:8], "big"))
            for part in (*path, index):
                key = threefry(key, (0, part))
            assert found[index] == (key[0] >> 8) / 2**24


def test_each_part_of_the_name_counts() -> None:
    names = [
        (row_key(seed, row_id), position, attempt, stream)
        for seed, row_id in ((0, "0"), (1, "0"), (0, "1"))
        for position in (0, 1, 5)
        for attempt in (0, 1, 5)
        for stream in STREAMS
    ]
    drawn = numbers(names)
    # Of so many numbers with 24 bits two may be equal; two with the same index are not.
    for column in drawn.T:
        assert np.unique(column).size == len(names)
    for row in drawn:
        assert np.unique(row).size == row.size
    # Once more, in another order, and alone.
    np.testing.assert_array_equal(numbers(names[::-1])[::-1], drawn)
    np.testing.assert_array_equal(numbers(names[29:30]), drawn[29:30])


def test_numbers_are_uniform_along_each_part() -> None:
    """Neighbouring positions, attempts, rows and indices are as good as independent."""
    n = 4000
    key = row_key(0, "0")
    series = {
        "position": numbers([(key, i, 0, 0) for i in range(n)], 1)[:, 0],
        "attempt": numbers([(key, 9, i, 0) for i in range(n)], 1)[:, 0],
        "row": numbers([(row_key(0, str(i)), 9, 0, 0) for i in range(n)], 1)[:, 0],
        "index": numbers([(key, 9, 0, 0)], n)[0],
    }
    for name, values in series.items():
        assert values.dtype == np.float32
        assert 0 <= values.min() <= values.max() < 1, name
        assert stats.kstest(values, "uniform").pvalue > 1e-3, name
        assert stats.pearsonr(values[1:], values[:-1]).pvalue > 1e-3, name
