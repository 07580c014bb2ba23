"""Ground truth on a CPU: what PyTorch's own profiler says a real training step allocates, and
how long steps take."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from autotune.knobs.modulation import find_modulation_ahead, take_loaded_layers
from autotune.knobs.quantized_layers import torch_dtype
from autotune.models.adapter import add_adapter
from autotune.models.family import PRIOR, Batch, Family
from autotune.plan.candidate import Candidate
from autotune.plan.workload import Workload
from autotune.train.model import TrainingModel, apply_knobs
from autotune.train.optimizer import AdapterOptimizer
from autotune.train.step import (
    ConditionedImage,
    ModulationWindows,
    Noising,
    optimizer_step,
    pick_inputs,
    to_device,
)
from autotune.weights.stream import cast_as_loaded


@dataclass(frozen=True)
class Truth:
    """One candidate, really run."""

    peak_bytes: int
    """Everything live at the highest moment of a step: frozen weights, buffers, adapter,
    optimizer and the rest."""
    pass_peak_bytes: int
    """Of that, what the step itself allocated."""
    step_seconds: tuple[float, ...]
    """Time of the process on its core: other processes of the machine don't count."""
    loss: float
    """Of the last step."""


def open_blocks(transformer: Any) -> None:
    """Give what starts as zero small random values: closed blocks would let neither loss nor
    gradients through."""
    for parameter in transformer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)


def build(
    family: Family, config: Mapping[str, Any], workload: Workload, candidate: Candidate
) -> tuple[Any, list[Any]]:
    """A real transformer with random weights, the candidate's settings and an adapter; and the
    adapter's parameters."""
    dtype = torch_dtype(candidate.precision)
    torch.manual_seed(0)
    transformer = family.build_transformer(config)
    open_blocks(transformer)
    cast_as_loaded(transformer.eval(), dtype)  # as loaded; the adapter alone is in training mode
    if candidate.modulation == "ahead":  # before quantization, as loading leaves these layers out
        take_loaded_layers(family, transformer)
    apply_knobs(
        family,
        transformer,
        candidate.model_copy(update={"modulation": "resident"}),
        needs_reload=True,
    )
    parameters = add_adapter(family, transformer, workload, dtype)
    apply_knobs(family, transformer, candidate, needs_reload=False)
    return transformer, parameters


def batches(
    family: Family, config: Mapping[str, Any], workload: Workload, candidate: Candidate
) -> list[Batch]:
    """Micro-batches of one optimizer step, of the largest bucket."""
    bucket, tokens = workload.largest_bucket, workload.max_text_tokens
    shapes = family.sample_shapes(config, bucket, tokens, workload.num_control_images)
    dtype = torch_dtype(candidate.precision)
    size = candidate.micro_batch_size
    generator = torch.Generator().manual_seed(0)
    sample = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }
    if workload.base_passes:
        sample[PRIOR] = torch.ones(())
    return [family.collate([sample] * size) for _ in range(workload.effective_batch_size // size)]


def storage_bytes(tensors: Any) -> int:
    """Bytes behind `tensors`, each storage counted once; quantized tensors by what they are made
    of."""
    plain = [part for tensor in tensors for part in read_parts(tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in plain}.values())


def read_parts(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors that a tensor is made of: torchao's are wrappers, bitsandbytes' have
    more as attributes."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    if names:
        return [getattr(tensor, name) for name in names]
    state = getattr(tensor, "quant_state", None)
    nested = (
        (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
        if state
        else ()
    )
    scales = getattr(tensor, "SCB", None)
    return [tensor, *nested, *(() if scales is None else (scales,))]


def memory_events(profiler: Any) -> list[int]:
    """Signed bytes of every allocation and free, in order, from the profiler's own records."""
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def _windows(
    family: Family, transformer: Any, workload: Workload, candidate: Candidate, batch: Batch
) -> ModulationWindows | None:
    """Of modulations that the candidate has computed ahead; all images are alike."""
    ahead = find_modulation_ahead(transformer)
    if ahead is None:
        return None
    dtype, device, size = (
        torch_dtype(candidate.precision),
        torch.device("cpu"),
        workload.effective_batch_size,
    )
    model = TrainingModel(family, transformer, [], device, dtype, family.noise)
    image = ConditionedImage(
        batch["latents"].shape[1:], pick_inputs(model, {k: v[0] for k, v in batch.items()})
    )
    place = partial(to_device, device=device, dtype=dtype)
    return ModulationWindows(model, ahead, Noising(), lambda _: [image] * size, size, 0, place)


class RealSteps:
    """One candidate's real training steps, each with the next number."""

    def __init__(
        self, family: Family, config: Mapping[str, Any], workload: Workload, candidate: Candidate
    ) -> None:
        self._make_batches = partial(batches, family, config, workload, candidate)
        self._family, self._size = family, workload.effective_batch_size
        self.transformer, parameters = build(family, config, workload, candidate)
        self.optimizer = AdapterOptimizer(
            parameters,
            learning_rate=1e-4,
            weight_decay=1e-3,
            max_grad_norm=1.0,
            choice=workload.optimizer,
            ema_decay=workload.ema_decay,
        )
        self._windows = _windows(
            family, self.transformer, workload, candidate, self._make_batches()[0]
        )
        self._number = 0

    def take(self) -> float:
        """Take a step; returns its loss."""
        if self._windows:
            self._windows.prepare(self._number)
        outcome = optimizer_step(
            self._family,
            self.transformer,
            self.optimizer,
            self._make_batches(),
            effective_batch_size=self._size,
            step=self._number,
        )
        self._number += 1
        return outcome.loss

    def timed(self) -> tuple[float, float]:
        """Take a step; returns the process's own seconds and the loss."""
        start = time.process_time()
        loss = self.take()
        return time.process_time() - start, loss

    def profiled(self) -> int:
        """Take a step; returns the most bytes that were live of what it allocated."""
        level = peak = 0
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.take()
        for size in memory_events(profiler):
            level += size
            peak = max(peak, level)
        return peak

    def resident_bytes(self) -> int:
        # bitsandbytes' int8 layers keep their scales in a state of their own once they have run.
        modules = self.transformer.modules()
        values = [
            v for m in modules for of in (m, vars(m).get("state")) if of for v in vars(of).values()
        ]
        attributes = [value for value in values if isinstance(value, torch.Tensor)]
        kept = [*self.transformer.parameters(), *self.transformer.buffers(), *attributes]
        return storage_bytes([*kept, *self.optimizer.live_tensors(self.transformer)])


def run(
    family: Family,
    config: Mapping[str, Any],
    workload: Workload,
    candidate: Candidate,
    *,
    num_timed: int = 3,
) -> Truth:
    """A warm-up step, one profiled for memory, then `num_timed` timed ones."""
    steps = RealSteps(family, config, workload, candidate)
    steps.take()
    pass_peak_bytes = steps.profiled()
    timed = [steps.timed() for _ in range(num_timed)]
    loss = timed[-1][1] if timed else 0.0
    peak_bytes = steps.resident_bytes() + pass_peak_bytes
    return Truth(peak_bytes, pass_peak_bytes, tuple(seconds for seconds, _ in timed), loss)
