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

CONDITIONS = Conditions(clock_mhz=2520, temperature_celsius=61, power_watts=312.5)
RATE = Rate(name="matmul.bf16.4096x3072x3072", value=1.5e14, unit="FLOP/s", spread=0.01,
            num_samples=25, conditions=CONDITIONS)  # fmt: skip
RATES = (RATE,)


def measured(name):
    notes = ("an old note", "not measured: gds")
    return read_profile(machine(name)).changed(rates=RATES, notes=notes)


@pytest.fixture
def probes(monkeypatch, tmp_path):
    """Probes of its machine, in a cache folder of its own, and how many were made."""
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


def test_saved_is_read_back_equal(tmp_path):
    path = tmp_path / "deep" / "p.json"
    for name in MACHINES:
        save_profile(measured(name), path)
        assert load_profile(path) == hardware_named(str(path)) == measured(name)
    assert [*path.parent.iterdir()] == [path]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_any_damage_is_noticed(tmp_path, data):
    path = tmp_path / "p.json"
    save_profile(measured("gb10"), path)
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 2))
    damage = data.draw(st.sampled_from(["cut", "flip"]))
    rest = b"" if damage == "cut" else bytes([whole[at] ^ 1]) + whole[at + 1 :]
    path.write_bytes(whole[:at] + rest)
    try:
        assert load_profile(path) == measured("gb10")  # blanks between the values may change
    except InvalidInput:
        return


def test_unwritable_caches_cost_reuse(probes, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    first, again = cached_profile(), cached_profile()
    assert probes["measured"] == 2
    assert first.rates == again.rates == RATES
    assert [note.partition(":")[0] for note in first.notes][-1] == NOT_SAVED


def test_rates_are_reused_with_fresh_budget(probes):
    first, again = cached_profile(), cached_profile()
    assert (probes["read"], probes["measured"]) == (2, 1)
    assert first.rates == again.rates == RATES
    assert again.notes == (*read_profile(machine("rtx-4090")).notes, "not measured: gds")
    cached_profile(fresh=True)
    assert probes["measured"] == 2


def test_other_stacks_are_measured_again(probes):
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
def test_rates_hold_while_causes_do(name, part, change, holds):
    saved = measured(name)
    now = saved.changed(**{part: getattr(saved, part).changed(**change)})
    assert has_valid_rates(saved, now) == holds


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
    with pytest.raises(InvalidInput, match="damaged or edited") as caught:
        load_profile(path)
    assert "autotune probe" in caught.value.hint
    assert cached_profile().rates == RATES
