"""`autotune profiles`: what machines measured, kept here and exchanged with teams."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import Json, tell

if TYPE_CHECKING:
    from autotune.sharing import MergeResult, Store

app = typer.Typer(
    help="Share what machines measured: one measurement, everyone's gain.", no_args_is_help=True, rich_markup_mode=None
)

Url = Annotated[str, typer.Argument(help="A folder, a git checkout, s3://bucket/path ...", metavar="URL")]
Id = Annotated[str, typer.Argument(help="A record's name, or how it begins.", metavar="ID")]
Where = Annotated[str | None, typer.Option("--store", help="Another store than your own.", metavar="URL")]


@app.command()
def push(url: Url) -> None:
    """Add your records to a team's store; `show --raw` prints exactly what leaves."""
    from autotune.sharing import merge_stores, open_store

    _tell(merge_stores(_store(None), team := open_store(url)), team.address)


@app.command()
def pull(url: Url) -> None:
    """Add a team's records to your own; only new ones travel."""
    from autotune.errors import InvalidInput
    from autotune.sharing import MergeResult, merge_stores, open_store

    merged = merge_stores(team := open_store(url), mine := _store(None))
    if merged == MergeResult(0, 0, ()):
        raise InvalidInput(
            f"there are no records at {team.address}", hint="check the address; `push` fills a new store"
        )
    _tell(merged, mine.address)


@app.command("list")
def list_records(
    why: Annotated[bool, typer.Option("--why", help="Say which count on this machine, and what differs.")] = False,
    store: Where = None,
    as_json: Json = False,
) -> None:
    """List records; with --why, whether each counts here."""
    from autotune.cli.terminal import err
    from autotune.reporting import list_lines
    from autotune.sharing import summarize_records

    chosen = _store(store)
    found = summarize_records(chosen)
    if bad := len(chosen.sizes()) - len(found):
        err.print(f"left out, no sound records: {bad}; `autotune profiles verify` names them")
    verdicts = _verdicts(chosen) if why else {}
    rows = [row.model_dump(mode="json") | verdicts.get(row.name, {}) for row in found]
    tell(rows, as_json, lambda _: list_lines(found, verdicts))


@app.command()
def show(
    name: Id,
    raw: Annotated[bool, typer.Option("--raw", help="Exactly what leaves this machine.")] = False,
    store: Where = None,
) -> None:
    """Show one record: its machine, its work, every trial."""
    from autotune.reporting import record_lines

    found, record = _store(store).find(name)
    tell(json.loads(found.content), raw, lambda _: record_lines(found.name, record))


@app.command()
def diff(first: Id, second: Id, store: Where = None) -> None:
    """Show what differs between two records."""
    from autotune.cli.terminal import out
    from autotune.reporting import record_difference_lines

    chosen = _store(store)
    out.print("\n".join(record_difference_lines(chosen.find(first)[1], chosen.find(second)[1])))


@app.command("export")
def export_records(
    file: Annotated[Path, typer.Argument(help="File to write.", metavar="FILE")], store: Where = None
) -> None:
    """Write all records into one file, to send where there is no store."""
    from autotune.cli.terminal import out
    from autotune.sharing import export_store

    out.print(f"records: {export_store(_store(store), file)}; written to {file}")


@app.command("import")
def import_records(file: Annotated[Path, typer.Argument(help="A file that `export` wrote.", metavar="FILE")]) -> None:
    """Add the records of an exported file to your own; what is wrong is refused and named."""
    from autotune.sharing import import_file

    _tell(import_file(file, mine := _store(None)), mine.address)


@app.command()
def prune(
    names: Annotated[list[str] | None, typer.Argument(help="Only these.", metavar="ID", show_default=False)] = None,
    older_than: Annotated[int | None, typer.Option(min=0, help="Days; older records go too.", metavar="DAYS")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    store: Where = None,
) -> None:
    """Delete the named records, or those that are superseded, damaged, impossible, or of an older trial protocol."""
    from autotune.cli.terminal import out
    from autotune.sharing import prune_records

    reasons = prune_records(_store(store), names or (), older_than_days=older_than, dry_run=dry_run)
    out.print("\n".join((*reasons, f"{'would delete' if dry_run else 'deleted'}: {len(reasons)}")))


@app.command()
def verify(store: Where = None) -> None:
    """Check that every record is whole, unaltered and possible; exits 1 when one is not."""
    from autotune.cli.terminal import out
    from autotune.sharing import verify_records

    count, bad = verify_records(_store(store))
    out.print("\n".join((*bad, f"records: {count}, bad: {len(bad)}")))
    if bad:
        raise typer.Exit(1)


def _store(url: str | None) -> "Store":
    from autotune.sharing import open_store, user_store

    return user_store() if url is None else open_store(url)


def _tell(merged: "MergeResult", where: str) -> None:
    from autotune.cli.terminal import err, out

    for refused in merged.refused:
        err.print(f"refused: {refused}")
    out.print(f"new: {merged.new}, already there: {merged.present}, refused: {len(merged.refused)}; in {where}")
    if merged.refused and not merged.new + merged.present:
        raise typer.Exit(1)


def _verdicts(store: "Store") -> dict[str, dict[str, object]]:
    """For each record whether it counts on this machine, whatever the work."""
    from autotune.hardware import probe
    from autotune.sharing import compare_machine, find_impossibilities

    hardware = probe()
    verdicts: dict[str, dict[str, object]] = {}
    for name, record in store.records():
        matched, impossible = compare_machine(record, hardware), find_impossibilities(record)
        kind = "impossible" if impossible else matched.kind
        verdicts[name] = {"match": kind, "reasons": list(impossible or matched.reasons)}
    return verdicts
