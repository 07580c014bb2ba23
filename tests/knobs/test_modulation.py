"""Modulation ahead of time: where it is admitted, how long its windows are, and that it takes
what it says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.knobs.knob import TuningContext
from autotune.knobs.modulation import (
    MAX_WINDOW_BYTES,
    MAX_WINDOW_DRAWS,
    find_modulation_ahead,
    take_loaded_layers,
    window_steps,
)
from autotune.knobs.registry import Modulation
from autotune.models.family import build_on_meta
from autotune.models.registry import FAMILIES, get_family
from autotune.plan.candidate import Candidate
from tests.builders import hardware, workload

AHEAD = Candidate(micro_batch_size=1, checkpointed_blocks=0, modulation="ahead")


def context(family: str = "qwen-image", targets: str = "attention") -> TuningContext:
    return TuningContext(hardware(), get_family(family), workload(targets=targets))


@pytest.mark.parametrize("name", FAMILIES)
def test_families_name_layers_or_say_why_not(name: str) -> None:
    choices, layers = Modulation().choices_for_family(context(name)), FAMILIES[name].modulation
    if layers is None:
        assert choices.admitted == ("resident",)
        assert choices.rejected == {"ahead": FAMILIES[name].excluded["modulation"]}
        return
    assert choices.admitted == ("ahead", "resident")
    config = {**FAMILIES[name].transformer_config, **FAMILIES[name].tiny_config}
    assert list(layers.find(build_on_meta(FAMILIES[name], config)))


@given(row_bytes=st.integers(1, 1 << 32), images=st.integers(1, 10_000))
def test_a_window_is_within_its_limits_or_one_step(row_bytes: int, images: int) -> None:
    steps = window_steps(row_bytes, images)
    assert steps >= 1
    if steps > 1:
        assert steps * images <= MAX_WINDOW_DRAWS
        assert steps * images * row_bytes <= MAX_WINDOW_BYTES
    assert (steps + 1) * images > min(MAX_WINDOW_DRAWS, MAX_WINDOW_BYTES // row_bytes)


def test_a_failing_call_leaves_the_blocks_where_they_were() -> None:
    family = get_family("qwen-image")
    model = build_on_meta(family, {**family.transformer_config, **family.tiny_config}).to_empty(
        device="cpu"
    )
    take_loaded_layers(family, model)
    ahead, blocks = find_modulation_ahead(model), model.transformer_blocks
    assert ahead is not None
    with pytest.raises(TypeError), ahead.collecting(family, model):
        model(len(model.transformer_blocks))
    assert model.transformer_blocks is blocks
    assert torch.is_grad_enabled()
