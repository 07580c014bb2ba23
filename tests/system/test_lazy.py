"""Libraries load when they are first used: once, for all threads, and with their own error."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.system.lazy import lazy_module

NAME = "a_library_of_this_test"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Notes each time it is loaded, and takes long enough for a second thread to come."""
    loads = tmp_path / "loads"
    text = f"import time\nopen({str(loads)!r}, 'a').write('x')\ntime.sleep(0.1)\nVALUE = object()\n"
    (tmp_path / f"{NAME}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield loads
    sys.modules.pop(NAME, None)


def test_library_is_loaded_once_when_used(library):
    first, second = lazy_module(NAME), lazy_module(NAME)
    assert NAME not in sys.modules
    assert first.VALUE is second.VALUE is first.VALUE is sys.modules[NAME].VALUE
    assert library.read_text() == "x"
    with pytest.raises(AttributeError, match="NOTHING"):
        _ = first.NOTHING


def test_absent_library_is_usual_error():
    absent = lazy_module("no_library_has_this_name")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_library_has_this_name"):
            _ = absent.anything


def test_two_threads_get_whole_of_one(library):
    named, both, seen = lazy_module(NAME), threading.Barrier(2), []

    def use() -> None:
        both.wait()
        seen.append(named.VALUE)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [sys.modules[NAME].VALUE] * 2
    assert library.read_text() == "x"
