"""One job on several GPUs, as a table of 80 columns."""

from autotune.planning import ComparedGpu, Comparison
from autotune.reporting.text import memory_text, seconds_text, uncertainty_text, wrapped


def comparison_lines(found: Comparison) -> list[str]:
    """Two lines for each GPU that it fits: speed, memory, hours and cost; then the settings."""
    fitting = [one for one in found.gpus if one.misfit is None]
    has_prices = any(one.cost is not None for one in fitting)
    cost = f"{'cost ' + found.currency if found.currency else 'cost':>12}" if has_prices else ""
    lines = [
        f"{found.model}: the finished adapter, predicted for each GPU",
        f"{'GPU':<27}{'per image':>16}{'run memory':>12}{'hours':>13}{cost}",
    ]
    for one in fitting:
        lines += _rows(one, has_prices)
    if not fitting:
        lines.append("none of these GPUs")
    if found.num_left_out:
        lines.append(f"{found.num_left_out} more would take longer or cost more than asked")
    misfits = [one.gpu for one in found.gpus if one.misfit is not None]
    lines += wrapped(f"does not fit: {', '.join(misfits)}", 14) if misfits else []
    return lines + _assumptions(found, fitting)


def _rows(one: ComparedGpu, has_prices: bool) -> list[str]:
    low, high = one.hours_range or (0.0, 0.0)
    speed = seconds_text(one.image_seconds) + uncertainty_text(one.time_uncertainty)
    price = "-" if one.cost is None else f"{one.cost:.2f}"
    row = f"{one.gpu:<27}{speed:>16}{memory_text(one.run_memory_bytes):>12}{f'{low:.1f} to {high:.1f}':>13}"
    settings = wrapped(f"  {one.settings.label()}", 4) if one.settings else []
    return [row + (f"{price:>12}" if has_prices else ""), *settings]


def _assumptions(found: Comparison, fitting: list[ComparedGpu]) -> list[str]:
    if not fitting:
        return []
    first = fitting[0]
    besides = [
        (first.download_seconds, "of download"),
        (first.search_seconds, "of search at most"),
        (first.other_seconds, "of loading, caching, previews and checkpoints"),
    ]
    parts = [f"{seconds_text(seconds)} {what}" for seconds, what in besides if seconds]
    text = f"Hours count {first.num_steps} steps and, on {first.gpu}, {', '.join(parts)}."
    dated = f" Prices are of {found.priced}." if found.priced else ""
    return wrapped(text + dated, 0)
