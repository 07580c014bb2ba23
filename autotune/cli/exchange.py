"""Commands about what others read and write: configurations, measurements, weight files."""

import shlex
from functools import partial
from pathlib import Path

import click
from click.exceptions import Exit

import autotune
from autotune.cli.commands import JSON, OUTPUT, PATH, PLAN, app
from autotune.cli.options import Commands
from autotune.cli.output import Progress, print_remark, print_result, run_shown

CONFIG = click.argument(
    "config_file", type=PATH, metavar="FILE", help="A configuration of another trainer."
)
HARDWARE = click.option("--hardware", help="Plan for this GPU, e.g. 4090 (see probe --list).")
URL = click.argument("url", metavar="URL", help="A folder, a git checkout, s3://bucket/path ...")
OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace existing files.")
STORE = click.option("--store", metavar="URL", help="A store other than your own.")


@app.command()
@CONFIG
@OUTPUT(help="Make a plan with the file's settings, and write it here.")
@HARDWARE
@JSON
def import_config(
    config_file: Path, path: Path | None, hardware: str | None, as_json: bool
) -> None:
    """Read a configuration of ai-toolkit, musubi, sd-scripts, SimpleTuner, OneTrainer or diffusers'
    scripts.

    Lists what is lost and which settings could be faster; --verbose lists every key with its line.
    """
    from autotune.exchange import plan_from_config
    from autotune.report.configs import import_lines

    config = autotune.import_config(config_file)
    print_result(config, as_json, partial(import_lines, tells_all=Progress.is_verbose))
    if path is None:
        return
    made = run_shown(plan_from_config, config, path=path, hardware=hardware)
    for remark in made.remarks:
        print_remark(f"note: {remark}")
    print_remark(f"written to {path}; train it with:", f"autotune train {shlex.quote(str(path))}")


@app.command()
@PLAN
@click.option(
    "--to",
    required=True,
    metavar="TRAINER",
    help="ai-toolkit, musubi, simpletuner, diffusers, sd-scripts, onetrainer.",
)
@OUTPUT(required=True, help="Folder to write the files to.")
@click.option("--strict", is_flag=True, help="Refuse if learning or memory would differ.")
@OVERWRITE
@JSON
def export_config(
    plan_file: Path, to: str, path: Path, strict: bool, overwrite: bool, as_json: bool
) -> None:
    """Write a plan as another trainer's configuration, data sets and starting script."""
    from autotune.report.configs import export_lines

    exported = autotune.export_config(plan_file, to, path, strict=strict, overwrite=overwrite)
    print_result(exported, as_json, export_lines)


@app.command()
@CONFIG
@HARDWARE
@click.option(
    "--measure",
    is_flag=True,
    help="Also run a few steps of both on this machine; needs the model's files.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "markdown"]),
    default="text",
    help="Print text, or Markdown to post.",
)
@JSON
def audit(config_file: Path, hardware: str | None, measure: bool, form: str, as_json: bool) -> None:
    """Judge another trainer's configuration on a GPU: does it fit, how long does it take, and what
    would other settings gain?"""
    from autotune.report.configs import audit_lines, audit_markdown

    found = run_shown(autotune.audit, config_file, hardware=hardware, measure=measure)
    if form == "markdown":
        click.echo(audit_markdown(found))  # its tables stay as they are
        return
    print_result(found, as_json, audit_lines)


@app.group(cls=Commands)
def profiles() -> None:
    """Share what machines measured."""


@profiles.command()
@URL
@JSON
def push(url: str, as_json: bool) -> None:
    """Add your records to a team's store."""
    _print_transfer(autotune.records.push(url), as_json)


@profiles.command()
@URL
@JSON
def pull(url: str, as_json: bool) -> None:
    """Add a team's records to your own; only new ones are copied."""
    _print_transfer(autotune.records.pull(url), as_json)


@profiles.command()
@click.argument("name", default="", metavar="ID", help="Which record; by default the newest.")
@OUTPUT(help="Checkout of the project to write it to, with the text of a pull request.")
@JSON
def submit(name: str, path: Path | None, as_json: bool) -> None:
    """Show what a record would tell everybody, and the text of its pull request."""
    made = autotune.records.submit(name, path)
    print_result(made, as_json, lambda _: [made.record, "", made.pull_request])
    if path is not None:
        print_remark(f"written to {path / made.key} and {path / 'pull-request.md'}")
    else:
        print_remark("nothing was written; to a checkout of the project:", "-o FOLDER")


@profiles.command("list")
@STORE
@JSON
def list_records(store: str | None, as_json: bool) -> None:
    """List records; with --verbose, whether each counts on this machine, and what differs."""
    from autotune.report.machine import record_list_lines

    found = autotune.records.list_records(store, compare_here=Progress.is_verbose)
    print_result(found, as_json, lambda _: record_list_lines(found))


@profiles.command()
@click.argument("names", nargs=-1, metavar="[ID]...", help="Only these.")
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@STORE
@JSON
def prune(names: tuple[str, ...], dry_run: bool, store: str | None, as_json: bool) -> None:
    """Delete the named records, or those that are superseded, damaged or impossible."""
    reasons = autotune.records.prune(names, store, dry_run=dry_run)
    lines = [*reasons, f"{'would delete' if dry_run else 'deleted'}: {len(reasons)}"]
    print_result({"reasons": reasons, "dry_run": dry_run}, as_json, lambda _: lines)


@profiles.command()
@STORE
@JSON
def verify(store: str | None, as_json: bool) -> None:
    """Check that every record is whole, unaltered and possible; exits 1 when one is not."""
    count, bad = autotune.records.verify(store)
    lines = [*bad, f"records: {count}, bad: {len(bad)}"]
    print_result({"num_records": count, "bad": bad}, as_json, lambda _: lines)
    if bad:
        raise Exit(1)


def _print_transfer(transfer: "autotune.records.Transfer", as_json: bool) -> None:
    for refused in transfer.refused:
        print_remark(f"refused: {refused}")
    counts = f"new: {transfer.num_new}, already there: {transfer.num_present}"
    line = f"{counts}, refused: {len(transfer.refused)}; in {transfer.target}"
    print_result(transfer, as_json, lambda _: line)
    if transfer.refused and not transfer.num_new + transfer.num_present:
        raise Exit(1)


@app.group(cls=Commands)
def weights() -> None:
    """Inspect and convert weight files."""


@weights.command()
@click.argument("file", type=PATH, metavar="FILE", help="A safetensors file, or a model's folder.")
@click.option("--quick", is_flag=True, help="Read headers only: instant at any size.")
@JSON
def inspect(file: Path, quick: bool, as_json: bool) -> None:
    """Show keys, shapes, dtypes, metadata, size, and how many values are NaN or infinite."""
    from autotune.report.machine import weights_lines
    from autotune.weights.tensors import inspect_weights

    print_result(run_shown(inspect_weights, file, count_values=not quick), as_json, weights_lines)


@weights.command()
@click.argument("source", type=PATH, metavar="IN", help="An adapter.")
@click.argument("target", type=PATH, metavar="OUT", help="File to write.")
@click.option(
    "--format",
    "to",
    type=click.Choice(["diffusers", "comfyui", "kohya"]),
    default="diffusers",
    help="Program that is to load it.",
)
@click.option("--model", help="Model of the adapter, if its names do not show it.")
@OVERWRITE
@JSON
def convert(
    source: Path, target: Path, to: str, model: str | None, overwrite: bool, as_json: bool
) -> None:
    """Write an adapter under the names that another program loads.

    What it does stays the same.
    """
    from autotune.exchange import convert_weights

    remark = convert_weights(source, target, to=to, model=model, overwrite=overwrite)
    told = [f"written to {target}", *([remark] if remark else [])]
    print_result({"path": str(target), "remark": remark}, as_json, lambda _: "\n".join(told))
