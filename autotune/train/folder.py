"""The output folder of a run: what owns it, what it holds, its checkpoints and its adapter.

Each checkpoint carries its run's key and a digest, so that nothing damaged or another's is resumed
from. Training waits only for the copy to the host, and for the last write.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from autotune.data.cache import ItemEntries, tensors_digest
from autotune.data.dataset import Dataset, list_places
from autotune.data.items import Item
from autotune.errors import AutotuneError, InvalidInput, InvalidPlan, first_line, require_free_disk
from autotune.models.adapter import ADAPTER_NAME
from autotune.models.family import Family
from autotune.plan.base import digest_of
from autotune.plan.file import RUN_PLAN_FILE, load_plan, save_plan, seal
from autotune.plan.job import AdapterFormat, Job
from autotune.plan.plan import AdapterVerdict, RunReport, TrainingPlan
from autotune.system.files import PART_FILES
from autotune.system.lazy import Tensor, nn, torch
from autotune.weights.adapters import parse_adapter, read_adapter, require_layers, write_adapter
from autotune.weights.files import BadWeights, read_header
from autotune.weights.names import KroneckerLayer, Layer
from autotune.weights.tensors import load_file, save_file

ADAPTER_FILE = "pytorch_lora_weights.safetensors"  # the name that diffusers looks for
CHECKPOINTS = "checkpoints"
CHECKPOINT_FILE = "checkpoint-{:06}.safetensors"
CHECKPOINT_PATTERN = re.compile(r"checkpoint-(\d{6,})\.safetensors")
REPORT_FILE = "report.json"
PREVIEWS = "previews"
# With the number of steps taken, and of the prompt.
PREVIEW_NAME = re.compile(r"step-(\d{1,9})-(\d{1,2})\.png")
LOCK_FILE = ".lock"
# Fields of a job that may differ when a run is resumed: outputs, and paths whose content other
# digests cover.
CHANGEABLE_FIELDS = frozenset((
    "model", "base", "vae", "text_encoders", "revision", "data", "control", "caption", "trigger",
    "output", "cache", "save_dtype", "adapter_format", "report_to", "preview_prompts",
    "preview_steps", "preview_every", "validation", "validation_every", "keep_best",
    "checkpointing_steps", "checkpointing_epochs", "checkpoints_total_limit",
    "checkpoints_keep_every",
))  # fmt: skip

# Rates that do not depend on the number of steps: such a run may be made longer.
OPEN_ENDED_SCHEDULERS = frozenset({"constant", "constant_with_warmup", "plateau"})


def list_fixed_fields(plan: TrainingPlan) -> dict[str, object]:
    """List what decides the result of training on given data, and must not change on resuming."""
    job = plan.job.model_dump(mode="json")
    if plan.job.lr_scheduler in OPEN_ENDED_SCHEDULERS:
        job |= {"num_steps": None, "num_train_epochs": None}
    fixed = {name: value for name, value in job.items() if name not in CHANGEABLE_FIELDS}
    return {"plan": plan.digest, **fixed}


def compute_run_key(
    plan: TrainingPlan, items: Sequence[Item], entries: Sequence[ItemEntries]
) -> str:
    """Digest everything that decides the result of a run, for its checkpoints."""
    pairs = zip(entries, items, strict=True)
    trained = [[sorted(each.keys), item.repeats, item.weight] for each, item in pairs]
    return digest_of({**list_fixed_fields(plan), "items": trained})


def claim_folder(
    plan: TrainingPlan, *, resume: bool, needed_bytes: int, lock: bool = True
) -> FileLock:
    """Create or take over the output folder, and lock it; without `lock` only check it."""
    folder = Path(plan.job.output)
    require_separate_output(plan.job)
    folder_lock = FileLock(folder / LOCK_FILE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if lock:
            folder_lock.acquire(timeout=0)
        check_folder(plan, resume=resume)
        if lock:
            for part in folder.glob(f"**/{PART_FILES}"):  # whoever wrote it is dead
                part.unlink(missing_ok=True)
            save_plan(plan, folder / RUN_PLAN_FILE)
        hint = "free some space, choose another folder with --output, or keep fewer checkpoints"
        needed_bytes -= sum(path.stat().st_size for path in checkpoints_of(folder))
        what = "what a run writes, checkpoints and adapter,"
        require_free_disk(folder, needed_bytes, what, hint=hint)
    except Timeout as error:
        hint = "wait for its end, or choose another folder with --output"
        raise InvalidInput(f"another run is writing to {folder} now", hint=hint) from error
    except OSError as error:
        folder_lock.release()
        message = f"cannot write to the output folder {folder}: {error.strerror}"
        raise InvalidInput(message, hint="choose another with --output") from error
    except AutotuneError:
        folder_lock.release()  # here: who keeps the error keeps what this function had
        raise
    return folder_lock


def require_separate_output(job: Job) -> None:
    """Raise InvalidInput if the output would lie in a folder of images or of the model."""
    folder = Path(job.output)
    named = {"control": job.control, "validation": job.validation_folder, "model": job.model}
    sources = [(source, path) for source, path in named.items() if path]
    sources += [("data", place) for place in (list_places(job.data) if job.data else ())]
    for source, path in sources:
        if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path)):
            why = f"so what a run writes would be taken for {source}"
            message = f"the output folder {folder} lies in the {source} folder, {why}"
            raise InvalidInput(message, hint="choose another with --output")


def as_begun(plan: TrainingPlan) -> TrainingPlan:
    """Return what a predicted plan became, measured, when the output folder's run began, else the
    plan as it is."""
    with contextlib.suppress(InvalidPlan):
        begun = load_plan(Path(plan.job.output) / RUN_PLAN_FILE).frozen
        if begun.predicted_digest == plan.digest and begun.workload == plan.frozen.workload:
            return seal(plan.job, begun)
    return plan


def check_folder(plan: TrainingPlan, *, resume: bool) -> None:
    """Raise InvalidInput if the output folder holds a run that is not to be resumed."""
    folder, other = Path(plan.job.output), "choose another folder with --output"
    checkpoints = list_checkpoints(folder / CHECKPOINTS)
    changed: list[str] | None = None
    # Absent or damaged: checkpoints carry the run's key, too.
    with contextlib.suppress(InvalidPlan):
        before, now = list_fixed_fields(load_plan(folder / RUN_PLAN_FILE)), list_fixed_fields(plan)
        changed = [name for name in before | now if before.get(name) != now.get(name)]
    if resume and checkpoints:
        if changed:
            hint = f"resume with the plan and options it was started with, or {other}"
            raise InvalidInput(f"the run in {folder} has another {', '.join(changed)}", hint=hint)
        return
    if (report := read_report(folder)) and changed == []:
        is_open_ended = plan.job.lr_scheduler in OPEN_ENDED_SCHEDULERS
        longer = "train longer: add --resume --steps NUMBER; " if is_open_ended else ""
        what = f"{folder} holds this very run, finished after {report.num_steps} steps"
        hint = f"look at it: autotune sample {folder} --prompt TEXT; {longer}train anew: {other}"
        raise InvalidInput(what, hint=hint)
    if (folder / ADAPTER_FILE).exists() and ((folder / REPORT_FILE).exists() or not checkpoints):
        raise InvalidInput(f"{folder} holds the adapter of another run", hint=other)
    if checkpoints:
        hint = f"go on with it: add --resume; or {other}"
        raise InvalidInput(f"{folder} holds the checkpoints of a run that did not end", hint=hint)


def finished_report(plan: TrainingPlan, dataset: Dataset) -> RunReport | None:
    """Read the report of the run in the output folder, if it has taken all of the plan's steps."""
    report = read_report(Path(plan.job.output))
    num_steps = plan.job.steps_on(dataset.epoch_size, plan.frozen.workload.effective_batch_size)
    return report if report and report.num_steps == num_steps else None


def read_report(folder: Path) -> RunReport | None:
    """Read the report of a finished run whose adapter is still there."""
    try:
        report = RunReport.model_validate_json((folder / REPORT_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return report if (folder / ADAPTER_FILE).is_file() else None


def comparison_file(adapter: str, number: int) -> str:
    """Name the last picture of a prompt `with` or `without` the adapter."""
    return f"{PREVIEWS}/{adapter}-{number}.png" if number else f"sample_{adapter}_adapter.png"


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """List the checkpoints in `folder` by step, oldest first."""
    files = folder.glob("checkpoint-*")
    matches = ((CHECKPOINT_PATTERN.fullmatch(path.name), path) for path in files)
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def checkpoints_of(output: Path) -> set[Path]:
    """List the checkpoints of the run in an output folder."""
    return set(list_checkpoints(output / CHECKPOINTS).values())


BEST_FILE = "best.safetensors"
UNREADABLE = (BadWeights, OSError, ValueError, TypeError, LookupError, RecursionError)


@dataclass(frozen=True)
class Checkpoint:
    """State that a run needs to continue after `step` steps."""

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
            raise InvalidInput(f"the run in {output} {started}", hint=hint)
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
    keep_every: int = 0  # files at multiples of this many steps are never deleted
    weights: str = ""  # digest of the base weights
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
            return self._read(self.folder / BEST_FILE)
        except UNREADABLE:
            return None

    def _write(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        path = self.folder / CHECKPOINT_FILE.format(step)
        self._write_file(path, tensors, {**state, "step": step})
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
            what = f"cannot write a checkpoint in {self.folder}: {error}"
            hint = "free some space, then go on from the last one with --resume"
            raise AutotuneError(what, hint=hint) from error

    def newest(self, on_damaged: Callable[[str], None] = lambda message: None) -> Checkpoint | None:
        """Read the newest undamaged checkpoint; refuse another run's, and damage to all."""
        for part in self.folder.glob(".checkpoint-*.part"):
            part.unlink(missing_ok=True)  # a writer died here
        checkpoints = list_checkpoints(self.folder)
        for step, path in reversed(checkpoints.items()):
            try:
                found = self._read(path)
                if found.step == step:
                    return found
                path.replace(self.folder / CHECKPOINT_FILE.format(found.step))
                return self.newest(on_damaged)
            except UNREADABLE as error:
                on_damaged(f"{path} is damaged and skipped: {first_line(error)}")
        if checkpoints:  # starting over would in time replace what may still be recovered
            hint = f"to start over, delete {self.folder} or choose another --output"
            raise InvalidInput(f"all checkpoints in {self.folder} are damaged", hint=hint)
        return None

    def _read(self, path: Path) -> Checkpoint:
        tensors, metadata = load_file(path)
        if metadata["digest"] != _digest(metadata, tensors):
            raise ValueError("its digest does not match")
        if metadata["run"] != self.run_key:
            raise _of_another_run(path)
        state = dict(json.loads(metadata["state"]))
        if type(state["step"]) is not int or state["step"] < 0:  # it names a file
            raise ValueError("it has no step")
        return Checkpoint(state["step"], tensors, state)


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
    `transformer` may be on meta. Raises BadWeights, or InvalidInput for another model's, rank's or
    set's."""
    modules: dict[str, Any] = dict(transformer.named_modules())
    adapted = {
        name: part
        for name, part in modules.items()
        if ADAPTER_NAME in getattr(part, "lora_A", getattr(part, "lokr_w1", ()))
    }
    adapter = read_adapter(path, modules, family.transformer_class)
    require_layers(path, adapter, modules)
    layers = adapter.layers
    if different := sorted(layers.keys() ^ adapted.keys()):
        whose = "the plan does not adapt" if different[0] in layers else "it does not have"
        message = f"{path} adapts other layers than the plan, like {different[0]}, which {whose}"
        hint = "plan with the adapter's own --targets, for the model that it belongs to"
        raise InvalidInput(message, hint=hint)
    values: dict[str, Tensor] = {}
    for name, layer in layers.items():
        module = adapted[name]
        vectors = getattr(module, "lora_magnitude_vector", {})
        magnitude: Any = vectors[ADAPTER_NAME].weight if ADAPTER_NAME in vectors else None
        own = "LoKr" if isinstance(layer, KroneckerLayer) else _kind(layer.magnitude)
        planned = "LoKr" if hasattr(module, "lokr_w1") else _kind(magnitude)
        if own != planned:
            message = f"{path} is a {own}, the plan trains a {planned}"
            raise InvalidInput(message, hint=f"plan with --adapter {own.lower()}")
        if isinstance(layer, KroneckerLayer):
            made = {part: getattr(module, part) for part in module.adapter_layer_names}
            sizes = {part: x[ADAPTER_NAME].shape for part, x in made.items() if ADAPTER_NAME in x}
            if sizes != {part: x.shape for part, x in layer.factors.items()}:
                message = f"{path}: the factors of {name} have other shapes than the plan's"
                first = layer.matrix_shape("lokr_w1")[0]
                hint = f"plan with its own rank and factor, perhaps --rank {layer.rank} --factor"
                raise InvalidInput(message, hint=f"{hint} {first}")
            factors = layer.scaled(1 / module.scaling[ADAPTER_NAME]).factors
            values |= {f"{name}.{part}.{ADAPTER_NAME}": x.float() for part, x in factors.items()}
            continue
        down, up = module.lora_A[ADAPTER_NAME].weight, module.lora_B[ADAPTER_NAME].weight
        if layer.rank != len(down):
            message = f"{path} has rank {layer.rank}, the plan {len(down)}"
            raise InvalidInput(message, hint=f"plan --rank {layer.rank}")
        if layer.down.shape != down.shape or layer.up.shape != up.shape:
            message = f"{path} is for another model: {name} differs in shape"
            raise InvalidInput(message, hint="name that model's adapter")
        scale = layer.alpha / layer.rank / module.scaling[ADAPTER_NAME]
        if layer.magnitude is not None:
            vector = f"{name}.lora_magnitude_vector.{ADAPTER_NAME}.weight"
            values[vector] = layer.magnitude.float().reshape_as(magnitude)
        values[f"{name}.lora_A.{ADAPTER_NAME}.weight"] = layer.down.float()
        values[f"{name}.lora_B.{ADAPTER_NAME}.weight"] = layer.up.float() * scale
    return values


def _kind(magnitude: object) -> str:
    return "LoRA" if magnitude is None else "DoRA"


def export_trained(adapter: Path, to: AdapterFormat) -> Path:
    """Write an adapter in another format next to itself; return that file, or its own."""
    if to == "diffusers":
        return adapter
    written = adapter.with_name(f"{to}_lora_weights.safetensors")
    write_adapter(written, parse_adapter(*load_file(adapter)), to)
    return written


def judge_adapter(
    adapter: Path, *, last_block: str, base_loss: float | None, adapter_loss: float | None
) -> AdapterVerdict:
    """Tell which layers of an adapter file moved; those below `last_block` may stay zero."""
    layers = parse_adapter(*load_file(adapter)).layers  # it is judged if they are not finite, too
    norms = {name: update_norm(layer) for name, layer in layers.items()}
    unmoved = [name for name, norm in norms.items() if norm == 0]
    return AdapterVerdict(
        num_layers=len(norms),
        num_unmoved=sum(not name.startswith(f"{last_block}.") for name in unmoved),
        num_not_finite=sum(not math.isfinite(norm) for norm in norms.values()),
        layer_norms={name: norm if math.isfinite(norm) else 0.0 for name, norm in norms.items()},
        base_loss=base_loss,
        adapter_loss=adapter_loss,
    )


def update_norm(layer: Layer) -> float:
    """Return the norm of up @ down * alpha / rank without the product: |UD|^2 = <U'U, DD'>; of a
    Kronecker product it is the product of norms."""
    if isinstance(layer, KroneckerLayer):
        norms = (float(layer.matrix(name).double().norm()) for name in ("lokr_w1", "lokr_w2"))
        return math.prod(norms)
    down, up = layer.down.double(), layer.up.double()
    squared = float(((up.T @ up) * (down @ down.T)).sum())
    if not math.isfinite(squared):
        return math.nan
    return math.sqrt(max(squared, 0.0)) * layer.alpha / layer.rank
