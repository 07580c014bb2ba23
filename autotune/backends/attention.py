"""The attention backends, and what is known of each."""

from collections.abc import Iterator

from autotune.backends.entries import AttentionBackend, Library, Registry, Requirements
from autotune.schema import HardwareProfile

CUDNN_WINS, CUDNN_PREFERRED = (9, 10), "9.15.1"
"""Major compute capabilities on which cuDNN attention has beaten flash (1.7 to 2.3 times on Hopper), and the version
from which torch's dispatcher picks it first on them, with and without a mask
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `check_prefer_cudnn_attention`, torch 2.11 to 2.14)."""


def prefers_cudnn(hardware: HardwareProfile) -> bool:
    """Whether `native` is cuDNN's kernel in half precision, unless TORCH_CUDNN_SDPA_DEPRIORITIZED is set."""
    major = (hardware.device.compute_capability or (0, 0))[0]
    return major in CUDNN_WINS and hardware.versions.has("cudnn", CUDNN_PREFERRED)


def _refused(reason: str, library: Library | None, *names: str) -> Iterator[AttentionBackend]:
    return (AttentionBackend(name, "", Requirements(library=library), unusable_reason=reason) for name in names)


MASKS_DOUBTFUL = "trains; NaN gradients seen with a mask at some lengths"
NO_BACKWARD = "no backward: gradients vanish without an error"
FETCHED = "not offered: diffusers would fetch its kernel from the hub and run it, and a plan runs no fetched code"
GPU, AMPERE = Requirements(("cuda",)), Requirements(("cuda",), (8, 0))
FLASH_ATTN = Requirements(("cuda",), (8, 0), "flash_attn", "2.6.3")
XFORMERS = Requirements(("cuda",), (7, 0), "xformers", "0.0.29")

ATTENTION_BACKENDS: Registry[AttentionBackend] = Registry(
    AttentionBackend,
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
    AttentionBackend("_native_cudnn", MASKS_DOUBTFUL, AMPERE, kernel="cudnn"),
    AttentionBackend("flash", "trains; takes no mask", FLASH_ATTN, kernel="flash", refuses_masks=True),
    AttentionBackend("xformers", "trains", XFORMERS, kernel="efficient"),
    *_refused("not offered: it is slow unless compiled by itself", None, "flex"),
    *_refused(FETCHED, "kernels", "flash_hub", "_flash_3_hub", "flash_4_hub"),
    *_refused("raises in backward", "flash_attn", "_flash_3"),
    *_refused(NO_BACKWARD, "sageattention", "sage", "sage_hub", "sage_varlen"),
)
"""`native` is the default; it is held against plain products in fp32, and the others against it."""
