"""A saved profile is used while it holds, and never trusted once it is damaged."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.errors import InvalidInput
from autotune.machine import probe as store
from autotune.machine.probe import (
    NOT_SAVED,
    cached_profile,
    hardware_named,
    has_valid_rates,
    load_profile,
    profile_path,
    read_profile,
    save_profile,
)
from autotune.plan.hardware import Conditions, Rate
from tests.machine.fleet import MACHINES, machine

RATES = (
    Rate(
        name="matmul.bf16.4096x3072x3072",
        value=1.5e14,
        unit="FLOP/s",
        spread=0.01,
        num_samples=25,
        conditions=Conditions(clock_mhz=2520, temperature_celsius=61, power_watts=312.5),
    ),
)


def measured(name):
    return read_profile(machine(name)).changed(
        rates=RATES, notes=("an old note", "not measured: gds")
    )


@pytest.fixture
def probes(monkeypatch, tmp_path):
    """Probes of this list's machine, in a cache folder of its own; readings and measurements are
    counted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    state = {"machine": "rtx-4090", "read": 0, "measured": 0}

    def probe(*, index=0, on_progress=None):
        state["read"] += 1
        return read_profile(machine(state["machine"]), index)

    def measure(profile, tell):
        state["measured"] += 1
        return measured(state["machine"])

    monkeypatch.setattr(store, "probe", probe)
    monkeypatch.setattr(store, "measure_rates", measure)
    return state


@pytest.mark.parametrize("name", MACHINES)
def test_saved_is_read_back_equal(name, tmp_path):
    save_profile(measured(name), tmp_path / "deep" / "p.json")
    assert load_profile(tmp_path / "deep" / "p.json") == measured(name)
    assert hardware_named(str(tmp_path / "deep" / "p.json")) == measured(name)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["p.json"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_any_damage_is_noticed(tmp_path, data):
    path = tmp_path / "p.json"
    save_profile(measured("gb10"), path)
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 2))
    damage = data.draw(st.sampled_from(["cut", "flip"]))
    path.write_bytes(
        whole[:at] if damage == "cut" else whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    )
    try:
        assert load_profile(path) == measured("gb10")  # blanks between the values may change
    except InvalidInput:
        return


def test_a_cache_that_cannot_be_written_costs_only_what_it_would_have_kept(
    probes, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    first, again = cached_profile(), cached_profile()
    assert probes["measured"] == 2
    assert first.rates == again.rates == RATES
    assert [note.partition(":")[0] for note in first.notes][-1] == NOT_SAVED


def test_rates_are_reused_with_a_fresh_budget(probes):
    first, again = cached_profile(), cached_profile()
    assert (probes["read"], probes["measured"]) == (2, 1)
    assert first.rates == again.rates == RATES
    assert again.notes == (*read_profile(machine("rtx-4090")).notes, "not measured: gds")


def test_another_card_or_stack_is_measured_again(probes):
    cached_profile()
    probes["machine"] = "rtx-5090"
    cached_profile()
    assert probes["measured"] == 2
    save_profile(measured("wsl2-4090"), profile_path(read_profile(machine("rtx-4090"))))
    probes["machine"] = "rtx-4090"
    cached_profile()
    assert probes["measured"] == 3


@pytest.mark.parametrize(
    ("name", "part", "change", "holds"),
    [
        ("rtx-4090", "device", {"power_limit_watts": 300.0}, False),
        ("rtx-4090", "device", {"power_limit_watts": 340.0}, True),
        ("rtx-4090", "device", {"power_limit_watts": None}, True),
        ("rtx-4090", "host", {"logical_cores": 2}, True),
        ("rtx-4090", "versions", {"driver": "595.10"}, True),
        ("rtx-4090", "versions", {"cuda_runtime": "12.9"}, False),
        ("no-gpu", "host", {"logical_cores": 2}, False),
    ],
)
def test_rates_are_measured_again_if_the_machine_or_what_decides_its_kernels_has_changed(
    name, part, change, holds
):
    saved = measured(name)
    now = saved.changed(**{part: getattr(saved, part).changed(**change)})
    assert has_valid_rates(saved, now) == holds


def test_fresh_measures_again(probes):
    cached_profile()
    cached_profile(fresh=True)
    assert probes["measured"] == 2


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"profile": {}, "digest": ""}', "\x00" * 50, "[" * 9999]
)
def test_a_damaged_file_is_measured_again(probes, content):
    path = profile_path(read_profile(machine("rtx-4090")))
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert cached_profile().rates == RATES
    assert probes["measured"] == 1
    assert load_profile(path).rates == RATES


def test_an_edited_rate_is_not_trusted(probes):
    path = profile_path(cached_profile())
    content = json.loads(path.read_text())
    content["profile"]["rates"][0]["value"] = 9e99
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match="damaged or edited"):
        load_profile(path)
    assert cached_profile().rates == RATES


def test_a_missing_file_says_what_to_do(tmp_path):
    with pytest.raises(InvalidInput) as caught:
        load_profile(tmp_path / "none.json")
    assert "autotune probe" in caught.value.hint
