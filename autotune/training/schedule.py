"""The learning rate over a run: diffusers' schedules, and torch's ReduceLROnPlateau on the mean
loss of each epoch.
"""

from typing import Any

import torch
from diffusers.optimization import get_scheduler

from autotune.schema import Job

PLATEAU_FACTOR = 0.5
PLATEAU_PATIENCE = 5
"""Epochs without a lower mean loss before the rate is halved: a diffusion loss is noisy, and
torch's 10 rarely pass.
"""


class LearningRate:
    """Sets the rate of an optimizer, one call of `step` per optimizer step."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, job: Job, num_steps: int, epoch_steps: int
    ) -> None:
        self.optimizer = optimizer
        self.epoch_steps = epoch_steps
        self.losses: list[float] = []
        self.on_plateau = job.lr_scheduler == "plateau"
        self.schedule: Any
        if self.on_plateau:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
            self.schedule = plateau(optimizer, factor=PLATEAU_FACTOR, patience=PLATEAU_PATIENCE)
        else:
            steps = {"num_warmup_steps": job.lr_warmup_steps, "num_training_steps": num_steps}
            self.schedule = get_scheduler(job.lr_scheduler, optimizer, **steps)

    @property
    def value(self) -> float:
        """The rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self, loss: float) -> None:
        if not self.on_plateau:
            self.schedule.step()
            return
        self.losses.append(loss)
        if len(self.losses) == self.epoch_steps:
            self.schedule.step(sum(self.losses) / len(self.losses))
            self.losses.clear()

    def state(self) -> dict[str, Any]:
        """All that `load_state` needs, as JSON."""
        plain = (int, float, str, bool, list, type(None))
        schedule = {
            key: value
            for key, value in self.schedule.state_dict().items()
            if isinstance(value, plain)
        }
        return {"rate": self.value, "losses": self.losses, "schedule": schedule}

    def load_state(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state["schedule"])
        self.losses = list(state["losses"])
        for group in self.optimizer.param_groups:
            group["lr"] = state["rate"]
