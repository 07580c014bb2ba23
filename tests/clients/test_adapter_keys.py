"""The names of layers in adapter files, against tables of each program's, from its own source."""

import contextlib
import json
import re
from functools import cache
from pathlib import Path
from unittest import mock

import diffusers
import pytest
import torch
import yaml
from peft import get_peft_model_state_dict

from autotune.errors import InvalidInput
from autotune.models.adapter import add_adapter
from autotune.models.family import build_on_meta
from autotune.models.registry import FAMILIES
from autotune.plan.request import PlanRequest
from autotune.search.request import ResolvedRequest, complete
from autotune.weights import names as layouts
from autotune.weights.adapters import Adapter, parse_adapter, serialize_adapter
from autotune.weights.names import READ_IN_PART
from tests.builders import workload

TABLES = Path(__file__).parent
PROGRAMS = ("comfyui", "kohya")
UNNAMED = {"Flux3Transformer2DModel"}  # whose layers no source that is named here knows
CASES = [(family, targets) for family in FAMILIES.values() for targets in family.target_sets]


@cache
def table(program):
    return yaml.safe_load((TABLES / f"{program}.yaml").read_text())


def parts_of(program, model, key):
    """The layers of diffusers in the program's own layer of this name, by the table."""
    for pattern, parts in table(program)[model]["layers"].items():
        if match := re.fullmatch(re.escape(pattern).replace(r"\#", r"(\d+)"), key):
            return [part.replace("#", match[1]) if match.groups() else part for part in parts]
    raise AssertionError(f"{program} has no layer {key}")


def small_config(family):
    config = {**family.transformer_config, **family.tiny_config}
    if family.name == "sdxl":  # the place of a layer among the published stages is in its name
        config |= {
            "down_block_types": family.transformer_config["down_block_types"],
            "up_block_types": family.transformer_config["up_block_types"],
            "block_out_channels": (32, 64, 64),
            "transformer_layers_per_block": (1, 2, 2),
            "attention_head_dim": (1, 1, 1),
            "layers_per_block": 2,
        }
    return config


def make_layers(family, targets, kind="lora"):
    """An adapter of a small model, not zero, of another alpha than rank."""
    transformer = build_on_meta(family, small_config(family))
    work = workload(rank=2, lora_alpha=3.0, targets=targets, adapter=kind)
    add_adapter(family, transformer, work, torch.float32)
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, module in transformer.named_modules():
        if "default" in getattr(module, "lora_A", ()):
            parts = (module.lora_A["default"], module.lora_B["default"])
            down, up = (torch.randn(part.weight.shape, generator=generator) for part in parts)
            made[name] = layouts.LoraLayer(down, up, 3.0)
        elif "default" in getattr(module, "lokr_w1", ()):
            parts = {part: getattr(module, part) for part in module.adapter_layer_names}
            sizes = {part: each["default"].shape for part, each in parts.items() if each}
            made[name] = layouts.KroneckerLayer({part: torch.randn(sizes[part]) for part in sizes})
    return made


def update(layer):
    return layer.up @ layer.down * (layer.alpha / layer.rank)


def check_against_table(program, model, tensors, made):
    """The program finds every layer, and adds to its rows what was trained for them."""
    found = set()
    for key in {re.sub(r"\.(lora_(up|down|A|B)\.weight|alpha)$", "", name) for name in tensors}:
        is_kohya = f"{key}.lora_up.weight" in tensors
        names = ("lora_down", "lora_up") if is_kohya else ("lora_A", "lora_B")
        down, up = (tensors[f"{key}.{name}.weight"] for name in names)
        alpha = tensors[f"{key}.alpha"].item() if f"{key}.alpha" in tensors else len(down)
        whole = update(layouts.LoraLayer(down, up, alpha))
        row = 0
        for part in parts_of(program, model, key):
            width = whole.shape[1] * (4 if part.endswith("mlp") else 1)
            expected = update(made[part]) if part in made else torch.zeros(width, whole.shape[1])
            if part.endswith("norm1_context.linear") and len(expected) == 2 * width:
                # ComfyUI's swap_scale_shift
                expected = torch.cat(expected.chunk(2)[::-1])
            if model == "MiniMaxH3Transformer3DModel" and part.endswith("ff.net.0.proj"):
                expected = torch.cat(expected.chunk(2)[::-1])  # the gate comes first
            torch.testing.assert_close(whole[row : row + len(expected)], expected)
            row += len(expected)
            found.add(part)
        assert row == len(whole)
    assert found >= made.keys()


@pytest.mark.quick("qwen-image")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("family", "targets"), CASES, ids=lambda case: getattr(case, "name", case))
@mock.patch.dict(READ_IN_PART, clear=True)
def test_programs_find_every_layer(family, targets, program):
    model, made = family.transformer_class, make_layers(family, targets)
    adapter = Adapter(made, {}, family.denoiser)
    if model not in table(program):
        with pytest.raises(InvalidInput, match=f"what {program} calls the layers"):
            serialize_adapter(adapter, program, model)
        return
    tensors, metadata = serialize_adapter(adapter, program, model)
    check_against_table(program, model, tensors, made)
    back = parse_adapter(tensors, metadata, list(made), model)
    assert back.component == family.denoiser
    assert back.layers.keys() == made.keys()
    for name, layer in made.items():
        torch.testing.assert_close(update(back.layers[name]), update(layer))


@pytest.mark.quick("qwen-image", "sdxl", "flux1-dev")
@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_diffusers_finds_every_layer(family):
    known = table("diffusers")[family.transformer_class]["layers"]
    pattern = "|".join(re.escape(layer).replace(r"\#", r"\d+") for layer in known)
    for targets in family.target_sets:
        made = make_layers(family, targets)
        tensors, metadata = serialize_adapter(Adapter(made, {}, family.denoiser), "diffusers")
        assert all(re.fullmatch(rf"({pattern})\.lora_[AB]\.weight", key) for key in tensors)
        assert len(tensors) == 2 * len(made)
        assert "lora_adapter_metadata" in metadata


@pytest.mark.parametrize("program", PROGRAMS)
def test_known_layers_are_in_the_tables(program):
    known = {
        name for name in (*layouts.LAYOUTS, *layouts.KEPT_NAMES) if layouts.can_write(program, name)
    }
    classes = {each.transformer_class for each in FAMILIES.values()}
    assert known == table(program).keys() == classes - UNNAMED
    prefix, dot = {"comfyui": ("diffusion_model.", "."), "kohya": ("lora_unet_", "_")}[program]
    for model, layout in layouts.LAYOUTS.items():
        known = table(program)[model]["layers"]
        if not layout.kohya_has_own_names and program == "kohya":
            assert all(key == prefix + part.replace(".", dot) for key, (part,) in known.items())
            continue
        for original, parts in layout.parts_of.items():
            assert known[prefix + original.replace(".", dot)] == list(parts)
        assert len(known) == len(layout.parts_of)
    for entry in table(program).values():
        assert all(
            re.match(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}:\S+\.py", source) for source in entry["sources"]
        )


def comfyui_finds(model, key):
    known = table("comfyui")[model]
    name = re.sub(r"\.(lora_(up|down|A|B)\.weight|alpha)$", "", key)
    own = [layer for layer in known["layers"] if not re.search(known.get("aliases", "^$"), layer)]
    under_kohya = [layer.replace("diffusion_model.", "lora_unet_", 1) for layer in own]
    parts = {part for parts in known["layers"].values() for part in parts}
    found = {
        *known["layers"],
        *(layer.replace(".", "_") for layer in under_kohya),
        *(begin + part for begin in known["diffusers"] for part in parts),
    }
    return any(re.fullmatch(re.escape(layer).replace(r"\#", r"\d+"), name) for layer in found)


def diffusers_finds(family, made, tensors):
    try:
        pipeline = getattr(diffusers, family.pipeline_class)
        found = pipeline.lora_state_dict(dict(tensors), unet_config=None)
    except ValueError:  # of a converter, about keys that it doesn't know
        return {False}
    if isinstance(found, tuple):
        found = found[0]
    read = {name for name in made if f"{family.denoiser}.{name}.lora_A.weight" in found}
    for name in read:
        down, up = (found[f"{family.denoiser}.{name}.lora_{part}.weight"] for part in "AB")
        torch.testing.assert_close(up @ down, update(made[name]), rtol=1e-3, atol=1e-4)
    return {name in read for name in made}


@pytest.mark.quick("qwen-image")
@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_unread_formats_are_known(family):
    model, targets = family.transformer_class, list(family.target_sets)[-1]
    if model in UNNAMED:
        return
    made = make_layers(family, targets)
    adapter = Adapter(made, {}, family.denoiser)
    for to in ("diffusers", "kohya", "comfyui"):
        with mock.patch.dict(READ_IN_PART, clear=True):
            tensors, _ = serialize_adapter(adapter, to, model)
        found = {comfyui_finds(model, key) for key in tensors}
        if to == "comfyui" and model not in (layouts.FLUX1_CLASS, layouts.CHROMA_CLASS):
            found = diffusers_finds(family, made, tensors)  # those converters take full size alone
        assert (found == {False}) == (model in layouts.NOT_READ_BY.get(to, ("", ()))[1]), to
        is_refused = pytest.raises(InvalidInput, match="finds only some")
        with is_refused if len(found) == 2 else contextlib.nullcontext():
            serialize_adapter(adapter, to, model)
        for better in READ_IN_PART.get(to, {}).get(model, ())[2:]:
            assert model not in (*layouts.NOT_READ_BY[better][1], *READ_IN_PART.get(better, ()))


@pytest.mark.parametrize(
    "case", ["z-image kohya lora", "sdxl comfyui dora", "minimax-h3 comfyui lokr"]
)
def test_unwritable_formats_are_not_planned(case):
    model, to, kind = case.split()
    with pytest.raises(InvalidInput, match=r"only some|a DoRA|is a part of"):
        ResolvedRequest.build(complete(PlanRequest(model=model, adapter_format=to, adapter=kind)))


# Of diffusers' pipelines, those whose own loader takes a LoKr; the model's does for all families.
LOKR_PIPELINES = {"z-image", "flux2-klein", "flux2-dev"}
LOKR_REFUSED = {
    "minimax-h3": "is a part of",
    "ideogram-4": "is a part of",
    "flux3": "does not know",
    "qwen-image-2.1": "finds only some layers",
}


@pytest.mark.quick("flux2-klein")
@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_lokr_is_read(family):
    begin, model = family.denoiser, family.transformer_class
    made = make_layers(family, list(family.target_sets)[-1], "lokr")
    adapter = Adapter(made, {}, begin)
    tensors, metadata = serialize_adapter(adapter, "diffusers")
    transformer = family.build_transformer(small_config(family))
    options = {"prefix": begin, "metadata": json.loads(metadata["lora_adapter_metadata"])}
    transformer.load_lora_adapter(dict(tensors), **options)
    loaded = get_peft_model_state_dict(transformer, adapter_name="default_0")
    assert {f"{begin}.{key}" for key in loaded} == tensors.keys()
    assert all(torch.equal(each, tensors[f"{begin}.{key}"]) for key, each in loaded.items())
    pipeline = object.__new__(getattr(diffusers, family.pipeline_class))
    for name, part in {begin: transformer, "load_lora_into_transformer": mock.Mock()}.items():
        object.__setattr__(pipeline, name, part)
    takes = pytest.raises(ValueError, match="Invalid")
    with contextlib.nullcontext() if family.name in LOKR_PIPELINES else takes:
        pipeline.load_lora_weights(dict(tensors))
    if family.name in LOKR_REFUSED:
        with pytest.raises(InvalidInput, match=LOKR_REFUSED[family.name]):
            serialize_adapter(adapter, "comfyui", model)
        return
    written, _ = serialize_adapter(adapter, "comfyui", model)
    assert all(comfyui_finds(model, key.partition(".lokr_")[0]) for key in written)


@mock.patch.dict(READ_IN_PART, clear=True)
def test_layers_tell_their_model():
    for family in FAMILIES.values():
        layers = make_layers(family, "attention+mlp")
        # Other programs call Chroma's layers as FLUX.1's.
        told = layouts.FLUX1_CLASS if family.name == "chroma" else family.transformer_class
        own = told if told in layouts.LAYOUTS else ""
        assert layouts.find_class(layers) == (None if family.name in ("anima", "ltx-2.3") else own)
        if told in UNNAMED:
            continue
        adapter = Adapter(layers, {}, family.denoiser)
        tensors, metadata = serialize_adapter(adapter, "comfyui", family.transformer_class)
        assert parse_adapter(tensors, metadata).layers.keys() == layers.keys()
