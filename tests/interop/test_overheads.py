"""Overheads of other trainers are predicted from their tables, told, and decisive."""

from pathlib import Path

import torch

from autotune.cost.kernels import IN_FP32
from autotune.cost.predict import CostModel
from autotune.cost.tables import PassTables
from autotune.interop.exporting import known_model, overheads_for
from autotune.interop.trainer import get_trainer
from autotune.knobs.caching import QUANTIZED_SHARE
from autotune.models.facts import Parts
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import Candidate
from autotune.plan.prediction import KeptPart
from autotune.plan.workload import Bucket
from autotune.search.winner import Score, refuse_beyond
from tests.builders import OLD_TORCH
from tests.cost.tiny_models import TINY, gpu, workload_of
from tests.interop.plans import plan_of

SETTINGS = Candidate(micro_batch_size=1, checkpointed_blocks=0)


def overheads_of(trainer):
    plan = plan_of("qwen-image")
    choices = {name: (value,) for name, value in plan.frozen.settings}
    return overheads_for(get_trainer(trainer), plan.job, plan.frozen.workload, choices)


BUCKET = Bucket(width_px=512, height_px=512, num_frames=1, num_items=8)


def cost_of(overheads=None, name="qwen-image", parts=None):
    work, card = workload_of(name, buckets=(BUCKET,)), gpu("nvidia-h100-sxm")
    return CostModel.build(card, work, FAMILIES[name], TINY[name], parts, overheads=overheads)


def test_what_a_file_says_counts():
    def of(trainer, **written):
        table = get_trainer(trainer)
        return table.overheads_of(written, known_model(table, "qwen-image"))

    assert of("onetrainer", lora_weight_dtype="BFLOAT_16").adapter.precision == "bf16"
    assert of("simpletuner").adapter.optimizer_bytes == 6  # its own AdamW, its default
    assert of("simpletuner", optimizer="torch-adamw").adapter.optimizer_bytes == 4
    stored = {one.precision for one in of("ai-toolkit", **{"model.quantize_te": True}).kept}
    assert stored == {"bf16", "int8"}  # while it loads, and while it trains
    assert of("diffusers").adapter_on("bnb-nf4").precision == "fp32"
    named = (of("simpletuner", base_model_precision=f"int8-{one}") for one in ("quanto", "torchao"))
    assert [one.products["torchao-int8"].gradients for one in named] == [False, True]


def test_what_training_keeps_stays():
    num_encoder = 2 * 10**5
    small = {"base_dim": 16, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
    vae = {"vae_class": "AutoencoderKLQwenImage", "vae_config": small}
    own = cost_of(parts=Parts((num_encoder,), **vae))
    resident = own.resident_of(SETTINGS.changed(quantization="torchao-int8"))
    named = [("load", "text_encoders"), ("train", "vae"), ("cache", "transformer")]
    named.append(("load", "transformer"))  # before the encoders come
    kept = [KeptPart(phase=phase, part=part, precision="fp32") for phase, part in named]
    kept.append(KeptPart(phase="train", part="text_encoders", precision="int8"))
    overheads = overheads_of("ai-toolkit").changed(kept=tuple(kept))
    found = PassTables(own.model, own.hardware, overheads).kept_part_bytes("bf16", resident)
    whole, vae_bytes = own.resident_of(SETTINGS).weight_bytes, resident.vae.weight_bytes
    assert vae_bytes > 0
    assert 0 < whole - resident.weight_bytes < 4 * num_encoder
    weights = resident.weight_bytes + resident.buffer_bytes
    # One byte a quantized parameter, else two.
    trained = 2 * vae_bytes + round(num_encoder * (QUANTIZED_SHARE + 2 * (1 - QUANTIZED_SHARE)))
    last = {"train": trained, "save": trained, "preview": trained - vae_bytes}
    assert found == {"load": 4 * num_encoder, "cache": weights, **last}


def test_winners_fit_the_trainer_too():
    own, theirs = cost_of(), cost_of(overheads_of("ai-toolkit"))
    settings = [SETTINGS, SETTINGS.changed(checkpointed_blocks=4)]
    ran = [Score(one, 1.0, own.predict(one).allocated_memory_bytes) for one in settings]
    least, most = sorted(theirs.predict(one).run_memory_bytes for one in settings)
    failures = [one.failure for one in refuse_beyond(ran, theirs, (least + most) // 2)]
    assert sum(failure is None for failure in failures) == 1
    assert refuse_beyond(ran, own, 0) == ran
    assert theirs.single_process().predict(SETTINGS).phases == own.predict(SETTINGS).phases


def test_others_copy_no_gradient_for_cudnn():
    def operations(kernel, overheads):
        passed = cost_of(overheads, "flux1-dev").model.traced("bf16", "none", kernel, 1, 0)
        return sum(sum(each.work.values()) for each in passed.backward)

    for overheads, is_ours in ((None, True), (overheads_of("ai-toolkit"), False)):
        plain, copying = (operations(kernel, overheads) for kernel in ("flash", "cudnn"))
        assert (copying > plain) == is_ours


@OLD_TORCH
def test_autocast_is_as_in_torch():
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    table = header.partition("#define AT_FORALL_FP32(_)")[2].partition("#define")[0]
    called = ("layer_norm", "group_norm", "rms_norm", "mse_loss", "linear", "gelu", "silu")
    assert {name for name in called if f"_({name}) " in table} == set(IN_FP32)
