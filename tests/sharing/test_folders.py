"""What only folders can suffer: links, devices, crashes, crowds; and git checkouts that two
teams merge.
"""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from autotune.errors import AutotuneError
from autotune.sharing.exchange import merge_stores, verify_store
from autotune.sharing.files import LocalFiles
from autotune.sharing.store import Store, open_store
from autotune.sharing.summary import summarize_records
from tests.sharing.conftest import git
from tests.sharing.examples import fill, record, several


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(LocalFiles(tmp_path / "store"))


def test_links_are_neither_read_nor_written_through(store: Store, tmp_path: Path) -> None:
    made, outside = record(), tmp_path / "outside"
    outside.mkdir()
    secret = outside / "secret.json"
    secret.write_bytes(made.content)
    folder = Path(store.address) / made.folder
    folder.mkdir(parents=True)
    (folder / f"{made.name}.json").symlink_to(secret)
    assert store.entries() == ()
    (read,) = store.files.read({f"{made.folder}/{made.name}.json": 10})
    assert isinstance(read[1], OSError)
    (folder / f"{made.name}.json").unlink()
    folder.rmdir()
    folder.symlink_to(outside)
    assert store.entries() == ()
    with pytest.raises(AutotuneError, match="is a link"):
        store.add(made)
    assert list(outside.iterdir()) == [secret]


def test_a_pipe_in_place_of_a_record_hangs_nobody(store: Store) -> None:
    made = record()
    folder = Path(store.address) / made.folder
    folder.mkdir(parents=True)
    os.mkfifo(folder / f"{made.name}.json")
    assert store.entries() == ()
    ((_, content),) = store.files.read({f"{made.folder}/{made.name}.json": 10})
    assert isinstance(content, OSError)


def test_a_crash_in_the_middle_of_a_write_leaves_nothing_to_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:50])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", crash)
        with pytest.raises(KeyboardInterrupt):
            store.add(record())
    assert store.entries() == ()
    assert store.add(record()) == 1
    assert verify_store(store) == (1, ())


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(AutotuneError, match="cannot reach") as caught:
        open_store(str(tmp_path / "file" / "store")).add(record())
    assert caught.value.hint


def test_other_files_beside_the_records_are_left_alone(store: Store, tmp_path: Path) -> None:
    store.add(record())
    for name in ("README.md", "x.json", f"{'a' * 16}/README", ".git/config"):
        path = Path(store.address) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    assert len(store.entries()) == 1
    assert verify_store(store) == (1, ())


def test_what_is_deleted_while_it_is_read_is_not_there(store: Store) -> None:
    store.add(*several(3))
    gone = store.entries()[1]
    entries = store.entries()
    store.files.delete(gone.key)
    assert [found.name for found in store.read(entries)] == [e.name for e in entries if e != gone]


@pytest.mark.slow
def test_ten_thousand_records_list_in_under_two_seconds(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(Path(store.address), 10_000)
    first, again, parsing = [], [], []

    def are_fast() -> bool:
        pace = max(1.0, min(parsing) / 0.4)
        return min(first) < 2 * pace and min(again) < 0.5 * pace

    for attempt in range(3):  # another program may get in the way of one
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache{attempt}"))
        started = time.perf_counter()
        for path in Path(store.address).rglob("*.json"):
            json.loads(path.read_bytes())
        parsing.append(time.perf_counter() - started)  # .4 s on the machine that the limits are for
        for seconds in (first, again):  # the first makes the index
            started = time.perf_counter()
            rows = summarize_records(store)
            seconds.append(time.perf_counter() - started)
            assert len(rows) == 10_000
        if are_fast():
            break
    assert are_fast(), (first, again, parsing)
    assert rows[0].device_name == "NVIDIA GeForce RTX 4090"


def test_a_damaged_index_is_made_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store.add(*several(3))
    rows = summarize_records(store)
    index = tmp_path / "cache" / "autotune" / "records-index.json"
    for content in ("", "[]", '{"a": {"name": 1}}', "\0"):
        index.write_text(content)
        assert summarize_records(store) == rows


def test_two_branches_of_a_git_checkout_merge_without_a_conflict(tmp_path: Path) -> None:
    shared, mine = tmp_path / "shared", Store(LocalFiles(tmp_path / "mine"))
    shared.mkdir()
    git(shared, "init", "-q")
    (shared / "README.md").write_text("profiles of our teams")
    git(shared, "add", "-A")
    git(shared, "commit", "-qm", "start")
    for branch, records in (("amber", several(3)), ("blue", several(3, start=2))):
        git(shared, "checkout", "-q", "-b", branch, "main")
        source = Store(LocalFiles(tmp_path / branch))
        source.add(*records)
        merge_stores(source, open_store(str(shared)))
        git(shared, "add", "-A")
        git(shared, "commit", "-qm", branch)
    git(shared, "checkout", "-q", "main")
    for branch in ("amber", "blue"):
        git(shared, "merge", "-q", "--no-edit", branch)
    clone = tmp_path / "clone"
    git(tmp_path, "-c", "core.autocrlf=true", "clone", "-q", str(shared), str(clone))
    assert merge_stores(open_store(str(clone)), mine).num_new == 5
    assert verify_store(open_store(str(clone))) == (5, ())
    assert verify_store(mine) == (5, ())


def test_a_team_whose_push_git_refuses_rebases_and_pushes_again(tmp_path: Path) -> None:
    """The commands of docs/sharing.md, by two teams at once."""
    git(tmp_path, "init", "-q", "--bare", "hub.git")
    for team in ("first", "amber", "blue"):
        git(tmp_path, "clone", "-q", "hub.git", team)
        if team == "first":
            (tmp_path / team / "README.md").write_text("profiles of our teams")
            git(tmp_path / team, "add", "-A")
            git(tmp_path / team, "commit", "-qm", "start")
            git(tmp_path / team, "push", "-q", "origin", "HEAD:main")
    for team, records in (("amber", several(3)), ("blue", several(3, start=2))):
        open_store(str(tmp_path / team)).add(*records)
        (tmp_path / team / records[0].folder / f".{records[0].name}.json.0.part").write_text(
            "killed"
        )
        git(tmp_path / team, "add", "*.json")
        git(tmp_path / team, "commit", "-qm", team)
    git(tmp_path / "amber", "push", "-q", "origin", "HEAD:main")
    with pytest.raises(subprocess.CalledProcessError):
        git(tmp_path / "blue", "push", "-q", "origin", "HEAD:main")
    git(tmp_path / "blue", "pull", "-q", "-r", "origin", "main")
    git(tmp_path / "blue", "push", "-q", "origin", "HEAD:main")
    git(tmp_path / "amber", "pull", "-q", "origin", "main")
    assert verify_store(open_store(str(tmp_path / "amber"))) == (5, ())
    assert ".part" not in git(tmp_path / "amber", "ls-files")
