"""What one candidate would take: memory, step time, a job's hours and money."""

from autotune.cost.predict import CostModel, choice_of
from autotune.cost.timing import Rates, host_flops_per_second
from autotune.cost.traced_model import PassChoice, VaeCost
from autotune.errors import InvalidInput
from autotune.knobs import registry, settings
from autotune.knobs.knob import TuningContext
from autotune.plan.candidate import Candidate
from autotune.plan.job import VALIDATION_DRAWS, num_previews
from autotune.plan.prediction import Estimate, JobTime, Prediction
from autotune.plan.workload import mean_text_tokens, pad_text

DISK_BYTES_PER_SECOND = 1e9  # a cold read from a plain NVMe disk, if no loader was measured
ENCODER_WIDTH = 4096
# Of the rate of products that wide, which text encoders reach on single captions.
ENCODER_SHARE = 0.6
# For cuDNN's plan of attention at a length that is new, twice that under checkpointing. Not
# measured here: a graph took .4 s (sgl-project/sglang#4650), one per shape .18 s
# (modelscope/FunASR#3705).
PLAN_SECONDS = 1.0
CHECKPOINTS_PER_JOB = 4
CHECKPOINT_SECONDS = 1.0  # writing and syncing some hundred megabytes


def estimate(
    cost: CostModel,
    candidate: Candidate,
    *,
    num_steps: int | None = None,
    price_per_hour: float | None = None,
) -> Estimate:
    """Predict `candidate` and a job of `num_steps` with it; by default as many as the family
    advises.

    Raises InvalidInput for an impossible candidate.
    """
    workload, hardware = cost.workload, cost.hardware
    require_sound(candidate, cost.context)
    prediction = cost.predict(candidate)
    images = max(1, sum(bucket.num_items for bucket in workload.buckets))
    usual = cost.family.defaults.num_steps(images, workload.effective_batch_size)
    steps = usual if num_steps is None else num_steps
    counts = {"num_steps": steps, "num_images": images, "num_previews": num_previews(steps)}
    job = job_time(cost, prediction, **counts)
    hours = job.total_seconds / 3600
    return Estimate(
        hardware=hardware.device.name,
        budget_bytes=cost.budget_bytes,
        fits=prediction.run_memory_bytes <= cost.budget_bytes,
        workload=workload,
        prediction=prediction,
        run_memory_bytes=prediction.run_memory_bytes,
        step_seconds=prediction.step_seconds,
        num_steps=steps,
        job=job,
        price_per_hour=price_per_hour,
        cost=None if price_per_hour is None else hours * price_per_hour,
    )


def job_time(
    cost: CostModel,
    prediction: Prediction,
    *,
    num_steps: int,
    num_images: int,
    num_previews: int,
    num_validations: int = 0,
) -> JobTime:
    """Return wall time of a job: load, caches, steps, previews, validations and checkpoints."""
    candidate, choice = prediction.candidate, choice_of(prediction.candidate)
    rates = cost.tables.rates_of(choice)
    model_bytes = cost.model.model_bytes(candidate.precision, "none")
    encoders = cost.model.parts.text_encoder_parameters
    disk = cost.hardware.rate(f"disk.{candidate.loader}") or DISK_BYTES_PER_SECOND
    element = settings.encoder_element_bytes(candidate.precision)
    vae = cost.model.vae_cost(candidate.precision)
    per_image = _caption_seconds(cost, rates, sum(encoders), element)
    per_image += _pixels_seconds(cost, rates, vae)
    forward = cost.tables.forward_seconds(choice)
    defaults, streamed = cost.family.defaults, 0.0
    if cost.family.other_denoisers:  # one works on half of the steps, and crosses the bus in each
        streamed = model_bytes.weight_bytes / rates.from_pageable / 2
    preview = defaults.preview_steps * defaults.preview_calls * (forward + streamed)
    load = (model_bytes.weight_bytes + sum(encoders) * element + vae.weight_bytes) / disk
    parts = {
        "load_seconds": load,
        "cache_seconds": num_images * per_image,
        "compile_seconds": registry.startup_seconds(candidate, cost.context)
        + plan_seconds(cost, choice, recomputes=candidate.recomputed_blocks > 0),
        "step_seconds": num_steps * prediction.step_seconds,
        "preview_seconds": num_previews * preview,
        "validation_seconds": num_validations * VALIDATION_DRAWS * forward,
        "save_seconds": CHECKPOINTS_PER_JOB * CHECKPOINT_SECONDS,
    }
    return JobTime(total_seconds=sum(parts.values()), **parts)


def plan_seconds(cost: CostModel, choice: PassChoice, *, recomputes: bool) -> float:
    """Return the time until cuDNN has a plan for every length of image and text in a run."""
    if cost.tables.kernel_of(choice) != "cudnn":
        return 0.0
    work, multiple = cost.workload, max(cost.tables.padded_to(choice), cost.family.text_multiple)
    longest = work.max_text_tokens
    shortest = (work.text_token_quantiles or (longest,))[0]
    num_lengths = 0
    for bucket in work.buckets:
        image_tokens = cost.model.image_tokens(bucket)
        first, last = (pad_text(tokens, image_tokens, multiple) for tokens in (shortest, longest))
        num_lengths += min(max(1, bucket.num_items), (last - first) // multiple + 1)
    return num_lengths * PLAN_SECONDS * (2 if recomputes else 1)


def _caption_seconds(cost: CostModel, rates: Rates, parameters: int, element_bytes: int) -> float:
    """Encoding one caption where caching puts the encoders; streamed ones cross the bus."""
    caching, tokens = cost.caching, mean_text_tokens(cost.workload)
    flops = 2 * parameters * tokens
    if caching.text_encoder_device == "cpu" and cost.hardware.device.kind != "cpu":
        return flops / host_flops_per_second(cost.hardware.host)
    computing = flops / (ENCODER_SHARE * rates.matmul_rate((tokens, ENCODER_WIDTH, ENCODER_WIDTH)))
    if not caching.text_encoder_streamed:
        return computing
    return computing + parameters * element_bytes / rates.from_pageable


def _pixels_seconds(cost: CostModel, rates: Rates, vae: VaeCost) -> float:
    """Encoding one item where caching settings have the VAE; other GPUs are taken to be as fast."""
    if cost.caching.vae_device == "cpu" and cost.hardware.device.kind != "cpu":
        return vae.encode_flops / host_flops_per_second(cost.hardware.host)
    return vae.encode_bytes_moved / rates.bandwidth


def require_divisor(size: int, effective: int) -> None:
    """Raise InvalidInput unless micro-batches of `size` make up the effective batch."""
    if size > 0 and effective % size:
        divisors = [d for d in range(1, effective + 1) if effective % d == 0]
        nearest = min(divisors, key=lambda d: (abs(d - size), d))
        what = f"a micro-batch of {size} does not divide the effective batch size {effective}"
        raise InvalidInput(what, hint=f"the nearest valid micro-batch size is {nearest}")


def require_sound(candidate: Candidate, context: TuningContext) -> None:
    """Raise InvalidInput if values are unknown, or do not go with the work or each other."""
    workload = context.workload
    for name, value in candidate:
        registry.require_choice(name, value)
    number, blocks = candidate.checkpointed_blocks, workload.model.num_blocks
    if number > blocks:
        what = f"{number} checkpointed blocks are more than the model's {blocks}"
        raise InvalidInput(what, hint=f"the nearest valid value is {blocks}, or `all`")
    require_divisor(candidate.micro_batch_size, workload.effective_batch_size)
    for knob in registry.KNOBS:
        if conflict := knob.why_not(candidate, context):
            what = f"{knob.name} cannot be {getattr(candidate, knob.name)} here"
            hint = "see which settings go together: autotune plan --list"
            raise InvalidInput(f"{what}: {conflict}", hint=hint)
