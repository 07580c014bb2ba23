"""A finished run, against the promise of its plan."""

from pydantic import Field

from autotune.plan.base import Frozen, NaturalInt, PositiveInt
from autotune.plan.candidate import Candidate, PhasePeak, QuantizationError
from autotune.plan.prediction import Limit


class AdapterVerdict(Frozen):
    """Norms of the trained adapter, and its effect on the loss."""

    num_layers: int = NaturalInt
    num_unmoved: int = NaturalInt
    """Number of layers before the last block whose update is still zero: no gradient reached
    them."""
    num_not_finite: int = NaturalInt
    layer_norms: dict[str, float]
    """Frobenius norm of each layer's update, up @ down * alpha / rank; 0 if it is not finite.
    Layers of the last block may stay 0: if the model discards the text that leaves it, no
    gradient reaches them."""
    base_loss: float | None
    """Mean loss without the adapter, on images and noise of steps that were not trained on."""
    adapter_loss: float | None
    """Mean loss with the adapter, on the same images and noise."""


class ValidationResult(Frozen):
    """The loss on images that were held out of training, always at the same noise levels and
    noise."""

    num_images: int = PositiveInt
    base_loss: float
    """Loss without the adapter."""
    final_loss: float | None
    """Loss after the last step; None if it was not finite."""
    lowest_loss: float
    lowest_step: int = PositiveInt
    """Number of steps after which it was lowest."""
    kept_step: int = PositiveInt
    """Number of steps after which the adapter was kept."""


class RunReport(Frozen):
    """A training run, against the promise of its plan."""

    plan_digest: str
    num_steps: int
    resumed_at: int = Field(default=0, ge=0)
    """Number of steps that an earlier start of this run had taken."""
    total_seconds: float
    """Wall time of this start."""
    expected_step_seconds: float
    measured_step_seconds: float
    data_seconds: float = Field(default=0.0, ge=0)
    """Mean time that a step waited for data."""
    limited_by: Limit | None = None
    """The bottleneck of its steps; None if the plan does not hold its prediction."""
    expected_peak_memory_bytes: int
    measured_peak_memory_bytes: int | None
    """Step memory; None if the run was too short to measure it."""
    expected_phases: tuple[PhasePeak, ...] = ()
    """Measured phases of the rehearsal; empty if the plan was predicted."""
    phases: tuple[PhasePeak, ...] = ()
    images_per_second: float
    gpu_utilization: float | None = None
    """Mean share of time that the GPU computed, in [0, 1]; None without NVML."""
    first_loss: float
    final_loss: float
    warnings: tuple[str, ...] = ()
    settings: Candidate
    """Settings that the run ended with: the plan's, or a fallback, which a warning then names."""
    gradient_spikes: int = 0
    """Gradients whose norm was far above those of the steps before."""
    nonfinite_gradients: int = 0
    """Gradients that were not finite; their steps were taken again."""
    overflowed_gradients: int = 0
    """Gradients that overflowed fp16; their steps were skipped."""
    quantization_error: QuantizationError | None = None
    validation: ValidationResult | None = None
    """None if no images were held out."""
    verdict: AdapterVerdict | None = None
    adapter: str = Field(pattern=r"^[\w.-]+$")
    """File name of the adapter inside the output folder."""
