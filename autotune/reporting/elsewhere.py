"""What the GPUs of the catalog are predicted to do, as a table of 80 columns."""

from autotune.families import FAMILIES
from autotune.planning import NoGpu
from autotune.reporting.text import memory_text, seconds_text, uncertainty_text, wrapped


def elsewhere_lines(error: NoGpu) -> list[str]:
    """The GPUs that a model fits, fastest first; then those that it does not fit."""
    defaults = FAMILIES[error.family].defaults
    frames = f" and {defaults.num_frames} frames" if defaults.num_frames > 1 else ""
    about = f"rank {defaults.rank}, batch {defaults.effective_batch_size}, {defaults.resolution_px} px{frames}"
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
