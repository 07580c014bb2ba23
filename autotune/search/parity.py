"""Parity first: a choice may be tried on a machine only if its adapter gradients agree with the
reference's there.

An optimizer is given its gradients: its updates have to agree.

Reference: the same weights and inputs in fp32, native attention (for native attention itself: plain
products), nothing quantized, nothing recomputed, on a tiny instance of the family's real class, on
this device. Verdicts become capabilities of the hardware profile, named `parity.<knob>.<choice>`,
and are saved for each machine, set of library versions and kind of work: a plan seldom waits for
them.
"""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.knobs.knob import Parity, TuningContext, parity_capability
from autotune.knobs.registry import KNOBS, PARITY
from autotune.knobs.settings import precision_parity
from autotune.models.family import Family
from autotune.models.resolve import ResolvedModel
from autotune.plan.base import digest_of
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.hardware import Capability, HardwareProfile
from autotune.plan.workload import ADAMW, Bucket, Workload
from autotune.search.requests import Failure, GradientRequest, UpdateRequest
from autotune.search.runner import ProcessTrialRunner
from autotune.system.files import data_path, write_text_atomic
from autotune.system.version import __version__

MAX_TEXT_TOKENS = 40
"""With the 24 tokens of the small picture 64: cuDNN's kernel has returned gradients that are not
finite where a mask meets a length of 64 modulo 128."""
RANK = 4
"""Rank of the adapter: how it is multiplied does not depend on it."""
TIMEOUT_SECONDS = 300.0
"""Compiling blocks takes a minute or two on a CPU."""
TRANSIENT_OUTCOMES = ("timeout", "oom", "host_oom")
"""Outcomes that say more about the moment than about the choice: they are not saved."""

ParityRequest = GradientRequest | UpdateRequest


def check_parity(
    context: TuningContext, choices: Mapping[str, Sequence[Choice]], model: ResolvedModel
) -> HardwareProfile:
    """The hardware profile with a capability for each of `choices` that changes what is computed.

    Args:
        context: hardware, family and workload.
        choices: values by knob; the first precision is the one that the others are checked in.
        model: the model whose tiny instance is run.

    Raises:
        AutotuneError: another search has the device and does not end.
    """
    hardware, kinds = context.hardware, _kinds_of_computation(choices)
    tiny_config = {**model.config, **context.family.tiny_config}
    precision = str(choices["precision"][0])
    path = _verdict_file(context, tiny_config, precision)
    verdicts = _read_verdicts(path)
    missing = [name for name in kinds if name not in verdicts]
    if missing:
        with ProcessTrialRunner(
            hardware, model.spec.name, context.workload, budget=context.budget
        ) as runner:
            for name in missing:
                request = _build_request(
                    context, tiny_config, runner.device, precision, *kinds[name]
                )
                result = runner.ask(request, timeout_seconds=TIMEOUT_SECONDS)
                verdicts[name], is_lasting = judge_parity(*kinds[name], request, result)
                if is_lasting:
                    _save_verdict(path, verdicts[name])
    return hardware.changed(
        capabilities=(*hardware.capabilities, *(verdicts[name] for name in kinds))
    )


def judge_parity(
    knob: str, parity: Parity, request: ParityRequest, result: float | Failure
) -> tuple[Capability, bool]:
    """Whether gradients or updates under the choice agree, and whether that will be so tomorrow."""
    name = parity_capability(knob, parity.checked_choice)
    if isinstance(result, Failure):
        reason = (
            f"what it computes could not be checked on this machine ({result.outcome}: "
            f"{result.message})"
        )
        return Capability(
            name=name, available=False, reason=reason
        ), result.outcome not in TRANSIENT_OUTCOMES
    what, allowed = (
        "updates of the adapter",
        parity.tolerance,
    )  # which are in fp32 whatever the precision
    if isinstance(request, GradientRequest):
        what = "adapter gradients"
        if knob != "precision" and (dtype := precision_parity(request.candidate.precision)):
            allowed += dtype.tolerance
    reason = (
        f"{what} differ by {result:.2g} from the reference's, {allowed:.2g} is allowed "
        f"({parity.reason})"
    )
    if not math.isfinite(result):
        reason = f"{what} are not finite, or there are none"
    return Capability(name=name, available=result <= allowed, reason=reason), True


def _kinds_of_computation(choices: Mapping[str, Sequence[Choice]]) -> dict[str, tuple[str, Parity]]:
    """Knob and parity rule of every kind of computation among the choices, by capability name,
    precisions first."""
    found: dict[str, tuple[str, Parity]] = {}
    for name, rule in PARITY.items():
        for choice in choices.get(name, ()):
            if parity := rule(choice):
                found.setdefault(parity_capability(name, parity.checked_choice), (name, parity))
    return found


def _build_request(
    context: TuningContext,
    tiny_config: Mapping[str, object],
    device: str,
    precision: str,
    knob: str,
    parity: Parity,
) -> ParityRequest:
    fields = {
        "micro_batch_size": 2,
        "checkpointed_blocks": 0,
        "precision": precision,
        knob: parity.checked_choice,
    }
    candidate = Candidate.model_validate({**fields, **parity.other_choices})
    if knob == "optimizer":
        return UpdateRequest(candidate, device)
    work = small_workload(context.family, context.workload)
    small_context = TuningContext(context.hardware, context.family, work)
    if any(
        one.conflict(candidate, small_context) for one in KNOBS
    ):  # masks, if captions differ in length
        work = work.changed(text_padding="exact")
    is_reference = (knob, parity.checked_choice) == (
        "attention",
        Candidate.model_fields["attention"].default,
    )
    reference = "_native_math" if is_reference else GradientRequest.reference_attention
    return GradientRequest(context.family.name, tiny_config, work, candidate, device, reference)


def small_workload(family: Family, workload: Workload) -> Workload:
    """The same kind of work in a small shape: two captions, few pixels, a tiny adapter."""
    largest, step = workload.largest_bucket, family.size_multiple_px
    bucket = Bucket(
        width_px=min(largest.width_px, 6 * step),
        height_px=min(largest.height_px, 4 * step),
        num_frames=min(largest.num_frames, 5),
        num_items=2,
    )
    tokens = min(workload.max_text_tokens, MAX_TEXT_TOKENS)
    shape = {
        "buckets": (bucket,),
        "max_text_tokens": tokens,
        "text_token_quantiles": (),
        "effective_batch_size": 2,
    }
    usual = {"lora_dropout": 0.0, "adapted_blocks": "all", "ema_decay": 0.0, "optimizer": ADAMW}
    return workload.changed(**shape, **usual, rank=RANK, lora_alpha=float(RANK))


def _verdict_file(
    context: TuningContext, tiny_config: Mapping[str, object], precision: str
) -> Path:
    """Where verdicts on this machine, with these libraries, for this kind of work are saved."""
    work = small_workload(context.family, context.workload).model_dump(
        mode="json", exclude={"model"}
    )
    key = {
        "autotune": __version__,
        "precision": precision,
        "machine": context.hardware.match_keys,
        "device": context.hardware.device.name,
        "libraries": context.hardware.versions.model_dump(mode="json"),
        "family": context.family.name,
        "config": json.loads(json.dumps(tiny_config, default=list)),
        "work": work,
    }
    name = digest_of(key).removeprefix("sha256:")[:32]
    return data_path("parity", f"{name}.json")


def _read_verdicts(path: Path) -> dict[str, Capability]:
    """Verdicts by name; none if the file is absent or damaged: they are then found again."""
    try:
        capabilities = [
            Capability.model_validate_json(line)
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
    except (OSError, ValueError):
        return {}
    return {capability.name: capability for capability in capabilities}


def _save_verdict(path: Path, capability: Capability) -> None:
    capabilities = {**_read_verdicts(path), capability.name: capability}
    with contextlib.suppress(OSError):  # what cannot be saved is found again
        write_text_atomic(
            path, "".join(f"{one.model_dump_json()}\n" for one in capabilities.values())
        )
