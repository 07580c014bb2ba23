"""What a training run did, against what its plan promised."""

from pydantic import Field

from autotune.schema.base import Frozen, NaturalInt
from autotune.schema.candidate import Candidate
from autotune.schema.trial import PhasePeak, QuantizationError


class AdapterVerdict(Frozen):
    """What the trained adapter looks like, and what it does to the loss."""

    num_layers: int = NaturalInt
    num_unmoved: int = NaturalInt
    """Layers before the last block whose update is still zero: no gradient reached them."""
    num_not_finite: int = NaturalInt
    layer_norms: dict[str, float]
    """Frobenius norm of each layer's update, up @ down * alpha / rank; 0 stands for one that is not finite. Layers of
    the last block may keep 0: where the model makes nothing of the text that comes out of it, nothing trains them."""
    base_loss: float | None
    """Mean loss without the adapter on images and noise of steps that were not trained on."""
    adapter_loss: float | None
    """The same with it."""


class RunReport(Frozen):
    """What a training run did, against what its plan promised."""

    plan_digest: str
    num_steps: int
    resumed_at: int = Field(default=0, ge=0)
    """Steps that an earlier start of this run had taken."""
    total_seconds: float
    """Of this start."""
    expected_step_seconds: float
    measured_step_seconds: float
    data_seconds: float = Field(default=0.0, ge=0)
    """Mean wait for data in a step."""
    expected_peak_memory_bytes: int
    measured_peak_memory_bytes: int | None
    """None for a run too short to measure it."""
    expected_phases: tuple[PhasePeak, ...] = ()
    """Of the rehearsal; empty where the plan was predicted."""
    phases: tuple[PhasePeak, ...] = ()
    images_per_second: float
    gpu_utilization: float | None = None
    """Mean share of time in [0, 1] that the GPU computed; None without NVML."""
    first_loss: float
    final_loss: float
    warnings: tuple[str, ...] = ()
    settings: Candidate
    """Those that it ended with: the plan's, or a fallback, which a warning then names."""
    quantization_error: QuantizationError | None = None
    verdict: AdapterVerdict | None = None
    adapter: str
    """File name of the adapter inside the output folder."""
