"""What a run's loop works with besides the model and the data."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.events import OnEvent
from autotune.train.checkpoint import Checkpoints
from autotune.train.metrics import Metrics
from autotune.train.monitor import Monitor
from autotune.train.processes import Processes


@dataclass(frozen=True)
class RunContext:
    """What the loop works with besides the model and the data."""

    processes: Processes
    checkpoints: Checkpoints
    metrics: Metrics | None
    """None on all processes but the first."""
    on_event: OnEvent
    monitor: Monitor
    preview: Callable[[int], None]
    """Called on processes that sample, with the number of steps taken."""
    stop_reason: Callable[[], str | None] = lambda: None
    """Why no further step may be taken, besides a signal; None while any may."""
    trace: Path | None = None
    """File to write a torch.profiler trace to; None for no trace."""
