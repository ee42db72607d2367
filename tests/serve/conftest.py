"""One server for all tests of the folder that need an engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import jax
import pytest

from entropix_jax.model.loading import LanguageModel
from tests.support.servers import Running, listening


@pytest.fixture(scope="package")
def running(tiny: LanguageModel) -> Iterator[Running]:
    with listening(tiny) as server:
        yield server


@pytest.fixture(autouse=True, scope="package")
def forget_programs() -> Iterator[None]:
    """Frees compiled programs after the last module, since all use the server's programs."""
    yield
    jax.clear_caches()
    gc.collect()
