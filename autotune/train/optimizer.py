"""The adapter's optimizer and learning rate, with all that a resumed run needs of them."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from torch import Tensor, nn

from autotune.knobs.settings import build_optimizer
from autotune.plan.job import Job
from autotune.plan.workload import ADAMW, OptimizerChoice
from autotune.weights.stream import attribute_tensors

PLAIN = (bool, int, float, str, type(None))
PLATEAU_FACTOR = 0.5
# Epochs before the rate is halved: a diffusion loss is noisy, and torch's 10 rarely pass.
PLATEAU_PATIENCE = 5


class LearningRate:
    """The schedule of an optimizer's rate; `step` is called after each optimizer step."""

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
        plain = (*PLAIN, list)
        state = self.schedule.state_dict().items()
        schedule = {key: value for key, value in state if isinstance(value, plain)}
        return {"rate": self.value, "losses": self.losses, "schedule": schedule}

    def load_state(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state["schedule"])
        self.losses = list(state["losses"])
        for group in self.optimizer.param_groups:
            group["lr"] = state["rate"]


class AdapterOptimizer:
    """An optimizer on fp32 masters: bf16 loses updates smaller than 1/256 of a parameter."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        learning_rate: float,
        weight_decay: float,
        max_grad_norm: float,
        choice: OptimizerChoice = ADAMW,
        ema_decay: float = 0.0,
    ) -> None:
        self.parameters = list(parameters)
        self.masters = [
            p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in parameters
        ]
        self.max_grad_norm = max_grad_norm
        # Decay pulls on all: an adapter has no norms or biases, for which it would be harmful.
        rates = {"learning_rate": learning_rate, "weight_decay": weight_decay}
        self.inner: Any = build_optimizer(choice, self.masters, **rates)
        # Schedule-free learns at other weights than those to be used.
        self.averages_itself = hasattr(self.inner, "train") and hasattr(self.inner, "eval")
        self._set_mode(training=True)
        self.scaler = self._make_scaler()
        self.ema_decay, self.num_updates = ema_decay, 0
        self.averages = [master.detach().clone() for master in self.masters] if ema_decay else []
        self._stepped = set(self.inner.state)  # masters whose state is whole

    def _set_mode(self, *, training: bool) -> None:
        if self.averages_itself:
            (self.inner.train if training else self.inner.eval)()

    def _make_scaler(self, state: Mapping[str, Any] | None = None) -> torch.amp.GradScaler | None:
        if not any(parameter.dtype == torch.float16 for parameter in self.parameters):
            return None
        scaler = torch.amp.GradScaler(self.masters[0].device.type)
        if state:
            scaler.load_state_dict(dict(state))
        return scaler

    @property
    def loss_scale(self) -> Tensor | None:
        """Return the next loss's factor, a scalar on the device; None without a scale."""
        one = torch.ones((), device=self.masters[0].device)
        return self.scaler.scale(one) if self.scaler else None

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss) if self.scaler else loss

    def step(self) -> Tensor:
        """Clip, update and clear the gradients; return their norm before clipping, unscaled. If it
        is not finite only the scale falls, so that the step can be taken again."""
        self._take_gradients()
        if self.scaler:
            self.scaler.unscale_(self.inner)
        norm = nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm)
        if self.inner.defaults.get("fused"):
            # As GradScaler tells it: without waiting for the device.
            self.inner.found_inf = (~norm.isfinite()).float()
            self.inner.step()
        elif norm.isfinite():
            self.inner.step()
        if self.scaler:
            self.scaler.update()
        self.inner.zero_grad(set_to_none=True)
        if len(self._stepped) != len(self.inner.state):
            self._stepped = set(self.inner.state)
            torch.cuda.empty_cache()  # it lies between what the first step has freed
        self._copy_to_parameters()
        return norm

    def _take_gradients(self) -> None:
        """Move gradients to the masters by one kernel, as there may be 1,440."""
        pairs = zip(self.parameters, self.masters, strict=True)
        given = [
            (p, master, p.grad) for p, master in pairs if master is not p and p.grad is not None
        ]
        copies = [torch.empty_like(master) for _, master, _ in given]
        if given:
            torch._foreach_copy_(copies, [gradient for *_, gradient in given])
        for (parameter, master, _), copy in zip(given, copies, strict=True):
            master.grad, parameter.grad = copy, None

    @torch.no_grad()
    def average(self) -> None:
        """Have the average follow a step, faster at first, as diffusers' EMAModel does."""
        if self.averages:
            self.num_updates += 1
            decay = min(self.ema_decay, (1 + self.num_updates) / (10 + self.num_updates))
            masters = [master.detach() for master in self.masters]
            torch._foreach_lerp_(self.averages, masters, 1 - decay)

    def discard_step(self) -> None:
        """Drop gradients and partial state of a step that failed, so that it can be taken again."""
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None
        for master in self.inner.state.keys() - self._stepped:
            del self.inner.state[master]  # memory ran out between one moment and the next
        if self.scaler:  # which may have unscaled that step's gradients
            self.scaler = self._make_scaler(self.scaler.state_dict())

    def _copy_to_parameters(self) -> None:
        if self.parameters[0] is not self.masters[0]:
            masters = [master.data for master in self.masters]
            torch._foreach_copy_([parameter.data for parameter in self.parameters], masters)

    def live_tensors(self, transformer: nn.Module) -> list[Tensor]:
        """List what stays on the device between steps: weights, masters and state."""
        weights = *transformer.parameters(), *transformer.buffers(), *attribute_tensors(transformer)
        values = (value for state in self.inner.state.values() for value in state.values())
        kept = [value for value in values if isinstance(value, Tensor)]
        return [*weights, *self.masters, *self.averages, *kept]

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the adapter the values to be saved, for a while."""
        if not (self.averages_itself or self.averages):
            yield
            return
        kept = [master.detach().clone() for master in self.masters]
        try:
            self.turn_to_average()
            yield
        finally:
            self._set_mode(training=True)
            self._set_masters(kept)  # turning back computes them, up to rounding

    def turn_to_average(self) -> None:
        """Give the adapter the values to be saved; no step can follow."""
        self._set_mode(training=False)
        self._set_masters(self.averages or self.masters)

    @torch.no_grad()
    def _set_masters(self, values: Sequence[Tensor]) -> None:
        for master, value in zip(self.masters, values, strict=True):
            master.copy_(value)
        self._copy_to_parameters()

    def master_state(self) -> dict[str, Tensor]:
        numbered = enumerate(self.masters)
        return {f"{number:05}.master": master.detach() for number, master in numbered}

    def load_masters(self, tensors: Mapping[str, Tensor]) -> None:
        self._set_masters([tensors[f"{number:05}.master"] for number in range(len(self.masters))])

    def _values(self) -> dict[str, dict[str, Any]]:
        group, state = dict(self.inner.param_groups[0]), self.inner.state
        for name in ("params", "lr", "initial_lr"):
            group.pop(name, None)
        known = [(number, master) for number, master in enumerate(self.masters) if master in state]
        return {"group": group, **{f"{number:05}": state[master] for number, master in known}}

    def state(self) -> dict[str, Tensor]:
        """Return masters and the optimizer's tensors; with `numbers`, a run continues exactly."""
        found = self.master_state()
        found |= {f"{number:05}.average": tensor for number, tensor in enumerate(self.averages)}
        for at, values in self._values().items():
            tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
            found |= {f"{at}.{name}": value for name, value in tensors.items()}
        return found

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Return what the optimizer keeps besides tensors, as JSON."""
        found: dict[str, dict[str, Any]] = {}
        if self.averages:
            found["average"] = {"num_updates": self.num_updates}
        found |= {"scaler": self.scaler.state_dict()} if self.scaler else {}
        for at, values in self._values().items():
            if plain := {name: v for name, v in values.items() if isinstance(v, PLAIN)}:
                found[at] = plain
        return found

    def load_state(
        self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.load_masters(tensors)
        found: dict[str, dict[str, Any]] = {at: dict(each) for at, each in numbers.items()}
        self.num_updates = found.pop("average", {}).get("num_updates", 0)
        self.scaler = self._make_scaler(found.pop("scaler", None))
        for number, average in enumerate(self.averages):
            average.copy_(tensors[f"{number:05}.average"])
        device = self.masters[0].device
        for key, tensor in tensors.items():
            at, _, name = key.partition(".")
            if name not in ("master", "average"):
                found.setdefault(at, {})[name] = tensor.to(device, copy=True)
        self.inner.param_groups[0].update(found.pop("group", {}))
        self.inner.state.update({self.masters[int(at)]: state for at, state in found.items()})
        self._stepped = set(self.inner.state)
