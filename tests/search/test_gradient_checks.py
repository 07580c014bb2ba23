"""Right choices pass on every family, wrong ones are named with their error."""

from dataclasses import replace

import pytest
import torch

from autotune.knobs.blocks import BlockSwap, CompiledBlock
from autotune.knobs.knob import TuningContext, gradient_capability
from autotune.knobs.quantized_layers import quantize_inside
from autotune.knobs.registry import GRADIENT_TOLERANCES, Quantization
from autotune.knobs.settings import optimizer_tolerance, precision_tolerance
from autotune.machine.probe import probe
from autotune.models.registry import FAMILIES, get_family
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.job import ModelRef
from autotune.plan.request import PlanRequest
from autotune.plan.workload import ModelSpec
from autotune.search import gradient_checks as parity
from autotune.search.gradient_checks import GradientRequest, UpdateRequest, plain_transformer
from autotune.search.request import space_for
from autotune.search.trials import ProcessTrialRunner
from autotune.search.worker import ChildState
from tests.builders import storages, workload
from tests.kinds import KINDS

CHOICES = {
    "precision": ("fp32", "bf16", "fp16"),
    "attention": ("native", "_native_math", "_native_flash"),
    "checkpointed_blocks": (0, 1, 2),
    "selective_blocks": (0, 1),
    "swapped_blocks": (0, 1),
}


def request_of(family_name, **settings):
    family = get_family(family_name)
    spec = ModelSpec(family=family_name, architecture="x", num_parameters=1, num_blocks=2, name="x")
    number = 1 if family.max_controls else 0
    work = workload(model=spec, num_control_images=number, text_padding="exact")
    return GradientRequest(
        family=family_name,
        config={**family.transformer_config, **family.tiny_config},
        workload=parity.small_workload(family, work),
        candidate=Candidate.model_validate(
            {"micro_batch_size": 2, "checkpointed_blocks": 0, **settings}
        ),
        device="cpu",
    )


@pytest.mark.quick("qwen-image")
@pytest.mark.parametrize("family", FAMILIES)
def test_choices_agree_on_every_family(family):
    child = ChildState()
    for name, choices in CHOICES.items():
        for choice in choices:
            if choice == "_native_flash" and get_family(family).has_attention_mask(1, "exact"):
                continue  # it takes none
            if rule := GRADIENT_TOLERANCES[name](choice):
                precision = str(choice) if name == "precision" else "fp32"
                request = request_of(
                    family,
                    **{"precision": precision, name: rule.checked_choice, **rule.other_choices},
                )
                error = request.perform(child)
                assert error <= rule.tolerance, f"{name} {choice}: {error}"


def test_norms_of_dora_stay_in_scale():
    rule, request = precision_tolerance("bf16"), request_of("flux1-dev", precision="bf16")
    request = replace(request, workload=request.workload.changed(adapter="dora"))
    assert request.perform(ChildState()) <= rule.tolerance


def test_changed_results_are_an_error(monkeypatch):
    plain, functional = torch.nn.functional.scaled_dot_product_attention, torch.nn.functional
    changed = lambda *args, **named: plain(*args, **named).add_(0)  # noqa: E731
    monkeypatch.setattr(functional, "scaled_dot_product_attention", changed)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        request_of("qwen-image", precision="fp32", selective_blocks=2).perform(ChildState())


def test_checked_blocks_are_really_swapped(monkeypatch):
    copied = []
    fetch = BlockSwap._before_forward
    watched = lambda *args: copied.append(args[1]) or fetch(*args)  # noqa: E731
    monkeypatch.setattr(BlockSwap, "_before_forward", watched)
    rule = GRADIENT_TOLERANCES["swapped_blocks"](1)
    choices = {"swapped_blocks": rule.checked_choice, **rule.other_choices}
    request = request_of("qwen-image", precision="fp32", **choices)
    assert request.perform(ChildState()) <= rule.tolerance
    assert copied


@pytest.mark.quick(*KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_blocks_change_no_bit(family):
    child = ChildState()
    for numbers in (
        {"checkpointed_blocks": 1, "selective_blocks": 1},
        {"selective_blocks": 2, "swapped_blocks": 2},
    ):
        assert request_of(family, precision="fp32", **numbers).perform(child) == 0.0


@pytest.fixture(scope="module")
def children():
    """Each family's model and reference, once for all weight formats."""
    return {family: ChildState() for family in FAMILIES}


@pytest.mark.quick(("qwen-image", "torchao-int8"), ("qwen-image", "bnb-nf4"))
@pytest.mark.parametrize("storage", storages())
@pytest.mark.parametrize("family", FAMILIES)
def test_weight_formats_agree_on_families(family, storage, children):
    rule = Quantization().gradient_tolerance(storage)
    rounding = precision_tolerance("bf16")
    assert rule is not None
    assert rounding is not None
    whole, half = (
        request_of(family, precision=each, quantization=storage).perform(children[family])
        for each in ("fp32", "bf16")
    )
    assert 0.001 < whole <= rule.tolerance  # it is quantized
    assert 0.001 < half <= rule.tolerance + rounding.tolerance


@pytest.mark.quick("qwen-image")
@pytest.mark.parametrize("family", FAMILIES)
def test_four_bits_round_weights_only(family):
    """On weights that nf4 can hold, its layers compute what plain ones do."""
    functional = pytest.importorskip(
        "bitsandbytes.functional", reason="bitsandbytes is not installed"
    )
    request = request_of(family, precision="fp32", quantization="bnb-nf4")
    plain = plain_transformer(request)
    for layer in (part for block in get_family(family).blocks(plain) for part in block.modules()):
        if isinstance(layer, torch.nn.Linear):
            four = quantize_inside([layer], "bnb-nf4")("", layer).weight
            layer.weight.data = functional.dequantize_4bit(four.data, four.quant_state)
    assert request.perform(ChildState(cache={"plain": plain})) < 0.005


@pytest.mark.slow
def test_compiled_blocks_agree(monkeypatch):
    """With graphs that are not turned into code: that takes a minute on a CPU."""
    monkeypatch.setattr(CompiledBlock, "backend", "aot_eager")
    rule = GRADIENT_TOLERANCES["compile"]("block")
    settings = {"precision": "fp32", "compile": rule.checked_choice, **rule.other_choices}
    request = request_of("qwen-image", **settings)
    assert request.perform(ChildState()) <= rule.tolerance


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_updates_agree_with_plain_adamw(precision):
    rule = optimizer_tolerance("adamw")
    settings = Candidate(micro_batch_size=1, checkpointed_blocks=0, precision=precision)
    assert UpdateRequest(settings, "cpu").perform(ChildState()) <= rule.tolerance


def test_backend_that_loses_gradients_is_told(monkeypatch):
    plain = torch.nn.functional.scaled_dot_product_attention

    def no_backward(query, key, value, **named):
        return plain(query.detach(), key.detach(), value.detach(), **named)

    child = ChildState()
    request = request_of("qwen-image", precision="fp32", attention="native")
    assert request.perform(child) < 1e-6
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", no_backward)
    assert request.perform(child) > 0.3


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = resolve_model(ModelRef.of("qwen-image")).spec
    return TuningContext(probe(), get_family("qwen-image"), workload(model=spec))


def prove(context, **choices):
    asked = {"precision": ("fp32",), **choices}
    return parity.check_gradients(context, asked, resolve_model(ModelRef.of("qwen-image")))


def test_verdicts_are_kept(here, monkeypatch):
    choices = {"attention": ("_native_math",), "quantization": ("none", "torchao-int8")}
    first = prove(here, **choices)
    found = {each.name: each for each in first}
    pairs = (("attention", "_native_math"), ("quantization", "torchao-int8"))
    assert set(found) == {gradient_capability(*pair) for pair in pairs}
    assert all(each.available and "differ by" in each.reason for each in found.values())
    monkeypatch.setattr(parity, "ProcessTrialRunner", None)  # no child is needed any more
    assert prove(here, **choices) == first


def test_other_attention_stands_in(here, monkeypatch):
    class Runner(ProcessTrialRunner):
        def send(self, request, **_):
            asked.append((request.candidate.attention, request.candidate.quantization))
            return float(request.candidate.attention == "native")

    asked = []
    monkeypatch.setattr(parity, "ProcessTrialRunner", Runner)
    found = prove(here, attention=("native",), quantization=("torchao-int8",))
    spare = found[1].name.rpartition(".")[2]
    assert [each.available for each in found] == [False, True, True]
    assert asked[-1] == (spare, "torchao-int8")
    lacking = here.hardware.changed(capabilities=(*here.hardware.capabilities, *found))
    space = space_for(PlanRequest(model="qwen-image"), replace(here, hardware=lacking))
    assert space.choices["attention"][0] == spare
