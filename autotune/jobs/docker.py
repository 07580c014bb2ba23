"""A shell script for Docker on one machine; started again, it goes on from the newest checkpoint.

Options: docker-run(1) and NVIDIA's container toolkit.
"""

import shlex

from autotune.errors import InvalidInput
from autotune.jobs.needs import PREEMPTED, JobFile, JobNeeds

SCRIPT = """\
#!/bin/sh
# Written by `autotune job-script`: {summary}.
# `docker stop {name}` ends it with a checkpoint, within {notice} s, and status {preempted}. Run this again to go on.
exec {command}
"""


def docker_script(needs: JobNeeds, job: JobFile) -> str:
    """The script, for sh.

    Raises:
        InvalidInput: no image was named, the plan is to run on several nodes, or the folder has such a name.
    """
    if not job.image:
        raise InvalidInput("a job of Docker needs a container image", hint="name one: --image NAME")
    if needs.num_nodes > 1:
        raise InvalidInput(
            "Docker alone starts containers on one machine",
            hint="use --for slurm or --for kubernetes, or start `autotune train --nodes` in a container on each",
        )
    if any(character in str(job.folder) for character in ',"\n'):
        raise InvalidInput(
            f"Docker cannot mount {job.folder}, whose name has a comma, a quote or a line break",
            hint="write the job file from another folder",
        )
    folder = str(job.folder)
    command = ["docker", "run", "--rm", "--name", needs.name, "--stop-timeout", str(needs.notice_seconds)]
    if needs.gpus_per_node:  # the driver's utility part holds NVML
        command += ["--gpus", str(needs.gpus_per_node), "--env", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"]
    if needs.host_memory_gib:
        command += ["--memory", f"{needs.host_memory_gib}g"]
    if needs.processes_per_node > 1:  # NCCL passes data through it
        command += ["--shm-size", "1g"]
    command += ["--mount", f"type=bind,source={folder},target={folder}", "--workdir", folder]
    command += ["--mount", "type=volume,source=autotune-cache,target=/cache", "--env", "XDG_CACHE_HOME=/cache"]
    return SCRIPT.format(
        summary=needs.summary,
        name=needs.name,
        notice=needs.notice_seconds,
        command=shlex.join([*command, job.image, *job.command]),
        preempted=PREEMPTED,
    )
