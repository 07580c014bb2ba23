"""A frozen adapter that is on while another one is trained, and off in all that comes of it.

People train distilled models with one, so that training does not undo their distillation. It is
merged into the weights as they arrive, so a step costs nothing more. Previews and validation take
away what it adds, layer by layer.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autotune.errors import InvalidInput
from autotune.models.family import Family
from autotune.plan.candidate import Candidate
from autotune.plan.workload import Workload
from autotune.weights.adapters import read_adapter, require_layers
from autotune.weights.files import BadWeights
from autotune.weights.stream import Transform


class FrozenLayer(NamedTuple):
    """What the adapter adds to a Linear layer: `scale * up @ down`, in fp32 on the host."""

    down: Tensor
    up: Tensor
    scale: float


class TrainingAdapter:
    """The frozen layers of a transformer, by name."""

    def __init__(self, path: Path, transformer: nn.Module, family: Family) -> None:
        """Read the file; `transformer` may be on meta.

        Raises BadWeights, or InvalidInput if the file is no LoRA of this model's Linear layers.
        """
        modules = dict(transformer.named_modules())
        adapter = read_adapter(path, modules, family.transformer_class)
        require_layers(path, adapter, modules)
        self.is_off = False
        self.layers: dict[str, FrozenLayer] = {}
        for name, layer in adapter.layers.items():
            if layer.magnitude is not None or not isinstance(modules[name], nn.Linear):
                what = "a DoRA" if layer.magnitude is not None else f"for {name}, no Linear layer"
                raise InvalidInput(
                    f"{path} is {what}", hint="a training adapter is a LoRA of Linear layers"
                )
            if not (layer.down.isfinite().all() and layer.up.isfinite().all()):
                message = f"{path}: {name} has values that are not finite"
                raise BadWeights(message, hint="download it again")
            scale = layer.alpha / layer.rank
            self.layers[name] = FrozenLayer(layer.down.float(), layer.up.float(), scale)

    def require_with(
        self, settings: Candidate, workload: Workload, transformer: nn.Module, family: Family
    ) -> None:
        """Raise InvalidInput if a plan computes layers ahead that it adapts, or learns their norms.

        `transformer` is the whole one, perhaps on meta.
        """
        if settings.modulation == "ahead" and family.modulation is not None:
            ahead = {name for _, name in family.modulation.find(transformer)}
            if both := self.layers.keys() & ahead:
                raise InvalidInput(
                    f"the training adapter is for {min(both)}, which this plan computes ahead",
                    hint="plan again with --exclude modulation=ahead",
                )
        if workload.adapter == "dora":
            raise InvalidInput(
                "DoRA learns norms of weights that a training adapter changes",
                hint="plan again with --adapter lora",
            )

    def merge_on_arrival(self, then: Transform | None) -> Transform:
        """Make a transform of modules as they arrive: merge, then what else is to be done."""

        def on_arrival(name: str, module: nn.Module) -> nn.Module | None:
            if name in self.layers:
                down, up, scale = self.layers[name]
                weight: Any = module.weight
                added = (up.to(weight.device) @ down.to(weight.device)) * scale
                weight.data = (weight.float() + added).to(weight.dtype)
            return then(name, module) if then else None

        return on_arrival

    @contextlib.contextmanager
    def off(self, transformer: nn.Module) -> Iterator[None]:
        """Take away what the adapter adds, up to the rounding of merging it."""
        if self.is_off:
            yield
            return
        modules = dict(transformer.named_modules())
        with contextlib.ExitStack() as stack:
            for name, layer in self.layers.items():
                # Under the adapter that is trained, if this layer has one.
                module: Any = modules.get(f"{name}.base_layer", modules[name])
                stack.callback(module.register_forward_hook(_subtract(layer)).remove)
            self.is_off = True
            stack.callback(setattr, self, "is_off", False)
            yield


def _subtract(layer: FrozenLayer) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    held: list[Tensor] = []  # on the device until the hook is removed

    def hook(_module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        x = inputs[0]
        if not held:
            held.extend(each.to(x.device, x.dtype) for each in (layer.down, layer.up))
        down, up = held
        return output - torch.nn.functional.linear(x @ down.t(), up) * layer.scale

    return hook
