"""Planned settings against fixed settings that trainers publish and against a plain diffusers loop;
FLOP utilization.

All at the same effective batch, one after the other in turns, each in a process of its own.
Published elsewhere for comparison: Qwen-Image, 1024 px, rank 8, batch 1, all blocks checkpointed,
bf16: 1.20 s a step and 41 GiB on an H100.
"""

import time
from dataclasses import dataclass
from typing import Any

from accuracy import ALL, INT8, tried, unavailable_choice
from evidence import Evidence, begin, candidate, precision_of, workload_of
from search import plan, plan_command

from autotune.cost.kernels import kernel_for
from autotune.cost.predict import CostModel
from autotune.machine.probe import cached_profile
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import ModelRef
from autotune.plan.workload import Workload
from autotune.search.trials import ProcessTrialRunner
from autotune.search.worker import TASKS, ChildState

ROUNDS, STEPS, RANK, BATCH = 2, 4, 8, 2


@dataclass(frozen=True)
class PlainLoop:
    """Steps of the loop in diffusers' LoRA scripts: fp32 adapter under autocast, all blocks
    checkpointed, batch 1."""

    family: str
    config: dict[str, Any]
    workload: Workload
    device: str
    num_steps: int


def run_plain_loop(request: PlainLoop, _: ChildState) -> dict[str, Any]:
    import torch
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    from autotune.models.registry import get_family
    from autotune.search.worker import longest_captions, synthetic_samples

    family, rank, on_gpu = (
        get_family(request.family),
        request.workload.rank,
        request.device.startswith("cuda"),
    )
    dtype = torch.bfloat16 if on_gpu else torch.float32
    torch.set_default_dtype(dtype)
    with torch.device(request.device):
        transformer: Any = family.build_transformer(request.config)
    torch.set_default_dtype(torch.float32)
    transformer.requires_grad_(False)
    transformer.enable_gradient_checkpointing()
    targets = family.target_sets[request.workload.targets]
    transformer.add_adapter(LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian",
                                       target_modules=list(targets)))  # fmt: skip
    cast_training_params([transformer], dtype=torch.float32)
    transformer.train()
    parameters = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=1e-4)
    work = request.workload
    lengths = longest_captions(work, work.effective_batch_size)
    samples = synthetic_samples(family, request.config, work, work.largest_bucket, lengths, dtype)
    batches = [
        {k: v.to(request.device) for k, v in family.collate([sample]).items()} for sample in samples
    ]
    seconds = []
    for _step in range(request.num_steps + 1):
        started = time.perf_counter()
        for batch in batches:
            clean = batch["latents"]
            noise = torch.randn_like(clean)
            sigma = torch.sigmoid(torch.randn(len(clean), device=request.device))
            noisy = (1 - sigma.view(-1, 1, 1, 1, 1)) * clean + sigma.view(-1, 1, 1, 1, 1) * noise
            with torch.autocast(request.device.split(":")[0], torch.bfloat16, enabled=on_gpu):
                velocity = family.predict(transformer, noisy.to(dtype), sigma, batch)
            loss = torch.nn.functional.mse_loss(velocity.float(), (noise - clean).float()) / len(
                batches
            )
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated(request.device) if on_gpu else None
    return {"step_seconds": seconds[1:], "peak_memory_bytes": peak}


TASKS[PlainLoop] = run_plain_loop


def model_flops(predictor: CostModel, chosen: Candidate) -> float:
    """Of one image, forward and backward, nothing counted twice for recomputation; from the
    traced graph."""
    model = predictor.model
    device, cudnn = predictor.hardware.device, predictor.hardware.versions.cudnn
    known = chosen.attention, predictor.model.rules, False, chosen.precision
    kernel = kernel_for(*known, capability=device.compute_capability, cudnn=cudnn)
    trace = model.traced(chosen.precision, "none", kernel, 1, 0)
    index = model.index
    fixed = [segment for segment in vars(trace).values() if hasattr(segment, "work")]
    blocks = [segments[i] for segments in (trace.forward, trace.backward) for i in index]
    return float(
        sum(
            item[2] * count for segment in (*fixed, *blocks) for item, count in segment.work.items()
        )
    )


def contestants(
    evidence: Evidence, hardware: HardwareProfile, model: str, workload: Workload
) -> dict[str, Any]:
    precision = precision_of(hardware)
    seconds = (
        0.3 * evidence.left()
    )  # of trials; proving gradients and confirming the winner come on top
    made: Any = plan(
        evidence, plan_command(evidence, model, RANK, BATCH, seconds), share_of_time=0.6
    )
    return {
        "bf16, all checkpointed, batch 1": candidate(workload, 1, ALL, precision=precision),
        "plain diffusers loop": None,
        "int8, all checkpointed, batch 1": candidate(workload, 1, ALL, INT8, precision=precision),
        "planned": Candidate.model_validate(made["frozen"]["settings"]) if made else None,
    }


def main() -> None:
    """Measure the part."""
    evidence = begin(
        "training", __doc__, published={"step_seconds": 1.20, "memory_gib": 41, "gpu": "H100"}
    )
    hardware = cached_profile()
    model = evidence.model("qwen-image")
    resolved = resolve_model(ModelRef.of(model))
    workload = workload_of(model, evidence.size(1024), rank=RANK, batch=BATCH)
    found = contestants(evidence, hardware, model, workload)
    predictor = CostModel.build(hardware, workload, resolved.family, resolved.config)
    matmul = max(
        (rate.value for rate in hardware.rates if rate.name.startswith("matmul.bf16")), default=None
    )
    flops = model_flops(predictor, found["bf16, all checkpointed, batch 1"])
    evidence.row("work", model_flops_per_image=flops, matmul_flops_per_second=matmul, batch=BATCH)
    with ProcessTrialRunner(hardware, resolve_model(ModelRef.of(model)), workload) as runner:
        turns = [(name, turn) for turn in range(ROUNDS) for name in found]
        for name, turn in evidence.each(turns):
            chosen = found[name]
            if name == "plain diffusers loop":
                plain = PlainLoop(
                    resolved.family.name, dict(resolved.config), workload, runner.device, STEPS
                )
                row = evidence.ask(runner, plain, ("plain", turn))
            elif why := "no plan" if chosen is None else unavailable_choice(hardware, chosen):
                evidence.skip(name, why)
                continue
            else:
                row = tried(evidence, runner, chosen, STEPS)[0].model_dump(mode="json")
            evidence.row("steps", name=name, turn=turn, **row)


if __name__ == "__main__":
    main()
