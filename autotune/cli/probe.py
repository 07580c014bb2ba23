"""`autotune probe`: what this machine can do."""

from typing import Annotated

import typer

from autotune.cli.options import Json, tell


def probe(
    quick: Annotated[bool, typer.Option("--quick", help="Facts only; measure nothing.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Show the catalog of GPUs instead.")] = False,
    device: Annotated[int, typer.Option(min=0, help="Which GPU, where there are several.")] = 0,
    as_json: Json = False,
) -> None:
    """Find out what this machine can really do, and keep the answer."""
    if listed:
        from autotune.hardware import load_catalog
        from autotune.reporting import catalog_view

        tell(load_catalog(), as_json, catalog_view)
        return
    from autotune.cli.terminal import err
    from autotune.hardware import cached_profile
    from autotune.hardware import probe as read_machine
    from autotune.reporting import profile_view

    with err.status("probing") as status:
        if quick:
            profile = read_machine(index=device, on_progress=status.update)
        else:
            profile = cached_profile(fresh=True, index=device, on_progress=status.update)
    tell(profile, as_json, profile_view)
