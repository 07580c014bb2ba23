"""Serves the numbers of a run in Prometheus' format while it trains, on this machine's loopback
address alone.
"""

import threading
from contextlib import AbstractContextManager
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from autotune.errors import InvalidInput
from autotune.schema import Event, OnEvent, RunStarted, StepFinished

ADDRESS = "127.0.0.1"
GAUGES = {
    "step": "Optimizer steps taken.",
    "num_steps": "Optimizer steps of the whole run.",
    "loss": "Loss of the last step.",
    "validation_loss": "Loss on held-out images when it was last measured.",
    "base_validation_loss": "The same without the adapter.",
    "learning_rate": "Learning rate of the last step.",
    "gradient_norm": "Norm of the last step's gradient before clipping.",
    "gradient_spikes": "Gradients of the run far above those before them.",
    "nonfinite_gradients": "Gradients of the run that were not finite.",
    "overflowed_gradients": "Gradients of the run that overflowed fp16, whose steps were skipped.",
    "loss_scale": "Factor of the next step's losses, in fp16.",
    "seconds": "Wall time of the last step.",
    "data_seconds": "Part of it that was spent waiting for data.",
    "images_per_second": "Speed of the last step.",
    "memory_bytes": "Memory that the process holds between steps.",
    "gpu_utilization": "Share of time that the GPU computed, from 0 to 1.",
    "remaining_seconds": "Time until the last step.",
}
"""Fields of a step, each a gauge called `autotune_FIELD`, with its help text."""
PROMISED = "autotune_promised_memory_bytes"


class MetricsServer(AbstractContextManager["MetricsServer"]):
    """A listener to a run's events that answers `GET /metrics` until it is closed.

    Args:
        port: to listen at.
        on_event: is told every event, too.

    Raises:
        InvalidInput: the extra `metrics` is not installed, or the port cannot be taken.
    """

    def __init__(self, port: int, on_event: OnEvent) -> None:
        if find_spec("prometheus_client") is None:
            raise InvalidInput(
                "serving metrics needs prometheus_client",
                hint="install it: pip install 'lora-autotune[metrics]'",
            )
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self.on_event, registry = on_event, CollectorRegistry()
        self._make: Any = lambda name, text: Gauge(name, text, registry=registry)
        self._gauges: dict[
            str, Any
        ] = {}  # each from its first value on: what is unknown is absent, not 0
        try:
            self._server, self._thread = start_http_server(port, addr=ADDRESS, registry=registry)
        except (OSError, OverflowError) as error:
            raise InvalidInput(
                f"metrics cannot be served at port {port}: {error}",
                hint="name another: --metrics-port PORT",
            ) from error

    def __call__(self, event: Event) -> None:
        """Pass the event on, and keep its numbers."""
        self.on_event(event)
        if isinstance(event, RunStarted):
            self._set(
                PROMISED,
                "Memory that the plan promised.",
                event.plan.frozen.expected.run_memory_bytes,
            )
        elif isinstance(event, StepFinished):
            for name, text in GAUGES.items():
                if (value := getattr(event, name)) is not None:
                    self._set(f"autotune_{name}", text, value)

    def _set(self, name: str, text: str, value: float) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._make(name, text)
        self._gauges[name].set(value)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        assert isinstance(self._thread, threading.Thread)
        self._thread.join()
