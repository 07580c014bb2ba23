"""What GPUs that are not here are predicted to do, as tables of 80 columns."""

from autotune.families import FAMILIES
from autotune.planning import ComparedGpu, Comparison, NoGpu
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


def elsewhere_lines(error: NoGpu) -> list[str]:
    """The GPUs that a model fits, fastest first; then those that it does not fit."""
    defaults = FAMILIES[error.family].defaults
    frames = f" and {defaults.num_frames} frames" if defaults.num_frames > 1 else ""
    about = (
        f"rank {defaults.rank}, batch {defaults.effective_batch_size}, "
        f"{defaults.resolution_px} "
        f"px{frames}"
    )
    rows = [
        f"{each.gpu:<30}{each.memory_gb:>5g} GB{seconds_text(each.step_seconds):>13}"
        f"{uncertainty_text(each.time_uncertainty):<6}{memory_text(each.run_memory_bytes):>12}"
        for each in error.elsewhere
        if each.step_seconds is not None
    ]
    others = [each.gpu for each in error.elsewhere if each.step_seconds is None]
    return [
        f"{error.model} on other hardware, predicted for {about}",
        f"{'name for --hardware':<30}{'memory':>8}{'per step':>13}{'run memory':>18}",
        *rows,
        *(wrapped(f"does not fit: {', '.join(others)}", 14) if others else ()),
    ]
