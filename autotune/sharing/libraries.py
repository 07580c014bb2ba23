"""Which optional libraries a candidate runs on: their versions decide for the trials that used them, and no others."""

import re
from collections.abc import Mapping

from autotune.schema import Candidate, Versions

LIBRARIES: Mapping[str, tuple[str, str]] = {
    "torchao": ("quantization", r"torchao"),
    "bitsandbytes": ("quantization", r"bnb|bitsandbytes"),
    "flash_attn": ("attention", r"_?flash(?!.*hub)"),
    "kernels": ("attention", r".*hub"),
    "xformers": ("attention", r"xformers"),
    "cudnn": ("attention", r"_native_cudnn"),
    "sageattention": ("attention", r"_?sage"),
}
"""Field of `Versions`: the knob, and what its choices that use the library begin with."""


def libraries_of(candidate: Candidate) -> tuple[str, ...]:
    """The libraries whose versions decide how this candidate runs."""
    return tuple(
        library for library, (knob, choices) in LIBRARIES.items() if re.match(choices, getattr(candidate, knob))
    )


def changed_libraries(there: Versions, here: Versions) -> tuple[str, ...]:
    """The libraries that two machines have in different versions."""
    return tuple(name for name in LIBRARIES if getattr(there, name) != getattr(here, name))
