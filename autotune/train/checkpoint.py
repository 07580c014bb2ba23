"""Checkpoints of a run: safetensors files, written atomically by a thread.

Each carries its run's key and a digest of its content, so that nothing damaged or another's is
resumed from. Training waits only for the copy to the host, and for the last write.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.data.cache import tensors_digest
from autotune.errors import AutotuneError, InvalidInput, first_line
from autotune.train.folder import CHECKPOINT_FILE, CHECKPOINTS, list_checkpoints
from autotune.weights.files import BadWeights, read_header
from autotune.weights.tensors import load_file, save_file

if TYPE_CHECKING:
    from torch import Tensor

BEST_FILE = "best.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to continue after `step` steps."""

    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


def require_same_weights(output: Path, weights: str) -> None:
    """Raise InvalidInput if the newest checkpoint was trained on other base weights.

    Only headers are read; damaged files are left to `Checkpoints.newest`.
    """
    for path in reversed(list_checkpoints(output / CHECKPOINTS).values()):
        try:
            before = read_header(path).metadata.get("weights") or weights
        except (BadWeights, OSError):
            continue
        if before != weights:
            raise InvalidInput(
                f"{output} was started on other weights of the base model, though of the same "
                "architecture",
                hint="resume with the model it was started with: --model; or choose another folder "
                "with --output",
            )
        return


def require_same_run(output: Path, run_key: str) -> None:
    """Raise InvalidInput if all readable checkpoints belong to another run."""
    others = []
    for path in list_checkpoints(output / CHECKPOINTS).values():
        try:
            before = read_header(path).metadata.get("run")
        except (BadWeights, OSError):
            continue
        if before == run_key:
            return
        others.append(path)
    if others:
        raise _of_another_run(others[-1])


def _of_another_run(path: Path) -> InvalidInput:
    return InvalidInput(
        f"{path} belongs to another plan, job or data, or was trained with other encoders",
        hint="resume with the plan, options, images and model it was started with, or choose "
        "another --output",
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
        """Read the newest undamaged checkpoint, if there are any at all.

        Raises InvalidInput if it is another run's, or all are damaged.
        """
        for part in self.folder.glob(".checkpoint-*.part"):
            part.unlink(missing_ok=True)  # a writer died here
        checkpoints = list_checkpoints(self.folder)
        for step, path in reversed(checkpoints.items()):
            try:
                return self._read(path, step)
            except (BadWeights, OSError, ValueError, KeyError) as error:
                on_damaged(f"{path} is damaged and skipped: {first_line(error)}")
        if checkpoints:  # starting over would in time replace what may still be recovered
            raise InvalidInput(
                f"all checkpoints in {self.folder} are damaged",
                hint=f"to start over, delete {self.folder} or choose another --output",
            )
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
