"""Every storage of the weights trains, looks at previews, is interrupted, goes on and samples."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from autotune.events import StepFinished
from autotune.plan.file import seal
from autotune.plan.plan import TrainingPlan
from autotune.train.folder import ADAPTER_FILE
from autotune.train.run import train
from autotune.train.sample import SampleRequest, read_sample_inputs, sample_run
from tests.builders import storages
from tests.events import steps_to
from tests.train.conftest import Bench, Killed

PROMPT = "a red circle on a white background"


def plan_of(bench: Bench, storage: str, output: Path, **job: object) -> TrainingPlan:
    plan = bench.plan(output=str(output), num_steps=3, checkpointing_steps=1, **job)
    workload = plan.frozen.workload.model_copy(update={"quality": "compact"})
    settings = plan.frozen.settings.model_copy(
        update={"quantization": storage, "checkpointed_blocks": 1}
    )
    return seal(
        plan.job, plan.frozen.model_copy(update={"workload": workload, "settings": settings})
    )


@pytest.mark.quick("torchao-int8")
@pytest.mark.parametrize("storage", storages())
def test_neither_previews_nor_an_interruption_change_what_is_learned(
    bench: Bench, tmp_path: Path, storage: str
) -> None:
    watched = plan_of(
        bench, storage, tmp_path / "watched", preview_prompts=(PROMPT,), preview_every=1
    )
    report = train(watched, bench.hardware, bench.cache)
    assert report.verdict is not None
    assert report.verdict.num_unmoved == report.verdict.num_not_finite == 0
    assert report.quantization_error is not None

    def killed(event: StepFinished) -> None:
        if event.step == 2:
            raise Killed

    broken = plan_of(bench, storage, tmp_path / "broken")
    with pytest.raises(Killed):
        train(broken, bench.hardware, bench.cache, steps_to(killed))
    assert train(broken, bench.hardware, bench.cache, resume=True).resumed_at in (1, 2)
    one, other = (load_file(tmp_path / name / ADAPTER_FILE) for name in ("watched", "broken"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    (written,) = sample_run(
        read_sample_inputs(tmp_path / "broken", SampleRequest(PROMPT, seed=5)),
        bench.hardware,
        bench.cache,
    )
    assert Image.open(written).size == (32, 32)
