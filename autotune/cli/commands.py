"""Commands about the machine, models, plans and runs."""

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit

import autotune
from autotune.cli.options import Commands, RequestCommand
from autotune.cli.output import (
    Progress,
    print_out,
    print_remark,
    print_result,
    run_shown,
    show_events,
)
from autotune.report.text import titled_lines
from autotune.system.process import is_first_process

if TYPE_CHECKING:
    from autotune.plan.plan import TrainingPlan

POSITIVE = click.IntRange(1)
PATH = click.Path(path_type=Path)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")
PLAN = click.argument("plan_file", type=PATH, metavar="PLAN", help="A plan's file.")
OUTPUT = partial(click.option, "-o", "--output", "path", type=PATH)


@click.group(
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(autotune.__version__, message="%(prog)s %(version)s")
@click.option(
    "--progress",
    type=click.Choice(["bar", "json", "none"]),
    default="bar",
    help="On stderr: a bar, JSON lines (one for each event) or nothing.",
)
@click.option("--quiet", is_flag=True, help="No progress.")
@click.option("--verbose", is_flag=True, help="Every step, reason and traceback.")
def app(progress: str, quiet: bool, verbose: bool) -> None:
    """Measures which settings train a diffusion-model LoRA fastest on this machine, and freezes
    them into a plan.

    The options below may stand after a command, too.
    """
    if quiet and verbose:
        raise click.BadParameter("it cannot be --quiet as well", param_hint="--verbose")
    Progress.form = "none" if quiet else progress
    Progress.is_verbose = verbose


@app.command()
@click.option("--quick", is_flag=True, help="Facts only; measure nothing.")
@click.option("--list", "list_catalog", is_flag=True, help="Show the catalog of GPUs instead.")
@click.option("--device", type=click.IntRange(0), help="Which GPU; by default the largest.")
@JSON
def probe(quick: bool, list_catalog: bool, device: int | None, as_json: bool) -> None:
    """Find out what this machine can really do, and keep the answer."""
    from autotune.report.machine import catalog_view, profile_lines, profile_view

    if list_catalog:
        print_result(autotune.list_gpus(), as_json, catalog_view)
        return
    profile = run_shown(autotune.probe, quick=quick, device=device)
    brief = partial(profile_lines, findings=() if as_json else autotune.doctor())
    print_result(profile, as_json, profile_view if Progress.is_verbose else brief)


@app.command()
@JSON
def doctor(as_json: bool) -> None:
    """Find what is wrong with this machine, and the fix, worst first. Needs no torch; exits 1 if
    something blocks."""
    from autotune.report.machine import findings_lines

    findings = autotune.doctor()
    print_result(findings, as_json, findings_lines)
    if any(finding.severity == "blocks" for finding in findings):
        raise Exit(1)


@app.command()
@click.argument("target", type=PATH, required=False, metavar="PLAN|RUN", help="What went wrong.")
@OUTPUT(help="Write them to this zip archive, to attach to a report.")
@JSON
def bug_report(target: Path | None, path: Path | None, as_json: bool) -> None:
    """Show what explains an error, without captions, folders or passwords; with -o, as an archive.

    Look at it first: --verbose prints all of it.
    """
    from autotune.report.bug import bug_report, write_archive

    texts = bug_report(target)
    shown = (f"--- {name}\n{text}" for name, text in texts.items())
    counts = ((name, f"{len(text.splitlines())} lines") for name, text in texts.items())
    lines = [*shown] if Progress.is_verbose else titled_lines(counts)
    print_result(texts, as_json, lambda _: lines)
    if path is None and not as_json:
        print_remark("nothing was written; as an archive:", "autotune bug-report -o bug.zip")
    if path is not None:
        is_asked = sys.stdin.isatty() and not as_json
        if not is_asked or click.confirm(f"--verbose shows all of it. Write it to {path}?"):
            write_archive(texts, path)
            print_remark(f"written to {path}")


@app.command()
@click.option("--hardware", help="Show what fits this GPU, e.g. 4090 (see probe --list).")
@click.option("--host-memory", help="System RAM of its computer; takes minutes.")
@click.option(
    "--model", "file", type=PATH, metavar="FILE", help="Show which of them a single file is."
)
@JSON
def models(hardware: str | None, host_memory: str | None, file: Path | None, as_json: bool) -> None:
    """List the models that can be planned and trained; with --hardware, what a GPU is predicted
    to do with each."""
    from autotune.report.predictions import model_lines

    found = run_shown(autotune.list_models, hardware, file=file, host_memory=host_memory)
    print_result(found, as_json, lambda models: model_lines(models, hardware, host_memory))
    if file is not None and len(found) > 1:
        taken = f"without --base, {file.name} is taken for {found[0].name}"
        print_remark(f"only its name tells these apart: {taken}")


@app.command()
@click.option("--model", required=True, help="A known name or a hub id; @REVISION for a commit.")
@JSON
def fetch(model: str, as_json: bool) -> None:
    """Download a model and verify its files, so that plan and train need no network."""
    from autotune.report.machine import fetched_lines

    print_result(run_shown(autotune.fetch, model), as_json, fetched_lines)


@app.command(cls=RequestCommand, request="EstimateRequest")
@JSON
def estimate(asked: dict[str, Any], as_json: bool) -> None:
    """Predict memory, time and cost of settings that you name; runs and downloads nothing."""
    from autotune.report.predictions import estimate_lines

    print_result(run_shown(autotune.estimate, **asked), as_json, estimate_lines)


@app.command(cls=RequestCommand, request="CompareRequest")
@JSON
def compare(asked: dict[str, Any], as_json: bool) -> None:
    """Predict one job on several GPUs: settings, speed, hours and cost of the finished adapter."""
    from autotune.report.predictions import comparison_lines

    print_result(run_shown(autotune.compare, **asked), as_json, comparison_lines)


@app.command(cls=RequestCommand, request="PlanRequest")
@click.option("--list", "list_knobs", is_flag=True, help="Show what can be chosen, or why not.")
@JSON
def plan(asked: dict[str, Any], list_knobs: bool, as_json: bool) -> None:
    """Search the fastest settings with short real trials, and freeze them into a plan."""
    from autotune.api import PlanNotWritten, list_choices, require_gpu
    from autotune.events import Notice
    from autotune.plan.file import plan_text
    from autotune.report.plan import knob_lines
    from autotune.report.predictions import elsewhere_lines
    from autotune.search.comparison import NoGpu

    if "model" not in asked and "earlier" not in asked:
        told = "name a model, or an earlier plan with --from"
        raise click.BadParameter(told, param_hint="--model")
    if list_knobs:
        print_out(knob_lines(run_shown(list_choices, **asked)))
        return
    asked.setdefault("path", "plan.yaml")
    try:
        if "model" in asked and "hardware" not in asked:
            require_gpu(asked["model"])
        with show_events() as show:
            if asked.keys() <= {"model", "hardware", "path"}:  # no other wish is known ahead
                known = known_answer(asked.get("model", ""), asked.get("hardware", ""))
                if known:
                    show(Notice(text=known))
            made = autotune.plan(**asked, on_event=show)
    except NoGpu as error:
        if error.elsewhere and not as_json:
            print_out(elsewhere_lines(error))
        words = ["autotune", *_predictable(sys.argv[1:]), "--hardware", error.gpu]
        error.hint = error.advice(shlex.join(words))
        raise
    except PlanNotWritten as error:
        click.echo(plan_text(error.plan))
        hint = "keep what is printed above as a file: it is the whole plan"
        message = f"{error.message}; the plan is printed instead"
        raise autotune.AutotuneError(message, hint=hint) from error
    print_result(made, as_json, lambda _: _ending(made, Path(asked["path"])))


def known_answer(model: str, hardware: str) -> str:
    """Tell at once what was computed ahead for a published model on a GPU of the catalog."""
    from autotune.errors import InvalidInput
    from autotune.models.registry import find_published
    from autotune.report.predictions import known_text

    published = find_published(model)
    if published is None or not hardware:
        return ""
    with suppress(InvalidInput):  # a profile's file, or no GPU: planning tells
        rows = {one.name: one for one in autotune.list_models(hardware)}
        return known_text(rows[published[1].name])
    return ""


def _ending(made: "TrainingPlan", file: Path) -> list[str]:
    from autotune.report import plan as texts

    about, hint = texts.plan_lines(made), texts.train_hint(made, file)
    if theirs := made.frozen.overheads:
        try:
            found = autotune.export_config(made, to=theirs.program).differences
            lost = ", ".join(one.name for one in found if one.kind == "learning")
            fact = lost and f"{theirs.program} differs in {lost}: export-config tells how"
        except autotune.AutotuneError as error:
            fact = f"export-config refuses it: {error.message}"
        about += titled_lines([("note", fact)] if fact else [])
    if Progress.is_verbose:
        reasons = *texts.every_reason_lines(made), "", *texts.origin_lines(made)
        return [*titled_lines(texts.settings_items(made)), "", *reasons, "", *about, hint]
    more = "reasons: autotune explain; a page with charts: autotune report"
    return [*about, *titled_lines([("more", more)]), hint]


def _predictable(words: Sequence[str]) -> list[str]:
    """Return a command's words without a shared study, whose URL may hold a password."""
    return [
        word
        for before, word in zip(("", *words), words, strict=False)
        if not word.startswith("--storage") and before != "--storage"
    ]


@app.command()
@PLAN
@click.option("--hardware", multiple=True, help="A GPU or a saved probe; repeat for more.")
@JSON
def check(plan_file: Path, hardware: tuple[str, ...], as_json: bool) -> None:
    """Check whether a plan fits this machine, or others, without training."""
    from autotune.report.plan import check_lines

    results = {name: autotune.check(plan_file, hardware=name) for name in hardware}
    if not hardware:
        results = {"this machine": autotune.check(plan_file)}
    lines = [
        line
        for name, result in results.items()
        for line in check_lines(result, f"{plan_file}", name)
    ]
    found = {"machines": results} if hardware else results["this machine"]
    print_result(found, as_json, lambda _: lines)
    if not all(result.fits for result in results.values()):
        foreign = next((name for name, result in results.items() if not result.fits), "")
        machine = "such a" if hardware else "this"
        there = f" --hardware {shlex.quote(foreign)}" if hardware else ""
        command = f"autotune plan --from {shlex.quote(str(plan_file))}{there}"
        print_remark(f"hint: make one for {machine} machine:", command)
        raise Exit(4)


@app.command()
@PLAN
@click.option("--all", "tells_all", is_flag=True, help="Every reason, trial and default.")
@JSON
def explain(plan_file: Path, tells_all: bool, as_json: bool) -> None:
    """Say which settings mattered, and what spoke against the others."""
    from autotune.report.plan import every_reason_lines, explain_lines, origin_lines

    plan = autotune.load_plan(plan_file)
    if tells_all or Progress.is_verbose:
        lines = [*every_reason_lines(plan), "", *origin_lines(plan)]
    else:
        lines = [*explain_lines(plan), "all reasons: --all"]
    print_result(plan.frozen.reasons, as_json, lambda _: lines)


@app.command()
@click.argument("first", type=PATH, metavar="A", help="A plan.")
@click.argument("second", type=PATH, metavar="B", help="Another plan.")
@click.option("--price", type=click.FloatRange(0, 1e6), help="Price of an hour of one GPU.")
@JSON
def diff(first: Path, second: Path, price: float | None, as_json: bool) -> None:
    """Show how two plans differ: settings, memory, time and cost."""
    from autotune.report.plan import difference_lines, differences

    plans = autotune.load_plan(first), autotune.load_plan(second)
    print_result(differences(*plans, price_per_hour=price), as_json, difference_lines)


@app.command()
@click.argument(
    "subjects",
    nargs=-1,
    required=True,
    metavar="WHAT...",
    help="Plan files or folders of runs; several side by side.",
)
@OUTPUT(help="File to write; by default report.html, in a single run's folder.")
@JSON
def report(subjects: tuple[str, ...], path: Path | None, as_json: bool) -> None:
    """Write one HTML page about plans or runs."""
    written = autotune.report(*subjects, path=path)
    text = f"written to {written}; open it in a browser"
    print_result({"path": str(written)}, as_json, lambda _: text)


@app.command(cls=RequestCommand, request="TrainRequest")
@JSON
def train(asked: dict[str, Any], as_json: bool) -> None:
    """Train exactly what a plan says; options override its job.

    The defaults below are those of a run without a plan.
    """
    from autotune.api import require_gpu
    from autotune.plan.job import Job
    from autotune.report.run import PAGE_FILE, after_training_lines, report_lines, result_lines

    repository = asked.pop("push_to_hub", None)
    if repository is not None:
        from autotune.weights.hub import require_hub

        require_hub(repository)
    if "plan" not in asked and "resume" not in asked:
        if "model" not in asked:
            told = "name a plan, or what to plan for: --model and --data"
            raise click.BadParameter(told, param_hint="PLAN")
        require_gpu(asked["model"])
    Progress.after_interrupt = "run it again, with --resume if it had written a checkpoint"
    report = run_shown(autotune.train, **asked)
    if not is_first_process():
        return
    folder = asked.get("output", Job.model_fields["output"].default)
    planned = autotune.load_plan(asked.get("plan", Path(folder) / "run-plan.yaml"))
    output = Path(asked.get("output", planned.job.output))
    has_page = (output / PAGE_FILE).is_file()
    after = after_training_lines(report, output, planned, has_page=has_page)
    lines = report_lines if Progress.is_verbose else result_lines
    print_result(report, as_json, lambda _: [*lines(report), *after])
    if repository is not None:
        from autotune.report.files import push_to_hub

        print_remark(f"uploaded to {push_to_hub(output, repository, print_remark)}")


@app.command()
@click.argument(
    "run_folder",
    type=PATH,
    metavar="RUN|PLAN",
    help="Output folder of a run; or a plan, for its model alone.",
)
@click.option("--prompt", required=True, help="Prompt.")
@click.option("--count", type=POSITIVE, default=1, help="Pictures, each from a new seed.")
@click.option("--seed", type=click.IntRange(0, 2**62), default=0, help="Seed of the first picture.")
@click.option("--steps", "num_steps", type=POSITIVE, help="Denoising steps; by default the plan's.")
@click.option(
    "--control",
    multiple=True,
    type=PATH,
    metavar="FILE",
    help="Control image of an edit model; repeat for more.",
)
@click.option(
    "--strength",
    "strengths",
    multiple=True,
    type=float,
    default=[1.0],
    help="Strength of the adapter; repeat for more.",
)
@OUTPUT(help="File, .mp4 for a clip; in RUN/samples or next to PLAN by default.")
@JSON
def sample(run_folder: Path, prompt: str, as_json: bool, **asked: Any) -> None:
    """Sample from a trained adapter, or from a plan's model alone, through its stock pipeline."""
    written = run_shown(autotune.sample, run_folder, prompt, **asked)
    paths = [str(path) for path in written]
    print_result({"paths": paths}, as_json, lambda _: paths)


@app.group(cls=Commands)
def data() -> None:
    """Look at training data before training on it."""


@data.command("check", cls=RequestCommand, request="CheckDataRequest")
@click.option("--strict", is_flag=True, help="Exit with 2 on any problem.")
@JSON
def check_data(asked: dict[str, Any], strict: bool, as_json: bool) -> None:
    """Name every file that is broken, tiny, a duplicate or without a caption, and show how
    training sees the rest."""
    from autotune.report.machine import data_report_lines

    found = run_shown(autotune.check_data, **asked)
    print_result(found, as_json, data_report_lines)
    if not (found.is_clean if strict else found.can_train):
        raise Exit(2)


@data.command("caption")
@click.argument("place", type=PATH, metavar="FOLDER|IMAGE", help="Images to caption.")
@click.option("--model", help="Describe images with this: a known model, folder or hub id.")
@click.option("--prompt", help="Question to that model, instead of the usual one.")
@click.option("--caption", help="Caption of images that have none.")
@click.option("--trigger", default="", help="Word put in front of every caption that lacks it.")
@click.option("--prefix", default="", help="Words put in front of every caption.")
@click.option(
    "--replace",
    "replacements",
    multiple=True,
    metavar="WORDS=OTHERS",
    help="Replace words of captions; repeat for more.",
)
@click.option("--overwrite", is_flag=True, help="Replace existing captions.")
@click.option("--dry-run", is_flag=True, help="Only show what would change, or what is needed.")
@JSON
def caption_data(place: Path, replacements: tuple[str, ...], as_json: bool, **asked: Any) -> None:
    """Write captions with a model that is on this machine, or edit existing ones.

    Run again, it goes on where it stopped; `data undo` takes back what it changed last.
    """
    from autotune.training import caption_data

    pairs = [text.partition("=") for text in replacements]
    if not all(words and sign for words, sign, _ in pairs):
        raise click.BadParameter("it is not WORDS=OTHERS", param_hint="--replace")
    asked["replacements"] = {words: others for words, _, others in pairs}
    changed = run_shown(caption_data, place, **asked)
    lines = [f"{name}: {text}" if text else name for name, text in changed.items()]
    verb = "would change" if asked["dry_run"] else "changed"
    folder = place if place.is_dir() else place.parent
    print_result({"captions": changed}, as_json, lambda _: [*lines, f"{verb}: {len(changed)}"])
    if changed and not asked["dry_run"]:
        print_remark("to take it back:", f"autotune data undo {shlex.quote(str(folder))}")


@data.command("undo")
@click.argument("folder", type=PATH, metavar="FOLDER", help="Images whose captions were edited.")
@JSON
def undo_captions(folder: Path, as_json: bool) -> None:
    """Take back what `data caption`, or the page, changed last in a folder."""
    from autotune.data.captions import undo_edit

    told = undo_edit(folder)
    print_result({"undone": told}, as_json, lambda _: f"taken back: {told}")
