"""Captions are encoded in the first way that fits, exact ones first; pins are checked."""

import dataclasses

import pytest
from hypothesis import given, strategies as st

from autotune.errors import InvalidInput
from autotune.knobs import caching as caching_module
from autotune.knobs.caching import EncoderSize, choose_caching, size_of
from autotune.knobs.knob import TuningContext
from autotune.models.registry import FAMILIES
from autotune.plan.hardware import OtherGpu
from autotune.plan.words import caching_text
from tests import builders

GIB = 2**30
QWEN = size_of(FAMILIES["qwen-image"].parts, "bf16", 254 << 20)
CAPABILITIES = ("precision.bf16", "quantization.torchao-int8", "quantization.bnb-nf4")


def on(
    budget_gib,
    *,
    host_gib=48,
    others=(),
    kind="discrete",
    quality="high",
    capabilities=CAPABILITIES,
    objective="throughput",
):
    plain = builders.hardware(*capabilities, budget_bytes=int(budget_gib * GIB))
    size = {"total_memory_bytes": 48 * GIB}
    gpus = tuple(
        OtherGpu(index=index, name=f"GPU {index}", budget_bytes=int(gib * GIB), **size)
        for index, gib in enumerate(others, 1)
    )
    device = {"memory_kind": kind, "count": 1 + len(gpus), "total_memory_bytes": 24 * GIB}
    hardware = plain.changed(
        device=plain.device.model_copy(update={**device, "others": gpus}),
        host=plain.host.model_copy(update={"available_memory_bytes": int(host_gib * GIB)}),
    )
    return builders.context(hardware, builders.workload(quality=quality, objective=objective))


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (on(22), "not quantized"),
        (on(22, objective="memory"), "streamed"),
        (on(22, others=(22,), objective="memory"), "not quantized on cuda:1"),
        (on(11), "in int8"),
        (on(11, others=(22,)), "not quantized on cuda:1"),
        (on(11, others=(12,)), "in int8"),  # its own size counts
        (on(11, others=(12, 20, 18)), "not quantized on cuda:2"),
        (on(11, quality="exact"), "not quantized on cpu"),
        (on(11, quality="exact", host_gib=12), "streamed"),
        (on(7), "not quantized on cpu"),
        (on(6, quality="compact"), "not quantized on cpu"),
        (on(7, quality="compact"), "in NF4"),
        (on(17), "in int8"),  # the context needs room, too
        (on(7, kind="integrated"), "streamed"),
        (on(11, capabilities=("precision.bf16",)), "not quantized on cpu"),
    ],
)
def test_qwens_encoder_goes_where_it_fits(context, expected):
    caching, reason = choose_caching(context, QWEN)
    assert caching_text(caching) == expected == reason.chosen
    assert all(rejected.reason for rejected in reason.rejected)


@given(
    budget=st.floats(0.5, 200),
    host=st.floats(1, 500),
    others=st.lists(st.floats(0.5, 200), max_size=7),
    kind=st.sampled_from(["discrete", "integrated", "coherent", "host"]),
    quality=st.sampled_from(["exact", "high", "compact"]),
    parameters=st.integers(0, 10**11),
)
def test_way_is_always_found_above_floor(budget, host, others, kind, quality, parameters):
    context = on(budget, host_gib=host, others=tuple(others), kind=kind, quality=quality)
    size = EncoderSize(parameters, 2, 0)
    caching, _ = choose_caching(context, size)
    assert quality != "exact" or caching.text_encoder_quantization == "none"
    assert caching.text_encoder_quantization != "bnb-nf4" or quality == "compact"
    assert caching.text_encoder_streamed or size.device_bytes(caching) <= budget * GIB
    assert caching == choose_caching(context, size)[0]


def test_several_processes_leave_no_gpu():
    context = on(11, others=(22,))
    assert choose_caching(context, QWEN)[0].text_encoder_device == "cuda:1"
    assert choose_caching(context, QWEN, num_processes=2)[0].text_encoder_device == "training"


CLIP = dataclasses.replace(QWEN, vae_working_bytes=30 * GIB)
"""As `QWEN`, with clips whose encoding takes 30 GiB."""


def test_captions_and_images_share_another_gpu():
    context = on(11, others=(44,))
    caching, _ = choose_caching(context, CLIP)
    planned = caching_module.encoder_gpu_of(context, caching, CLIP)
    assert planned.needed_bytes == pytest.approx(1.04 * CLIP.bytes_at("cuda:1", caching), rel=0.05)
    kept = caching.changed(residency="keep")
    assert CLIP.bytes_at("cuda:1", kept) == CLIP.bytes_at("cuda:1", caching) + CLIP.plain_bytes
    assert CLIP.bytes_at("cpu", caching) == 0
    with_kept, _ = choose_caching(context, CLIP, {"residency": "keep"})
    assert caching_text(with_kept) == "not quantized on cuda:1, VAE on cpu, kept"


def test_t5_is_never_stored_by_bitsandbytes():
    """It casts activations to the dtype of a weight, which is that of packed bytes."""
    qwen = on(5.3, quality="compact")
    flux = TuningContext(qwen.hardware, FAMILIES["flux1-dev"], qwen.workload)
    size = size_of(FAMILIES["flux1-dev"].parts, "bf16", 168 << 20)
    assert choose_caching(qwen, size, {})[0].text_encoder_quantization == "bnb-nf4"
    assert choose_caching(flux, size, {})[0].text_encoder_quantization != "bnb-nf4"
    with pytest.raises(InvalidInput, match="T5 casts"):
        choose_caching(flux, size, {"text_encoder_quantization": "bnb-nf4"})
