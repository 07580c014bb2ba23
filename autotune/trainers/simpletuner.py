"""SimpleTuner: a flat JSON file of options, and one of data sets."""

import json
from collections.abc import Mapping
from typing import Any

from autotune.trainers.document import Document
from autotune.trainers.kohya import pair
from autotune.trainers.layers import Selects, by_ends, short_names
from autotune.trainers.rules import (
    ALLOCATOR,
    ANY,
    LOST,
    VALIDATION_PROMPT,
    Context,
    Rule,
    Values,
    accelerate_compile,
    batch,
    boolean,
    choice,
    count_blocks,
    duration,
    equal,
    number,
    schedule,
    settings,
    table,
    targets,
    whole,
)
from autotune.trainers.texts import in_file, json_text, nest, shell_text
from autotune.trainers.trainer import KnownModel, Trainer

INTERVAL, STRIDE = "gradient_checkpointing_interval", "gradient_checkpointing_segment_stride"
MAX_STRIDE = 8
DEFAULT_TARGETS: Mapping[str, tuple[str, ...]] = {
    "qwen": ("to_k", "to_q", "to_v", "to_out.0"),
    "kandinsky": ("to_key", "to_query", "to_value"),
    "flux": ("to_k", "to_q", "to_v", "add_k_proj", "add_q_proj", "add_v_proj", "to_out.0", "to_add_out"),
}


def _checkpointing(values: Values, context: Context) -> Values:
    """Blocks whose index modulo the stride is below the interval; without a stride every `interval`th block."""
    if not boolean(values["gradient_checkpointing"]):
        return {"checkpointed_blocks": "0"}
    interval, stride = (whole(values[key]) if values.get(key) else None for key in (INTERVAL, STRIDE))
    if stride and interval and interval < stride:
        return {"checkpointed_blocks": f"{interval}/{stride}"}
    return {"checkpointed_blocks": f"1/{interval}" if interval and interval > 1 and not stride else "all"}


def _write_checkpointing(ours: Values, context: Context) -> Values:
    """The pattern with the fewest blocks that are enough."""
    total = context.num_blocks or 1
    blocks = count_blocks(ours["checkpointed_blocks"], total)
    patterns = ((i, s) for s in range(2, MAX_STRIDE + 1) for i in range(1, s))
    enough = {(i, s): n for i, s in patterns if (n := count_blocks(f"{i}/{s}", total)) >= blocks}
    best = min(enough, key=lambda one: (enough[one], one[1]), default=None)
    if blocks == 0 or blocks >= total - 1 or best is None:
        return {"gradient_checkpointing": blocks > 0, INTERVAL: None, STRIDE: None}
    return {"gradient_checkpointing": True, INTERVAL: best[0], STRIDE: best[1]}


def _selects(values: Values, context: Context) -> Selects:
    given = values.get("peft_lora_target_modules")
    names = json.loads(given) if isinstance(given, str) else given
    usual = next(found for name, found in DEFAULT_TARGETS.items() if context.family.name.startswith(name))
    return by_ends(names or usual)


def _write_targets(ours: Values, context: Context) -> Values:
    exact = context.family.target_set(ours["targets"])
    names = short_names(context.family, ours["targets"]) if isinstance(exact, str) else list(exact)
    return {"peft_lora_target_modules": names}


def _noise(values: Values, context: Context) -> Values:
    sampling = "uniform" if values.get("flow_use_uniform_schedule") else "logit_normal"
    shift = "by_resolution" if values.get("flow_schedule_auto_shift") else number(values["flow_schedule_shift"])
    odd = {LOST: "autotune draws from the standard normal"} if values.get("flow_sigmoid_scale", 1) != 1 else {}
    return {"timestep_sampling": sampling, "timestep_shift": shift, **odd}


def _write_noise(ours: Values, context: Context) -> Values:
    by_resolution = ours["timestep_shift"] == "by_resolution"
    return {
        "flow_use_uniform_schedule": ours["timestep_sampling"] == "uniform" or None,
        "flow_schedule_auto_shift": by_resolution or None,
        "flow_schedule_shift": None if by_resolution else ours["timestep_shift"],
    }


def _weight_decay(values: Values, context: Context) -> Values:
    found = dict(pair("optimizer_config", "weight_decay", values))
    value = found.pop("value")
    return {"weight_decay": 0.01 if value is None else number(value), **found}


RULES = (
    Rule(
        ("lora_alpha", "lora_rank"),
        ("lora_alpha",),
        lambda values, _: {"lora_alpha": number(values.get("lora_alpha") or values["lora_rank"])},
        lambda ours, _: {"lora_alpha": ours["lora_alpha"]},
    ),
    targets(["peft_lora_target_modules"], _selects, _write_targets, in_blocks=False),
    batch(["train_batch_size", "backends[].train_batch_size"], "gradient_accumulation_steps", "num_processes"),
    duration("max_train_steps", "num_train_epochs"),
    schedule(
        "lr_scheduler",
        "lr_warmup_steps",
        {name: name for name in ("constant", "constant_with_warmup", "linear", "cosine")},
    ),
    choice("optimizer", "optimizer", {"torch-adamw": "adamw"}, instead="trains with torch's AdamW"),
    Rule(
        ("optimizer_config",),
        ("weight_decay",),
        _weight_decay,
        lambda ours, _: {"optimizer_config": f"weight_decay={ours['weight_decay']}"},
    ),
    Rule(
        ("flow_schedule_shift", "flow_schedule_auto_shift", "flow_use_uniform_schedule", "flow_sigmoid_scale"),
        ("timestep_sampling", "timestep_shift"),
        _noise,
        _write_noise,
    ),
    choice("mixed_precision", "precision", {"bf16": "bf16", "no": "fp32"}, instead="computes in bf16"),
    Rule(("gradient_checkpointing", INTERVAL, STRIDE), ("checkpointed_blocks",), _checkpointing, _write_checkpointing),
    table(
        ["base_model_precision", "quantize_via"],
        ["quantization"],
        [
            (("no_change", ANY), ("none",)),
            (("int8-torchao", ANY), ("torchao-int8",)),
            (("fp8wo-torchao", ANY), ("torchao-fp8",)),
            (("nf4-bnb", "pipeline"), ("bnb-nf4",)),
            (("nf4-bnb", ANY), ("bnb-nf4",)),
            (("int8-quanto", ANY), ("torchao-int8",), "quanto's scales are its own; the nearest is torchao-int8"),
            (("fp8-torchao", ANY), ("torchao-fp8",), "its products are in 8 bits, too; torchao-fp8's are not"),
            (("fp8-*", ANY), ("torchao-fp8",), "another float8; the nearest is torchao-fp8"),
            (("int8-*", ANY), ("torchao-int8",), "another int8; the nearest is torchao-int8"),
            (("int4-*", ANY), ("bnb-nf4",), "another 4-bit format; the nearest is bnb-nf4"),
            (("int2-*", ANY), ("bnb-nf4",), "2 bits, fewer than autotune has; the nearest is bnb-nf4"),
        ],
        [(("bnb-int8",), ("int8-torchao", ANY)), (("layerwise-fp8",), ("fp8wo-torchao", ANY))],
    ),
    choice(
        "attention_mechanism",
        "attention",
        {
            "diffusers": "native",
            "native-flash": "_native_flash",
            "native-math": "_native_math",
            "native-efficient": "_native_efficient",
            "cudnn": "_native_cudnn",
            "flash-attn": "flash",
            "xformers": "xformers",
        },
        instead="has no such attention that trains",
    ),
    accelerate_compile(),
    ALLOCATOR,
    VALIDATION_PROMPT,
    *equal(
        """
        rank=lora_rank lora_dropout=lora_dropout data=backends[].instance_data_dir
        num_frames=backends[].video.num_frames caption_dropout=caption_dropout_probability
        resolution=resolution learning_rate=learning_rate max_grad_norm=max_grad_norm guidance_scale=flux_guidance_value
        swapped_blocks=musubi_blocks_to_swap caching.text_encoder_streamed=ramtorch_text_encoder seed=seed
        checkpointing_steps=checkpoint_step_interval|checkpointing_steps
        checkpoints_total_limit=checkpoints_total_limit preview_every=validation_step_interval|validation_steps
        preview_steps=validation_num_inference_steps
        """
    ),
)
DEFAULTS = settings(
    """
    lora_rank=16 lora_dropout=0.1 peft_lora_target_modules=null caption_dropout_probability=0.1 resolution=1024
    train_batch_size=4 gradient_accumulation_steps=1 learning_rate=4e-7 lr_scheduler="constant_with_warmup"
    lr_warmup_steps=0 optimizer="adamw_bf16" optimizer_config="" max_grad_norm=2.0 flow_schedule_shift=3.0
    gradient_checkpointing=false base_model_precision="no_change" musubi_blocks_to_swap=0
    attention_mechanism="diffusers" dynamo_backend="no" mixed_precision="bf16"
    """
)
FIXED = settings(
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
DECIDED = {
    "latents and captions are always cached": "backends[*].cache_dir* backends[].id backends[].type backends[1].* "
    "vae_batch_size vae_cache_* text_cache_* compress_disk_cache skip_file_discovery cache_dir*",
    "images are always sorted into buckets by shape": "resolution_type aspect_bucket_* minimum_image_size "
    "backends[].resolution backends[].resolution_type backends[].crop* backends[].minimum_image_size "
    "backends[].maximum_image_size backends[].target_downsample_size disable_bucket_pruning",
    "the number of steps decides, not how often a folder is repeated": "backends[].repeats strict_epoch_limit",
    "previews are sampled as the family's pipeline does": "validation_* num_eval_images user_prompt_library",
    "it names the run or says how it is saved and logged": "output_dir tracker_* report_to push_* hub_* "
    "resume_from_checkpoint disable_benchmark",
    "what stays on the device is decided by its memory": "quantize_via offload_* keep_vae_loaded fully_unload_* "
    "delete_model_* text_encoder_*_precision base_model_default_dtype gradient_checkpointing_offload_* "
    "group_offload_* enable_group_offload dynamo_* dataloader_* max_workers",
}
UNLEARNED = {
    "every weight is trained, not an adapter": "model_type=lora",
    "another kind of adapter; autotune plans a plain LoRA": "lora_type=standard lycoris_config use_dora",
    "an average of the weights over steps is kept; autotune keeps none": "use_ema ema_*",
    "each gradient is cut at the limit by itself; autotune scales them by their norm": "grad_clip_method=norm",
    "products are in 8 bits, too": "quantize_activations quantization_config",
    "weights are streamed from the host by another mechanism": "ramtorch ramtorch_*",
    "activations are stored otherwise": "gradient_checkpointing_backend=torch",
    "the loss or its weights are others": "loss_type=l2 snr_gamma masked_loss_* flow_beta_schedule_* prior_* crepa_*",
    "noise is drawn otherwise": "noise_offset* input_perturbation* timestep_bias_* scheduled_sampling_* flow_use_*",
    "another adapter is loaded or merged first": "init_lora assistant_lora_path",
    "captions come from elsewhere": "backends[].caption_strategy=textfile caption_strategy=textfile "
    "backends[].instance_prompt instance_prompt",
    "another schedule's shape": "lr_num_cycles=1 lr_power=0.8 lr_end lr_scale",
}
MODELS = tuple(
    KnownModel(family, {"model_family": name, **({"model_flavour": flavor} if flavor else {})})
    for family, name, flavors in (
        ("qwen-image", "qwen_image", ("v1.0", "v2.0", "")),
        ("qwen-image-edit", "qwen_image", ("edit-v1",)),
        ("qwen-image-edit-plus", "qwen_image", ("edit-v2", "edit-v2+", "edit-v3")),
        ("flux1-dev", "flux", ("dev", "krea", "")),
        ("kandinsky5-image-lite", "kandinsky5-image", ("t2i-lite-sft", "")),
        ("kandinsky5-video-lite", "kandinsky5-video", ("t2v-lite-sft-5s", "")),
    )
    for flavor in flavors
)


def _detect(document: Document) -> bool:
    return document.format == "json" and document.value("model_family") is not None


def _files(values: Values, head: str) -> Mapping[str, str]:
    sections: Any = nest({key: value for key, value in values.items() if key.startswith("backends[")})["backends"]
    sections[0]["resolution"] = values["resolution"]
    options = {key: value for key, value in in_file(values).items() if not key.startswith("backends[")}
    return {
        "config.json": json_text(options),
        "multidatabackend.json": json_text(sections),
        "run.sh": shell_text(
            {**values, "env.CONFIG_BACKEND": "json", "env.CONFIG_PATH": "config.json"},
            ["simpletuner", "train"],
            head=head,
            title="SimpleTuner",
        ),
    }


SIMPLETUNER = Trainer(
    name="simpletuner",
    title="SimpleTuner",
    version="bc8e6ab77",
    detect=_detect,
    models=MODELS,
    rules=RULES,
    defaults=DEFAULTS,
    fixed=FIXED,
    decided=DECIDED,
    unlearned=UNLEARNED,
    files=_files,
    weights_keys=("pretrained_model_name_or_path",),
    references={"data_backend_config": "backends"},
)
