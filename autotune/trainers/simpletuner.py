"""SimpleTuner: a flat JSON file of options, and one of data sets."""

import re
from collections.abc import Mapping
from typing import Any

from autotune.trainers import blocks, overheads, rules
from autotune.trainers.document import Document
from autotune.trainers.meanings import meanings
from autotune.trainers.parts import peft_targets
from autotune.trainers.rules import LOST, Context, Rule, Values
from autotune.trainers.tables import ALLOCATOR, accelerate_compile, choice, precision, table
from autotune.trainers.texts import in_file, json_text, nest, shell_text
from autotune.trainers.trainer import KnownModel, Trainer

PATTERN = ("gradient_checkpointing_interval", "gradient_checkpointing_segment_stride")
DEFAULT_TARGETS: Mapping[str, str] = {
    "kandinsky": "to_key to_query to_value",
    "flux1": "to_k to_q to_v add_k_proj add_q_proj add_v_proj to_out.0 to_add_out",
    "flux2": "attn.to_q attn.to_k attn.to_v attn.to_out.0 attn.to_qkv_mlp_proj",
    "": "to_k to_q to_v to_out.0",
}


def _noise(values: Values, context: Context) -> Values:
    sampling = "uniform" if values.get("flow_use_uniform_schedule") else "logit_normal"
    shift = (
        "by_resolution"
        if values.get("flow_schedule_auto_shift")
        else rules.number(values["flow_schedule_shift"])
    )
    odd = (
        {LOST: "autotune draws from the standard normal"}
        if values.get("flow_sigmoid_scale", 1) != 1
        else {}
    )
    return {"timestep_sampling": sampling, "timestep_shift": shift, **odd}


def _write_noise(ours: Values, context: Context) -> Values:
    by_resolution = ours["timestep_shift"] == "by_resolution"
    return {
        "flow_use_uniform_schedule": ours["timestep_sampling"] == "uniform" or None,
        "flow_schedule_auto_shift": by_resolution or None,
        "flow_schedule_shift": None if by_resolution else ours["timestep_shift"],
    }


ATTENTION = {
    **{
        "diffusers": "native",
        "cudnn": "_native_cudnn",
        "flash-attn": "flash",
        "xformers": "xformers",
    },
    **{f"native-{kind}": f"_native_{kind}" for kind in ("flash", "math", "efficient")},
}
NOISE = (
    "flow_schedule_shift",
    "flow_schedule_auto_shift",
    "flow_use_uniform_schedule",
    "flow_sigmoid_scale",
)
RULES = (
    rules.alpha("lora_alpha", "lora_rank"),
    peft_targets("peft_lora_target_modules", DEFAULT_TARGETS),
    rules.batch(
        ["train_batch_size", "backends[].train_batch_size"],
        "gradient_accumulation_steps",
        "num_processes",
    ),
    rules.duration("max_train_steps", "num_train_epochs", no_epochs=0),
    rules.schedule(
        "lr_scheduler", "lr_warmup_steps", "constant constant_with_warmup linear cosine"
    ),
    choice("optimizer", "optimizer", {"torch-adamw": "adamw"}, instead="trains with torch's AdamW"),
    rules.weight_decay_among("optimizer_config", as_list=False),
    rules.by_noise(
        Rule(NOISE, ("timestep_sampling", "timestep_shift"), _noise, _write_noise),
        rules.min_snr("snr_gamma", off=0.0),
    ),
    precision("mixed_precision", bf16="bf16", fp32="no"),
    blocks.patterned_checkpointing(
        "gradient_checkpointing", *PATTERN, ("qwen", "kandinsky5-video")
    ),
    table(
        "base_model_precision quantize_via",
        "quantization",
        """
        no_change *      | none
        int8-torchao *   | torchao-int8
        fp8wo-torchao *  | torchao-fp8
        nf4-bnb pipeline | bnb-nf4
        nf4-bnb *        | bnb-nf4
        int8-quanto *    | torchao-int8 | quanto's scales are its own; the nearest is torchao-int8
        fp8-torchao *    | torchao-fp8  | its products are in 8 bits, too; torchao-fp8's are not
        fp8-* *          | torchao-fp8  | another float8; the nearest is torchao-fp8
        int8-* *         | torchao-int8 | another int8; the nearest is torchao-int8
        int4-* *         | bnb-nf4      | another 4-bit format; the nearest is bnb-nf4
        int2-* *         | bnb-nf4      | 2 bits, fewer than autotune has; the nearest is bnb-nf4
        """,
    ),
    choice(
        "attention_mechanism", "attention", ATTENTION, instead="has no such attention that trains"
    ),
    accelerate_compile(),
    *(ALLOCATOR, rules.VALIDATION_PROMPT),
    *rules.equal(
        """
        rank=lora_rank lora_dropout=lora_dropout data=backends[].instance_data_dir
        num_frames=backends[].video.num_frames caption_dropout=caption_dropout_probability resolution=resolution
        learning_rate=learning_rate max_grad_norm=max_grad_norm guidance_scale=flux_guidance_value
        swapped_blocks=musubi_blocks_to_swap caching.text_encoder_streamed=ramtorch_text_encoder seed=seed
        checkpointing_steps=checkpoint_step_interval|checkpointing_steps
        checkpoints_total_limit=checkpoints_total_limit preview_every=validation_step_interval|validation_steps
        preview_steps=validation_num_inference_steps
        """
    ),
)
DEFAULTS = rules.settings(
    """
    lora_rank=16 lora_dropout=0.1 peft_lora_target_modules=null caption_dropout_probability=0.1 resolution=1024
    train_batch_size=4 gradient_accumulation_steps=1 learning_rate=4e-7 lr_scheduler="constant_with_warmup"
    num_train_epochs=1 lr_warmup_steps=0 optimizer="adamw_bf16" optimizer_config="" max_grad_norm=2.0
    flow_schedule_shift=3.0 gradient_checkpointing=false base_model_precision="no_change" musubi_blocks_to_swap=0
    attention_mechanism="diffusers" dynamo_backend="no" mixed_precision="bf16"
    """
)
FIXED = rules.settings(
    """
    model_type="lora" lora_type="standard" grad_clip_method="norm" quantize_via="accelerator"
    resolution_type="pixel_area" use_ema=false base_model_default_dtype="bf16" report_to="tensorboard"
    data_backend_config="multidatabackend.json" output_dir="output" backends[].id="data" backends[].type="local"
    backends[].caption_strategy="textfile" backends[].resolution_type="pixel_area" backends[].crop=true
    backends[].crop_aspect="closest" backends[].cache_dir_vae="cache/vae" backends[].repeats=0 backends[1].id="text"
    backends[1].type="local" backends[1].dataset_type="text_embeds" backends[1].default=true
    backends[1].cache_dir="cache/text"
    """
)
DECIDED = meanings(
    """
    cached: backends[*].cache_dir* backends[].id backends[].type backends[1].* vae_batch_size vae_cache_* text_cache_*
        compress_disk_cache skip_file_discovery cache_dir*
    buckets: resolution_type aspect_bucket_* minimum_image_size backends[].resolution backends[].resolution_type
        backends[].crop* backends[].minimum_image_size backends[].maximum_image_size backends[].target_downsample_size
        disable_bucket_pruning
    repeats: backends[].repeats strict_epoch_limit
    previews: validation_* num_eval_images user_prompt_library
    named: output_dir tracker_* report_to push_* hub_* resume_from_checkpoint disable_benchmark
    device: quantize_via offload_* keep_vae_loaded fully_unload_* delete_model_* text_encoder_*_precision
        base_model_default_dtype gradient_checkpointing_offload_* group_offload_* enable_group_offload dynamo_*
        dataloader_* max_workers
    """
)
UNLEARNED = meanings(
    """
    weights: model_type=lora
    adapter: lora_type=standard lycoris_config use_dora
    average: use_ema ema_*
    each gradient is cut at the limit by itself; autotune scales them by their norm: grad_clip_method=norm
    products: quantize_activations quantization_config
    weights are streamed from the host by another mechanism: ramtorch ramtorch_*
    activations are stored otherwise: gradient_checkpointing_backend=torch
    loss: loss_type=l2 use_soft_min_snr masked_loss_* flow_beta_schedule_* prior_* crepa_*
    noise: noise_offset* offset_noise input_perturbation* timestep_bias_* scheduled_sampling_* flow_use_*
        rescale_betas_zero_snr
    noise levels of a batch are drawn one from each part of their range: disable_segmented_timestep_sampling=true
    merged: init_lora assistant_lora_path
    v: prediction_type=epsilon
    captions come from elsewhere: backends[].caption_strategy=textfile caption_strategy=textfile
        backends[].instance_prompt instance_prompt
    schedule: lr_num_cycles=1 lr_power=0.8 lr_end lr_scale
    """
)
FLAVORS = """
    qwen-image=qwen_image:v1.0 qwen-image-2512=qwen_image:v2.0| qwen-image-edit=qwen_image:edit-v1
    qwen-image-edit-plus=qwen_image:edit-v2 qwen-image-edit-2511=qwen_image:edit-v3 flux1-dev=flux:dev|krea|
    kandinsky5-image-lite=kandinsky5-image:t2i-lite-sft| kandinsky5-video-lite=kandinsky5-video:t2v-lite-sft-5s|
    z-image=z_image:base z-image-turbo=z_image:turbo|turbo-ostris-v2| krea-2=krea2:raw| krea-2-turbo=krea2:turbo
    flux2-klein=flux2:klein-4b flux2-klein-9b=flux2:klein-9b| wan-2.1=wan:t2v-480p-1.3b-2.1|
    wan-2.1-14b=wan:t2v-480p-14b-2.1 wan-2.2=wan:ti2v-5b-2.2 sdxl=sdxl:base-1.0| chroma-base=chroma:base|
    chroma=chroma:hd sd3.5=sd3:large sd3.5-medium=sd3:medium|
"""
"""Flavors of models in its family, that which it takes by default with nothing after the last
bar.
"""


SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "sdxl": {
        "defaults": {"snr_gamma": 1.0},
        "fixed": {"disable_segmented_timestep_sampling": True},
        "lacks": ("musubi_blocks_to_swap", *PATTERN, *NOISE),
    },
    **{name: {"lacks": ("musubi_blocks_to_swap",)} for name in ("chroma", "chroma-base")},
    "z-image-turbo": {"note": "it merges an adapter first that undoes the distillation"},
}
MODELS = tuple(
    KnownModel(
        name, {"model_family": family, "model_flavour": flavor or None}, **SPECIAL.get(name, {})
    )
    for name, family, flavors in (re.split("[=:]", word, maxsplit=2) for word in FLAVORS.split())
    for flavor in flavors.split("|")
)


def _detect(document: Document) -> bool:
    return document.format == "json" and document.value("model_family") is not None


def _files(values: Values, head: str) -> Mapping[str, str]:
    sections: Any = nest(
        {key: value for key, value in values.items() if key.startswith("backends[")}
    )["backends"]
    sections[0]["resolution"] = values["resolution"]
    options = {
        key: value for key, value in in_file(values).items() if not key.startswith("backends[")
    }
    variables = {**values, "env.CONFIG_BACKEND": "json", "env.CONFIG_PATH": "config.json"}
    return {
        "config.json": json_text(options),
        "multidatabackend.json": json_text(sections),
        "run.sh": shell_text(variables, ["simpletuner", "train"], head=head, title="SimpleTuner"),
    }


TABLE = (MODELS, RULES, DEFAULTS, FIXED, DECIDED, UNLEARNED)
SIMPLETUNER = Trainer(
    *("simpletuner", "SimpleTuner", "bc8e6ab77", _detect, *TABLE, _files),
    weights_keys=("pretrained_model_name_or_path",),
    references={"data_backend_config": "backends"},
    overheads=overheads.SIMPLETUNER,
)
