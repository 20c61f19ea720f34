from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny T2V pipeline folder; tests read it and don't change it."""
    from mm_models_wan import write_tiny_pipeline

    return write_tiny_pipeline(tmp_path_factory.mktemp("tiny_wan"))


@pytest.fixture(scope="session")
def tiny_i2v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny I2V pipeline folder (36 channels, two experts)."""
    from mm_models_wan import write_tiny_pipeline

    return write_tiny_pipeline(tmp_path_factory.mktemp("tiny_i2v"), task="i2v")


@pytest.fixture(scope="session")
def tiny_ti2v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny TI2V pipeline folder (48 channels, one transformer)."""
    from mm_models_wan import write_tiny_pipeline

    return write_tiny_pipeline(tmp_path_factory.mktemp("tiny_ti2v"), task="ti2v")
