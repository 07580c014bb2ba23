"""`autotune demo`: the other commands, one after the other, on a small real pipeline."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.commands.plan import plan
from autotune.commands.probe import probe
from autotune.commands.train import train


def demo(
    output: Annotated[Path, typer.Option(help="Folder for everything the demo makes.")] = Path("demo"),
    model: Annotated[str, typer.Option(help="Model family to show.")] = "qwen-image",
) -> None:
    """Walk the whole journey on a small real pipeline: probe, plan, train, sample."""
    from autotune.demo import make_demo
    from autotune.quiet import silence_progress_bars
    from autotune.terminal import err, out

    with err.status("writing a small pipeline and drawing images"):
        silence_progress_bars()
        made = make_demo(output, model)
    size = sum(path.stat().st_size for path in made.model.rglob("*") if path.is_file())
    out.print(f"a small {model} pipeline ({size / 1e6:.0f} MB) in {made.model}, images in {made.images}")
    plan_file, result = output / "plan.yaml", output / "result"
    _announce("autotune probe")
    probe()
    extra = f" --control {made.control}" if made.control else ""
    extra += f" --frames {made.num_frames}" if made.num_frames > 1 else ""
    sizes = f"--resolution 64 --steps 60{extra}"
    _announce(f"autotune plan --model {made.model} --data {made.images} {sizes} -o {plan_file}")
    plan(
        model=str(made.model),
        data=str(made.images),
        control=made.control,
        frames=made.num_frames,
        output=plan_file,
        resolution="64",
        num_steps=60,
        run_output=str(result),
        search_time=600.0,  # a twentieth of such a short run would be a minute, too little on a busy machine
    )
    _announce(f"autotune train {plan_file}")
    train(plan_file=plan_file)
    out.print(f"samples: {result / 'sample_with_adapter.png'} and sample_without_adapter.png")


def _announce(command: str) -> None:
    from autotune.terminal import out

    out.print(f"\n$ {command}", style="bold")
