"""Where a job runs, what it calls, and which folders it needs there."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from autotune.errors import InvalidInput


@dataclass(frozen=True)
class Mount:
    """A path of the host that a container needs at the same place."""

    path: PurePosixPath
    is_read_only: bool = False


@dataclass(frozen=True)
class JobFile:
    """Where a job runs and what it calls."""

    folder: PurePosixPath
    """Absolute folder from which the plan's relative paths count; it must be there on every
    node.
    """
    plan_file: PurePosixPath
    """Absolute path of the plan."""
    output: PurePosixPath
    """Absolute path of the run's output, which must be on a disk that all nodes share, or on the
    first one's.
    """
    image: str = ""
    """Container image with autotune in it; empty outside containers."""
    claim: str = ""
    """Kubernetes' persistent volume claim that holds `folder`."""
    overrides: tuple[str, ...] = ()
    """Further options of `autotune train`, such as `("--data", "photos")`."""
    reads: tuple[PurePosixPath, ...] = ()
    """Absolute paths that the job reads, in `folder` or not."""
    writes: tuple[PurePosixPath, ...] = ()
    """Absolute folders that the job writes to, in `folder` or not."""

    over: PurePosixPath | None = None
    """Absolute path of a file that lists subjects: of an array of jobs each trains one of them."""
    num_subjects: int = 0

    @property
    def command(self) -> list[str]:
        """What each process, or each pod, calls: it goes on from a checkpoint if there is one."""
        subjects = ["--over", str(self.over)] if self.over else []
        places = [str(self.plan_file), *subjects, *self.overrides, "--output", str(self.output)]
        return ["autotune", "train", *places, "--resume"]

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """What a container must be given: `folder`, and each other path that does not lie in one
        of them already.
        """
        chosen = [Mount(self.folder)]
        for paths, is_read_only in ((self.writes, False), (self.reads, True)):
            for path in _outermost_first(paths):
                if not any(path.is_relative_to(mount.path) for mount in chosen):
                    chosen.append(Mount(path, is_read_only))
        return tuple(chosen)

    def require_one_run(self, cluster: str) -> None:
        """Raise InvalidInput for an array of jobs."""
        if self.over:
            raise InvalidInput(
                f"only SLURM has arrays of jobs, not {cluster}",
                hint=(
                    "leave --over out here, and let the container call `autotune train PLAN "
                    "--over "
                    "FILE`"
                ),
            )

    def require_image(self, cluster: str) -> None:
        """Raise InvalidInput unless a container image is named that no program takes for an
        option.
        """
        if not self.image:
            raise InvalidInput(
                f"a job of {cluster} needs a container image", hint="name one: --image NAME"
            )
        if re.search(r"^-|\s", self.image):
            raise InvalidInput(
                f"{self.image!r} is not the name of a container image",
                hint="name one without a leading hyphen and without white space: --image NAME",
            )


def _outermost_first(paths: Iterable[PurePosixPath]) -> list[PurePosixPath]:
    return sorted(set(paths), key=lambda path: (len(path.parts), path))
