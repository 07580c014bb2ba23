"""Tables of values that belong together, each a rule that is read in both directions."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.trainers.rules import LOST, CannotExpress, Context, Rule, Values

ANY: Any = object()
Row = tuple[tuple[Any, ...], tuple[Any, ...], str]
"""Values of their keys, values of our names, and how they differ if they do."""


def table(keys: str, names: str, rows: str, near: str = "", *, instead: str = "") -> Rule:
    """Values of several keys that belong together, a row in a line: `theirs | ours | how they
    differ`, if they do. The first row that fits is read, and the first without a difference
    written.

    Values have blanks between and are JSON or words: `*` stands for any value of theirs, a word
    that ends with `*` for any that begins so, `-` among ours for a name that is not mentioned.

    Args:
        keys: theirs, with blanks between.
        names: ours.
        rows: values that mean the same, or nearly so.
        near: `ours | theirs`, for values of ours that no row has: what needs no more memory.
            Without one it cannot be expressed.
        instead: what autotune does in place of values that no row has.
    """
    return _table(
        keys.split(), names.split(), _rows(rows), [(of, to) for of, to, _ in _rows(near)], instead
    )


def choice(key: str, name: str, values: Mapping[Any, Any], *, instead: str = "") -> Rule:
    """A value from a table, theirs to ours; of several that are read alike the first is written.
    A value of ours that they lack is left out: comparing what is read back tells so."""
    rows = [((theirs,), (ours,), "") for theirs, ours in values.items()]
    return _table([key], [name], rows, [((ANY,), (None,))], instead)


def _rows(text: str) -> list[Row]:
    lines = (line.split("|", 2) for line in text.strip().splitlines() if line.strip())
    return [
        (_values(one[0]), _values(one[1]), one[2].strip() if len(one) > 2 else "") for one in lines
    ]


def _values(text: str) -> tuple[Any, ...]:
    return tuple(map(_value, text.split()))


def _value(word: str) -> Any:
    if word in ("*", "-"):
        return ANY if word == "*" else None
    try:
        return json.loads(word)
    except ValueError:
        return word


def _table(
    keys: Sequence[str],
    names: Sequence[str],
    rows: Sequence[Row],
    near: Sequence[tuple[tuple[Any, ...], tuple[Any, ...]]],
    instead: str,
) -> Rule:
    def read(values: Values, context: Context) -> Values:
        theirs = tuple(values.get(key) for key in keys)
        row = next((row for row in rows if _fits(row[0], theirs)), None)
        if row is None:
            return {LOST: f"autotune {instead or 'has no equivalent'}"}
        lost = {LOST: row[2]} if row[2] else {}
        return {
            **{name: own for name, own in zip(names, row[1], strict=True) if own is not None},
            **lost,
        }

    def write(ours: Values, context: Context) -> Values:
        wanted = tuple(ours.get(name) for name in names)
        exact = (row[0] for row in rows if not row[2] and _fits(row[1], wanted))
        theirs = next(exact, None) or next((to for of, to in near if _fits(of, wanted)), None)
        if theirs is None:
            planned = ", ".join(f"{name} {own}" for name, own in zip(names, wanted, strict=True))
            raise CannotExpress(f"it has nothing like {planned} that needs no more memory")
        return {
            key: None if value is ANY else _plain(value)
            for key, value in zip(keys, theirs, strict=True)
        }

    return Rule(tuple(keys), tuple(names), read, write)


def _plain(value: Any) -> Any:
    return value.rstrip("*") if isinstance(value, str) else value


def _fits(pattern: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
    return all(map(_value_fits, pattern, values))


def _value_fits(wanted: Any, value: Any) -> bool:
    if wanted is ANY:
        return True
    if isinstance(wanted, str) and isinstance(value, str):
        own, theirs = wanted.lower(), value.lower()
        return theirs.startswith(own[:-1]) if own.endswith("*") else theirs == own
    return bool(value == wanted and isinstance(value, bool) == isinstance(wanted, bool))


def precision(key: str, *, bf16: str, fp32: str, fp16: str = "") -> Rule:
    """What is computed in: their words for each, the first being written."""
    names = {
        word: name
        for name, words in (("bf16", bf16), ("fp32", fp32), ("fp16", fp16))
        for word in words.split()
    }
    return choice(key, "precision", names, instead="computes in bf16")


ALLOCATOR = choice(
    "env.PYTORCH_ALLOC_CONF", "allocator", {"expandable_segments:True": "expandable"}
)
"""Rule of every trainer on PyTorch."""


def accelerate_compile(prefix: str = "") -> Rule:
    """Compilation by accelerate, whose options are called `prefix` and `dynamo_...`."""
    return table(
        f"{prefix}dynamo_backend {prefix}dynamo_use_regional_compilation",
        "compile",
        """
        inductor true | block
        no *          | off
        inductor *    | block | autotune compiles each block, not the whole model
        """,
    )
