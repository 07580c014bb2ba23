"""Rates are measured for real, and whatever fails costs one rate and leaves a note."""

import contextlib
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from autotune.machine import rates
from autotune.machine import rates as measuring
from autotune.machine.catalog import load_catalog
from autotune.machine.probe import measure_rates, read_profile
from autotune.machine.sources import BackgroundLoad
from autotune.plan.hardware import Rate
from tests.builders import BITSANDBYTES
from tests.machine.fleet import machine

UNITS = {
    "matmul": "FLOP/s",
    "attention": "FLOP/s",
    "memory": "B/s",
    "disk": "B/s",
    "page_cache": "B/s",
    "elementwise": "B/s",
    "dequantization": "B/s",
    "operation": "s",
    "process": "B",
}


@pytest.fixture
def small_effort(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = dataclasses.replace(
        rates.BENCHMARK_SIZES["cpu"],
        matmul_shapes=((8, 64, 64), (8, 64, 128)),
        tokens=(16, 32),
        heads=1,
        kernel_elements=2**10,
        copy_bytes=2**16,
        file_bytes=2**18,
        limit_seconds=0.01,
        total_seconds=60.0,
    )
    monkeypatch.setitem(rates.BENCHMARK_SIZES, "cpu", small)


def reports_of(name="no-gpu"):
    reports = []
    measuring.measure(
        read_profile(machine(name)),
        machine(name),
        lambda kind, value: reports.append((kind, value)),
    )
    return reports


def test_a_cpu_is_measured_whole(small_effort):
    reports = reports_of()
    found = [Rate.model_validate_json(value) for kind, value in reports if kind == "rate"]
    assert [value for kind, value in reports if kind == "note"] == []
    assert reports[-1] == ("measuring", "done")
    assert {rate.name for rate in found} == {
        "process.overhead",
        "memory.bandwidth",
        "operation.launch",
        *(
            f"{kernel}.{dtype}"
            for kernel in rates.kernel_names(read_profile(machine("no-gpu")))
            for dtype in ("bf16", "fp32")
        ),
        "matmul.bf16.8x64x64",
        "matmul.fp32.8x64x64",
        "matmul.fp16.8x64x64",
        "matmul.fp8.8x64x64",
        "matmul.int8.8x64x64",
        "matmul.int8.8x64x128",
        "matmul.bf16.8x64x128",
        "matmul.fp32.8x64x128",
        *(
            f"attention.{b}.bf16.{n}"
            for b in ("native", "_native_flash", "_native_math")
            for n in (16, 32)
        ),
        *(f"{place}.{loader}" for place in ("disk", "page_cache") for loader in rates.LOADERS),
    }
    for rate in found:
        assert rate.unit == UNITS[rate.name.split(".")[0]]
        assert math.isfinite(rate.value)


def test_a_failing_kernel_costs_its_own_rate_only(small_effort, monkeypatch):
    def broken(self):
        raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(rates.Meter, "bandwidth", broken)
    reports = reports_of()
    assert ("note", "not measured: memory: CUDA error: no kernel image is available") in reports
    assert sum(kind == "rate" for kind, _ in reports) == 32


@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_first_measurement_that_fails_or_fails_again_ends_nothing(
    small_effort, monkeypatch, calls_before
):
    """It is made once more at the end, to see whether the machine kept its pace."""
    whole, calls = rates.Meter.matmul, []

    def broken(self, dtype, m, k, n):
        calls.append((dtype, m, k, n))
        if calls[0] == calls[-1] and len(calls) != calls_before:
            raise RuntimeError("out of memory")
        return whole(self, dtype, m, k, n)

    monkeypatch.setattr(rates.Meter, "matmul", broken)
    reports = reports_of()
    assert reports[-1] == ("measuring", "done")
    assert sum(kind == "rate" for kind, _ in reports) == 32 + calls_before


def test_what_the_time_does_not_reach_is_said(small_effort, monkeypatch):
    none_left = dataclasses.replace(rates.BENCHMARK_SIZES["cpu"], total_seconds=-1.0)
    monkeypatch.setitem(rates.BENCHMARK_SIZES, "cpu", none_left)
    reports = reports_of()
    assert [json.loads(value)["name"] for kind, value in reports if kind == "rate"] == [
        "process.overhead"
    ]
    assert sum(value.startswith("not measured for lack of time") for _, value in reports) == 32


@BITSANDBYTES
def test_4_bit_weights_are_measured_where_they_work(small_effort):
    profile = read_profile(machine("no-gpu"))
    capabilities = tuple(
        capability.model_copy(update={"available": True})
        if capability.name == "quantization.bnb-nf4"
        else capability
        for capability in profile.capabilities
    )
    reports = []
    measuring.measure(
        profile.model_copy(update={"capabilities": capabilities}),
        machine("no-gpu"),
        lambda *report: reports.append(report),
    )
    names = {json.loads(value)["name"] for kind, value in reports if kind == "rate"}
    assert {f"dequantization.uint8.{dtype}" for dtype in ("bf16", "fp32")} <= names


def test_kernels_are_measured_on_enough_to_outlast_their_launch_and_little_enough_for_small_cards(
    monkeypatch,
):
    """A launch takes a GPU's driver and Python some 5 us; a step charges it by itself."""
    meter = rates.Meter(read_profile(machine("no-gpu")), lambda: None)
    moved = []
    monkeypatch.setattr(meter, "time", lambda call: call())
    monkeypatch.setattr(meter, "rate", lambda name, work, timings, unit: moved.append(work))
    for name in rates.kernel_names(read_profile(machine("no-gpu"))):
        meter.kernel(name, "bf16")
    each = (
        rates.BENCHMARK_SIZES["cuda"].kernel_elements / rates.BENCHMARK_SIZES["cpu"].kernel_elements
    )
    fastest = max(gpu.memory_gb_per_second for gpu in load_catalog()) * 1e9
    assert each * min(moved) / fastest > 4 * 5e-6
    assert each * max(moved) < 2 * rates.BENCHMARK_SIZES["cuda"].copy_bytes  # as the copies take


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_what_a_library_takes_to_load_is_not_taken_for_the_time_of_a_call(monkeypatch, kind):
    meter = rates.Meter(read_profile(machine("no-gpu")), lambda: None)
    meter.kind, meter.sizes = kind, dataclasses.replace(meter.sizes, limit_seconds=0.01)
    monkeypatch.setattr(meter, "synchronize", lambda: None)
    load = iter([0.05])
    assert statistics.median(meter.time(lambda: time.sleep(next(load, 0.0)))) < 0.04


def child(code, **options):
    return measure_rates(
        read_profile(machine("h100-sxm")), lambda _: None, (sys.executable, "-c", code), **options
    )


RATE = Rate(name="memory.bandwidth", value=3e12, unit="B/s", spread=0.01, num_samples=9)
REPORT = f"import json; print(json.dumps({{'rate': {RATE.model_dump_json()!r}}}), flush=True)"


def test_a_child_that_dies_keeps_what_it_reported():
    profile = child(
        f"{REPORT}; print(json.dumps({{'measuring': 'attention x'}}), flush=True); import os; "
        "os.abort()"
    )
    assert profile.rates == (RATE,)
    assert any("in attention x" in note for note in profile.notes)


def test_a_child_that_hangs_is_ended():
    profile = child(f"{REPORT}; import time; time.sleep(60)", limit_seconds=1.0)
    assert profile.rates == (RATE,)
    assert any("ended early" in note for note in profile.notes)


@pytest.mark.parametrize("ends", ["the terminal's interrupt", "the reader's death"])
def test_a_child_whose_probe_has_ended_ends_without_a_word(ends):
    act = "signal.raise_signal(signal.SIGINT)" if "interrupt" in ends else "report('note', 'x')"
    code = (
        "import signal; from autotune.machine import rates as m; m.measure = lambda p, s, "
        f"report: {act}; m.main()"
    )
    pipe = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen((sys.executable, "-c", code), **pipe) as started:
        started.stdout.close()
        started.stdin.write(read_profile(machine("no-gpu")).model_dump_json().encode())
        started.stdin.close()
        assert started.stderr.read() == b""


def test_a_killed_measurement_of_the_disk_leaves_no_file(small_effort, monkeypatch, tmp_path):

    def time_calls(read, **options):
        read()
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        raise KeyboardInterrupt

    monkeypatch.setattr(rates, "time_calls", time_calls)
    with pytest.raises(KeyboardInterrupt):
        rates.Meter(read_profile(machine("no-gpu")), lambda: None).disk("pread", cold=True)


def test_names_of_any_script_reach_the_child_and_bytes_that_are_no_text_cost_nothing():
    code = (
        "import json, sys; cpu = json.load(sys.stdin.buffer)['host']['cpu']; "
        "sys.stdout.buffer.write(b'\\xff\\n')"
    )
    report = "print(json.dumps({'note': cpu})); print(json.dumps({'measuring': 'done'}))"
    profile = read_profile(machine("no-gpu"))
    named = profile.changed(host=profile.host.changed(cpu="\N{GREEK CAPITAL LETTER OMEGA} 3A6000"))
    measured = measure_rates(named, lambda _: None, (sys.executable, "-c", f"{code}; {report}"))
    assert measured.notes[-1] == named.host.cpu


def test_a_child_that_chatters_is_understood():
    profile = child(
        f"print('Warning: x'); print('[1]'); print('{{}}'); {REPORT}; print(json.dumps({{'noisy': "
        f"'why'}}))"
    )
    assert profile.rates == (RATE,)
    assert profile.noisy
    assert "noisy: why" in profile.notes


def test_other_processes_on_the_cpu_are_noise(small_effort, monkeypatch):
    monkeypatch.setattr(measuring.BackgroundLoad, "share", lambda self: 0.4)
    assert ("noisy", "other processes took 40% of the CPU") in reports_of()


def test_own_work_is_no_other_process():
    others = BackgroundLoad()
    begin = time.process_time()
    while time.process_time() < begin + 0.2:
        pass
    busy, _, own = (
        now - before for now, before in zip(others._times(), others._begin, strict=True)
    )
    assert own >= 0.15
    assert 0 <= others.share() <= 1
    assert busy >= own - 0.1


@pytest.mark.parametrize(
    ("spreads", "again", "noisy"),
    [
        ((0.01, 0.02, 0.03), 1.0, False),
        ((0.01, 0.3, 0.4), 1.0, True),
        ((0.01, 0.01, 0.01), 1.2, True),
    ],
)
def test_disagreement_is_noise(spreads, again, noisy):
    found = tuple(
        Rate(name=f"r{i}", value=1.0, unit="s", spread=spread, num_samples=9)
        for i, spread in enumerate(spreads)
    )
    repeated = Rate(name="r0", value=again, unit="s", spread=0.0, num_samples=9)
    assert rates.is_noisy(found, repeated) is noisy


def test_a_small_kernel_is_loaded_before_it_is_captured(monkeypatch):
    """A CUDA graph cannot hold the loading of a kernel, and CUDA loads it when it first runs."""
    told = []

    @contextlib.contextmanager
    def capture(_):
        told.append("captured")
        yield

    def add(*_, out):
        told.append("added")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch, "add", add)
    rates.Meter(read_profile(machine("no-gpu")), lambda: None).small("kernel.least")
    assert told[:3] == ["added", "captured", "added"]
