"""Weights of diffusers and transformers models under the names of their authors and ComfyUI: the
inverse of what is tested, written from the authors' models."""

import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

State = dict[str, Tensor]
Names = list[tuple[str, str]]


def _renamed(name: str, patterns: Names) -> str:
    for pattern, to in patterns:
        name = re.sub(pattern, to, name)
    return name


def relaid(
    state: State,
    names: Names,
    fused: Sequence[tuple[str, Sequence[str]]] = (),
    swapped: tuple[str, ...] = (),
) -> State:
    """Rename tensors, join the layers of `fused` by their block, and swap halves of `swapped`."""
    made: State = {}
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


Z_IMAGE = [
    (r"^all_(final_layer|x_embedder)\.2-1\.", r"\1."),
    (r"\.attention\.to_q\.", ".attention.qkv."),
    (r"\.attention\.to_out\.0\.", ".attention.out."),
    (r"\.attention\.norm_([qk])\.", r".attention.\1_norm."),
]


def z_image(state: State) -> State:
    unused = {"norm_final.weight": torch.ones(8)}
    parts = ("attention.to_q", "attention.to_k", "attention.to_v")
    return unused | relaid(state, Z_IMAGE, [("", parts)])


WAN = [
    (r"^condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
    (r"^condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"^condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
    (r"^condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"^condition_embedder\.time_proj", "time_projection.1"),
    (r"^scale_shift_table$", "head.modulation"),
    (r"^proj_out", "head.head"),
    (r"\.scale_shift_table$", ".modulation"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
    (r"\.norm2\.", ".normX."),
    (r"\.norm3\.", ".norm2."),
    (r"\.normX\.", ".norm3."),
]


COSMOS = [
    (r"^transformer_blocks", "blocks"),
    (r"^patch_embed\.proj", "x_embedder.proj.1"),
    (r"^time_embed\.t_embedder", "t_embedder.1"),
    (r"^time_embed\.norm", "t_embedding_norm"),
    (r"^norm_out\.linear_", "final_layer.adaln_modulation."),
    (r"^proj_out", "final_layer.linear"),
    (r"\.norm1\.linear_", ".adaln_modulation_self_attn."),
    (r"\.norm2\.linear_", ".adaln_modulation_cross_attn."),
    (r"\.norm3\.linear_", ".adaln_modulation_mlp."),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.norm_([qk])\.", r".\1_norm."),
    (r"\.to_([qkv])\.", r".\1_proj."),
    (r"\.to_out\.0\.", ".output_proj."),
    (r"\.ff\.net\.0\.proj", ".mlp.layer1"),
    (r"\.ff\.net\.2", ".mlp.layer2"),
]


EMBEDDERS = {"timestep": "time", "text": "vector", "guidance": "guidance"}
FLUX = [
    *(
        (rf"^time_text_embed\.{ours}_embedder\.linear_{number}\.", f"{theirs}_in.{layer}_layer.")
        for ours, theirs in EMBEDDERS.items()
        for number, layer in ((1, "in"), (2, "out"))
    ),
    (r"^context_embedder\.", "txt_in."),
    (r"^x_embedder\.", "img_in."),
    (r"^proj_out\.", "final_layer.linear."),
    (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
    (r"^single_transformer_blocks\.", "single_blocks."),
    (r"^(single_blocks\.\d+)\.attn\.to_q\.", r"\1.linear1."),
    (r"^(single_blocks\.\d+)\.proj_out\.", r"\1.linear2."),
    (r"^(single_blocks\.\d+)\.norm\.linear\.", r"\1.modulation.lin."),
    (r"^(single_blocks\.\d+)\.attn\.norm_q\.weight", r"\1.norm.query_norm.scale"),
    (r"^(single_blocks\.\d+)\.attn\.norm_k\.weight", r"\1.norm.key_norm.scale"),
    (r"^transformer_blocks\.", "double_blocks."),
    (r"\.norm1\.linear\.", ".img_mod.lin."),
    (r"\.norm1_context\.linear\.", ".txt_mod.lin."),
    (r"\.attn\.to_q\.", ".img_attn.qkv."),
    (r"\.attn\.add_q_proj\.", ".txt_attn.qkv."),
    (r"\.attn\.to_out\.0\.", ".img_attn.proj."),
    (r"\.attn\.to_add_out\.", ".txt_attn.proj."),
    (r"\.ff\.net\.0\.proj\.", ".img_mlp.0."),
    (r"\.ff\.net\.2\.", ".img_mlp.2."),
    (r"\.ff_context\.net\.0\.proj\.", ".txt_mlp.0."),
    (r"\.ff_context\.net\.2\.", ".txt_mlp.2."),
    (r"\.attn\.norm_q\.weight", ".img_attn.norm.query_norm.scale"),
    (r"\.attn\.norm_k\.weight", ".img_attn.norm.key_norm.scale"),
    (r"\.attn\.norm_added_q\.weight", ".txt_attn.norm.query_norm.scale"),
    (r"\.attn\.norm_added_k\.weight", ".txt_attn.norm.key_norm.scale"),
]
QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
ADDED = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")


def flux1(state: State) -> State:
    single = ("single_", (*QKV, "proj_mlp"))
    return relaid(state, FLUX, [single, ("", QKV), ("", ADDED)], ("norm_out.",))


CHROMA = [
    (r"\.linear_1\.", ".in_layer."),
    (r"\.linear_2\.", ".out_layer."),
    (r"(norms\.\d+)\.weight$", r"\1.scale"),
]


def chroma(state: State) -> State:
    own = {name: state[name] for name in state if name.startswith("distilled")}
    rest = {name: tensor for name, tensor in state.items() if name not in own}
    return flux1(rest) | {_renamed(name, CHROMA): tensor for name, tensor in own.items()}


def with_plain_norms(state: State) -> State:
    """Norms' scales as `.weight`, as in files of today's ComfyUI."""
    return {re.sub(r"(norm(?:s\.\d+)?)\.scale$", r"\1.weight", name): state[name] for name in state}


RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip
UNET_OUTSIDE = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
}  # fmt: skip


def sdxl_unet(state: State) -> State:
    """The UNet of CompVis and Stability: blocks are numbered whatever they hold."""
    down = [re.match(r"down_blocks\.(\d+)\.resnets\.(\d+)", name) for name in state]
    stages, layers = (1 + max(int(match[i]) for match in down if match) for i in (1, 2))
    places = dict(UNET_OUTSIDE)
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
        places[f"up_blocks.{stage}.upsamplers.0.conv"] = (
            f"output_blocks.{number}.{2 if attends else 1}.conv"
        )
    return {_place(name, places): tensor for name, tensor in state.items()}


def _place(name: str, places: dict[str, str]) -> str:
    ours = next(place for place in _beginnings(name) if place in places)
    rest = name.removeprefix(f"{ours}.")
    if ".resnets." in ours:
        layer, _, kind = rest.rpartition(".")
        rest = f"{RESNET[layer]}.{kind}"
    return f"{places[ours]}.{rest}"


def _beginnings(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(len(parts), 0, -1))


SD3_NAMES = [
    (r"^pos_embed\.pos_embed$", "pos_embed"),
    (r"^pos_embed\.proj\.", "x_embedder.proj."),
    (r"^time_text_embed\.timestep_embedder\.linear_1\.", "t_embedder.mlp.0."),
    (r"^time_text_embed\.timestep_embedder\.linear_2\.", "t_embedder.mlp.2."),
    (r"^time_text_embed\.text_embedder\.linear_1\.", "y_embedder.mlp.0."),
    (r"^time_text_embed\.text_embedder\.linear_2\.", "y_embedder.mlp.2."),
    (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
    (r"^proj_out\.", "final_layer.linear."),
    (r"^transformer_blocks\.", "joint_blocks."),
    (r"\.(attn2?)\.to_q\.", r".x_block.\1.qkv."),
    (r"\.attn\.add_q_proj\.", ".context_block.attn.qkv."),
    (r"\.attn\.to_add_out\.", ".context_block.attn.proj."),
    (r"\.attn\.norm_added_([qk])\.", r".context_block.attn.ln_\1."),
    (r"\.(attn2?)\.to_out\.0\.", r".x_block.\1.proj."),
    (r"\.(attn2?)\.norm_([qk])\.", r".x_block.\1.ln_\2."),
    (r"\.norm1\.linear\.", ".x_block.adaLN_modulation.1."),
    (r"\.norm1_context\.linear\.", ".context_block.adaLN_modulation.1."),
    (r"\.ff\.net\.0\.proj\.", ".x_block.mlp.fc1."),
    (r"\.ff\.net\.2\.", ".x_block.mlp.fc2."),
    (r"\.ff_context\.net\.0\.proj\.", ".context_block.mlp.fc1."),
    (r"\.ff_context\.net\.2\.", ".context_block.mlp.fc2."),
]


def sd3(state: State) -> State:
    """Shifts come before scales in the last layer, and in the last block's text."""
    numbers = {int(name.split(".")[1]) for name in state if name.startswith("transformer_blocks.")}
    swapped = (f"transformer_blocks.{max(numbers)}.norm1_context.", "norm_out.")
    second = tuple(part.replace("attn", "attn2") for part in QKV)
    return relaid(state, SD3_NAMES, [("", QKV), ("", second), ("", ADDED)], swapped)


LAYOUTS: dict[str, Callable[[State], State]] = {
    "qwen-image": dict,
    "flux1-dev": flux1,
    "chroma": chroma,
    "sd3.5": sd3,
    "sdxl": sdxl_unet,
    "wan-2.1": lambda state: relaid(state, WAN),
    "z-image": z_image,
    "anima": lambda state: within(relaid(state, COSMOS), "net."),
}


def scaled_fp8(state: State, *, newer: bool = False) -> State:
    """Matrices in fp8 with one scale each, as ComfyUI writes them."""
    made: State = {} if newer else {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, tensor in state.items():
        if tensor.ndim != 2:
            made[name] = tensor
            continue
        scale = tensor.float().abs().max() / 448
        module = name.removesuffix(".weight")
        made[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        made[f"{module}.{'weight_scale' if newer else 'scale_weight'}"] = (
            scale if newer else scale.reshape(1)
        )
        if newer:
            quant = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
            made[f"{module}.comfy_quant"] = quant
    return made


WAN_RESIDUAL = {
    "norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}  # fmt: skip


WAN_VAE = [
    (r"^quant_conv\.", "conv1."),
    (r"^post_quant_conv\.", "conv2."),
    (r"coder\.conv_in\.", "coder.conv1."),
    (r"coder\.norm_out\.", "coder.head.0."),
    (r"coder\.conv_out\.", "coder.head.2."),
    (r"encoder\.down_blocks\.", "encoder.downsamples."),
    (r"mid_block\.resnets\.0", "middle.0"),
    (r"mid_block\.attentions\.0", "middle.1"),
    (r"mid_block\.resnets\.1", "middle.2"),
    *(
        (rf"up_blocks\.{i}\.resnets\.{j}", f"upsamples.{4 * i + j}")
        for i in range(4)
        for j in range(3)
    ),
    *((rf"up_blocks\.{i}\.upsamplers\.0", f"upsamples.{4 * i + 3}") for i in range(3)),
    *(
        (rf"((?:downsamples|upsamples|middle)\.\d+)\.{name}\.", rf"\1.{place}.")
        for name, place in WAN_RESIDUAL.items()
    ),
]


def wan_vae(state: State) -> State:
    return {_renamed(name, WAN_VAE): tensor for name, tensor in state.items()}


WAN22_STAGE = re.compile(
    r"(encoder|decoder)\.(down|up)_blocks\.(\d+)\.(?:resnets\.(\d+)|(?:down|up)sampler)\."
)


def wan22_vae(state: State) -> State:
    """Each stage holds its residual blocks and then the one that changes the size, by number."""
    return {_renamed(_nested(name, state), WAN_VAE): tensor for name, tensor in state.items()}


def _nested(name: str, state: State) -> str:
    match = WAN22_STAGE.match(name)
    if match is None:
        return name
    side, way, stage, number = match.groups()
    resnets = f"{side}.{way}_blocks.{stage}.resnets."
    blocks = {each.split(".")[4] for each in state if each.startswith(resnets)}
    place = f"{side}.{way}samples.{stage}.{way}samples.{number or len(blocks)}."
    return place + _renamed(name.removeprefix(match[0]), WAN22_BLOCK)


WAN22_BLOCK = [(rf"^{name}\.", f"{place}.") for name, place in WAN_RESIDUAL.items()]


LDM_VAE = [
    (r"encoder\.down_blocks\.(\d)", r"encoder.down.\1"),
    (r"\.resnets\.", ".block."),
    (r"\.downsamplers\.0\.", ".downsample."),
    (r"\.upsamplers\.0\.", ".upsample."),
    (r"conv_shortcut", "nin_shortcut"),
    (r"mid_block\.block\.0", "mid.block_1"),
    (r"mid_block\.block\.1", "mid.block_2"),
    (r"conv_norm_out", "norm_out"),
    (r"mid_block\.attentions\.0\.group_norm", "mid.attn_1.norm"),
    (r"mid_block\.attentions\.0\.to_([qkv])", r"mid.attn_1.\1"),
    (r"mid_block\.attentions\.0\.to_out\.0", "mid.attn_1.proj_out"),
]


def ldm_vae(state: State) -> State:
    """Attention is by convolutions of one pixel; the decoder's stages are counted from the last."""
    last = max(int(name.split(".")[2]) for name in state if name.startswith("decoder.up_blocks."))
    stages = range(last + 1)
    numbers = [(rf"decoder\.up_blocks\.{stage}", f"decoder.up.{last - stage}") for stage in stages]
    places = [*LDM_VAE, *numbers]
    return {
        _renamed(name, places): tensor[:, :, None, None]
        if ".attentions." in name and tensor.ndim == 2
        else tensor
        for name, tensor in state.items()
    }


def flux2_vae(state: State) -> State:
    moved = [(r"^quant_conv", "encoder.quant_conv"), (r"^post_quant", "decoder.post_quant")]
    return {_renamed(name, moved): tensor for name, tensor in ldm_vae(state).items()}


OPEN_CLIP = [
    (r"^text_model\.", ""),
    (r"^encoder\.layers\.", "transformer.resblocks."),
    (r"layer_norm([12])", r"ln_\1"),
    (r"mlp\.fc1", "mlp.c_fc"),
    (r"mlp\.fc2", "mlp.c_proj"),
    (r"self_attn", "attn"),
    (r"^embeddings\.position_embedding\.weight", "positional_embedding"),
    (r"^embeddings\.", ""),
    (r"^final_layer_norm", "ln_final"),
]


def open_clip(state: State) -> State:
    """Of `CLIPTextModelWithProjection`: q, k and v are one, and the projection is turned."""
    made: State = {
        "logit_scale": torch.tensor(1.0),
        "text_projection": state["text_projection.weight"].T,
    }
    for name, tensor in state.items():
        if ".q_proj." in name:
            parts = [state[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            made[_renamed(name, OPEN_CLIP).replace(".q_proj.", ".in_proj_")] = torch.cat(parts)
        elif not re.search(r"\.[kv]_proj\.|^text_projection", name):
            made[_renamed(name, OPEN_CLIP)] = tensor
    return made


def within(state: State, prefix: str) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}
