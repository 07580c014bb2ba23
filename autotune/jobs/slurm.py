"""A batch script for SLURM: one task for each process, which autotune recognizes by srun's
variables.

SLURM signals the tasks before the time limit; they write a checkpoint and exit with 75, and the
script puts the job back into the queue. A preempted job gets SIGTERM as well. Options: sbatch(1)
and srun(1).
"""

import shlex

from autotune.jobs.job_file import JobFile
from autotune.jobs.needs import PREEMPTED, JobNeeds

SCRIPT = """\
#!/bin/bash
# Written by `autotune job-script`: {summary}.
{directives}
set -u
trap : TERM  # the tasks get it too and write a checkpoint; this shell waits for them
cd {folder} || exit 1
# Encoded images are cached on each node's own disk, models where they are already.
export HF_HOME="${{HF_HOME:-$HOME/.cache/huggingface}}"
export XDG_CACHE_HOME="${{SLURM_TMPDIR:-${{TMPDIR:-/tmp}}}}/autotune-cache-$(id -u)"
{cores}
status=0
srun --kill-on-bad-exit=1 {command} || status=$?
if [ "$status" -eq {preempted} ]; then  # a checkpoint is written: go on from it
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$status"
"""

CORES = """\
export SRUN_CPUS_PER_TASK={number}  # since SLURM 22.05 srun does not take it from the job
"""
NO_CORES = """\
# The plan trains on CPUs and does not say on how many: add --cpus-per-task above, and here export SRUN_CPUS_PER_TASK.
"""
TASK = ' --subject "$SLURM_ARRAY_TASK_ID"'


def slurm_script(needs: JobNeeds, job: JobFile) -> str:
    """The script, to be given to sbatch; of several subjects an array, each task of which is a
    job of its own.
    """
    options = {
        "job-name": needs.name,
        "nodes": needs.num_nodes,
        "ntasks-per-node": needs.processes_per_node,
        "cpus-per-task": needs.cores_per_process,
        "gpus-per-node": needs.gpus_per_node or None,
        "mem": f"{needs.host_memory_gib}G" if needs.host_memory_gib else None,
        "time": duration(needs.seconds),
        "signal": f"TERM@{needs.notice_seconds}",
        "open-mode": "append",
        "output": "autotune-%A-%a.log" if job.over else "autotune-%j.log",
        "array": f"1-{job.num_subjects}" if job.over else None,
    }
    directives = [
        f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None
    ]
    return SCRIPT.format(
        summary=needs.summary,
        directives="\n".join([*directives, "#SBATCH --requeue"]),
        folder=shlex.quote(str(job.folder)),
        cores=CORES.format(number=needs.cores_per_process) if needs.cores_per_process else NO_CORES,
        command=shlex.join(job.command) + (TASK if job.over else ""),
        preempted=PREEMPTED,
    )


def duration(seconds: int) -> str:
    """Days, hours, minutes and seconds as SLURM writes them: `1-02:30:00`."""
    days, rest = divmod(seconds, 86400)
    return f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
