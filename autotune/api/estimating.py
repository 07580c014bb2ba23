"""`estimate`: what one candidate would take, before anything runs."""

from pydantic import ValidationError

from autotune.api.doors import takes
from autotune.api.machines import hardware_for
from autotune.errors import InvalidInput
from autotune.events import StatusChanged
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import require_choice
from autotune.knobs.settings import allow_optimizer, plain_choices
from autotune.models.resolve import read_parts, resolve_model
from autotune.plan.base import first_problem
from autotune.plan.candidate import Candidate
from autotune.plan.job import ModelRef
from autotune.plan.prediction import Estimate
from autotune.plan.request import EstimateRequest
from autotune.system.process import collect_rarely

NUMBERS = ("micro_batch_size", "checkpointed_blocks")
CHOSEN_BY_MACHINE = ("precision", "optimizer", "allocator")
"""Settings whose default is the first choice for the machine and the work rather than the
field's default."""


@takes(EstimateRequest, "model")
@collect_rarely()
def estimate(request: EstimateRequest) -> Estimate:
    """Predict memory, time and cost of one candidate. Runs nothing and downloads nothing.

    Raises:
        InvalidInput: the model, the hardware or a setting does not exist, or settings do not go
            together.

    Example:
        >>> autotune.estimate("flux1-dev", hardware="4090", quantization="torchao-int8").run_memory_bytes
    """
    from autotune.train.prepare import check_overrides, describe_workload

    request.require_named()
    request.on_event(StatusChanged(text="tracing the model"))
    resolved = resolve_model(ModelRef.of(request.model))
    family = resolved.family
    batch = max(request.micro_batch_size, family.defaults.effective_batch_size)
    batch = request.given.get("effective_batch_size", batch)
    work = request.changed(effective_batch_size=batch)
    if ":" in request.optimizer_choice.name:
        allow_optimizer(request.optimizer_choice.name)
    settings = {
        name: value
        for name, value in request.given.items()
        if name in Candidate.model_fields and name not in ("optimizer", *NUMBERS)
    }
    for name, value in settings.items():
        require_choice(name, value)
    check_overrides(family, work)
    profile = hardware_for(
        request.hardware,
        host_memory=request.host_memory,
        assume=request.assume,
        on_event=request.on_event,
    )
    from autotune.cost.estimate import estimate as estimate_candidate  # mistakes are told by now
    from autotune.cost.estimate import require_divisor
    from autotune.cost.predict import CostModel

    require_divisor(request.micro_batch_size, batch)
    context = TuningContext(profile, family, describe_workload(resolved, None, work))
    total = context.workload.model.num_blocks
    blocks = {"all": total, "none": 0}.get(str(request.checkpointed_blocks))
    try:
        candidate = Candidate.model_validate(
            {
                **{name: plain_choices(context)[name][0] for name in CHOSEN_BY_MACHINE},
                **settings,
                "checkpointed_blocks": request.checkpointed_blocks if blocks is None else blocks,
                "micro_batch_size": request.micro_batch_size,
            }
        )
    except ValidationError as error:
        where, why = first_problem(error)
        raise InvalidInput(f"{where}: {why.lower()}", hint="give another value") from error
    cost = CostModel.build(profile, context.workload, family, resolved.config, read_parts(resolved))
    return estimate_candidate(
        cost, candidate, num_steps=request.num_steps, price_per_hour=request.price_per_hour
    )
