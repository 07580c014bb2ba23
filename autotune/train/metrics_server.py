"""`--metrics-port`: the numbers of a run for Prometheus, on this machine's loopback alone."""

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec

from autotune.errors import InvalidInput
from autotune.events import Event, OnEvent, RunStarted, StepFinished


@contextlib.contextmanager
def serve_metrics(port: int, on_event: OnEvent) -> Iterator[OnEvent]:
    """A listener to a run's events that passes them on; each number of a step is a gauge.

    What is not known has no gauge. Raises InvalidInput if the extra `metrics` is not installed, or
    the port cannot be taken.
    """
    if find_spec("prometheus_client") is None:
        raise InvalidInput(
            "serving metrics needs prometheus_client",
            hint="install it: pip install 'lora-autotune[metrics]'",
        )
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    registry, gauges = CollectorRegistry(), dict[str, Gauge]()

    def keep(name: str, text: str | None, value: float) -> None:
        if name not in gauges:
            gauges[name] = Gauge(f"autotune_{name}", text or name, registry=registry)
        gauges[name].set(value)

    def listen(event: Event) -> None:
        on_event(event)
        if isinstance(event, RunStarted):
            promised = event.plan.frozen.expected.run_memory_bytes
            keep("promised_memory_bytes", "Memory that the plan promised.", promised)
        elif isinstance(event, StepFinished):
            for name, field in StepFinished.model_fields.items():
                if isinstance(value := getattr(event, name), int | float):
                    keep(name, field.description, value)

    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    except (OSError, OverflowError) as error:
        raise InvalidInput(
            f"metrics cannot be served at port {port}: {error}",
            hint="name another: --metrics-port PORT",
        ) from error
    try:
        yield listen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
