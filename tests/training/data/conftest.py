"""A small real pipeline and small image folders, made once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from autotune.families.registry import family_named

CAPTIONS = ("a red fox in the snow", "a blue house by the sea", "two green pears")


@pytest.fixture(scope="session")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    family_named("qwen-image").write_small_pipeline(folder, CAPTIONS, seed=0)
    return folder


@pytest.fixture(scope="session")
def load_pipeline(pipeline_folder: Path) -> Callable[[], Any]:
    from diffusers import QwenImagePipeline

    return lambda: QwenImagePipeline.from_pretrained(pipeline_folder, transformer=None)


def picture(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def write_pictures(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (width, height) in enumerate(sizes):
        picture(number, width, height).save(folder / f"{number:03}.png")
        (folder / f"{number:03}.txt").write_text(CAPTIONS[number % len(CAPTIONS)], encoding="utf-8")
    return folder
