"""Plans and estimates for machines that are not here: predictions alone, and said to be so."""

import json
import subprocess
import sys

import pytest

from autotune.api import estimate
from autotune.errors import InvalidInput
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import KNOBS
from autotune.machine.probe import hardware_for, hardware_named, limit_memory
from autotune.plan.file import load_plan
from autotune.plan.prediction import Estimate
from autotune.plan.request import PlanRequest
from autotune.plan.workload import WorkloadRequest
from autotune.search.request import ResolvedRequest, build_space
from tests.conftest import autotune_here
from tests.search.machines import make_plan

SMALL = WorkloadRequest(resolution=(512, 512), effective_batch_size=2)


def test_misfit_estimates_say_so(capfd):
    asked = "--model qwen-image --hardware nvidia-rtx-4090 --resolution 512x768 --json"
    process = autotune_here(capfd, "estimate", *asked.split())
    assert process.returncode == 0, process.stderr
    told = "tracing the model note planning for nvidia-rtx-4090 with 64 GiB of system RAM"
    assert " ".join(process.stderr.split()) == told
    answer = json.loads(process.stdout)
    assert answer.pop("schema_version") == 1
    estimate = Estimate.model_validate_json(json.dumps(answer))
    assert not estimate.fits
    assert estimate.run_memory_bytes > 38 * 2**30  # 20.4 billion weights of two bytes, and more
    assert json.loads(process.stdout)["step_seconds"] > 0
    bucket = estimate.workload.buckets[0]
    assert (bucket.width_px, bucket.height_px) == (512, 768)


def test_overflowing_models_are_planned_fp32():
    request = PlanRequest(model="kandinsky5-image-lite", **SMALL.given)

    def precisions(request: PlanRequest) -> object:
        asked = ResolvedRequest.build(request, needs_weights=False)
        context = TuningContext(hardware_for("T4"), asked.model.family, asked.workload)
        return build_space(request, context).choices["precision"]

    assert precisions(request) == ("fp32",)
    assert precisions(request.changed(pins=(("precision", "fp16"),))) == ("fp16",)


@pytest.mark.slow
@pytest.mark.parametrize(("card", "quantization"), [("5080", "torchao-int8"), ("5090", "none")])
def test_qwen_fits_without_swap(card, quantization):
    exact = {"modulation": "ahead", "norm_rope": "compiled"}
    settings = {"hardware": card, "quantization": quantization, "resolution": "1024"}
    for levers, fits in ((exact, True), ({"modulation": "resident"}, False)):
        found = estimate("qwen-image", **settings, **levers, checkpointed_blocks=59)
        assert found.fits is fits


COUNTING = """
import atexit, json, sys
from pathlib import Path
from autotune.system.process import prepare_process
prepare_process(only_predicts=True)
from autotune.cost import trace
traces, trace_pass = [], trace.trace_pass

def counted(*known, **options):
    traces.append(options)
    return trace_pass(*known, **options)

def tell():
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    modules = [name for name in sys.modules if sys.modules[name]]
    path.write_text(json.dumps({"mib": peak, "traces": len(traces), "modules": modules}))

path = Path(sys.argv.pop())
trace.trace_pass = counted
atexit.register(tell)
from autotune.cli.app import main
main()
"""


@pytest.mark.slow
def test_a_prediction_loads_and_traces_little(tmp_path):
    plan, told = tmp_path / "plan.yaml", tmp_path / "told.json"
    asked = "plan --model kandinsky5-image-lite --hardware nvidia-rtx-4090 --resolution 256"
    asked += f" --batch-size 1 --pin quantization=none -o {plan}"
    command = [sys.executable, "-c", COUNTING, *asked.split(), str(told)]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    frozen = load_plan(plan).frozen
    assert (frozen.expected.evidence, frozen.trials) == ("predicted", ())
    assert frozen.expected.run_memory_bytes <= frozen.hardware.budget_bytes
    assert frozen.hardware.device_name == "NVIDIA GeForce RTX 4090"
    assert {reason.knob for reason in frozen.reasons} >= {*(knob.name for knob in KNOBS), "caching"}
    assert "(predicted)" in process.stdout
    assert all(len(line) <= 80 for line in process.stdout.splitlines() if str(plan) not in line)
    found = json.loads(told.read_text())
    assert found["traces"] <= 13
    assert found["mib"] < 1e9 / 2**20  # CUDA's build of torch alone takes 604
    needless = {"bitsandbytes", "scipy", "triton", "torch._inductor.compile_fx"}
    assert not needless.intersection(found["modules"])
    assert len(found["modules"]) < 4400


@pytest.mark.slow
def test_weights_are_shared_if_needed():
    """A model of 12.2 GB fits an RTX 4090 whole, and a device of 10 GiB only sharded."""
    card = hardware_named("nvidia-rtx-4090")
    work = WorkloadRequest(resolution=(512, 512), effective_batch_size=4)
    request = PlanRequest(
        model="kandinsky5-image-lite",
        **work.given,
        pins=(("quantization", "none"), ("attention", "native")),
        hardware="another",
        num_gpus=4,
    )
    small = limit_memory(card, PlanRequest(max_memory="10GiB"))
    whole, shared = make_plan(request, card).frozen, make_plan(request, small).frozen
    assert (whole.hardware.num_processes, whole.hardware.strategy) == (4, "ddp")
    assert shared.hardware.strategy == "fsdp2"
    assert whole.workload.effective_batch_size == shared.workload.effective_batch_size == 4
    assert whole.settings.micro_batch_size == shared.settings.micro_batch_size == 1
    assert shared.expected.peak_memory_bytes < 10 << 30
    with pytest.raises(InvalidInput, match="cannot be shared evenly by 3"):
        make_plan(request.changed(num_gpus=3), card)


@pytest.mark.slow
def test_blocks_are_swapped_where_faster():
    """Qwen-Image in 4 bits fits in 10.5 GiB, and no step beside it; in 16 bits it fits an H200."""
    work = WorkloadRequest(resolution=(512, 512), effective_batch_size=1, quality="compact")
    request = PlanRequest(model="qwen-image", **work.given, hardware="another")
    tight = limit_memory(hardware_named("nvidia-rtx-3060"), PlanRequest(max_memory="10.5GiB"))
    small = make_plan(request, tight).frozen.settings
    assert small.swapped_blocks > 0
    large = make_plan(request, hardware_named("nvidia-h200-sxm")).frozen.settings
    assert (large.swapped_blocks, large.quantization) == (0, "none")
