"""Weights of diffusers and transformers models under the names of their authors and ComfyUI: the
inverse of what is tested, written from the authors' models."""

import re
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

State = dict[str, Tensor]
Names = list[tuple[str, str]]
NAMES = yaml.safe_load((Path(__file__).parent / "original_layouts.yaml").read_text())


def _renamed(name, patterns):
    for pattern, to in patterns:
        name = re.sub(pattern, to, name)
    return name


def relaid(state, names, fused=(), swapped=()):
    """Rename tensors, join the layers of `fused` by their block, and swap halves of `swapped`."""
    made = {}
    for name, tensor in state.items():
        layer, _, kind = name.rpartition(".")
        for block, parts in fused:
            part = next((part for part in parts if layer.endswith(f".{part}")), None)
            if name.startswith(block) and part:
                whole = [state[f"{layer.removesuffix(part)}{each}.{kind}"] for each in parts]
                if part == parts[0]:
                    made[_renamed(name, names)] = torch.cat(whole)
                break
        else:
            halves = tensor.chunk(2)[::-1] if swapped and name.startswith(swapped) else [tensor]
            made[_renamed(name, names)] = torch.cat(list(halves)) if len(halves) > 1 else tensor
    return made


def z_image(state):
    unused = {"norm_final.weight": torch.ones(8)}
    parts = ("attention.to_q", "attention.to_k", "attention.to_v")
    return unused | relaid(state, NAMES["Z_IMAGE"], [("", parts)])


QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
ADDED = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")


def flux1(state):
    single = ("single_", (*QKV, "proj_mlp"))
    return relaid(state, NAMES["FLUX"], [single, ("", QKV), ("", ADDED)], ("norm_out.",))


def chroma(state):
    own = {name: state[name] for name in state if name.startswith("distilled")}
    rest = {name: tensor for name, tensor in state.items() if name not in own}
    return flux1(rest) | {_renamed(name, NAMES["CHROMA"]): tensor for name, tensor in own.items()}


def with_plain_norms(state):
    """Norms' scales as `.weight`, as in files of today's ComfyUI."""
    return {re.sub(r"(norm(?:s\.\d+)?)\.scale$", r"\1.weight", name): state[name] for name in state}


def sdxl_unet(state):
    """The UNet of CompVis and Stability: blocks are numbered whatever they hold."""
    down = [re.match(r"down_blocks\.(\d+)\.resnets\.(\d+)", name) for name in state]
    stages, layers = (1 + max(int(match[i]) for match in down if match) for i in (1, 2))
    places = dict(NAMES["UNET_OUTSIDE"])
    number = 1
    for stage in range(stages):
        for layer in range(layers):
            places[f"down_blocks.{stage}.resnets.{layer}"] = f"input_blocks.{number}.0"
            places[f"down_blocks.{stage}.attentions.{layer}"] = f"input_blocks.{number}.1"
            number += 1
        places[f"down_blocks.{stage}.downsamplers.0.conv"] = f"input_blocks.{number}.0.op"
        number += 1
    for layer in range(2):
        places[f"mid_block.resnets.{layer}"] = f"middle_block.{2 * layer}"
    places["mid_block.attentions.0"] = "middle_block.1"
    for stage in range(stages):
        for layer in range(layers + 1):
            number = stage * (layers + 1) + layer
            places[f"up_blocks.{stage}.resnets.{layer}"] = f"output_blocks.{number}.0"
            places[f"up_blocks.{stage}.attentions.{layer}"] = f"output_blocks.{number}.1"
        attends = any(name.startswith(f"up_blocks.{stage}.attentions.") for name in state)
        last = f"output_blocks.{number}.{1 + attends}"
        places[f"up_blocks.{stage}.upsamplers.0.conv"] = f"{last}.conv"
    return {_place(name, places): tensor for name, tensor in state.items()}


def _place(name, places):
    ours = next(place for place in _beginnings(name) if place in places)
    rest = name.removeprefix(f"{ours}.")
    if ".resnets." in ours:
        layer, _, kind = rest.rpartition(".")
        rest = f"{dict(NAMES['RESNET'])[layer]}.{kind}"
    return f"{places[ours]}.{rest}"


def _beginnings(name):
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(len(parts), 0, -1))


def sd3(state):
    """Shifts come before scales in the last layer, and in the last block's text."""
    numbers = {int(name.split(".")[1]) for name in state if name.startswith("transformer_blocks.")}
    swapped = (f"transformer_blocks.{max(numbers)}.norm1_context.", "norm_out.")
    second = tuple(part.replace("attn", "attn2") for part in QKV)
    return relaid(state, NAMES["SD3_NAMES"], [("", QKV), ("", second), ("", ADDED)], swapped)


def minimax_h3(state):
    """The gate's rows come first; a table of frequencies that comes along is not read."""
    gated = tuple(name for name in state if name.endswith(".ff.net.0.proj.weight"))
    made = relaid(state, NAMES["H3"], [("", QKV)], gated)
    return made | {"rope.inv_freq": torch.ones(8)}


def ideogram4(state):
    parts = ("attention.to_q", "attention.to_k", "attention.to_v")
    return relaid(state, NAMES["IDEOGRAM"], [("", parts)])


def ltx2(state):
    """With the connectors, which are beside the transformer there."""
    connectors = {f"{kind}_embeddings_connector.a": torch.ones(8) for kind in ("video", "audio")}
    return relaid(state, NAMES["LTX2"]) | connectors


LAYOUTS = {
    "qwen-image": dict,
    "flux1-dev": flux1,
    "chroma": chroma,
    "sd3.5": sd3,
    "sdxl": sdxl_unet,
    "wan-2.1": lambda state: relaid(state, NAMES["WAN"]),
    "z-image": z_image,
    "anima": lambda state: within(relaid(state, NAMES["COSMOS"]), "net."),
    "minimax-h3": minimax_h3,
    "ideogram-4": ideogram4,
    "ltx-2.3": ltx2,
}


def scaled_fp8(state, *, newer=False):
    """Matrices in fp8 with one scale each, as ComfyUI writes them."""
    made = {} if newer else {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, tensor in state.items():
        if tensor.ndim != 2:
            made[name] = tensor
            continue
        scale = tensor.float().abs().max() / 448
        module = name.removesuffix(".weight")
        made[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        if newer:
            quant = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
            made |= {f"{module}.weight_scale": scale, f"{module}.comfy_quant": quant}
        else:
            made[f"{module}.scale_weight"] = scale.reshape(1)
    return made


def wan_vae(state):
    return {_renamed(name, NAMES["WAN_VAE"]): tensor for name, tensor in state.items()}


WAN22_STAGE = re.compile(
    r"(encoder|decoder)\.(down|up)_blocks\.(\d+)\.(?:resnets\.(\d+)|(?:down|up)sampler)\."
)


def wan22_vae(state):
    """Each stage holds its residual blocks and then the one that changes the size, by number."""
    return wan_vae({_nested(name, state): tensor for name, tensor in state.items()})


def _nested(name, state):
    match = WAN22_STAGE.match(name)
    if match is None:
        return name
    side, way, stage, number = match.groups()
    resnets = f"{side}.{way}_blocks.{stage}.resnets."
    blocks = {each.split(".")[4] for each in state if each.startswith(resnets)}
    place = f"{side}.{way}samples.{stage}.{way}samples.{number or len(blocks)}."
    return place + _renamed(name.removeprefix(match[0]), WAN22_BLOCK)


WAN22_BLOCK = [(rf"^{name}\.", f"{place}.") for name, place in NAMES["WAN_RESIDUAL"]]


def ldm_vae(state):
    """Attention is by convolutions of one pixel; the decoder's stages are counted from the last."""
    last = max(int(name.split(".")[2]) for name in state if name.startswith("decoder.up_blocks."))
    stages = range(last + 1)
    numbers = [(rf"decoder\.up_blocks\.{stage}", f"decoder.up.{last - stage}") for stage in stages]
    places = [*NAMES["LDM_VAE"], *numbers]
    return {
        _renamed(name, places): tensor[:, :, None, None]
        if ".attentions." in name and tensor.ndim == 2
        else tensor
        for name, tensor in state.items()
    }


def flux2_vae(state):
    moved = [(r"^quant_conv", "encoder.quant_conv"), (r"^post_quant", "decoder.post_quant")]
    return {_renamed(name, moved): tensor for name, tensor in ldm_vae(state).items()}


def open_clip(state):
    """Of `CLIPTextModelWithProjection`: q, k and v are one, and the projection is turned."""
    made = {"logit_scale": torch.tensor(1.0), "text_projection": state["text_projection.weight"].T}
    for name, tensor in state.items():
        place = _renamed(name, NAMES["OPEN_CLIP"])
        if ".q_proj." in name:
            parts = [state[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            made[place.replace(".q_proj.", ".in_proj_")] = torch.cat(parts)
        elif not re.search(r"\.[kv]_proj\.|^text_projection", name):
            made[place] = tensor
    return made


def within(state, prefix):
    return {prefix + name: tensor for name, tensor in state.items()}


def write(state, file):
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)
    return file
