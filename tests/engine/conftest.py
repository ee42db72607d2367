"""The model of most tests of the engine."""

import pytest

from entropix_jax.model.loading import LanguageModel, load


@pytest.fixture(scope="module")
def model(folder: str) -> LanguageModel:
    """Random weights, calibrated, with few positions."""
    return load(folder)
