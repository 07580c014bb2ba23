"""Documents of older schemas: today's names, nothing lost, and only typed errors whatever the
document holds.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import InvalidInput, InvalidPlan
from autotune.schema.base import digest_of
from autotune.schema.migration import (
    KEYS,
    MAX_DEPTH,
    SCHEMA_VERSION,
    VALUES,
    NewerSchema,
    from_schema_1,
    migrate,
)
from autotune.schema.plan_file import plan_text, read_plan, with_job, write_plan
from autotune.sharing.exchange import merge_stores, verify_store
from autotune.sharing.files import LocalFiles
from autotune.sharing.record import DamagedRecord, canonical_json, name_of, parse_record
from autotune.sharing.store import Store, parse_file
from tests.schema.test_plan_file import make_plan
from tests.sharing.examples import record

OLD_KEYS = {new: old for old, new in KEYS.items()}
NAMES = st.sampled_from([*KEYS, *KEYS.values(), *(field for field, _ in VALUES), "frozen", "a"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | NAMES
    | st.sampled_from([value for _, value in VALUES])
)
JSON = st.recursive(
    SCALARS,
    lambda parts: (
        st.lists(parts, max_size=4) | st.dictionaries(NAMES | st.text(), parts, max_size=4)
    ),
)


def as_schema_1(value: Any) -> Any:
    """The document as an autotune of schema 1 would have written it."""
    if isinstance(value, dict):
        found = {
            OLD_KEYS.get(key, key): as_schema_1(part)
            for key, part in value.items()
            if key != "original_digest"
        }
        return found | ({"schema_version": 1} if "schema_version" in found else {})
    return [as_schema_1(part) for part in value] if isinstance(value, list) else value


@settings(max_examples=100)
@given(JSON)
def test_any_json_is_migrated_to_the_same_shape_or_refused_with_a_typed_error(
    document: Any,
) -> None:
    before = copy.deepcopy(document)
    try:
        migrated = from_schema_1(document)
    except InvalidInput:
        return
    assert repr(document) == repr(before)
    assert json.dumps(migrated)
    assert not set(_keys(migrated)) & set(KEYS)
    assert len(list(_keys(migrated))) == len(list(_keys(document)))
    assert repr(from_schema_1(migrated)) == repr(migrated)


def _keys(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(key for part in value.values() for key in _keys(part))]
    return [key for part in value for key in _keys(part)] if isinstance(value, list) else []


@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1, 10_000])
@pytest.mark.parametrize("key", ["a", "pins", None])
def test_depth_is_bounded(levels: int, key: str | None) -> None:
    document: Any = 1
    for _ in range(levels):
        document = [document] if key is None else {key: document}
    if levels == MAX_DEPTH:
        assert from_schema_1(document) == document
    else:
        with pytest.raises(InvalidInput, match="levels"):
            from_schema_1(document)


def test_values_and_pins_are_renamed_in_their_fields_alone() -> None:
    old = {
        "origin": "catalogue",
        "pins": [["caching.text_encoder_storage", "none"]],
        "why": "catalogue",
    }
    new = {
        "origin": "catalog",
        "pins": [["caching.text_encoder_quantization", "none"]],
        "why": "catalogue",
    }
    assert from_schema_1(old) == new
    with pytest.raises(InvalidInput, match="gates and capabilities"):
        from_schema_1({"gates": [], "capabilities": []})


@given(st.integers(SCHEMA_VERSION + 1))
def test_a_newer_schema_is_refused_with_both_versions(version: int) -> None:
    with pytest.raises(
        NewerSchema,
        match=f"schema {version}, and this autotune knows schemas up to {SCHEMA_VERSION}",
    ):
        migrate({}, version)


def test_a_plan_of_schema_1_is_read_under_a_new_digest_and_keeps_its_identity(
    tmp_path: Path,
) -> None:
    old = as_schema_1(yaml.safe_load(plan_text(make_plan())))
    del (
        old["frozen"]["settings"]["loader"],
        old["frozen"]["trials"][0]["candidate"]["loader"],
    )  # as before that knob
    old["digest"] = digest_of(old["frozen"])
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(old))
    read = read_plan(path)
    assert read.frozen == make_plan().frozen.changed(original_digest=old["digest"])
    assert (read.digest, read.identity) == (digest_of(read.frozen), old["digest"])
    write_plan(path, with_job(read, num_steps=7))
    assert (read_plan(path).frozen, read_plan(path).identity) == (read.frozen, old["digest"])
    old["frozen"]["settings"]["micro_batch_size"] = 8
    path.write_text(yaml.safe_dump(old))
    with pytest.raises(InvalidPlan, match="was edited"):
        read_plan(path)


def test_a_plan_that_lacks_a_newer_field_is_whole_after_it_is_written_again(tmp_path: Path) -> None:
    data = yaml.safe_load(plan_text(make_plan()))
    del data["frozen"]["settings"]["loader"]
    data["digest"] = digest_of(data["frozen"])
    (tmp_path / "older.yaml").write_text(yaml.safe_dump(data))
    plan = read_plan(tmp_path / "older.yaml")
    assert (plan.frozen.settings.loader, plan.identity) == ("safetensors", data["digest"])
    write_plan(tmp_path / "again.yaml", plan)
    assert read_plan(tmp_path / "again.yaml") == plan


def old_record() -> bytes:
    data = as_schema_1(json.loads(record().content))
    for candidate in (data["settings"], *(trial["candidate"] for trial in data["trials"])):
        del candidate["loader"]
    return canonical_json(data)


def test_a_record_of_schema_1_is_read_and_keeps_name_and_bytes_wherever_it_goes(
    tmp_path: Path,
) -> None:
    content = old_record()
    name = name_of(content)
    assert parse_record(content, name) == record()
    first, second = (Store(LocalFiles(tmp_path / where)) for where in ("first", "second"))
    file = parse_file(name, content)
    first.files.write({file.key: content})
    assert merge_stores(first, second).num_new == 1
    for store in (first, second):
        assert verify_store(store) == (1, ())
        ((_, stored),) = store.files.read(store.sizes())
        assert stored == content
        assert store.find(name)[0].content == content


@settings(max_examples=100)
@given(JSON)
def test_any_json_that_says_it_is_an_old_record_is_refused_with_a_typed_error(
    document: Any,
) -> None:
    if isinstance(document, dict):
        document["schema_version"] = 1
    content = json.dumps(document).encode()
    with pytest.raises(DamagedRecord):
        parse_record(content, name_of(content))
