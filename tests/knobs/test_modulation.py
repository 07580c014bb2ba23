"""Modulation ahead of time: where it is admitted, and how long its windows are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.knobs import modulation
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import Modulation
from autotune.models.family import build_on_meta
from autotune.models.registry import FAMILIES, get_family
from tests.builders import hardware, workload


def context(family: str = "qwen-image", targets: str = "attention") -> TuningContext:
    return TuningContext(hardware(), get_family(family), workload(targets=targets))


@pytest.mark.parametrize("name", FAMILIES)
def test_families_name_modulation_or_why(name):
    choices, layers = Modulation().choices_for_family(context(name)), FAMILIES[name].modulation
    if layers is None:
        assert choices.admitted == ("resident",)
        assert choices.rejected == {"ahead": FAMILIES[name].excluded["modulation"]}
        return
    assert choices.admitted == ("ahead", "resident")
    config = {**FAMILIES[name].transformer_config, **FAMILIES[name].tiny_config}
    assert list(layers.find(build_on_meta(FAMILIES[name], config)))


@given(row_bytes=st.integers(1, 1 << 32), images=st.integers(1, 10_000))
def test_windows_keep_their_limits(row_bytes, images):
    most_draws, most_bytes = modulation.MAX_WINDOW_DRAWS, modulation.MAX_WINDOW_BYTES
    steps = modulation.window_steps(row_bytes, images)
    assert steps >= 1
    if steps > 1:
        assert steps * images <= most_draws
        assert steps * images * row_bytes <= most_bytes
    assert (steps + 1) * images > min(most_draws, most_bytes // row_bytes)


def test_failing_calls_leave_the_blocks():
    family = get_family("qwen-image")
    config = {**family.transformer_config, **family.tiny_config}
    model = build_on_meta(family, config).to_empty(device="cpu")
    modulation.take_loaded_layers(family, model)
    ahead, blocks = modulation.find_modulation_ahead(model), model.transformer_blocks
    assert ahead is not None
    with pytest.raises(TypeError), ahead.collecting(family, model):
        model(len(model.transformer_blocks))
    assert model.transformer_blocks is blocks
    assert torch.is_grad_enabled()
