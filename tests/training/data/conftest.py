"""A small real pipeline, made once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.families.registry import family_named
from tests.training.data.pictures import CAPTIONS


@pytest.fixture(scope="session")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    family_named("qwen-image").write_small_pipeline(folder, CAPTIONS, seed=0)
    return folder


@pytest.fixture(scope="session")
def load_pipeline(pipeline_folder: Path) -> Callable[[], Any]:
    from diffusers import QwenImagePipeline

    return lambda: QwenImagePipeline.from_pretrained(pipeline_folder, transformer=None)
