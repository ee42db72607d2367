"""float32 numbers as they are written: by the fewest decimal digits that tell them apart."""

import numpy as np

_POWERS = 10.0 ** np.arange(23)  # the exact ones


def shorten(x: np.ndarray) -> np.ndarray:
    """The float64 nearest to each number's shortest decimal, for float32 of any shape: 0.1 for the
    float32 that is 0.100000001490116.

    The same as by NumPy's texts (`x.astype(str).astype(float)`), at a tenth of the time. Six digits
    or fewer always come back; of seven to nine the first that do are taken.
    """
    assert x.dtype == np.float32, x.dtype
    wide = x.astype(np.float64)
    size = np.abs(wide)
    # Where scaling is exact enough, and no power of two, whose neighbour below is nearer.
    usual = (size > 1e-9) & (size < 1e9) & ((x.view(np.int32) & 0x7FFFFF) != 0)
    exponent = np.floor(np.log10(np.where(usual, size, 1.0))).astype(np.int32)
    found, left = np.zeros(x.shape), usual
    for digits in range(6, 10):
        shift = digits - 1 - exponent
        up, down = _POWERS[np.maximum(shift, 0)], _POWERS[np.maximum(-shift, 0)]
        decimal = np.rint(wide * up / down) / up * down
        same = left & (decimal.astype(np.float32) == x)
        found, left = np.where(same, decimal, found), left & ~same
    rest = left | ~usual
    found[rest] = x[rest].astype(str).astype(np.float64)
    return found
