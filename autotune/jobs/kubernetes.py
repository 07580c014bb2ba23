"""A manifest for Kubernetes: a Job for one node, the Kubeflow training operator's PyTorchJob for
several.

A pod that is evicted gets SIGTERM, writes a checkpoint and exits with 75; another takes its place
and goes on. Sources: the API references of batch/v1 (pod failure policy, stable since 1.31) and
kubeflow.org/v1.
"""

from typing import Any

import yaml

from autotune.errors import InvalidInput
from autotune.jobs.job_file import JobFile
from autotune.jobs.needs import PREEMPTED, JobNeeds

CONTAINER = "pytorch"
"""Name of the container that the training operator looks for."""
CACHE = "/cache"
LOST_CAUSES = [2, 3, 4]
"""Exit statuses that another attempt does not mend: wrong input, nothing fits, the plan does not
fit here.
"""
MAX_ATTEMPTS = 3


def kubernetes_manifest(needs: JobNeeds, job: JobFile) -> str:
    """The manifest, as YAML.

    Raises:
        InvalidInput: no image or no volume claim was named, or the job needs folders that the claim
            does not hold.
    """
    job.require_image("Kubernetes")
    job.require_one_run("Kubernetes")
    if not job.claim:
        raise InvalidInput(
            "a job of Kubernetes needs a volume claim", hint="name one: --claim NAME"
        )
    if outside := [str(mount.path) for mount in job.mounts[1:]]:
        raise InvalidInput(
            f"the volume claim holds {job.folder} alone, but the job also needs "
            f"{', '.join(outside)}",
            hint=(
                "call job-script from a folder that holds plan, model, data and output, and name "
                "them by paths in it"
            ),
        )
    manifest = _job(needs, job) if needs.num_nodes == 1 else _pytorch_job(needs, job)
    text = yaml.safe_dump(manifest, sort_keys=False, width=4096)
    return f"# Written by `autotune job-script`: {needs.summary}.\n{text}"


def _job(needs: JobNeeds, job: JobFile) -> dict[str, Any]:
    exits = {"containerName": CONTAINER, "operator": "In"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": needs.name},
        "spec": {
            "backoffLimit": MAX_ATTEMPTS,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onExitCodes": {**exits, "values": [PREEMPTED]}},
                    {"action": "FailJob", "onExitCodes": {**exits, "values": LOST_CAUSES}},
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                ]
            },
            "template": {"spec": {"restartPolicy": "Never", **_pod(needs, job)}},
        },
    }


def _pytorch_job(needs: JobNeeds, job: JobFile) -> dict[str, Any]:
    replica = {"restartPolicy": "OnFailure"}
    template = {"spec": _pod(needs, job)}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": needs.name},
        "spec": {
            "nprocPerNode": str(needs.processes_per_node),
            "runPolicy": {"backoffLimit": MAX_ATTEMPTS, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": {
                "Master": {"replicas": 1, **replica, "template": template},
                "Worker": {"replicas": needs.num_nodes - 1, **replica, "template": template},
            },
        },
    }


def _pod(needs: JobNeeds, job: JobFile) -> dict[str, Any]:
    """What a pod runs. One with several GPUs gets shared memory, which NCCL passes data through."""
    limits: dict[str, Any] = {"nvidia.com/gpu": needs.gpus_per_node} if needs.gpus_per_node else {}
    if needs.host_memory_gib:
        limits["memory"] = f"{needs.host_memory_gib}Gi"
    cores = needs.processes_per_node * (needs.cores_per_process or 0)
    volumes: list[dict[str, Any]] = [
        {"name": "work", "persistentVolumeClaim": {"claimName": job.claim}},
        {"name": "cache", "emptyDir": {}},
    ]
    mounts = [{"name": "work", "mountPath": str(job.folder)}, {"name": "cache", "mountPath": CACHE}]
    if needs.processes_per_node > 1:
        volumes.append(
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
        )
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    container = {
        "name": CONTAINER,
        "image": job.image,
        "command": job.command,
        "workingDir": str(job.folder),
        "env": [{"name": "XDG_CACHE_HOME", "value": CACHE}],
        "resources": {"limits": limits, **({"requests": {"cpu": cores}} if cores else {})},
        "volumeMounts": mounts,
    }
    return {
        "terminationGracePeriodSeconds": needs.notice_seconds,
        "containers": [container],
        "volumes": volumes,
    }
