"""How a function takes a request's fields as its keyword arguments."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from pydantic import ValidationError

from autotune.errors import InvalidInput, InvalidPlan, suggest_nearest
from autotune.plan.base import first_problem
from autotune.plan.job import JobFields

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


class Door(Protocol[P, R_co]):
    """A function whose first arguments may stand without their names."""

    __name__: str

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, first: Any, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, first: Any, second: Any, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def takes(request: Callable[P, T], *positional: str) -> Callable[[Callable[[T], R]], Door[P, R]]:
    """Make a function of a request one of the request's fields; mypy checks their types.

    Args:
        request: the class of the request.
        positional: fields whose values may stand first, without their names.
    """

    def decorate(run: Callable[[T], R]) -> Door[P, R]:
        @functools.wraps(run)
        def door(*args: Any, **kwargs: Any) -> R:
            if len(args) > len(positional):
                raise TypeError(f"{run.__name__} takes at most {len(positional)} unnamed arguments")
            return run(
                make_request(
                    request, run.__name__, {**dict(zip(positional, args, strict=False)), **kwargs}
                )
            )

        return door

    return decorate


def make_request(request: Any, function: str, values: dict[str, Any]) -> Any:
    """Return the request with these values; None is as if it were not given.

    Raises:
        InvalidInput: it has no such field, or a value is out of range.
        InvalidPlan: a value of the job is.
    """
    unknown = sorted(values.keys() - request.model_fields.keys())
    if unknown:
        raise InvalidInput(
            f"there is no argument of {function} {unknown[0]!r}",
            hint=suggest_nearest(unknown[0], request.model_fields),
        )
    try:
        return request(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        where, why = first_problem(error)
        if where.partition(".")[0] in JobFields.model_fields:
            hint = "give the job another value"
            raise InvalidPlan(f"job.{where}: {why.lower()}", hint=hint) from error
        raise InvalidInput(f"{where}: {why.lower()}", hint="give another value") from error
