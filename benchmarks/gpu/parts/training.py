"""Planned settings against a plain diffusers loop, at the same effective batch and in turns, each
in a process of its own: `--plans FILE,FILE`.

Published elsewhere for comparison: Qwen-Image, 1024 px, rank 8, batch 1, all blocks checkpointed,
bf16: 1.20 s a step and 41 GiB on an H100.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence import Evidence, begin, workload_of
from truth import Case, candidate_of

from autotune.knobs.registry import reload_key
from autotune.machine.probe import cached_profile
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.job import ModelRef
from autotune.plan.workload import Workload
from autotune.search.trials import ProcessTrialRunner
from autotune.search.worker import ChildState, TrialRequest

TURNS, STEPS = 2, 4
CASE = Case("qwen-image", ())


@dataclass(frozen=True)
class PlainLoop:
    """Steps of the loop in diffusers' LoRA scripts: fp32 adapter under autocast, all blocks
    checkpointed, batch 1."""

    family: str
    config: dict[str, Any]
    workload: Workload
    device: str
    num_steps: int

    def perform(self, _: ChildState) -> dict[str, Any]:
        import torch
        from diffusers.training_utils import cast_training_params
        from peft import LoraConfig

        from autotune.models.registry import get_family
        from autotune.search.worker import longest_captions, synthetic_samples

        family, rank = get_family(self.family), self.workload.rank
        on_gpu = self.device.startswith("cuda")
        dtype = torch.bfloat16 if on_gpu else torch.float32
        torch.set_default_dtype(dtype)
        with torch.device(self.device):
            transformer: Any = family.build_transformer(self.config)
        torch.set_default_dtype(torch.float32)
        transformer.requires_grad_(False)
        transformer.enable_gradient_checkpointing()
        targets = family.target_sets[self.workload.targets]
        transformer.add_adapter(LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian",
                                           target_modules=list(targets)))  # fmt: skip
        cast_training_params([transformer], dtype=torch.float32)
        transformer.train()
        parameters = [p for p in transformer.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=1e-4)
        work = self.workload
        lengths = longest_captions(family, work, work.effective_batch_size)
        samples = synthetic_samples(family, self.config, work, work.largest_bucket, lengths, dtype)
        batches = [
            {k: v.to(self.device) for k, v in family.collate([sample]).items()}
            for sample in samples
        ]
        seconds = []
        for _step in range(self.num_steps + 1):
            started = time.perf_counter()
            for batch in batches:
                clean = batch["latents"]
                noise = torch.randn_like(clean)
                sigma = torch.sigmoid(torch.randn(len(clean), device=self.device))
                noisy = (1 - sigma.view(-1, 1, 1, 1, 1)) * clean + sigma.view(
                    -1, 1, 1, 1, 1
                ) * noise
                with torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=on_gpu):
                    velocity = family.predict(transformer, noisy.to(dtype), sigma, batch)
                loss = torch.nn.functional.mse_loss(velocity.float(), (noise - clean).float())
                (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            seconds.append(time.perf_counter() - started)
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else None
        return {"step_seconds": seconds[1:], "peak_memory_bytes": peak}


def main() -> None:
    """Measure the part."""
    published = {"step_seconds": 1.20, "memory_gib": 41, "gpu": "H100"}
    evidence = begin("training", __doc__, more={"--plans": ""}, published=published)
    hardware = cached_profile()
    name = evidence.model(CASE.model)
    model = resolve_model(ModelRef.of(name))
    workload = workload_of(name, evidence.size(1024), rank=CASE.rank, batch=CASE.batch)
    contestants: dict[str, Candidate | None] = {
        "plain diffusers loop": None,
        "bf16, all checkpointed, batch 1": candidate_of("recompute=1", workload, hardware),
    }
    for file in filter(None, evidence.options.plans.split(",")):
        if not Path(file).is_file():
            evidence.skip(file, "no plan was made")
            continue
        made = json.loads(Path(file).read_text())
        contestants[f"planned: {Path(file).stem}"] = Candidate.model_validate(
            made["frozen"]["settings"]
        )
    config = dict(model.config)
    with ProcessTrialRunner(hardware, model, workload) as runner:
        turns = [(name, turn) for turn in range(TURNS) for name in contestants]
        for name, turn in evidence.each(turns):
            chosen = contestants[name]
            if chosen is None:
                loop = PlainLoop(model.family.name, config, workload, runner.device, STEPS)
                row = evidence.ask(runner, loop, ("plain", turn))
            else:
                request = TrialRequest(model, workload, chosen, runner.device, STEPS)
                row = result_row(evidence, runner, request)
            evidence.row("steps", name=name, turn=turn, batch=CASE.batch, **row)


def result_row(
    evidence: Evidence, runner: ProcessTrialRunner, request: TrialRequest
) -> dict[str, Any]:
    """A trial's result, or why there is none."""
    answer = runner.send(request, reload_key(request.candidate), max(1.0, evidence.left()))
    row: dict[str, Any] = runner.classify(request.candidate, answer).model_dump(mode="json")
    return row


if __name__ == "__main__":
    main()
