"""A vision-language model of this machine that says what a picture shows: nothing is downloaded."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from autotune.data import captions, pixels
from autotune.errors import InvalidInput, NothingFits, first_line
from autotune.events import Notice, OnEvent, Progressed, StatusChanged
from autotune.machine.sources import available_bytes
from autotune.models import latents, registry
from autotune.system.process import silence_progress_bars
from autotune.weights.files import PIPELINE_INDICES, open_weights, read_config
from autotune.weights.hub import snapshot_in_cache

PROMPT = (
    "Describe this picture in one or two plain sentences: first its subject and what it does, then "
    "colors, surroundings and style. Do not guess what cannot be seen."
)
MAX_AREA_PX = 1024 * 1024  # of a picture that the model sees
MAX_TEXT_TOKENS = 512  # of the prompt, and of the caption
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # whose stock processors need torchvision
Describe = Callable[[Image.Image, str], str]
QWEN_CHAT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def find_describer(
    name: str, num_images: int, on_event: OnEvent
) -> Callable[[str | None], Callable[[captions.Captioned], str]]:
    """Find a model that describes images, tell what it takes, and return a function that loads it.
    Raises InvalidInput if it is not on this machine, NothingFits for short memory."""
    found = Describer.find(name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    with _reraise_damage(name):
        needed = found.weights_bytes + found.work_bytes
    sizes = [f"{size / 2**30:.1f} GiB" for size in (needed, found.weights_bytes, free)]
    text = f"{name} needs about {sizes[0]} ({sizes[1]} of weights) of {sizes[2]} that are free"
    if needed > free:
        raise NothingFits(text, hint="close other programs, or name a smaller model")
    on_event(Notice(text=f"{num_images} images to caption on the {device.type}; {text}"))

    def load(prompt: str | None) -> Callable[[captions.Captioned], str]:
        on_event(StatusChanged(text=f"loading {name}"))
        silence_progress_bars()
        with _reraise_damage(name):
            describe, number = found.load(device), count()

        def write(one: captions.Captioned) -> str:
            on_event(Progressed(name="captions", done=next(number), total=num_images))
            return describe(pixels.to_rgb(pixels.open_image(one.media.path)), prompt or PROMPT)

        return write

    return load


@contextlib.contextmanager
def _reraise_damage(name: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        message = f"the files of {name} are not those of a whole model: {first_line(error)}"
        raise InvalidInput(message, hint="fetch it again, or name another model") from error


@dataclass(frozen=True)
class Describer:
    """A model that describes pictures, by its folder; of a pipeline, its text encoder is meant."""

    name: str
    folder: Path
    config: dict[str, Any]

    @classmethod
    def find(cls, name: str) -> "Describer":
        """Find a known pipeline, a folder or a hub id on this machine. Raises InvalidInput if it is
        not there, or describes no pictures."""
        from transformers.models.auto import modeling_auto

        folder = Path(name).expanduser()
        if not folder.is_dir():
            published = registry.find_published(name)
            repo, fetch = name, f"hf download {name}"
            if published is not None:
                repo, fetch = published[1].hub_id, f"autotune fetch --model {name}"
            found = snapshot_in_cache(repo, indices=(*PIPELINE_INDICES, "config.json"))
            if found is None:
                why = f"{name} is not on this machine, and nothing is downloaded for captions"
                raise InvalidInput(why, hint=f"name a folder, or fetch it first: {fetch}")
            folder = found
        encoder = folder / "text_encoder" if (folder / "text_encoder").is_dir() else folder
        config = read_config(encoder / "config.json")
        kind = str(config.get("model_type"))
        if kind not in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            raise InvalidInput(
                f"{name} describes no pictures: it is a {kind}",
                hint="name a pipeline with Qwen2.5-VL or Qwen3-VL (qwen-image, qwen-image-2.1), or "
                "a folder of an image-to-text model",
            )
        return cls(name, encoder, config)

    @cached_property
    def weights_bytes(self) -> int:
        """Size of all weights, as they are stored."""
        return sum(entry.size_bytes for _, entry in open_weights(self.folder).locations.values())

    @cached_property
    def work_bytes(self) -> int:
        """About the most that a picture takes besides the weights: what a layer computes, the keys
        and values of all, and logits. Attention is counted as kernels that keep no scores."""
        text = self.config.get("text_config", self.config)
        vision = self.config.get("vision_config", {})
        width, layers = text.get("hidden_size", 4096), text.get("num_hidden_layers", 32)
        heads = text.get("num_attention_heads", 32)
        keys = 2 * layers * width * text.get("num_key_value_heads", heads) // heads
        patch = vision.get("patch_size", 14)
        patches = MAX_AREA_PX // patch**2
        tokens = patches // vision.get("spatial_merge_size", 1) ** 2 + MAX_TEXT_TOKENS
        layer = 6 * width + 3 * text.get("intermediate_size", 4 * width)
        seen_width = vision.get("hidden_size", 1280)
        seen = 8 * seen_width + 3 * vision.get("intermediate_size", 4 * seen_width)
        values = tokens * keys + max(tokens * layer, patches * (seen + 6 * patch**2))
        return int(2 * values + 8 * text.get("vocab_size", 32_000))

    def load(self, device: torch.device) -> Describe:
        """Load it, and return a function that says in one line what a picture shows. It takes the
        likeliest words, so the line is always the same."""
        from transformers import AutoModelForImageTextToText, AutoProcessor

        local = {"local_files_only": True, "trust_remote_code": False}
        model, report = AutoModelForImageTextToText.from_pretrained(
            self.folder, dtype="auto", device_map={"": device}, output_loading_info=True, **local
        )
        if report["missing_keys"]:
            what = f"{self.name} lacks weights that write text: {min(report['missing_keys'])}"
            raise InvalidInput(what, hint="name one whose text encoder is whole, as qwen-image's")
        is_qwen = self.config["model_type"] in QWEN
        stock = AutoProcessor.from_pretrained
        processor = self._qwen_processor() if is_qwen else stock(self.folder, **local)
        limits: dict[str, Any] = {"max_new_tokens": MAX_TEXT_TOKENS // 2, "do_sample": False}
        if is_qwen:
            end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
            limits |= dict.fromkeys(("eos_token_id", "pad_token_id"), end)

        @torch.inference_mode()
        def describe(picture: Image.Image, prompt: str) -> str:
            texts: dict[str, Any] = {}
            if is_qwen:
                texts = {"text": [QWEN_CHAT.format(prompt)]}
            elif getattr(processor, "chat_template", None):
                parts = [{"type": "image"}, {"type": "text", "text": prompt}]
                chat = [{"role": "user", "content": parts}]
                texts = {"text": [processor.apply_chat_template(chat, add_generation_prompt=True)]}
            given = processor(images=[picture], return_tensors="pt", **texts).to(model.device)
            given["pixel_values"] = given["pixel_values"].to(model.dtype)
            made = model.generate(**given, **limits)
            start = given["input_ids"].shape[1] if texts else 0
            (text,) = processor.tokenizer.batch_decode(made[:, start:], skip_special_tokens=True)
            return " ".join("".join(c if c.isprintable() else " " for c in text).split())

        return describe

    def _qwen_processor(self) -> Any:
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pictures

        vision, is_third = self.config["vision_config"], self.config["model_type"] == "qwen3_vl"
        normal = dict.fromkeys(("image_mean", "image_std"), [0.5] * 3) if is_third else {}
        processor = pictures.Qwen2VLImageProcessorPil(
            patch_size=vision["patch_size"], merge_size=vision["spatial_merge_size"],
            temporal_patch_size=vision["temporal_patch_size"], **normal,
            size={"shortest_edge": 56 * 56, "longest_edge": MAX_AREA_PX},
        )  # fmt: skip
        beside = [self.folder, self.folder.parent / "processor", self.folder.parent / "tokenizer"]
        (place, *_) = [each for each in beside if (each / "tokenizer_config.json").is_file()]
        kind = latents.image_processor("Qwen3VLProcessor" if is_third else "Qwen2VLProcessor")
        return kind(processor, latents.load_tokenizer(place, "."))
