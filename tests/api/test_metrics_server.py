"""Prometheus finds a run's numbers while it trains, at this machine's own address alone."""

import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from autotune.errors import InvalidInput
from autotune.events import Event, RunStarted
from autotune.train.metrics import serve_metrics
from tests.report.page.pages import golden_plan, steps_of


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


def test_gauges_show_the_last_step():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        with pytest.raises(InvalidInput, match="cannot be served at port"):
            serve_metrics(port, lambda event: None).__enter__()
    plan, seen = golden_plan(), list[Event]()
    first, last = steps_of(2)
    last = last.changed(validation_loss=0.24, gradient_spikes=3, loss_scale=1024.0)
    with serve_metrics(port, seen.append) as listen, socket.socket() as other:
        assert scrape(port) == {}, "nothing is known yet"
        assert other.connect_ex(("127.0.0.2", port)) != 0, "it listens at one address"
        started = RunStarted(plan=plan)
        for event in (started, first):
            listen(event)
        assert "autotune_validation_loss" not in scrape(port)
        listen(last)
        found = scrape(port)
    assert seen == [started, first, last]
    for name in ("loss", "validation_loss", "gradient_spikes", "loss_scale"):
        assert found[f"autotune_{name}"] == getattr(last, name)
    assert found["autotune_promised_memory_bytes"] == plan.frozen.expected.run_memory_bytes
    with pytest.raises(urllib.error.URLError):
        scrape(port)
