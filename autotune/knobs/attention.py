"""The attention backends, and what is known of each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from inspect import unwrap
from pkgutil import resolve_name
from typing import Any, Literal

from autotune.knobs.knob import Entry, Requirements, TuningContext
from autotune.plan.hardware import HardwareProfile, is_at_least

Kernel = Literal["fused", "flash", "flash3", "flash4", "efficient", "cudnn", "math"]

# Major compute capabilities on which cuDNN has beaten flash (1.7 to 2.3 times on Hopper), and the
# version from which torch's dispatcher picks it first on them, with and without a mask
# (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `check_prefer_cudnn_attention`, torch 2.11
# to 2.14).
CUDNN_WINS, CUDNN_PREFERRED = (9, 10), "9.15.1"


@dataclass(frozen=True, kw_only=True)
class AttentionBackend(Entry):
    """One implementation of attention, under diffusers' name or, with `function`, a new one."""

    knob = "attention"
    kernel: Kernel = "fused"  # `fused` is the one that torch's own dispatcher picks
    refuses_masks: bool = False  # even one that is all True
    why_not: str = ""  # why no machine can train with it
    # `package.module:function`, called as FlashAttention's on (batch, tokens, heads, head
    # dimension), that diffusers lacks or gave no backward pass.
    function: str = ""
    tolerance: float = 0.02
    tolerance_reason: str = "another kernel sums in another order, and rounds other numbers"

    def diffusers_name(self, *, runs_cudnn: bool = False) -> Any:
        """Return the member of diffusers' enumeration that selects this backend, for this process
        with dense gradients if it runs cuDNN. The enumeration is closed, so a `function` is added
        to it through its internals. Raises ValueError if this diffusers has no such backend."""
        from diffusers.models import attention_dispatch

        names: Any = attention_dispatch.AttentionBackendName
        if self.function and self.name not in names.__members__:
            member = str.__new__(names, self.name)
            member._name_ = member._value_ = self.name
            names._member_map_[self.name] = names._value2member_map_[self.name] = member
            register = attention_dispatch._AttentionBackendRegistry.register(member)
            register(_flash_attention(self.function))
        member, attends = names(self.name), attention_dispatch._AttentionBackendRegistry._backends
        stock = unwrap(attends[member])
        attends[member] = with_dense_gradients(stock) if runs_cudnn else stock
        return member


EFFICIENCY: Mapping[str, float] = {"flash": 0.69, "flash4": 0.69, "efficient": 0.38, "cudnn": 0.56}
# By the major compute capability of data-center cards. Flash and efficient are kernels for Ampere
# there: on B200 they are taken to do in a second what they do on H100 (312 TFLOP/s was measured,
# Dao-AILab/flash-attention#1589).
EFFICIENCY_OF: Mapping[int, Mapping[str, float]] = {
    9: {"flash": 0.45, "flash3": 0.8, "flash4": 0.72, "efficient": 0.25, "cudnn": 0.75},
    10: {"flash": 0.2, "flash4": 0.59, "efficient": 0.11, "cudnn": 0.56},
}
UNKNOWN_EFFICIENCY = 0.3


def assumed_efficiency(kernel: str, capability: tuple[int, int] | None) -> float:
    """Return the share of what large products reach on the card, forward and backward. Round
    figures, not measured here.

    FlashAttention-2 reports 50 to 73% of the peak on A100 (arXiv:2307.08691); on H100, with heads
    of 128 and 4,096 tokens (arXiv:2407.08608), it has 368 TFLOP/s forward and 310 backward, cuDNN
    609 and 499, version 3 638 and 542, and the memory-efficient kernel half of flash. Version 4 has
    572 forward there (mlc-ai/pith-train#2) and up to 1.3 times cuDNN's on B200; its backward pass
    is taken to follow. On Blackwell's GeForce cards it has the instructions of version 2 (Dao-
    AILab/flash-attention#2330).
    """
    return EFFICIENCY_OF.get((capability or (0, 0))[0], EFFICIENCY).get(kernel, UNKNOWN_EFFICIENCY)


def prefers_cudnn(capability: tuple[int, int] | None, cudnn: str | None) -> bool:
    """Tell if `native` is cuDNN's kernel in half precision."""
    major = (capability or (0, 0))[0]
    return major in CUDNN_WINS and is_at_least(cudnn, CUDNN_PREFERRED)


def cuda_kernel(
    attention: str,
    *,
    masked: bool,
    precision: str,
    capability: tuple[int, int] | None,
    cudnn: str | None,
) -> Kernel:
    """Name the kernel that `attention` runs on CUDA; without `capability` a card of 8.0 is meant.

    torch's dispatcher prefers cuDNN on some cards, then flash, which takes no mask, no fp32 and
    needs 8.0, then the memory-efficient kernel (sdp_utils.cpp, `priority_order`,
    `check_tensor_dtype`).
    """
    backend = ATTENTION_BACKENDS.get(attention)
    if backend is not None and backend.kernel != "fused":
        return backend.kernel
    if precision == "fp32" or (capability or (8, 0)) < (8, 0):
        return "efficient"
    if prefers_cudnn(capability, cudnn):
        return "cudnn"
    return "efficient" if masked else "flash"


def token_multiple(kernel: str) -> int:
    """Return the number to whose multiples tokens are padded if a kernel gets a mask. cuDNN's
    backward pass has returned NaN at lengths of 64 modulo 128 (pytorch/pytorch#196678; on an H200
    without a mask, too, but only where all scores of a query are below -88)."""
    return 128 if kernel == "cudnn" else 1


def with_dense_gradients(attend: Any) -> Any:
    """Return the attention function, whose outputs' gradients are made contiguous.

    torch runs cuDNN's plan of a backward pass again for queries, keys and values of the same shapes
    and strides, whatever the strides of the output's gradient (aten/src/ATen/native/cudnn/MHA.cpp,
    `MHACacheKeyWrapper`). In FLUX.1's single blocks that is a part of a wider tensor.
    """
    import torch

    opaque_copy = _opaque_copy()

    class DenseGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
            return out.view_as(out)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            is_compiling = torch.compiler.is_compiling()
            return opaque_copy(gradient) if is_compiling else gradient.contiguous()

    @wraps(attend)
    def dense(*args: Any, **kwargs: Any) -> Any:
        return DenseGradient.apply(attend(*args, **kwargs))  # type: ignore[no-untyped-call]

    return dense


@cache
def _opaque_copy() -> Any:
    """Inductor sees through `contiguous`, and would hand on a part of the wider tensor again."""
    import torch

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    operation = torch.library.custom_op("autotune::dense_copy", copy, mutates_args=())
    operation.register_fake(lambda tensor: tensor.new_empty(tensor.shape))
    return operation


def _refused(reason: str, library: str | None, *names: str) -> Iterator[AttentionBackend]:
    return (
        AttentionBackend(name, "", Requirements(library=library), why_not=reason) for name in names
    )


LENGTHS_DOUBTFUL = "trains; NaN gradients seen at some lengths, if all scores are below -88"
NO_BACKWARD = "no backward: gradients vanish without an error"
FETCHED = (
    "not offered: diffusers would fetch its kernel from the hub and run it, "
    "and a plan runs no fetched code"
)
GPU, AMPERE = Requirements(("cuda",)), Requirements(("cuda",), (8, 0))
FLASH_ATTN = Requirements(("cuda",), (8, 0), "flash_attn", "2.6.3")
FLASH_ATTN_3 = Requirements(("cuda",), (9, 0), "flash_attn_3", "3.0.0b1", only_major=9)
# Trains from Hopper on; earlier betas had wrong gradients on some cards.
FLASH_ATTN_4 = Requirements(("cuda",), (9, 0), "flash_attn_4", "4.0.0b36")
XFORMERS = Requirements(("cuda",), (7, 0), "xformers", "0.0.29")

# `native` is the default; it is held against plain products in fp32, and the others against it.
# diffusers' flash_varlen is none of them: under a mask it takes the first keys, and with the text
# first its padding comes before the image.
_ENTRIES = (
    AttentionBackend("native", "PyTorch chooses the kernel"),
    AttentionBackend(
        "_native_flash",
        "trains; takes no mask at all",
        Requirements(("cuda", "cpu"), (8, 0)),
        kernel="flash",
        refuses_masks=True,
    ),
    AttentionBackend("_native_math", "plain matrix products, slow and always there", kernel="math"),
    AttentionBackend("_native_efficient", "trains, with masks too", GPU, kernel="efficient"),
    AttentionBackend("_native_cudnn", LENGTHS_DOUBTFUL, AMPERE, kernel="cudnn"),
    AttentionBackend(
        "flash", "trains; takes no mask", FLASH_ATTN, kernel="flash", refuses_masks=True
    ),
    AttentionBackend(
        "flash-3",
        "trains; takes no mask",
        FLASH_ATTN_3,
        kernel="flash3",
        refuses_masks=True,
        function="flash_attn_interface:flash_attn_func",
    ),
    AttentionBackend(
        "flash-4",
        "trains; takes no mask",
        FLASH_ATTN_4,
        kernel="flash4",
        refuses_masks=True,
        function="flash_attn.cute:flash_attn_func",
    ),
    AttentionBackend("xformers", "trains", XFORMERS, kernel="efficient"),
    *_refused("not offered: it is slow unless compiled by itself", None, "flex"),
    *_refused(FETCHED, "kernels", "flash_hub", "_flash_3_hub", "flash_4_hub"),
    *_refused(
        "raises in backward: diffusers gave its operation none; flash-3 has it",
        "flash_attn_3",
        "_flash_3",
    ),
    *_refused(NO_BACKWARD, "sageattention", "sage", "sage_hub", "sage_varlen"),
)
ATTENTION_BACKENDS: Mapping[str, AttentionBackend] = {each.name: each for each in _ENTRIES}


DEFAULT = "native"
MIN_SPEED = 1.03  # times the default's measured speed: less is noise


def why_not_faster(backend: AttentionBackend, context: TuningContext) -> str | None:
    """Tell why a backend is not worth a trial, by measured speeds or published ones."""
    hardware, name = context.hardware, backend.name
    if name == DEFAULT or hardware.device.kind != "cuda":
        return None
    work, family = context.workload, context.family
    has_some = family.has_attention_mask(work.effective_batch_size, work.text_padding)
    always = family.has_attention_mask(1, "exact")  # of the text alone
    cases = [False, True] if has_some and not always and not backend.refuses_masks else [False]
    if hardware.origin == "catalog" and backend.needs.library:
        what = "published for its kernel is"
        speed = max(_assumed_speed(name, hardware, masked) for masked in cases)
    else:
        found = [_measured_speed(name, hardware, masked) for masked in cases]
        if not any(found):
            best = "the kernel that torch holds for the best"
            return f"not measured with {DEFAULT}, which takes {best}"
        what, speed = "the probe measured", max(each or 0.0 for each in found)
    return None if speed >= MIN_SPEED else f"{what} {speed:.2f} times the speed of {DEFAULT}"


def _kernel(name: str, hardware: HardwareProfile, masked: bool) -> Kernel:
    capability, cudnn = hardware.device.compute_capability, hardware.versions.cudnn
    return cuda_kernel(name, masked=masked, precision="bf16", capability=capability, cudnn=cudnn)


def _assumed_speed(name: str, hardware: HardwareProfile, masked: bool) -> float:
    kernels = (_kernel(each, hardware, masked) for each in (name, DEFAULT))
    capability = hardware.device.compute_capability
    own, usual = (assumed_efficiency(kernel, capability) for kernel in kernels)
    return own / usual


def _measured_speed(name: str, hardware: HardwareProfile, masked: bool) -> float | None:
    """In the longest common shape; the default under a mask may be measured by another name."""
    plain, usual = (_kernel(DEFAULT, hardware, each) for each in (False, masked))
    default = DEFAULT if usual == plain else "_native_efficient"
    theirs = hardware.rates_under(f"attention.{default}.")
    own = hardware.rates_under(f"attention.{name}.")
    if not (common := theirs.keys() & own.keys()):
        return None
    longest = max(common, key=lambda shape: int(shape.rpartition(".")[2]))
    return own[longest] / theirs[longest]


def _flash_attention(function: str) -> Any:
    """Wrap FlashAttention 3 (for Hopper, from source) or 4, with a backward pass of its own.

    diffusers gave version 3 no backward pass, and would fetch version 4 from the hub. Betas of
    version 3 return log sums too, and version 4 always does (`hopper/flash_attn_interface.py`;
    `flash_attn/cute/interface.py` of 4.0.0b36).
    """

    def attend(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Any:
        if attn_mask is not None:
            raise ValueError("FlashAttention takes no mask")
        out = resolve_name(function)(query, key, value, softmax_scale=scale, causal=is_causal)
        return out[0] if isinstance(out, tuple) else out

    return attend
