"""Random numbers of a run: Threefry-2x32 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as
1, 2, 3"), keyed by the seed and the row, then by position, attempt, stream and index."""

import hashlib

import numpy as np

STREAMS = ("draw", "candidate", "rollout", "noise", "xtc", "observe")

Key = tuple[np.ndarray, np.ndarray]  # two words, uint32 [n] or [1]

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = np.uint32(0x1BD11BDA)


def row_key(seed: int, row_id: str) -> Key:
    """Returns the key of a row: the first 64 bits of SHA-256 over the seed and the row's id."""
    digest = hashlib.sha256(f"{seed}:{row_id}".encode()).digest()
    first, second = np.frombuffer(digest[:8], ">u4").astype(np.uint32)
    return np.array([first]), np.array([second])


def uniforms(key: Key, position: int, attempt: int, stream: str, count: int) -> np.ndarray:
    """Returns `count` numbers in [0, 1) with 24 random bits, float64."""
    for part in (position, attempt, STREAMS.index(stream), np.arange(count)):
        key = _fold_in(key, np.atleast_1d(part).astype(np.uint32))
    return (key[0] >> np.uint32(8)) * 2.0**-24


def _fold_in(key: Key, data: np.ndarray) -> Key:
    """Encrypts the counter (0, data) with a key. This is `fold_in` of JAX's threefry2x32."""
    keys = (*key, key[0] ^ key[1] ^ _PARITY)
    x, y = np.zeros_like(data) + keys[0], data + keys[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x = x + y
            y = x ^ ((y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation)))
        x = x + keys[(block + 1) % 3]
        y = y + keys[(block + 2) % 3] + np.uint32(block + 1)
    return x, y
