"""Parity first: a choice may be tried on a machine only once its adapter gradients agree with the reference's there.

An optimizer's gradients are given: its updates have to agree.

Reference: the same weights and inputs in fp32, native attention, nothing quantised, nothing recomputed, on a tiny
instance of the family's real class, on this device. Verdicts become gates of the machine's profile, `parity.<knob>.
<choice>`, and are kept for each machine, set of library versions and kind of work: a plan seldom waits for them.
"""

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import platformdirs
from pydantic import ValidationError

from autotune import __version__
from autotune.atomic import write_whole
from autotune.families.base import Family
from autotune.families.resolve import ResolvedModel
from autotune.knobs.base import Parity, Setting, parity_gate
from autotune.knobs.registry import KNOBS
from autotune.schema import Candidate, Choice, Gate, HardwareProfile, Workload, digest_of
from autotune.trials.gradients import GradientRequest, UpdateRequest
from autotune.trials.runner import ProcessTrialRunner
from autotune.trials.worker import Failure

MOST_TEXT_TOKENS = 77
TIMEOUT_SECONDS = 300.0
"""Compiling blocks takes a minute or two on a processor."""
PASSING = ("timeout", "oom")
"""Outcomes that say more about the moment than about the choice: not kept."""

ParityRequest = GradientRequest | UpdateRequest
Ask = Callable[[ParityRequest], "float | Failure"]
Make = Callable[[str, Candidate], ParityRequest]
"""Of a knob and the candidate that has its value."""


def proven(
    setting: Setting,
    choices: Mapping[str, Sequence[Choice]],
    model: ResolvedModel,
) -> HardwareProfile:
    """The machine with a gate for each of `choices` that changes what is computed, from now or from an earlier plan.

    Raises:
        AutotuneError: another search has the device and does not end.
    """
    hardware, family = setting.hardware, setting.family
    to_prove = _to_prove(choices)
    tiny = {**model.config, **family.tiny_config}
    precision = str(choices["precision"][0])
    path = _path(setting, tiny, precision)
    known = _kept(path)
    missing = [(name, parity) for name, parity in to_prove if parity_gate(name, parity.runs) not in known]
    if missing:
        with ProcessTrialRunner.on(hardware, model.spec.name, setting.workload) as runner:

            def ask(request: ParityRequest) -> "float | Failure":
                answer: float | Failure = runner.ask(request, timeout_seconds=TIMEOUT_SECONDS)
                return answer

            make = _requests(setting, tiny, runner)
            for name, parity in missing:
                gate, lasting = verdict(name, parity, precision, ask, make)
                known[gate.name] = gate
                if lasting:
                    _keep(path, gate)
    gates = tuple(known[parity_gate(name, parity.runs)] for name, parity in to_prove)
    return HardwareProfile.model_validate({**dict(hardware), "gates": (*hardware.gates, *gates)})


def verdict(knob: str, parity: Parity, precision: str, ask: Ask, make: Make) -> tuple[Gate, bool]:
    """Whether gradients or updates under the choice agree, and whether that will be so tomorrow."""
    fields = {"micro_batch_size": 2, "checkpointed_blocks": 0, "precision": precision, knob: parity.runs}
    candidate = Candidate.model_validate({**fields, **dict(parity.needs)})
    request = make(knob, candidate)
    dtype = next(k for k in KNOBS if k.name == "precision").parity(candidate.precision)
    rounds = isinstance(request, GradientRequest) and knob != "precision"  # updates are in fp32 whatever the precision
    allowed = parity.tolerance + (dtype.tolerance if dtype and rounds else 0.0)
    answer = ask(request)
    name = parity_gate(knob, parity.runs)
    if isinstance(answer, Failure):
        why = f"what it computes could not be checked on this machine ({answer.outcome}: {answer.message})"
        return Gate(name=name, available=False, reason=why), answer.outcome not in PASSING
    what = "adapter gradients" if isinstance(request, GradientRequest) else "updates of the adapter"
    error = f"{what} differ by {answer:.2g} from the reference's, {allowed:.2g} may be ({parity.because})"
    if not math.isfinite(answer):
        error = f"{what} are not finite, or there are none"
    return Gate(name=name, available=answer <= allowed, reason=error), True


def _to_prove(choices: Mapping[str, Sequence[Choice]]) -> list[tuple[str, Parity]]:
    """(knob, parity) of every kind of computation among the choices, precisions first: all others run in one."""
    found: dict[str, tuple[str, Parity]] = {}
    for knob in sorted(KNOBS, key=lambda knob: knob.name != "precision"):
        for choice in choices.get(knob.name, ()):
            if parity := knob.parity(choice):
                found.setdefault(parity_gate(knob.name, parity.runs), (knob.name, parity))
    return list(found.values())


def _requests(setting: Setting, tiny: Mapping[str, object], runner: ProcessTrialRunner) -> Make:
    work = small_work(setting.family, setting.workload)

    def make(knob: str, candidate: Candidate) -> ParityRequest:
        if knob == "optimizer":
            return UpdateRequest(candidate, runner.device)
        asked = Setting(setting.hardware, setting.family, work)
        refuses = any(knob.conflict(candidate, asked) for knob in KNOBS)  # masks, where captions differ in length
        fields = {**dict(work), "text_padding": "exact"} if refuses else dict(work)
        return GradientRequest(
            family=setting.family.name,
            config=tiny,
            workload=Workload.model_validate(fields),
            candidate=candidate,
            device=runner.device,
        )

    return make


def small_work(family: Family, workload: Workload) -> Workload:
    """The same kind of work in a small shape: two captions, few pixels."""
    largest, step = workload.largest_bucket, family.size_multiple_px
    shape = {
        "width_px": min(largest.width_px, 6 * step),
        "height_px": min(largest.height_px, 4 * step),
        "num_frames": min(largest.num_frames, 5),
        "num_items": 2,
    }
    bucket = type(largest).model_validate(shape)
    tokens = min(workload.max_text_tokens, MOST_TEXT_TOKENS)
    changes = {"buckets": (bucket,), "max_text_tokens": tokens, "effective_batch_size": 2, "rank": 4}
    return Workload.model_validate({**dict(workload), **changes})


def _path(setting: Setting, tiny: Mapping[str, object], precision: str) -> Path:
    """Where verdicts on this machine, with these libraries, for this kind of work are kept."""
    work = small_work(setting.family, setting.workload).model_dump(mode="json", exclude={"model"})
    key = {
        "autotune": __version__,
        "precision": precision,
        "machine": setting.hardware.fingerprint,
        "device": setting.hardware.device.name,
        "libraries": setting.hardware.versions.model_dump(mode="json"),
        "family": setting.family.name,
        "config": json.loads(json.dumps(tiny, default=list)),
        "work": work,
    }
    name = digest_of(key).removeprefix("sha256:")[:32]
    return platformdirs.user_data_path("autotune") / "parity" / f"{name}.json"


def _kept(path: Path) -> dict[str, Gate]:
    """Verdicts by name; none where the file is absent or damaged: they are found again."""
    try:
        gates = [Gate.model_validate_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, ValidationError):
        return {}
    return {gate.name: gate for gate in gates}


def _keep(path: Path, gate: Gate) -> None:
    gates = {**_kept(path), gate.name: gate}
    with contextlib.suppress(OSError):  # a verdict that cannot be kept is found again
        write_whole(path, "".join(f"{one.model_dump_json()}\n" for one in gates.values()))
