"""The one table of a device's kernels: which attention runs, and what it takes."""

import pytest
import torch
from tiny_models import gpu

from autotune.cost.kernels import kernel_for, substitutes
from autotune.cost.model import TracedModel
from autotune.cost.recorder import Recorder
from autotune.cost.timing import CACHE_GAIN, MODULE_CALL, Rates
from autotune.models.facts import Parts
from autotune.models.registry import FAMILIES
from autotune.plan.hardware import Rate
from autotune.plan.workload import Bucket
from tests.builders import workload


@pytest.mark.parametrize(
    ("card", "cudnn", "precision", "masked", "kernel"),
    [
        ("nvidia-h100-sxm", "9.20.0", "bf16", False, "cudnn"),
        ("nvidia-h100-sxm", "9.20.0", "bf16", True, "cudnn"),
        ("nvidia-b200", "9.15.1", "bf16", True, "cudnn"),
        ("nvidia-h100-sxm", "9.15.0", "bf16", True, "efficient"),
        ("nvidia-h100-sxm", None, "bf16", False, "flash"),
        ("nvidia-h100-sxm", "9.20.0", "fp32", False, "efficient"),
        ("nvidia-rtx-4090", "9.20.0", "bf16", False, "flash"),
        ("nvidia-rtx-4090", "9.20.0", "bf16", True, "efficient"),
        ("nvidia-rtx-5090", "9.20.0", "bf16", False, "flash"),
    ],
)
def test_native_is_the_kernel_torch_prefers(card, cudnn, precision, masked, kernel):
    known = {"capability": gpu(card).device.compute_capability, "cudnn": cudnn}
    assert kernel_for("native", "cuda", masked, precision, **known) == kernel


def measured(card: str, rates: dict[str, float]):
    how = {"unit": "FLOP/s", "spread": 0.0, "num_samples": 1}
    known = tuple(Rate(name=name, value=value, **how) for name, value in rates.items())
    return gpu(card).model_copy(update={"rates": known})


BYTES_16 = 2 * (4096 * 3072 + 3072 * 16 + 4096 * 16)
RANK_16 = ("matmul", (4096, 3072, 16), 2 * 4096 * 3072 * 16, BYTES_16)


def test_products_of_rank_wait_for_bytes():
    rank_8 = ("matmul", (4096, 3072, 8), RANK_16[2] // 2, RANK_16[3] // 2)
    rates = {"matmul.bf16.4096x3072x3072": 5e14, "memory.bandwidth": 3e12}
    thin = {**rates, "matmul.bf16.4096x3072x16": RANK_16[2] / 2e-5}
    cards = (measured("nvidia-h100-sxm", each) for each in (thin, rates))
    known, unknown = (Rates(card, "bf16", "native", "cudnn") for card in cards)
    assert known.seconds(RANK_16) == pytest.approx(2e-5)
    assert known.seconds(rank_8) == pytest.approx(1e-5)
    assert known.matmul_rate((2048, 3072, 768)) == unknown.matmul_rate((2048, 3072, 768))
    # It fits the cache.
    assert unknown.seconds(RANK_16) == pytest.approx(RANK_16[3] / unknown.bandwidth / CACHE_GAIN)


def recorded(call):
    """(operations, bytes moved) of `call(x)`, forward and backward, for an fp32 `x` of 4 MB."""
    x = torch.empty(1024, 1024, device="meta", requires_grad=True)
    recorder = Recorder("cuda")
    recorder.seed([x])
    recorder.mark("all")
    gradient = torch.empty_like(x)
    with substitutes("flash", "cuda"), recorder:
        torch.autograd.grad(call(x), x, gradient)
    work = recorder.segments[0].work
    return sum(work.values()), sum(moved * count for (_, _, _, moved), count in work.items())


def test_mixed_rms_norm_is_plain_operations():
    """Kandinsky's queries and keys are normalized in fp32 by a bf16 weight."""

    def norm(dtype):
        weight = torch.empty(1024, device="meta", dtype=dtype)
        return lambda x: torch.nn.functional.rms_norm(x, (1024,), weight, 1e-6)

    operations, moved = recorded(norm(torch.float32))
    assert operations == 2
    assert moved == pytest.approx(5 * 2**22, rel=0.01)  # forward 2 tensors, backward 3
    operations, moved = recorded(norm(torch.bfloat16))
    assert operations > 12
    assert moved > 20 * 2**22


def test_a_block_moves_less_than_half():
    """diffusers' and peft's own code moved 7.45 GB between products and attention of Qwen-Image at
    1,024 px, batch 1, 256 text tokens, by 244 kernels."""
    size = Bucket(width_px=1024, height_px=1024, num_frames=1, num_items=20)
    work = workload(resolution_px=1024, buckets=(size,), max_text_tokens=256, text_padding="exact")
    family = FAMILIES["qwen-image"]
    config = {**family.transformer_config, "num_layers": 3}
    model = TracedModel(family, config, work, "cuda", Parts())
    trace = model.traced("bf16", "none", "flash", 1, 0, norm_rope="compiled")
    middle = trace.forward[1].work + trace.backward[-2].work
    between = {work: n for work, n in middle.items() if work[0].startswith("elementwise")}
    assert sum(work[3] * number for work, number in between.items()) <= 3.5e9
    assert middle.total() - middle[MODULE_CALL] <= 0.6 * 244


def test_dropout_mask_takes_a_byte():
    recorder = Recorder("cuda")
    recorder.mark("all")
    dropout = torch.nn.Dropout(0.1)
    x = torch.empty(1024, 1024, device="meta", dtype=torch.bfloat16, requires_grad=True)
    recorder.seed([x])
    with substitutes("flash", "cuda"), recorder:
        out = dropout(x)
    assert sum(recorder.segments[0].work.values()) == 1
    # What it returns, and the mask.
    assert sum(size for _, size in recorder.segments[0].events) == 3 * 2**20
    del out
