"""A safetensors file as text, for `autotune weights inspect`."""

from collections import Counter

from autotune.weights.inspection import FileSummary, TensorSummary


def render_file(summary: FileSummary, *, width: int = 80) -> str:
    """What a file holds, one line per tensor, no line longer than `width` (at least 60)."""
    dtypes = Counter(tensor.dtype for tensor in summary.tensors)
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items())) or "none"
    lines = [
        f"{summary.name}: {_size(summary.size_bytes)}",
        f"tensors: {len(summary.tensors)} ({kinds})",
        f"values that are not finite: {_nonfinite(summary)}",
    ]
    lines += [f"metadata {key}: {' '.join(value.split())}" for key, value in sorted(summary.metadata.items())]
    lines += ["", *_table(summary.tensors, width)]
    return "\n".join(_cut(line, width) for line in lines).rstrip() + "\n"


def _nonfinite(summary: FileSummary) -> str:
    return "not counted" if summary.num_nonfinite is None else str(summary.num_nonfinite)


def _table(tensors: tuple[TensorSummary, ...], width: int) -> list[str]:
    """One line per tensor, sorted by name; the name takes what its facts leave."""
    rows = [(tensor.name, _facts(tensor)) for tensor in sorted(tensors, key=lambda tensor: tensor.name)]
    room = max(width - max((len(facts) for _, facts in rows), default=0) - 1, 12)
    return [f"{_cut_left(name, room):<{room}} {facts}" for name, facts in rows]


def _facts(tensor: TensorSummary) -> str:
    shape = "x".join(str(size) for size in tensor.shape) or "scalar"
    bad = "".join(f" {count} {word}" for count, word in ((tensor.num_nan, "NaN"), (tensor.num_inf, "Inf")) if count)
    return f"{tensor.dtype:>7} {shape:>16} {_size(tensor.size_bytes):>9}{bad}"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 3] + "..."


def _cut_left(name: str, width: int) -> str:
    """The end of a name tells more than its beginning."""
    return name if len(name) <= width else "..." + name[3 - width :]


def _size(size_bytes: int) -> str:
    size, units = float(size_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
