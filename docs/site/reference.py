"""Writes docs/reference.md from the commands themselves: python docs/site/reference.py"""

from collections.abc import Iterator
from inspect import isfunction
from itertools import groupby
from pathlib import Path
from typing import Any, get_type_hints

import click
from pydantic import TypeAdapter

import autotune
from autotune import records
from autotune.cli.app import app
from autotune.cli.options import RequestCommand
from autotune.cli.output import JSON_VERSION
from autotune.plan.plan import FrozenPart
from autotune.report.plan import differences
from autotune.weights.tensors import inspect_weights

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"
INTRODUCTION = """# Commands and options

Every command with its options, as `--help` shows them; the page is generated from the program.
`autotune.plan` and the other functions of Python take the same under the names in the second
column. `--progress`, `--quiet` and `--verbose` may stand anywhere.

Tests have the program parse every command of these guides. They run few of them as they stand,
since most need a GPU, published weights or a network; the session of [Python](python.md) is run.
"""

RESULTS: dict[str, Any] = {
    "probe": autotune.probe,
    "probe --list": autotune.list_gpus,
    "doctor": autotune.doctor,
    "models": autotune.list_models,
    "fetch": autotune.fetch,
    "estimate": autotune.estimate,
    "compare": autotune.compare,
    "plan": autotune.plan,
    "check": autotune.check,
    "check --hardware": "`machines`, a CheckResult for each name",
    "explain": get_type_hints(FrozenPart)["reasons"],
    "diff": differences,
    "report": "`path`",
    "train": autotune.train,
    "sample": "`paths`",
    "demo": "`output`, `concept_fidelity`",
    "data check": autotune.check_data,
    "import-config": autotune.import_config,
    "export-config": autotune.export_config,
    "audit": autotune.audit,
    "bug-report": "texts by the names of files",
    "profiles push": records.push,
    "profiles pull": records.pull,
    "profiles submit": records.submit,
    "profiles list": records.list_records,
    "profiles prune": "`reasons`, `dry_run`",
    "profiles verify": "`num_records`, `bad`",
    "weights inspect": inspect_weights,
    "weights convert": "`path`",
}
"""What commands print as JSON: a type, a function that returns it, or fields without one."""
JSON = f"""## JSON

What `--json` prints is one object. Its `schema_version` is {JSON_VERSION}; it grows when a field
goes or means something else, not when one is added. Where a command answers with a list, its
entries are `items`. A command that fails prints `error`, `hint` and `exit_status`. A number that is
infinite or not a number is null.

| command | fields, or their type below |
|---|---|"""


def markdown() -> str:
    """The page."""
    return "\n".join([INTRODUCTION, *_lines(app, "autotune"), JSON, *_schemas(), ""])


def _schemas() -> Iterator[str]:
    types: dict[str, Any] = {}
    for command, made in RESULTS.items():
        kind = made
        if not isinstance(made, str):
            result = get_type_hints(made)["return"] if isfunction(made) else made
            printed = TypeAdapter(result)
            schema = printed.json_schema(mode="serialization", ref_template="{model}")
            types |= schema.pop("$defs", {})
            if "properties" in schema:
                types[schema["title"]] = schema
            kind = schema["title"] if "properties" in schema else f"`items`, {_type(schema)}"
        yield f"| `{command}` | {kind} |"
    for name, schema in sorted(types.items()):
        if "properties" in schema:
            yield from ("", f"### {name}", "", "| field | type | |", "|---|---|---|")
            for field, what in schema["properties"].items():
                yield f"| `{field}` | {_type(what)} | {_in_cell(what.get('description'))} |"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"])
    if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return " or ".join(f"`{value}`" for value in values)
    if members := schema.get("anyOf", schema.get("oneOf")):
        return " or ".join(dict.fromkeys(map(_type, members)))
    if schema.get("type") == "array":
        entries = schema.get("items", {"anyOf": schema.get("prefixItems", [{}])})
        return f"list of {_type(entries)}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"{_type(schema['additionalProperties'])} by name"
    return str(schema.get("type", "any"))


def _lines(command: click.Command, words: str) -> Iterator[str]:
    context = click.Context(command, info_name=words, show_default=True)
    usage = " ".join(command.collect_usage_pieces(context)).replace("[OPTIONS]", "")
    yield from (f"## {words}{usage}", "", _in_cell(command.help), "")
    parameters = [one for one in command.get_params(context) if "--help" not in one.opts]
    section = command.section if isinstance(command, RequestCommand) else lambda _: "Options"
    for title, members in groupby(parameters, section):
        is_python = title != "Options"
        yield f"| {title} |{' Python |' * is_python} value | default | |"
        yield f"|---|{'---|' * is_python}---|---|---|"
        yield from (_row(one, context, is_python=is_python) for one in members)
        yield ""
    for name, below in getattr(command, "commands", {}).items():
        yield from _lines(below, f"{words} {name}")


def _row(parameter: click.Parameter, context: click.Context, *, is_python: bool) -> str:
    cells = [f"`{parameter.name}`"] if is_python else []
    kind = parameter.make_metavar(context).replace("INTEGER", "INT").removesuffix(" RANGE")
    if isinstance(parameter, click.Argument):
        cells = [f"`{kind}`", *cells, "", ""]
    else:
        extra = parameter.get_help_extra(context)
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        told = [extra.get("default", ""), extra.get("required", "")]
        told += [f"`{name}`" for name in extra.get("envvars", ())]
        value = "" if parameter.is_flag else f"{kind} {extra.get('range', '')}".strip()
        cells = [names, *cells, value, " ".join(filter(None, told))]
    cells.append(parameter.help)
    return f"| {' | '.join(map(_in_cell, cells))} |"


def _in_cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(markdown())
