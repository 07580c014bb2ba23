"""Plain settings: the loader is the fastest that this machine measured among those that fit."""

import pytest

from autotune.errors import InvalidInput
from autotune.knobs.settings import plain_choices
from autotune.plan.hardware import Capability, HardwareProfile, Rate
from autotune.search.space import build_search_space
from autotune.weights.tensors import LOADERS
from tests import builders

GIB = 2**30


def machine(
    cold: dict[str, float],
    warm: dict[str, float] | None = None,
    *,
    budget_bytes: int = 90 * GIB,
    kind: str = "discrete",
) -> HardwareProfile:
    plain = builders.hardware(budget_bytes=budget_bytes)
    rates = [(f"disk.{name}", value) for name, value in cold.items()]
    rates += [(f"page_cache.{name}", value) for name, value in (warm or {}).items()]
    return HardwareProfile.model_validate(
        {
            **{name: getattr(plain, name) for name in HardwareProfile.model_fields},
            "device": plain.device.model_copy(update={"memory_kind": kind}),
            "rates": tuple(
                Rate(name=n, value=v * 1e9, unit="B/s", spread=0.1, num_samples=3) for n, v in rates
            ),
        }
    )


def chosen(hardware: HardwareProfile) -> str:
    return str(plain_choices(builders.context(hardware))["loader"][0])


def test_the_fastest_from_disk_is_taken_and_the_page_cache_decides_between_equals():
    assert chosen(machine({})) == "safetensors"
    cold = {"safetensors": 1.0, "pread": 2.0, "fastsafetensors": 5.0}
    assert chosen(machine(cold)) == "fastsafetensors"
    cold = {"safetensors": 1.0, "pread": 1.05, "fastsafetensors": 1.02}
    warm = {"safetensors": 9.0, "pread": 3.0, "fastsafetensors": 4.0}
    assert chosen(machine(cold, warm)) == "safetensors"


def test_on_shared_memory_a_mapped_file_counts_twice():
    cold = {"safetensors": 3.0, "pread": 2.0}
    assert chosen(machine(cold, kind="integrated")) == "safetensors"
    tight = machine(cold, budget_bytes=50 * GIB, kind="integrated")  # the model takes 38 GiB
    assert chosen(tight) == "pread"
    assert chosen(machine({}, budget_bytes=50 * GIB, kind="integrated")) != "safetensors"


def test_a_pinned_loader_is_searched_with_though_none_would_choose_it():
    context = builders.context(machine({"safetensors": 1.0, "pread": 2.0}))
    assert {c.loader for c in build_search_space(context).candidates} == {"pread"}
    assert {
        c.loader for c in build_search_space(context, (("loader", "safetensors"),)).candidates
    } == {"safetensors"}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("precision", "fp32", "precision cannot be"), ("optimizer", "lion", "optimizer cannot be")],
)
def test_what_cannot_be_had_here_cannot_be_pinned(name, value, words):
    context = builders.context(builders.hardware("precision.bf16"))
    with pytest.raises(InvalidInput, match=words):
        build_search_space(context, ((name, value),))


def test_a_precision_with_wrong_gradients_gives_way_to_the_next():
    wrong = Capability(name="parity.precision.bf16", available=False, reason="differs")
    hardware = builders.hardware("precision.bf16", "precision.fp16", "attention.native")
    context = builders.context(hardware)
    assert build_search_space(context).choices["precision"] == ("bf16",)
    hardware = hardware.changed(capabilities=(*hardware.capabilities, wrong))
    assert build_search_space(builders.context(hardware)).choices["precision"] == ("fp16",)


@pytest.mark.parametrize("name", sorted(LOADERS))
def test_no_loader_holds_the_model_twice_where_memory_is_not_shared(name):
    assert LOADERS[name].overhead_bytes(40 * GIB, shares_memory=False) <= 256 << 20
