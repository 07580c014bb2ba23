"""Reads YAML files in which people list things, such as folders of data, as far as they hold data alone."""

import json
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import ValidationError

from autotune.errors import InvalidInput
from autotune.runtime import read_bounded
from autotune.schema.base import Frozen
from autotune.schema.plan_file import BoundedLoader

MAX_FILE_BYTES = 1 << 20

T = TypeVar("T", bound=Frozen)


def read_listing(path: Path, kind: type[T], what: str, hint: str) -> T:
    """What a file lists.

    Args:
        path: a YAML file, which may be untrusted.
        kind: what it must hold.
        what: what an error says that it should list, e.g. `data folders`.
        hint: how an error says that it is written.

    Raises:
        InvalidInput: it cannot be read, or holds something else.
    """
    try:
        content = yaml.load(read_bounded(path, MAX_FILE_BYTES).decode(), Loader=BoundedLoader)
        return kind.model_validate_json(json.dumps(content))
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise InvalidInput(f"{path} lists no {what}: {_reason(error)}", hint=hint) from error


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return getattr(error, "strerror", None) or str(error).splitlines()[0]
