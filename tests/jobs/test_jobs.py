"""Job files: what they ask for, that no path can break out of them, and SLURM's through
preemption and requeue.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.api.jobs import job_script
from autotune.errors import InvalidInput
from autotune.jobs import JobFile, JobNeeds, docker_script, kubernetes_manifest, slurm_script
from autotune.jobs.slurm import duration
from autotune.schema.plan import TrainingPlan
from autotune.schema.plan_file import seal, write_plan
from autotune.training.files import checkpoints_of
from autotune.training.metrics import read_metrics
from tests.conftest import autotune_here
from tests.training.small import machine, make_plan, write_model_and_images
from tests.training.test_fit import planned

NASTY = """it's a "folder" $(touch pwned) `touch pwned`; touch pwned #\n- {x: !!python/object}"""
PATHS = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=30
)


def plan_for(number: int = 4, **changes: Any) -> TrainingPlan:
    plan = planned()
    strategy = "ddp" if number > 1 else "single"
    hardware = plan.frozen.hardware.model_copy(
        update={"num_processes": number, "strategy": strategy, **changes}
    )
    expected = plan.frozen.expected.model_copy(
        update={"host_memory_bytes": 10 * 2**30, "step_seconds": 2.0}
    )
    job = plan.job.model_copy(update={"num_steps": 3600, "output": "My dog/run_1"})
    return seal(job, plan.frozen.model_copy(update={"hardware": hardware, "expected": expected}))


def a_job(folder: str = "/work", **changes: Any) -> JobFile:
    root = PurePosixPath(folder)
    return JobFile(
        root, root / "plan.yaml", root / "out", **{"image": "lora:1", "claim": "team", **changes}
    )


def test_a_job_asks_for_what_the_plan_predicts_with_a_margin() -> None:
    needs = JobNeeds.of_plan(plan_for(), num_nodes=2)
    assert (needs.processes_per_node, needs.gpus_per_node, needs.host_memory_gib) == (2, 2, 25)
    assert needs.name == "autotune-run-1"
    assert needs.seconds == 3 * 3600 + 900  # 2 h predicted
    assert JobNeeds.of_plan(plan_for(), hours=0.5).seconds == 1800


def test_no_memory_limit_where_none_holds_what_the_gpu_takes() -> None:
    assert (
        JobNeeds.of_plan(plan_for(match_keys={"memory_kind": "integrated"})).host_memory_gib is None
    )


def test_a_cpu_plan_asks_for_memory_and_no_gpu() -> None:
    plan = plan_for(2, device_kind="cpu")
    needs = JobNeeds.of_plan(plan)
    assert needs.gpus_per_node == 0
    assert (needs.host_memory_gib or 0) * 2**30 > 2 * plan.frozen.expected.run_memory_bytes
    script = slurm_script(needs, a_job())
    assert "gpus" not in script
    assert "#SBATCH --cpus" not in script  # a plan does not say how many
    assert "add --cpus-per-task" in script
    assert "requests" not in kubernetes_manifest(needs, a_job())
    assert "nvidia" not in kubernetes_manifest(needs, a_job())


NOT_POSSIBLE = [
    (3, None, "shared evenly"), (1, 0.01, "no time for steps"), (1, 1e300, "longer than any"),
    (1, float("inf"), "longer than any"), (1, float("nan"), "longer than any"),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "hours", "message"), NOT_POSSIBLE)
def test_what_cannot_work_is_refused(nodes: int, hours: float | None, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        JobNeeds.of_plan(plan_for(), num_nodes=nodes, hours=hours)


def test_slurm_directives() -> None:
    lines = slurm_script(JobNeeds.of_plan(plan_for(), num_nodes=2), a_job()).splitlines()
    assert lines[0] == "#!/bin/bash"
    directives = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert directives == [
        "--job-name=autotune-run-1", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=4",
        "--gpus-per-node=2", "--mem=25G", "--time=0-03:15:00", "--signal=TERM@120",
        "--open-mode=append",
        "--output=autotune-%j.log", "--requeue",
    ]  # fmt: skip


@given(st.integers(0, 10**8))
def test_a_duration_is_that_many_seconds(seconds: int) -> None:
    match = re.fullmatch(r"(\d+)-(\d\d):(\d\d):(\d\d)", duration(seconds))
    assert match
    days, hours, minutes, rest = map(int, match.groups())
    assert ((days * 24 + hours) * 60 + minutes) * 60 + rest == seconds
    assert max(hours - 17, minutes, rest) < 60


@settings(max_examples=25)  # reading YAML is slow
@example(".", "plan.yaml")
@given(PATHS, PATHS)
def test_no_path_changes_the_shape_of_a_manifest(folder: str, plan: str) -> None:
    root = PurePosixPath("/") / folder
    output = root / "out"
    job = JobFile(root, root / plan, output, image="lora:1", claim="team")
    for nodes in (1, 2):
        manifest = yaml.safe_load(kubernetes_manifest(JobNeeds.of_plan(PLAN, num_nodes=nodes), job))
        spec = manifest["spec"]["pytorchReplicaSpecs"]["Worker"] if nodes > 1 else manifest["spec"]
        container = spec["template"]["spec"]["containers"][0]
        assert container["command"] == [
            "autotune",
            "train",
            str(root / plan),
            "--output",
            str(root / "out"),
            "--resume",
        ]
        assert container["workingDir"] == str(root)
    call = slurm_script(JobNeeds.of_plan(PLAN), job).partition("srun --kill-on-bad-exit=1 ")[2]
    assert shlex.split(call.rpartition(" || status=$?\nif")[0]) == job.command


PLAN = plan_for()


def test_a_job_of_kubernetes_is_valid_by_its_schema() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for plan in (plan_for(1), plan_for(4)):
        validate.validate(
            yaml.safe_load(kubernetes_manifest(JobNeeds.of_plan(plan), a_job())),
            "1.31",
            strict=True,
        )


def test_a_job_of_kubernetes_goes_on_after_a_checkpoint_and_not_after_a_wrong_plan() -> None:
    manifest = yaml.safe_load(kubernetes_manifest(JobNeeds.of_plan(plan_for()), a_job()))
    rules = manifest["spec"]["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("Ignore", [75]), ("FailJob", [2, 3, 4]), ("Ignore", None)
    ]  # fmt: skip
    pod = manifest["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # what a failure policy needs
    assert pod["terminationGracePeriodSeconds"] == 120
    resources = pod["containers"][0]["resources"]
    assert resources == {"limits": {"nvidia.com/gpu": 4, "memory": "50Gi"}, "requests": {"cpu": 16}}
    mounted = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {"/work", "/cache", "/dev/shm"}


def test_pods_of_several_nodes_start_their_processes_themselves() -> None:
    manifest = yaml.safe_load(
        kubernetes_manifest(JobNeeds.of_plan(plan_for(), num_nodes=2), a_job())
    )
    assert (manifest["kind"], manifest["spec"]["nprocPerNode"]) == ("PyTorchJob", "2")
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {
        "Master": 1,
        "Worker": 1,
    }
    assert replicas["Master"]["template"]["spec"]["containers"][0]["name"] == "pytorch"


def test_docker_runs_one_container_and_what_it_cannot_do_is_refused() -> None:
    script = docker_script(JobNeeds.of_plan(plan_for()), a_job("/it's here"))
    command = shlex.split(script.rpartition("exec ")[2])
    assert command[:3] == ["docker", "run", "--rm"]
    assert "type=bind,source=/it's here,target=/it's here" in command
    assert command[-7:] == ["lora:1", *a_job("/it's here").command]
    with pytest.raises(InvalidInput, match="one machine"):
        docker_script(JobNeeds.of_plan(plan_for(), num_nodes=2), a_job())
    with pytest.raises(InvalidInput, match="cannot mount"):
        docker_script(JobNeeds.of_plan(plan_for()), a_job("/a,source=/etc"))
    with pytest.raises(InvalidInput, match="container image"):
        docker_script(JobNeeds.of_plan(plan_for()), JobFile(*[PurePosixPath("/a")] * 3))


def test_the_command_writes_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_plan(tmp_path / "plan.yaml", plan_for())
    shown = autotune_here(
        capfd, "job-script", tmp_path / "plan.yaml", "--for", "slurm", "--nodes", "2"
    )
    autotune_here(
        capfd,
        "job-script",
        tmp_path / "plan.yaml",
        "--for",
        "slurm",
        "--nodes",
        "2",
        "-o",
        tmp_path / "job.sh",
    )
    assert (
        shown.stdout
        == (tmp_path / "job.sh").read_text()
        == job_script(tmp_path / "plan.yaml", "slurm", nodes=2)
    )
    assert (
        autotune_here(capfd, "job-script", tmp_path / "plan.yaml", "--for", "slrum").returncode == 2
    )
    assert (
        autotune_here(capfd, "job-script", tmp_path / "plan.yaml", "--for", "kubernetes").returncode
        == 2
    )


SRUN = """\
import os, subprocess, sys
number = int(os.environ["SLURM_NTASKS"])
tasks = [
    subprocess.Popen(
        sys.argv[2:],
        env={**os.environ, "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
             "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": str(number), "SLURM_STEP_TASKS_PER_NODE": str(number),
             "SLURM_STEP_NODELIST": "localhost"},
    )
    for rank in range(number)
]
open("tasks", "w").write(" ".join(str(task.pid) for task in tasks))
sys.exit(max(task.wait() for task in tasks))
"""
"""A stand-in for srun: its tasks on this machine, its exit status the highest of theirs."""

STAND_IN = """\
printf '%s\\0' "$@" > arguments
case "$XDG_CACHE_HOME" in */autotune-cache-*) ;; *) exit 9;; esac
trap 'touch checkpoint; exit 75' TERM
[ -e checkpoint ] && exit 0
while :; do sleep 0.05; done
"""
"""A stand-in for autotune that trains until it is told to stop, then has little left to do."""


class Slurm:
    """A stand-in for SLURM on this machine: runs a script as sbatch would, and again if it is
    put back.
    """

    def __init__(self, folder: Path, autotune: str, num_tasks: int) -> None:
        self.folder, self.num_tasks, self.bin = folder, num_tasks, folder / "bin"
        self.bin.mkdir(parents=True)
        for name, text in {
            "srun": f"#!{sys.executable}\n{SRUN}",
            "scontrol": (
                '#!/bin/sh\n[ "$*" = "requeue 4711" ] && touch '
                f"{shlex.quote(str(folder))}/requeued\n"
            ),
            "autotune": autotune,
        }.items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)

    def start(self, script: str) -> subprocess.Popen[str]:
        path = f"{self.bin}:{os.environ['PATH']}"
        environment = {
            **os.environ,
            "PATH": path,
            "SLURM_JOB_ID": "4711",
            "SLURM_NTASKS": str(self.num_tasks),
        }
        environment |= {
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_TMPDIR": str(self.folder),
        }  # as sbatch does
        return subprocess.Popen(
            ["bash", "-c", script], env=environment, text=True, stderr=subprocess.PIPE
        )

    def preempt(self, job: subprocess.Popen[str], work: Path) -> None:
        """SIGTERM to the tasks and the script, as SLURM sends it."""
        for pid in (*(work / "tasks").read_text().split(), job.pid):
            os.kill(int(pid), signal.SIGTERM)

    @property
    def was_requeued(self) -> bool:
        return (self.folder / "requeued").exists()


def wait_until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_preempted_job_of_slurm_goes_back_into_the_queue_and_ends_well(tmp_path: Path) -> None:
    work = tmp_path / NASTY
    work.mkdir(parents=True)
    slurm = Slurm(tmp_path / "slurm", f"#!/bin/bash\n{STAND_IN}", num_tasks=2)
    script = slurm_script(JobNeeds.of_plan(plan_for(2)), a_job(str(work)))
    job = slurm.start(script)
    wait_until(lambda: (work / "arguments").exists() and (work / "tasks").exists())
    time.sleep(0.3)  # until the tasks handle the signal
    slurm.preempt(job, work)
    assert (job.wait(timeout=60), slurm.was_requeued) == (0, True)
    again = slurm.start(script)
    assert again.wait(timeout=60) == 0
    assert (work / "arguments").read_text().split("\0")[:-1] == a_job(str(work)).command[1:]
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(("status", "expected"), [(0, 0), (4, 4), (137, 137)])
def test_a_job_of_slurm_that_failed_is_not_put_back(
    tmp_path: Path, status: int, expected: int
) -> None:
    slurm = Slurm(tmp_path / "slurm", f"#!/bin/sh\nexit {status}\n", num_tasks=1)
    job = slurm.start(slurm_script(JobNeeds.of_plan(plan_for(1)), a_job(str(tmp_path))))
    assert (job.wait(timeout=60), slurm.was_requeued) == (expected, False)


@pytest.mark.slow
def test_a_real_run_of_two_tasks_is_preempted_put_back_and_finished(tmp_path: Path) -> None:
    model, images = write_model_and_images(tmp_path)
    plan = make_plan(
        model, images, machine(), num_processes=2, num_steps=16, checkpointing_steps=0, output="out"
    )
    write_plan(tmp_path / "plan.yaml", plan)
    slurm = Slurm(
        tmp_path / "slurm", f'#!/bin/sh\nexec {sys.executable} -m autotune "$@"\n', num_tasks=2
    )
    script = slurm_script(JobNeeds.of_plan(plan), a_job(str(tmp_path)))
    job = slurm.start(script)
    wait_until(lambda: len(read_metrics(tmp_path / "out" / "metrics.jsonl")) >= 3, seconds=240)
    slurm.preempt(job, tmp_path)
    assert (job.wait(timeout=240), slurm.was_requeued) == (0, True)
    (checkpoint,) = checkpoints_of(tmp_path / "out")
    again = slurm.start(script)
    assert again.wait(timeout=400) == 0
    assert len(read_metrics(tmp_path / "out" / "metrics.jsonl")) == 16
    assert (tmp_path / "out" / "report.json").exists()
    assert checkpoint.name < "checkpoint-000016.safetensors"
