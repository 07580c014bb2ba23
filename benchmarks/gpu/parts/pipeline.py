"""A Qwen-Image pipeline on disk whose transformer has its full width and random weights; its
other parts are tiny."""

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence import GIB, Evidence

from autotune.models.registry import get_family
from autotune.models.resolve import ResolvedModel, resolve_model
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import ModelRef
from autotune.plan.workload import Workload
from autotune.search.trials import ProcessTrialRunner
from autotune.search.worker import ChildState
from tests.small import write_small_pipeline

FAMILY, FULL_BLOCKS, BYTES_PER_BLOCK, SPARE_BYTES = "qwen-image", 60, 680_000_000, 6 * GIB
MAX_BLOCKS = 12
"""8 GB: to write and read all 60 blocks takes minutes."""
CAPTIONS = ("a red square", "a blue circle on the left")


@dataclass(frozen=True)
class WriteTransformer:
    """Random weights made on the device, quantized by nobody, saved in shards."""

    config: dict[str, Any]
    folder: str
    workload: Workload
    device: str
    precision: str

    def perform(self, _: ChildState) -> dict[str, float]:
        import torch

        from autotune.plan.candidate import Candidate
        from autotune.train.model import load_transformer

        family = get_family(FAMILY)
        started = time.perf_counter()
        settings = Candidate(micro_batch_size=1, checkpointed_blocks=0, precision=self.precision)
        model = ResolvedModel(family, self.config, self.workload.model.name, None)
        transformer: Any = load_transformer(model, settings, torch.device(self.device))[0]
        built = time.perf_counter()
        transformer.save_pretrained(self.folder, max_shard_size="5GB")
        return {"build_seconds": built - started, "save_seconds": time.perf_counter() - built}


def write_pipeline(
    evidence: Evidence, hardware: HardwareProfile, workload: Workload, precision: str
) -> str:
    """The folder; written once, with as many of `MAX_BLOCKS` as the disk has room for."""
    folder = evidence.scratch() / "pipeline"
    if (folder / "ready").exists():
        return str(folder)
    shutil.rmtree(folder, ignore_errors=True)
    write_small_pipeline(FAMILY, folder, CAPTIONS)
    if not evidence.small:
        config = json.loads((folder / "transformer" / "config.json").read_text())
        shutil.rmtree(folder / "transformer")
        room = shutil.disk_usage(folder).free - SPARE_BYTES
        blocks = max(2, min(MAX_BLOCKS, room // BYTES_PER_BLOCK))
        full = {"num_layers": blocks, "joint_attention_dim": config["joint_attention_dim"]}
        with ProcessTrialRunner(hardware, resolve_model(ModelRef.of(FAMILY)), workload) as runner:
            request = WriteTransformer(
                full, str(folder / "transformer"), workload, runner.device, precision
            )
            answer = evidence.ask(runner, request)
        if answer["outcome"] != "ok":
            raise RuntimeError(f"writing the pipeline: {answer['outcome']}: {answer['message']}")
        os.sync()
        evidence.row(
            "checkpoint", blocks=blocks, full_blocks=FULL_BLOCKS, bytes=bytes_of(folder), **answer
        )
    (folder / "ready").touch()
    return str(folder)


def bytes_of(folder: Path) -> int:
    """Of the transformer's files."""
    return sum(path.stat().st_size for path in (folder / "transformer").glob("*.safetensors"))


def drop_from_cache(folder: Path) -> None:
    """Have the system forget what it has read of the transformer's files."""
    for path in (folder / "transformer").glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def workload_on(model: str, workload: Workload) -> Workload:
    """The same work for the model in a folder."""
    return Workload.model_validate(
        {**dict(workload), "model": resolve_model(ModelRef.of(model)).spec}
    )
