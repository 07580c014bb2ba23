"""Every backend that a store can lie on, behind one fixture."""

import importlib.util
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from autotune.sharing.store import Store, open_store
from tests.sharing.s3_server import Faults, s3_server

NUMBERS = count()


def git(folder: Path, *arguments: str) -> str:
    """Run git with an identity of its own and none of the user's settings."""
    settings = (
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.com",
        "-c",
        "init.defaultBranch=main",
    )
    return subprocess.run(
        ["git", *settings, *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


@pytest.fixture(scope="session")
def s3() -> Iterator[tuple[str, Faults]]:
    """A real S3 endpoint and its faults."""
    for package in ("s3fs", "moto", "flask", "boto3"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install '.[dev]'")
    with s3_server() as running:
        yield running


@pytest.fixture
def s3_store(s3: tuple[str, Faults]) -> Iterator[Callable[[], Store]]:
    """Opens the same new S3 store; fsspec shares the connections."""
    address, faults = s3
    url, options = (
        f"s3://team/{next(NUMBERS)}",
        {"endpoint_url": address, "key": "a", "secret": "b"},
    )
    options |= {
        "config_kwargs": {"retries": {"max_attempts": 1}},
        "client_kwargs": {"region_name": "us-east-1"},
    }
    yield lambda: open_store(url, **options)
    faults.set("none", 0, 0)


@pytest.fixture(params=["folder", "git", "memory", "s3"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Opens the same new store, each time as another program would."""
    if request.param == "s3":
        opener: Callable[[], Store] = request.getfixturevalue("s3_store")
        return opener
    if request.param == "memory":
        url = f"memory://store{next(NUMBERS)}/profiles"
        return lambda: open_store(url)
    if request.param == "git":
        git(tmp_path, "init", "-q", "store")
    return lambda: open_store(str(tmp_path / "store"))
