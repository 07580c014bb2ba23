"""A journal whose last line was torn by a kill is read and written on, wherever the tear is."""

from pathlib import Path

import pytest

from autotune.search import journal
from autotune.search.journal import WholeLines

WHOLE = b'{"op": 1}\n'


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (b"", b""),
        (WHOLE, WHOLE),
        (WHOLE + b'{"op', WHOLE),
        (b'{"op', b""),
        (WHOLE + b"x" * 100, WHOLE),
        (b"x" * 100, b""),
        (b"x" * 15 + b"\n", b"x" * 15 + b"\n"),
    ],
)
def test_a_torn_last_line_is_cut_off(
    content: bytes, left: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "BLOCK_BYTES", 16)
    path = tmp_path / "a.journal"
    path.write_bytes(content)
    WholeLines(str(path)).append_logs([{"op": 2}])
    added = path.read_bytes().removeprefix(left)
    assert path.read_bytes().startswith(left)
    assert added.count(b"\n") == 1
    assert b"op" in added[:4]
