"""What is remembered of operations on the meta device changes no trace."""

import pytest
from tiny_models import TINY, cpu, workload_of

from autotune.cost import recorder as shapes
from autotune.cost.predict import CostModel
from autotune.models.registry import FAMILIES


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("flux1-dev", "torchao-int8"), ("kandinsky5-image-lite", "none"), ("qwen-image", "bnb-nf4")],
)
def test_a_trace_from_memory_equals_one_that_torch_worked_out(name, quantization, monkeypatch):
    known = (cpu(), workload_of(name, text_padding="masked"), FAMILIES[name], TINY[name])
    asked = ("fp32", quantization, "cpu", 2, 2)
    CostModel.build(*known).model.traced(*asked)
    remembered = CostModel.build(*known).model.traced(*asked)

    monkeypatch.setattr(shapes, "key_of", lambda func, args, kwargs: None)
    assert CostModel.build(*known).model.traced(*asked) == remembered
