"""Hashes, and an index of many of them that takes little memory."""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


def hash_of(data: bytes, bits: int = 60) -> int:
    """A hash (BLAKE2b) as a number of `bits` bits, at most 128."""
    return int.from_bytes(blake2b(data, digest_size=16).digest()) >> (128 - bits)


class Index:
    """A 60-bit number for each of many keys, which are 60-bit hashes.

    16 bytes an entry in sorted arrays, but for the newest entries, which a dict holds until there
    are enough of them to be sorted in.
    """

    def __init__(self) -> None:
        """An empty one."""
        self._keys: NDArray[np.uint64] = np.empty(0, np.uint64)  # sorted
        self._values: NDArray[np.uint64] = np.empty(0, np.uint64)  # in the order of their keys
        self._newest: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._keys) + len(self._newest)

    def find(self, key: int) -> int | None:
        """The number of a key, None if it is not there."""
        if key in self._newest:
            return self._newest[key]
        place = self._keys.searchsorted(np.uint64(key))
        if place == len(self._keys) or int(self._keys[place]) != key:
            return None
        return int(self._values[place])

    def add(self, key: int, value: int) -> bool:
        """Adds a key, unless it is there; whether it was not."""
        if self.find(key) is not None:
            return False
        self._newest[key] = value
        if len(self._newest) >= max(2**14, len(self._keys) // 32):
            keys = np.fromiter(self._newest.keys(), np.uint64)
            values = np.fromiter(self._newest.values(), np.uint64)
            self._newest = {}
            order = np.argsort(keys)
            places = self._keys.searchsorted(keys[order])
            self._keys = np.insert(self._keys, places, keys[order])
            self._values = np.insert(self._values, places, values[order])
        return True
