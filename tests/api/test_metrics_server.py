"""Prometheus finds a run's numbers while it trains, at this machine's own address alone."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from autotune.api.metrics_server import GAUGES, PROMISED, MetricsServer
from autotune.errors import InvalidInput
from autotune.schema.events import Event, RunStarted
from tests.reporting.page.pages import golden_plan, steps_of

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


def test_each_number_of_the_last_step_is_a_gauge_and_events_are_passed_on() -> None:
    port, plan, seen = free_port(), golden_plan(), list[Event]()
    first, last = steps_of(2)
    last = last.changed(
        validation_loss=0.24, base_validation_loss=0.25, gradient_spikes=3, loss_scale=1024.0
    )
    with MetricsServer(port, seen.append) as server:
        assert scrape(port) == {}, "nothing is known yet"
        started = RunStarted(plan=plan)
        for event in (started, first):
            server(event)
        assert "autotune_validation_loss" not in scrape(port), (
            "what was not measured is absent, not 0"
        )
        server(last)
        found = scrape(port)
    assert seen == [started, first, last]
    known = {name for name in GAUGES if getattr(last, name) is not None}
    assert found == {
        **{f"autotune_{name}": float(getattr(last, name)) for name in known},
        PROMISED: float(plan.frozen.expected.run_memory_bytes),
    }
    assert known == GAUGES.keys() - {"gpu_utilization"}
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_only_this_machine_is_answered() -> None:
    with MetricsServer(port := free_port(), lambda event: None), socket.socket() as other:
        assert other.connect_ex(("127.0.0.2", port)) != 0, "it listens at one address"


def test_a_port_that_is_taken_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(InvalidInput, match="cannot be served at port"),
    ):
        MetricsServer(server.getsockname()[1], lambda event: None)


def test_the_dashboard_draws_what_is_served() -> None:
    served = {f"autotune_{name}" for name in GAUGES} | {PROMISED}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    drawn = {target["expr"] for panel in panels for target in panel["targets"]}
    assert drawn <= served
    assert served - drawn <= {"autotune_step", "autotune_num_steps"} | drawn
    assert len(panels) >= 6


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no prometheus")
def test_prometheus_itself_scrapes_a_run(tmp_path: Path) -> None:
    port, own = free_port(), free_port()
    target = {
        "job_name": "autotune",
        "scrape_interval": "1s",
        "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
    }
    (tmp_path / "prometheus.yml").write_text(
        json.dumps({"scrape_configs": [target]})
    )  # JSON is YAML
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml",
    f"--storage.tsdb.path={tmp_path}/data",
               f"--web.listen-address=127.0.0.1:{own}"]  # fmt: skip
    with MetricsServer(port, lambda event: None) as server:
        server(steps_of(7)[-1])
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                assert _wait_for_value(own, "autotune_step") == 7
            finally:
                process.terminate()


def _wait_for_value(port: int, name: str) -> float:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{port}/api/v1/query?query={name}", timeout=60
            ) as answer:
                if found := json.load(answer)["data"]["result"]:
                    return float(found[0]["value"][1])
        except (OSError, KeyError):
            pass
        time.sleep(0.3)
    raise AssertionError("Prometheus found nothing")
