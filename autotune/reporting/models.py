"""The published models as a table of text."""

from collections.abc import Sequence

from autotune.families import FetchedModel
from autotune.planning import ModelSummary
from autotune.reporting.text import memory_text, seconds_text, uncertainty_text, wrapped

UNVERIFIED = "* built from diffusers' classes: not compared with a published size"


def model_lines(models: Sequence[ModelSummary], hardware: str | None = None) -> list[str]:
    """A line for each model: kind, size, and its license or, for a GPU, what that is predicted
    to do with it; then the settings that a plan would choose there."""
    title = f"{'per step':>17}{'run memory':>14}" if hardware else "  license"
    about = [f"predicted for {hardware}, with the defaults of each"] if hardware else []
    lines = [*about, f"{'name':<26}{'kind':<6}{'parameters':>11} {title}"]
    for model in models:
        size = f"{model.num_parameters / 1e9:.2f}B" if model.num_parameters else "-"
        doubt = " " if model.is_verified else "*"
        lines.append(
            f"{model.name:<26}{model.kind:<6}{size:>11}{doubt}{_rest(model, bool(hardware))}"
        )
        if model.prediction and model.prediction.settings:
            lines += wrapped(f"    {model.prediction.settings.label()}", 4)
    if not all(model.is_verified for model in models):
        lines.append(UNVERIFIED)
    if not hardware:
        lines += _lever_lines(models)
    for model in () if hardware else models:
        lines += wrapped(f"{model.name}: {model.note}") if model.note else []
    return lines


def _lever_lines(models: Sequence[ModelSummary]) -> list[str]:
    """For each lever that some lack: which."""
    lacking: dict[str, list[str]] = {}
    for model in models:
        for title in model.missing_levers:
            lacking.setdefault(title, []).append(model.name)
    return [
        line
        for title, names in lacking.items()
        for line in wrapped(f"no {title}: {', '.join(names)}")
    ]


def _rest(model: ModelSummary, is_for_gpu: bool) -> str:
    if not is_for_gpu:
        return f"  {model.license or 'unknown'}"
    if model.prediction is None:
        return "  not computed ahead: use autotune plan"
    if model.prediction.step_seconds is None:
        return f"{'does not fit':>17}"
    took = seconds_text(model.prediction.step_seconds) + uncertainty_text(
        model.prediction.time_uncertainty
    )
    return f"{took:>17}{memory_text(model.prediction.run_memory_bytes):>14}"


def fetched_lines(model: FetchedModel) -> list[str]:
    """Where a fetched model is, and how its files are known to be whole."""
    verified = f"{model.num_verified} files have the hub's checksums"
    return [
        f"{model.name} at {model.revision}",
        f"family: {model.family}",
        f"folder: {model.folder}",
        f"size: {memory_text(model.size_bytes)}; "
        + (
            verified
            if model.num_verified is not None
            else "complete, not verified: the hub is out of reach"
        ),
        f"next: autotune plan --model {model.name}@{model.revision} --data FOLDER",
    ]
