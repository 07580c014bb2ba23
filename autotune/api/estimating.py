"""`estimate`: what one candidate would take, before anything runs."""

from collections.abc import Collection, Mapping

from pydantic import ValidationError

from autotune.api.amounts import ImageSize, MemoryAmount, image_size
from autotune.api.machines import hardware_for
from autotune.api.options import choose_optimizer
from autotune.cost.estimate import estimate as estimate_candidate
from autotune.cost.estimate import require_divisor
from autotune.cost.predict import CostModel
from autotune.errors import InvalidInput
from autotune.events import OnEvent, StatusChanged, ignore_event
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import require_choice
from autotune.knobs.settings import plain_choices
from autotune.models.resolve import read_parts, resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import ModelRef
from autotune.plan.prediction import Estimate
from autotune.plan.workload import ADAMW, AdapterKind, OptionValue
from autotune.system.process import collect_rarely
from autotune.train.workload import WorkloadOverrides, check_overrides, describe_workload

CHOSEN_BY_MACHINE = ("precision", "optimizer", "allocator")
"""Settings whose default is the first choice for the machine and the work rather than the
field's default."""


@collect_rarely()
def estimate(
    model: str,
    *,
    hardware: str | HardwareProfile | None = None,
    host_memory: MemoryAmount | None = None,
    assume: Collection[str] = (),
    resolution: ImageSize | None = None,
    num_frames: int | None = None,
    text_tokens: int | None = None,
    rank: int | None = None,
    targets: str | None = None,
    adapted_blocks: str = "all",
    adapter: AdapterKind = "lora",
    ema_decay: float = 0.0,
    optimizer: str | None = None,
    optimizer_options: Mapping[str, OptionValue] | None = None,
    effective_batch_size: int | None = None,
    micro_batch_size: int = 1,
    checkpointed_blocks: int | None = None,
    num_steps: int | None = None,
    price_per_hour: float | None = None,
    on_event: OnEvent = ignore_event,
    **settings: str | int,
) -> Estimate:
    """Predict memory, time and cost of one candidate. Runs nothing and downloads nothing.

    Args:
        model: name of a known model, or a folder in the diffusers layout.
        hardware, host_memory, assume: a card of the catalog and what it lies in, as for `plan`;
            None for this one.
        resolution, num_frames, text_tokens, rank, targets, adapted_blocks, adapter, ema_decay,
        optimizer,
            optimizer_options, effective_batch_size: as for `plan`.
        micro_batch_size, checkpointed_blocks: images per forward pass; blocks that recompute
            activations (None: all).
        num_steps, price_per_hour: of the job in optimizer steps, of the machine in the currency of
            the answer.
        on_event: listener to progress.
        settings: other fields of `Candidate`, e.g. `quantization="torchao-int8"`.

    Raises:
        InvalidInput: the model, the hardware or a setting does not exist, or settings do not go
            together.

    Example:
        >>> autotune.estimate("flux1-dev", hardware="4090", quantization="torchao-int8").run_memory_bytes
    """
    on_event(StatusChanged(text="tracing the model"))
    resolved = resolve_model(ModelRef.of(model))
    if effective_batch_size is None:
        effective_batch_size = max(micro_batch_size, resolved.family.defaults.effective_batch_size)
    overrides = WorkloadOverrides(
        size_px=None if resolution is None else image_size(resolution), num_frames=num_frames,
        text_tokens=text_tokens,
        rank=rank, targets=targets or "attention", adapted_blocks=adapted_blocks, adapter=adapter,
        ema_decay=ema_decay,
        optimizer=choose_optimizer(ADAMW, optimizer, optimizer_options),
        effective_batch_size=effective_batch_size,
    )  # fmt: skip
    for name, value in settings.items():
        require_choice(name, value)
    check_overrides(resolved.family, overrides)
    require_divisor(micro_batch_size, effective_batch_size)
    profile = hardware_for(hardware, host_memory=host_memory, assume=assume, on_event=on_event)
    context = TuningContext(profile, resolved.family, describe_workload(resolved, None, overrides))
    candidate = _candidate(
        context, checkpointed_blocks, micro_batch_size=micro_batch_size, **settings
    )
    cost = CostModel.build(
        profile, context.workload, resolved.family, resolved.config, read_parts(resolved)
    )
    return estimate_candidate(cost, candidate, num_steps=num_steps, price_per_hour=price_per_hour)


def _candidate(
    context: TuningContext, checkpointed_blocks: int | None, **settings: str | int
) -> Candidate:
    preferred = {name: plain_choices(context)[name][0] for name in CHOSEN_BY_MACHINE}
    total = context.workload.model.num_blocks
    preferred["checkpointed_blocks"] = total if checkpointed_blocks is None else checkpointed_blocks
    try:
        return Candidate.model_validate({**preferred, **settings})
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(
            f"{first['loc'][0]}: {first['msg'].lower()}", hint="give another value"
        ) from error
