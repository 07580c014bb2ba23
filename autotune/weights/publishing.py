"""Put the files of a trained adapter into a repository on the hub."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from autotune.errors import first_line
from autotune.weights.files import HubError
from autotune.weights.hub import UNREACHABLE

LOGIN = "run `hf auth login` with a token that may write, or set HF_TOKEN"


def require_hub(repo: str) -> None:
    """Check that an upload can work, before hours of training.

    Raises:
        HubError: the name cannot be one, there is no token, or the hub does not know it.
    """
    with _translate_errors(repo):
        validate_repo_id(repo)
        huggingface_hub.HfApi().whoami()


def upload(repo: str, files: Mapping[str, Path]) -> str:
    """Write all files in one commit, under the names that are their keys, and return the
    repository's address. A repository that does not exist is made, and is private.

    Raises:
        HubError: there is no token, it may not write there, or the hub is out of reach.
    """
    additions = [
        huggingface_hub.CommitOperationAdd(name, str(path)) for name, path in files.items()
    ]
    api = huggingface_hub.HfApi()
    with _translate_errors(repo):
        address = api.create_repo(repo, private=True, exist_ok=True)
        api.create_commit(repo, additions, commit_message="An adapter trained by autotune")
    return str(address)


@contextmanager
def _translate_errors(repo: str) -> Iterator[None]:
    try:
        if "/" not in repo:  # the hub would take it, and the card could not say how to load it
            raise HFValidationError
        yield
    except HFValidationError as error:
        raise HubError(f"{repo!r} is not a repository name", hint="write owner/name") from error
    except LocalTokenNotFoundError as error:
        raise HubError("this machine has no token for the hub", hint=LOGIN) from error
    except HfHubHTTPError as error:
        why = f"the hub refused {repo}: {first_line(error)}"
        raise HubError(why, hint=LOGIN) from error
    except UNREACHABLE as error:
        hint = "check the network, and that HF_HUB_OFFLINE is not set"
        raise HubError(f"the hub is out of reach: {first_line(error)}", hint=hint) from error
