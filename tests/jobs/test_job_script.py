"""`job_script`: jobs that can run, with the folders that they need, or a refusal; and where the
file is written.
"""

import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.api.jobs import job_script
from autotune.errors import InvalidInput
from autotune.jobs import JobNeeds, docker_script, kubernetes_manifest
from autotune.schema.plan import TrainingPlan
from autotune.schema.plan_file import read_plan, seal, write_plan, write_variants
from tests.conftest import autotune_here
from tests.data.pictures import write_pictures
from tests.jobs.test_jobs import a_job, plan_for


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def written(
    plan: TrainingPlan, file: Path, *, controls: int = 0, evidence: str = "measured", **job: Any
) -> Path:
    work = plan.frozen.workload.model_copy(update={"num_control_images": controls})
    expected = plan.frozen.expected.model_copy(update={"evidence": evidence})
    frozen = plan.frozen.model_copy(update={"workload": work, "expected": expected})
    file.parent.mkdir(parents=True, exist_ok=True)
    write_plan(
        file, seal(plan.job.model_copy(update={"data": "photos", "output": "out", **job}), frozen)
    )
    return file


def mounts(script: str) -> set[str]:
    words = shlex.split(script.rpartition("exec ")[2])
    return {after for word, after in pairwise(words) if word == "--mount" and "bind" in after}


def test_a_plan_without_data_needs_some_and_hands_it_to_the_run(work: Path) -> None:
    plan = written(plan_for(1), Path("plan.yaml"), data=None)
    with pytest.raises(InvalidInput, match="names no data folder") as refused:
        job_script(plan, "slurm")
    assert "--data" in refused.value.hint
    call = job_script(
        plan, "slurm", data="photos", model="org/other", output="elsewhere"
    ).partition("\nsrun ")[2]
    assert call.split(" || ")[0] == (
        f"--kill-on-bad-exit=1 autotune train {work}/plan.yaml --model org/other --data photos"
        f" --output {work}/elsewhere --resume"
    )


def test_several_data_folders_are_all_handed_to_the_run_and_mounted(work: Path) -> None:
    plan = written(plan_for(1), Path("plan.yaml"), data=("../photos", "../more"))
    assert read_plan(plan).job.data == ("../photos", "../more")
    script = job_script(plan, "docker", image="lora:1")
    assert all(f"source={work.parent}/{name}," in script for name in ("photos", "more"))
    assert " --data other --data others " in job_script(plan, "slurm", data=["other", "others"])


def test_a_plan_that_edits_images_needs_their_control_images(work: Path) -> None:
    plan = written(plan_for(1), Path("plan.yaml"), controls=1)
    with pytest.raises(InvalidInput, match="no folder of control images") as refused:
        job_script(plan, "slurm")
    assert "--control" in refused.value.hint
    assert " --control before --output " in job_script(plan, "slurm", control="before")


def test_a_container_is_given_every_folder_outside_of_this_one(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = work.parent
    (root / "home" / "model").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(root / "home"))
    (work / "before").symlink_to(root / "linked")
    job = {
        "model": "~/model",
        "data": "../photos",
        "output": str(root / "out"),
        "control": "before",
    }
    plan = written(plan_for(1), root / "plans" / "plan.yaml", **job)
    script = job_script(plan, "docker", image="lora:1")
    read_only = [root / "home" / "model", root / "photos", root / "linked", plan]
    assert mounts(script) == {
        *(f"type=bind,source={path},target={path},readonly" for path in read_only),
        *(f"type=bind,source={path},target={path}" for path in (work, root / "out")),
    }
    assert f"mkdir -p {root}/out || exit\nexec docker" in script
    assert f"--model {root}/home/model " in script  # a container has another home
    with pytest.raises(InvalidInput, match=f"claim holds {work} alone, .*{root}/photos"):
        job_script(plan, "kubernetes", image="lora:1", claim="team")


def test_folders_in_this_one_need_no_mount_of_their_own(work: Path) -> None:
    plan = written(plan_for(1), work / "plan.yaml", data=str(work / "photos"), model="org/name")
    assert len(mounts(job_script(plan, "docker", image="lora:1"))) == 1
    assert (
        yaml.safe_load(job_script(plan, "kubernetes", image="lora:1", claim="team"))["kind"]
        == "Job"
    )


def test_a_predicted_plan_lies_where_the_run_can_write_the_measured_one(work: Path) -> None:
    plan = written(plan_for(1), work.parent / "plans" / "plan.yaml", evidence="predicted")
    assert f"type=bind,source={plan.parent},target={plan.parent}" in mounts(
        job_script(plan, "docker", image="lora:1")
    )


@pytest.mark.parametrize("output", ["/", "/cache"])
def test_what_docker_cannot_mount_is_refused(work: Path, output: str) -> None:
    plan = written(plan_for(1), work / "plan.yaml", output=output)
    with pytest.raises(InvalidInput, match="Docker cannot mount"):
        job_script(plan, "docker", image="lora:1")


@pytest.mark.parametrize("image", ["--privileged", "a b", "a\n", " a"])
def test_an_image_is_no_option(image: str) -> None:
    for write in (docker_script, kubernetes_manifest):
        with pytest.raises(InvalidInput, match="not the name of a container image"):
            write(JobNeeds.of_plan(plan_for()), a_job(image=image))


def test_a_file_with_variants_needs_the_hardware_that_the_job_is_for(
    work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plans = []
    for name, number in (("NVIDIA GeForce RTX 4090", 1), ("NVIDIA H100 80GB HBM3", 2)):
        keys = {"compute_capability": "8.9" if number == 1 else "9.0"}
        plan = plan_for(number, device_name=name, match_keys=keys)
        expected = plan.frozen.expected.model_copy(update={"evidence": "predicted"})
        job = plan.job.model_copy(update={"data": "photos"})
        plans.append(seal(job, plan.frozen.model_copy(update={"expected": expected})))
    write_variants(Path("team.yaml"), plans)
    with pytest.raises(InvalidInput, match="RTX 4090, NVIDIA H100") as refused:
        job_script("team.yaml", "slurm")
    assert "--hardware" in refused.value.hint
    for name, number in (("4090", 1), ("h100-sxm", 2)):
        shown = autotune_here(
            capfd, "job-script", "team.yaml", "--for", "slurm", "--hardware", name
        )
        assert f"--ntasks-per-node={number}\n" in shown.stdout, shown.stderr


@pytest.mark.parametrize("images", [0, 6])
def test_an_arrays_time_is_that_of_the_most_epochs_too(work: Path, images: int) -> None:
    """Of the subject's data, or of as many images as were planned for if it is not here yet."""
    plan = read_plan(written(plan_for(1), Path("plan.yaml"), num_steps=10))
    per_step = plan.frozen.workload.effective_batch_size
    number = images or sum(bucket.num_items for bucket in plan.frozen.workload.buckets)
    if images:
        write_pictures(work / "photos", *[(64, 64)] * images)
    steps = -(-90_000 * number // per_step)

    def script(job: str) -> str:
        Path("subjects.yaml").write_text(
            f"subjects: [{{name: a}}, {{name: b, data: photos, {job}}}]"
        )
        return job_script("plan.yaml", "slurm", over="subjects.yaml")

    assert script("num_train_epochs: 90000") == script(f"num_steps: {steps}")


def test_a_job_file_never_replaces_the_plan_and_is_written_whole_or_not(
    work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = written(plan_for(1), Path("plan.yaml"))
    before = plan.read_bytes()
    Path("link.yaml").hardlink_to(plan)
    for target, message in {
        "plan.yaml": "is the plan itself",
        "../work/link.yaml": "is the plan itself",
        "none/such/f": "there is no folder none/such",
        ".": "cannot be written",
    }.items():
        failed = autotune_here(capfd, "job-script", plan, "--for", "slurm", "-o", target)
        assert (failed.returncode, message in failed.stderr) == (2, True), failed.stderr
    assert plan.read_bytes() == before
    assert job_script(plan, "slurm", path="job.sh") == Path("job.sh").read_text()
    assert sorted(path.name for path in work.iterdir()) == ["job.sh", "link.yaml", "plan.yaml"]
