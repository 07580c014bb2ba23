"""One file with a plan for each of several machines: each machine takes its own, and none takes
another's.
"""

import json
from pathlib import Path

import pytest
import yaml

import autotune
from autotune.errors import DoesNotFit, InvalidInput, InvalidPlan
from autotune.hardware import hardware_named
from autotune.schema.plan_file import load_variants, read_plan
from tests.conftest import autotune_here
from tests.training.small import write_model_and_images


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("team")
    model, data = write_model_and_images(folder)
    made = autotune.plan_variants(
        str(model), data, hardware=["4090", "h100-sxm"], path=folder / "team.yaml", resolution=64
    )
    assert len(made) == 2
    return folder / "team.yaml"


@pytest.mark.slow
def test_variants_share_the_job_and_what_is_learned_and_each_machine_takes_its_own(
    team: Path,
) -> None:
    plans = load_variants(team)
    assert plans[0].job == plans[1].job
    assert plans[0].frozen.workload == plans[1].frozen.workload
    for name, plan in zip(("4090", "h100-sxm"), plans, strict=True):
        assert autotune.load_plan(team, hardware=name) == plan
        assert autotune.check(team, hardware=name).fits
    assert plans[0].frozen.hardware.device_name != plans[1].frozen.hardware.device_name


@pytest.mark.slow
def test_a_machine_of_another_kind_is_told_why_of_each_variant(team: Path) -> None:
    with pytest.raises(DoesNotFit) as refused:
        autotune.load_plan(team)
    assert all(name in refused.value.message for name in ("RTX 4090", "H100"))
    checked = autotune.check(team)
    assert not checked.fits
    assert "kind of device" in checked.misfits[0]
    with pytest.raises(DoesNotFit):
        autotune.train(team)


@pytest.mark.slow
def test_of_several_that_fit_the_one_for_such_a_device_is_taken(team: Path) -> None:
    alike = hardware_named("nvidia-rtx-4090")
    named = alike.changed(device=alike.device.changed(name="NVIDIA RTX 6000 Ada Generation"))
    assert autotune.load_plan(team, hardware=named) == load_variants(team)[0], (
        "the same architecture"
    )


def test_the_command_writes_a_variant_for_each_hardware(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, data = write_model_and_images(tmp_path)
    file = tmp_path / "both.yaml"
    asked = ("plan", "--model", model, "--data", data, "--resolution", "64", "-o", file)
    done = autotune_here(capfd, *asked, "--hardware", "4090", "--hardware", "3060")
    assert done.returncode == 0, done.stderr
    assert "NVIDIA GeForce RTX 3060" in done.stdout
    assert f"autotune train {file}" in " ".join(done.stdout.split())
    assert autotune_here(capfd, "check", file, "--hardware", "3060").returncode == 0
    assert autotune_here(capfd, "check", file, "--file-only").returncode == 0
    assert (
        "none of the plan's variants"
        in autotune_here(capfd, "sample", file, "--prompt", "x").stderr
    )
    assert "quantization = " in autotune_here(capfd, "explain", file, "--hardware", "3060").stdout
    again = ("plan", "--from", file, "--hardware", "4090", "-o", tmp_path / "again.yaml")
    assert autotune_here(capfd, *again).returncode == 0, "any variant tells what was asked for"
    here = autotune_here(capfd, "check", file, "--json")
    assert here.returncode == 4
    assert not json.loads(here.stdout)["fits"]


@pytest.mark.slow
def test_a_file_for_several_machines_is_no_single_plan_and_damage_is_named(
    team: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidPlan, match="plans for several machines"):
        read_plan(team)
    whole = yaml.safe_load(team.read_text())
    file = tmp_path / "damaged.yaml"

    def refusal(**changes: object) -> str:
        file.write_text(yaml.safe_dump({**whole, **changes}))
        with pytest.raises(InvalidPlan) as refused:
            load_variants(file)
        return refused.value.message

    first, second = whole["variants"]
    assert "variant 2" in refusal(variants=[first, 7])
    assert "variants" in refusal(variants=[])
    assert "variants" in refusal(variants=[1] * 65)
    assert "spare" in refusal(spare=1)
    assert "job" in refusal(job=None)
    edited = {**second, "frozen": {**second["frozen"], "search_seconds": 1.0}}
    assert "variant 2" in refusal(variants=[first, edited])
    workload = {**first["frozen"]["workload"], "rank": 4, "lora_alpha": 4.0}
    other = {**first["frozen"], "workload": workload}
    from autotune.schema.base import digest_of

    assert "not of one job" in refusal(
        variants=[{"frozen": other, "digest": digest_of(other)}, second]
    )


def test_what_belongs_to_one_machine_is_refused_for_several(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="record"):
        autotune.plan_variants("flux1-dev", hardware=["4090", "3060"], record=tmp_path / "record")
