"""Memory at full size: what the cost model predicts against what torch's CUDA allocator holds.

It runs on the stand-in for NVIDIA's libraries (CONTRIBUTING, "Without a GPU"), where models of full
size need no memory of the host:

    export FAKEGPU=4090 FAKEGPU_COPIES=0
    tests/fakegpu/run benchmarks/allocator_truth.py ROWS.jsonl MODEL SIDE_PX [KNOB=VALUE,...]...

Each setting is a process of its own and gives a line; those that the file has are left out.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_map

from tests.fakegpu.numbers import as_places

# What only asks, copies, or moves: its tensors hold what it needs.
AS_IT_IS = {"__get__", "to", "cpu", "cuda", "item", "tolist", "copy_", "record_stream", "is_pinned"}
COUNTING = (torch.bool, torch.int32, torch.int64)  # quantized weights have others
LARGE_BYTES = 1 << 20  # what is smaller may decide shapes
WRITING = {"copy_", "to", "uniform_", "zeros"}
COMPARING = {"eq", "__eq__", "ne", "__ne__"}  # as schedulers look levels up
MASKED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class Counted(TorchFunctionMode):
    """Masks, indices and lengths on the device are computed on the CPU, since they decide shapes
    and no kernel runs. (`tests.fakegpu.numbers` would change how autograd adds gradients.)"""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, tensors = kwargs or {}, list[torch.Tensor]()

        def seen(value: Any) -> Any:
            return tensors.append(value) if isinstance(value, torch.Tensor) else None

        tree_map(seen, (args, kwargs))
        name = getattr(function, "__name__", "")
        unwritten = _unwritten(name, args, kwargs) if name in WRITING else None
        if unwritten is not None:
            return unwritten
        if name in AS_IT_IS:
            found = function(*args, **kwargs)
            if function is torch.Tensor.to and {args[0].dtype, found.dtype} <= {*COUNTING}:
                found = found if found.dtype == args[0].dtype else _converted(args[0], found)
            return found
        is_counting = all(t.dtype in COUNTING for t in tensors)
        is_counting |= name in COMPARING
        if tensors and is_counting and any(t.is_cuda for t in tensors):
            return self._on_cpu(function, args, kwargs)
        if function in MASKED and any(t.is_cuda and t.dtype == torch.bool for t in tensors[1:]):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            return function(args[0], tuple(as_places(places)), *args[2:])
        if name == "repeat_interleave" and len(tensors) > 1:
            kwargs = {**kwargs, "output_size": int(tensors[1].cpu().sum())}
        found = function(*args, **kwargs)
        is_made = isinstance(found, torch.Tensor) and not tensors and "device" in kwargs
        if is_made and found.is_cuda and found.dtype in COUNTING:
            return function(*args, **{**kwargs, "device": "cpu"}).to(found.device)
        return found

    def _on_cpu(self, function: Any, args: Any, kwargs: Any) -> Any:
        device, copies = torch.device("cuda", torch.cuda.current_device()), dict[int, Any]()

        def to_cpu(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                return copies.setdefault(id(value), (value.cpu(), value))[0]
            return torch.device("cpu") if isinstance(value, torch.device) else value

        found = function(*tree_map(to_cpu, args), **tree_map(to_cpu, kwargs))
        name = getattr(function, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            for changed, own in copies.values():
                own.copy_(changed)
            return args[0]
        return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, found)


def _unwritten(name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Give what would be written to the host: pages that nothing wrote take no memory."""
    if name == "zeros":
        return torch.empty(*args, **kwargs) if str(kwargs.get("device")) == "cpu" else None
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    if not tensors or any(each.nbytes < LARGE_BYTES or each.dtype in COUNTING for each in tensors):
        return None
    if name != "to":
        return None if any(each.is_cuda for each in tensors) else args[0]
    if len(args) != 2 or kwargs:
        return None
    asked = {"dtype" if isinstance(args[1], torch.dtype) else "device": args[1]}
    stays = str(asked.get("device", args[0].device)) == "cpu"
    return torch.empty_like(args[0], **asked) if stays else None


def compile_uncounted(*args: Any, **named: Any) -> Callable[..., Any]:
    """Compile as torch does; within it no mode is on, for which it would compile until it stops."""
    compiled: Any = COMPILE(*args, **named)

    def call(*inputs: Any) -> Any:
        # There is none in the thread of the backward pass.
        if _get_current_function_mode() is None:  # type: ignore[no-untyped-call]
            return compiled(*inputs)
        with _pop_mode_temporarily():
            return compiled(*inputs)

    return call


COMPILE, torch.compile = torch.compile, compile_uncounted


def _converted(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().to(like.dtype).to(like.device)


def measure(name: str, side_px: int, text: str) -> dict[str, Any]:
    from autotune.cost.predict import CostModel
    from autotune.knobs.settings import configure_allocator
    from autotune.machine.probe import probe
    from autotune.models.resolve import resolve_model
    from autotune.plan.candidate import Candidate
    from autotune.plan.job import ModelRef
    from autotune.plan.workload import WorkloadRequest
    from autotune.search.worker import StepRunner, TrialRequest, load_for_trial
    from autotune.train import model as building
    from autotune.train.processes import set_device
    from autotune.train.workload import describe_workload

    building.require_quality = lambda *_: None  # of what no kernel computed
    pairs = (pair.split("=") for pair in text.split(",") if pair)
    changes = {key: int(value) if value.isdigit() else value for key, value in pairs}
    batch = int(changes.pop("effective_batch_size", changes.get("micro_batch_size", 1)))
    candidate = Candidate.model_validate(
        {"micro_batch_size": 1, "checkpointed_blocks": 0, **changes}
    )
    hardware, resolved = probe(), resolve_model(ModelRef.of(name))
    configure_allocator(candidate.allocator)
    set_device(torch.device("cuda", 0))
    size: Any = {
        "resolution": (side_px, side_px),
        "text_tokens": min(512, resolved.family.max_text_tokens),
    }
    asked = WorkloadRequest(rank=16, effective_batch_size=batch, **size)
    work = describe_workload(resolved, None, asked).changed(quality="compact")
    predicted = CostModel.build(hardware, work, resolved.family, resolved.config).predict(candidate)
    row = {"machine": os.environ["FAKEGPU"], "model": name, "side_px": side_px, "settings": text}
    row |= {"torch": torch.__version__, "predicted_bytes": predicted.allocated_memory_bytes}
    reserved = predicted.training.run_memory_bytes - hardware.process_overhead_bytes
    row |= {"predicted_reserved_bytes": reserved}
    try:
        with Counted():
            loaded = load_for_trial(TrialRequest(resolved, work, candidate, "cuda:0", num_steps=2))
            runner = StepRunner(loaded, work, candidate)
            runner.timed_step()
            peak, _ = runner.memory_step()
    except torch.OutOfMemoryError as error:
        return row | {"out_of_memory": str(error).split(". ")[0]}
    reserved, stats = torch.cuda.max_memory_reserved(), torch.cuda.memory_stats()
    row |= {"allocated_bytes": peak, "reserved_bytes": reserved}
    row |= {"retries": stats["num_alloc_retries"]}
    return row | {"error": round(predicted.allocated_memory_bytes / peak - 1, 4)}


def main(measure: Callable[[str, int, str], dict[str, Any]] = measure) -> None:
    if sys.argv[1] == "--row":
        row = measure(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        sys.stdout.write(json.dumps(row) + "\n")
        return
    file, name, side_px, *settings = sys.argv[1:]
    lines = Path(file).read_text().splitlines() if Path(file).exists() else []
    rows = map(json.loads, lines)
    known = [tuple(row[key] for key in ("machine", "model", "side_px", "settings")) for row in rows]
    for text in settings:
        if (os.environ["FAKEGPU"], name, int(side_px), text) in known:
            continue
        command = [sys.executable, sys.argv[0], "--row", name, side_px, text]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            with Path(file).open("a") as results:
                results.write(done.stdout.splitlines()[-1] + "\n")


if __name__ == "__main__":
    main()
