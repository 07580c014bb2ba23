"""Predictions order candidates as they must, break down completely, and come fast."""

import pytest
from tiny_models import TINY, cpu, gpu, workload_of

from autotune.cost.kernels import nf4_bytes
from autotune.cost.predict import CostModel
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.modulation import window_steps
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import Candidate
from autotune.plan.hardware import Rate
from autotune.plan.prediction import Prediction
from autotune.plan.trial import TrialResult
from autotune.plan.typical import padded_text_tokens

STEP_PARTS = (
    "matmul",
    "adapter",
    "attention",
    "elementwise",
    "dequantization",
    "convolution",
    "optimizer",
    "overhead",
    "transfer",
)


@pytest.fixture(scope="module")
def card():
    return CostModel.build(
        gpu("nvidia-rtx-4090"), workload_of("flux1-dev"), FAMILIES["flux1-dev"], TINY["flux1-dev"]
    )


@pytest.mark.quick("none", "int8-matmul", "bnb-nf4")
@pytest.mark.parametrize("quantization", WEIGHT_FORMATS)
def test_parts_add_up_and_survive_json(card, quantization):
    prediction = card.predict(
        Candidate(micro_batch_size=2, checkpointed_blocks=3, quantization=quantization)
    )
    for phase in prediction.phases:
        assert sum(dict(phase.breakdown).values()) == phase.run_memory_bytes
    parts = sum(getattr(prediction.step_time, f"{part}_seconds") for part in STEP_PARTS)
    assert parts == pytest.approx(prediction.step_seconds)
    assert prediction.run_memory_bytes == max(phase.run_memory_bytes for phase in prediction.phases)
    assert Prediction.model_validate_json(prediction.model_dump_json()) == prediction


def test_batches_between_and_beyond_the_traced_ones_lie_on_their_line(card):
    direct = CostModel.build(card.hardware, card.workload, card.family, card.model.config)
    for size in (3, 6):
        by_line = card.predict(Candidate(micro_batch_size=size, checkpointed_blocks=2))
        trace = direct.model.traced("bf16", "none", "flash", size, 0)
        assert trace.saved_bytes > 0
        low, high = (
            card.predict(Candidate(micro_batch_size=s, checkpointed_blocks=2)) for s in (2, 4)
        )
        slope = (high.allocated_memory_bytes - low.allocated_memory_bytes) / 2
        expected = low.allocated_memory_bytes + slope * (size - 2)
        assert by_line.allocated_memory_bytes == pytest.approx(expected, rel=1e-3)


def test_more_checkpointed_blocks_never_keep_more_and_always_take_longer(card):
    predictions = [
        card.predict(Candidate(micro_batch_size=2, checkpointed_blocks=k))
        for k in range(card.workload.model.num_blocks)
    ]
    saved = [card.tables.pass_of(p.candidate, accumulates=False).saved_bytes for p in predictions]
    assert saved == sorted(saved, reverse=True)
    seconds = [p.step_seconds for p in predictions]
    assert seconds == sorted(seconds)
    assert predictions[0].step_time.recompute_seconds == 0


def test_quantized_weights_take_what_their_formats_say(card):
    weights = {q: card.model.model_bytes("bf16", q).weight_bytes for q in WEIGHT_FORMATS}
    assert weights["none"] > weights["torchao-int8"] > weights["bnb-nf4"]
    assert nf4_bytes(64 * 256) == 64 * 256 // 2 + 256 + 4 + 64 + 1024 + 4


@pytest.mark.parametrize("quantization", ["torchao-int8", "torchao-fp8"])
def test_uncheckpointed_layers_keep_no_dequantized_weights(card, quantization):
    """Frozen layers dequantize again for the backward pass: what is saved does not grow when
    stored weights shrink."""
    plain, small = (
        card.tables.pass_of(
            Candidate(micro_batch_size=1, checkpointed_blocks=0, quantization=q), accumulates=False
        )
        for q in ("none", quantization)
    )
    assert small.saved_bytes <= plain.saved_bytes


@pytest.mark.quick("qwen-image")
@pytest.mark.parametrize(
    ("name", "text_padding"),
    [
        *((name, "exact") for name in TINY),
        *(
            (name, "masked") for name in TINY if FAMILIES[name].has_attention_mask(2, "masked")
        ),  # others trace the same
    ],
)
def test_predictions_do_not_depend_on_which_was_made_first(name, text_padding):
    known = (cpu(), workload_of(name, text_padding=text_padding), FAMILIES[name], TINY[name])
    candidates = [
        Candidate(
            micro_batch_size=size,
            checkpointed_blocks=k,
            quantization=quantization,
            precision="fp32",
        )
        for size, k, quantization in (
            (1, 0, "none"),
            (2, 3, "none"),
            (3, 0, "none"),
            (1, 3, "torchao-int8"),
        )
    ]
    one, other = CostModel.build(*known), CostModel.build(*known)
    forwards = [one.predict(candidate) for candidate in candidates]
    backwards = [other.predict(candidate) for candidate in reversed(candidates)]
    if (
        name == "sdxl"
    ):  # a trace of its UNet depends on the one before by some KB; the cause is not known
        pairs = list(zip(forwards, backwards[::-1], strict=True))
        assert all(
            a.allocated_memory_bytes == pytest.approx(b.allocated_memory_bytes, rel=1e-3)
            for a, b in pairs
        )
        assert all(a.step_seconds == pytest.approx(b.step_seconds, rel=1e-2) for a, b in pairs)
        return
    assert forwards == backwards[::-1]


@pytest.mark.quick("qwen-image")
@pytest.mark.parametrize("name", TINY)
def test_steps_of_uneven_captions_take_about_what_those_of_their_padded_length_take(name):
    uneven = workload_of(
        name, max_text_tokens=400, text_token_quantiles=(20, 30, 60, 400), effective_batch_size=4
    )
    own = CostModel.build(cpu(), uneven, FAMILIES[name], TINY[name])
    for size, k in ((1, 0), (2, 0), (4, 1)):
        padded = round(padded_text_tokens(uneven, size))
        even = uneven.changed(max_text_tokens=padded, text_token_quantiles=())
        candidate = Candidate(micro_batch_size=size, checkpointed_blocks=k, precision="fp32")
        direct = CostModel.build(cpu(), even, FAMILIES[name], TINY[name]).predict(candidate)
        assert own.predict(candidate).step_seconds == pytest.approx(
            direct.step_seconds, rel=0.15
        ), size
    longest = CostModel.build(
        cpu(), uneven.changed(text_token_quantiles=()), FAMILIES[name], TINY[name]
    )
    assert own.predict(candidate).run_memory_bytes == longest.predict(candidate).run_memory_bytes


def test_one_trial_corrects_all_and_uncertainty_shrinks():
    own = CostModel.build(
        cpu(), workload_of("qwen-image"), FAMILIES["qwen-image"], TINY["qwen-image"]
    )
    first, other = (
        Candidate(micro_batch_size=size, checkpointed_blocks=0, precision="fp32") for size in (1, 2)
    )
    before = {c: own.predict(c) for c in (first, other)}
    own = own.with_calibration(
        [
            TrialResult(
                candidate=first,
                outcome="ok",
                step_seconds=(3 * before[first].step_seconds,),
                peak_memory_bytes=round(1.02 * before[first].allocated_memory_bytes),
            ),
            TrialResult(candidate=other, outcome="oom"),
        ]
    )
    after = {c: own.predict(c) for c in (first, other)}
    assert after[first].step_seconds == pytest.approx(3 * before[first].step_seconds, rel=0.05)
    assert after[other].step_seconds == pytest.approx(3 * before[other].step_seconds, rel=0.3)
    assert after[first].allocated_memory_bytes == pytest.approx(
        1.02 * before[first].allocated_memory_bytes, rel=0.003
    )
    assert (
        after[first].time_uncertainty
        < after[other].time_uncertainty
        < before[other].time_uncertainty
    )


@pytest.mark.parametrize(
    "attention", ["native", "_native_efficient", "_native_cudnn", "_native_math"]
)
def test_every_kind_of_attention_is_traced_with_and_without_a_mask(attention):
    name = "qwen-image"
    peaks = []
    for padding in ("exact", "masked"):
        workload = workload_of(name, text_padding=padding)
        own = CostModel.build(gpu("nvidia-h100-sxm"), workload, FAMILIES[name], TINY[name])
        candidate = Candidate(micro_batch_size=2, checkpointed_blocks=1, attention=attention)
        peaks.append(own.predict(candidate).allocated_memory_bytes)
    assert peaks[1] >= peaks[0]


def test_swapped_blocks_leave_the_device_for_pinned_host_memory_and_cost_transfers(card):
    blocks = card.model.num_blocks
    predictions = [
        card.predict(Candidate(micro_batch_size=1, checkpointed_blocks=blocks, swapped_blocks=k))
        for k in (0, 2, 4)
    ]
    model_bytes = card.model.model_bytes("bf16", "none")
    weights = [p.phases[2].breakdown.weight_bytes for p in predictions]
    assert weights[0] == weights[1] > weights[2]  # two blocks visit, so swapping two frees nothing
    assert weights[0] - weights[2] == sum(sorted(model_bytes.block_weight_bytes[:4])[:2])
    host = [p.host_memory_bytes for p in predictions]
    assert (
        host[2] - host[0]
        == sum(model_bytes.block_pinned_bytes[:4])
        >= sum(model_bytes.block_weight_bytes[:4])
    )
    assert predictions[2].step_seconds >= predictions[0].step_seconds
    assert card.weight_bytes(predictions[2].candidate) < card.weight_bytes(predictions[0].candidate)


def test_modulation_ahead_frees_its_layers_for_a_bounded_window_on_the_host_and_costs_a_share_of_it(
    card,
):
    usual = Candidate(micro_batch_size=1, checkpointed_blocks=2)
    resident, ahead = (
        card.predict(usual),
        card.predict(usual.model_copy(update={"modulation": "ahead"})),
    )
    layers = card.model.model_bytes("bf16", "none", "ahead").modulation
    weights = [p.phases[2].breakdown.weight_bytes for p in (resident, ahead)]
    assert weights[0] - weights[1] == layers.weight_bytes
    host = ahead.host_memory_bytes - resident.host_memory_bytes
    window = window_steps(layers.row_bytes, 2) * 2 * layers.row_bytes
    previews = card.family.defaults.preview_steps * layers.row_bytes
    assert host + card.model.model_bytes("bf16", "none").largest_block_bytes >= window + previews
    assert host <= 2 * window + previews
    assert ahead.step_time.matmul_seconds < resident.step_time.matmul_seconds
    slow = Rate(name="host_to_device.pageable", value=1e6, unit="B/s", spread=0.0, num_samples=1)
    there = card.for_hardware(card.hardware.changed(rates=(slow,))).predict(ahead.candidate)
    fetching = layers.weight_bytes / 1e6 / window_steps(layers.row_bytes, 2)
    assert there.step_seconds - ahead.step_seconds == pytest.approx(fetching, rel=0.01)


def test_what_a_gpu_waits_for_the_host_in_one_pass_it_does_not_make_up_for_in_the_other():
    """Of a large model and small images: kernels are as short as they may be, and more so in the
    backward pass."""
    one, usual = gpu("nvidia-h100-sxm"), FAMILIES["qwen-image"].models[0].config
    own = CostModel.build(
        one, workload_of("qwen-image", config=usual), FAMILIES["qwen-image"], usual
    )
    candidate = Candidate(micro_batch_size=2, checkpointed_blocks=0)
    composed = own.tables.pass_of(candidate, accumulates=False)
    (*forward, first), (*both, launches) = composed.forward, composed.work
    busy, optimizer = (
        sum(both) - sum(forward),
        4 * sum(own.model.model_bytes("bf16", "none").adapter_shapes.values()),
    )
    launch = 1.1 * busy / (launches - first + optimizer)
    assert launch * first < sum(forward)
    assert launch * (launches + optimizer) < sum(both)
    slow = Rate(name="operation.launch", value=launch, unit="s", spread=0.0, num_samples=1)
    waits = (
        own.for_hardware(one.changed(rates=(slow,))).predict(candidate).step_time.overhead_seconds
    )
    assert waits == pytest.approx(0.1 * busy, rel=0.05)
