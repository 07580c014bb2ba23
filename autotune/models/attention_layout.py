"""How a family's attention modules are built: names and conventions, as data."""

from dataclasses import dataclass
from typing import Literal

Rotary = Literal["streams", "complex", "cos_sin", "matrix"]
"""How the stock transformer hands over rotary positions, for pairs of neighboring channels:

- `streams`: (image, text) of complex numbers, each (tokens, head size / 2);
- `complex`: complex numbers (batch, tokens, head size / 2);
- `cos_sin`: (cosines, sines) of all tokens, text first, or of the image's alone, each (tokens, head
  size) with every value twice;
- `matrix`: rotation matrices (..., tokens, 1, head size / 2, 2, 2).
"""


@dataclass(frozen=True)
class Stream:
    """Names of one stream's layers in an attention module."""

    query: str = "to_q"
    key: str = "to_k"
    value: str = "to_v"
    query_norm: str = "norm_q"
    key_norm: str = "norm_k"
    out: str = "to_out"
    """What the attention's output goes through, if the module has it."""


ADDED_TEXT = Stream(
    "add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k", "to_add_out"
)
"""The text's layers in diffusers' joint attention."""


@dataclass(frozen=True)
class AttentionLayout:
    """What a stock attention processor does before and after attention. Norms are RMSNorms over
    a head."""

    processor: str
    """Class name of the stock processor in diffusers."""
    rotary: Rotary
    rotary_argument: str
    """The argument of the processor that holds rotary positions."""
    image: Stream = Stream()
    text: Stream | None = None
    """Layers of the text, which comes before the image; None if what comes as text is attended
    to, not joined."""
    rounds_to_bf16: bool = False
    """Whether rotated queries and keys are rounded to bf16 whatever the compute dtype."""
