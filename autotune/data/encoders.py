"""The text encoders and the VAE of a run: loaded once, as the plan says, and released when
everything is encoded."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import cpu_offload
from torch import nn
from torch.utils import _pytree as pytree

from autotune.data.entries import EncoderIdentity, identify_encoders
from autotune.errors import InvalidInput, first_line
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.quantized_layers import quantize_inside
from autotune.knobs.settings import encoder_precision, torch_dtype
from autotune.models.resolve import ResolvedModel
from autotune.plan.candidate import CachingSettings, Candidate
from autotune.system.memory import release_memory
from autotune.system.resources import is_out_of_memory
from autotune.weights.files import DOWNLOAD_AGAIN
from autotune.weights.stream import Transform, cast_as_loaded, load_component


class Encoders:
    """Text encoders and VAE, loaded on first use, for the `device` that trains.

    `caching` says where they run and how text encoders are stored, `settings` the precision of the
    rest and the loader.
    """

    def __init__(
        self,
        model: ResolvedModel,
        caching: CachingSettings,
        settings: Candidate,
        device: torch.device,
    ) -> None:
        self.model, self.caching, self.device, self.loader = model, caching, device, settings.loader
        self.dtype = torch_dtype(encoder_precision(settings.precision))
        self.denoiser_dtype = torch_dtype(settings.precision)
        """What the transformer that they serve computes in."""
        self._pipeline: Any = None

    @property
    def text_settings(self) -> str:
        """Settings besides the dtype that decide the values of an embedding; streaming does not."""
        name, elsewhere = self.caching.text_encoder_quantization, self._unusual(self._text_device)
        version = WEIGHT_FORMATS[name].storage_version
        return ("" if name == "none" else name) + (f" {version}" if version > 1 else "") + elsewhere

    def _unusual(self, device: torch.device) -> str:
        """Another kind of device rounds otherwise."""
        return "" if device.type == self.device.type else f" on {device.type}"

    @property
    def identity(self) -> EncoderIdentity:
        """Part of the keys of cache entries."""
        return identify_encoders(
            self.model.weights,
            self.model.family,
            settings=str(self.dtype).removeprefix("torch."),
            text_settings=self.text_settings,
            vae_settings=self._unusual(self.vae_device),
            files=self.model.part_files,
        )

    @property
    def _text_device(self) -> torch.device:
        return self._device_at(self.caching.text_encoder_device)

    @property
    def vae_device(self) -> torch.device:
        """Where pixels are encoded."""
        return self._device_at(self.caching.vae_device)

    def _device_at(self, place: str) -> torch.device:
        return self.device if place == "training" else torch.device(place)

    def load_pipeline(self, *, with_text: bool = True) -> Any:
        """The stock pipeline without a transformer; its `encode_prompt` runs on the text encoders'
        device.

        Without text encoders, if they are not needed, it encodes pixels, on `vae_device`.
        """
        names = self.model.family.text_encoders  # which only serve `encode_prompt`
        # Beside text encoders the VAE is where the pipeline works: that of an edit model looks at
        # control images.
        vae_device = self.device if with_text else self.vae_device
        if self._pipeline is None or (with_text and getattr(self._pipeline, names[0]) is None):
            parts = {name: self._load_text_encoder(name) if with_text else None for name in names}
            parts |= dict.fromkeys((self.model.family.denoiser, *self.model.family.other_denoisers))
            parts["vae"] = self.load_vae(vae_device)
            pipeline = self.build_pipeline(torch_dtype=self.dtype, **parts)
            pipeline.encode_prompt = run_on_device(
                pipeline.encode_prompt, self._text_device, self.device
            )
            self._pipeline = pipeline
        self._pipeline.vae.to(vae_device)
        return self._pipeline

    def build_pipeline(self, **parts: Any) -> Any:
        """The stock pipeline with these components. Raises InvalidInput if one of its files is
        damaged."""
        folder = self.model.weights
        try:
            return self.model.family.load_pipeline(folder, **parts)
        except Exception as error:  # tokenizers and schedulers raise anything for damaged files
            if is_out_of_memory(error):
                raise
            reason = first_line(error)
            raise InvalidInput(
                f"the pipeline in {folder} does not load: {reason}", hint=DOWNLOAD_AGAIN
            ) from error

    def load_vae(self, device: torch.device) -> nn.Module:
        """The pipeline's VAE if it is loaded, or else a new one on `device`."""
        loaded = getattr(self._pipeline, "vae", None)
        if loaded is not None:
            return loaded  # type: ignore[no-any-return]
        return self._load("vae", dtype=self.dtype, device=str(device), loader=self.loader)

    def _load_text_encoder(self, name: str) -> nn.Module:
        if self.caching.text_encoder_streamed:
            return self.load_streamed(name, self.dtype)

        def quantize(model: nn.Module) -> Transform | None:
            lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
            blocks = (block for each in lists for block in each)  # those of any encoder
            return quantize_inside(blocks, self.caching.text_encoder_quantization)

        device = str(self._text_device)
        return self._load(
            name, dtype=self.dtype, device=device, loader=self.loader, transform=quantize
        )

    def _load(self, name: str, **options: Any) -> nn.Module:
        weights = self.model.part_files.get(name)
        component: nn.Module = load_component(self.model.weights, name, weights=weights, **options)
        return component

    def load_streamed(self, name: str, dtype: torch.dtype) -> nn.Module:
        """A component whose layers come to the device one by one, and turn to `dtype`, each time
        they are called."""
        # Memory-mapped as stored, so that the host can drop pages that it has no room for and read
        # them again.
        component = self._load(name, dtype=dtype, casts=False)
        cpu_offload(component, self.device, offload_buffers=True)
        cast_as_loaded(
            component, dtype
        )  # on meta: each layer's weights turn to what stands in their place
        return component

    def release(self) -> None:
        """Free everything, unless the plan keeps it loaded."""
        if self.caching.residency == "release":
            self._pipeline = None
            release_memory()

    def release_text(self) -> None:
        """Free the text encoders alone, unless the plan keeps them loaded: pixels are encoded
        without."""
        if self.caching.residency == "release" and self._pipeline is not None:
            for name in self.model.family.text_encoders:
                setattr(self._pipeline, name, None)
            release_memory()


def run_on_device(
    function: Callable[..., Any], device: torch.device, result_device: torch.device
) -> Callable[..., Any]:
    """Wrap a pipeline's `encode_prompt`: its arguments move to `device`, its results to
    `result_device`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = move_tensors((args, {**kwargs, "device": device}), device)
        return move_tensors(function(*args, **kwargs), result_device)

    return run


def move_tensors(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`, inside tuples, lists and dictionaries too."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)
