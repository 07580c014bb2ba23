"""Numbers as people read them: short, with units."""


def memory_text(num_bytes: float | None) -> str:
    """`1.50 GiB`, `320 MiB`, or `-` when unknown."""
    if num_bytes is None:
        return "-"
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.0f} MiB"


def count_text(number: int) -> str:
    """`3.7M` or `20.4B`."""
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def seconds_text(seconds: float | None) -> str:
    """`0.123 s`, `45 s`, `3 min 5 s`, `2 h 10 min`, or `-` when unknown."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
