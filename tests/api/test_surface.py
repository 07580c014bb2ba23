"""The front door: what `import autotune` offers, how it is documented, and that the commands ask
for nothing else."""

import ast
import dataclasses
import doctest
import inspect
import textwrap
from pathlib import Path
from typing import get_type_hints

import mypy.api
import pytest

import autotune
from autotune.cli.options import JobOptions, WorkloadOptions
from autotune.cli.plan import PlanOptions as PlanCommandOptions
from autotune.events import Event
from autotune.plan.amounts import image_size, memory_bytes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", autotune.__all__)
def test_every_name_has_types_and_an_example_of_its_use(name: str) -> None:
    thing = getattr(autotune, name)
    if inspect.isfunction(thing):
        assert {*inspect.signature(thing).parameters, "return"} == set(thing.__annotations__)
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


def test_options_of_the_plan_command_are_arguments_of_plan() -> None:
    fields = [*dataclasses.fields(PlanCommandOptions), *dataclasses.fields(WorkloadOptions)]
    own = {field.name for field in fields} - {"model", "data", "as_json", "list_knobs"}
    assert own <= set(autotune.PlanOptions.__annotations__)
    job = {field.name for field in dataclasses.fields(JobOptions)}
    assert own | job | {"num_frames"} >= set(autotune.PlanOptions.__annotations__) - set(
        autotune.JobOverrides.__annotations__
    )


def test_amounts_are_read_as_people_write_them() -> None:
    assert [*map(memory_bytes, ("20GiB", " 900 mib", "1.5GB", 7))] == [
        20 * 2**30,
        900 * 2**20,
        1_500_000_000,
        7,
    ]
    assert image_size(512) == image_size("512") == image_size((512, 512)) == (512, 512)


def test_every_event_is_offered_by_the_front_door() -> None:
    assert {kind.__name__ for kind in Event.__subclasses__()} <= set(autotune.__all__)
    assert all(get_type_hints(kind) for kind in Event.__subclasses__())
