"""Plans fit a machine on which their settings mean something, and work."""

import pytest

from autotune.machine.capabilities import limit_device
from autotune.plan.candidate import CachingSettings
from autotune.plan.file import seal
from autotune.plan.hardware import Capability, OtherGpu
from autotune.plan.plan import EncoderGpu
from autotune.plan.workload import Bucket
from autotune.train.fit import data_misfits, hardware_misfits
from tests import builders
from tests.plan.test_file import make_plan


def planned(storage="none", **settings):
    plan = make_plan()
    changes = {
        "hardware": plan.frozen.hardware.model_copy(update={"match_keys": {}}),
        "settings": builders.candidate(**settings),
        "caching": CachingSettings(text_encoder_quantization=storage),
    }
    return seal(plan.job, plan.frozen.model_copy(update=changes))


@pytest.mark.parametrize("part", ["text_encoder_device", "vae_device"])
def test_encoding_gpus_need_room(part):
    sizes = {"total_memory_bytes": 24 * 10**9, "budget_bytes": 22 * 10**9}
    gpu = EncoderGpu(name="x", needed_bytes=10**10, **sizes)
    plan, here = planned(), builders.hardware()
    hardware = plan.frozen.hardware.changed(encoder_gpu=gpu)
    caching = CachingSettings(**{part: "cuda:1"})
    plan = seal(plan.job, plan.frozen.changed(hardware=hardware, caching=caching))

    def beside(index, budget_bytes, own=0):
        size = {"total_memory_bytes": 24 * builders.GIB, "budget_bytes": budget_bytes}
        there = OtherGpu(index=index, name="small", **size)
        return here.changed(device=here.device.changed(index=own, count=2, others=(there,)))

    assert hardware_misfits(plan, beside(1, 10**10)) == ()
    small = "small, needs 9.31 GiB, 8.38 GiB may be taken"
    assert small in hardware_misfits(plan, beside(1, 9 * 10**9))[0]
    assert "which trains here" in hardware_misfits(plan, beside(0, 10**11, own=1))[0]
    assert "this machine has 1 GPU(s)" in hardware_misfits(plan, here)[0]


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
def test_missing_capabilities_are_named(settings, closed):
    capability = Capability(name=closed, available=False, reason="package: not there")
    here = builders.hardware().model_copy(update={"capabilities": (capability,)})
    (misfit,) = hardware_misfits(planned(**settings), here)
    assert next(iter(settings.values())) in misfit
    assert "package: not there" in misfit
    assert hardware_misfits(planned(**settings), builders.hardware()) == ()


@pytest.mark.parametrize("name", ["quantization", "attention", "optimizer", "batch_memory"])
def test_unknown_names_are_refused(name):
    (misfit,) = hardware_misfits(planned(**{name: "newer"}), builders.hardware())
    assert name in misfit
    assert "'newer'" in misfit


def test_drivers_fit_cuda_majors_do_not():
    here, plan = builders.hardware(), make_plan()
    same = {"fingerprint": here.fingerprint, "match_keys": here.match_keys}
    hardware = plan.frozen.hardware.changed(**same)
    plan = seal(plan.job, planned().frozen.model_copy(update={"hardware": hardware}))
    driver, cuda = (
        here.changed(versions=here.versions.changed(**{key: value}))
        for key, value in {"driver": "595.10", "cuda_runtime": "12.9"}.items()
    )
    assert driver.fingerprint != here.fingerprint
    assert hardware_misfits(plan, driver) == ()
    (misfit,) = hardware_misfits(plan, cuda)
    assert "CUDA major version" in misfit


@pytest.mark.parametrize(
    ("side_px", "more", "fits"), [(1024, 40, True), (1024, 41, False), (128, 1, False)]
)
def test_caption_may_be_little_longer(side_px, more, fits):
    bucket = Bucket(width_px=side_px, height_px=side_px, num_frames=1, num_items=4)
    work = builders.workload(buckets=(bucket,), max_text_tokens=64)
    plan = planned()
    plan = seal(plan.job, plan.frozen.model_copy(update={"workload": work}))
    longer = work.model_copy(update={"max_text_tokens": 64 + more})
    context = builders.context(builders.hardware(), longer)
    assert (data_misfits(plan, context) == ()) == fits


def test_short_hosts_do_not_fit():
    plan, here = planned(), builders.hardware()
    expected = plan.frozen.expected.changed(host_memory_bytes=here.host.available_memory_bytes // 4)
    several = plan.frozen.hardware.changed(num_processes=4, strategy="ddp")
    plan = seal(plan.job, plan.frozen.changed(expected=expected, hardware=several))
    assert hardware_misfits(plan, here) == hardware_misfits(plan, here, 1) == ()
    needs = "the plan needs 96.00 GiB for 8 processes here, 48.00 GiB are available"
    assert hardware_misfits(plan, here, 8) == (f"system RAM: {needs}",)
    poor = here.changed(device=here.device.changed(budget_bytes=1))
    kinds = [misfit.partition(":")[0] for misfit in hardware_misfits(plan, poor, 8)]
    assert kinds == ["system RAM", "run memory"]


def test_plan_keeps_its_own_reserve():
    here, plan = builders.hardware(), planned()
    device = here.device.changed(total_memory_bytes=24 * 2**30)
    here = here.changed(device=limit_device(device, reserve_bytes=2**30))
    needed = limit_device(here.device, reserve_bytes=0).budget_bytes
    expected = plan.frozen.expected.changed(process_memory_bytes=0, peak_memory_bytes=needed)
    for reserve, fits in ((None, False), (0, True), (2**30, False)):
        frozen = plan.frozen.changed(expected=expected, reserve_memory_bytes=reserve)
        assert (hardware_misfits(seal(plan.job, frozen), here) == ()) == fits
