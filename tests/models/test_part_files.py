"""The other parts of a single file: in files of their own, in the same checkpoint, or nowhere."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from autotune.errors import InvalidInput
from autotune.models.resolve import check_weights, read_parts, refuse_parts, resolve_model
from autotune.plan.job import ModelRef
from autotune.weights.files import BadWeights
from autotune.weights.stream import load_component
from tests.models.test_single_file import in_one_file
from tests.weights.original_layouts import ldm_vae, open_clip, within, write

WEIGHTS = {"vae": "diffusion_pytorch_model.safetensors"}
SDXL = {
    "vae": lambda state: within(ldm_vae(state), "first_stage_model."),
    "text_encoder": lambda state: within(state, "conditioner.embedders.0.transformer."),
    "text_encoder_2": lambda state: within(open_clip(state), "conditioner.embedders.1.model."),
}


def take(folder, part):
    file = folder / part / WEIGHTS.get(part, "model.safetensors")
    state = load_file(file)
    file.unlink()
    return dict(state)


def check_same(model, whole):
    check_weights(model)
    assert read_parts(model) == read_parts(resolve_model(ModelRef.of(whole)))
    for part in ("vae", *model.family.text_encoders):
        check_same_part(model.weights, whole, part, model.part_files.get(part))


def check_same_part(folder, whole, part, weights):
    loaded = load_component(folder, part, dtype=torch.float32, weights=weights).state_dict()
    expected = load_component(whole, part, dtype=torch.float32).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())


def test_full_checkpoint_needs_only_configurations(small_pipelines, tmp_path):
    whole = small_pipelines("sdxl").folder
    base = shutil.copytree(whole, tmp_path / "base")
    file = in_one_file("sdxl", base, tmp_path / "unet.safetensors")
    state = within(load_file(file), "model.diffusion_model.")
    for part, layout in SDXL.items():
        state |= layout(take(base, part))
    checkpoint = write(state, tmp_path / "checkpoint.safetensors")
    assert not list(base.rglob("*.safetensors"))
    model = resolve_model(ModelRef(name=str(checkpoint), base=str(base)))
    assert set(model.part_files) == {"vae", "text_encoder", "text_encoder_2"}
    check_same(model, whole)


def test_parts_come_from_own_files(small_pipelines, tmp_path):
    whole = small_pipelines("flux1-dev").folder
    base = shutil.copytree(whole, tmp_path / "base")
    file = in_one_file("flux1-dev", base, tmp_path / "flux1.safetensors")
    vae = write(ldm_vae(take(base, "vae")), tmp_path / "ae.safetensors")
    unused = {"logit_scale": torch.ones(()), "text_projection.weight": torch.ones(2, 2)}
    clip = take(base, "text_encoder") | unused
    t5 = {**take(base, "text_encoder_2"), "spiece_model": torch.zeros(9, dtype=torch.uint8)}
    second = write(t5, tmp_path / "t5xxl.safetensors")
    first = write(clip, tmp_path / "clip_l.safetensors")
    encoders = (str(second), str(first))
    ref = ModelRef(name=str(file), base=str(base), vae=str(vae), text_encoders=encoders)
    model = resolve_model(ref)
    assert model.part_files == {"vae": vae, "text_encoder_2": second, "text_encoder": first}
    check_same(model, whole)
    refuse_parts(ref, {"vae"})
    with pytest.raises(InvalidInput, match="takes no base"):
        refuse_parts(ModelRef(name=str(base)), {"vae"})
    with pytest.raises(InvalidInput, match="the same text encoder"):
        resolve_model(ref.changed(text_encoders=(str(second),) * 2))
    with pytest.raises(BadWeights):
        resolve_model(ref.changed(text_encoders=(str(vae),)))


def flat(state):
    nested = re.compile(r"^model\.language_model\.")
    return {nested.sub("model.", name): tensor for name, tensor in state.items()}


def with_head(state):
    """The whole of Qwen3, of which pipelines take what is below the head."""
    return {**within(state, "model."), "lm_head.weight": torch.ones(2, 2)}


ENCODERS = {"qwen-image": flat, "z-image": with_head}


@pytest.mark.parametrize("family", ENCODERS)
def test_comfyuis_encoders_are_the_folders(family, small_pipelines, tmp_path):
    whole = small_pipelines(family).folder
    state = ENCODERS[family](dict(load_file(whole / "text_encoder" / "model.safetensors")))
    file = write(state, tmp_path / "encoder.safetensors")
    check_same_part(whole, whole, "text_encoder", file)
