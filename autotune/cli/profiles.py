"""`autotune profiles`: records of what machines measured, kept here and exchanged with teams."""

from typing import Annotated

import typer

import autotune
from autotune.cli.options import Json
from autotune.cli.output import print_out, print_remark, print_result

app = typer.Typer(help="Share what machines measured.", no_args_is_help=True, rich_markup_mode=None)

Url = Annotated[
    str, typer.Argument(help="A folder, a git checkout, s3://bucket/path ...", metavar="URL")
]
StoreUrl = Annotated[
    str | None, typer.Option("--store", help="Another store than your own.", metavar="URL")
]


@app.command()
def push(
    url: Url,
    create: Annotated[
        bool, typer.Option("--create", help="Create the folder if there is none.")
    ] = False,
) -> None:
    """Add your records to a team's store."""
    _print_transfer(autotune.push_records(url, create=create))


@app.command()
def pull(url: Url) -> None:
    """Add a team's records to your own; only new ones are copied."""
    _print_transfer(autotune.pull_records(url))


@app.command("list")
def list_records(
    why: Annotated[
        bool, typer.Option("--why", help="Say which count on this machine, and what differs.")
    ] = False,
    store: StoreUrl = None,
    as_json: Json = False,
) -> None:
    """List records; with --why, whether each counts here."""
    from autotune.report.machine import record_list_lines

    found = autotune.list_records(store, compare_here=why)
    print_result(found, as_json, lambda _: record_list_lines(found))


@app.command()
def prune(
    names: Annotated[
        list[str] | None, typer.Argument(help="Only these.", metavar="ID", show_default=False)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be deleted.")
    ] = False,
    store: StoreUrl = None,
) -> None:
    """Delete the named records, or those that are superseded, damaged, impossible, or of an
    older trial protocol."""
    reasons = autotune.prune_records(names or (), store, dry_run=dry_run)
    print_out([*reasons, f"{'would delete' if dry_run else 'deleted'}: {len(reasons)}"])


@app.command()
def verify(store: StoreUrl = None) -> None:
    """Check that every record is whole, unaltered and possible; exits 1 when one is not."""
    count, bad = autotune.verify_records(store)
    print_out([*bad, f"records: {count}, bad: {len(bad)}"])
    if bad:
        raise typer.Exit(1)


def _print_transfer(transfer: "autotune.Transfer") -> None:
    for refused in transfer.refused:
        print_remark(f"refused: {refused}")
    counts = (
        f"new: {transfer.num_new}, already there: {transfer.num_present}, refused: "
        f"{len(transfer.refused)}"
    )
    print_out(f"{counts}; in {transfer.target}")
    if transfer.refused and not transfer.num_new + transfer.num_present:
        raise typer.Exit(1)
