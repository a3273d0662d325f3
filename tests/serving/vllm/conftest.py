"""One model and the engine's own answers, for all tests of a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.vllm.engines import PROMPTS, engine, save_model, tokens


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What the engine answers on its own."""
    log = tmp_path_factory.mktemp("reference") / "log"
    with engine(log, model=str(model), in_process=True) as alone:
        return tokens(alone.generate(*PROMPTS))
