"""One value for every knob, and how captions are encoded before training."""

from typing import Literal

from pydantic import Field

from autotune.schema.base import Frozen, NaturalInt, PositiveInt

Choice = str | int


class Candidate(Frozen):
    """One value for every knob. Names, not objects: a plan from another machine must always parse."""

    micro_batch_size: int = PositiveInt
    """Images per forward pass; accumulation fills the effective batch."""
    checkpointed_blocks: int = NaturalInt
    """The first k blocks recompute their activations in the backward pass."""
    quantization: str = "none"
    """How frozen base weights are stored."""
    attention: str = "native"
    """diffusers' name of the attention backend."""
    precision: str = "bf16"
    """Compute dtype of the transformer and the adapter."""
    loader: str = "safetensors"
    """How weights are read from disk: a name in `autotune.weights.loaders`."""
    swapped_blocks: int = Field(default=0, ge=0)
    """The frozen weights of the first k blocks wait on the host until they are needed."""
    compile: str = "off"
    """`block`: each repeated block goes through torch.compile."""
    optimizer: str = "adamw"
    allocator: str = "default"
    """How the device's allocator grows: `default` or `expandable` segments."""
    data_workers: int = Field(default=1, ge=0)
    """Threads that collate batches ahead of the step."""
    batch_memory: str = "pageable"
    """Where batches wait for the device: `pageable` or `pinned` memory of the host."""

    def label(self) -> str:
        """One short line for people."""
        main = f"batch {self.micro_batch_size}, ckpt {self.checkpointed_blocks}, {self.quantization}, {self.attention}"
        unusual = (
            f"{name.replace('_', ' ')} {value}"
            for name, value in self
            if not (field := type(self).model_fields[name]).is_required() and value != field.default
            if name not in ("quantization", "attention", "allocator", "data_workers", "batch_memory")
        )
        return ", ".join((main, *unusual))


class CachingSettings(Frozen):
    """How captions and images are encoded before training. Fields can be pinned: `--pin caching.FIELD=VALUE`."""

    text_encoder_device: str = Field(default="training", pattern=r"^(training|cpu|cuda:[0-9]{1,3})$")
    """`training` for the device that trains, `cpu`, or another GPU such as `cuda:1`."""
    text_encoder_quantization: str = "none"
    """How the weights of their Linear layers are stored; names as for `Candidate.quantization`."""
    text_encoder_streamed: bool = False
    """Their weights wait on the host, and visit the device module by module."""
    residency: Literal["release", "keep"] = "release"
    """`release`: text encoders and VAE leave memory when all is encoded."""
