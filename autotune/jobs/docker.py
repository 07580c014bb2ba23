"""A shell script for Docker on one machine; started again, it goes on from the newest checkpoint.

Options: docker-run(1) and NVIDIA's container toolkit.
"""

import shlex

from autotune.errors import InvalidInput
from autotune.jobs.job_file import JobFile, Mount
from autotune.jobs.needs import PREEMPTED, JobNeeds

CACHE = "/cache"
SCRIPT = """\
#!/bin/sh
# Written by `autotune job-script`: {summary}.
# `docker stop {name}` ends it with a checkpoint, within {notice} s, and status {preempted}. Run this again to go on.
{prepare}exec {command}
"""


def docker_script(needs: JobNeeds, job: JobFile) -> str:
    """The script, for sh.

    Raises:
        InvalidInput: no image was named, the plan is to run on several nodes, or Docker cannot
            mount a folder of it.
    """
    job.require_image("Docker")
    job.require_one_run("Docker")
    if needs.num_nodes > 1:
        raise InvalidInput(
            "Docker by itself starts containers on one machine",
            hint=(
                "use --for slurm or --for kubernetes, or start `autotune train --nodes` in a "
                "container on each"
            ),
        )
    command = [
        "docker",
        "run",
        "--rm",
        "--name",
        needs.name,
        "--stop-timeout",
        str(needs.notice_seconds),
    ]
    if needs.gpus_per_node:  # the driver's utility part holds NVML
        command += [
            "--gpus",
            str(needs.gpus_per_node),
            "--env",
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ]
    if needs.host_memory_gib:
        command += ["--memory", f"{needs.host_memory_gib}g"]
    if needs.processes_per_node > 1:  # NCCL passes data through it
        command += ["--shm-size", "1g"]
    for mount in job.mounts:
        command += ["--mount", _bind(mount)]
    command += ["--workdir", str(job.folder)]
    command += [
        "--mount",
        f"type=volume,source=autotune-cache,target={CACHE}",
        "--env",
        f"XDG_CACHE_HOME={CACHE}",
    ]
    written = [str(mount.path) for mount in job.mounts[1:] if not mount.is_read_only]
    return SCRIPT.format(
        prepare=f"mkdir -p {shlex.join(written)} || exit\n"
        if written
        else "",  # Docker mounts only what is there
        summary=needs.summary,
        name=needs.name,
        notice=needs.notice_seconds,
        command=shlex.join([*command, job.image, *job.command]),
        preempted=PREEMPTED,
    )


def _bind(mount: Mount) -> str:
    path = str(mount.path)
    own = {"/": "the whole disk", CACHE: f"{CACHE}, where it keeps the caches"}
    if path in own or any(character in path for character in ',"\n'):
        why = own.get(path, f"{path}, whose name has a comma, a quote or a line break")
        raise InvalidInput(
            f"Docker cannot mount {why}",
            hint="move there what the job needs, to a folder of its own",
        )
    return f"type=bind,source={path},target={path}{',readonly' if mount.is_read_only else ''}"
