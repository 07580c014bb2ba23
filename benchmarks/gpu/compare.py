"""Predictions against what `truth` measured: `python benchmarks/gpu/compare.py FOLDER`.

Needs no GPU: it predicts from the machine's profile and each row's work and settings, before any
trial, and after the first of the same work, which then is not counted.
"""

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autotune.system.process import silence_libraries

silence_libraries()

from autotune.cost.predict import CostModel
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import TrialResult
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import ModelRef
from autotune.plan.prediction import Prediction
from autotune.plan.workload import Workload

Row = dict[str, Any]


def rows_of(folder: Path) -> list[Row]:
    """All rows of the part, in the order in which they were written."""
    files = sorted(folder.glob("truth*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def told(prediction: Prediction) -> Row:
    """What a prediction says, as far as it was measured."""
    train = prediction.training
    return {
        "allocated_bytes": prediction.allocated_memory_bytes,
        "reserved_bytes": train.run_memory_bytes - train.breakdown.process_overhead_bytes,
        "step_seconds": prediction.step_seconds,
        "step_time": prediction.step_time.model_dump(),
    }


def compared(rows: Iterable[Row]) -> Iterable[Row]:
    """Every trial that trained, with what was predicted."""
    hardware = predictor = calibrated = None
    for row in rows:
        if row["kind"] == "profile":
            hardware = HardwareProfile.model_validate_json(json.dumps(row["profile"]))
        elif row["kind"] == "work" and hardware is not None:
            model = resolve_model(ModelRef.of(row["model"]))
            work = Workload.model_validate_json(json.dumps(row["workload"]))
            predictor = CostModel.build(hardware, work, model.family, model.config)
            calibrated = None
        elif row["kind"] == "trial" and row["outcome"] == "ok" and predictor is not None:
            fields = {name: row[name] for name in TrialResult.model_fields if name in row}
            result = TrialResult.model_validate_json(json.dumps(fields))
            chosen = result.candidate
            if chosen.swapped_blocks > chosen.recomputed_blocks:
                continue  # such blocks stay until their backward pass: `plan` never tries them
            recompiles = chosen.compile != "off" and chosen.recomputed_blocks
            if recompiles and chosen.quantization != "none":
                continue  # torch before 2.13 keeps too much: `plan` tries them no longer
            if chosen.quantization not in WEIGHT_FORMATS:
                continue  # int8 products of rows that were not rotated yet
            if (
                chosen.compile != "off"
                and chosen.recomputed_blocks
                and chosen.quantization != "none"
            ):
                continue  # torch before 2.13 keeps too much: `plan` tries them no longer
            measured = {
                "allocated_bytes": result.peak_memory_bytes,
                "reserved_bytes": row.get("reserved_bytes"),
                "step_seconds": statistics.median(result.step_seconds),
            }
            about = {name: row[name] for name in ("model", "setting", "size_px", "batch")}
            found = {"before": told(predictor.predict(chosen)), "measured": measured}
            if calibrated is None:
                calibrated = predictor.with_calibration([result])
            else:
                found["after"] = told(calibrated.predict(chosen))
            yield {**about, "padding": row["padding"], **found}


def percent(predicted: float, measured: float) -> float:
    """Error of a prediction."""
    return 100 * (predicted / measured - 1)


def text_of(rows: Iterable[Row]) -> str:
    """A line for each row, then the errors of all."""
    errors: dict[tuple[str, str], list[float]] = {}
    head = f"{'model':22} {'setting':30} {'s':>7} {'error':>7} {'after':>7} {'GiB':>6} {'error':>7}"
    lines = [head]
    for row in rows:
        real = row["measured"]
        found = {
            (what, when): percent(row[when][what], real[what])
            for when in ("before", "after")
            for what in ("step_seconds", "allocated_bytes", "reserved_bytes")
            if when in row and real[what]
        }
        for key, error in found.items():
            errors.setdefault(key, []).append(error)
        after = found.get(("step_seconds", "after"))
        lines.append(
            f"{row['model'][:22]:22} {row['setting'][:30]:30} {real['step_seconds']:7.3f} "
            f"{found['step_seconds', 'before']:+6.1f}% "
            f"{'-' if after is None else f'{after:+.1f}%':>7} "
            f"{real['allocated_bytes'] / 2**30:6.1f} {found['allocated_bytes', 'before']:+6.2f}%"
        )
    for (what, when), each in errors.items():
        sizes = sorted(map(abs, each))
        lines.append(
            f"{what:16} {when:7} n {len(each):3}  mean |error| {statistics.mean(sizes):5.2f}%  "
            f"median {statistics.median(sizes):5.2f}%  signed {statistics.median(each):+5.2f}%  "
            f"worst {max(each, key=abs):+6.1f}%"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compare a folder's rows."""
    folder = Path(sys.argv[1])
    rows = list(compared(rows_of(folder)))
    sys.stdout.write(text_of(rows))


if __name__ == "__main__":
    main()
