"""Rules for how many blocks are recomputed, or swapped."""

from collections.abc import Mapping
from types import MappingProxyType

from autotune.trainers.rules import (
    LOST,
    CannotExpress,
    Context,
    Rule,
    Values,
    boolean,
    number,
    whole,
)


def count_blocks(value: str | int, num_blocks: int) -> int:
    """How many blocks are meant: a number, `all`, `25%` of them, or `2/4`, the first two of
    every four.
    """
    written = str(value)
    if written == "all":
        return num_blocks
    if written.endswith("%"):
        return round(float(written[:-1]) * num_blocks / 100)
    first, of, every = written.partition("/")
    if not of:
        return int(first)
    whole_groups, rest = divmod(num_blocks, int(every))
    return whole_groups * int(first) + min(rest, int(first))


def share_of_blocks(key: str, switch: str = "") -> Rule:
    """Swapped blocks as a share of all, which a second key may switch off."""

    def read(values: Values, context: Context) -> Values:
        share = number(values[key]) if not switch or boolean(values[switch]) else 0
        return {"swapped_blocks": f"{100 * share:g}%" if share else "0"}

    def write(ours: Values, context: Context) -> Values:
        total = context.num_blocks or 1
        share = round(count_blocks(ours["swapped_blocks"], total) / total, 5)
        return {switch: share > 0, key: share or None} if switch else {key: share}

    return Rule((key, *[switch] * bool(switch)), ("swapped_blocks",), read, write)


MAX_STRIDE = 8


def patterned_checkpointing(
    key: str, interval: str, stride: str, families: tuple[str, ...]
) -> Rule:
    """All blocks, none, or those whose index modulo the stride is below the interval; without a
    stride every `interval`th block. Of other than these `families` an interval makes several
    blocks one that is recomputed."""

    def read(values: Values, context: Context) -> Values:
        if not boolean(values[key]):
            return {"checkpointed_blocks": "0"}
        every, of = (whole(values[name]) if values.get(name) else 0 for name in (interval, stride))
        if every <= 1 or 0 < of <= every:
            return {"checkpointed_blocks": "all"}
        if not context.family.name.startswith(families):
            lost = "several blocks are recomputed as one; autotune recomputes each by itself"
            return {"checkpointed_blocks": "all", LOST: lost}
        return {"checkpointed_blocks": f"{every}/{of}" if of else f"1/{every}"}

    def write(ours: Values, context: Context) -> Values:
        total = context.num_blocks or 1
        blocks = count_blocks(ours["checkpointed_blocks"], total)
        patterns = [(i, s) for s in range(2, MAX_STRIDE + 1) for i in range(1, s)]
        enough = {
            (i, s): n for i, s in patterns if (n := count_blocks(f"{i}/{s}", total)) >= blocks
        }
        best = min(enough, key=lambda one: (enough[one], one[1]), default=None)
        if (
            blocks in (0, total, total - 1)
            or best is None
            or not context.family.name.startswith(families)
        ):
            return {key: blocks > 0, interval: None, stride: None}
        every, of = best
        return {
            key: True,
            interval: of if every == 1 else every,
            stride: None if every == 1 else of,
        }

    return Rule((key, interval, stride), ("checkpointed_blocks",), read, write)


def checkpointing(key: str, words: Mapping[str, bool] = MappingProxyType({})) -> Rule:
    """All blocks or none: a part of them becomes all, which needs less memory. `words` are read,
    too.
    """
    return Rule(
        (key,),
        ("checkpointed_blocks",),
        lambda values, _: {
            "checkpointed_blocks": "all" if boolean(words.get(values[key], values[key])) else "0"
        },
        lambda ours, context: {
            key: count_blocks(ours["checkpointed_blocks"], context.num_blocks or 1) > 0
        },
    )


def swapping(key: str, limits: Mapping[str, int]) -> Rule:
    """Swapped blocks by number, of some families no more than a limit: more is refused."""

    def write(ours: Values, context: Context) -> Values:
        blocks = count_blocks(ours["swapped_blocks"], context.num_blocks or 1)
        if blocks > (limit := limits.get(context.family.name, blocks)):
            raise CannotExpress(f"it swaps no more than {limit} blocks of {context.family.name}")
        return {key: blocks}

    return Rule(
        (key,),
        ("swapped_blocks",),
        lambda values, _: {"swapped_blocks": str(whole(values[key]))},
        write,
    )
