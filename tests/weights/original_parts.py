"""VAEs and text encoders of diffusers and transformers under the names that their authors and
ComfyUI give them.

Written from the authors' model definitions, as the inverse of what is tested; it shares nothing
with it.
"""

import re

import torch
from torch import Tensor

State = dict[str, Tensor]

WAN_RESIDUAL = {
    "norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}  # fmt: skip


WAN = [
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
    return {_renamed(name, WAN): tensor for name, tensor in state.items()}


WAN22_STAGE = re.compile(
    r"(encoder|decoder)\.(down|up)_blocks\.(\d+)\.(?:resnets\.(\d+)|(?:down|up)sampler)\."
)


def wan22_vae(state: State) -> State:
    """Each stage holds its residual blocks and then the layer that changes the size, all by
    number."""
    return {_renamed(_nested(name, state), WAN): tensor for name, tensor in state.items()}


def _nested(name: str, state: State) -> str:
    match = WAN22_STAGE.match(name)
    if match is None:
        return name
    side, way, stage, number = match.groups()
    blocks = {
        each.split(".")[4]
        for each in state
        if each.startswith(f"{side}.{way}_blocks.{stage}.resnets.")
    }
    place = f"{side}.{way}samples.{stage}.{way}samples.{number or len(blocks)}."
    return place + _renamed(name.removeprefix(match[0]), WAN22_BLOCK)


WAN22_BLOCK = [(rf"^{name}\.", f"{place}.") for name, place in WAN_RESIDUAL.items()]


LDM = [
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
    places = [
        *LDM,
        *(
            (rf"decoder\.up_blocks\.{number}", f"decoder.up.{last - number}")
            for number in range(last + 1)
        ),
    ]
    return {
        _renamed(name, places): tensor[:, :, None, None]
        if ".attentions." in name and tensor.ndim == 2
        else tensor
        for name, tensor in state.items()
    }


def _renamed(name: str, patterns: list[tuple[str, str]]) -> str:
    for pattern, to in patterns:
        name = re.sub(pattern, to, name)
    return name


def flux2_vae(state: State) -> State:
    moved = {name: re.sub(r"^quant_conv", "encoder.quant_conv", name) for name in state}
    moved = {
        name: re.sub(r"^post_quant_conv", "decoder.post_quant_conv", to)
        for name, to in moved.items()
    }
    return {moved.get(name, name): tensor for name, tensor in ldm_vae(state).items()}


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
    """Of the files of `CLIPTextModelWithProjection`: q, k and v are one, and the projection is
    turned."""
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
