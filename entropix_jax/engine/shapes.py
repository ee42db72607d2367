"""Sizes of compiled programs: buckets, so that few shapes are ever compiled."""

from entropix_jax.model.config import ModelConfig

PREFILL_WINDOW = 128  # minimum number of cache positions that a part of a prompt reads
DECODE_WINDOW = 512  # minimum decode window; each window compiles a program
MIN_CAPACITY = 256  # minimum number of cache positions of a row
MAX_PREFILL = 512  # maximum tokens of a prompt in one call
MAX_STEPS = 32  # maximum steps per chunk
_MIN_CHUNK = 16
_SCORES_BYTES = 1 << 28  # maximum memory for one layer's attention scores in one call


def bucket(length: int, smallest: int) -> int:
    """Returns the next power of two, at least `smallest`."""
    return max(smallest, 1 << (length - 1).bit_length())


def chunk_size(config: ModelConfig, length: int, batch: int, largest: int) -> int:
    """Returns the number of tokens that `batch` rows of `length` tokens may read in one call: fewer
    in long contexts and large batches, whose attention scores need memory."""
    scores = bucket(length, PREFILL_WINDOW) * batch * config.num_heads
    room = 1 << max(_SCORES_BYTES // (4 * scores), 1).bit_length() - 1
    return min(largest, max(_MIN_CHUNK, room))


def decode_window(length: int, capacity: int) -> int:
    """Returns the cache positions that a step reads for rows of up to `length` tokens."""
    return min(bucket(length, DECODE_WINDOW), capacity)
