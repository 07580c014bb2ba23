"""Plan files: whole, unedited and plain, or refused with a message of their own."""

import contextlib
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from hypothesis import example, given, settings, strategies as st
from pydantic import ValidationError

from autotune.errors import AutotuneError, InvalidInput, InvalidPlan
from autotune.models.registry import get_family
from autotune.plan import file, workload as plan_workload
from autotune.plan.base import MAX_DEPTH
from autotune.plan.plan import Reason, Rejected
from autotune.search.gradient_checks import small_workload
from autotune.share.store import DamagedRecord, name_of, parse_record
from tests import builders
from tests.conftest import autotune_here
from tests.share.examples import record


def make_plan(**job):
    settings = builders.candidate()
    rejected = Rejected(choice="x", reason="y")
    reason = Reason(knob="attention", chosen="native", why="fast", rejected=(rejected,))
    words = {"num_steps": 100, "preview_prompts": ("a cat",), "preview_steps": 20, **job}
    return builders.plan(
        builders.hardware(),
        builders.workload(),
        settings,
        words,
        reasons=(reason,),
        trials=(builders.trial(settings),),
    )


def refusal(path, text):
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidPlan) as caught:
        file.load_plan(path)
    assert caught.value.hint
    return caught.value


job_text = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=40)


@given(
    model=job_text.filter(bool),
    data=st.none() | job_text.filter(bool),
    prompts=st.lists(job_text, max_size=3).map(tuple),
    rate=st.floats(1e-12, 1, exclude_min=True),
    steps=st.integers(1, 10**9),
)
@example(
    model="1e5",
    data="0E0",
    prompts=("12", "1.", "-.inf", "0x1f", "2026-01-01", "1:30"),
    rate=1e-4,
    steps=1,
)
def test_any_job_reads_back(tmp_path_factory, model, data, prompts, rate, steps):
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    plan = make_plan(
        model=model, data=data, preview_prompts=prompts, learning_rate=rate, num_steps=steps
    )
    file.save_plan(plan, path)
    assert file.load_plan(path) == plan


@settings(max_examples=60)
@given(text=st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("latin-1")))
def test_arbitrary_text_raises_only_typed_error(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    with contextlib.suppress(InvalidPlan):
        raise AssertionError(file.load_plan(path))


def test_digest_covers_every_frozen_value():
    data = make_plan().model_dump(mode="json")
    leaves = list(_leaves(data["frozen"], ()))
    assert len(leaves) > 50
    for where, value in leaves:
        edited = json.loads(json.dumps(data))
        parent = edited["frozen"]
        for key in where[:-1]:
            parent = parent[key]
        parent[where[-1]] = _other(value)
        with pytest.raises(InvalidPlan):
            file.parse_plan(json.dumps(edited))


def _leaves(node, where):
    if not isinstance(node, dict | list):
        yield where, node
        return
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _leaves(value, (*where, key))


def _other(value):
    if isinstance(value, bool) or value is None:
        return "edited"
    return value + 1 if isinstance(value, int | float) else f"{value}x"


@pytest.mark.parametrize("field", ["model", "data", "output", "validation"])
def test_an_empty_path_is_refused(field):
    with pytest.raises(InvalidPlan, match=f"^job.{field}: it is empty$"):
        file.with_job(make_plan(), **{field: ""})


def test_the_job_may_be_edited(tmp_path):
    edited = file.plan_text(make_plan()).replace("num_steps: 100", "num_steps: 250")
    (tmp_path / "plan.yaml").write_text(edited.replace("rate: 0.0001", "rate: 5e-5"))
    job = file.load_plan(tmp_path / "plan.yaml").job
    assert (job.num_steps, job.learning_rate) == (250, 5e-5)


def edit(old, new):
    return lambda text: text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (edit("job:", "job:\n  lr: 1\n"), "job.lr"),
        (lambda t: t + "extra: 1\n", "extra"),
        (edit("num_steps: 100", "num_steps: many"), "job.num_steps"),
        (edit("num_steps: 100", "num_steps: -1"), "job.num_steps"),
        (edit("learning_rate: 0.0001", "learning_rate: .nan"), "job.learning_rate"),
        (edit("seed: 0", f"seed: {2**63}"), "job.seed"),
        (edit("output: output", 'output: "a\\0b"'), "job.output"),
        (edit("job:", "job:\n  <<: {seed: 1}\n"), "line 5 has a key"),
        (edit("torch: '2.13'", "torch: '2.13'\n      .nan: a"), "a key that is not plain text"),
        (edit("num_steps: 100", "num_steps: 1" + "0" * 400), "job.num_steps"),
        # YAML 1.1 makes a number of it, in minutes.
        (lambda t: "a: 1" + ":1" * (1 << 20), "not a valid plan"),
        (edit("micro_batch_size: 1", "micro_batch_size: 8"), "frozen part"),
        (edit("seed: 0", "seed: 0\n  seed: 1"), "repeated keys"),
        (lambda t: "", "is empty"),
        (lambda t: "- 1\n- 2\n", "not a plan"),
        (lambda t: "[" * 5000, "not YAML"),
        (lambda t: "a: &x [1]\nb: *x\n", "anchors and aliases"),
        (lambda t: "a: !!python/object/apply:os.system ['true']\n", "tags are not allowed"),
        (lambda t: "a: 1\n---\nb: 2\n", "not YAML"),
        (edit("job:", "job:\n  lr: 1\n  rate: 1\n"), "(and 1 more)"),
        (lambda t: "1: 2\n", "line 1 has a key"),
    ],
)
def test_each_damage_has_its_own_message(tmp_path, damage, words):
    assert words in refusal(tmp_path / "plan.yaml", damage(file.plan_text(make_plan()))).message


@pytest.mark.parametrize(("nested", "listed"), [(MAX_DEPTH, 0), (1, 99)])
def test_values_are_read_up_to_a_number(monkeypatch, nested, listed):
    monkeypatch.setattr(file, "MAX_NODES", 100)

    def read(nested, listed):
        yaml.load("[" * nested + "1," * listed + "]" * nested, file.BoundedLoader)

    read(nested, listed)
    with pytest.raises(yaml.YAMLError, match=r"nested too deeply|more than 100 values"):
        read(nested + (nested > 1), listed + (nested == 1))


def test_files_are_read_up_to_a_size(tmp_path):
    def listing(path):
        file.read_listing(path, plan_workload.Bucket, "buckets", "write some")

    for most, read in ((4 << 20, file.load_plan), (1 << 20, listing)):
        for more in (0, 1):
            (tmp_path / "file").write_bytes(b"\x01" * (most + more))
            with pytest.raises(AutotuneError) as error:
                read(tmp_path / "file")
            assert ("larg" in error.value.message) == (more == 1)


def test_unreadable_files_are_refused(tmp_path):
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(InvalidPlan, match="there is no plan at"):
            file.load_plan(path)
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(InvalidPlan, match=r"pipe\.yaml: not a regular file"):
        file.load_plan(tmp_path / "pipe.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidPlan, match="cannot read"):
        file.load_plan(tmp_path / "binary.yaml")


@pytest.mark.parametrize("content", [None, b"\xff", b"a: !b 1", b"[" * 9999, b"width_px: 1"])
def test_unreadable_lists_are_refused(tmp_path, content):
    if content:
        (tmp_path / "list.yaml").write_bytes(content)
    with pytest.raises(InvalidInput, match="buckets"):
        file.read_listing(tmp_path / "list.yaml", plan_workload.Bucket, "buckets", "write some")


def test_named_values_replace_their_rivals():
    job = make_plan().job.changed(revision="abc", num_train_epochs=3, checkpointing_epochs=2)
    plan = make_plan().changed(job=job)
    assert file.with_job(plan, learning_rate=1e-5).job == job.changed(learning_rate=1e-5)
    assert file.with_job(plan, model="other").job == job.changed(model="other", revision=None)
    assert file.with_job(plan, base="other").job.revision is None
    assert file.with_job(plan, num_steps=7).job == job.changed(num_steps=7, num_train_epochs=None)
    found = file.with_job(plan, checkpointing_steps=7).job
    assert found == job.changed(checkpointing_steps=7, checkpointing_epochs=None)
    assert file.with_job(plan, num_steps=7).digest == plan.digest
    with pytest.raises(InvalidPlan, match=r"job\.learning_rate"):
        file.with_job(plan, learning_rate=7.0)


def test_failed_write_leaves_old_plan(tmp_path, monkeypatch):
    path = tmp_path / "plan.yaml"
    file.save_plan(make_plan(), path)
    before = path.read_text()
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="full"):
        file.save_plan(make_plan(num_steps=7), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_words_in_plan_cannot_steer_terminal(tmp_path, capfd):
    frozen = make_plan().frozen
    why = "\x1b[2J\x9bfast \u202e:cat: [red]"
    evil = frozen.changed(reasons=(frozen.reasons[0].changed(why=why),))
    file.save_plan(file.seal(make_plan().job, evil), tmp_path / "plan.yaml")
    told = autotune_here(capfd, "explain", tmp_path / "plan.yaml")
    assert "?[2J?fast ?:cat: [red]" in told.stdout
    missing = autotune_here(capfd, "explain", tmp_path / "\x1b[2Jno\nhint: run this")
    assert missing.stderr.startswith(
        f"error: there is no plan at {tmp_path}/?[2Jno hint: run this\nhint: make one"
    )


@pytest.mark.parametrize("version", [1, 3])
def test_other_schemas_are_refused(version, tmp_path):
    text = file.plan_text(make_plan()).replace("schema_version: 2", f"schema_version: {version}")
    error = refusal(tmp_path / "plan.yaml", text)
    assert f"has schema {version}, and this autotune reads schema 2 only" in error.message
    content = record().content.replace(b'"schema_version":2', b'"schema_version":%d' % version)
    with pytest.raises(DamagedRecord, match=f"has schema {version}"):
        parse_record(content, name_of(content))


lengths = st.lists(st.integers(1, 1024), min_size=1, max_size=64).map(sorted)


@given(lengths, st.integers(1, 64))
def test_a_spread_rises_within_its_values(values, count):
    spread = plan_workload.means_of_parts(values, count)
    assert len(spread) == count
    assert list(spread) == sorted(spread)
    assert values[0] <= spread[0]
    assert spread[-1] <= values[-1]


@given(lengths, st.integers(1, 32))
def test_usual_captions_have_mean_length(values, batch):
    work = workload(values, batch)
    mean = sum(plan_workload.typical_text_tokens(work)) / batch
    if len(values) % batch == 0 or batch % len(values) == 0:
        assert mean == pytest.approx(sum(values) / len(values), abs=0.5)
    padded = [plan_workload.padded_text_tokens(work, size) for size in (1, batch)]
    assert padded == [pytest.approx(mean), max(plan_workload.typical_text_tokens(work))]
    assert padded[1] <= work.max_text_tokens


@pytest.mark.parametrize("quantiles", [(3, 2), (1, 13), (0, 2), (1,) * 65])
def test_quantiles_that_cannot_be_are_refused(quantiles):
    with pytest.raises(ValidationError):
        builders.workload(max_text_tokens=12, text_token_quantiles=quantiles)


def test_usual_bucket_is_near_mean():
    def work(*items):
        frames = zip((1, 41, 81), items, strict=True)
        shape = {"width_px": 64, "height_px": 64}
        buckets = tuple(
            plan_workload.Bucket(**shape, num_frames=n, num_items=count) for n, count in frames
        )
        return builders.workload(buckets=buckets)

    works = work(1, 9, 1), work(0, 0, 0), work(0, 0, 3)
    assert [plan_workload.typical_bucket(work).num_frames for work in works] == [41, 81, 81]


def test_uneven_captions_leave_a_check_alone():
    even, uneven = workload([900], 4), workload([3, 5, 900], 4)
    family = get_family(even.model.family)
    assert small_workload(family, uneven) == small_workload(family, even)


def workload(values, batch):
    quantiles = tuple(values)
    return builders.workload(
        max_text_tokens=values[-1], text_token_quantiles=quantiles, effective_batch_size=batch
    )
