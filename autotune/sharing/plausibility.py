"""Spots records that cannot be true, by physics: what no device can do is a mistake or a lie, and
is named.

Bounds are loose on purpose: a true record must never be refused. What is merely unlikely is left to
the cost model and to the local trials that reproduce a record before anything stands on it
(`autotune.sharing.warm_start`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.backends import WEIGHT_FORMATS
from autotune.families import FAMILIES
from autotune.hardware import find_gpu, load_catalog
from autotune.schema import Candidate, TrialResult, Workload
from autotune.sharing.record import Machine, Record

PEAK_MARGIN = 1.3
"""Over a datasheet's peak: cards boost above it, 9% in the largest case of the catalog."""
MIN_USED_SHARE = 0.25
"""Least share of the parameters that every image token goes through: in a model with two streams
a token meets the weights of its own, less what acts once per image."""
UNCACHED_BYTES = 4 << 30
"""Size of weights that is far above any cache, so that every pass reads them from memory."""
MIN_BYTES_PER_PARAMETER = 0.5
"""The smallest weight format that trains."""
BOUNDED_RATES = ("memory.", "matmul.bf16.", "matmul.fp16.")
"""How the names of rates begin that no card has above its datasheet's peaks."""
SPILL_RATIO = 1.02
"""Peak over total memory: above it the step would have spilled."""


def find_impossibilities(record: Record) -> tuple[str, ...]:
    """Why the record cannot be true, one line each; empty if nothing speaks against it."""
    return (*_check_expectation(record), *_check_trials(record))


def _check_expectation(record: Record) -> Iterator[str]:
    """Whether it promises what its trials measured."""
    expected, batch = record.expected, record.workload.effective_batch_size
    ran = [
        trial
        for trial in record.trials
        if trial.candidate == record.settings and trial.outcome == "ok"
    ]
    seconds = [value for trial in ran for value in trial.step_seconds]
    peaks = [trial.peak_memory_bytes for trial in ran if trial.peak_memory_bytes]
    if not seconds or not min(seconds) * 0.9 <= expected.step_seconds <= max(seconds) * 1.1:
        yield "it promises a step time that its trials did not measure"
    if not peaks or not min(peaks) * 0.9 <= expected.peak_memory_bytes <= max(peaks) * 1.1:
        yield "it promises a peak of memory that its trials did not measure"
    if abs(expected.images_per_second * expected.step_seconds / batch - 1) > 0.01:
        yield "its images per second do not follow from its step time"


@dataclass(frozen=True)
class _Peaks:
    """What a GPU cannot exceed, margin included."""

    flops_per_second: float
    bytes_per_second: float


def _peaks_of(machine: Machine, product_dtype: str = "") -> _Peaks | None:
    """Those of the machine's GPU, or the largest of the catalog for one that it lacks; None for
    other devices.

    `product_dtype`: of the factors, where they have 8 bits.
    """
    if machine.match_keys.get("device_kind") != "cuda":
        return None
    gpu = find_gpu(machine.device_name, machine.total_memory_bytes)
    gpus = (gpu,) if gpu else load_catalog()
    dtypes = ("bf16", "fp16", "tf32", product_dtype) if gpu else ("bf16", "fp16", "fp8", "int8")
    tflops = max(each.dense_tflops.get(dtype, 0.0) for each in gpus for dtype in dtypes)
    return _Peaks(
        PEAK_MARGIN * 1e12 * tflops,
        PEAK_MARGIN * 1e9 * max(each.memory_gb_per_second for each in gpus),
    )


def _check_trials(record: Record) -> Iterator[str]:
    peaks = _peaks_of(record.machine)
    if peaks:  # predictions go by measured rates, so that false ones could cover for false trials
        bounds = {"B/s": peaks.bytes_per_second, "FLOP/s": peaks.flops_per_second}
        for rate in record.machine.rates:
            if rate.name.startswith(BOUNDED_RATES) and rate.value > bounds.get(rate.unit, math.inf):
                yield f"its rate {rate.name} is above the device's peak"
    for number, trial in enumerate(record.trials, start=1):
        weight_format = WEIGHT_FORMATS.get(trial.candidate.quantization)
        if weight_format and weight_format.product_dtype:
            own = _peaks_of(record.machine, weight_format.product_dtype)
        else:
            own = peaks
        yield from (f"trial {number}: {reason}" for reason in _check_trial(record, trial, own))


def _check_trial(record: Record, trial: TrialResult, peaks: _Peaks | None) -> Iterator[str]:
    if any(seconds <= 0 for seconds in (*trial.step_seconds, *trial.warmup_seconds)):
        yield "a step took no time, or less"
        return
    if trial.outcome != "ok":
        return
    peak, total = trial.peak_memory_bytes, record.machine.total_memory_bytes
    if not trial.step_seconds or not peak:
        yield "it has run, and has no times or no memory"
        return
    weights = record.workload.model.num_parameters * _min_bits(trial.candidate) // 8
    if peak < weights:
        yield (
            f"its peak of {peak / 2**30:.2f} GiB is less than its weights, "
            f"{weights / 2**30:.2f} "
            "GiB"
        )
    if total is not None and peak > SPILL_RATIO * total:
        yield (
            f"its peak of {peak / 2**30:.2f} GiB is more than the device has, "
            f"{total / 2**30:.2f} "
            "GiB"
        )
    if peaks:
        fastest = min(trial.step_seconds)
        needed = _min_step_seconds(record.workload, trial.candidate, weights, peaks)
        if fastest < needed:
            yield (
                f"a step of {fastest:.4g} s is faster than the device's peak allows, {needed:.4g} s"
            )


def _min_step_seconds(
    work: Workload, candidate: Candidate, weight_bytes: int, peaks: _Peaks
) -> float:
    """The least time of an optimizer step: by arithmetic at the peak, and by reading the weights
    from memory.

    Per token and parameter 2 FLOPs forward, 2 backward (to the activations: the base is frozen), 2
    for each recomputation. A pass forward and one backward read every weight once per micro-batch.
    """
    recomputed = 1 + min(1.0, candidate.checkpointed_blocks / work.model.num_blocks) / 2
    tokens = _min_image_tokens(work) * work.effective_batch_size
    flops = 4 * recomputed * MIN_USED_SHARE * work.model.num_parameters * tokens
    passes = (
        2 * work.effective_batch_size / min(candidate.micro_batch_size, work.effective_batch_size)
    )
    reading = (
        passes * weight_bytes / peaks.bytes_per_second if weight_bytes > UNCACHED_BYTES else 0.0
    )
    return max(flops / peaks.flops_per_second, reading)


def _min_image_tokens(work: Workload) -> float:
    """Tokens per item, at least: a video VAE makes one latent frame of four."""
    family = FAMILIES.get(work.model.family)
    side = family.size_multiple_px if family else 32
    bucket = work.largest_bucket
    return bucket.width_px * bucket.height_px / side**2 * max(1.0, bucket.num_frames / 4)


def _min_bits(candidate: Candidate) -> int:
    """Bits per stored parameter, at least."""
    if candidate.quantization != "none":
        weight_format = WEIGHT_FORMATS.get(candidate.quantization)
        return int(
            8 * (weight_format.bytes_per_parameter if weight_format else MIN_BYTES_PER_PARAMETER)
        )
    return 32 if candidate.precision == "fp32" else 16
