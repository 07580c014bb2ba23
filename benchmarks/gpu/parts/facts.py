"""What the machine is and can do: its profile, whether each backend's and storage's gradients are right, tests/gpu."""

import re
import subprocess
import sys

from evidence import ROOT, Evidence, begin, precision_of, workload_of

from autotune.families.registry import family_named
from autotune.families.resolve import resolve_model
from autotune.knobs.attention import BACKENDS
from autotune.knobs.base import Setting
from autotune.knobs.quantization import QUALITY_OF
from autotune.schema import HardwareProfile
from autotune.trials.parity import proven

MODELS = ("qwen-image", "flux1-dev", "kandinsky5-image-lite")


def tests(evidence: Evidence) -> None:
    """tests/gpu, each test a row."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-o", "addopts=", "-o", "console_output_style=classic",
               "-p", "no:cacheprovider", "-v", "-rfEs", "--tb=no", "--timeout=150"]  # fmt: skip
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        for last in process.stdout or ():
            if found := re.match(r"(tests/\S+) (PASSED)|(?:FAILED|ERROR|SKIPPED) .+", last):
                outcome = (found[2] or last.split()[0]).lower()
                evidence.row("test", outcome=outcome, test=found[1] or last.strip()[:400])
    evidence.row("tests", status=process.returncode, summary=last.strip())


def gradients(evidence: Evidence, hardware: HardwareProfile) -> None:
    """Every backend and storage whose gate is open, against the fp32 reference on this device."""
    open_gates = {gate.name for gate in hardware.gates if gate.available}
    choices = {
        "precision": [precision_of(hardware)],
        "attention": [name for name in BACKENDS if f"attention.{name}" in open_gates],
        "quantization": [name for name in QUALITY_OF if f"quantization.{name}" in open_gates],
    }
    for name in MODELS:
        model = evidence.model(name)
        for padding in ("exact", "masked"):
            workload = workload_of(model, evidence.size(512), rank=4, batch=2, padding=padding)
            setting = Setting(hardware, family_named(name), workload)
            for gate in proven(setting, choices, model, resolve_model(model).config).gates[len(hardware.gates) :]:
                evidence.row("gradients", model=name, padding=padding, **gate.model_dump())


def native_kernels(evidence: Evidence) -> None:
    """Which kernel torch itself takes for attention of Qwen-Image's shape, without and with a mask."""
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
    evidence = begin("facts", __doc__)
    hardware = evidence.hardware()
    evidence.row("profile", profile=hardware.model_dump(mode="json"))
    for gate in hardware.gates:
        evidence.row("gate", **gate.model_dump())
    for rate in hardware.rates:
        evidence.row("rate", **rate.model_dump(mode="json"))
    for step in (native_kernels, lambda e: gradients(e, hardware), tests):
        try:
            step(evidence)
        except Exception as error:  # the rest is still worth having
            evidence.row("error", message=f"{type(error).__name__}: {error}"[:400])


if __name__ == "__main__":
    main()
