"""Fetch from the hub only the files of a pipeline that are needed, at a commit that a plan records.

`huggingface_hub` resumes a broken download within the same process; a new one begins the file anew.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path, PurePosixPath

import huggingface_hub
from huggingface_hub import errors
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from autotune.errors import first_line, require_free_disk
from autotune.weights import files

TEXT_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}  # small, and all are taken
WEIGHTLESS = ("scheduler", "tokenizer", "processor", "feature_extractor", "image_processor")

LOGIN = "run `hf auth login` with a token that may write, or set HF_TOKEN"

# The bases are the errors of its HTTP client, which varies between versions, and OSError.
UNREACHABLE: tuple[type[Exception], ...] = (
    errors.OfflineModeIsEnabled,
    *errors.HfHubHTTPError.__bases__,
)

# Errors of the hub, with the reason and the hint of ours; the first that matches counts.
REFUSALS: tuple[tuple[type[Exception], str, str], ...] = (
    (
        errors.GatedRepoError,  # before RepositoryNotFoundError, its base
        "its license has to be accepted first",
        "accept the license on the model's page on the hub, then run `hf auth login`",
    ),
    (
        errors.RepositoryNotFoundError,
        "there is no such repository, or it is private",
        "check the spelling, owner/name, or the path; for a private one run `hf auth login`",
    ),
    (
        errors.RevisionNotFoundError,
        "it has no revision {!r}",
        "name a branch, a tag or a commit of it",
    ),
    (
        errors.HFValidationError,
        "that is not a repository name",
        "write owner/name, or the path of a folder that exists",
    ),
)


def fetch(
    repo: str, *, revision: str = "main", components: Iterable[str], weights: bool = True
) -> Path:
    """Download `components` of a pipeline, and return its folder in the cache, named by the commit.
    If the hub is out of reach, a complete cache is enough. Without `weights` fetch only texts,
    enough to plan with. Raises BadWeights, or AutotuneError for a disk without room."""
    components = tuple(components)
    try:
        with _translate_refusals(repo, revision):
            info = huggingface_hub.HfApi().model_info(repo, revision=revision)
    except UNREACHABLE as error:
        if isinstance(error, errors.HfHubHTTPError):
            message = f"the hub did not answer for {repo}: {error}"
            raise files.HubError(message, hint="try again later") from error
        return _find_in_cache(repo, revision, components, weights=weights)
    names = [str(sibling.rfilename) for sibling in info.siblings or ()]
    wanted = list(select_files(names, components, weights=weights))
    try:
        # The hub describes a gated repository to everyone, and refuses its files.
        with _translate_refusals(repo, revision):
            if weights:
                huggingface_hub.HfApi().auth_check(repo)
                _require_room(repo, revision, wanted)
            return Path(
                huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=wanted)
            )
    except UNREACHABLE as error:
        first = str(error).splitlines()[0]
        is_disk_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        make_room = "free space, or set HF_HOME to a larger disk, and " if is_disk_full else ""
        hint = f"{make_room}run the same command again: complete files are not downloaded twice"
        raise files.HubError(f"the download of {repo} broke off: {first}", hint=hint) from error


def _require_room(repo: str, revision: str, names: list[str]) -> None:
    planned = huggingface_hub.snapshot_download(
        repo, revision=revision, allow_patterns=names, dry_run=True
    )
    needed_bytes = sum(file.file_size or 0 for file in planned if file.will_download)
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE).expanduser().absolute()
    folder = next(place for place in (cache, *cache.parents) if place.is_dir())
    hint = "free space, or set HF_HOME to a larger disk"
    require_free_disk(folder, needed_bytes, f"what is to be downloaded of {repo}", hint=hint)


def verify(repo: str, folder: Path) -> int | None:
    """Count the files in the cache's `folder` that have the hub's checksums; None out of reach.
    Deletes a damaged file and raises HubError, so that fetching again brings it anew."""
    try:
        with _translate_refusals(repo, folder.name):
            found = huggingface_hub.HfApi().verify_repo_checksums(repo, revision=folder.name)
    except UNREACHABLE:
        return None
    for damaged in found.mismatches:
        link = folder / damaged["path"]
        blob = Path(os.path.realpath(link))
        link.unlink()
        blob.unlink(missing_ok=True)
    if found.mismatches:
        first, more = found.mismatches[0]["path"], _and_more(len(found.mismatches))
        raise files.HubError(
            f"{first} of {repo}{more} did not have the hub's checksum",
            hint="it is deleted: run the same command again, which fetches it anew",
        )
    return found.checked_count


def _and_more(number: int) -> str:
    return f" and {number - 1} more" if number > 1 else ""


def select_files(
    names: Iterable[str], components: Iterable[str], *, weights: bool = True
) -> tuple[str, ...]:
    """Select the files that `components` need. Raises MissingWeights or PickledWeights."""
    present = sorted(set(names))
    selected = [name for name in present if name in files.PIPELINE_INDICES]
    for component in components:
        parent = PurePosixPath(component)
        own = [path for path in map(PurePosixPath, present) if path.parent == parent]
        if not own:
            folders = sorted({name.split("/")[0] for name in present if "/" in name})
            raise files.MissingWeights(
                f"the repository has no {component}/",
                hint=f"it has these folders: {', '.join(folders) or 'none'}",
            )
        texts = [path.name for path in own if path.suffix in TEXT_SUFFIXES]
        names = [name for name in texts if ".index." not in name]
        names += _select_weights([path.name for path in own], component) if weights else []
        selected += [f"{component}/{name}" for name in names]
    return tuple(selected)


def _select_weights(names: list[str], component: str) -> list[str]:
    for stem in files.STEMS:
        if f"{stem}.safetensors.index.json" in names:
            shard = re.compile(rf"{stem}-\d{{5}}-of-\d{{5}}\.safetensors")
            return [f"{stem}.safetensors.index.json", *filter(shard.fullmatch, names)]
        if f"{stem}.safetensors" in names:
            return [f"{stem}.safetensors"]
    variants = [name for name in names if name.endswith(".safetensors")]
    if len(variants) == 1:
        return variants
    if not variants and any(fnmatch(name, pattern) for name in names for pattern in files.PICKLES):
        raise files.PickledWeights(
            f"{component}/ has pickled weights only, which can run any code when read",
            hint="use another revision of the repository, one with .safetensors files",
        )
    if _is_weightless(component):
        return []
    there = ", ".join(variants) or "none"
    raise files.MissingWeights(
        f"{component}/ has no weights under a known name (safetensors there: {there})",
        hint="use another revision, or download by hand and name the folder",
    )


def _is_weightless(component: str) -> bool:
    return component.startswith(WEIGHTLESS) or component.endswith(WEIGHTLESS)


def snapshot_in_cache(
    repo: str, revision: str = "main", indices: Sequence[str] = files.PIPELINE_INDICES
) -> Path | None:
    """Find that revision's folder in the hub's cache, complete or not, without the network."""
    try:
        find = partial(huggingface_hub.try_to_load_from_cache, repo, revision=revision)
        found = list(map(find, indices))
    except errors.HFValidationError:
        return None
    return next((Path(index).parent for index in found if isinstance(index, str)), None)


def _find_in_cache(repo: str, revision: str, components: tuple[str, ...], *, weights: bool) -> Path:
    folder = snapshot_in_cache(repo, revision)
    if folder is None:
        raise files.MissingWeights(
            f"{' or '.join(files.PIPELINE_INDICES)} of {repo} at {revision} is not in the local "
            "cache, and the hub is out of reach",
            hint=f"go online once; if you meant a folder, there is none at {repo}",
        )
    if missing := missing_files(folder, components, weights=weights):
        raise files.MissingWeights(
            f"offline, and {missing[0]} of {repo} is not in the cache{_and_more(len(missing))}",
            hint="go online and run this again: complete files are not downloaded twice",
        )
    return folder


def missing_files(
    folder: Path, components: Iterable[str], *, weights: bool = True
) -> tuple[str, ...]:
    """List files that `components` need and that a pipeline's folder lacks; reads only indices."""
    missing = [] if files.find_index(folder).is_file() else [files.PIPELINE_INDICES[0]]
    for component in components:
        own = folder / component
        if _is_weightless(component):
            missing += [] if any(own.glob("*.json")) else [f"{component}/*.json"]
            continue
        missing += [] if (own / "config.json").is_file() else [f"{component}/config.json"]
        missing += [f"{component}/{name}" for name in _missing_weights(own)] if weights else []
    return tuple(missing)


def _missing_weights(folder: Path) -> list[str]:
    try:
        weights = files.find_weights(folder)
    except files.MissingWeights:
        return ["*.safetensors"]
    shards = set(files.read_index(weights).values()) if weights.suffix == ".json" else ()
    return [shard for shard in sorted(shards) if not (folder / shard).is_file()]


@contextmanager
def _translate_refusals(repo: str, revision: str) -> Iterator[None]:
    try:
        yield
    except tuple(kind for kind, _, _ in REFUSALS) as error:
        reason, hint = next(texts for kind, *texts in REFUSALS if isinstance(error, kind))
        what = f"{repo} cannot be fetched: {reason.format(revision)}"
        raise files.HubError(what, hint=hint) from error


def require_hub(repo: str) -> None:
    """Check before hours of training that an upload can work. Raises HubError as `upload`."""
    with _translate_errors(repo):
        validate_repo_id(repo)
        huggingface_hub.HfApi().whoami()


def upload(repo: str, paths: Mapping[str, Path]) -> str:
    """Write files by name in one commit, else raise HubError; return the (private) address."""
    add = huggingface_hub.CommitOperationAdd
    additions = [add(name, str(path)) for name, path in paths.items()]
    api = huggingface_hub.HfApi()
    with _translate_errors(repo):
        address = api.create_repo(repo, private=True, exist_ok=True)
        api.create_commit(repo, additions, commit_message="An adapter trained by autotune")
    return str(address)


@contextmanager
def _translate_errors(repo: str) -> Iterator[None]:
    try:
        if "/" not in repo:  # the hub would take it, and the card could not say how to load it
            raise errors.HFValidationError
        yield
    except errors.HFValidationError as error:
        raise files.HubError(
            f"{repo!r} is not a repository name", hint="write owner/name"
        ) from error
    except errors.LocalTokenNotFoundError as error:
        raise files.HubError("this machine has no token for the hub", hint=LOGIN) from error
    except errors.HfHubHTTPError as error:
        why = f"the hub refused {repo}: {first_line(error)}"
        raise files.HubError(why, hint=LOGIN) from error
    except UNREACHABLE as error:
        hint = "check the network, and that HF_HUB_OFFLINE is not set"
        raise files.HubError(f"the hub is out of reach: {first_line(error)}", hint=hint) from error
