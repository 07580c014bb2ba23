"""What a plan learns from the stores: exact first, neighbors by distance, staleness and poison named."""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

from autotune.schema.hardware import HardwareProfile
from autotune.schema.workload import Workload
from autotune.sharing.files import LocalFiles, StoreUnreachable
from autotune.sharing.query import MAX_CONSIDERED, MatchedRecord, find_matches
from autotune.sharing.record import Record
from autotune.sharing.store import Store, save_record, user_store
from tests.builders import GIB, candidate, trial, workload
from tests.sharing.examples import TRIALS, fill, machine, plan, record


def known(here: HardwareProfile, work: Workload, stores: list[Store] | None = None) -> tuple[MatchedRecord, ...]:
    return find_matches(here, work, stores=stores).records


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(LocalFiles(tmp_path / "store"))


def test_an_empty_store_knows_nothing(store: Store) -> None:
    assert known(machine(), workload(), [store]) == ()


def test_exact_records_come_first_the_newest_leading_then_upgraded_ones_then_neighbors(store: Store) -> None:
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


def test_after_an_upgrade_the_records_of_this_machine_say_why_they_no_longer_count(store: Store) -> None:
    store.add(before := record(), record(machine(name="NVIDIA L40S")))
    driver = find_matches(machine(driver="590.1"), workload(), stores=[store])
    assert driver.stale == (
        f"{before.name[:12]} is from before an upgrade, and verified first: driver: 580.95 there, 590.1 here",
    )
    torch = find_matches(machine(torch="2.14.0"), workload(), stores=[store])
    assert torch.stale == (f"{before.name[:12]} no longer counts: torch version: 2.13 there, 2.14 here",)
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
    poison = record(trials=(TRIALS[1], trial(candidate(quantization="torchao-int8"), 0.01, 21 * GIB)))
    damaged = record(search_seconds=1.0)
    store.add(poison, damaged)
    store.files.write({f"{damaged.folder}/{damaged.name}.json": b"{}"})
    found = find_matches(machine(), workload(), stores=[store])
    assert found.records == ()
    assert {line[:12] for line in found.refused} == {poison.name[:12], damaged.name[:12]}
    assert any("faster than the device's peak" in line for line in found.refused)


def test_another_quality_floor_is_no_exact_match(store: Store) -> None:
    store.add(record())
    (found,) = known(machine(), workload(quality="exact"), [store])
    assert (found.match.kind, found.match.reasons) == ("near", ("quality floor: high there, exact here",))


def test_an_exact_record_is_found_in_a_crowd_of_other_machines(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add(mine := record(), *(record(machine(torch=f"2.{minor}.0")) for minor in range(20, 40)))
    monkeypatch.setattr("autotune.sharing.query.MAX_CONSIDERED", 1)
    assert [item.name for item in known(machine(), workload(), [store])] == [mine.name]


def test_of_one_day_the_fastest_leads(store: Store) -> None:
    def promising(seconds: float) -> Record:
        return record(expected=record().expected.changed(step_seconds=seconds, images_per_second=4 / seconds))

    store.add(*(made := [promising(seconds) for seconds in (1.8, 1.75, 1.85, 1.7)]))
    assert [item.name for item in known(machine(), workload(), [store])] == [made[i].name for i in (3, 1, 0, 2)]


def test_a_record_from_the_future_does_not_lead(store: Store) -> None:
    today = datetime.now(UTC).date()
    ahead, tomorrow = (record(measured_on=today + timedelta(days=days)) for days in (3, 1))
    store.add(ahead, tomorrow, made := record())
    assert [item.name for item in known(machine(), workload(), [store])] == [tomorrow.name, made.name, ahead.name]


def test_once_measured_again_the_old_record_is_no_longer_told_of(store: Store) -> None:
    store.add(record(), record(machine(driver="590.1"), measured_on=date(2026, 5, 5)))
    assert find_matches(machine(driver="590.1"), workload(), stores=[store]).stale == ()


def test_a_store_that_does_not_answer_costs_its_records_and_nothing_else(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store.add(made := record())
    silent = Store(LocalFiles(tmp_path))
    monkeypatch.setattr(
        silent.files, "sizes", lambda: (_ for _ in ()).throw(StoreUnreachable("cannot reach it", hint="x"))
    )
    found = find_matches(machine(), workload(), stores=[silent, store])
    assert [item.name for item in found.records] == [made.name]
    assert found.refused == ("cannot reach it",)


def test_a_flood_of_records_costs_a_bounded_time(store: Store) -> None:
    fill(Path(store.address), MAX_CONSIDERED + 20)
    assert len(known(machine(), workload(), [store])) == MAX_CONSIDERED
