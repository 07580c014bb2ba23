"""A choice may be tried on a machine only if its adapter gradients agree with the reference's
there; an optimizer is given its gradients, so its updates have to agree.

Reference: the same weights and inputs in fp32, native attention (plain products to check that),
nothing quantized or recomputed, on a tiny instance of the family's real class. Verdicts become
capabilities named `parity.<knob>.<choice>`, saved for each machine, set of versions and work.
"""

import contextlib
import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autotune.knobs.attention import token_multiple
from autotune.knobs.knob import GradientTolerance, TuningContext, gradient_capability
from autotune.knobs.quantized_layers import torch_dtype
from autotune.knobs.registry import GRADIENT_TOLERANCES, KNOBS, Attention
from autotune.knobs.settings import precision_tolerance
from autotune.models import registry, resolve
from autotune.models.adapter import add_adapter
from autotune.models.family import Family, denoising_loss
from autotune.plan.base import digest_of
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.hardware import Capability
from autotune.plan.workload import ADAMW, Bucket, Workload
from autotune.search.trials import ProcessTrialRunner
from autotune.search.worker import ChildState, Failure, longest_captions, synthetic_samples
from autotune.system import files, version
from autotune.train.model import apply_knobs, find_kernel
from autotune.train.optimizer import AdapterOptimizer
from autotune.train.step import to_device
from autotune.weights.empty import build_empty
from autotune.weights.stream import cast_as_loaded, fill_random

MAX_TEXT_TOKENS = 40
"""With the picture's 24 tokens 64: cuDNN's gradients were infinite for masks of 64 modulo 128."""
RANK = 4  # rank of the adapter: how it is multiplied does not depend on it
TIMEOUT_SECONDS = 300.0  # compiling blocks takes a minute or two on a CPU
TRANSIENT_OUTCOMES = ("timeout", "oom", "host_oom")  # of the moment: they are not saved
NUM_UPDATES = 3
LOSS_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)  # fp16 takes the first without overflow
UPDATED_SHAPES = ((4, 64), (96, 4), (7,))  # of parameters; one is no multiple of a vector's length


@dataclass(frozen=True)
class GradientRequest:
    """Compares a candidate's adapter gradients; gives their relative error, a float."""

    family: str
    config: Mapping[str, Any]  # constructor arguments of the tiny transformer
    workload: Workload
    candidate: Candidate
    device: str
    reference_attention: str = "native"

    def perform(self, child: ChildState) -> float:
        """Measure the relative error against fp32, nothing quantized, nothing recomputed."""
        cache = child.cache
        torch.set_float32_matmul_precision("highest")
        if "plain" not in cache:
            cache["plain"] = plain_transformer(self)
        key = f"reference {self.workload.text_padding} {self.reference_attention}"
        if key not in cache:
            reference = Candidate(
                micro_batch_size=self.candidate.micro_batch_size,
                checkpointed_blocks=0,
                precision="fp32",
                attention=self.reference_attention,
            )
            cache[key] = adapter_gradients(replace(self, candidate=reference), cache["plain"])
        torch.set_float32_matmul_precision("high")  # as training
        found = adapter_gradients(self, cache["plain"])
        return relative_error(found, cache[key])


@dataclass(frozen=True)
class UpdateRequest:
    """Compares the updates of a candidate's optimizer; gives their relative error, a float."""

    candidate: Candidate
    device: str

    def perform(self, _: ChildState) -> float:
        """Measure an adapter's change over some steps against plain AdamW in fp64."""
        generator, dtype = torch.Generator().manual_seed(0), torch_dtype(self.candidate.precision)
        start = [torch.randn(shape, generator=generator).to(dtype) for shape in UPDATED_SHAPES]
        parameters = [nn.Parameter(tensor.to(self.device, copy=True)) for tensor in start]
        own = AdapterOptimizer(parameters, learning_rate=1e-3, weight_decay=1e-2, max_grad_norm=1.0)
        plain = [nn.Parameter(tensor.double()) for tensor in start]
        adamw = torch.optim.AdamW(plain, lr=1e-3, weight_decay=1e-2, foreach=False, fused=False)
        for _step in range(NUM_UPDATES):
            for parameter, wanted in zip(own.parameters, plain, strict=True):
                # divided, so that fp16 has room for its scale
                gradient = torch.randn(wanted.shape, generator=generator).div_(16).to(dtype)
                parameter.grad, wanted.grad = own.scale(gradient.to(self.device)), gradient.double()
            own.step()
            nn.utils.clip_grad_norm_(plain, 1.0)
            adamw.step()

        def changes(parameters: Sequence[Tensor]) -> list[Tensor]:
            pairs = zip(parameters, start, strict=True)
            return [after.detach().double().cpu() - before.double() for after, before in pairs]

        return relative_error(changes(own.masters), changes(plain))


GradientCheckRequest = GradientRequest | UpdateRequest


def check_gradients(
    context: TuningContext, choices: Mapping[str, Sequence[Choice]], model: resolve.ResolvedModel
) -> tuple[Capability, ...]:
    """Judge those of `choices` that change what is computed, in the first precision: attention
    first, and all others with the first that is right. If none is, those that a search would not
    try are judged, until one is right."""
    kinds, usable = _kinds_of_computation(choices), Attention().choices_for_family(context)
    spare = (*usable.admitted, *usable.pinnable) if "attention" in choices else ()
    attends = _kinds_of_computation({"attention": (*choices.get("attention", ()), *spare)})
    tiny_config = {**model.config, **context.family.tiny_config}
    precision = str(choices["precision"][0])
    path = _verdict_file(context, tiny_config, precision)
    verdicts, found, attention = _read_verdicts(path), [], ""
    work = context.hardware, model, context.workload
    with contextlib.ExitStack() as stack:
        runner: ProcessTrialRunner | None = None
        for name, (knob, rule) in {**attends, **kinds}.items():
            if name not in kinds and attention:
                continue
            if name not in verdicts:
                runner = runner or stack.enter_context(
                    ProcessTrialRunner(*work, budget_bytes=context.budget_bytes)
                )
                request = _build_request(
                    context, tiny_config, runner.device, precision, knob, rule, attention
                )
                result = runner.send(request, timeout_seconds=TIMEOUT_SECONDS)
                verdicts[name] = _judge(name, knob, rule, request, result)
                if not (isinstance(result, Failure) and result.outcome in TRANSIENT_OUTCOMES):
                    _save_verdict(path, verdicts[name])
            found.append(verdicts[name])
            if knob == "attention" and verdicts[name].available:
                attention = attention or str(rule.checked_choice)
    return tuple(found)


def _judge(
    name: str,
    knob: str,
    rule: GradientTolerance,
    request: GradientCheckRequest,
    result: float | Failure,
) -> Capability:
    if isinstance(result, Failure):
        why = f"({result.outcome}: {result.message})"
        reason = f"what it computes could not be checked on this machine {why}"
        return Capability(name=name, available=False, reason=reason, outcome=result.outcome)
    what, allowed = "updates of the adapter", rule.tolerance  # in fp32 whatever the precision
    if isinstance(request, GradientRequest):
        what = "adapter gradients"
        if knob != "precision" and (dtype := precision_tolerance(request.candidate.precision)):
            allowed += dtype.tolerance
    reason = (
        f"{what} differ by {result:.2g} from the reference's, {allowed:.2g} is allowed "
        f"({rule.reason})"
    )
    if not math.isfinite(result):
        reason = f"{what} are not finite, or there are none"
    return Capability(name=name, available=result <= allowed, reason=reason)


def _kinds_of_computation(
    choices: Mapping[str, Sequence[Choice]],
) -> dict[str, tuple[str, GradientTolerance]]:
    found: dict[str, tuple[str, GradientTolerance]] = {}
    for knob, rule_of in GRADIENT_TOLERANCES.items():
        for choice in choices.get(knob, ()):
            if rule := rule_of(choice):
                found.setdefault(gradient_capability(knob, rule.checked_choice), (knob, rule))
    return found


def _build_request(
    context: TuningContext,
    tiny_config: Mapping[str, object],
    device: str,
    precision: str,
    knob: str,
    rule: GradientTolerance,
    attention: str,
) -> GradientCheckRequest:
    usual = Candidate.model_fields["attention"].default
    fields = {"micro_batch_size": 2, "checkpointed_blocks": 0, "precision": precision}
    fields |= {"attention": attention or usual, knob: rule.checked_choice, **rule.other_choices}
    candidate = Candidate.model_validate(fields)
    if knob == "optimizer":
        return UpdateRequest(candidate, device)
    work = small_workload(context.family, context.workload)
    small_context = TuningContext(context.hardware, context.family, work)
    if any(one.why_not(candidate, small_context) for one in KNOBS):
        work = work.changed(text_padding="exact")  # captions that differ in length need masks
    is_reference = (knob, rule.checked_choice) == ("attention", usual)
    reference = "_native_math" if is_reference else GradientRequest.reference_attention
    return GradientRequest(context.family.name, tiny_config, work, candidate, device, reference)


def small_workload(family: Family, workload: Workload) -> Workload:
    """Make the same kind of work small: two captions, few pixels, a tiny adapter."""
    largest, step = workload.largest_bucket, family.size_multiple_px
    bucket = Bucket(
        width_px=min(largest.width_px, 6 * step),
        height_px=min(largest.height_px, 4 * step),
        num_frames=min(largest.num_frames, 5),
        num_items=2,
    )
    return workload.changed(
        buckets=(bucket,),
        max_text_tokens=min(workload.max_text_tokens, MAX_TEXT_TOKENS),
        text_token_quantiles=(),
        effective_batch_size=2,
        lora_dropout=0.0,
        preserve_prior=0.0,
        adapted_blocks="all",
        ema_decay=0.0,
        optimizer=ADAMW,
        rank=RANK,
        lora_alpha=float(RANK),
    )


def _verdict_file(
    context: TuningContext, tiny_config: Mapping[str, object], precision: str
) -> Path:
    work = small_workload(context.family, context.workload)
    key = {
        "autotune": version.__version__,
        "precision": precision,
        "machine": context.hardware.match_keys,
        "device": context.hardware.device.name,
        "libraries": context.hardware.versions.model_dump(mode="json"),
        "family": context.family.name,
        "config": json.loads(json.dumps(tiny_config, default=list)),
        "work": work.model_dump(mode="json", exclude={"model"}),
    }
    name = digest_of(key).removeprefix("sha256:")[:32]
    return files.data_path("parity", f"{name}.json")


def _read_verdicts(path: Path) -> dict[str, Capability]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        capabilities = map(Capability.model_validate_json, lines)
        return {capability.name: capability for capability in capabilities}
    except (OSError, ValueError):  # absent or damaged: they are found again
        return {}


def _save_verdict(path: Path, capability: Capability) -> None:
    capabilities = {**_read_verdicts(path), capability.name: capability}
    text = "".join(f"{one.model_dump_json()}\n" for one in capabilities.values())
    with contextlib.suppress(OSError):  # what cannot be saved is found again
        files.write_text_atomic(path, text)


def relative_error(tensors: Sequence[Tensor | None], reference: Sequence[Tensor | None]) -> float:
    """Average tensors' relative errors (root mean square); a missing tensor counts as 1, one whose
    reference is missing or zero not at all; infinite if none is left."""
    errors = []
    for found, wanted in zip(tensors, reference, strict=True):
        size = 0.0 if wanted is None else float(wanted.norm())
        if wanted is None or size == 0.0:
            continue
        errors.append(1.0 if found is None else float((found - wanted).norm()) / size)
    return math.sqrt(math.fsum(error**2 for error in errors) / len(errors)) if errors else math.inf


def plain_transformer(request: GradientRequest) -> nn.Module:
    """Build the tiny transformer in fp32, with weights that bf16 holds exactly."""
    family = registry.get_family(request.family)
    transformer = build_empty(lambda: family.build_transformer(request.config), dtype=torch.float32)
    fill_random(transformer, device=request.device, seed=0)
    for parameter in transformer.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return transformer.eval().requires_grad_(False)  # as loaded: only frozen weights are swapped


def adapter_gradients(request: GradientRequest, plain: nn.Module) -> list[Tensor | None]:
    """Run a copy of the transformer under the candidate's settings; fp64 on the CPU."""
    candidate, family = request.candidate, registry.get_family(request.family)
    dtype, device = torch_dtype(candidate.precision), torch.device(request.device)
    work = request.workload
    transformer = copy.deepcopy(plain)
    cast_as_loaded(transformer, dtype)
    apply_knobs(family, transformer, candidate, needs_reload=True)
    adapter = add_adapter(family, transformer, work, dtype)
    apply_knobs(family, transformer, candidate, needs_reload=False)
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter:  # both halves away from zero, or half of the gradients would be zero
        if parameter.numel() == max(parameter.shape):
            continue  # norms of weights, by DoRA
        values = torch.randn(parameter.shape, generator=generator) / max(parameter.shape)
        parameter.data.copy_(values.bfloat16())
    lengths = longest_captions(family, work, candidate.micro_batch_size)
    bucket = work.largest_bucket
    samples = synthetic_samples(family, request.config, work, bucket, lengths, torch.bfloat16)
    multiple = token_multiple(find_kernel(candidate, device, masked=True))
    collated = family.collate(samples, multiple)
    batch = to_device(collated, device, dtype)
    clean = batch["latents"]
    noise = torch.randn(clean.shape, generator=generator).bfloat16().to(clean)
    # Exact in bf16, a thousandfold too: rounded noise levels are other inputs.
    shares = torch.linspace(0.25, 0.5, len(clean)).tolist()
    levels = torch.tensor([family.noise.level(share) for share in shares], device=clean.device)
    loss = denoising_loss(family, transformer, batch, noise, levels)
    scales = LOSS_SCALES if dtype == torch.float16 else (1.0,)
    for scale in scales:
        (loss * scale).backward(retain_graph=scale != scales[-1])  # type: ignore[no-untyped-call]
        found = [None if p.grad is None else p.grad.double().cpu() / scale for p in adapter]
        if all(gradient is None or gradient.isfinite().all() for gradient in found):
            break
        for parameter in adapter:
            parameter.grad = None
    return found
