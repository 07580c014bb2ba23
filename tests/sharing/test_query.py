"""What a plan learns from the stores: exact first, neighbors by distance, staleness and poison
named.
"""

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from autotune.schema.hardware import HardwareProfile
from autotune.schema.workload import Workload
from autotune.sharing.files import LocalFiles, StoreUnreachable
from autotune.sharing.query import MAX_CONSIDERED, MatchedRecord, find_matches
from autotune.sharing.record import Record, canonical_json, name_of
from autotune.sharing.store import Store, parse_file, save_record, user_store
from tests.builders import GIB, candidate, trial, workload
from tests.sharing.examples import TRIALS, fill, machine, plan, record


def known(
    here: HardwareProfile, work: Workload, stores: list[Store] | None = None
) -> tuple[MatchedRecord, ...]:
    return find_matches(here, work, stores=stores).records


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(LocalFiles(tmp_path / "store"))


def test_an_empty_store_knows_nothing(store: Store) -> None:
    assert known(machine(), workload(), [store]) == ()


def test_exact_records_come_first_the_newest_leading_then_upgraded_ones_then_neighbors(
    store: Store,
) -> None:
    far, near = record(machine(name="NVIDIA L40S")), record(machine(driver="570.1"))
    old, new = record(), record(measured_on=date(2026, 5, 5))
    store.add(far, near, old, new)
    found = known(machine(), workload(), [store])
    assert [item.name for item in found] == [new.name, old.name, near.name, far.name]
    assert [item.match.kind for item in found] == ["exact", "exact", "upgraded", "near"]
    weights = [item.weight for item in found]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] == 1.0
    assert found[0].trials == new.trials


def test_what_a_plan_measured_is_remembered_and_found_again(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    here = machine()
    name = save_record(plan(here), here)
    assert save_record(plan(here), here) == name
    assert [item.name for item in known(here, workload())] == [name]
    assert user_store().address == str(tmp_path / "autotune" / "profiles")


def test_after_an_upgrade_the_records_of_this_machine_say_why_they_no_longer_count(
    store: Store,
) -> None:
    store.add(before := record(), record(machine(name="NVIDIA L40S")))
    driver = find_matches(machine(driver="590.1"), workload(), stores=[store])
    assert driver.stale == (
        f"{before.name[:12]} is from before an upgrade, and verified first: driver: 580.95 there, "
        "590.1 here",
    )
    torch = find_matches(machine(torch="2.14.0"), workload(), stores=[store])
    assert torch.stale == (
        f"{before.name[:12]} no longer counts: torch version: 2.13 there, 2.14 here",
    )
    assert torch.records == ()
    assert find_matches(machine(), workload(), stores=[store]).stale == ()


def test_an_upgraded_library_costs_only_its_own_trials(store: Store) -> None:
    plain = trial(candidate(), 2.0, 42 * GIB)
    here = machine(name="NVIDIA L40S", total_memory_bytes=48 * GIB)
    store.add(record(here, trials=(*TRIALS, plain)))
    upgraded = machine(name="NVIDIA L40S", total_memory_bytes=48 * GIB, torchao="0.19.0")
    (found,) = known(upgraded, workload(), [store])
    assert found.trials == (plain,)
    assert "torchao" in find_matches(upgraded, workload(), stores=[store]).stale[0]


def test_impossible_and_damaged_records_are_left_out_and_named(store: Store) -> None:
    poison = record(
        trials=(TRIALS[1], trial(candidate(quantization="torchao-int8"), 0.01, 21 * GIB))
    )
    damaged = record(search_seconds=1.0)
    store.add(poison, damaged)
    store.files.write({f"{damaged.folder}/{damaged.name}.json": b"{}"})
    found = find_matches(machine(), workload(), stores=[store])
    assert found.records == ()
    assert {line[:12] for line in found.refused} == {poison.name[:12], damaged.name[:12]}
    assert any("faster than the device's peak" in line for line in found.refused)


ODD_NUMBERS = (
    5e-324,
    1e-300,
    1e-31,
    1e30,
    1.7e308,
    -1.0,
    -5e-324,
    0,
    -1,
    2**62,
    10**20,
    -(10**20),
    10**400,
)


@pytest.mark.parametrize("odd", ODD_NUMBERS, ids=str)
def test_a_record_with_an_odd_number_ends_no_search_and_is_told_of_by_name(
    odd: float, store: Store
) -> None:
    """Each number of a record in turn: what is taken can be compared, and what is not is refused
    in a line.
    """
    for path in _number_paths(sample := json.loads(record().content)):
        data = json.loads(json.dumps(sample))
        _set(data, path, odd)
        content = canonical_json(data)
        file = parse_file(name_of(content), content)
        if file.record is None:
            assert file.damage.startswith(file.name[:12])
            continue
        store.files.write({file.key: content})  # what a team's folder may hold, plausible or not
    found = find_matches(machine(), workload(), stores=[store])
    assert all(0 <= item.weight <= 1 for item in found.records)


def test_a_rate_that_no_machine_has_refuses_the_record() -> None:
    """It was read, listed and verified, and then ended every plan of the team by the logarithm
    of 0.
    """
    content = record().content.replace(b"900000000000.0", b"5e-324")
    file = parse_file(name_of(content), content)
    assert file.record is None
    assert "too large or too small to be measured" in file.damage
    tiny = record().content.replace(b"900000000000.0", b"1e-29")
    assert "machine.rates.0.value" in parse_file(name_of(tiny), tiny).damage


def test_a_record_that_fits_no_folder_is_refused_by_name() -> None:
    huge = record(
        work=workload(resolution_px=2**62, rank=2**62, effective_batch_size=2**62, targets="a" * 40)
    )
    content = huge.content.replace(b'"num_frames":1', b'"num_frames":%d' % 2**62)
    assert "no folder" in (parse_file(name_of(content), content).problem or "")


def _number_paths(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for key, part in pairs for found in _number_paths(part, (*path, key))]
    return [path] if isinstance(value, int | float) and not isinstance(value, bool) else []


def _set(data: Any, path: tuple[str | int, ...], value: object) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


def test_another_quality_floor_is_no_exact_match(store: Store) -> None:
    store.add(record())
    (found,) = known(machine(), workload(quality="exact"), [store])
    assert (found.match.kind, found.match.reasons) == (
        "near",
        ("quality floor: high there, exact here",),
    )


def test_an_exact_record_is_found_in_a_crowd_of_other_machines(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(mine := record(), *(record(machine(torch=f"2.{minor}.0")) for minor in range(20, 40)))
    monkeypatch.setattr("autotune.sharing.query.MAX_CONSIDERED", 1)
    assert [item.name for item in known(machine(), workload(), [store])] == [mine.name]


def test_of_one_day_the_fastest_leads(store: Store) -> None:
    def promising(seconds: float) -> Record:
        return record(
            expected=record().expected.changed(step_seconds=seconds, images_per_second=4 / seconds)
        )

    store.add(*(made := [promising(seconds) for seconds in (1.8, 1.75, 1.85, 1.7)]))
    assert [item.name for item in known(machine(), workload(), [store])] == [
        made[i].name for i in (3, 1, 0, 2)
    ]


def test_a_record_from_the_future_does_not_lead(store: Store) -> None:
    today = datetime.now(UTC).date()
    ahead, tomorrow = (record(measured_on=today + timedelta(days=days)) for days in (3, 1))
    store.add(ahead, tomorrow, made := record())
    assert [item.name for item in known(machine(), workload(), [store])] == [
        tomorrow.name,
        made.name,
        ahead.name,
    ]


def test_once_measured_again_the_old_record_is_no_longer_told_of(store: Store) -> None:
    store.add(record(), record(machine(driver="590.1"), measured_on=date(2026, 5, 5)))
    assert find_matches(machine(driver="590.1"), workload(), stores=[store]).stale == ()


def test_a_store_that_does_not_answer_costs_its_records_and_nothing_else(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store.add(made := record())
    silent = Store(LocalFiles(tmp_path))
    monkeypatch.setattr(
        silent.files,
        "sizes",
        lambda: (_ for _ in ()).throw(StoreUnreachable("cannot reach it", hint="x")),
    )
    found = find_matches(machine(), workload(), stores=[silent, store])
    assert [item.name for item in found.records] == [made.name]
    assert found.refused == ("cannot reach it",)


def test_a_flood_of_records_costs_a_bounded_time(store: Store) -> None:
    fill(Path(store.address), MAX_CONSIDERED + 20)
    assert len(known(machine(), workload(), [store])) == MAX_CONSIDERED
