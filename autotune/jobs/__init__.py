"""Job files written from a plan, for SLURM, Kubernetes and Docker. Pure: a plan and paths in,
text out.
"""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.jobs.docker import docker_script
    from autotune.jobs.job_file import JobFile
    from autotune.jobs.kubernetes import kubernetes_manifest
    from autotune.jobs.needs import JobNeeds
    from autotune.jobs.slurm import slurm_script
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
