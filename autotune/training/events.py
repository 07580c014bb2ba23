"""What a run tells while it goes on. Plain data: displays import it without importing torch."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StepEvent:
    """One optimizer step."""

    step: int
    """Counted from 1."""
    num_steps: int
    loss: float
    seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class Events:
    """Where progress is told."""

    on_phase: Callable[[str], None] = lambda phase: None
    on_encoded: Callable[[int, int], None] = lambda done, total: None
    on_step: Callable[[StepEvent], None] = lambda event: None
