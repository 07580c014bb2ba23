"""Seconds until the transformer with its adapter is ready, by every loader, from cold and warm
page cache, plain and quantized; with the peaks of device and host. (Random weights in every
format: `load_seconds` of the part truth.)"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence import Evidence, begin, precision_of, workload_of
from pipeline import FAMILY, bytes_of, drop_from_cache, workload_on, write_pipeline
from truth import candidate_of, why_closed

from autotune.machine.probe import cached_profile
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import ModelRef
from autotune.plan.workload import Workload
from autotune.search.trials import ProcessTrialRunner
from autotune.search.worker import ChildState
from autotune.weights.tensors import LOADERS


@dataclass(frozen=True)
class LoadOnce:
    """Build, load, quantize, add the adapter; nothing else."""

    model: str
    workload: Workload
    candidate: Candidate
    device: str

    def perform(self, _: ChildState) -> dict[str, Any]:
        import torch

        from autotune.system.memory import host_peak_bytes
        from autotune.train.model import load_model

        on_gpu, device = self.device.startswith("cuda"), torch.device(self.device)
        if on_gpu:
            torch.zeros(1, device=device)  # CUDA's own start is not loading
        resolved = resolve_model(ModelRef.of(self.model))
        started = time.perf_counter()
        model = load_model(resolved, self.workload, self.candidate, device, seed=0)
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        del model
        return {
            "seconds": seconds,
            "device_peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
            "host_peak_bytes": host_peak_bytes(),
        }


def load(
    evidence: Evidence,
    hardware: HardwareProfile,
    model: str,
    chosen: Candidate,
    workload: Workload,
    **about: Any,
) -> None:
    """One load in a fresh process, as a row."""
    with ProcessTrialRunner(hardware, resolve_model(ModelRef.of(model)), workload) as runner:
        answer = evidence.ask(runner, LoadOnce(model, workload, chosen, runner.device))
    evidence.row("load", storage=chosen.quantization, loader=chosen.loader, **about, **answer)


def main() -> None:
    """Measure the part."""
    import torch

    evidence = begin("loading", __doc__)
    hardware = cached_profile()
    precision = precision_of(hardware)
    plain = workload_of(evidence.model(FAMILY), evidence.size(1024), rank=16, batch=1)
    folder = write_pipeline(evidence, hardware, plain, precision)
    workload, size = workload_on(folder, plain), bytes_of(Path(folder))
    cases = [(loader, cache, storage) for storage in ("none", "torchao-int8") for cache in ("cold",
    "warm")
             for loader in LOADERS]  # fmt: skip
    plain_settings = candidate_of("recompute=1", workload, hardware)
    for loader, cache, storage in evidence.each(evidence.sliced(cases)):
        chosen = Candidate.model_validate(
            {**dict(plain_settings), "quantization": storage, "loader": loader}
        )
        device = torch.device(hardware.device.torch_name)
        if why := why_closed(hardware, chosen) or LOADERS[loader].why_not(device):
            evidence.skip(f"{loader} {cache} {storage}", why)
            continue
        if cache == "cold":
            drop_from_cache(Path(folder))
        load(evidence, hardware, folder, chosen, workload, cache=cache, bytes=size)


if __name__ == "__main__":
    main()
