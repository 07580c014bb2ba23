"""Rates are measured for real, within their limits; what fails costs one rate and leaves a note."""

import dataclasses
import math
import os
import signal
import sys
from statistics import median

import pytest
from hypothesis import given, strategies as st

from autotune.machine import rates
from autotune.machine.clock import MAX_SAMPLES, BackgroundLoad, is_noisy, time_calls
from autotune.machine.probe import measure_rates, read_profile
from autotune.machine.rates import BENCHMARK_SIZES, Meter
from autotune.plan.hardware import Rate
from tests.builders import OLD_TORCH
from tests.machine.fleet import machine

UNITS = {
    **dict.fromkeys(("matmul", "attention"), "FLOP/s"),
    **dict.fromkeys(("memory", "disk", "page_cache", "elementwise", "dequantization"), "B/s"),
    **{"operation": "s", "process": "B"},
}
CPU = read_profile(machine("no-gpu"))


@given(st.floats(1e-7, 100), st.floats(0.01, 1))
def test_measurements_end_in_time(call_seconds, limit_seconds):
    now = 0.0

    def call():
        nonlocal now
        now += call_seconds

    seconds = time_calls(call, limit_seconds=limit_seconds, clock=lambda: now)
    assert 1 <= len(seconds) <= MAX_SAMPLES
    assert abs(median(seconds) / call_seconds - 1) < 1e-6
    assert now <= 5 * limit_seconds + 3 * call_seconds + 2e-3


def test_first_calls_warm_up():
    order, durations, now = [], iter([5.0, *[1.0] * 100]), 0.0

    def call():
        nonlocal now
        now += next(durations)
        order.append("call")

    options = {"setup": lambda: order.append("ready"), "clock": lambda: now}
    seconds = time_calls(call, limit_seconds=3.0, **options)
    assert median(seconds) == 1.0
    assert order == ["ready", "call"] * (len(order) // 2)


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = dataclasses.replace(
        BENCHMARK_SIZES["cpu"],
        matmul_shapes=((8, 64, 64), (8, 64, 128)),
        **{"tokens": (16, 32), "heads": 1, "kernel_elements": 2**10, "copy_bytes": 2**16},
        **{"file_bytes": 2**18, "limit_seconds": 0.01, "total_seconds": 60.0},
    )
    monkeypatch.setitem(BENCHMARK_SIZES, "cpu", sizes)


def reports_of_cpu():
    reports = []
    rates.measure(CPU, machine("no-gpu"), lambda *report: reports.append(report))
    return reports


@OLD_TORCH
def test_a_cpu_is_measured_whole(small):
    reports = reports_of_cpu()
    found = [Rate.model_validate_json(value) for kind, value in reports if kind == "rate"]
    assert [value for kind, value in reports if kind == "note"] == []
    assert reports[-1] == ("measuring", "done")
    kernels, backends = rates.kernel_names(CPU), ("native", "_native_flash", "_native_math")
    assert {rate.name for rate in found} == {
        *("process.overhead", "memory.bandwidth", "operation.launch"),
        *(f"{kernel}.{dtype}" for kernel in kernels for dtype in ("bf16", "fp32")),
        *(f"matmul.{dtype}.8x64x64" for dtype in ("bf16", "fp32", "fp16", "fp8", "int8")),
        *(f"matmul.{dtype}.8x64x128" for dtype in ("bf16", "fp32", "int8")),
        *(f"attention.{backend}.bf16.{tokens}" for backend in backends for tokens in (16, 32)),
        *(f"{place}.{loader}" for place in ("disk", "page_cache") for loader in rates.LOADERS),
    }
    for rate in found:
        assert rate.unit == UNITS[rate.name.split(".")[0]]
        assert math.isfinite(rate.value)


@OLD_TORCH
def test_failing_kernels_cost_one_rate(small, monkeypatch):
    def broken(self):
        raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(Meter, "bandwidth", broken)
    monkeypatch.setattr(BackgroundLoad, "share", lambda self: 0.4)
    reports = reports_of_cpu()
    assert ("note", "not measured: memory: CUDA error: no kernel image is available") in reports
    assert ("noisy", "other processes took 40% of the CPU") in reports
    assert sum(kind == "rate" for kind, _ in reports) == 32


def child(code, profile=CPU, **options):
    return measure_rates(profile, lambda _: None, (sys.executable, "-c", code), **options)


RATE = Rate(name="memory.bandwidth", value=3e12, unit="B/s", spread=0.01, num_samples=9)
REPORT = f"import json; print(json.dumps({{'rate': {RATE.model_dump_json()!r}}}), flush=True)"


@pytest.mark.parametrize(
    ("ends", "note"),
    [("import os; os.abort()", "in attention x"), ("import time; time.sleep(60)", "ended early")],
)
def test_dying_children_keep_their_reports(ends, note):
    begun = "print(json.dumps({'measuring': 'attention x'}), flush=True)"
    profile = child(f"{REPORT}; {begun}; {ends}", limit_seconds=1.0)
    assert profile.rates == (RATE,)
    assert any(note in each for each in profile.notes)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGPIPE])
def test_child_ends_silently_with_its_probe(stop, tmp_path):
    (tmp_path / "profile").write_text(CPU.model_dump_json())
    reading, writing = os.pipe()
    os.close(reading)
    if (process := os.fork()) == 0:
        os.dup2(os.open(tmp_path / "error", os.O_CREAT | os.O_WRONLY), 2)
        sys.stdin = os.fdopen(os.open(tmp_path / "profile", os.O_RDONLY))
        sys.stdout = os.fdopen(writing, "w")
        act = signal.raise_signal if stop == signal.SIGINT else lambda _: None
        rates.measure = lambda profile, system, report: (act(stop), report("note", "x"))
        rates.main()
        os._exit(0)
    os.close(writing)
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == stop
    assert (tmp_path / "error").read_bytes() == b""


def test_killed_measurements_leave_no_file(small, monkeypatch, tmp_path):
    def interrupted(read, **options):
        read()
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        raise KeyboardInterrupt

    monkeypatch.setattr(rates, "time_calls", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Meter(CPU, lambda: None).disk("pread", cold=True)


@pytest.mark.parametrize(
    ("spread", "again", "noisy"), [(0.02, 1.0, False), (0.3, 1.0, True), (0.01, 1.2, True)]
)
def test_disagreement_is_noise(spread, again, noisy):
    first = Rate(name="r0", value=1.0, unit="s", spread=0.01, num_samples=9)
    found = (first, first.changed(name="r1", spread=spread))
    assert is_noisy(found, first.changed(value=again)) is noisy
