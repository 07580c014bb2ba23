"""What a GPU takes for kernels that the rates of large ones do not describe: tiny ones, those whose
tensors are still in the L2 cache, and products with a rank as a dimension. A CPU has none of these
terms.
"""

from autotune.schema import HardwareProfile

KERNEL_SECONDS = 3e-6
"""From the start of a kernel to that of the next, however little it does, where no probe
measured it: some 3 us for kernels that do nothing, on recent cards and drivers
(forums.developer.nvidia.com, thread 233645)."""
CACHE_SHARE = 0.9
"""Of the L2 cache, what a kernel's operands and results may take to be there still. Published
curves of a buffer that is read again and again (te42kyfo/gpu-benches, gpu-l2-cache) keep its
rate up to 93% of an L40's, then fall to the memory's."""
CACHE_SHARE_IN_HALVES = 0.7
"""The same for data-center cards since the A100, whose cache has two halves that hold copies of
each other's lines: 69% of an A100's, 72% of an H100's and of an H200's, in the same curves."""
CACHE_GAIN = 2.0
"""Times the memory's rate at which such a kernel moves its bytes, where no probe measured it.
The cache itself is 2.5 (H200) to 6 (L40) times as fast, in the same curves; but an operand from
long ago, as a residual, comes from memory."""
THIN = 64
"""A product with a dimension of this or less takes as long as its bytes do: one of rank 16 has
16 FLOPs a byte, where a GPU computes a hundred and more in the time that it moves one."""


def min_kernel_seconds(hardware: HardwareProfile) -> float:
    """What the device takes for any kernel."""
    if hardware.device.kind != "cuda":
        return 0.0
    return hardware.rate("kernel.least") or KERNEL_SECONDS


def cached_bytes(hardware: HardwareProfile) -> float:
    """What a kernel may read and write for its tensors to be in the cache."""
    if hardware.device.kind != "cuda":
        return 0.0
    is_halved = hardware.device.compute_capability in ((8, 0), (9, 0), (10, 0))
    return (CACHE_SHARE_IN_HALVES if is_halved else CACHE_SHARE) * (hardware.device.l2_bytes or 0)


def cache_gain(hardware: HardwareProfile) -> float:
    """Times the memory's rate at which it moves them then."""
    cached, copied = hardware.rate("memory.cache"), hardware.rate("memory.bandwidth")
    return max(1.0, cached / copied) if cached and copied else CACHE_GAIN


def is_thin(shape: tuple[int, ...]) -> bool:
    """Whether a product (m, k, n) moves bytes for longer than it computes."""
    return len(shape) == 3 and min(shape) <= THIN


def bytes_per_flop(shape: tuple[int, int, int], element_bytes: int) -> float:
    """Bytes that a product (m, k, n) reads and writes, for each of its FLOPs."""
    m, k, n = shape
    return element_bytes * (m * k + k * n + m * n) / (2 * m * k * n)
