"""A model of the hub, brought to this machine whole and compared with the hub's checksums.

`autotune models` imports this module, so what talks to the hub is imported inside functions.
"""

from pathlib import Path

from autotune.errors import InvalidInput
from autotune.schema import Frozen, NaturalInt, OnEvent, StatusChanged, ignore_event


class FetchedModel(Frozen):
    """A model of the hub that is on this machine.

    Example:
        >>> model = autotune.fetch("qwen-image")
        >>> plan = autotune.plan(str(model.folder), "photos")
    """

    name: str
    """Hub id of the model."""
    family: str
    revision: str
    """Commit on the hub; `NAME@REVISION` means exactly these files."""
    folder: Path
    """Where the hub's cache keeps it."""
    size_bytes: int = NaturalInt
    num_verified: int | None
    """Number of files that have the hub's checksums; None if the hub was out of reach."""


def fetch(model: str, *, on_event: OnEvent = ignore_event) -> FetchedModel:
    """Download all files of a model that training needs, and compare them with the hub's checksums.

    Afterwards `plan` and `train` need no network. License, token and free disk space are checked
    first; files that arrived whole are not downloaded again.

    Args:
        model: a known name or a hub id, with `@REVISION` for a certain commit.
        on_event: listener to progress.

    Raises:
        InvalidInput: there is no such model, it is not on the hub, or its license is not accepted.
        AutotuneError: a file is damaged, the connection broke, or the disk has too little room; the
            message says what.

    Example:
        >>> autotune.fetch("qwen-image").folder
    """
    from autotune.families.resolve import fetch_model, is_on_hub
    from autotune.weights import verify

    if not is_on_hub(model):
        raise InvalidInput(
            f"{model} is on this machine: there is nothing to fetch", hint="name a model of the hub"
        )
    on_event(StatusChanged(text=f"fetching {model}"))
    found = fetch_model(model)
    if found.revision is None:  # neither known nor a repository's name
        raise InvalidInput(f"{model} is not on the hub", hint="name a model of the hub: owner/name")
    on_event(StatusChanged(text="comparing checksums"))
    files = [path for path in found.weights.rglob("*") if path.is_file()]
    return FetchedModel(
        name=found.spec.name,
        family=found.family.name,
        revision=found.revision,
        folder=found.weights,
        size_bytes=sum(path.stat().st_size for path in files),
        num_verified=verify(found.spec.name, found.weights),
    )
