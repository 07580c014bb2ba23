"""Who encodes: recognises the text encoder and the VAE of a model folder, so that caches of others are never used."""

import hashlib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from autotune.families.base import Family


@dataclass(frozen=True)
class Identity:
    """What encodes, as far as it decides the result: way of encoding, weights, precision, library versions."""

    text_encoder: str
    vae: str


WEIGHT_SAMPLE_BYTES = 1024**2
"""Read from each end of a large file to recognise it: hashing a 16 GB text encoder would cost half a minute."""


def read_identity(model_folder: Path, family: Family, *, settings: str, text_settings: str = "") -> Identity:
    """What encodes, from the files of a pipeline in the diffusers layout.

    Args:
        model_folder: holds `model_index.json` and a folder per component.
        family: its way to encode is part of the identity.
        settings: dtype of the encoders, e.g. `bfloat16`.
        text_settings: what else decides the values of the text encoder's output, e.g. its quantisation.
    """
    base = f"{family.name} {settings} diffusers {version('diffusers')}"
    vae = _components_digest(model_folder, ("vae",))
    text = _components_digest(model_folder, ("text_encoder", "tokenizer", "processor"))
    encoder = f"{base} transformers {version('transformers')} {text} {text_settings}".rstrip()
    return Identity(text_encoder=encoder, vae=f"{base} {vae}")


def _components_digest(model_folder: Path, prefixes: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(model_folder.glob("*/**/*")):
        name = path.relative_to(model_folder).as_posix()
        if name.startswith(prefixes) and path.is_file():
            size = path.stat().st_size
            digest.update(f"{name} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(WEIGHT_SAMPLE_BYTES))
                file.seek(max(0, size - WEIGHT_SAMPLE_BYTES))
                digest.update(file.read())
    return digest.hexdigest()
