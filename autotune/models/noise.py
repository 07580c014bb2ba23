"""Noise processes: they mix noise into clean latents, and say what the model predicts of it.

Levels are a process's own: of flow matching the share of noise in [0, 1], of a discrete schedule
the number of a timestep.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, ClassVar, Literal, get_args

from autotune.errors import InvalidInput
from autotune.plan.job import Weighting
from autotune.system.lazy import Tensor, diffusers, torch

Prediction = Literal["epsilon", "v_prediction"]  # diffusers' names

MIN_SNR_GAMMA = 5.0  # signal-to-noise ratio at most (Hang et al. 2023, section 3.4)


class NoiseProcess(ABC):
    """Levels, mixture and target of training. Immutable."""

    weightings: ClassVar[tuple[Weighting, ...]]  # weights of the loss that are defined for it
    lowest_share: float = 0.0  # part of the way from clean to noise that levels are drawn from
    highest_share: float = 1.0

    @abstractmethod
    def level(self, share: float) -> float:
        """Return the level at a share of the way from clean (0) to noise (1)."""

    @abstractmethod
    def add_noise(self, clean: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        """Mix `noise` into `clean`, both (batch, ...), at `levels` (batch,)."""

    @abstractmethod
    def target(self, clean: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        """Return what the model is to predict, in the shape of `clean`."""

    @abstractmethod
    def weights(self, levels: Tensor, weighting: Weighting) -> Tensor:
        """Weigh each image in the loss (batch,); only for `weightings` other than `none`."""

    def check_weighting(self, weighting: Weighting, name: str) -> None:
        """Raise InvalidInput if the loss of the family called `name` has no such weights."""
        if weighting not in self.weightings:
            hint = f"weights of its loss: {', '.join(self.weightings)}"
            raise InvalidInput(f"{weighting} is not defined for the noise of {name}", hint=hint)


def _over_batch(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1)).to(like.dtype)


@dataclass(frozen=True)
class FlowMatching(NoiseProcess):
    """noisy = (1 - level) * clean + level * noise; the model predicts noise - clean."""

    lowest_share: float = 0.0
    highest_share: float = 1.0

    weightings = ("none", "sigma_sqrt", "cosmap")

    def level(self, share: float) -> float:
        return share

    def add_noise(self, clean: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        share = _over_batch(levels, clean)
        return (1 - share) * clean + share * noise

    def target(self, clean: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        return noise - clean

    def weights(self, levels: Tensor, weighting: Weighting) -> Tensor:
        from diffusers.training_utils import compute_loss_weighting_for_sd3  # takes seconds

        weights: Tensor = compute_loss_weighting_for_sd3(weighting, levels)
        return weights


FLOW_MATCHING = FlowMatching()


@dataclass(frozen=True)
class DiscreteDiffusion(NoiseProcess):
    """noisy = a * clean + s * noise with a^2 + s^2 = 1, from a table of levels (Ho et al. 2020);
    the model predicts the noise (epsilon), or a * noise - s * clean (Salimans and Ho 2022,
    v-prediction). Fields are those of diffusers' schedulers, by default Stable Diffusion's."""

    prediction_type: Prediction = "epsilon"
    num_train_timesteps: int = 1000
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: str = "scaled_linear"
    rescale_betas_zero_snr: bool = False

    weightings = ("none", "min_snr")

    @classmethod
    def from_scheduler(cls, config: Mapping[str, Any]) -> DiscreteDiffusion:
        """Build the process of a model with this scheduler. Raises InvalidInput if unusable."""
        prediction = config.get("prediction_type", "epsilon")
        if prediction not in get_args(Prediction):
            hint = "autotune trains models that predict epsilon or v"
            raise InvalidInput(f"the scheduler's prediction type is {prediction!r}", hint=hint)
        return cls(**{name: config[name] for name in cls.__dataclass_fields__ if name in config})

    def level(self, share: float) -> float:
        return float(min(int(share * self.num_train_timesteps), self.num_train_timesteps - 1))

    def add_noise(self, clean: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        signal, spread = self._scales(clean, levels)
        return signal * clean + spread * noise

    def target(self, clean: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        if self.prediction_type == "epsilon":
            return noise
        signal, spread = self._scales(clean, levels)
        return signal * noise - spread * clean

    def weights(self, levels: Tensor, weighting: Weighting) -> Tensor:
        remaining = _signal_share(self, levels.device)[levels.long()]
        ratio = remaining / (1 - remaining)
        # In a v-prediction's loss an image weighs by ratio + 1 already, in epsilon's by ratio.
        weighs = ratio if self.prediction_type == "epsilon" else ratio + 1
        return ratio.clamp(max=MIN_SNR_GAMMA) / weighs

    def _scales(self, clean: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
        remaining = _signal_share(self, levels.device)[levels.long()]
        return _over_batch(remaining.sqrt(), clean), _over_batch((1 - remaining).sqrt(), clean)


@cache
def _signal_share(process: DiscreteDiffusion, device: torch.device) -> Tensor:
    table: Tensor = diffusers.DDPMScheduler(**asdict(process)).alphas_cumprod
    return table.to(device)
