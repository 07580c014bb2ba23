"""`compare`: the same job on several GPUs, and what the finished adapter would cost on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import Field, ValidationError

from autotune.api.doors import takes
from autotune.api.plans import complete, plan
from autotune.errors import InvalidInput, NothingFits
from autotune.events import Progressed, StatusChanged
from autotune.machine.catalog import CatalogGpu, gpu_named, load_catalog, profile_of_gpu
from autotune.models.family import Parts
from autotune.models.resolve import ResolvedModel, read_parts
from autotune.plan.amounts import memory_bytes
from autotune.plan.base import Frozen
from autotune.plan.file import TEXT_TAG, BoundedLoader
from autotune.plan.request import CompareRequest, PlanRequest
from autotune.system.files import read_bounded

if TYPE_CHECKING:
    from autotune.search.comparison import Comparison

MAX_PRICE_FILE_BYTES = 1 << 18
PRICE_HINT = "write `per_hour:`, and below it lines such as `rtx 4090: 0.45`"


class PriceList(Frozen):
    """What an hour of one GPU costs, by its name in the catalog or a part of it."""

    currency: str = Field(default="", max_length=8)
    date: str = Field(default="", max_length=32)
    """When the prices were looked up."""
    per_hour: dict[str, Annotated[float, Field(ge=0, le=1e6)]]


@takes(CompareRequest, "model", "data")
def compare(request: CompareRequest) -> Comparison:
    """Predict the same job on several GPUs of the catalog: settings, speed, hours and cost of the
    finished adapter.

    Hours and cost count everything from an empty machine on: download, search, loading, caching,
    steps, previews.

    Raises:
        InvalidInput: an argument, the model, the data or the prices cannot be used.

    Example:
        >>> found = autotune.compare("flux1-dev", prices={"4090": 0.4, "h100-sxm": 2.5}, num_steps=1000)
        >>> found.gpus[0].gpu, found.gpus[0].cost, found.gpus[0].hours_range
    """
    from autotune.search.comparison import ComparedGpu, Comparison, compared_gpu, select_gpus
    from autotune.search.request import ResolvedRequest

    asked = {name: v for name, v in request.given.items() if name in PlanRequest.model_fields}
    asked.pop("hardware", None)
    on_event, prices = request.on_event, request.prices
    gpus, found = _gpus(request.hardware), []
    price_of = _price_by_gpu(listed := _prices(prices), prices)
    on_event(StatusChanged(text="reading model and data"))
    resolved = ResolvedRequest.build(
        complete(PlanRequest(**asked, hardware="any")), needs_weights=False
    ).model
    download_seconds = _download_seconds(resolved, request.download_rate)
    for done, gpu in enumerate(gpus):
        on_event(Progressed(name="comparing", done=done, total=len(gpus)))
        try:
            made = plan(**asked, hardware=profile_of_gpu(gpu))
        except NothingFits as error:
            found.append(
                ComparedGpu(gpu=gpu.id, memory_gb=gpu.memory_nominal_gb, misfit=error.message)
            )
            continue
        found.append(
            compared_gpu(
                gpu, made, download_seconds=download_seconds, price_per_hour=price_of.get(gpu.id)
            )
        )
    on_event(Progressed(name="comparing", done=len(gpus), total=len(gpus)))
    selected = select_gpus(
        found, max_cost=request.max_cost, max_hours=request.max_hours, order=request.order
    )
    return Comparison(
        model=resolved.spec.name,
        gpus=selected,
        num_left_out=len(found) - len(selected),
        currency=listed.currency,
        priced=listed.date,
    )


def _download_seconds(model: ResolvedModel, rate: int | str) -> float:
    """Until the model's files are here; none if they are."""
    from autotune.search.comparison import download_bytes

    num_bytes_per_second = memory_bytes(rate)
    if num_bytes_per_second <= 0:
        raise InvalidInput(
            "nothing is downloaded at that rate", hint="give bytes a second, e.g. 100MB"
        )
    if model.folder is not None:
        return 0.0
    transformers = 1 + len(model.family.other_denoisers)
    return (
        download_bytes(transformers * model.spec.num_parameters, read_parts(model) or Parts())
        / num_bytes_per_second
    )


def _gpus(names: str | Sequence[str]) -> list[CatalogGpu]:
    given = [names] if isinstance(names, str) else names
    listed = [name.strip() for one in given for name in one.split(",") if name.strip()]
    if "all" in listed:
        return list(load_catalog())
    if not listed:
        raise InvalidInput("no GPU is named", hint="name some, e.g. 4090,5090, or all")
    return list({gpu.id: gpu for gpu in map(gpu_named, listed)}.values())


def _prices(prices: Mapping[str, float] | str | Path | None) -> PriceList:
    if prices is None or isinstance(prices, Mapping):
        return _price_list({"per_hour": dict(prices or {})}, "the prices")
    path = Path(prices)
    try:
        content = yaml.load(read_bounded(path, MAX_PRICE_FILE_BYTES), Loader=PriceLoader)
    except OSError as error:
        raise InvalidInput(
            f"{path}: {error.strerror or error}", hint="name a YAML file of prices"
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InvalidInput(
            f"{path} is not YAML that a list of prices may use: {reason}", hint=PRICE_HINT
        ) from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{path} holds no list of prices", hint=PRICE_HINT)
    return _price_list(content, str(path))


class PriceLoader(BoundedLoader):
    """A plan's loader that reads keys such as 4090 as the text that they stand for."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        for key, _ in node.value:
            key.tag = TEXT_TAG if isinstance(key, yaml.ScalarNode) else key.tag
        return super().construct_mapping(node, deep)


def _price_by_gpu(listed: PriceList, prices: object) -> dict[str, float]:
    """Prices by names of the catalog."""
    source = prices if isinstance(prices, str | Path) else "the prices"
    found: dict[str, float] = {}
    for name, price in listed.per_hour.items():
        try:
            gpu = gpu_named(name).id
        except InvalidInput as error:
            raise InvalidInput(f"{source}: {error.message}", hint=error.hint) from error
        if gpu in found:
            raise InvalidInput(
                f"{source}: {name!r} is a second price of {gpu}", hint="leave one of them out"
            )
        found[gpu] = price
    return found


def _price_list(content: object, of: str) -> PriceList:
    try:
        return PriceList.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InvalidInput(f"{of}: {where}: {first['msg'].lower()}", hint=PRICE_HINT) from error
