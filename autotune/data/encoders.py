"""The text encoders and the VAE of a run, loaded once, where and how the plan says, and let go when all is encoded."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autotune.data.recipes import Identity, read_identity
from autotune.errors import InvalidInput, first_line
from autotune.families import ResolvedModel
from autotune.knobs import torch_dtype
from autotune.quantization import quantize_inside
from autotune.runtime import is_out_of_memory, release_memory
from autotune.schema import CachingSettings, Candidate
from autotune.weights import DOWNLOAD_AGAIN, Transform, load_component


class Encoders:
    """Loads on first use.

    Args:
        model: with its files.
        caching: where text encoders run and how they are stored.
        settings: the precision of what is not quantized, and the loader.
        device: that trains; the VAE runs there.
    """

    def __init__(
        self, model: ResolvedModel, caching: CachingSettings, settings: Candidate, device: torch.device
    ) -> None:
        self.model, self.caching, self.device, self.loader = model, caching, device, settings.loader
        self.dtype = torch_dtype(settings.precision)
        self._loaded: Any = None

    @property
    def key(self) -> str:
        """What of these settings decides the values of an embedding, beside the dtype; streaming does not."""
        storage = self.caching.text_encoder_quantization
        elsewhere = self._text_device.type != self.device.type
        return ("" if storage == "none" else storage) + (f" on {self._text_device.type}" if elsewhere else "")

    @property
    def identity(self) -> Identity:
        """Of what encodes, for the cache."""
        folder, precision = self.model.weights, str(self.dtype).removeprefix("torch.")
        return read_identity(folder, self.model.family, settings=precision, text_settings=self.key)

    @property
    def _text_device(self) -> torch.device:
        place = self.caching.text_encoder_device
        return self.device if place == "training" else torch.device(place)

    def pipeline(self, *, with_text: bool = True) -> Any:
        """The stock pipeline without a transformer; its `encode_prompt` runs where the encoders are.

        Args:
            with_text: False where pixels alone are encoded: text encoders are not loaded for that.
        """
        names = self.model.family.text_encoders  # which only serve `encode_prompt`
        if self._loaded is None or (with_text and getattr(self._loaded, names[0]) is None):
            parts = {name: self._text_encoder(name) if with_text else None for name in names}
            vae = self.vae(self.device)
            folder = self.model.weights
            try:
                loaded = self.model.family.load_pipeline(
                    folder, torch_dtype=self.dtype, transformer=None, vae=vae, **parts
                )
            except Exception as error:  # tokenizers and schedulers raise anything for damaged files
                if is_out_of_memory(error):
                    raise
                reason = first_line(error)
                raise InvalidInput(f"the pipeline in {folder} does not load: {reason}", hint=DOWNLOAD_AGAIN) from error
            loaded.encode_prompt = running_on(self._text_device, self.device, loaded.encode_prompt)
            self._loaded = loaded
        return self._loaded

    def vae(self, device: torch.device) -> nn.Module:
        """The kept VAE, or a fresh one on `device`."""
        kept = getattr(self._loaded, "vae", None)
        if kept is not None:
            return kept  # type: ignore[no-any-return]
        folder = self.model.weights
        return load_component(folder, "vae", dtype=self.dtype, device=str(device), loader=self.loader)  # type: ignore[no-any-return]

    def _text_encoder(self, name: str) -> nn.Module:
        folder, caching = self.model.weights, self.caching
        if caching.text_encoder_streamed:
            from accelerate import cpu_offload

            # Mapped, so that the host drops and reads again what it has no room for.
            encoder = load_component(folder, name, dtype=self.dtype)
            cpu_offload(encoder, self.device, offload_buffers=True)
            return encoder  # type: ignore[no-any-return]

        def quantized(model: nn.Module) -> Transform | None:
            return quantize_inside(_repeated(model), caching.text_encoder_quantization)

        device = str(self._text_device)
        return load_component(  # type: ignore[no-any-return]
            folder, name, dtype=self.dtype, device=device, loader=self.loader, transform=quantized
        )

    def release(self) -> None:
        """Let go of everything, unless the plan keeps it."""
        if self.caching.residency == "release":
            self._loaded = None
            release_memory()

    def release_text(self) -> None:
        """Let go of the text encoders alone, unless the plan keeps them: pixels are encoded without."""
        if self.caching.residency == "release" and self._loaded is not None:
            for name in self.model.family.text_encoders:
                setattr(self._loaded, name, None)
            release_memory()


def running_on(there: torch.device, here: torch.device, encode: Callable[..., Any]) -> Callable[..., Any]:
    """`encode_prompt` of a pipeline whose encoders are on `there`, with its answers on `here`."""

    def encode_there(*values: Any, **named: Any) -> Any:
        named = {name: moved(value, there) for name, value in named.items()}
        return moved(encode(*(moved(value, there) for value in values), **{**named, "device": there}), here)

    return encode_there


def moved(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`, inside tuples, lists and dictionaries too."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def _repeated(model: nn.Module) -> Iterable[nn.Module]:
    """The blocks of any encoder: what its lists of modules hold."""
    return (block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module)
