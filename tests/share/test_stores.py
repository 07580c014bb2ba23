"""Stores in folders, in memory and on S3: merged by union, never half-readable, nothing trusted."""

import json
import os
import time
from collections.abc import Callable
from datetime import date
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli.app import app
from autotune.errors import AutotuneError, InvalidInput
from autotune.records import merge_stores, prune, user_store
from autotune.share.store import MAX_RECORD_BYTES, Store, name_of, record_folder, shareable_machine
from autotune.share.warm_start import find_matches
from tests.builders import GIB, candidate, trial, workload
from tests.share.examples import TRIALS, machine, record

Open = Callable[[], Store]
NUMBERS = count()
FOLDER = record_folder(workload())


@pytest.fixture(scope="module")
def s3():
    for package in ("s3fs", "moto", "flask", "boto3"):
        pytest.importorskip(package)
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    client = boto3.client("s3", endpoint_url=address, region_name="us-east-1", **keys)
    client.create_bucket(Bucket="team")
    options = {"endpoint_url": address, "key": "a", "secret": "b"}
    yield lambda: Store("s3://team/records", **options)
    server.stop()


@pytest.fixture(params=["folder", "memory"])
def opened(request, tmp_path):
    url = f"memory://store{next(NUMBERS)}/profiles"
    return lambda: Store(str(tmp_path / "store") if request.param == "folder" else url)


def names(store):
    return {file.name for file in store.read() if file.record}


def test_stores_merge_on_s3(s3, tmp_path):
    test_push_and_pull_are_a_union(s3, tmp_path)


def test_push_and_pull_are_a_union(opened, tmp_path):
    assert opened().sizes() == {}
    alice, bob = Store(str(tmp_path / "alice")), Store(str(tmp_path / "bob"))
    five = [record(search_seconds=60.0 + number) for number in range(5)]
    assert (alice.add(*five[:3]), alice.add(*five[:3])) == (3, 0)
    bob.add(*five[2:])
    assert merge_stores(alice, opened()).num_new == 3
    pushed = merge_stores(bob, opened())
    assert (pushed.num_new, pushed.num_present, pushed.refused) == (2, 1, ())
    assert merge_stores(opened(), alice).num_new == 2
    assert names(alice) == names(opened()) == {one.name for one in five}


def test_bad_files_leave_the_rest(opened, tmp_path):
    good, altered, moved = record(), record(search_seconds=1.0), record(search_seconds=2.0)
    huge = trial(candidate(quantization="torchao-int8"), 2.0, 210 * GIB)
    impossible = record(trials=(TRIALS[1], huge))
    bomb, yaml = b" " * (MAX_RECORD_BYTES + 1), b"!!python/object/apply:os.system ['x']"
    opened().add(good, impossible)
    for key, content in {
        altered.key: altered.content.replace(b"580.95", b"580.96"),
        f"elsewhere/{moved.name}.json": moved.content,
        f"{FOLDER}/{name_of(bomb)}.json": bomb,
        f"{FOLDER}/{name_of(yaml)}.json": yaml,
        f"{FOLDER}/{'0' * 64}.json": b"",
    }.items():
        opened().write(key, content)
    merged = merge_stores(opened(), Store(str(tmp_path / "mine")))
    assert names(Store(str(tmp_path / "mine"))) == {good.name}
    assert len(merged.refused) == 6
    found = find_matches(shareable_machine(machine()), workload(), store=opened())
    assert [item.name for item in found.records] == [good.name]
    assert len(found.refused) == 5
    assert len(prune(store=opened())) == 6


def test_crashed_records_are_written_again(tmp_path):
    mine, team = Store(str(tmp_path / "mine")), Store(str(tmp_path / "team"))
    mine.add(made := record())
    whole = Path.write_bytes

    def write_half(path, content):
        whole(path, content[:100])
        os._exit(9)

    if (child := os.fork()) == 0:
        Path.write_bytes = write_half
        merge_stores(mine, team)
    os.waitpid(child, 0)
    assert any(path.is_file() for path in (tmp_path / "team").rglob("*"))
    assert team.sizes() == {}
    team.write(made.key, made.content[:100])  # as where files are written in pieces
    assert merge_stores(mine, team).num_new == 1
    assert [(file.name, file.problem) for file in team.read()] == [(made.name, "")]


def test_prune_deletes_what_killed_push_left(tmp_path):
    store = Store(str(tmp_path))
    store.add(record())
    part = tmp_path / record().key
    left, fresh = (part.with_name(f".{name}.{16 * '0'}.part") for name in "ab")
    for file, seconds in ((left, 3700), (fresh, 3500)):
        file.touch()
        os.utime(file, (time.time() - seconds,) * 2)
    (told,) = prune(store=store)
    assert left.name in told
    assert (left.exists(), fresh.exists(), names(store)) == (False, True, {record().name})


def test_prune_deletes_the_superseded(opened):
    new, old = record(measured_on=date(2026, 5, 1)), record()
    fewer = record(measured_on=date(2026, 6, 1), trials=TRIALS[1:2])
    other = record(machine(name="NVIDIA L40S"), measured_on=date(2020, 1, 1))
    slower = [one.changed(step_seconds=tuple(2 * s for s in one.step_seconds)) for one in TRIALS]
    images = old.expected.images_per_second / 2
    expected = old.expected.changed(step_seconds=3.6, images_per_second=images)
    slow = record(measured_on=date(2026, 6, 1), trials=tuple(slower), expected=expected)
    opened().add(new, old, fewer, slow, other)
    assert prune(store=opened(), dry_run=True) == prune(store=opened())
    assert {new.name, fewer.name, slow.name, other.name} <= names(opened())
    assert old.name not in names(opened())
    with pytest.raises(InvalidInput, match="no records begin"):
        prune([new.name, "0" * 12], opened())
    with pytest.raises(InvalidInput):
        prune([new.name[:3]], opened())
    assert prune([new.name[:12]], opened()) == (f"{new.name[:12]} was named",)


def test_no_path_outside_layout_is_touched(opened):
    for key in ("../../etc/passwd", f"../x/{'0' * 64}.json"):
        with pytest.raises(InvalidInput):
            opened().write(key, b"x")
        with pytest.raises(InvalidInput):
            opened().delete(key)
        with pytest.raises(InvalidInput):
            list(opened().read([key]))


def test_only_deleted_records_are_left_out(tmp_path):
    store, made, absent = Store(str(tmp_path)), record(), record(search_seconds=1.0)
    store.add(made)
    assert [file.name for file in store.read([absent.key, made.key])] == [made.name]
    (tmp_path / absent.key).mkdir()
    with pytest.raises(AutotuneError, match="cannot reach"):
        list(store.read([absent.key, made.key]))


def test_links_and_pipes_are_untouched(tmp_path):
    store, made, outside = Store(str(tmp_path / "store")), record(), tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.json").write_bytes(made.content)
    folder = tmp_path / "store" / FOLDER
    folder.mkdir(parents=True)
    (folder / f"{made.name}.json").symlink_to(outside / "secret.json")
    os.mkfifo(folder / f"{'0' * 64}.json")
    assert store.sizes() == {}
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    folder.symlink_to(outside)
    with pytest.raises(AutotuneError, match="is a link"):
        store.add(made)
    assert [path.name for path in outside.iterdir()] == ["secret.json"]


def test_matches_are_ordered_by_likeness(tmp_path):
    far, near = record(machine(name="NVIDIA L40S")), record(machine(power_limit_watts=400.0))
    old, new = record(), record(measured_on=date(2026, 5, 5))
    store = Store(str(tmp_path / "store"))
    store.add(far, near, old, new)
    found = find_matches(shareable_machine(machine()), workload(), store=store)
    assert [item.name for item in found.records] == [new.name, old.name, near.name, far.name]
    assert [item.match.kind for item in found.records] == ["exact", "exact", "near", "near"]


def run(*arguments, before=()):
    words = [*before, "profiles", *map(str, arguments)]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    return result.stdout


def test_commands_carry_records(tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.records.read_machine", machine)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "alice"))
    user_store().add(made := record())
    with pytest.raises(InvalidInput, match="there is no folder"):
        run("push", tmp_path / "typo" / "team")
    assert run("push", tmp_path / "team").startswith("new: 1, already there: 0")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "bob"))
    run("pull", tmp_path / "team")
    assert run("verify") == "records: 1, bad: 0\n"
    assert json.loads(run("verify", "--json")).items() >= {"num_records": 1, "bad": []}.items()
    with pytest.raises(InvalidInput, match="there are no records"):
        run("verify", "--store", "memory://typo")
    (row,) = json.loads(run("list", "--json", before=["--verbose"]))["items"]
    assert (row["name"], row["match"]) == (made.name, "exact")
    assert made.content.decode() in run("submit", made.name[:8], "-o", tmp_path / "checkout")
    assert run("verify", "--store", tmp_path / "checkout/profiles/records").startswith("records: 1")
    assert run("prune", made.name[:8]).endswith("deleted: 1\n")


def test_addresses_hide_their_password(tmp_path):
    assert "hunter2" not in Store("memory://me:hunter2@host/x").address
    assert Store(str(tmp_path)).address == str(tmp_path)
    for odd in ("", "me:hunter2@host/x", "s3:/x"):
        with pytest.raises(InvalidInput, match="neither a folder nor a URL"):
            Store(odd)
