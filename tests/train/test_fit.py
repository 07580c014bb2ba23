"""Whether a plan fits a machine: what its settings name must mean something there, and work."""

import pytest

from autotune.plan.candidate import CachingSettings
from autotune.plan.file import seal
from autotune.plan.hardware import Capability, HardwareProfile, OtherGpu
from autotune.plan.plan import EncoderGpu, TrainingPlan
from autotune.plan.workload import Bucket
from autotune.train.prepare import data_misfits, hardware_misfits
from tests import builders
from tests.plan.test_file import make_plan


def machine(*closed: Capability, kind: str = "cuda") -> HardwareProfile:
    open_ = builders.hardware(kind=kind)
    return open_.model_copy(update={"capabilities": (*open_.capabilities, *closed)})


def planned(storage: str = "none", **settings: object) -> TrainingPlan:
    plan = make_plan()
    hardware = plan.frozen.hardware.model_copy(update={"match_keys": {}})
    changes = {
        "hardware": hardware,
        "settings": builders.candidate(**settings),
        "caching": CachingSettings(text_encoder_quantization=storage),
    }
    return seal(plan.job, plan.frozen.model_copy(update=changes))


@pytest.mark.parametrize("part", ["text_encoder_device", "vae_device"])
def test_the_gpu_that_encodes_must_be_another_one_with_room(part: str) -> None:
    gpu = EncoderGpu(
        name="x", total_memory_bytes=24 * 10**9, budget_bytes=22 * 10**9, needed_bytes=10**10
    )
    plan = planned()
    hardware = plan.frozen.hardware.changed(encoder_gpu=gpu)
    caching = CachingSettings(**{part: "cuda:1"})
    plan = seal(plan.job, plan.frozen.changed(hardware=hardware, caching=caching))

    def beside(index: int, budget_bytes: int, own: int = 0) -> HardwareProfile:
        there = OtherGpu(
            index=index,
            name="small",
            total_memory_bytes=24 * builders.GIB,
            budget_bytes=budget_bytes,
        )
        return machine().changed(
            device=machine().device.changed(index=own, count=2, others=(there,))
        )

    assert hardware_misfits(plan, beside(1, 10**10)) == ()
    assert (
        "small, needs 9.31 GiB, 8.38 GiB may be taken"
        in hardware_misfits(plan, beside(1, 9 * 10**9))[0]
    )
    assert "which trains here" in hardware_misfits(plan, beside(0, 10**11, own=1))[0]
    assert "this machine has 1 GPU(s)" in hardware_misfits(plan, machine())[0]


def test_a_plan_whose_settings_work_here_fits() -> None:
    assert hardware_misfits(planned(), machine()) == ()


@pytest.mark.parametrize(
    ("settings", "closed"),
    [
        ({"attention": "flash"}, "attention.flash"),
        ({"quantization": "bnb-nf4"}, "quantization.bnb-nf4"),
        ({"precision": "bf16"}, "precision.bf16"),
        ({"compile": "block"}, "compile"),
        ({"storage": "bnb-nf4"}, "quantization.bnb-nf4"),
    ],
)
def test_what_does_not_work_here_is_named_with_the_reason(
    settings: dict[str, str], closed: str
) -> None:
    here = machine().model_copy(
        update={
            "capabilities": (Capability(name=closed, available=False, reason="package: not there"),)
        }
    )
    (misfit,) = hardware_misfits(planned(**settings), here)
    assert next(iter(settings.values())) in misfit
    assert "package: not there" in misfit


@pytest.mark.parametrize(
    "name",
    [
        "quantization",
        "attention",
        "precision",
        "compile",
        "optimizer",
        "loader",
        "allocator",
        "batch_memory",
    ],
)
def test_a_name_that_this_autotune_does_not_know_is_refused_rather_than_taken_for_another(
    name: str,
) -> None:
    (misfit,) = hardware_misfits(planned(**{name: "newer"}), machine())
    assert name in misfit
    assert "'newer'" in misfit


def test_a_plan_fits_under_another_driver_but_not_another_cuda() -> None:
    here, plan = machine(), make_plan()
    hardware = plan.frozen.hardware.changed(
        fingerprint=here.fingerprint, match_keys=here.match_keys
    )
    frozen = planned().frozen.model_copy(update={"hardware": hardware})
    under = {
        key: here.changed(versions=here.versions.changed(**{key: value}))
        for key, value in {"driver": "595.10", "cuda_runtime": "12.9"}.items()
    }
    assert under["driver"].fingerprint != here.fingerprint
    assert hardware_misfits(seal(plan.job, frozen), under["driver"]) == ()
    (misfit,) = hardware_misfits(seal(plan.job, frozen), under["cuda_runtime"])
    assert "CUDA major version" in misfit


@pytest.mark.parametrize(
    ("side_px", "more", "fits"), [(1024, 40, True), (1024, 41, False), (128, 1, False)]
)
def test_a_caption_may_be_longer_by_what_a_plan_has_room_for(
    side_px: int, more: int, fits: bool
) -> None:
    bucket = Bucket(width_px=side_px, height_px=side_px, num_frames=1, num_items=4)
    work = builders.workload(buckets=(bucket,), max_text_tokens=64)
    plan = planned()
    plan = seal(plan.job, plan.frozen.model_copy(update={"workload": work}))
    longer = work.model_copy(update={"max_text_tokens": 64 + more})
    assert (data_misfits(plan, builders.context(machine(), longer)) == ()) == fits


def test_a_host_with_too_little_memory_does_not_fit() -> None:
    plan, here = planned(), machine()
    expected = plan.frozen.expected.changed(host_memory_bytes=here.host.available_memory_bytes + 1)
    plan = seal(plan.job, plan.frozen.model_copy(update={"expected": expected}))
    (misfit,) = hardware_misfits(plan, here)
    assert misfit == "host memory: the plan needs 48.00 GiB, 48.00 GiB are available"
    poor = here.changed(device=here.device.changed(budget_bytes=1))
    assert [misfit.partition(":")[0] for misfit in hardware_misfits(plan, poor)] == [
        "host memory",
        "run memory",
    ]


def test_a_host_must_hold_all_processes_of_its_node() -> None:
    plan, here = planned(), machine()
    expected = plan.frozen.expected.changed(host_memory_bytes=here.host.available_memory_bytes // 4)
    several = plan.frozen.hardware.changed(num_processes=4, strategy="ddp")
    plan = seal(plan.job, plan.frozen.changed(expected=expected, hardware=several))
    assert hardware_misfits(plan, here) == ()
    assert hardware_misfits(plan, here, 1) == ()
    (misfit,) = hardware_misfits(plan, here, 8)
    assert (
        misfit
        == "host memory: the plan needs 96.00 GiB for 8 processes here, 48.00 GiB are available"
    )
