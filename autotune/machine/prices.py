"""What an hour of a GPU costs, as a user's file says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from autotune.errors import InvalidInput
from autotune.machine.catalog import gpu_named
from autotune.plan.base import Frozen, first_problem
from autotune.plan.file import TEXT_TAG, BoundedLoader
from autotune.system.files import read_bounded

MAX_PRICE_FILE_BYTES = 1 << 18
PRICE_HINT = "write `per_hour:`, and below it lines such as `rtx 4090: 0.45`"


class PriceList(Frozen):
    """The price of an hour of each GPU, by its name in the catalog."""

    currency: str = Field(default="", max_length=8)
    date: str = Field(default="", max_length=32)
    """When the prices were looked up."""
    per_hour: dict[str, Annotated[float, Field(ge=0, le=1e6)]]


class _Loader(BoundedLoader):
    """A plan's loader that reads keys such as 4090 as the text that they stand for."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        for key, _ in node.value:
            key.tag = TEXT_TAG if isinstance(key, yaml.ScalarNode) else key.tag
        return super().construct_mapping(node, deep)


def read_prices(prices: Mapping[str, float] | str | Path | None) -> PriceList:
    """Read prices from a file or a mapping; names may be a part of those in the catalog.

    Raises:
        InvalidInput: they cannot be read, or name no GPU, or one twice.
    """
    if prices is None or isinstance(prices, Mapping):
        source = "the prices"
        content: object = {"per_hour": dict(prices or {})}
    else:
        source, content = str(prices), _read_yaml(Path(prices))
    try:
        listed = PriceList.model_validate(content)
    except ValidationError as error:
        where, why = first_problem(error)
        raise InvalidInput(f"{source}: {where or 'the file'}: {why}", hint=PRICE_HINT) from error
    by_gpu: dict[str, float] = {}
    for name, price in listed.per_hour.items():
        try:
            gpu = gpu_named(name).id
        except InvalidInput as error:
            raise InvalidInput(f"{source}: {error.message}", hint=error.hint) from error
        if gpu in by_gpu:
            raise InvalidInput(
                f"{source}: {name!r} is a second price of {gpu}", hint="leave one of them out"
            )
        by_gpu[gpu] = price
    return listed.changed(per_hour=by_gpu)


def _read_yaml(path: Path) -> object:
    try:
        return yaml.load(read_bounded(path, MAX_PRICE_FILE_BYTES), Loader=_Loader)
    except OSError as error:
        raise InvalidInput(
            f"{path}: {error.strerror or error}", hint="name a YAML file of prices"
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InvalidInput(
            f"{path} is not YAML that a list of prices may use: {reason}", hint=PRICE_HINT
        ) from error
