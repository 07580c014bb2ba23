"""Settles how a process imports, waits, ends and joins others, before torch is imported."""

import atexit
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from autotune.errors import InvalidInput, Preempted

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

# How often a thread of a parallel loop polls for work before it sleeps: for some 100 us, longer
# than the gap between two operations. When another program with two threads ran, steps took 50 to
# 64 times as long with libgomp's 300,000 and 3.4 times with this; alone they took the same
# (`benchmarks/DECISIONS.md`).
SPIN_COUNT = "6000"
# Packages that diffusers, transformers, peft and torch import if they find them: the first two,
# with Inductor, are 900 modules and a quarter of the time of all imports; those of CUDA's build of
# torch, 90 MiB of 1,014 and a process.
UNNEEDED = ("bitsandbytes", "scipy", "triton", "torchao", "boto3", "cuda")
# Begins the command of a child, which must not import a `json.py` of the folder that it works in.
PYTHON = (sys.executable, "-P")
OF_FORK_SERVER = "autotune"  # value of PYTHONSAFEPATH by which the server and its tracker know it


def prepare_process(*, only_predicts: bool = False) -> None:
    """Silence the libraries, let idle threads sleep, end quickly. What the user has set stays. With
    `only_predicts`, for a process that neither trains nor tries anything, packages that predictions
    do not need seem not to be installed until `reveal_packages`."""
    silence_libraries()
    warnings.filterwarnings("ignore")
    for name in UNNEEDED if only_predicts else ():
        if name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)  # else Python looks through all objects at the end, for 2 s


def reveal_packages() -> None:
    """Let all that is installed be imported again, before code that may need it."""
    for name in UNNEEDED:
        if name in sys.modules and sys.modules[name] is None:
            del sys.modules[name]


NOISY_LOGGERS = (
    "torch",
    "torch.utils._pytree",
    "torch.utils.flop_counter",  # it misses triton, which predictions hide
    "torchao",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "optuna",
    "huggingface_hub",
    "PIL",
)


def silence_libraries() -> None:
    """Let only the libraries' errors through, unless their loggers have levels, and leave warnings
    of others as they are. This also disables the kernels that torch 2.13
    compiles at their first call on CUDA: triton fails at an outer product if there is no C
    compiler, or Python's headers are missing."""
    os.environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # C++ tells of profiles, and of addresses without names.
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in NOISY_LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logger.level or logging.ERROR)
    # They tell of each error in a block, whoever may catch it.
    logging.getLogger("diffusers.modular_pipelines").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module="|".join((*NOISY_LOGGERS, "autotune")))


def silence_progress_bars() -> None:
    """Disable the progress bars of diffusers and transformers. Imports both."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


def fork_server_context() -> "ForkServerContext":
    """Start the fork server, whose processes have imported what trials need; return its context at
    once, while it imports."""
    from multiprocessing import forkserver, get_context

    context = get_context("forkserver")
    context.set_forkserver_preload(["autotune.search.preload"])
    with _lock:
        before = os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = OF_FORK_SERVER  # as `PYTHON`
        try:
            forkserver.ensure_running()
        finally:
            if before is None:
                del os.environ["PYTHONSAFEPATH"]
            else:
                os.environ["PYTHONSAFEPATH"] = before
    return context


# New objects between two collections, in place of Python's 700: small ones, some 10 MB.
RARELY = 100_000


@contextlib.contextmanager
def collect_rarely() -> Iterator[None]:
    """Look for cycles of objects rarely, in a `with` block or a decorated function. Imports of
    torch and transformers and traces of models make a million objects that stay: a plan takes an
    eighth less time. Not for what holds large tensors, which a cycle would keep alive."""
    with _lock:
        usual = _before[0] if _before else gc.get_threshold()
        gc.set_threshold(RARELY, *usual[1:])
        _before.append(usual)
    try:
        yield
    finally:
        with _lock:
            usual = _before.pop()
            if not _before:
                gc.set_threshold(*usual)


_lock = threading.Lock()
# The usual thresholds, once for each context open in any thread: the last to be left restores them.
_before: list[tuple[int, int, int]] = []


# SIGHUP comes when a terminal or connection closes; ignored (`nohup`), it stays so.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def catch_stop_signals(*, second_ends: bool) -> Iterator[Callable[[], str | None]]:
    """Yield a function that returns the name of the signal that came, or None."""
    came: list[str] = []
    with _handle(came.append, second_ends=second_ends):
        yield lambda: came[-1] if came else None


class _Stopped(BaseException):
    """Not an `Exception`, which libraries catch."""


@contextlib.contextmanager
def preempt_on_signal(*, second_ends: bool) -> Iterator[None]:
    """Raise Preempted on a signal, after the last step and its checkpoint."""
    came: list[str] = []

    def stop(name: str) -> None:
        came.append(name)
        if len(came) == 1:
            raise _Stopped

    try:
        with _handle(stop, second_ends=second_ends):
            yield
    except _Stopped:
        what = f"stopped by {came[0]} after the last step; its checkpoint is written"
        hint = "samples and report are missing: run the same command with --resume"
        raise Preempted(what, hint=hint) from None


@contextlib.contextmanager
def interrupt_on_signal() -> Iterator[None]:
    """Raise KeyboardInterrupt on a signal: for work with no step to finish and nothing to write."""

    def stop(name: str) -> None:
        raise KeyboardInterrupt

    with _handle(stop, second_ends=True):
        yield


@contextlib.contextmanager
def _handle(on_signal: Callable[[str], None], *, second_ends: bool) -> Iterator[None]:
    before: dict[int, Any] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def handler(number: int, frame: FrameType | None) -> None:
        if second_ends:
            restore()
        on_signal(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before |= {number: signal.signal(number, handler) for number in handled}
    else:  # Python's rule
        told = (
            "signals do not reach work in this thread: KeyboardInterrupt in its on_event stops it"
        )
        logging.getLogger("autotune").info(told)
    try:
        yield
    finally:
        restore()


# Begins the run ids of `launch`, by which processes that autotune itself started are known.
OWN_RUN_ID = "autotune-"

TORCH_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

# Variables that accelerate (`state.py`) would take for ranks besides those of torch.
OTHER_RANKS = tuple(
    f"{prefix}_{name}"
    for prefix in ("PMI", "OMPI_COMM_WORLD", "MV2_COMM_WORLD")
    for name in ("RANK", "SIZE")
)

# For processes to finish their step and write a checkpoint after a signal; older torch gives 30.
SHUTDOWN_SECONDS = 900

# Processes wait so long for each other at the start: some may still load a container or a model.
MAX_JOIN_SECONDS = 3600


@dataclass(frozen=True)
class Launch:
    """This process among those that a launcher started, and where they meet."""

    rank: int
    local_rank: int  # number of this process among those of its node
    world_size: int
    local_world_size: int
    endpoint: str  # `HOST:PORT` of the first process
    is_own: bool = False  # true if autotune started it

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self | None:
        """Read the launch of a process; None if it is alone. Raises InvalidInput."""
        size = environment.get("WORLD_SIZE", "1"), environment.get("RANK", "0")
        if "TORCHELASTIC_RUN_ID" not in environment and size == ("1", "0"):
            return None  # accelerate sets these for a process alone
        names = (*TORCH_RANKS, "MASTER_PORT")
        values = {name: environment.get(name, "") for name in (*names, "MASTER_ADDR")}
        if all(values[name].isdecimal() and len(values[name]) < 10 for name in names):
            rank, local_rank, world_size, local_size, port = (int(values[name]) for name in names)
            is_place = rank < world_size and local_rank < local_size <= world_size
            if is_place and 0 < port < 2**16 and values["MASTER_ADDR"]:
                endpoint = f"{values['MASTER_ADDR']}:{port}"
                is_own = environment.get("TORCHELASTIC_RUN_ID", "").startswith(OWN_RUN_ID)
                return cls(rank, local_rank, world_size, local_size, endpoint, is_own)
        told = ", ".join(f"{name}={value or 'nothing'}" for name, value in values.items())
        what = f"the launcher's variables name no process among others: {told}"
        hint = f"start the processes by torchrun; to train alone, unset {', '.join(TORCH_RANKS)}"
        raise InvalidInput(what, hint=hint)


def current_launch() -> Launch | None:
    """Read the launch that this process belongs to, as `Launch.read`."""
    return Launch.read(os.environ)


def is_first_process() -> bool:
    """Tell if this is the process of a command that prints and writes: the only or first one."""
    launch = current_launch()
    return launch is None or launch.rank == 0


def adopt_launch(num_processes: int) -> Launch | None:
    """Return the launch, which torch and accelerate then find alone in the environment. Raises
    InvalidInput unless the plan's `num_processes` were started."""
    launch = current_launch()
    if launch is not None and launch.world_size != num_processes:
        raise InvalidInput(
            f"a launcher started {launch.world_size} process(es), but the plan is for "
            f"{num_processes}",
            hint="plan again for what is there (autotune plan --from PLAN --gpus N), or start as "
            "many as the plan says; `autotune train` by itself starts those of one machine",
        )
    for name in (*OTHER_RANKS, *(() if launch else TORCH_RANKS)):
        os.environ.pop(name, None)
    return launch


def usable_cores() -> int:
    """Count the cores that this process may use, by its affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def launch(
    num_processes: int, arguments: Sequence[str], checkpoints: Callable[[], set[Path]]
) -> int:
    """Run `python ARGUMENTS` in several processes; return the exit status that one would have. On a
    signal all get SIGTERM, finish their step and write a checkpoint; those that take too long are
    killed. A new one of `checkpoints()` after a signal means that the run was preempted (75)."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SHUTDOWN_SECONDS)
    cores = usable_cores()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=f"{OWN_RUN_ID}{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    before = checkpoints()
    try:
        elastic_launch(config, PYTHON[0])(*PYTHON[1:], "-u", *arguments)
    except ChildFailedError as failure:
        code = int(failure.get_first_failure()[1].exitcode)
        return code if code >= 0 else 128 - code  # as a shell reports a signal
    except SignalException as stop:
        return 75 if checkpoints() - before else 128 + stop.sigval
    return 0
