"""More freedom never gives a slower predicted plan: a looser floor, more memory of the device or
host, fewer pins.

On every card of the catalog and for models of every family's size, by a formula in place of traces:
what is proven is that nothing bars what the cost model prefers. Ties go to what is more exact,
smaller and simpler, so that a plan may be slower by the width of a tie, 3%, and no more.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from autotune.errors import NothingFits
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.machine.catalog import CatalogGpu, load_catalog, profile_of_gpu
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import Candidate
from autotune.plan.hardware import HardwareProfile
from autotune.plan.request import PlanRequest
from autotune.plan.workload import WorkloadRequest
from autotune.search.winner import TIE
from tests.kinds import KINDS
from tests.search.formula import GIB, FormulaCostModel, by_formula
from tests.search.machines import make_plan

SIZES = {
    **dict.fromkeys(FAMILIES, (20.4e9, 60)),
    "flux1-dev": (11.9e9, 57),
    "kandinsky5-image-lite": (6.0e9, 52),
    "kandinsky5-video-lite": (2.0e9, 34),
}
"""Parameters and blocks; where none are given, those of Qwen-Image."""
CONVERSION = {"none": 1.0, "torchao-int8": 1.1, "torchao-fp8": 1.13, "bnb-nf4": 1.3}
Pins = tuple[tuple[str, str], ...]


class Formula(FormulaCostModel):
    """Weights by their format, activations by blocks that keep them, transfers that computing
    hides or does not."""

    def _all_weight_bytes(self, candidate: Any) -> float:
        wide = 2 if candidate.precision == "fp32" and candidate.quantization == "none" else 1
        bytes_per_parameter = WEIGHT_FORMATS[candidate.quantization].bytes_per_parameter
        return wide * bytes_per_parameter * self.workload.model.num_parameters

    def weight_bytes(self, candidate: Any) -> Any:
        away = np.maximum(0, candidate.swapped_blocks - 2) / self.workload.model.num_blocks
        return (1 - away) * self._all_weight_bytes(candidate)

    def host_memory_bytes(self, candidate: Candidate) -> int:
        alone = self._all_weight_bytes(candidate) / self.workload.model.num_blocks
        return GIB + int(1.3 * alone * candidate.swapped_blocks)

    def _formula(self, candidate: Any) -> tuple[Any, Any]:
        spec, sheet = self.workload.model, self.hardware.datasheet
        whole, selective, swapped = (
            getattr(candidate, name) / spec.num_blocks
            for name in ("checkpointed_blocks", "selective_blocks", "swapped_blocks")
        )
        kept = 2.5 * spec.num_parameters * (1.02 - whole - 0.93 * selective)
        rate = 0.5 * (sheet.bf16_flops_per_second or sheet.fp32_flops_per_second)
        computing = 1e4 * spec.num_parameters / rate * (1 + (whole + 0.85 * selective) / 3)
        computing = computing * CONVERSION.get(candidate.quantization, 1.2)
        sent = 2 * swapped * self._all_weight_bytes(candidate) / 2e10
        waiting = np.maximum(0.0, sent - swapped * computing)
        return self.weight_bytes(candidate) + kept, computing + waiting


@pytest.fixture(scope="module", autouse=True)
def _own_formula() -> Iterator[None]:
    with by_formula(cost_model=Formula, sizes=SIZES):
        yield


def seconds(
    family: str,
    hardware: HardwareProfile,
    quality: str = "high",
    pins: Pins = (),
    share: float = 1.0,
) -> float:
    """Of the predicted plan; infinite if nothing fits."""
    work = WorkloadRequest(quality=quality, effective_batch_size=1)  # type: ignore[arg-type]
    device = hardware.device
    hardware = hardware.changed(
        device=device.changed(budget_bytes=int(share * device.budget_bytes))
    )
    request = PlanRequest(model=family, **work.given, pins=pins, hardware="another")
    try:
        return make_plan(request, hardware).frozen.expected.step_seconds
    except NothingFits:
        return float("inf")


def with_host(hardware: HardwareProfile, gib: int) -> HardwareProfile:
    changes = {"memory_bytes": gib * GIB, "available_memory_bytes": int(0.9 * gib * GIB)}
    return hardware.model_copy(update={"host": hardware.host.model_copy(update=changes)})


BOUNDS = ("pin", "device", "host")
ASKED = tuple(zip(load_catalog(), itertools.cycle(FAMILIES), itertools.cycle(BOUNDS), strict=False))


@pytest.mark.quick(*KINDS)
@pytest.mark.parametrize(
    ("card", "family", "bound"), ASKED, ids=lambda each: getattr(each, "id", each)
)
def test_no_card_and_no_family_gets_a_slower_plan_for_more_freedom(
    card: CatalogGpu, family: str, bound: str
) -> None:
    """Of a looser floor on every card; of no pin, more device memory and more host memory in
    turns."""
    hardware = profile_of_gpu(card)
    exact, high, compact = (
        seconds(family, hardware, quality) for quality in ("exact", "high", "compact")
    )
    assert high <= (1 + TIE) * exact
    assert compact <= (1 + TIE) * high
    if bound == "pin":
        bounded = seconds(family, hardware, pins=(("swapped_blocks", "0"),))
    elif bound == "device":
        bounded = seconds(family, hardware, share=0.8)
    else:
        bounded = seconds(family, with_host(hardware, 24))
    assert high <= (1 + TIE) * bounded
