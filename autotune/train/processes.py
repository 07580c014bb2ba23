"""Several processes that train together, one per device.

DDP is torch's own, since accelerate wraps no model with sharded weights on GPUs. Layers without a
gradient (the last block's text stream) are searched for in every step: a static graph does not work
with accumulation without synchronization (torch 2.13 fails in the second step). Nodes may have
folders of their own: the first process decides from files and tells the others.
"""

import contextlib
import ipaddress
import os
import pickle
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.errors import AutotuneError, InvalidInput, Preempted, explain_error, first_line
from autotune.events import Event, OnEvent
from autotune.machine.probe import probe
from autotune.models.family import Family
from autotune.plan.file import load_plan, save_plan
from autotune.plan.plan import PlannedHardware, RunReport, TrainingPlan
from autotune.system.files import make_scratch_folder
from autotune.system.process import MAX_JOIN_SECONDS, current_launch, launch, silence_progress_bars
from autotune.train.folder import checkpoints_of
from autotune.weights.stream import Transform

# For the others' gradients: the timeout of torch's process group.
MAX_STEP_WAIT = timedelta(minutes=10)
# Between phases, while another process encodes a dataset, loads a model or samples.
MAX_WAIT = timedelta(hours=12)
T = TypeVar("T")


class PeerLost(AutotuneError):
    """Another process of this run has ended or does not answer."""


@dataclass(frozen=True)
class Processes:
    """This process, as one of a run's processes."""

    rank: int
    world_size: int
    device: torch.device
    num_shards: int = 1  # processes that hold the frozen weights together
    local_rank: int = 0
    # All processes, on the host's network, with a timeout of `MAX_WAIT`.
    waiting_group: "torch.distributed.ProcessGroup | None" = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_first_of_node(self) -> bool:
        """Tell if this process encodes for its node, which shares a cache."""
        return self.local_rank == 0

    @property
    def is_sampler(self) -> bool:
        """Tell if it samples previews: the first, or all if each holds a part of the weights."""
        return self.is_first or self.num_shards > 1

    def average(self, tensor: torch.Tensor) -> None:
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor)
            tensor.div_(self.world_size)

    def is_any(self, flag: bool) -> bool:
        if self.world_size == 1:
            return flag
        shared = torch.tensor([float(flag)], device=self.device)
        self.average(shared)
        return bool(shared.item() > 0)

    def wait(self) -> None:
        if self.world_size > 1:
            torch.distributed.barrier(group=self.waiting_group)

    def share(self, compute: Callable[[], T]) -> T:
        """Compute on the first process alone; all return its result, or raise its AutotuneError."""
        if self.world_size == 1:
            return compute()
        outcome: list[T | AutotuneError | None] = [None]
        if self.is_first:
            try:
                outcome = [compute()]
            except AutotuneError as error:
                outcome = [error]
        torch.distributed.broadcast_object_list(outcome, src=0, group=self.waiting_group)
        if isinstance(outcome[0], AutotuneError):
            raise outcome[0]
        return cast("T", outcome[0])

    def require_same(self, what: str, digest: str) -> None:
        """Raise InvalidInput unless `what` has the same digest on all processes."""
        digests = [digest] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(digests, digest, group=self.waiting_group)
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if others:
            files = "copy the plan, the data and the model to every node"
            message = f"{what} of process {others[0]} differs from that of process 0"
            raise InvalidInput(message, hint=f"{files}, and start the same command on each")

    def replicate(self, transformer: nn.Module, *, has_unused: bool) -> nn.Module:
        """Wrap the transformer to average gradients, which layers may lack if it `has_unused`."""
        from torch.distributed.tensor import DTensor

        named = transformer.named_parameters()
        ignored = [name for name, parameter in named if not parameter.requires_grad]
        ignored += [name for name, _ in transformer.named_buffers()]
        ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(transformer, ignored)  # type: ignore[no-untyped-call]
        sizes = {
            weight.device_mesh.size() if isinstance(weight, DTensor) else 1
            for weight in transformer.parameters()
            if not weight.requires_grad
        }
        actual = sizes.pop() if len(sizes) == 1 else 1
        if actual != self.num_shards:
            hint = "this is a bug in autotune: please report it"
            message = f"the weights are sharded over {actual} processes, not {self.num_shards}"
            raise AutotuneError(message, hint=hint)
        # Gradients are views of buckets, so memory holds them once. Buffers are frozen.
        how: Any = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
        return DistributedDataParallel(transformer, find_unused_parameters=has_unused, **how)


def set_device(device: torch.device) -> None:
    """Initialize CUDA on `device`: memory counters and libraries need the current device."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(device)


def init_distributed(planned: PlannedHardware, device: torch.device) -> Processes:
    """Join the process group of the plan's processes, all of whom must come."""
    from accelerate import PartialState

    has_several = planned.num_processes > 1
    launch = current_launch()
    if has_several and launch and launch.world_size > 1:
        _start_process_group("nccl" if device.type == "cuda" else "gloo", launch.endpoint)
    state = PartialState(cpu=device.type == "cpu")
    if state.num_processes != planned.num_processes:
        hint = "start it with `autotune train`, or as many processes with torchrun"
        message = f"the plan is for {planned.num_processes} processes"
        raise AutotuneError(f"{message}, but {state.num_processes} run", hint=hint)
    own = state.device if has_several and device.type != "cpu" else device
    set_device(own)
    group = torch.distributed.new_group(backend="gloo", timeout=MAX_WAIT) if has_several else None
    rank, local_rank = state.process_index, launch.local_rank if launch else 0
    return Processes(rank, planned.num_processes, own, planned.num_shards, local_rank, group)


def _start_process_group(backend: str, endpoint: str) -> None:
    """Start as torch's `env://` does, but wait longer for processes than for their answers."""
    from torch.distributed.rendezvous import rendezvous

    if interface := _interface_to(endpoint.rpartition(":")[0]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    try:
        found = rendezvous("env://", timeout=timedelta(seconds=MAX_JOIN_SECONDS))
        store, rank, world_size = next(found)
        group = {"store": store, "rank": rank, "world_size": world_size}
        torch.distributed.init_process_group(backend, **group, timeout=MAX_STEP_WAIT)
    except (RuntimeError, OSError) as error:
        hint = "make sure that all run, and can reach that port on the first process's host"
        message = f"the processes did not meet at {endpoint}: {first_line(error)}"
        raise AutotuneError(message, hint=hint) from error


def _interface_to(host: str) -> str | None:
    """Return the interface that reaches a host: gloo would often take the loopback's."""
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probing:  # connecting it sends nothing
            probing.connect(address)
            own = probing.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if own in (each.address for each in addresses):
                return None if ipaddress.ip_address(own).is_loopback else name
    return None


@contextlib.contextmanager
def explain_lost_peer() -> Iterator[None]:
    """Turn the network's error when another process ends or hangs into PeerLost."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in text:
            raise
        how = "does not answer" if "timed out" in text.lower() else "has ended"
        # Without the place in gloo's source before it and the advice after it.
        cause = re.sub(r"^\[[^\]]*\] *|[.] This is typically.*", "", first_line(error))
        look = "look at what the other processes and nodes printed"
        hint = f"{look}; go on from the last checkpoint with --resume"
        raise PeerLost(f"another process of this run {how}: {cause}", hint=hint) from error


def shard_on_arrival(family: Family, transformer: nn.Module, device_type: str) -> Transform:
    """Make a transform for loading that shards each block once complete, the rest at the end."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    transformer.requires_grad_(False)
    # No name for the mesh: peft takes a weight on a mesh with names as one of tensor parallelism
    mesh = init_device_mesh(device_type, (torch.distributed.get_world_size(),))
    waiting: dict[nn.Module, set[nn.Module]] = {}
    owner: dict[nn.Module, nn.Module] = {}
    for part in (*family.blocks(transformer), transformer):
        own = [module for module in part.modules() if module not in owner and _has_tensors(module)]
        owner |= dict.fromkeys(own, part)
        waiting[part] = set(own)

    def arrived(name: str, module: nn.Module) -> None:
        part = owner[module]
        waiting[part].discard(module)
        if part is not transformer and not waiting[part]:
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
            del waiting[part]
        if waiting.keys() == {transformer} and not waiting[transformer]:
            # Last: it takes what no block has.
            fully_shard(transformer, mesh=mesh, reshard_after_forward=True)

    return arrived


def _has_tensors(module: nn.Module) -> bool:
    drawn = module._non_persistent_buffers_set
    buffers = (value for name, value in module._buffers.items() if name not in drawn)
    return any(value is not None for value in (*module._parameters.values(), *buffers))


CHILD = """
from autotune.system.process import prepare_process
prepare_process()  # before torch is loaded
from autotune.train.processes import train_as_child
from autotune.train.run import train
train_as_child(train)
"""


def train_in_processes(
    plan: TrainingPlan, cache_folder: Path, on_event: OnEvent, *, resume: bool, trace: bool
) -> RunReport:
    """Train in as many processes of this machine as the plan says."""
    output = Path(plan.job.output)
    with make_scratch_folder("run") as folder:
        plan_file, pipe = Path(folder) / "plan.yaml", Path(folder) / "events"
        save_plan(plan, plan_file)
        os.mkfifo(pipe)
        ended: list[RunReport | AutotuneError] = []
        reader = threading.Thread(target=_pass_on, args=(pipe, on_event, ended), daemon=True)
        reader.start()
        flags = (*(["--resume"] if resume else []), *(["--trace"] if trace else []))
        arguments = ("-c", CHILD, str(plan_file), str(pipe), str(cache_folder), *flags)
        try:
            number = plan.frozen.hardware.num_processes
            status = launch(number, arguments, lambda: checkpoints_of(output))
        finally:
            with contextlib.suppress(OSError):  # a reader whom nobody wrote to comes to its end
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
            reader.join()
    result = ended[0] if ended else None
    if isinstance(result, AutotuneError):
        raise result
    if status or result is None:
        hint = "what it printed is above; go on from the last checkpoint with --resume"
        failure = AutotuneError(f"a training process ended with status {status}", hint=hint)
        failure.exit_status = status or 1
        raise failure
    return result


def _pass_on(pipe: Path, on_event: OnEvent, ended: list[RunReport | AutotuneError]) -> None:
    # A process that dies may leave half an object.
    with pipe.open("rb") as sent, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            found = pickle.load(sent)
            if isinstance(found, Event):
                on_event(found)
            else:
                ended.append(found)


def train_as_child(train: Callable[..., RunReport]) -> None:
    """Train as a process of `train_in_processes`; the first pickles events and result."""
    plan_file, pipe, cache_folder, *flags = sys.argv[1:]
    silence_progress_bars()
    own = current_launch()
    is_first = own is None or own.local_rank == 0
    with Path(pipe if is_first else os.devnull).open("wb") as sent:

        def send(found: Event | RunReport | AutotuneError) -> None:
            pickle.dump(found, sent)
            sent.flush()

        try:
            plan, hardware = load_plan(plan_file), probe(index=0)
            resume, trace = "--resume" in flags, "--trace" in flags
            send(train(plan, hardware, Path(cache_folder), send, resume=resume, trace=trace))
        except Exception as error:
            if os.environ.get("AUTOTUNE_TRACEBACK"):
                raise
            failure = explain_error(error)
            send(failure)
            # of what stops all of them the first one tells
            if not is_first and not isinstance(failure, Preempted):
                sys.stderr.write(f"error: {failure.message}\nhint: {failure.hint}\n")
            sys.exit(failure.exit_status)
