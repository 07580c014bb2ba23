"""What one plan trains several times: a list of subjects, each a name and what its job has
otherwise.
"""

from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from autotune.errors import InvalidInput, InvalidPlan, suggest_nearest
from autotune.schema.base import Frozen
from autotune.schema.job import JobOverrides
from autotune.schema.listing import read_listing
from autotune.schema.plan import TrainingPlan
from autotune.schema.plan_file import with_job
from autotune.schema.run import RunReport

MAX_SUBJECTS = 1000
"""As many tasks as an array of SLURM may have by default."""
SUBJECT_LOG = ".log"
"""What the name of a subject's log ends with, which lies beside its folder."""
NAME = r"^[A-Za-z][A-Za-z0-9._-]{0,63}$"
PLACES = ("data", "control", "from_adapter", "validation")
"""Fields of a job that name files; relative ones count from the file that lists the subjects."""
MODEL_FIELDS = {"base", "revision", "expert", "vae", "text_encoders"}
FIELDS = sorted({"data", *JobOverrides.__annotations__} - {"output"} - MODEL_FIELDS)
"""What a subject may say: what is trained, not the model."""


class Subject(Frozen):
    """One of several runs of a plan.

    Example:
        >>> rex = autotune.Subject(name="rex", job={"data": "photos/rex", "trigger": "rex"})
        >>> autotune.train_many("plan.yaml", [rex])
    """

    name: str = Field(pattern=NAME)
    """What its folder in the plan's output folder is called."""
    job: dict[str, Any]
    """Fields of the job that differ from the plan's."""

    def plan(self, plan: TrainingPlan) -> TrainingPlan:
        """The plan with this subject's job, whose output is a folder in the plan's.

        Raises:
            InvalidPlan: a value is out of range.
        """
        try:
            return with_job(plan, **self.job, output=str(Path(plan.job.output) / self.name))
        except InvalidPlan as error:
            raise InvalidPlan(f"subject {self.name}: {error.message}", hint=error.hint) from error


class SubjectRun(Frozen):
    """What became of one subject.

    Example:
        >>> [run.name for run in autotune.train_many("plan.yaml", "subjects.yaml") if run.error]
    """

    name: str
    output: str
    """Output folder of its run."""
    report: RunReport | None
    """None if the run failed."""
    error: str | None = None
    """Why it failed."""


class _Row(Frozen):
    model_config = ConfigDict(extra="allow")
    name: str = Field(pattern=NAME)


class _Listed(Frozen):
    subjects: tuple[_Row, ...] = Field(min_length=1, max_length=MAX_SUBJECTS)


def load_subjects(path: str | Path) -> tuple[Subject, ...]:
    """Read a file that lists what one plan trains: subjects, each with a name and what its job has
    otherwise.

    Raises:
        InvalidInput: it cannot be read, lists none, has a name twice, or says what a subject cannot
            have.

    Example:
        >>> rex, bo = autotune.load_subjects("subjects.yaml")
    """
    path = Path(path)
    hint = (
        "write `subjects:` with an entry `- {name: NAME, data: FOLDER}` for each; see "
        "docs/many-runs.md"
    )
    rows = read_listing(path, _Listed, "subjects", hint).subjects
    names = [
        row.name.lower() for row in rows
    ]  # as folders, on file systems that do not tell case apart
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidInput(
            f"{path} has two subjects {twice!r}", hint="each has a folder of that name: rename one"
        )
    if log := next((name for name in names if name + SUBJECT_LOG in names), None):
        raise InvalidInput(
            f"{path}: the log of {log!r} would be the folder of {log + SUBJECT_LOG!r}",
            hint="rename one",
        )
    return tuple(Subject(name=row.name, job=_job(row, path.parent)) for row in rows)


def find_subject(subjects: tuple[Subject, ...], which: str) -> Subject:
    """One of the subjects, by name or by number from 1, as a task of an array knows it.

    Raises:
        InvalidInput: there is none.
    """
    by_name = {one.name: one for one in subjects} | {
        str(number): one for number, one in enumerate(subjects, 1)
    }
    if which not in by_name:
        names = [one.name for one in subjects]
        raise InvalidInput(
            f"there is no subject {which!r} among {len(subjects)}",
            hint=suggest_nearest(which, names[:20]),
        )
    return by_name[which]


def _job(row: _Row, base: Path) -> dict[str, Any]:
    written = dict(row.model_extra or {})
    if unknown := sorted(written.keys() - set(FIELDS)):
        what = f"subject {row.name} has an unknown field {unknown[0]!r}"
        raise InvalidInput(what, hint=suggest_nearest(unknown[0], FIELDS))
    for field in PLACES:
        place = written.get(field)
        if isinstance(place, str) and not (field == "validation" and place.endswith("%")):
            written[field] = str(base / place)
    if isinstance(several := written.get("data"), list):
        written["data"] = [
            str(base / place) if isinstance(place, str) else place for place in several
        ]
    return {
        field: tuple(value) if isinstance(value, list) else value
        for field, value in written.items()
    }
