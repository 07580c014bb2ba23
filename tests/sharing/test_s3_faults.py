"""A store on S3 whose line breaks: what was written is whole, the rest is said, and the next
push completes it.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.cli.app import app
from autotune.sharing.exchange import merge_stores, verify_store
from autotune.sharing.files import LocalFiles, StoreUnreachable
from autotune.sharing.store import Store, open_store, user_store
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
    assert merge_stores(mine, s3_store()).num_new == 6
    assert s3[1].seen > 6
    assert verify_store(s3_store()) == (6, ())


@pytest.mark.parametrize("kind", ["503", "cut"])
def test_a_fault_that_stays_leaves_nothing_half_readable(
    kind: str, mine: Store, s3: tuple[str, Faults], s3_store: Callable[[], Store], tmp_path: Path
) -> None:
    s3[1].set(kind, spare=2, count=10_000)
    with pytest.raises(StoreUnreachable, match="cannot reach s3://team") as caught:
        merge_stores(mine, s3_store())
    assert "run it again" in caught.value.hint
    s3[1].set("none", 0, 0)
    count, bad = verify_store(s3_store())
    assert count < 6
    assert bad == ()
    bob = Store(LocalFiles(tmp_path / "bob"))
    assert merge_stores(s3_store(), bob).num_new == count
    assert merge_stores(mine, s3_store()).num_new == 6 - count
    assert verify_store(s3_store()) == (6, ())


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_a_store_that_refuses_says_so_at_once(
    method: str, mine: Store, s3: tuple[str, Faults], s3_store: Callable[[], Store]
) -> None:
    s3[1].set("403", spare=0, count=10_000, method=method)
    with pytest.raises(StoreUnreachable, match="PermissionError") as caught:
        merge_stores(mine, s3_store())
    assert "your access" in caught.value.hint
    assert s3[1].seen <= 6, "it is not asked again and again"


@pytest.mark.parametrize("spare", [0, 1, 3])
def test_a_pull_that_breaks_says_so_instead_of_refusing_records(
    spare: int, mine: Store, s3: tuple[str, Faults], s3_store: Callable[[], Store], tmp_path: Path
) -> None:
    merge_stores(mine, s3_store())
    bob = Store(LocalFiles(tmp_path / "bob"))
    s3[1].set("503", spare=spare, count=10_000, method="GET")
    with pytest.raises(StoreUnreachable):
        merge_stores(s3_store(), bob)
    s3[1].set("none", 0, 0)
    assert merge_stores(s3_store(), bob).refused == ()
    assert verify_store(bob) == (6, ())


def test_the_command_line_finds_another_endpoint_and_keys_where_the_aws_tools_do(
    mine: Store, s3: tuple[str, Faults], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3[0])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    user_store().add(*several(2))
    result = CliRunner().invoke(app, ["profiles", "push", "s3://team/by-command"])
    assert result.stdout == "new: 2, already there: 0, refused: 0; in s3://team/by-command\n"
    assert "new: 0" in CliRunner().invoke(app, ["profiles", "pull", "s3://team/by-command"]).stdout


def test_a_bucket_that_does_not_exist_says_so_and_is_not_made(
    mine: Store, s3: tuple[str, Faults]
) -> None:
    options = {"endpoint_url": s3[0], "key": "a", "secret": "b", "skip_instance_cache": True}
    absent = open_store("s3://nobodys-bucket/profiles", **options)
    with pytest.raises(StoreUnreachable):
        merge_stores(mine, absent)
    assert not absent.files.fs.exists("s3://nobodys-bucket")  # type: ignore[attr-defined]
