"""The dataset check as text in 80 columns."""

from collections.abc import Iterator

from autotune.data import DataReport
from autotune.reporting.text import capped, wrapped

MAX_NAMED = 20
"""Files of a kind, and shapes, that are listed one by one."""

TITLES = {
    "captionless": "without a caption (write NAME.txt, or give --caption or --trigger)",
    "broken": "broken, left out",
    "tiny": "too small, left out",
    "duplicate": "the same as another, left out",
    "control": "without a control image, left out",
    "short": "too short for a clip, left out",
    "variable": "of a variable rate",
    "mask": "a mask that fits no image, or such an image, left out",
    "black": "with a loss mask that is black everywhere",
    "run": "the output of training, left out",
    "unsupported": "of an unsupported format, left out",
    "metadata": "wrong in metadata.jsonl",
}


def data_report_lines(report: DataReport) -> list[str]:
    """Everything that is known about a data folder: verdict first, then shapes, then each file
    by name.
    """
    return [line for text in _texts(report) for line in wrapped(text)]


def _texts(report: DataReport) -> Iterator[str]:
    captionless = sum(problem.kind == "captionless" for problem in report.problems)
    why = f": {captionless} more without a caption" if captionless else ""
    yield f"{report.folder}: {report.num_usable} usable image(s)" + (
        "" if report.can_train else f", cannot be trained on{why}"
    )
    if report.epoch_size != report.num_usable:
        yield (
            f"  an epoch shows {report.epoch_size}: repeats of folders such as 10_dog, or of "
            "metadata.jsonl"
        )
    if report.num_with_controls:
        yield f"  {report.num_with_controls} with control images"
    if report.caption_words:
        fewest, median, most = report.caption_words
        yield f"  captions of {fewest} to {most} words, median {median}"
    if report.buckets:
        yield ""
        yield f"Shapes at {report.resolution_px} px"
    frames = [
        f" x {bucket.num_frames} frames" if bucket.num_frames > 1 else ""
        for bucket in report.buckets
    ]
    shapes = [
        f"{bucket.width_px:>5} x {bucket.height_px:<5}{clip} {bucket.num_items:>6}"
        for bucket, clip in zip(report.buckets, frames, strict=True)
    ]
    yield from (f"  {line}" for line in capped(shapes, MAX_NAMED, " shapes: --json lists all"))
    yield from _remarks(report)
    yield from _problems(report)


def _remarks(report: DataReport) -> Iterator[str]:
    if report.num_enlarged:
        more = f"more than {report.max_upscaling:g}x"
        yield f"  {report.num_enlarged} scaled up {more}: use larger originals or less resolution"
    if report.cropped:
        named = ", ".join(capped(report.cropped, 3, ""))
        yield (
            f"  {len(report.cropped)} cropped by more than {report.max_crop:.0%} of the area: "
            f"{named}"
        )
    if report.num_unverified:
        yield (
            f"  {report.num_unverified} not decoded for lack of time: damage shows when they "
            "are "
            "encoded"
        )


def _problems(report: DataReport) -> Iterator[str]:
    for kind, title in TITLES.items():
        of_kind = [problem for problem in report.problems if problem.kind == kind]
        if of_kind:
            yield ""
            yield f"{len(of_kind)} {title}"
        lines = [f"{problem.file}: {problem.message}" for problem in of_kind]
        yield from (f"  {line}" for line in capped(lines, MAX_NAMED, ": --json names all"))
