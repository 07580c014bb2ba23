"""The loader is the one that this machine measured to be fastest among those that fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.knobs.loader import AS_FAST, WeightLoader
from autotune.schema.hardware import HardwareProfile, Rate
from autotune.search.space import build_search_space
from autotune.weights.loaders import LOADERS
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


def choices(hardware: HardwareProfile):
    return WeightLoader().choices(builders.context(hardware))


def test_the_fastest_from_disk_is_taken_and_the_others_may_be_pinned():
    found = choices(machine({"safetensors": 1.0, "pread": 2.0, "fastsafetensors": 5.0}))
    assert found.admitted == ("fastsafetensors",)
    assert {*found.on_request} == {"safetensors", "pread"}
    assert all("5.00 GB/s" in why for why in found.on_request.values())


def test_where_the_disk_makes_them_equal_the_page_cache_decides():
    cold = {"safetensors": 1.0, "pread": 1.05, "fastsafetensors": 1.02}
    warm = {"safetensors": 9.0, "pread": 3.0, "fastsafetensors": 4.0}
    assert choices(machine(cold, warm)).admitted == ("safetensors",)


def test_without_measurements_it_is_the_default():
    found = choices(machine({}))
    assert found.admitted == ("safetensors",)
    assert all("autotune probe" in why for why in found.on_request.values())


def test_on_shared_memory_a_mapped_file_counts_twice():
    cold = {"safetensors": 3.0, "pread": 2.0}
    assert choices(machine(cold, kind="integrated")).admitted == ("safetensors",)
    tight = choices(
        machine(cold, budget_bytes=50 * GIB, kind="integrated")
    )  # the model takes 38 GiB
    assert tight.admitted == ("pread",)
    assert "38.1 GiB beside" in tight.on_request["safetensors"]
    assert choices(machine({}, budget_bytes=50 * GIB, kind="integrated")).admitted != (
        "safetensors",
    )


def test_a_pinned_loader_is_searched_with_though_none_would_choose_it():
    context = builders.context(machine({"safetensors": 1.0, "pread": 2.0}))
    assert {c.loader for c in build_search_space(context).candidates} == {"pread"}
    assert {
        c.loader for c in build_search_space(context, (("loader", "safetensors"),)).candidates
    } == {"safetensors"}


RATES = st.dictionaries(st.sampled_from(sorted(LOADERS)), st.floats(0.01, 20))


@given(
    RATES,
    RATES,
    st.integers(1, 200),
    st.sampled_from(["discrete", "integrated", "host", "coherent"]),
)
def test_whatever_was_measured_one_loader_is_chosen_and_each_other_has_a_reason(
    cold, warm, gib, kind
):
    hardware = machine(cold, warm, budget_bytes=gib * GIB, kind=kind)
    found = choices(hardware)
    assert len(found.admitted) == 1
    assert {*found.admitted, *found.on_request} == set(LOADERS)
    assert all(found.on_request.values())
    if cold and kind == "discrete" and gib > 50:
        assert cold[str(found.admitted[0])] >= AS_FAST * max(cold.values()) * (1 - 1e-9)


@pytest.mark.parametrize("name", sorted(LOADERS))
def test_no_loader_holds_the_model_twice_where_memory_is_not_shared(name):
    assert LOADERS[name].overhead_bytes(40 * GIB, shares_memory=False) <= 256 << 20
