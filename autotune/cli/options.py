"""Commands whose options are the fields of a request: their types, bounds, defaults and texts."""

from __future__ import annotations

import ast
import re
from functools import cached_property
from inspect import get_annotations
from itertools import groupby
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from autotune.plan.base import Option, Request

GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
INSTEAD = {"num_train_epochs": "num_steps", "checkpointing_epochs": "checkpointing_steps"}
"""Fields that cannot be given together."""
INTERRUPTED = 130  # exit status after Ctrl-C


class Command(click.Command):
    """A command whose whole first paragraph is shown in a list of commands."""

    def get_short_help_str(self, limit: int = 0) -> str:
        return " ".join((self.help or "").partition("\n\n")[0].split())


class Commands(click.Group):
    """Commands in the order in which they were added; Ctrl-C ends one with its own status."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise click.exceptions.Exit(INTERRUPTED) from error


class RequestCommand(Command):
    """A command that asks for the fields of a request, which is imported when it is called.

    Its function gets `asked`: the values that were given, by the names of their fields.
    """

    def __init__(self, *args: Any, request: str, **how: Any) -> None:
        super().__init__(*args, **how)
        self.request_name = request

    @cached_property
    def request(self) -> type[Request]:
        from autotune.plan import request

        kind: type[Request] = getattr(request, self.request_name)
        return kind

    @cached_property
    def fields(self) -> dict[str, click.Parameter]:
        from autotune.plan.base import Option

        parameters = {}
        fields = self.request.model_fields
        bases = [*reversed(self.request.__mro__)]
        for name in sorted(fields, key=lambda name: bases.index(self._owner(name))):
            field = fields[name]
            spelled = next((one for one in field.metadata if isinstance(one, Option)), Option())
            if not spelled.is_hidden:
                parameters[name] = _parameter(name, field, spelled)
        return parameters

    def _owner(self, name: str) -> type:
        return next(c for c in self.request.__mro__ if name in get_annotations(c))

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*self.fields.values(), *super().get_params(ctx)]

    def invoke(self, ctx: click.Context) -> Any:
        from pydantic import ValidationError

        from autotune.plan.base import told

        values = [(name, ctx.params.pop(name)) for name in self.fields]
        asked = {name: value for name, value in values if ctx.get_parameter_source(name) in GIVEN}
        for name, other in INSTEAD.items():
            if {name, other} <= asked.keys():
                raise click.BadParameter("epochs take the place of steps", ctx, self.fields[name])
        try:
            self.request(**asked)
        except ValidationError as error:
            wrong = str(error.errors()[0]["loc"][0])
            texts = [told(one) for one in error.errors() if one["loc"][0] == wrong]
            raise click.BadParameter(" or ".join(texts), ctx, self.fields[wrong]) from error
        ctx.params["asked"] = asked
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under the classes of the request that declare them."""
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        for title, members in groupby(options, self.section):
            with formatter.section(title):
                records = (one.get_help_record(ctx) for one in members)
                formatter.write_dl([*filter(None, records)])

    def section(self, parameter: click.Parameter) -> str:
        """Return the title under which the help shows an option."""
        if parameter.name not in self.fields:
            return "Options"
        words = re.sub("Fields|Request", "", self._owner(parameter.name).__name__)
        return re.sub("(?<=[a-z])(?=[A-Z])", " ", words).capitalize() + " options"


def _parameter(name: str, field: FieldInfo, spelled: Option) -> click.Parameter:
    from autotune.plan.words import TITLES

    flag = spelled.flag or "--" + name.replace("_", "-")
    text = " ".join((field.description or "").split())
    if (title := TITLES.get(name, name)) not in (name, *text.split()) and title not in text:
        text = f"{text.removesuffix('.')} ({title})."
    kinds = _members(field.annotation)
    how: dict[str, Any] = {"metavar": spelled.metavar or None}
    is_many = any(get_args(kind)[-1:] == (...,) for kind in kinds)
    if not flag.startswith("-"):
        required, shown = spelled.is_required, flag + "..." * is_many
        how = {"required": required, "metavar": shown if required else f"[{shown}]"}
        return click.Argument([name], nargs=-1 if is_many else 1, help=text, **how)
    if kinds == [bool]:
        how["is_flag"] = True
    elif "=" in spelled.metavar:
        how["type"] = _named_value
    elif not spelled.metavar and kinds[0] in (int, float) and len(kinds) == 1:
        how |= {"type": _range(kinds[0], field), "metavar": kinds[0].__name__.upper()}
    elif len(kinds) == 1 and get_origin(kinds[0]) is Literal:
        how["type"] = click.Choice(get_args(kinds[0]))
    elif str not in kinds and {int, float} & set(kinds):
        how["type"] = _literal
    default = field.default
    if not is_many and default not in (None, "") and default is not False and "default" not in text:
        how["default"] = default
    return click.Option(
        [name, *filter(None, [spelled.short]), flag],
        help=text.removesuffix(".") + "; repeat for more." if is_many else text,
        multiple=is_many,
        required=spelled.is_required,
        envvar=spelled.envvar or None,
        show_envvar=True,
        **how,
    )


def _members(kind: Any) -> list[Any]:
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [one for part in get_args(kind) for one in _members(part)]
    return [] if kind is NoneType else [kind]


def _range(kind: type, field: FieldInfo) -> click.ParamType[Any]:
    bounds = {
        name: getattr(limit, name)
        for limit in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if hasattr(limit, name)
    }
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    made = click.IntRange if kind is int else click.FloatRange
    return made(low, high, min_open="gt" in bounds, max_open="lt" in bounds)


def _literal(text: str) -> Any:
    try:
        value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
        return tuple(map(float, value)) if isinstance(value, (list, tuple)) else value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _named_value(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise click.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, _literal(value)
