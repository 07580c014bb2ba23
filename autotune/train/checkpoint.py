"""Checkpoints of a run, and its adapter: safetensors files, written atomically.

Each checkpoint carries its run's key and a digest, so that nothing damaged or another's is resumed
from. Training waits only for the copy to the host, and for the last write.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.data.cache import tensors_digest
from autotune.errors import AutotuneError, InvalidInput, first_line
from autotune.models.adapter import ADAPTER_NAME
from autotune.models.family import Family
from autotune.plan.job import AdapterFormat
from autotune.plan.plan import AdapterVerdict
from autotune.plan.workload import Workload
from autotune.system.lazy import Tensor, nn, torch
from autotune.train.folder import CHECKPOINT_FILE, CHECKPOINTS, list_checkpoints
from autotune.weights.adapters import AdapterInfo, read_adapter, save_adapter, write_adapter
from autotune.weights.files import BadWeights, read_header
from autotune.weights.names import LoraLayer
from autotune.weights.tensors import load_file, save_file

if TYPE_CHECKING:
    from autotune.train.model import TrainingModel
    from autotune.train.optimizer import AdapterOptimizer

BEST_FILE = "best.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to continue after `step` steps."""

    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


def _readable_metadata(output: Path) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """List the newest checkpoint first. Damaged ones are left to `Checkpoints.newest`."""
    for path in reversed(list_checkpoints(output / CHECKPOINTS).values()):
        with contextlib.suppress(BadWeights, OSError):
            yield path, read_header(path).metadata


def require_same_weights(output: Path, weights: str) -> None:
    """Raise InvalidInput if the newest checkpoint was trained on other base weights."""
    for _, metadata in _readable_metadata(output):
        if metadata.get("weights") not in (weights, "", None):
            started = "was started on other weights of the base model"
            hint = "resume with its --model, or choose another folder with --output"
            raise InvalidInput(f"{output} {started}, though of the same architecture", hint=hint)
        return


def require_same_run(output: Path, run_key: str) -> None:
    """Raise InvalidInput if all readable checkpoints belong to another run."""
    keys = {path: metadata.get("run") for path, metadata in _readable_metadata(output)}
    if keys and run_key not in keys.values():
        raise _of_another_run(next(iter(keys)))


def _of_another_run(path: Path) -> InvalidInput:
    started = "resume with the plan, options, images and model it was started with"
    return InvalidInput(
        f"{path} belongs to another plan, job or data, or was trained with other encoders",
        hint=f"{started}, or choose another --output",
    )


@dataclass
class Checkpoints:
    """The checkpoints of one run; a context, so that no write is left unfinished."""

    folder: Path
    run_key: str
    keep_last: int
    # Files at multiples of this many steps are never deleted.
    keep_every: int = 0
    # Digest of the base weights.
    weights: str = ""
    _pending: Future[None] | None = None

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="autotune-checkpoint")

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *failure: object) -> None:
        self._thread.shutdown(wait=True)

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Copy the tensors and write them in the background, once the last write has succeeded."""
        self.finish()
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._pending = self._thread.submit(self._write, step, copies, state)

    def finish(self) -> None:
        """Wait for the last write; raise AutotuneError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def save_best(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        copies = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        self._write_file(self.folder / BEST_FILE, copies, {"step": step})

    def read_best(self) -> Checkpoint | None:
        """Read what `save_best` wrote; None if it is lost or damaged."""
        try:
            best = self._read(self.folder / BEST_FILE, 0)
        except (BadWeights, OSError, ValueError, KeyError):
            return None
        return replace(best, step=best.state["step"])

    def _write(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self._write_file(self.folder / CHECKPOINT_FILE.format(step), tensors, state)
        for old, path in list(list_checkpoints(self.folder).items())[: -self.keep_last]:
            if not (self.keep_every and old % self.keep_every == 0):
                path.unlink(missing_ok=True)

    def _write_file(
        self, path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
    ) -> None:
        metadata = {"run": self.run_key, "weights": self.weights, "state": json.dumps(state)}
        metadata["digest"] = _digest(metadata, tensors)
        try:
            save_file(path, tensors, metadata)
        except Exception as error:  # safetensors has errors of its own
            raise AutotuneError(
                f"cannot write a checkpoint in {self.folder}: {error}",
                hint="free some space, then go on from the last one with --resume",
            ) from error

    def newest(self, on_damaged: Callable[[str], None] = lambda message: None) -> Checkpoint | None:
        """Read the newest undamaged checkpoint; refuse another run's, and damage to all."""
        for part in self.folder.glob(".checkpoint-*.part"):
            part.unlink(missing_ok=True)  # a writer died here
        checkpoints = list_checkpoints(self.folder)
        for step, path in reversed(checkpoints.items()):
            try:
                return self._read(path, step)
            except (BadWeights, OSError, ValueError, KeyError) as error:
                on_damaged(f"{path} is damaged and skipped: {first_line(error)}")
        if checkpoints:  # starting over would in time replace what may still be recovered
            hint = f"to start over, delete {self.folder} or choose another --output"
            raise InvalidInput(f"all checkpoints in {self.folder} are damaged", hint=hint)
        return None

    def _read(self, path: Path, step: int) -> Checkpoint:
        tensors, metadata = load_file(path)
        if metadata["digest"] != _digest(metadata, tensors):
            raise ValueError("its digest does not match")
        if metadata["run"] != self.run_key:
            raise _of_another_run(path)
        return Checkpoint(step, tensors, json.loads(metadata["state"]))


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    parts = (*(metadata[name] for name in ("run", "weights", "state")), tensors_digest(tensors))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def start_from(path: Path, transformer: nn.Module, family: Family) -> None:
    """Give the adapter of `transformer` the values of the one in the file."""
    values = starting_values(path, transformer, family)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if name in values:
                parameter.copy_(values[name])


def starting_values(path: Path, transformer: nn.Module, family: Family) -> dict[str, Tensor]:
    """Read values for the adapter's parameters, by name, that give the same update as the file.

    `transformer` may be on meta. Another alpha is made up for by the second matrix. Raises
    BadWeights, or InvalidInput for an adapter of another model, rank or set of layers.
    """
    named: Iterator[tuple[str, Any]] = transformer.named_modules()
    adapted = {name: part for name, part in named if ADAPTER_NAME in getattr(part, "lora_A", ())}
    layers = read_adapter(path, adapted, family.transformer_class).layers
    if different := sorted(layers.keys() ^ adapted.keys()):
        whose = "the plan does not adapt" if different[0] in layers else "it does not have"
        more = f", and {len(different) - 1} more" if len(different) > 1 else ""
        message = f"{path} adapts other layers than the plan: {different[0]}, which {whose}{more}"
        hint = "plan with the adapter's own --targets, for the model that it belongs to"
        raise InvalidInput(message, hint=hint)
    values = {}
    for name, layer in layers.items():
        module = adapted[name]
        down, up = module.lora_A[ADAPTER_NAME].weight, module.lora_B[ADAPTER_NAME].weight
        vectors = module.lora_magnitude_vector
        magnitude = vectors[ADAPTER_NAME].weight if ADAPTER_NAME in vectors else None
        if (layer.magnitude is None) != (magnitude is None):
            own, other = ("LoRA", "DoRA") if layer.magnitude is None else ("DoRA", "LoRA")
            message = f"{path} is a {own}, the plan trains a {other}"
            raise InvalidInput(message, hint=f"plan with --adapter {own.lower()}")
        if layer.rank != len(down):
            message = f"{path} has rank {layer.rank}, the plan {len(down)}"
            raise InvalidInput(message, hint=f"plan --rank {layer.rank}")
        if layer.down.shape != down.shape or layer.up.shape != up.shape:
            message = f"{path} is for another model: {name} differs in shape"
            raise InvalidInput(message, hint="name that model's adapter")
        scale = layer.alpha / layer.rank / module.scaling[ADAPTER_NAME]
        if not (layer.down.isfinite().all() and layer.up.isfinite().all()):
            message = f"{path}: {name} has values that are not finite"
            raise BadWeights(message, hint="take an earlier checkpoint")
        if magnitude is not None and layer.magnitude is not None:
            vector = f"{name}.lora_magnitude_vector.{ADAPTER_NAME}.weight"
            values[vector] = layer.magnitude.float().reshape_as(magnitude)
        values[f"{name}.lora_A.{ADAPTER_NAME}.weight"] = layer.down.float()
        values[f"{name}.lora_B.{ADAPTER_NAME}.weight"] = layer.up.float() * scale
    return values


def save_trained(
    path: Path,
    model: TrainingModel,
    optimizer: AdapterOptimizer,
    workload: Workload,
    plan_digest: str,
    training_steps: int,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the adapter's fp32 masters; rsLoRA's scale becomes the alpha that any reader knows."""
    from peft.utils import get_peft_model_state_dict

    masters = dict(zip(map(id, model.adapter), optimizer.masters, strict=True))
    named = {
        name: masters[id(p)].detach().to(dtype or torch.float32)
        for name, p in model.transformer.named_parameters()
        if id(p) in masters
    }
    info = AdapterInfo(
        model=workload.model.name,
        transformer=model.family.transformer_class,
        plan_digest=plan_digest,
        rank=workload.rank,
        alpha=workload.lora_alpha * (workload.rank**0.5 if workload.adapter == "rslora" else 1),
        training_steps=training_steps,
    )
    state = get_peft_model_state_dict(model.transformer, named, adapter_name=ADAPTER_NAME)
    save_adapter(path, state, info, model.family.adapter_component)


def export_trained(adapter: Path, to: AdapterFormat) -> Path:
    """Write an adapter in another format beside itself; return that file, or its own."""
    if to == "diffusers":
        return adapter
    written = adapter.with_name(f"{to}_lora_weights.safetensors")
    write_adapter(written, read_adapter(adapter), to)
    return written


def judge_adapter(
    adapter: Path, *, last_block: str, base_loss: float | None, adapter_loss: float | None
) -> AdapterVerdict:
    """Tell which layers of an adapter file moved; those below `last_block` may stay zero."""
    norms = {name: update_norm(layer) for name, layer in read_adapter(adapter).layers.items()}
    unmoved = [name for name, norm in norms.items() if norm == 0]
    return AdapterVerdict(
        num_layers=len(norms),
        num_unmoved=sum(not name.startswith(f"{last_block}.") for name in unmoved),
        num_not_finite=sum(not math.isfinite(norm) for norm in norms.values()),
        layer_norms={name: norm if math.isfinite(norm) else 0.0 for name, norm in norms.items()},
        base_loss=base_loss,
        adapter_loss=adapter_loss,
    )


def update_norm(layer: LoraLayer) -> float:
    """Return the norm of up @ down * alpha / rank without the product: |UD|^2 = <U'U, DD'>."""
    down, up = layer.down.double(), layer.up.double()
    squared = float(((up.T @ up) * (down @ down.T)).sum())
    if not math.isfinite(squared):
        return math.nan
    return math.sqrt(max(squared, 0.0)) * layer.alpha / layer.rank
