"""Which launcher started this process, read from its environment: torchrun, accelerate, SLURM's
srun, a PyTorchJob.

Pure: an environment in, one value out. The sources of the variables' names: torch.distributed.run's
documentation, srun(1) and the Kubeflow training operator's PyTorchJob, which sets the variables of
torch.distributed's `env://`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from autotune.errors import InvalidInput

LauncherName = Literal["autotune", "torchrun", "accelerate", "slurm", "environment"]
"""`environment`: RANK and WORLD_SIZE alone, as a PyTorchJob sets them for pods of one process
each.
"""

OWN_RUN_ID = "autotune-"
"""How the run ids of `launch` begin, by which the processes that autotune itself starts are
known.
"""

MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables with the number of processes that mpirun started."""

OTHER_RANKS = (*MPI_SIZES, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
"""Variables that accelerate (`state.py`) would take for ranks besides those of torch."""

TORCH_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables with which torch.distributed names a process."""

SLURM_RANKS = ("SLURM_PROCID", "SLURM_LOCALID")
"""Variables with which srun names a process."""

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""SLURM's numbers for what is no step of srun, the batch script and an interactive shell, lie
above (slurm.h).
"""

SLURM_PORTS = range(15_000, 30_000)
"""Below the ports that Linux hands out by itself, from 32,768 on."""

MAX_PROCESSES = 2**20
ALONE = "to train without a launcher, unset {names}"

HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.:-]*[A-Za-z0-9_])?|\[?[0-9A-Fa-f:.]+\]?")


class _Contradiction(InvalidInput):
    """Numbers that do not agree. Whoever has read them from variables names these as well."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="see --nodes, --node-rank and --rdzv-endpoint")


@dataclass(frozen=True)
class Launch:
    """This process among those that a launcher started, and where they meet."""

    launcher: LauncherName
    rank: int
    local_rank: int
    """Number of this process among those of its node."""
    world_size: int
    local_world_size: int
    address: str
    """Host of the first process."""
    port: int

    def __post_init__(self) -> None:
        """Raise InvalidInput unless the numbers agree with each other."""
        own = {"slurm": "srun's variables", "environment": "RANK and WORLD_SIZE"}
        source = own.get(self.launcher, f"{self.launcher}'s variables")
        what = f"by {source} this would be process {self.rank} of {self.world_size}"
        if not 0 <= self.rank < self.world_size <= MAX_PROCESSES:
            raise _Contradiction(f"{what}, counted from 0")
        if not 0 <= self.local_rank < self.local_world_size <= self.world_size:
            where = f"number {self.local_rank} of {self.local_world_size} on its node"
            raise _Contradiction(f"{what}, and {where}, counted from 0")
        if not 0 < self.port < 2**16 or not HOST.fullmatch(self.address):
            raise _Contradiction(
                f"processes cannot meet at host {self.address!r}, port {self.port}"
            )

    @property
    def variables(self) -> dict[str, str]:
        """The launch as torch.distributed and accelerate read it."""
        numbers = {"RANK": self.rank, "LOCAL_RANK": self.local_rank, "WORLD_SIZE": self.world_size}
        numbers |= {"LOCAL_WORLD_SIZE": self.local_world_size, "MASTER_PORT": self.port}
        return {
            "MASTER_ADDR": self.address,
            **{name: str(value) for name, value in numbers.items()},
        }


@dataclass(frozen=True)
class NodeGroup:
    """The machines of a run on each of which `autotune train` starts the processes itself; by
    default this one.
    """

    num_nodes: int = 1
    node_rank: int = 0
    address: str = "localhost"
    """Host of the first node."""
    port: int = 0
    """0 for any free one, on a single node."""

    def __post_init__(self) -> None:
        """Raise InvalidInput unless the numbers agree with each other."""
        if not 0 <= self.node_rank < self.num_nodes <= MAX_PROCESSES:
            raise _Contradiction(
                f"this cannot be node {self.node_rank} of {self.num_nodes}, counted from 0"
            )
        if not (self.num_nodes == 1 or 0 < self.port < 2**16) or not HOST.fullmatch(self.address):
            raise _Contradiction(f"nodes cannot meet at host {self.address!r}, port {self.port}")

    @property
    def is_first(self) -> bool:
        """Whether the first process runs here: the one that writes the output."""
        return self.node_rank == 0


THIS_NODE = NodeGroup()


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """The launch that this process belongs to; None if it was started alone, as by a shell or a job
    script.

    Raises:
        InvalidInput: the variables contradict each other or are incomplete, or mpirun started
            several processes.
    """
    variables = _Variables(environment)
    try:
        return _read_launch(variables)
    except _Contradiction as error:
        raise variables.named(error) from error


def _read_launch(variables: "_Variables") -> Launch | None:
    environment = variables.environment
    if "TORCHELASTIC_RUN_ID" in environment:
        return _read_torchrun(variables)
    if (launch := _read_env_ranks(variables)) or (launch := _read_slurm(variables)):
        return launch
    for name in MPI_SIZES:
        if variables.number(name, 1) > 1 and "PET_NNODES" not in environment:
            raise InvalidInput(
                f"mpirun started {environment[name]} processes ({name}), which do not know where "
                "to meet",
                hint=(
                    "start them by torchrun or srun, or let autotune start them; "
                    f"{ALONE.format(names=name)}"
                ),
            )
    return None


def read_nodes(environment: Mapping[str, str]) -> tuple[NodeGroup, int] | None:
    """The nodes of a PyTorchJob whose pods are to start several processes each, and their number in
    each pod.

    None if there are none. With `nprocPerNode` the operator sets torchrun's variables, whose names
    begin with PET_.

    Raises:
        InvalidInput: the variables are incomplete, or the number of nodes is not fixed.
    """
    variables = _Variables(environment)
    if not _is_pod_of_several(environment):
        return None
    try:
        number = variables.number("PET_NPROC_PER_NODE")
        nodes = NodeGroup(
            variables.number("PET_NNODES"),
            variables.number("PET_NODE_RANK"),
            variables.text(_first_of(environment, "PET_MASTER_ADDR", "MASTER_ADDR")),
            variables.number(_first_of(environment, "PET_MASTER_PORT", "MASTER_PORT")),
        )
    except _Contradiction as error:
        variables.read.extend(
            name for name in TORCH_RANKS if name in environment
        )  # the operator sets them as well
        raise variables.named(error) from error
    return nodes, number


def require_planned_number(
    launch: Launch | None, nodes: NodeGroup, planned: int, per_node: int | None = None
) -> None:
    """Check that the processes which were started, or will be on each node, are as many as the plan
    is for.

    Args:
        launch: what this process belongs to, if a launcher started it.
        nodes: where processes are to be started if none did.
        planned: number of processes that the plan is for.
        per_node: number that the cluster asks each node to start, if it does.

    Raises:
        InvalidInput: they are not.
    """
    again = "plan again for what is there (autotune plan --from PLAN --gpus N), or start"
    if launch is not None:
        if launch.world_size != planned:
            title = {"slurm": "srun", "environment": "the cluster (RANK, WORLD_SIZE)"}.get(
                launch.launcher
            )
            how = f"srun -n {planned}" if launch.launcher == "slurm" else f"{planned} in all"
            raise InvalidInput(
                f"{title or launch.launcher} started {launch.world_size} process(es), but the plan "
                f"is for {planned}",
                hint=(
                    f"{again} as many as the plan says: {how}; alone, `autotune train` starts "
                    "those of one machine"
                ),
            )
    elif planned % nodes.num_nodes:
        raise InvalidInput(
            f"the plan's {planned} process(es) cannot be shared evenly by {nodes.num_nodes} nodes",
            hint=f"{again} on as many nodes as divide {planned}",
        )
    elif per_node is not None and per_node * nodes.num_nodes != planned:
        raise InvalidInput(
            f"{nodes.num_nodes} pods are to start {per_node} processes each (nprocPerNode), the "
            f"plan is for {planned}",
            hint=f"{again} {planned // nodes.num_nodes} in each of {nodes.num_nodes} pods",
        )


def first_host(host_list: str) -> str:
    """The first host of a SLURM host list, such as `node[01-03,07],login`.

    Each bracket stands for its first number, with the zeros it is written with.

    Raises:
        InvalidInput: it is no host list.
    """
    match = re.match(r"(?:[^\[\],\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+(?=,|\Z)", host_list)
    host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0]) if match else ""
    if not HOST.fullmatch(host):
        raise InvalidInput(
            f"SLURM's list of nodes, {host_list[:80]!r}, names no host",
            hint="set MASTER_ADDR to the first node's name",
        )
    return host


def tasks_on(node: int, tasks_per_node: str) -> int:
    """Number of tasks on one node, from SLURM's compressed list, such as `2(x3),1`.

    Raises:
        InvalidInput: it is no such list, or has no such node.
    """
    nodes_before = 0
    for size, times in _tasks_of(tasks_per_node):
        nodes_before += times
        if node < nodes_before:
            return size
    raise _Contradiction(
        f"SLURM's list of tasks, {tasks_per_node[:80]!r}, has none for node {node}"
    )


def _tasks_of(tasks_per_node: str) -> Iterator[tuple[int, int]]:
    """Number of tasks and number of successive nodes that have as many, up to what is no such
    list any more.
    """
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part.strip())
        if match is None:
            return
        yield int(match[1]), int(match[2] or 1)


def _read_torchrun(variables: "_Variables") -> Launch:
    own = variables.text("TORCHELASTIC_RUN_ID", "none").startswith(OWN_RUN_ID)
    by_accelerate = any(name.startswith("ACCELERATE_") for name in variables.environment)
    launcher: LauncherName = "autotune" if own else "accelerate" if by_accelerate else "torchrun"
    rank, local_rank, world_size, local_world_size = map(variables.number, TORCH_RANKS)
    address, port = variables.text("MASTER_ADDR"), variables.number("MASTER_PORT")
    return Launch(launcher, rank, local_rank, world_size, local_world_size, address, port)


def _read_env_ranks(variables: "_Variables") -> Launch | None:
    """From RANK and WORLD_SIZE; None without them, or for one process."""
    environment = variables.environment
    if _is_pod_of_several(environment):
        return None  # RANK is the pod's
    if (variables.number("RANK", 0), variables.number("WORLD_SIZE", 1)) == (0, 1):
        return None
    local_rank, local_world_size = 0, 1  # one process in each pod
    if "LOCAL_RANK" in environment or "LOCAL_WORLD_SIZE" in environment:
        local_rank, local_world_size = (
            variables.number("LOCAL_RANK"),
            variables.number("LOCAL_WORLD_SIZE"),
        )
    elif "SLURM_LOCALID" in environment and _is_slurm_step(variables):
        local_rank, local_world_size = (
            variables.number("SLURM_LOCALID"),
            _slurm_local_size(variables),
        )
    rank, world_size = variables.number("RANK"), variables.number("WORLD_SIZE")
    address, port = variables.text("MASTER_ADDR"), variables.number("MASTER_PORT")
    return Launch("environment", rank, local_rank, world_size, local_world_size, address, port)


def _read_slurm(variables: "_Variables") -> Launch | None:
    """From the variables of a step of srun; None outside one, or for a step of one task."""
    if not _is_slurm_step(variables):
        return None
    environment = variables.environment
    world_size = variables.number(_first_of(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    if world_size == 1:
        return None
    address = variables.text("MASTER_ADDR") if "MASTER_ADDR" in environment else None
    port = variables.number("MASTER_PORT") if "MASTER_PORT" in environment else None
    if address is None:
        hosts = variables.text(
            _first_of(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        )
        address = first_host(hosts)
    if port is None:  # other for each step, since several may run at once
        step = variables.number(_first_of(environment, "SLURM_STEP_ID", "SLURM_STEPID"), 0)
        job = variables.number(_first_of(environment, "SLURM_JOB_ID", "SLURM_JOBID"))
        port = SLURM_PORTS[(job + step) % len(SLURM_PORTS)]
    rank, local_rank = variables.number("SLURM_PROCID"), variables.number("SLURM_LOCALID")
    launch = Launch(
        "slurm", rank, local_rank, world_size, _slurm_local_size(variables), address, port
    )
    if {
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
    } <= environment.keys():  # else they may be of job and step
        listed = environment["SLURM_STEP_TASKS_PER_NODE"]
        if (number := sum(size * times for size, times in _tasks_of(listed))) != world_size:
            raise _Contradiction(
                f"SLURM's step has {world_size} tasks, but its list, {listed[:80]!r}, has {number}"
            )
    return launch


def _is_slurm_step(variables: "_Variables") -> bool:
    """Whether srun started this process: a batch script has a rank too, 0."""
    if "SLURM_PROCID" not in variables.environment:
        return False
    name = _first_of(variables.environment, "SLURM_STEP_ID", "SLURM_STEPID")
    return (
        variables.number(name, FIRST_SPECIAL_STEP) < FIRST_SPECIAL_STEP
        or variables.number("SLURM_PROCID") > 0
    )


def _slurm_local_size(variables: "_Variables") -> int:
    name = _first_of(variables.environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    return tasks_on(variables.number("SLURM_NODEID"), variables.text(name))


def _is_pod_of_several(environment: Mapping[str, str]) -> bool:
    return environment.get("PET_NPROC_PER_NODE", "1") != "1" and "LOCAL_RANK" not in environment


def _first_of(environment: Mapping[str, str], *names: str) -> str:
    """The first name that is set; the last one if none is, so that an error names it."""
    return next((name for name in names if name in environment), names[-1])


@dataclass(frozen=True)
class _Variables:
    """An environment whose values are checked as they are read."""

    environment: Mapping[str, str]
    read: list[str] = field(default_factory=list)
    """Those that are set and were looked at, in that order."""

    def named(self, error: _Contradiction) -> InvalidInput:
        """The error with a hint that names what was read."""
        names = ", ".join(dict.fromkeys(self.read))
        return InvalidInput(
            error.message,
            hint=f"check how the job starts its processes; {ALONE.format(names=names)}",
        )

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number of at most ten digits. Raises InvalidInput if it is none, or is missing
        without a default.
        """
        text = self.text(name, None if default is None else str(default)).strip()
        if not re.fullmatch(r"[0-9]{1,10}", text):
            raise _Contradiction(
                f"{name} is {text[:40]!r}, which is not the number of a process, node or port"
            )
        return int(text)

    def text(self, name: str, default: str | None = None) -> str:
        """The value. Raises InvalidInput if it is missing or empty and there is no default."""
        if name in self.environment:
            self.read.append(name)
        text = self.environment.get(name) or default
        if text is None:
            known = "the launcher's environment names processes, but "
            raise _Contradiction(
                f"{known}{name} is {'empty' if name in self.environment else 'not set'}"
            )
        return text
