"""What the machine is and can do: its profile, whether each backend's and format's gradients are
right, tests/gpu."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from threading import Timer

from evidence import ROOT, Evidence, begin, precision_of, workload_of

from autotune.knobs.attention import with_dense_gradients
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
TOKENS, SHIFTS = (64, 96, 192, 4160, 4544, 4608), (0.0, -20.0, -60.0, -100.0)
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


def cudnn_gradients(evidence: Evidence) -> None:
    """Gradients of cuDNN's attention against fp32's by number of tokens, with and without a mask,
    and with every score lowered, which changes nothing."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def gradients(leaves: list[torch.Tensor], mask: torch.Tensor | None) -> list[torch.Tensor]:
        for leaf in leaves:
            leaf.grad = None
        out = torch.nn.functional.scaled_dot_product_attention(
            leaves[0], leaves[1], leaves[2], attn_mask=mask
        )
        out.float().square().sum().backward()  # type: ignore[no-untyped-call]
        return [leaf.grad.float() for leaf in leaves if leaf.grad is not None]

    if not torch.cuda.is_available():
        evidence.skip("cuDNN gradients", "no GPU")
        return
    for tokens, shift, masked in product(TOKENS, SHIFTS, (False, True)):
        torch.manual_seed(0)
        query, key, value = (torch.randn(2, 4, tokens, 128, device="cuda") for _ in range(3))
        query[..., 0], key[..., 0] = 1.0, shift * 128**0.5
        leaves = [part.bfloat16().requires_grad_() for part in (query, key, value)]
        exact = [part.detach().float().requires_grad_() for part in leaves]
        mask = torch.ones(2, 1, 1, tokens, device="cuda", dtype=torch.bool) if masked else None
        with sdpa_kernel([SDPBackend.MATH]):
            wanted = gradients(exact, mask)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            found = gradients(leaves, mask)
        errors = [
            float((one[..., 1:] - other[..., 1:]).norm() / other[..., 1:].norm())
            for one, other in zip(found, wanted, strict=True)
        ]
        evidence.row("cudnn", tokens=tokens, shift=shift, masked=masked, errors=errors)


def cudnn_strides(evidence: Evidence) -> None:
    """Gradients of cuDNN's attention, as torch runs it and as autotune does, for a gradient that is
    a part of a wider tensor, and then for one that is not, against fp32's. It may end the process:
    the second is read with the strides of the first."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return out.transpose(1, 2)

    if not torch.cuda.is_available():
        evidence.skip("strides of gradients", "no GPU")
        return
    for tokens, heads, function in (
        (96, 2, with_dense_gradients(attend)),
        (192, 2, attend),
        (4480, 24, with_dense_gradients(attend)),
        (4608, 24, attend),
    ):
        torch.manual_seed(0)
        inputs = [torch.randn(1, tokens, heads, 128, device="cuda") for _ in range(3)]
        wide = torch.randn(1, tokens, 5 * heads * 128, device="cuda").bfloat16()
        leaves = [part.bfloat16().requires_grad_() for part in inputs]
        exact = [part.detach().float().requires_grad_() for part in leaves]
        for name, gradient in (
            ("part", wide[..., : heads * 128]),
            ("whole", wide[..., : heads * 128].contiguous()),
        ):
            for leaf in (*leaves, *exact):
                leaf.grad = None
            with sdpa_kernel([SDPBackend.MATH]):
                attend(*exact).flatten(2).backward(gradient.float())  # type: ignore[no-untyped-call]
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                function(*leaves).flatten(2).backward(gradient)
            errors = [
                float((one.grad - other.grad).norm() / other.grad.norm())
                for one, other in zip(leaves, exact, strict=True)
                if one.grad is not None and other.grad is not None
            ]
            is_own = function is not attend
            evidence.row("strides", tokens=tokens, own=is_own, gradient=name, errors=errors)


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
        "gradients of cuDNN": cudnn_gradients,
        **{f"gradients {name} {padding}": partial(gradients, name, padding, hardware)
           for name in MODELS for padding in ("exact", "masked")},
        **{path: partial(tests, path) for path in TESTS},
        "strides of cuDNN's gradients": cudnn_strides,
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
