"""The keyword arguments of `plan` and `estimate`, each documented below its name. None is
needed."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypedDict

from pydantic import ValidationError

from autotune.api.amounts import ImageSize, MemoryAmount
from autotune.errors import InvalidInput, suggest_nearest
from autotune.knobs.settings import allow_optimizer
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import JobOverrides
from autotune.plan.plan import TrainingPlan
from autotune.plan.workload import AdapterKind, Objective, OptimizerChoice, OptionValue, Quality

KnobValues = Mapping[str, str | int]
"""A value for each of some knobs, e.g. `{"quantization": "none"}`."""


class WorkloadOptions(TypedDict, total=False):
    """What is trained, as far as it decides memory and speed. What is left out has the family's
    default.

    Example:
        >>> work: autotune.WorkloadOptions = {"hardware": "4090", "rank": 32, "adapter": "dora"}
        >>> autotune.list_choices("qwen-image", **work)
    """

    hardware: str | HardwareProfile
    """What to plan for instead of this machine: a catalog name such as `4090`, a saved probe's
    file, or a profile."""
    host_memory: MemoryAmount
    """Memory of the host that a card of the catalog is taken to be in; 64 GiB by default."""
    assume: Collection[str]
    """Packages of attention backends that such a card is taken to have: `flash-attn`,
    `flash-attn-3`, `flash-attn-4`, `xformers`. Their speed is then taken from publications."""
    resolution: ImageSize
    """Side of a square in pixels, (width, height) in pixels, or text such as `512x768`."""
    num_frames: int
    """Frames of a clip, for video models."""
    rank: int
    """Rank of the adapter."""
    targets: str
    """Named set of adapted layers: `attention` (default), `attention+mlp` or `all-linear`; of
    SDXL also `attention+mlp+proj`, which sd-scripts adapts. Or patterns of names or their ends:
    `to_q,ff.net.*`."""
    adapted_blocks: str
    """Numbers of the blocks that these layers lie in: `10-30`, `0-4,18`; `all` by default."""
    adapter: AdapterKind
    """`lora` (default), `rslora` or `dora`."""
    ema_decay: float
    """Decay of an average of the adapter over steps, which is saved in place of the last; 0 by
    default: none."""
    optimizer: str
    """`adamw` (default), `adamw-8bit`, `adafactor`, `lion`, `prodigy`, `schedule-free`, or
    `package:Class`, which is imported: a subclass of torch.optim.Optimizer."""
    optimizer_options: Mapping[str, OptionValue]
    """Its keyword arguments beside learning rate and weight decay, which are the job's."""
    effective_batch_size: int
    """Images per optimizer step."""
    price_per_hour: float
    """Price of an hour of one GPU, for what the job costs, in any currency."""


class PlanOptions(WorkloadOptions, JobOverrides, total=False):
    """How to plan, and fields of the plan's job.

    Example:
        >>> options: autotune.PlanOptions = {"max_trials": 4, "path": "plan.yaml"}
        >>> autotune.plan("qwen-image", "photos", **options)
    """

    path: str | Path
    """File to write the plan to. That it can be written is checked before the search."""
    earlier: TrainingPlan | str | Path
    """A plan, or its file, that is made again; other arguments replace what it was made for."""
    lora_alpha: float
    """Scale of the adapter times its rank; in proportion to the rank by default."""
    lora_dropout: float
    """Share of the adapter's inputs that a step leaves out; 0 by default."""
    quality: Quality
    """Least fidelity of the base weights: `exact`, `high` (default) or `compact`."""
    objective: Objective
    """What to optimize: `throughput` (default) or `memory`."""
    pins: KnobValues
    """The only value to choose, for some knobs."""
    exclusions: KnobValues | tuple[tuple[str, str], ...]
    """A value never to choose, for some knobs; pairs if one knob has several."""
    for_trainer: str
    """Another trainer, as `export_config` names it: choose only what it can express, predicted
    as it takes memory."""
    num_gpus: int
    """GPUs that train together, one process each."""
    max_memory: MemoryAmount
    """The most memory that a run may take in any of its phases, its libraries included: of the
    GPU or, without one, of the host's memory, where pages of files that can be dropped and read
    again do not count."""
    reserve_memory: MemoryAmount
    """Memory to leave to a display and other programs, instead of the usual reserve: 1 GiB if
    the card drives a display, an eighth of memory that is shared with the host. A card of the
    catalog is taken to drive none."""
    cap_memory: MemoryAmount
    """Rehearse a device that has only so much memory."""
    use_records: bool
    """Whether what machines measured before may shorten the search; True by default."""
    max_trials: int
    """The most trials to run; 8 by default."""
    search_seconds: float
    """The most seconds of trials; 5% of the run by default, at least 60."""
    fresh: bool
    """Forget what an interrupted search has measured."""
    study: str
    """Name under which trials and the plan are kept."""
    storage: str
    """URL of a PostgreSQL or MySQL database in which several machines share a study."""


def require_known(names: Collection[str], known: Collection[str], kind: str) -> None:
    """Raise InvalidInput if any of the names is not known; `kind` says what the names are."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise InvalidInput(
            f"there is no {kind} {unknown[0]!r}", hint=suggest_nearest(unknown[0], known)
        )


def choose_optimizer(
    base: OptimizerChoice, name: str | None, options: Mapping[str, OptionValue] | None
) -> OptimizerChoice:
    """What the user asks for, on top of `base`; a `package:Class` that the user names may be
    loaded.

    Raises:
        InvalidInput: it is no name of an optimizer, or an option has no such value.
    """
    if name is None and options is None:
        return base
    chosen = base.name if name is None else name
    kept = dict(base.options) if chosen == base.name else {}
    try:
        made = OptimizerChoice(name=chosen, options=tuple({**kept, **(options or {})}.items()))
    except ValidationError as error:
        first = error.errors()[0]
        why = (
            "neither a name nor package:Class"
            if first["loc"] == ("name",)
            else first["msg"].lower()
        )
        message = f"{chosen!r} is not an optimizer with such options: {why}"
        raise InvalidInput(
            message, hint="give --optimizer NAME or package:Class, --optimizer-option name=value"
        ) from error
    if name is not None and ":" in name:
        allow_optimizer(name)
    return made


def require_optimizer(plan: TrainingPlan, named: str | None) -> None:
    """Let the plan's optimizer be loaded if the user names it.

    Raises:
        InvalidInput: that is another.
    """
    planned = plan.frozen.workload.optimizer
    if named not in (None, planned.name):
        hint = f"plan for it: autotune plan --from PLAN --optimizer {named}"
        raise InvalidInput(
            f"the plan was made for the optimizer {planned.name}, not for {named}", hint=hint
        )
    choose_optimizer(planned, named, None)
