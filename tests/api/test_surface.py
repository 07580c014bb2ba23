"""The front door: what `import autotune` offers, how it is documented, and that the commands ask
for nothing else.
"""

import ast
import dataclasses
import doctest
import inspect
import textwrap
from pathlib import Path
from typing import get_type_hints

import mypy.api
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autotune
from autotune.api.amounts import image_size, memory_bytes
from autotune.cli.options import JobOptions, WorkloadOptions
from autotune.cli.plan import PlanOptions as PlanCommandOptions
from autotune.errors import InvalidInput
from autotune.schema.events import Event, event_line, parse_event

ROOT = Path(__file__).parents[2]
FUNCTIONS = """
    audit check check_data compare convert_weights doctor estimate event_line explain_error export_config
    fetch find_record import_config inspect_weights is_first_process judge_lesson list_choices
    list_gpus list_models list_records load_plan load_variants make_demo plan plan_from_config plan_text
    plan_variants prepare_process probe prune_records publish pull_records push_records report require_gpu
    require_hub sample save_plan shipped_profiles train verify_records warm_up
"""
OBJECTS = """
    Audit Candidate CatalogGpu CatalogPrediction CheckResult ComparedGpu Comparison ConceptFidelity ConfigLine
    DataReport Demo Estimate ExportedConfig FetchedModel FileSummary Finding HardwareProfile ImportedConfig Job
    JobOverrides ModelSpec ModelSummary PlanFromConfig PlanOptions Prediction Record RecordList RecordSummary
    RecordVerdict RunReport SearchSpace TrainingPlan Transfer TrialResult Workload WorkloadOptions
"""
EVENTS = """
    CandidatesPredicted Event Notice PhaseStarted PreviewsWritten Progressed RecordsMatched RunStarted SearchSpaceBuilt
    StatusChanged StepFinished TrialFinished TrialStarted
"""
ERRORS = """
    AutotuneError DoesNotFit InvalidInput InvalidPlan NoGpu NoSuchFolder NothingFits PlanInterrupted PlanNotWritten
    Preempted
"""


def test_the_front_door_offers_exactly_these_names() -> None:
    assert sorted(autotune.__all__) == sorted(
        [*FUNCTIONS.split(), *OBJECTS.split(), *EVENTS.split(), *ERRORS.split()]
    )
    assert dir(autotune) == sorted(autotune.__all__)


@pytest.mark.parametrize(
    "name", [*FUNCTIONS.split(), *OBJECTS.split(), *EVENTS.split(), *ERRORS.split()]
)
def test_every_name_is_there_and_documented(name: str) -> None:
    assert len(inspect.getdoc(getattr(autotune, name)) or "") > 20


@pytest.mark.parametrize("name", FUNCTIONS.split())
def test_functions_have_types(name: str) -> None:
    function = getattr(autotune, name)
    assert {*inspect.signature(function).parameters, "return"} == set(function.__annotations__)


@pytest.mark.parametrize(
    "name", [*FUNCTIONS.split(), *OBJECTS.split(), *EVENTS.split(), *ERRORS.split()]
)
def test_every_name_shows_in_an_example_how_it_is_used(name: str) -> None:
    for node in ast.walk(ast.parse(example_of(name))):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "autotune"
        ):
            assert node.attr in autotune.__all__


def example_of(name: str) -> str:
    """The code of the examples in the docstring of what has that name."""
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(getattr(autotune, name)) or "")
    assert examples, name
    return "".join(example.source for example in examples)


@pytest.mark.slow
def test_examples_use_what_objects_have(tmp_path: Path) -> None:
    source = "from pathlib import Path\n\nimport autotune\n\n"
    for name in autotune.__all__:
        code = textwrap.indent(example_of(name), "    ")
        source += f"\ndef example_of_{name}(event: autotune.Event) -> None:\n{code}\n"
    (file := tmp_path / "examples.py").write_text(source)
    told, _, status = mypy.api.run([str(file), "--config-file", str(ROOT / "pyproject.toml")])
    assert status == 0, told


def test_a_name_that_is_not_offered_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tune'"):
        autotune.tune  # type: ignore[attr-defined]  # noqa: B018


def test_overrides_of_a_job_are_its_fields() -> None:
    assert set(autotune.JobOverrides.__annotations__) == set(autotune.Job.model_fields) - {
        "model",
        "data",
    }


def test_options_of_the_plan_command_are_arguments_of_plan() -> None:
    fields = [*dataclasses.fields(PlanCommandOptions), *dataclasses.fields(WorkloadOptions)]
    own = {field.name for field in fields} - {"model", "data", "as_json", "list_knobs"}
    assert own <= set(autotune.PlanOptions.__annotations__)
    job = {field.name for field in dataclasses.fields(JobOptions)}
    assert own | job | {"num_frames"} >= set(autotune.PlanOptions.__annotations__) - set(
        autotune.JobOverrides.__annotations__
    )


@pytest.mark.parametrize("function", [autotune.plan, autotune.list_choices])
def test_an_argument_that_does_not_exist_names_the_nearest(function: object) -> None:
    with pytest.raises(InvalidInput, match="no argument of plan 'ranks'") as caught:
        function("qwen-image", ranks=3)  # type: ignore[operator]
    assert "rank" in caught.value.hint


def test_settings_that_do_not_exist_are_refused_by_estimate() -> None:
    for wrong in ({"quantisation": "none"}, {"swapped_blocks": -1}):
        with pytest.raises(InvalidInput):
            autotune.estimate("qwen-image", hardware="nvidia-rtx-4090", **wrong)  # type: ignore[arg-type]


def test_amounts_are_read_as_people_write_them() -> None:
    assert [*map(memory_bytes, ("20GiB", " 900 mib", "1.5GB", 7))] == [
        20 * 2**30,
        900 * 2**20,
        1_500_000_000,
        7,
    ]
    assert image_size(512) == image_size("512") == image_size((512, 512)) == (512, 512)


EXAMPLES: dict[str, dict[str, object]] = {
    "PhaseStarted": {"name": "training"},
    "StatusChanged": {"text": "matmul"},
    "Progressed": {"name": "encoding", "done": 1, "total": 2},
    "Notice": {"text": "x", "level": "warning"},
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_event_survives_its_line_of_json(name: str) -> None:
    event = getattr(autotune, name)(**EXAMPLES[name])
    line = event_line(event)
    assert "\n" not in line
    assert parse_event(line) == event


@given(st.text())
def test_a_line_that_is_no_event_is_refused(line: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        parse_event(line)


def test_every_event_is_offered_by_the_front_door() -> None:
    assert {kind.__name__ for kind in Event.__subclasses__()} <= set(autotune.__all__)
    assert all(get_type_hints(kind) for kind in Event.__subclasses__())
