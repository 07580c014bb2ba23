"""Checkpoints of a run: one safetensors file each, tensors and a JSON state, written atomically by
a thread.

A file carries the key of its run and a digest of its content, so that a resumed run trusts nothing
that is damaged or another's. Training waits only for the copy to the host (and for the last file,
while it is still being written).
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
"""The adapter as it was when the loss on held-out images was lowest."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to continue after `step` steps."""

    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


def require_same_weights(output: Path, weights: str) -> None:
    """Check that the newest checkpoint below `output` was trained on base weights with that digest.

    Only the header is read. A damaged file is left to `Checkpoints.newest`.

    Raises:
        InvalidInput: it was trained on other weights.
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
    """Check that one of the checkpoints below `output`, if their headers can be read, is of the run
    with that key.

    Raises:
        InvalidInput: all of them belong to another plan, job, data or encoders.
    """
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
    """The checkpoints of one run; a context manager, so that no write is left unfinished."""

    folder: Path
    run_key: str
    """Key that a checkpoint must carry to be resumed from."""
    keep_last: int
    """Number of newest files to keep."""
    keep_every: int = 0
    """Files at multiples of this many steps are never deleted; 0 for none."""
    weights: str = ""
    """Digest of the base weights, which checkpoints carry, too; see `require_same_weights`."""
    _pending: Future[None] | None = None

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="autotune-checkpoint")

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *failure: object) -> None:
        self._thread.shutdown(wait=True)

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Copy the tensors and write them in the background.

        Raises:
            AutotuneError: this or the last checkpoint could not be written.
        """
        self.finish()
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._pending = self._thread.submit(self._write, step, copies, state)

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk. Raises AutotuneError if it could not be
        written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def save_best(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write what was best so far, at once, in place of the last such.

        Raises:
            AutotuneError: it could not be written.
        """
        copies = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        self._write_file(self.folder / BEST_FILE, copies, {"step": step})

    def read_best(self) -> Checkpoint | None:
        """What `save_best` wrote; None if it is lost or damaged.

        Raises:
            InvalidInput: it belongs to another plan, job or data.
        """
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
        """The newest undamaged checkpoint, or None if there are no checkpoints at all.

        Raises:
            InvalidInput: it belongs to another plan, job or data; or all are damaged.
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
    """Digest of the run's key, the weights', the state and the tensors: a flipped bit in any of
    them shows."""
    parts = (*(metadata[name] for name in ("run", "weights", "state")), tensors_digest(tensors))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
