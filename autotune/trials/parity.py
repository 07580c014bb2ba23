"""Parity first: a choice may be tried on a machine only once its adapter gradients agree with the reference's there.

An optimizer's gradients are given: its updates have to agree.

Reference: the same weights and inputs in fp32, native attention, nothing quantized, nothing recomputed, on a tiny
instance of the family's real class, on this device. Verdicts become capabilities of the machine's profile,
`parity.<knob>.<choice>`, and are kept for each machine, set of library versions and kind of work, so that a plan seldom
waits for them.
"""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import platformdirs

from autotune.backends import Registry
from autotune.families import Family, ResolvedModel
from autotune.knobs import KNOBS, Parity, Precision, TuningContext, parity_capability
from autotune.runtime import __version__, write_text_atomic
from autotune.schema import Bucket, Candidate, Capability, Choice, HardwareProfile, Workload, digest_of
from autotune.trials.requests import GradientRequest, UpdateRequest
from autotune.trials.runner import ProcessTrialRunner
from autotune.trials.worker import Failure

MOST_TEXT_TOKENS = 77
RANK = 4
"""Of the adapter: how it is multiplied does not depend on it."""
TIMEOUT_SECONDS = 300.0
"""Compiling blocks takes a minute or two on a processor."""
PASSING = ("timeout", "oom", "host_oom")
"""Outcomes that say more about the moment than about the choice: not kept."""

ParityRequest = GradientRequest | UpdateRequest


def check_parity(
    context: TuningContext,
    choices: Mapping[str, Sequence[Choice]],
    model: ResolvedModel,
) -> HardwareProfile:
    """The machine with a capability for each of `choices` that changes results, found now or by an earlier plan.

    Raises:
        AutotuneError: another search has the device and does not end.
    """
    hardware, to_prove = context.hardware, _to_prove(choices)
    tiny = {**model.config, **context.family.tiny_config}
    precision = str(choices["precision"][0])
    path = _path(context, tiny, precision)
    known = _kept(path)
    missing = [name for name in to_prove if name not in known]
    if missing:
        with ProcessTrialRunner(hardware, model.spec.name, context.workload) as runner:
            for name in missing:
                request = _request(context, tiny, runner.device, precision, *to_prove[name])
                answer = runner.ask(request, timeout_seconds=TIMEOUT_SECONDS)
                known[name], lasting = verdict(*to_prove[name], request, answer)
                if lasting:
                    _keep(path, known[name])
    capabilities = (*hardware.capabilities, *(known[name] for name in to_prove))
    return hardware.changed(capabilities=capabilities)


def verdict(knob: str, parity: Parity, request: ParityRequest, answer: float | Failure) -> tuple[Capability, bool]:
    """Whether gradients or updates under the choice agree, and whether that will be so tomorrow."""
    name = parity_capability(knob, parity.checked_choice)
    if isinstance(answer, Failure):
        why = f"what it computes could not be checked on this machine ({answer.outcome}: {answer.message})"
        return Capability(name=name, available=False, reason=why), answer.outcome not in PASSING
    what, allowed = "updates of the adapter", parity.tolerance  # which are in fp32 whatever the precision
    if isinstance(request, GradientRequest):
        what = "adapter gradients"
        if knob != "precision" and (dtype := Precision().parity(request.candidate.precision)):
            allowed += dtype.tolerance
    error = f"{what} differ by {answer:.2g} from the reference's, {allowed:.2g} may be ({parity.reason})"
    if not math.isfinite(answer):
        error = f"{what} are not finite, or there are none"
    return Capability(name=name, available=answer <= allowed, reason=error), True


def _to_prove(choices: Mapping[str, Sequence[Choice]]) -> dict[str, tuple[str, Parity]]:
    """Knob and parity of every kind of computation among the choices, by capability name, precisions first."""
    found: dict[str, tuple[str, Parity]] = {}
    for knob in sorted(KNOBS, key=lambda knob: knob.name != "precision"):
        for choice in choices.get(knob.name, ()):
            if parity := knob.parity(choice):
                found.setdefault(parity_capability(knob.name, parity.checked_choice), (knob.name, parity))
    return found


def _request(
    context: TuningContext, tiny: Mapping[str, object], device: str, precision: str, knob: str, parity: Parity
) -> ParityRequest:
    fields = {"micro_batch_size": 2, "checkpointed_blocks": 0, "precision": precision, knob: parity.checked_choice}
    candidate = Candidate.model_validate({**fields, **parity.other_choices})
    if knob == "optimizer":
        return UpdateRequest(candidate, device)
    work = small_work(context.family, context.workload)
    asked = TuningContext(context.hardware, context.family, work)
    if any(one.conflict(candidate, asked) for one in KNOBS):  # masks, where captions differ in length
        work = work.changed(text_padding="exact")
    return GradientRequest(context.family.name, tiny, work, candidate, device)


def small_work(family: Family, workload: Workload) -> Workload:
    """The same kind of work in a small shape: two captions, few pixels, a tiny adapter."""
    largest, step = workload.largest_bucket, family.size_multiple_px
    bucket = Bucket(
        width_px=min(largest.width_px, 6 * step),
        height_px=min(largest.height_px, 4 * step),
        num_frames=min(largest.num_frames, 5),
        num_items=2,
    )
    tokens = min(workload.max_text_tokens, MOST_TEXT_TOKENS)
    shape = {"buckets": (bucket,), "max_text_tokens": tokens, "text_token_quantiles": (), "effective_batch_size": 2}
    return workload.changed(**shape, rank=RANK, lora_alpha=float(RANK), lora_dropout=0.0)


def _path(context: TuningContext, tiny: Mapping[str, object], precision: str) -> Path:
    """Where verdicts on this machine, with these libraries, for this kind of work are kept."""
    work = small_work(context.family, context.workload).model_dump(mode="json", exclude={"model"})
    key = {
        "autotune": __version__,
        "precision": precision,
        "machine": context.hardware.fingerprint,
        "device": context.hardware.device.name,
        "libraries": context.hardware.versions.model_dump(mode="json"),
        "extensions": dict(Registry.load_extensions()),
        "family": context.family.name,
        "config": json.loads(json.dumps(tiny, default=list)),
        "work": work,
    }
    name = digest_of(key).removeprefix("sha256:")[:32]
    return platformdirs.user_data_path("autotune") / "parity" / f"{name}.json"


def _kept(path: Path) -> dict[str, Capability]:
    """Verdicts by name; none where the file is absent or damaged: they are found again."""
    try:
        capabilities = [Capability.model_validate_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return {}
    return {capability.name: capability for capability in capabilities}


def _keep(path: Path, capability: Capability) -> None:
    capabilities = {**_kept(path), capability.name: capability}
    with contextlib.suppress(OSError):  # a verdict that cannot be kept is found again
        write_text_atomic(path, "".join(f"{one.model_dump_json()}\n" for one in capabilities.values()))
