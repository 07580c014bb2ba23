"""The typical step of a workload, which decides speed, while the largest shapes decide memory.
Pure."""

from collections.abc import Sequence
from itertools import pairwise

from autotune.plan.workload import Bucket, Workload

NEARLY = 0.95
"""Share of the largest above which typical shapes and captions count as the largest."""
GOLDEN_RATIO = 0.618034


def has_typical_shape(workload: Workload) -> bool:
    """Whether the typical step has less to do than a step in the largest shapes."""
    return (
        bool(workload.text_token_quantiles) or typical_bucket(workload) != workload.largest_bucket
    )


def typical_bucket(workload: Workload) -> Bucket:
    """The bucket whose size is nearest to the mean over all items; a step in it takes about the
    mean time."""
    largest, items = workload.largest_bucket, sum(b.num_items for b in workload.buckets)
    mean = sum(b.num_items * b.num_pixels for b in workload.buckets) / max(1, items)
    if mean >= NEARLY * largest.num_pixels or not items:
        return largest
    return min(workload.buckets, key=lambda b: (abs(b.num_pixels - mean), b.width_px))


def mean_text_tokens(workload: Workload) -> int:
    """Mean length of an encoded caption."""
    return _lengths(workload, 1)[0]


def typical_text_tokens(workload: Workload) -> tuple[int, ...]:
    """Caption lengths of one typical step, one for each image of the effective batch."""
    size = workload.effective_batch_size
    spread = _lengths(workload, size)
    # In an order that mixes, so that each micro-batch is padded as one drawn at random would be.
    return tuple(spread[i] for i in sorted(range(size), key=lambda i: i * GOLDEN_RATIO % 1))


def padded_text_tokens(
    workload: Workload, micro_batch_size: int, image_tokens: int = 0, multiple: int = 1
) -> float:
    """Mean padded length of the captions of a typical step in micro-batches of this size; see
    `pad_text`."""
    tokens = typical_text_tokens(workload)
    groups = [
        tokens[start : start + micro_batch_size]
        for start in range(0, len(tokens), micro_batch_size)
    ]
    return sum(len(group) * pad_text(max(group), image_tokens, multiple) for group in groups) / len(
        tokens
    )


def pad_text(text_tokens: int, image_tokens: int, multiple: int) -> int:
    """The least length of a text from `text_tokens` on that makes text and image together a
    multiple of tokens."""
    return text_tokens + -(image_tokens + text_tokens) % multiple


def quantiles_of(lengths: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` quantiles of sorted lengths for a workload; empty if all are about as long as the
    longest."""
    if sum(lengths) >= NEARLY * len(lengths) * lengths[-1]:
        return ()
    return spread_of(lengths, count)


def spread_of(values: Sequence[int], count: int) -> tuple[int, ...]:
    """The means of `count` equal parts of sorted values; a part smaller than one value takes the
    value it lies in."""
    starts = [i * len(values) // count for i in range(count + 1)]
    parts = [values[start : max(start + 1, end)] for start, end in pairwise(starts)]
    return tuple(round(sum(part) / len(part)) for part in parts)


def _lengths(workload: Workload, count: int) -> tuple[int, ...]:
    return spread_of(workload.text_token_quantiles or (workload.max_text_tokens,), count)
