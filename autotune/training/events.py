"""What a run tells while it goes on. Plain data: displays import it without importing torch."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StepEvent:
    """One optimizer step: a line of `metrics.jsonl`."""

    step: int
    """Counted from 1."""
    num_steps: int
    loss: float
    learning_rate: float
    gradient_norm: float
    """Before clipping."""
    seconds: float
    data_seconds: float
    """Spent waiting for data, part of `seconds`."""
    images_per_second: float
    memory_bytes: int
    """Held between steps."""
    gpu_utilization: float | None = None
    """In [0, 1]; None without NVML."""
    remaining_seconds: float | None = None
    """Until the last step, previews and checkpoints on the way included; None after the first step of a start."""


@dataclass(frozen=True)
class RunEvents:
    """Where progress is told."""

    on_phase: Callable[[str], None] = lambda phase: None
    on_encoded: Callable[[int, int], None] = lambda done, total: None
    on_step: Callable[[StepEvent], None] = lambda event: None
    on_warning: Callable[[str], None] = lambda message: None
