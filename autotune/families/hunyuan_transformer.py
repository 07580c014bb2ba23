"""HunyuanVideo 1.5's transformer without padding: prompts at their own length, and no image that is
not there. And its autoencoder in tiles.

diffusers' pads every prompt, adds 729 tokens for an image, and masks them all in each block by a
table of tokens times tokens: 2.4 GB for five seconds at 480p. Its forward pass also reads numbers
from masks, which a trace has not. Called with masks these classes do as diffusers'; without, they
compute the same without padding. Both keep their names, by which files and tables know them.
"""

from functools import wraps
from typing import Any

import diffusers
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers import transformer_hunyuan_video15 as stock
from torch import Tensor, nn


class HunyuanVideo15AttnProcessor2_0(stock.HunyuanVideo15AttnProcessor2_0):  # type: ignore[misc]
    """Joint attention of a block; takes no mask too."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if attention_mask is not None:
            masked: tuple[Tensor, Tensor] = super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
            return masked

        def turned(layer: nn.Module, norm: nn.Module) -> Tensor:
            turned: Tensor = apply_rotary_emb(
                norm(heads(layer, hidden_states)), image_rotary_emb, sequence_dim=1
            )
            return turned

        def heads(layer: nn.Module, states: Tensor) -> Tensor:
            return layer(states).unflatten(2, (attn.heads, -1))  # type: ignore[no-any-return]

        text = encoder_hidden_states
        query = torch.cat(
            [turned(attn.to_q, attn.norm_q), attn.norm_added_q(heads(attn.add_q_proj, text))], dim=1
        )
        key = torch.cat(
            [turned(attn.to_k, attn.norm_k), attn.norm_added_k(heads(attn.add_k_proj, text))], dim=1
        )
        value = torch.cat([heads(attn.to_v, hidden_states), heads(attn.add_v_proj, text)], dim=1)
        given = {"backend": self._attention_backend, "parallel_config": self._parallel_config}
        out = dispatch_attention_fn(query, key, value, **given).flatten(2, 3).to(query.dtype)
        of_image, of_text = out.split([hidden_states.shape[1], text.shape[1]], dim=1)
        return attn.to_out[0](of_image), attn.to_add_out(of_text)


class HunyuanVideo15Transformer3DModel(diffusers.HunyuanVideo15Transformer3DModel):  # type: ignore[misc]
    """The published transformer, with patches of one latent."""

    @wraps(diffusers.HunyuanVideo15Transformer3DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for block in self.transformer_blocks:
            block.attn.set_processor(HunyuanVideo15AttnProcessor2_0())

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        encoder_hidden_states_2: Tensor | None = None,
        return_dict: bool = True,
        **others: Any,
    ) -> Any:
        """The prediction in `sample`, or in a tuple. Shapes are diffusers', `others` what it
        takes besides.
        """
        if encoder_attention_mask is not None:
            given = {
                "encoder_hidden_states_2": encoder_hidden_states_2,
                "return_dict": return_dict,
                **others,
            }
            return super().forward(
                hidden_states, timestep, encoder_hidden_states, encoder_attention_mask, **given
            )
        shape, positions = hidden_states.shape, self.rope(hidden_states)
        noise, kind = (
            self.time_embed(timestep),
            torch.zeros((), dtype=torch.long, device=hidden_states.device),
        )
        text = self.context_embedder(encoder_hidden_states, timestep) + self.cond_type_embed(kind)
        if encoder_hidden_states_2 is not None:
            glyphs = self.context_embedder_2(encoder_hidden_states_2) + self.cond_type_embed(
                kind + 1
            )
            text = torch.cat([glyphs, text], dim=1)
        image = self.x_embedder(hidden_states)
        for block in self.transformer_blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                image, text = self._gradient_checkpointing_func(
                    block, image, text, noise, None, positions
                )
            else:
                image, text = block(image, text, noise, None, positions)
        sample = self.proj_out(self.norm_out(image, noise)).mT.unflatten(2, shape[2:])
        return (
            diffusers.models.modeling_outputs.Transformer2DModelOutput(sample)
            if return_dict
            else (sample,)
        )


def leave_out_padding(
    _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """A hook before `forward` as the pipeline calls it for one prompt."""
    own = {}
    for end in ("", "_2"):
        mask = options[f"encoder_attention_mask{end}"][0] > 0
        own[f"encoder_hidden_states{end}"] = options[f"encoder_hidden_states{end}"][:, mask]
    if not own["encoder_hidden_states_2"].shape[1]:
        own["encoder_hidden_states_2"] = None
    return args, {**options, **own, "encoder_attention_mask": None}


def prepare_vae(vae: Any) -> None:
    """Have an autoencoder work in tiles: its attention takes a table of tokens times tokens,
    tens of GiB for five seconds at 640 px. Its masks are made at once; diffusers' are filled row
    by row, in thousands of operations."""
    vae.enable_tiling()
    for module in vae.modules():
        if hasattr(module, "prepare_causal_attention_mask"):
            module.prepare_causal_attention_mask = causal_mask


def causal_mask(
    n_frame: int, n_hw: int, dtype: Any, device: Any, batch_size: int | None = None
) -> Tensor:
    """0 for tokens of the same frame and of those before it, else minus infinity: (batch,
    tokens, tokens), or without the batch."""
    frame = torch.arange(n_frame * n_hw, device=device) // n_hw
    mask = torch.zeros(len(frame), len(frame), dtype=dtype, device=device)
    mask.masked_fill_(frame[:, None] < frame, float("-inf"))
    return mask if batch_size is None else mask.expand(batch_size, -1, -1)
