"""Spots records that cannot be true, by physics: what no device can do is a mistake or a lie, and is named.

Bounds are loose on purpose: a true record must never be refused. What is merely unlikely is left to the cost model
and to the local trials that verify a record before anything stands on it (`autotune.sharing.warm_start`).
"""

import math
from collections.abc import Iterator, Sequence

from autotune.backends import WEIGHT_FORMATS
from autotune.families import FAMILIES
from autotune.hardware import CatalogGpu, find_gpu, load_catalog
from autotune.schema import Candidate, TrialResult, Workload
from autotune.sharing.record import Record

PEAK_MARGIN = 1.3
"""Over a datasheet's peak: cards boost above it, 9% in the largest case of the catalog."""
LEAST_USED = 0.25
"""Share of the parameters that every image token at least goes through: in a model with two streams a token meets the
weights of its own, less what acts once per image."""
UNCACHED_BYTES = 4 << 30
"""Weights far above any cache, so that every pass reads them from memory."""
UNKNOWN_BYTES = 0.5
"""The least that any storage which trains takes per parameter."""
SPILL = 1.02
"""Peak over total memory: above it the step would have spilled."""


def implausible(record: Record) -> tuple[str, ...]:
    """Why the record cannot be true, one line each; empty when nothing speaks against it."""
    return (*_promise(record), *_trials(record))


def _promise(record: Record) -> Iterator[str]:
    """Whether what it promises is what its trials measured."""
    expected, batch = record.expected, record.workload.effective_batch_size
    ran = [trial for trial in record.trials if trial.candidate == record.settings and trial.outcome == "ok"]
    seconds = [value for trial in ran for value in trial.step_seconds]
    peaks = [trial.peak_memory_bytes for trial in ran if trial.peak_memory_bytes]
    if not seconds or not min(seconds) * 0.9 <= expected.step_seconds <= max(seconds) * 1.1:
        yield "it promises a step time that its trials did not measure"
    if not peaks or not min(peaks) * 0.9 <= expected.peak_memory_bytes <= max(peaks) * 1.1:
        yield "it promises a peak of memory that its trials did not measure"
    if abs(expected.images_per_second * expected.step_seconds / batch - 1) > 0.01:
        yield "its images per second do not follow from its step time"


def _trials(record: Record) -> Iterator[str]:
    machine = record.machine
    gpu = find_gpu(machine.device_name, machine.total_memory_bytes)
    yield from _rates(record, gpu)
    for number, trial in enumerate(record.trials, start=1):
        yield from (f"trial {number}: {why}" for why in _impossible(record, trial, gpu))


def _rates(record: Record, gpu: CatalogGpu | None) -> Iterator[str]:
    """Predictions go by these, so that false ones could cover for false trials."""
    if record.machine.match_keys.get("device_kind") != "cuda":
        return
    known = (gpu,) if gpu else load_catalog()
    most = {"B/s": max(each.memory_gb_per_second for each in known) * 1e9, "FLOP/s": _peak_flops(known, gpu)}
    for rate in record.machine.rates:
        if rate.name.startswith(("memory.", "matmul.bf16.")) and rate.value > PEAK_MARGIN * most.get(
            rate.unit, math.inf
        ):
            yield f"its rate {rate.name} is above the device's peak"


def _peak_flops(known: Sequence[CatalogGpu], gpu: CatalogGpu | None) -> float:
    dtypes = ("bf16", "fp16", "fp8", "int8") if gpu is None else ("bf16", "fp16", "tf32")
    return 1e12 * max(each.dense_tflops.get(dtype, 0.0) for each in known for dtype in dtypes)


def _impossible(record: Record, trial: TrialResult, gpu: CatalogGpu | None) -> Iterator[str]:
    if any(seconds <= 0 for seconds in (*trial.step_seconds, *trial.warmup_seconds)):
        yield "a step took no time, or less"
        return
    if trial.outcome != "ok":
        return
    peak, total = trial.peak_memory_bytes, record.machine.total_memory_bytes
    if not trial.step_seconds or not peak:
        yield "it is said to have run, without times or memory"
        return
    weights = record.workload.model.num_parameters * _bits(trial.candidate) // 8
    if peak < weights:
        yield f"its peak of {peak / 2**30:.2f} GiB is less than its weights, {weights / 2**30:.2f} GiB"
    if total is not None and peak > SPILL * total:
        yield f"its peak of {peak / 2**30:.2f} GiB is more than the device has, {total / 2**30:.2f} GiB"
    if record.machine.match_keys.get("device_kind") == "cuda":
        fastest = min(trial.step_seconds)
        needed = _least_seconds(record.workload, trial.candidate, weights, gpu)
        if fastest < needed:
            yield f"a step of {fastest:.4g} s is faster than the device's peak allows, {needed:.4g} s"


def _least_seconds(work: Workload, candidate: Candidate, weights: int, gpu: CatalogGpu | None) -> float:
    """The least time of an optimizer step: by arithmetic at the peak, and by reading the weights from memory.

    Per token and parameter 2 FLOPs forward, 2 backward (to the activations: the base is frozen), 2 for each
    recomputation. A pass forward and one backward read every weight once per micro-batch.
    """
    known = (gpu,) if gpu else load_catalog()
    peak = PEAK_MARGIN * _peak_flops(known, gpu)
    bandwidth = PEAK_MARGIN * 1e9 * max(each.memory_gb_per_second for each in known)
    again = 1 + min(1.0, candidate.checkpointed_blocks / work.model.num_blocks) / 2
    flops = 4 * again * LEAST_USED * work.model.num_parameters * _image_tokens(work) * work.effective_batch_size
    passes = 2 * work.effective_batch_size / min(candidate.micro_batch_size, work.effective_batch_size)
    reading = passes * weights / bandwidth if weights > UNCACHED_BYTES else 0.0
    return max(flops / peak, reading)


def _image_tokens(work: Workload) -> float:
    """At least this many tokens per item: a video VAE makes one latent frame of four."""
    family = FAMILIES.get(work.model.family)
    side = family.size_multiple_px if family else 32
    bucket = work.largest_bucket
    return bucket.width_px * bucket.height_px / side**2 * max(1.0, bucket.num_frames / 4)


def _bits(candidate: Candidate) -> int:
    """Per stored parameter, at least."""
    if candidate.quantization != "none":
        storage = WEIGHT_FORMATS.get(candidate.quantization)
        return int(8 * (storage.bytes_per_parameter if storage else UNKNOWN_BYTES))
    return 32 if candidate.precision == "fp32" else 16
