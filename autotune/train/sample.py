"""Samples through the stock pipeline around the transformer in training, and `autotune sample`.

Prompts are encoded before the transformer is loaded: the pipeline runs up to the first call of a
transformer without weights, and the results of its `encode_prompt` are recorded and cached. Later
it runs without any text encoder and gets these results, so no family needs code of its own.
"""

import contextlib
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import nn

from autotune.data.cache import Cache, EncoderIdentity, entry_key, make_prompt_entry
from autotune.data.encode import Encoders, move_tensors, with_device
from autotune.data.pixels import explain_damage, open_picture
from autotune.errors import AutotuneError, InvalidInput, first_line, is_out_of_memory, reraise_oom
from autotune.events import Notice, OnEvent, StatusChanged
from autotune.knobs import blocks, modulation
from autotune.knobs.settings import configure_allocator
from autotune.models.adapter import ADAPTER_NAME
from autotune.models.family import build_on_meta
from autotune.plan import base, workload
from autotune.plan.hardware import HardwareProfile
from autotune.plan.plan import TrainingPlan
from autotune.system import files, memory, version
from autotune.train.model import load_transformer
from autotune.train.prepare import SampleInputs
from autotune.weights.adapters import read_adapter

LINE_SHARE = 1 / 24  # height of a line of labels, as a share of a picture's
MIN_LINE_PX = 12
CLIP_QUALITY = "18"  # x264's constant rate factor: what is lost cannot be seen
LABELS = ("without the adapter", "with the adapter")


def make_sheet(
    previews: Sequence["Preview"], pairs: Sequence[tuple[Image.Image, Image.Image]]
) -> Image.Image:
    """Draw a row per preview: without and with the adapter, prompt and seed below, all of it."""
    sizes = [image.size for pair in pairs for image in pair]
    width, height = (max(side) for side in zip(*sizes, strict=True))
    line = max(MIN_LINE_PX, round(height * LINE_SHARE))
    font = ImageFont.load_default(0.75 * line)
    width = max(width, *(math.ceil(font.getlength(label)) + line for label in LABELS))
    texts = [
        f"seed {each.seed}: {' '.join((each.title or each.prompt).split())}" for each in previews
    ]
    below = [_wrapped(text, lambda part: font.getlength(part) <= 2 * width - 4) for text in texts]
    row_heights = [height + line * (1 + len(lines)) for lines in below]
    sheet = Image.new("RGB", (2 * width, sum(row_heights)), "white")
    draw, top = ImageDraw.Draw(sheet), 0
    for lines, pair, row_height in zip(below, pairs, row_heights, strict=True):
        for column, (label, image) in enumerate(zip(LABELS, pair, strict=True)):
            draw.text((column * width + 2, top), label, "black", font)
            sheet.paste(image, (column * width, top + line))
        for number, text in enumerate(lines, 1):
            draw.text((2, top + height + number * line), text, "black", font)
        top += row_height
    return sheet


def _wrapped(text: str, fits: Callable[[str], bool]) -> list[str]:
    every = (textwrap.wrap(text, columns) for columns in range(len(text), 0, -1))
    return next(lines for lines in every if all(map(fits, lines)))


def save_image(image: Image.Image, path: Path, facts: Mapping[str, object]) -> None:
    """Write a PNG atomically, with `facts` as text in its metadata."""
    metadata = PngInfo()
    for name, value in facts.items():
        metadata.add_itxt(name, str(value))
    with files.atomic_write(path) as part:
        image.save(part, format="PNG", pnginfo=metadata)


def save_clip(
    frames: Sequence[Image.Image], path: Path, facts: Mapping[str, object], fps: float
) -> None:
    """Write an mp4 (H.264) atomically, with `facts` as its comment. Sides must be even."""
    import av

    rate = Fraction(fps).limit_denominator(1001)
    with files.atomic_write(path) as part, av.open(str(part), "w", format="mp4") as container:
        texts = {name: str(value) for name, value in facts.items()}
        container.metadata["comment"] = json.dumps(texts)
        stream = container.add_stream("libx264", rate=rate, options={"crf": CLIP_QUALITY})
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.asarray(frame.convert("RGB")), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


@reraise_oom()
def sample_run(
    inputs: SampleInputs,
    hardware: HardwareProfile,
    cache_folder: Path,
    on_event: OnEvent = base.log_event,
) -> list[Path]:
    """Sample from the adapter of a run, or from a plan's model; return the files written."""
    request, plan, model = inputs.request, inputs.plan, inputs.model
    frozen, device = plan.frozen, torch.device(hardware.device.torch_name)
    settings = frozen.settings
    if frozen.hardware.num_shards > 1:  # one device cannot hold all weights, so blocks are swapped
        settings = settings.changed(swapped_blocks=frozen.workload.model.num_blocks - 1)
    configure_allocator(settings.allocator)  # before anything is allocated
    encoders = Encoders(model, frozen.caching, device, settings.precision, settings.loader)
    sampler = PreviewSampler(encoders, lambda text: on_event(Notice(text=text, level="warning")))
    steps, bucket = request.num_steps or plan.job.preview_steps, frozen.workload.largest_bucket
    first = Preview(request.prompt, bucket, steps, request.seed, request.control_paths)
    previews = [replace(first, seed=first.seed + number) for number in range(request.count)]
    sampler.encode_prompts(previews[:1], Cache(cache_folder))
    encoders.release()
    transformer, _ = load_transformer(model, settings, device)
    sampler.attach(transformer)
    if inputs.adapter:
        sampler.load_adapter(inputs.adapter)
    blocks.swap_blocks(transformer, model.family, settings.swapped_blocks)
    written = []
    for at, ((number, strength), named) in enumerate(inputs.paths.items(), start=1):
        on_event(StatusChanged(text=f"sampling {at} of {len(inputs.paths)}"))
        preview = previews[number]
        if inputs.adapter and (strength != 1 or len(request.strengths) > 1):
            names = [*sampler.transformer.peft_config]
            sampler.transformer.set_adapters(names, [strength] * len(names))
        frames = sampler.sample(preview)
        facts = preview.facts(plan, adapter="with" if inputs.adapter else "without")
        facts |= {"strength": f"{strength:g}"}
        path = request.free(named)  # looked for as late as now: another process may sample, too
        if path.suffix == ".mp4":
            save_clip(frames, path, facts, model.family.defaults.frames_per_second)
        else:
            save_image(frames[0], path, facts)
        written.append(path)
    return written


MIN_HALVED_SIDE_PX = 256  # images with a shorter side are not halved when memory is short
# Numbers of each token, or sizes in pixels, that fp16 would round.
EXACT_INPUTS = ("timestep", "time_ids")

# Gets `with` or `without` the adapter, the number of the preview, and its frames.
OnFrames = Callable[[str, int, list[Image.Image]], None]


class PreviewTooLarge(AutotuneError):
    """Memory is too short for a preview, even of the smallest size."""


@dataclass(frozen=True)
class Preview:
    """One image to sample, always from the same noise."""

    prompt: str
    bucket: workload.Bucket
    num_steps: int
    seed: int
    control_paths: tuple[Path, ...] = ()
    title: str = ""  # what its picture tells in place of the prompt

    def facts(self, plan: TrainingPlan, *, adapter: str) -> dict[str, object]:
        own = {"prompt": self.title or self.prompt, "seed": self.seed, "steps": self.num_steps}
        made_by = {"plan": plan.digest, "model": plan.job.model}
        return {**own, "adapter": adapter, "software": f"autotune {version.__version__}", **made_by}


class _Reached(Exception):
    pass


class PreviewSampler:
    """A sampler of previews: `encode_prompts` first, then `attach` a transformer."""

    def __init__(
        self, encoders: Encoders, on_warning: Callable[[str], None] = lambda message: None
    ) -> None:
        self.encoders, self.on_warning = encoders, on_warning
        self.model, self.dtype, self.device = encoders.model, encoders.dtype, encoders.device
        # Results of the calls of `encode_prompt`, in order, by prompt and control images.
        self.encoded: dict[tuple[str, tuple[Path, ...]], list[Any]] = {}
        self.pipeline: Any = None
        self.divisor = 1  # of both sides of previews

    @property
    def transformer(self) -> Any:
        return getattr(self.pipeline, self.model.family.denoiser)

    def encode_prompts(self, previews: Sequence[Preview], cache: Cache) -> None:
        """Encode the prompts of all previews, or read from `cache` what equal encoders made."""
        identity, missing = self.encoders.identity, []
        for preview in previews:
            if stored := cache.read(_cache_key(preview, identity)):
                self.encoded[preview.prompt, preview.control_paths] = _unpack(stored)
            else:
                missing.append(preview)
        if missing:
            self._encode(missing)
        for preview in missing:
            packed = _pack(self.encoded[preview.prompt, preview.control_paths])
            cache.write(_cache_key(preview, identity), packed)

    def _encode(self, previews: Sequence[Preview]) -> None:
        pipeline, family = self.encoders.load_pipeline(), self.model.family
        for name in (family.denoiser, *family.other_denoisers):
            shape = build_on_meta(family, self.model.config).to(self.dtype)
            shape.register_forward_pre_hook(_stop)
            setattr(pipeline, name, with_device(shape, self.device))
        encode = pipeline.encode_prompt
        for preview in previews:
            encoded: list[Any] = []

            def record(*args: Any, _encoded: list[Any] = encoded, **kwargs: Any) -> Any:
                _encoded.append(move_tensors(encode(*args, **kwargs), torch.device("cpu")))
                return move_tensors(_encoded[-1], self.device)

            pipeline.encode_prompt = record
            try:
                self._run(pipeline, preview)
            except _Reached:
                self.encoded[preview.prompt, preview.control_paths] = encoded
            finally:
                pipeline.encode_prompt = encode
        for name in (family.denoiser, *family.other_denoisers):
            setattr(pipeline, name, None)

    def attach(self, transformer: nn.Module) -> None:
        """Build the pipeline around `transformer`; other denoisers are streamed."""
        family, encoders = self.model.family, self.encoders
        parts: dict[str, Any] = dict.fromkeys(family.text_encoders)
        parts[family.denoiser] = transformer
        for name in family.other_denoisers:
            parts[name] = encoders.load_streamed(name, encoders.denoiser_dtype)
        vae: Any = encoders.load_vae(torch.device("cpu"))
        if self.device.type == "cuda":
            vae.decode = partial(_decode_apart, vae.decode, self.device)
        self.pipeline = encoders.build_pipeline(torch_dtype=self.dtype, vae=vae, **parts)

    def sample(self, preview: Preview) -> list[Image.Image]:
        """Sample a preview's frames; if memory is short the VAE tiles, then the image is halved."""
        while True:
            try:
                return self._sample(preview)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            memory.release_memory()  # not in the handler: the error holds what the pass made
            self._shrink(preview)

    def _shrink(self, preview: Preview) -> None:
        vae, bucket = self.pipeline.vae, preview.bucket
        if hasattr(vae, "enable_tiling") and not getattr(vae, "use_tiling", True):
            vae.enable_tiling()
        elif min(bucket.width_px, bucket.height_px) // self.divisor >= MIN_HALVED_SIDE_PX:
            self.divisor *= 2
            smaller = self._reduced(bucket)
            wanted = f"a preview of {bucket.width_px}x{bucket.height_px} px"
            now = f"it is {smaller.width_px}x{smaller.height_px}"
            self.on_warning(f"memory is too short for {wanted}: {now}")
        else:
            hint = "train without previews: set preview_prompts to [] in the plan's job"
            raise PreviewTooLarge("memory is too short for a preview", hint=hint)

    def _reduced(self, bucket: workload.Bucket) -> workload.Bucket:
        multiple, sides = self.model.family.size_multiple_px, ("width_px", "height_px")
        counts = {side: getattr(bucket, side) // self.divisor // multiple for side in sides}
        smaller = {side: max(1, count) * multiple for side, count in counts.items()}
        return bucket.model_copy(update=smaller)

    def _sample(self, preview: Preview) -> list[Image.Image]:
        reduced = replace(preview, bucket=self._reduced(preview.bucket))
        decoders = [getattr(self.pipeline, name) for name in self.model.family.decoders]
        try:
            for decoder in decoders:
                decoder.to(self.device)
            with memory.map_large_buffers(), self._modulation(reduced):
                return self._run_encoded(reduced)
        finally:
            for decoder in decoders:
                is_kept = decoder is self.pipeline.vae and self.encoders.caching.residency == "keep"
                decoder.to(self.encoders.vae_device if is_kept else "cpu")

    def _run_encoded(self, preview: Preview) -> list[Image.Image]:
        encoded: Iterator[Any] = iter(self.encoded[preview.prompt, preview.control_paths])

        def replay(*_: object, **__: object) -> Any:
            return move_tensors(next(encoded), self.device)

        self.pipeline.encode_prompt = replay
        return self._run(self.pipeline, preview)

    def _modulation(self, preview: Preview) -> contextlib.AbstractContextManager[None]:
        """Compute a preview's modulations at once: a run without blocks tells what they need."""
        ahead = modulation.find_modulation_ahead(self.transformer)
        if ahead is None:
            return contextlib.nullcontext()
        vae = self.pipeline.vae
        decode, vae.decode = vae.decode, _stop
        try:
            with ahead.collecting(self.model.family, self.transformer) as collected:
                self._run_encoded(preview)
        except _Reached:
            pass
        finally:
            vae.decode = decode
        return ahead.holding_also(collected)

    def _run(self, pipeline: Any, preview: Preview) -> list[Image.Image]:
        try:
            controls = [open_picture(path) for path in preview.control_paths]
        except Exception as error:  # decoders raise anything for damaged files
            message = f"a control image cannot be used: {explain_damage(error)}"
            raise InvalidInput(message, hint="check the files") from error
        family, how = self.model.family, {"num_steps": preview.num_steps, "seed": preview.seed}
        names = family.denoiser, *family.other_denoisers
        with self._casting([getattr(pipeline, name) for name in names]):
            return family.sample(pipeline, preview.prompt, preview.bucket, controls=controls, **how)

    @contextlib.contextmanager
    def _casting(self, transformers: Sequence[nn.Module]) -> Iterator[None]:
        """Let a pipeline in fp32 call transformers in fp16, which get levels and sizes in fp32."""
        own = self.encoders.denoiser_dtype
        if own == self.dtype:
            yield
            return

        def cast(path: tuple[Any, ...], value: Any) -> Any:
            is_exact = any(getattr(step, "key", None) in EXACT_INPUTS for step in path)
            if is_exact or not isinstance(value, torch.Tensor) or value.ndim < 2:
                return value
            return value.to(own) if value.is_floating_point() else value

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return torch.utils._pytree.tree_map_with_path(cast, (args, kwargs))

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            cast_back = partial(torch.Tensor.to, dtype=self.dtype)
            return torch.utils._pytree.tree_map_only(torch.Tensor, cast_back, output)

        hooks = [each.register_forward_pre_hook(enter, with_kwargs=True) for each in transformers]
        hooks += [each.register_forward_hook(leave) for each in transformers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def compare_adapter(
        self, adapter: Path, previews: Sequence[Preview], on_frames: OnFrames
    ) -> list[tuple[Image.Image, Image.Image]]:
        """Sample all without and with the adapter in the file; return pairs of first frames."""
        self.transformer.delete_adapters(ADAPTER_NAME)
        first: dict[str, list[Image.Image]] = {"without": [], "with": []}
        for name, images in first.items():
            if name == "with":
                self.load_adapter(adapter)
            for number, preview in enumerate(previews):
                frames = self.sample(preview)
                on_frames(name, number, frames)
                images.append(frames[0])
        return list(zip(*first.values(), strict=True))

    def load_adapter(self, adapter: Path) -> None:
        """Load an adapter file by the pipeline's own loader; few have one for LoKr."""
        hint = "name the output folder of `autotune train`, or train again"
        read = read_adapter(adapter)
        family = self.model.family
        others = {name: getattr(self.pipeline, name) for name in family.other_denoisers}
        try:
            for name in others:  # diffusers would end their streaming
                setattr(self.pipeline, name, self.transformer)
            options = {"weight_name": adapter.name, **family.adapter_options}
            if read.is_lokr:
                options = {"weight_name": adapter.name, "prefix": family.adapter_component}
                self.transformer.load_lora_adapter(adapter.parent, **options)
            else:
                self.pipeline.load_lora_weights(adapter.parent, **options)
        except Exception as error:  # anything, for an adapter of another model
            if is_out_of_memory(error):
                raise
            message = f"{adapter} is not an adapter of this model: {first_line(error)}"
            raise InvalidInput(message, hint=hint) from error
        finally:
            for name, other in others.items():
                setattr(self.pipeline, name, other)
        if not getattr(self.transformer, "peft_config", None):
            bug = "this is a bug in autotune: please report it"
            raise AutotuneError(f"{adapter} could not be loaded back", hint=bug)


def _decode_apart(decode: Callable[..., Any], device: torch.device, *args: Any, **how: Any) -> Any:
    """Decode in a pool of its own: large tensors fit no hole between weights and latents."""
    torch.cuda.empty_cache()
    with torch.cuda.device(device), torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        return decode(*args, **how)


def _stop(*_: object, **__: object) -> None:
    raise _Reached


def _cache_key(preview: Preview, identity: EncoderIdentity) -> str:
    bucket = preview.bucket
    prompt = make_prompt_entry(preview.prompt, preview.control_paths, bucket, identity)
    return entry_key("preview", prompt=prompt.key, size=(bucket.width_px, bucket.height_px))


# The tensor that holds, as JSON in bytes, how an entry's other tensors nest.
STRUCTURE = "structure"


def _pack(encoded: list[Any]) -> dict[str, torch.Tensor]:
    leaves, structure = torch.utils._pytree.tree_flatten(encoded)
    tensors = {str(number): leaf for number, leaf in enumerate(leaves) if leaf is not None}
    text = json.dumps([len(leaves), torch.utils._pytree.treespec_dumps(structure)])
    return {**tensors, STRUCTURE: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def _unpack(tensors: dict[str, torch.Tensor]) -> list[Any]:
    count, structure = json.loads(bytes(tensors[STRUCTURE].tolist()))
    leaves = [tensors.get(str(number)) for number in range(count)]
    return torch.utils._pytree.tree_unflatten(leaves, torch.utils._pytree.treespec_loads(structure))  # type: ignore[no-any-return]
