"""A store on S3 whose line breaks: what was written is whole, the rest is said, and the next push completes it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.sharing.files import LocalFiles, Unreachable
from autotune.sharing.store import Store, merge, verify
from tests.sharing.examples import several
from tests.sharing.s3_server import Faults

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def mine(tmp_path: Path) -> Store:
    store = Store(LocalFiles(tmp_path / "mine"))
    store.add(*several(6))
    return store


@pytest.mark.parametrize("kind", ["503", "cut"])
def test_a_fault_that_passes_is_not_even_noticed(
    kind: str, mine: Store, s3: tuple[str, Faults], s3_store: Callable[[], Store]
) -> None:
    s3[1].set(kind, spare=2, count=1)
    assert merge(mine, s3_store()).new == 6
    assert verify(s3_store()) == (6, ())


@pytest.mark.parametrize("kind", ["503", "cut"])
def test_a_fault_that_stays_leaves_nothing_half_readable(
    kind: str, mine: Store, s3: tuple[str, Faults], s3_store: Callable[[], Store], tmp_path: Path
) -> None:
    s3[1].set(kind, spare=2, count=10_000)
    with pytest.raises(Unreachable, match="cannot reach s3://team") as caught:
        merge(mine, s3_store())
    assert "run it again" in caught.value.hint
    s3[1].set("none", 0, 0)
    count, bad = verify(s3_store())
    assert count < 6
    assert bad == ()
    bob = Store(LocalFiles(tmp_path / "bob"))
    assert merge(s3_store(), bob).new == count
    assert merge(mine, s3_store()).new == 6 - count
    assert verify(s3_store()) == (6, ())


def test_a_bucket_that_does_not_exist_says_so_and_is_not_made(mine: Store, s3: tuple[str, Faults]) -> None:
    from autotune.sharing.store import open_store

    options = {"endpoint_url": s3[0], "key": "a", "secret": "b", "skip_instance_cache": True}
    absent = open_store("s3://nobodys-bucket/profiles", **options)
    with pytest.raises(Unreachable):
        merge(mine, absent)
    assert not absent.files.fs.exists("s3://nobodys-bucket")  # type: ignore[attr-defined]
