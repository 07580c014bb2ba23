"""Garbage collection less often, where much is made that lives on: it would look through all of
it again and again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

RARELY = 100_000
"""New objects between two collections, in place of Python's 700. They are small there: some 10
MB."""


@contextmanager
def collect_rarely() -> Iterator[None]:
    """Within this context, or a function that it decorates, look for cycles of objects rarely.

    Imports of torch and transformers and traces of models make a million objects that stay: a plan
    takes an eighth less time so. Not for what holds large tensors, which a cycle would keep alive
    for longer.
    """
    with _lock:
        if not _before:
            usual = gc.get_threshold()
            gc.set_threshold(RARELY, *usual[1:])
        else:
            usual = _before[0]
        _before.append(usual)
    try:
        yield
    finally:
        with _lock:
            usual = _before.pop()
            if not _before:
                gc.set_threshold(*usual)


_lock = Lock()
_before: list[tuple[int, int, int]] = []
"""The usual thresholds, once for each context that is open in any thread: the last that is left
restores them."""
