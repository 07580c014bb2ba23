"""A safetensors file as text, for `autotune weights inspect`."""

from collections import Counter

from autotune.reporting.text import WIDTH, cut, memory_text
from autotune.weights import FileSummary, TensorSummary


def weights_lines(summary: FileSummary) -> str:
    """What a file holds, one line per tensor."""
    dtypes = Counter(tensor.dtype for tensor in summary.tensors)
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items())) or "none"
    bad = summary.num_nonfinite
    lines = [
        f"{summary.name}: {memory_text(summary.size_bytes)}",
        f"tensors: {len(summary.tensors)} ({kinds})",
        f"values that are not finite: {'not counted' if bad is None else bad}",
    ]
    lines += [
        f"metadata {key}: {' '.join(value.split())}"
        for key, value in sorted(summary.metadata.items())
    ]
    rows = [
        (tensor.name, _facts(tensor))
        for tensor in sorted(summary.tensors, key=lambda tensor: tensor.name)
    ]
    room = max(WIDTH - max((len(facts) for _, facts in rows), default=0) - 1, 12)
    lines += ["", *(f"{_cut_left(name, room):<{room}} {facts}" for name, facts in rows)]
    return "\n".join(map(cut, lines)).rstrip()


def _facts(tensor: TensorSummary) -> str:
    shape = "x".join(str(size) for size in tensor.shape) or "scalar"
    bad = "".join(
        f" {count} {word}"
        for count, word in ((tensor.num_nan, "NaN"), (tensor.num_inf, "Inf"))
        if count
    )
    return f"{tensor.dtype:>7} {shape:>16} {memory_text(tensor.size_bytes):>9}{bad}"


def _cut_left(name: str, width: int) -> str:
    """The end of a name tells more than its beginning."""
    return name if len(name) <= width else "..." + name[3 - width :]
