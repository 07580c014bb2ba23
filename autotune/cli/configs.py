"""Configurations of other trainers: `autotune import-config`, `export-config` and `audit`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

import autotune
from autotune.cli.options import Json, PlanFile
from autotune.cli.output import print_out, print_remark, print_result, show_events

ConfigFile = Annotated[
    Path, typer.Argument(help="A configuration of another trainer.", metavar="FILE")
]
Hardware = Annotated[
    str | None, typer.Option(help="Plan for this GPU, e.g. 4090 (see probe --list).")
]


def import_config(
    config_file: ConfigFile,
    path: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Make a plan with the file's settings, and write it here."
        ),
    ] = None,
    hardware: Hardware = None,
    as_json: Json = False,
) -> None:
    """Read a configuration of ai-toolkit, musubi, SimpleTuner, sd-scripts, OneTrainer or diffusers'
    scripts.

    Lists what carries over, what becomes a pin, what autotune decides by itself, and what does not
    carry over.
    """
    from autotune.report.configs import import_lines

    config = autotune.import_config(config_file)
    print_result(config, as_json, import_lines)
    if path is None:
        return
    options: dict[str, object] = {"path": path}
    if hardware is not None:
        options["hardware"] = hardware
    with show_events() as show:
        made = autotune.plan_from_config(config, on_event=show, **options)
    for remark in made.remarks:
        print_remark(f"note: {remark}")
    print_remark(f"written to {path}; train it with: autotune train {shlex.quote(str(path))}")


def export_config(
    plan_file: PlanFile,
    to: Annotated[
        str,
        typer.Option(
            help="ai-toolkit, musubi, simpletuner, diffusers, sd-scripts, onetrainer.",
            metavar="TRAINER",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write the files to.")],
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse if learning or memory would differ.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files that are there.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a plan as another trainer's configuration, data sets and starting script."""
    from autotune.report.configs import export_lines

    exported = autotune.export_config(plan_file, to, output, strict=strict, overwrite=overwrite)
    print_result(exported, as_json, export_lines)


def audit(
    config_file: ConfigFile,
    hardware: Hardware = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Also run a few steps of both on this machine; needs the model's files.",
        ),
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, to post.")] = False,
    as_json: Json = False,
) -> None:
    """Predict another trainer's file on a card: memory, time, whether it fits, and what other
    settings would gain."""
    from autotune.report.configs import audit_lines, audit_markdown

    with show_events() as show:
        found = autotune.audit(config_file, hardware=hardware, measure=measure, on_event=show)
    if markdown:
        print_out(audit_markdown(found), markup=False, highlight=False, soft_wrap=True)
        return
    print_result(found, as_json, audit_lines)
