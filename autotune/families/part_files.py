"""Where the VAE and the text encoders of a model in a single file are: in files of their own, in
it, or in its base.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune import weights
from autotune.errors import InvalidInput
from autotune.families.base import Family
from autotune.schema import TEXT_ENCODER
from autotune.weights import BadWeights, MissingWeights, WeightSource

OPTIONS = {"vae": ("--vae", "vae"), TEXT_ENCODER: ("--text-encoder", "text_encoders")}
"""By component: the option that names its file, and its folder below ComfyUI's `models`."""


def named_parts(file: Path, parts: Mapping[str, str]) -> dict[str, Path]:
    """Files and folders of what the user named beside a single `file`, see `model_reference`.

    Raises MissingWeights if one is absent.
    """
    given = {key: Path(os.path.expanduser(path)) for key, path in parts.items() if key != "base"}  # noqa: PTH111
    for key, path in given.items():
        if not path.exists():
            raise MissingWeights(
                f"{path} does not exist", hint=where_usually(file, key.rpartition("_")[0] or key)
            )
    return given


def find_parts(
    source: WeightSource, family: Family, given: Mapping[str, Path], folder: Path | None
) -> dict[str, Path]:
    """Files and folders of weights of VAE and text encoders, by component; those that are in the
    base are left out.

    Args:
        source: the file of the DiT or UNet, which may be a checkpoint that holds them too.
        given: from `named_parts`.
        folder: the base, whose configurations tell which of several text encoders a file is; None
            if it is not here.

    Raises InvalidInput or BadWeights if a file is no text encoder of the family.
    """
    found = {
        name: source.path
        for name in ("vae", *family.text_encoders)
        if weights.has_part(source, name)
    }
    encoders = [path for key, path in given.items() if key.startswith(TEXT_ENCODER)]
    names = family.text_encoders
    if len(encoders) > len(names):
        hint = f"give --text-encoder at most {len(names)} time(s)"
        raise InvalidInput(
            f"{family.name} has {len(names)} text encoder(s), not {len(encoders)}", hint=hint
        )
    found |= {"vae": given["vae"]} if "vae" in given else {}
    return found | (
        _assign(encoders, names, folder)
        if folder and len(names) > 1
        else dict(zip(names, encoders, strict=False))
    )


def _assign(files: Sequence[Path], names: Sequence[str], folder: Path) -> dict[str, Path]:
    """Each file with the text encoder that it suits."""
    found: dict[str, Path] = {}
    for path in files:
        fitting: list[str] = []
        refusals: list[BadWeights] = []
        for name in names:
            try:
                weights.check_part(folder, name, path)
            except BadWeights as error:
                refusals.append(error)
            else:
                fitting.append(name)
        if not fitting:
            raise refusals[0]
        free = [name for name in fitting if name not in found]
        if not free:
            raise InvalidInput(f"{path} is the same text encoder as another", hint="name each once")
        found[free[0]] = path
    return found


def where_usually(file: Path, name: str) -> str:
    """The option that names a component's file, and where such a file usually lies beside
    `file`, in ComfyUI.
    """
    option, place = OPTIONS["vae" if name == "vae" else TEXT_ENCODER]
    models = next(
        (parent for parent in file.absolute().parents if parent.name == "models"), Path("models")
    )
    return f"name its file: {option} FILE; in a ComfyUI folder it usually lies in {models / place}"
