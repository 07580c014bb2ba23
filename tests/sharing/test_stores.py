"""One contract for every backend: append-only, merged by union, incremental, never
half-readable, nothing trusted.
"""

import json
import threading
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from autotune.errors import InvalidInput
from autotune.sharing.exchange import merge_stores, prune_store, verify_store
from autotune.sharing.files import LocalFiles
from autotune.sharing.record import MAX_RECORD_BYTES, DamagedRecord, name_of
from autotune.sharing.store import Store
from tests.builders import GIB, candidate, trial
from tests.sharing.examples import TRIALS, machine, record, several

Open = Callable[[], Store]


def names(store: Store) -> set[str]:
    return {entry.name for entry in store.entries()}


def local(folder: Path) -> Store:
    return Store(LocalFiles(folder))


def test_a_new_store_is_empty(opened: Open) -> None:
    assert opened().entries() == ()
    assert verify_store(opened()) == (0, ())


def test_what_was_added_is_found_by_whoever_opens_it_next(opened: Open) -> None:
    made = several(3)
    assert opened().add(*made) == 3
    assert opened().add(*made) == 0
    assert dict(opened().records()) == {one.name: one for one in made}
    assert opened().find(made[0].name[:10])[1] == made[0]
    assert verify_store(opened()) == (3, ())


def test_push_and_pull_are_a_union(opened: Open, tmp_path: Path) -> None:
    alice, bob, team = local(tmp_path / "alice"), local(tmp_path / "bob"), opened()
    alice.add(*several(3))
    bob.add(*several(3, start=2))
    assert merge_stores(alice, team).num_new == 3
    pushed = merge_stores(bob, opened())
    assert (pushed.num_new, pushed.num_present, pushed.refused) == (2, 1, ())
    assert merge_stores(opened(), alice).num_new == 2
    assert names(alice) == names(opened()) == {one.name for one in several(5)}
    assert [merge_stores(opened(), alice).num_new, merge_stores(alice, opened()).num_new] == [0, 0]


def test_only_what_is_new_is_read(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team, mine = opened(), local(tmp_path / "mine")
    team.add(*several(4))
    merge_stores(team, mine)
    team.add(*several(1, start=9))
    asked: list[str] = []
    real = team.files.read
    monkeypatch.setattr(team.files, "read", lambda sizes: asked.extend(sizes) or real(sizes))
    assert merge_stores(team, mine).num_new == 1
    assert len(asked) == 1


def test_altered_misfiled_and_foreign_files_are_refused_named_and_leave_the_rest_alone(
    opened: Open, tmp_path: Path
) -> None:
    team, good, altered = opened(), record(), record(search_seconds=1.0)
    moved, bomb = record(search_seconds=2.0), b" " * (MAX_RECORD_BYTES + 1)
    yaml = b"!!python/object/apply:os.system ['touch /tmp/hurt']"
    team.add(good)
    team.files.write(
        {
            f"{altered.folder}/{altered.name}.json": altered.content.replace(b"580.95", b"580.96"),
            f"{'0' * 16}/x/y/{moved.name}.json": moved.content,
            f"{good.folder}/{name_of(bomb)}.json": bomb,
            f"{good.folder}/{name_of(yaml)}.json": yaml,
            f"{good.folder}/{'0' * 64}.json": b"",
        }
    )
    mine = local(tmp_path / "mine")
    merged = merge_stores(opened(), mine)
    assert merged.num_new == 1
    assert names(mine) == {good.name}
    assert {one[:12] for one in merged.refused} == {
        name[:12] for name in (altered.name, moved.name, name_of(bomb), name_of(yaml), "0" * 64)
    }
    told = " ".join(merged.refused)
    for why in ("altered or cut off", "does not belong", "too large", "not a record"):
        assert why in told
    count, bad = verify_store(opened())
    assert (count, len(bad)) == (6, 5)


def test_a_record_that_cannot_be_true_is_refused_and_named(opened: Open, tmp_path: Path) -> None:
    poison = record(
        trials=(TRIALS[1], trial(candidate(quantization="torchao-int8"), 0.001, 21 * GIB))
    )
    opened().add(poison)
    merged = merge_stores(opened(), local(tmp_path / "mine"))
    assert merged.num_new == 0
    assert "faster than the device's peak" in merged.refused[0]
    assert poison.name[:12] in merged.refused[0]
    assert len(verify_store(opened())[1]) == 1


def test_what_was_cut_off_is_written_again(opened: Open, tmp_path: Path) -> None:
    mine, made = local(tmp_path / "mine"), record()
    mine.add(made)
    opened().files.write({f"{made.folder}/{made.name}.json": made.content[:100]})
    assert merge_stores(mine, opened()).num_new == 1
    assert verify_store(opened()) == (1, ())


def test_two_writers_at_once_lose_nothing(opened: Open, tmp_path: Path) -> None:
    sources = [local(tmp_path / who) for who in ("alice", "bob")]
    sources[0].add(*several(20))
    sources[1].add(*several(20, start=10))
    errors: list[BaseException] = []

    def push(source: Store) -> None:
        try:
            merge_stores(source, opened())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=push, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert names(opened()) == {one.name for one in several(30)}
    assert verify_store(opened()) == (30, ())


def test_prune_deletes_what_is_superseded_old_damaged_or_of_an_older_protocol(opened: Open) -> None:
    new, old = record(measured_on=date(2026, 5, 1)), record()
    other = record(machine(name="NVIDIA L40S"), measured_on=date(2020, 1, 1))
    protocol, newer = (
        record(
            machine=record().machine.changed(
                match_keys={**record().machine.match_keys, "trial_protocol": version}
            )
        )
        for version in ("0", "2")
    )
    damaged = record(search_seconds=1.0)
    team = opened()
    team.add(new, old, other, protocol, newer)
    team.files.write({f"{damaged.folder}/{damaged.name}.json": b"{}"})
    assert len(prune_store(opened(), dry_run=True)) == 3
    assert len(names(opened())) == 6
    told = prune_store(opened())
    assert names(opened()) == {new.name, other.name, newer.name}
    assert any(f"{old.name[:12]} is superseded by {new.name[:12]}" in line for line in told)
    assert prune_store(opened(), older_than_days=365)[0] == f"{other.name[:12]} is of 2020-01-01"


def test_what_another_version_wrote_is_refused_by_name_and_left_to_others(
    opened: Open, tmp_path: Path
) -> None:
    content = json.dumps(
        {**json.loads(record().content), "autotune_version": "9.1.0", "new_field": 1}
    ).encode()
    opened().files.write({f"{record().folder}/{name_of(content)}.json": content})
    (told,) = merge_stores(opened(), local(tmp_path)).refused
    assert told.startswith(f"{name_of(content)[:12]} was written by autotune 9.1.0")
    assert prune_store(opened()) == ()
    assert names(opened()) == {name_of(content)}


def test_a_record_that_cannot_be_true_supersedes_nothing_and_is_pruned(opened: Open) -> None:
    good = record()
    instant = trial(candidate(quantization="torchao-int8"), 1e-6, 21 * GIB)
    impossible = record(measured_on=date(2026, 5, 1), trials=(instant, *TRIALS))
    opened().add(good, impossible)
    (told,) = prune_store(opened())
    assert told.startswith(f"{impossible.name[:12]} cannot be true")
    assert names(opened()) == {good.name}


def test_a_record_from_the_future_or_of_a_limited_search_supersedes_no_other(opened: Open) -> None:
    opened().add(record(), record(measured_on=date(9999, 1, 1), conclusive=False))
    opened().add(record(measured_on=date(2026, 5, 1), conclusive=False))
    (told,) = prune_store(opened())
    assert "superseded" in told
    assert len(names(opened())) == 2
    assert record().name in names(opened())


def test_named_records_alone_are_deleted_and_nothing_where_one_is_unknown(opened: Open) -> None:
    old, new, other = several(3)
    opened().add(old, new, other)
    with pytest.raises(InvalidInput, match="no record begins"):
        prune_store(opened(), [old.name, "0" * 12])
    assert prune_store(opened(), [old.name[:12]], dry_run=True) == (f"{old.name[:12]} was named",)
    assert len(names(opened())) == 3
    prune_store(opened(), [old.name[:12], new.name])
    assert names(opened()) == {other.name}


def test_a_newer_record_of_fewer_trials_replaces_nothing(opened: Open) -> None:
    opened().add(record(), record(measured_on=date(2026, 5, 1), trials=TRIALS[1:2]))
    assert prune_store(opened()) == ()


def test_finding_needs_one_record(opened: Open) -> None:
    opened().add(*several(2))
    for prefix in ("", "abc", "zzzz", "../.."):
        with pytest.raises(InvalidInput, match="begin"):
            opened().find(prefix)


def test_finding_a_damaged_record_says_so(opened: Open) -> None:
    made = record()
    opened().files.write({f"{made.folder}/{made.name}.json": b"{}"})
    with pytest.raises(DamagedRecord, match="altered"):
        opened().find(made.name)


@pytest.mark.parametrize(
    "key",
    ["../../etc/passwd", "/etc/passwd", "a/b/c/d.json", "0" * 16 + "/../x/" + "0" * 64 + ".json"],
)
def test_no_path_outside_the_layout_is_touched(opened: Open, key: str) -> None:
    files = opened().files
    with pytest.raises(InvalidInput):
        files.write({key: b"x"})
    with pytest.raises(InvalidInput):
        files.delete(key)
    with pytest.raises(InvalidInput):
        list(files.read({key: 10}))


def test_a_store_with_too_many_files_is_refused(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened().add(*several(3))
    monkeypatch.setattr("autotune.sharing.store.MAX_RECORDS", 2)
    with pytest.raises(InvalidInput, match="over 2 records"):
        opened().entries()


def test_a_flood_of_bytes_is_refused_before_it_is_read(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened().add(record())
    monkeypatch.setattr("autotune.sharing.exchange.MAX_TRANSFER_BYTES", 100)
    with pytest.raises(InvalidInput, match="GiB of new records"):
        merge_stores(opened(), local(tmp_path / "mine"))


def test_an_entry_knows_its_place_without_opening_the_file(opened: Open) -> None:
    made = record()
    opened().add(made)
    (entry,) = opened().entries()
    assert (entry.key, entry.name, entry.size) == (
        f"{made.folder}/{made.name}.json",
        made.name,
        len(made.content),
    )
    assert json.loads(made.content)["schema_version"] == 2
