"""What the machine is and can do: its profile, whether each backend's and format's gradients are
right, tests/gpu."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from threading import Timer

from evidence import ROOT, Evidence, begin, precision_of, workload_of

from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import Attention
from autotune.machine.probe import cached_profile
from autotune.models.registry import get_family
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Choice
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import ModelRef
from autotune.search.gradient_checks import check_gradients

MODELS = ("qwen-image", "flux1-dev", "kandinsky5-image-lite")
TESTS = tuple(f"tests/gpu/test_{name}.py" for name in ("steps", "trials", "training", "kernels"))


def tests(path: str, evidence: Evidence) -> None:
    """The tests of one file, each a row; ended where the part's time is."""
    command = [sys.executable, "-m", "pytest", path, "-o", "addopts=", "-o",
    "console_output_style=classic",
               "-p", "no:cacheprovider", "-v", "-rfEs", "--tb=no", "-o", "timeout=150"]  # fmt: skip
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        alarm = Timer(max(1.0, evidence.left()), process.kill)
        alarm.start()
        for last in process.stdout or ():
            if found := re.match(r"(tests/\S+) (PASSED)|(?:FAILED|ERROR|SKIPPED) .+", last):
                outcome = (found[2] or last.split()[0]).lower()
                evidence.row("test", outcome=outcome, test=found[1] or last.strip()[:400])
        alarm.cancel()
    evidence.row("tests", path=path, status=process.returncode, summary=last.strip())


def gradients(name: str, padding: str, hardware: HardwareProfile, evidence: Evidence) -> None:
    """Every choice that is available, against the fp32 reference on this device."""
    available = {capability.name for capability in hardware.capabilities if capability.available}
    choices: dict[str, list[Choice]] = {
        "precision": [precision_of(hardware)],
        "attention": [name for name in Attention().names if f"attention.{name}" in available],
        "quantization": [name for name in WEIGHT_FORMATS if f"quantization.{name}" in available],
        "swapped_blocks": [1],
        "modulation": ["ahead"],
        "norm_rope": ["fused", "compiled"],
        "compile": ["block"] if "compile" in available else [],
        "optimizer": ["adamw"],
    }
    model = evidence.model(name)
    workload = workload_of(model, evidence.size(512), rank=4, batch=2, padding=padding)
    context = TuningContext(hardware, get_family(name), workload)
    for capability in check_gradients(context, choices, resolve_model(ModelRef.of(model))):
        evidence.row("gradients", model=name, padding=padding, **capability.model_dump())


def native_kernels(evidence: Evidence) -> None:
    """Which kernel torch itself takes for attention of Qwen-Image's shape, without and with a
    mask."""
    import torch
    from torch.nn.attention import SDPBackend

    if not torch.cuda.is_available():
        evidence.skip("kernel of native attention", "no GPU")
        return
    query = torch.randn(1, 24, 4352, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(1, 1, 1, 4352, device="cuda", dtype=torch.bool)
    for masked in (False, True):
        choice = torch._fused_sdp_choice(query, query, query, attn_mask=mask if masked else None)
        evidence.row("native attention", masked=masked, kernel=SDPBackend(choice).name)


def main() -> None:
    """Measure the part."""
    evidence = begin("facts", __doc__, more={"--cases": ""})
    hardware = cached_profile()
    evidence.row("profile", profile=hardware.model_dump(mode="json"))
    for capability in hardware.capabilities:
        evidence.row("capability", **capability.model_dump())
    for rate in hardware.rates:
        evidence.row("rate", **rate.model_dump(mode="json"))
    steps: dict[str, Callable[[Evidence], None]] = {
        "kernel of native attention": native_kernels,
        **{f"gradients {name} {padding}": partial(gradients, name, padding, hardware)
           for name in MODELS for padding in ("exact", "masked")},
        **{path: partial(tests, path) for path in TESTS},
    }  # fmt: skip
    for name in evidence.each(
        evidence.sliced([name for name in steps if evidence.options.cases in name])
    ):
        try:
            steps[name](evidence)
        except Exception as error:  # the rest is still worth having
            evidence.row("error", what=name, message=f"{type(error).__name__}: {error}"[:400])


if __name__ == "__main__":
    main()
