"""Reads YAML files in which people list things, such as folders of data, as far as they hold
data alone."""

import json
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import ValidationError

from autotune.errors import InvalidInput, first_line
from autotune.plan.base import Frozen, first_problem
from autotune.plan.plan_file import BoundedLoader
from autotune.system.files import read_bounded

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
        problem = ": ".join(filter(None, first_problem(error)))
        raise InvalidInput(f"{path} lists no {what}: {problem}", hint=hint) from error
    except OSError as error:  # what to write into a file is no help where there is none
        reason = error.strerror or first_line(error)
        raise InvalidInput(
            f"cannot read {path}, which should list {what}: {reason}", hint="check the path"
        ) from error
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise InvalidInput(f"{path} lists no {what}: {first_line(error)}", hint=hint) from error
