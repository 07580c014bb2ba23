"""Reads YAML files in which people list things, such as folders of data, as far as they hold data alone."""

import json
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import ValidationError

from autotune.errors import InvalidInput, first_line
from autotune.runtime import read_bounded
from autotune.schema.base import Frozen, first_problem
from autotune.schema.plan_file import BoundedLoader

MAX_FILE_BYTES = 1 << 20

T = TypeVar("T", bound=Frozen)


def read_listing(path: Path, kind: type[T], what: str, hint: str) -> T:
    """What a YAML file lists, which may be untrusted: errors call it `what`, e.g. `data folders`.

    Raises:
        InvalidInput: it cannot be read, or holds something else.
    """
    try:
        content = yaml.load(read_bounded(path, MAX_FILE_BYTES).decode(), Loader=BoundedLoader)
        return kind.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise InvalidInput(f"{path} lists no {what}: {': '.join(first_problem(error))}", hint=hint) from error
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InvalidInput(f"{path} lists no {what}: {reason}", hint=hint) from error
