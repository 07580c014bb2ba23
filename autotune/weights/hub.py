"""Fetch a pipeline from the hub: only the files that are needed, at a commit that can be written into a plan.

`huggingface_hub` downloads, caches and shows progress. A download whose connection broke is resumed within the same
process; a new process begins that file anew, because each download has a temporary file of its own (2.4).
Here is only the choice of files, and errors that say what to do.
"""

import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from autotune.weights.errors import HubError, MissingWeights, PickledWeights
from autotune.weights.sources import PICKLES, PIPELINE_INDEX, STEMS, read_index, weights_in

TEXT_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
"""Configurations, vocabularies and chat templates: small, and what belongs to a component is not known beforehand."""

WEIGHTLESS = ("scheduler", "tokenizer", "processor", "feature_extractor", "image_processor")
"""Component folders, by the beginning or end of their names, that hold no weights."""


def fetch(repo: str, *, revision: str = "main", components: Iterable[str], weights: bool = True) -> Path:
    """Bring `components` (folders such as `transformer`, `vae`, `tokenizer`) of a pipeline into the hub's cache.

    Returns the pipeline's folder there, whose name is the commit, 40 hexadecimal digits: what a plan records.
    Without `weights` only configurations and tokenizers come: some megabytes, enough to plan with.

    Out of reach of the hub, or with HF_HUB_OFFLINE=1, what is in the cache is used if it is complete.

    Raises:
        HubError: no such repository or revision, or its license has not been accepted.
        MissingWeights: a component is not in the repository, or offline a file is not in the cache: it says which.
        PickledWeights: a component has pickled weights only.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    wanted = tuple(components)
    # The bases are its HTTP client's error and OSError: which client that is varies between versions.
    unreachable: tuple[type[Exception], ...] = (OfflineModeIsEnabled, *HfHubHTTPError.__bases__)
    try:
        with _explained(repo, revision):
            info = HfApi().model_info(repo, revision=revision)
    except unreachable as error:
        if isinstance(error, HfHubHTTPError):
            raise HubError(f"the hub did not answer for {repo}: {error}", hint="try again later") from error
        return _from_cache(repo, revision, wanted, weights=weights)
    files = needed_files([str(sibling.rfilename) for sibling in info.siblings or ()], wanted, weights=weights)
    try:
        with _explained(repo, revision):  # the hub describes a gated repository to everyone, and refuses its files
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=list(files)))
    except unreachable as error:
        first = str(error).splitlines()[0]
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        room = "free space, or set HF_HOME to a larger disk, and " if full else ""
        hint = f"{room}run the same command again: files that have come whole are kept"
        raise HubError(f"the download of {repo} broke off: {first}", hint=hint) from error
    return folder


def needed_files(files: Iterable[str], components: Iterable[str], *, weights: bool = True) -> tuple[str, ...]:
    """Of a repository's files, those that `components` need: no second precision, no pickles, no pictures. Pure.

    Raises MissingWeights for a component that is not there, PickledWeights for one with pickled weights only.
    """
    present = sorted(set(files))
    chosen = [name for name in present if name == PIPELINE_INDEX]
    for component in components:
        own = [name for name in present if PurePosixPath(name).parent.name == component and name.count("/") == 1]
        if not own:
            folders = ", ".join(sorted({name.split("/")[0] for name in present if "/" in name})) or "none"
            raise MissingWeights(f"the repository has no {component}/", hint=f"it has these folders: {folders}")
        chosen += [name for name in own if PurePosixPath(name).suffix in TEXT_SUFFIXES and ".index." not in name]
        chosen += _weights_of(own, component) if weights else []
    return tuple(chosen)


def _weights_of(own: list[str], component: str) -> list[str]:
    """The plain precision where there is one; whole files before shards would be a second copy, so one kind only."""
    names = {PurePosixPath(name).name: name for name in own}
    for stem in STEMS:
        if f"{stem}.safetensors.index.json" in names:
            shards = [name for short, name in names.items() if _is_shard(short, stem)]
            return [names[f"{stem}.safetensors.index.json"], *shards]
        if f"{stem}.safetensors" in names:
            return [names[f"{stem}.safetensors"]]
    variants = [name for name in own if name.endswith(".safetensors")]
    if len(variants) == 1:
        return variants
    if not variants and any(PurePosixPath(name).match(pattern) for name in own for pattern in PICKLES):
        hint = "use another revision of the repository, one with .safetensors files"
        raise PickledWeights(f"{component}/ has pickled weights only, which can run any code when read", hint=hint)
    if _has_no_weights(component):
        return []
    found = ", ".join(PurePosixPath(name).name for name in variants) or "none"
    message = f"{component}/ has no weights under a known name (safetensors there: {found})"
    raise MissingWeights(message, hint="use another revision, or download by hand and name the folder")


def _is_shard(short: str, stem: str) -> bool:
    return re.fullmatch(rf"{stem}-\d{{5}}-of-\d{{5}}\.safetensors", short) is not None


def _has_no_weights(component: str) -> bool:
    return component.startswith(WEIGHTLESS) or component.endswith(WEIGHTLESS)


def snapshot_in_cache(repo: str, revision: str = "main") -> Path | None:
    """The folder of that revision in the hub's cache, complete or not; asks no network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        index = try_to_load_from_cache(repo, PIPELINE_INDEX, revision=revision)
    except HFValidationError:
        return None
    return Path(index).parent if isinstance(index, str) else None


def _from_cache(repo: str, revision: str, components: tuple[str, ...], *, weights: bool) -> Path:
    hint = "go online and run this again: what is there already is not fetched twice"
    folder = snapshot_in_cache(repo, revision)
    if folder is None:
        message = f"{PIPELINE_INDEX} of {repo} at {revision} is not in the local cache, and the hub is out of reach"
        raise MissingWeights(message, hint=f"if a folder was meant, there is none at {repo}; else go online once")
    missing = missing_files(folder, components, weights=weights)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise MissingWeights(f"offline, and {missing[0]} of {repo} is not in the cache{more}", hint=hint)
    return folder


def missing_files(folder: Path, components: Iterable[str], *, weights: bool = True) -> tuple[str, ...]:
    """Files that a pipeline's folder should have for `components` but has not. Reads only indices."""
    missing = [] if (folder / PIPELINE_INDEX).is_file() else [PIPELINE_INDEX]
    for component in components:
        place = folder / component
        if _has_no_weights(component):
            missing += [] if any(place.glob("*.json")) else [f"{component}/*.json"]
            continue
        missing += [] if (place / "config.json").is_file() else [f"{component}/config.json"]
        missing += [f"{component}/{name}" for name in _missing_weights(place)] if weights else []
    return tuple(missing)


def _missing_weights(place: Path) -> list[str]:
    try:
        weights = weights_in(place)
    except MissingWeights:
        return ["*.safetensors"]
    shards = set(read_index(weights).values()) if weights.suffix == ".json" else ()
    return [shard for shard in sorted(shards) if not (place / shard).is_file()]


@contextmanager
def _explained(repo: str, revision: str) -> Iterator[None]:
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def told(what: str, hint: str) -> HubError:
        return HubError(f"{repo} cannot be fetched: {what}", hint=hint)

    try:
        yield
    except GatedRepoError as error:  # before its parent, RepositoryNotFoundError
        hint = "accept the license on the model's page on the hub, then run `hf auth login`"
        raise told("its license has to be accepted first", hint) from error
    except RepositoryNotFoundError as error:
        hint = "check the spelling, owner/name, or the folder's path; for a private repository run `hf auth login`"
        raise told("there is no such repository, or it is private", hint) from error
    except RevisionNotFoundError as error:
        raise told(f"it has no revision {revision!r}", "name a branch, a tag or a commit of it") from error
    except HFValidationError as error:
        raise told("that is no repository's name", "write owner/name, or the path of a folder that exists") from error
