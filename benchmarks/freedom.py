"""Whether more freedom ever gives a slower predicted plan: every card of the catalog, every family,
real traces.

    python benchmarks/freedom.py RESULTS.jsonl [FAMILY...]

A line for each family, card and question: seconds and memory of the plan, its settings, or nothing
if nothing fits. The questions differ from the first in one thing: a stricter or looser floor of
quality, less memory, a pin, an exclusion. Ends with the questions that leave more freedom and got a
slower plan, by more than ties allow (3%), and fails if any.
"""

import argparse
import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from autotune.cost import predict
from autotune.cost.model import TracedModel
from autotune.errors import InvalidInput, NothingFits
from autotune.families.registry import FAMILIES
from autotune.hardware.catalog import load_catalog, profile_of_gpu
from autotune.planning import planner, problem
from autotune.planning import request as request_module
from autotune.planning.request import PlanRequest
from autotune.schema.hardware import HardwareProfile
from autotune.search.winner import TIE
from autotune.training.describe import WorkloadOverrides

MORE_FREEDOM = (
    ("exact", "high"), ("high", "compact"), ("less memory", "high"), ("much less memory",
    "less memory"),
    ("no swap", "high"), ("all checkpointed", "high"), ("int8", "high"), ("no int8", "high"),
)  # fmt: skip
"""Pairs of questions: what the first may choose, the second may choose as well."""


def questions(family: str, hardware: HardwareProfile) -> Iterator[tuple[str, PlanRequest]]:
    """By name."""

    def asked(quality: str = "high", memory: float = 1.0, **more: Any) -> PlanRequest:
        budget = hardware.device.budget
        less = budget.changed(num_bytes=int(memory * budget.num_bytes), is_set_by_user=True)
        work = WorkloadOverrides(quality=quality)  # type: ignore[arg-type]
        own = None if memory == 1 else less
        return PlanRequest(
            model=family, workload_overrides=work, is_local=False, memory_budget=own, **more
        )

    yield from ((quality, asked(quality)) for quality in ("exact", "high", "compact"))
    yield "less memory", asked(memory=0.9)
    yield "much less memory", asked(memory=0.6)
    yield "no swap", asked(pins=(("swapped_blocks", "0"),))
    yield "all checkpointed", asked(pins=(("checkpointed_blocks", str(num_blocks(family) - 1)),))
    yield "int8", asked(pins=(("quantization", "torchao-int8"),))
    yield "no int8", asked(exclusions=(("quantization", "torchao-int8"),))


@cache
def num_blocks(family: str) -> int:
    """Of the published model."""
    return request_module.resolve_model(family).spec.num_blocks


def share_traces() -> None:
    """Let all plans of a family share what was traced, whatever the card and the quality."""
    known: dict[tuple[object, ...], TracedModel] = {}

    def traced(
        family: Any, config: Any, workload: Any, rules: Any, parts: Any, overheads: Any = None
    ) -> TracedModel:
        key = family.name, workload.changed(quality="high"), rules, repr(overheads)
        if key not in known:
            known[key] = TracedModel(family, config, workload, rules, parts, overheads)
        own = copy.copy(known[key])
        own.workload = workload
        return own

    predict.traced_model = traced
    request_module.resolve_model = cache(request_module.resolve_model)
    read_parts, parts = problem.read_parts, dict[str, Any]()
    problem.read_parts = lambda model: (
        parts.get(model.spec.name) or parts.setdefault(model.spec.name, read_parts(model))
    )


def main() -> None:
    """Ask every question, write every answer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("families", nargs="*", default=[*FAMILIES])
    arguments = parser.parse_args()
    share_traces()
    slower = []
    with arguments.results.open("w") as file:
        for family in arguments.families:
            for card in load_catalog():
                seconds: dict[str, float] = {}
                hardware = profile_of_gpu(card)
                for name, request in questions(family, hardware):
                    row: dict[str, object] = {"family": family, "card": card.id, "question": name}
                    try:
                        plan = planner.make_plan(request, hardware).plan.frozen
                    except (NothingFits, InvalidInput):
                        seconds[name] = float("inf")
                    else:
                        seconds[name] = plan.expected.step_seconds
                        gib = round(plan.expected.peak_memory_bytes / 2**30, 2)
                        row |= {
                            "seconds": round(seconds[name], 3),
                            "gib": gib,
                            "settings": plan.settings.label(),
                        }
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                slower += [
                    (
                        f"{family} {card.id}: {more} {seconds[more]:.2f} s, {less} "
                        f"{seconds[less]:.2f} s"
                    )
                    for less, more in MORE_FREEDOM
                    if seconds[more] > (1 + TIE) * seconds[less]
                ]
    if slower:
        raise SystemExit("more freedom, slower plan:\n" + "\n".join(slower))


if __name__ == "__main__":
    main()
