"""OneTrainer: one JSON file, with the folders of images in it or in another."""

import math
from collections.abc import Mapping

from autotune.trainers.document import Document
from autotune.trainers.layers import Selects, by_parts, short_names
from autotune.trainers.rules import (
    ALLOCATOR,
    LOST,
    Context,
    Rule,
    Values,
    batch,
    boolean,
    checkpointing,
    choice,
    count_blocks,
    equal,
    number,
    schedule,
    settings,
    table,
    targets,
    whole,
)
from autotune.trainers.texts import TRAINER, in_file, json_text, nest, shell_text
from autotune.trainers.trainer import KnownModel, Trainer

IMAGES = "concepts[].image."


def _selects(values: Values, context: Context) -> Selects:
    parts = str(values.get("layer_filter") or "").split(",")
    if values.get("layer_filter_regex"):
        raise ValueError("patterns of layers are not read; give names")
    return by_parts([part.strip() for part in parts])


def _write_targets(ours: Values, context: Context) -> Values:
    return {"layer_filter": ",".join(short_names(context.family, ours["targets"])), "layer_filter_preset": "custom"}


def _epochs(ours: Values, context: Context) -> Values:
    """Epochs are the only measure it has."""
    images = max(1, ours.get("num_images", 1))
    epochs = ours.get("num_train_epochs") or math.ceil(ours["num_steps"] * ours["effective_batch_size"] / images)
    return {"epochs": epochs}


def _noise(values: Values, context: Context) -> Values:
    kinds = {"LOGIT_NORMAL": "logit_normal", "UNIFORM": "uniform"}
    kind = kinds.get(str(values["timestep_distribution"]))
    shift = "by_resolution" if values.get("dynamic_timestep_shifting") else number(values["timestep_shift"])
    if kind is None:
        return {"timestep_shift": shift, LOST: "autotune cannot draw noise levels so; it takes its usual density"}
    odd = any(values.get(name) for name in ("noising_weight", "noising_bias"))
    lost = {LOST: "autotune draws from the standard normal"} if odd else {}
    return {"timestep_sampling": kind, "timestep_shift": shift, **lost}


def _write_noise(ours: Values, context: Context) -> Values:
    by_resolution = ours["timestep_shift"] == "by_resolution"
    kind = "LOGIT_NORMAL" if ours["timestep_sampling"] == "logit_normal" else "UNIFORM"
    shift = 1.0 if by_resolution else ours["timestep_shift"]
    return {"timestep_distribution": kind, "timestep_shift": shift, "dynamic_timestep_shifting": by_resolution}


RULES = (
    targets(["layer_filter", "layer_filter_regex"], _selects, _write_targets, in_blocks=False),
    batch(["batch_size"], "gradient_accumulation_steps", "launch.num_processes"),
    Rule(
        ("epochs",), ("num_steps", "num_train_epochs"), lambda v, _: {"num_train_epochs": whole(v["epochs"])}, _epochs
    ),
    schedule(
        "learning_rate_scheduler",
        "learning_rate_warmup_steps",
        {"CONSTANT": "constant", "LINEAR": "linear", "COSINE": "cosine"},
    ),
    choice("optimizer.optimizer", "optimizer", {"ADAMW": "adamw"}, instead="trains with AdamW in full precision"),
    Rule(
        ("timestep_distribution", "timestep_shift", "dynamic_timestep_shifting", "noising_weight", "noising_bias"),
        ("timestep_sampling", "timestep_shift"),
        _noise,
        _write_noise,
    ),
    choice(
        "train_dtype",
        "precision",
        {"BFLOAT_16": "bf16", "FLOAT_32": "fp32", "TFLOAT_32": "fp32"},
        instead="computes in bf16",
    ),
    checkpointing("transformer.gradient_checkpointing"),
    table(
        ["transformer.weight_dtype"],
        ["quantization"],
        [
            (("BFLOAT_16",), ("none",)),
            (("FLOAT_32",), ("none",)),
            (("NFLOAT_4",), ("bnb-nf4",)),
            (("INT_8",), ("bnb-int8",)),
            (("FLOAT_8",), ("layerwise-fp8",)),
            (("INT_W8A8*",), ("bnb-int8",), "its products are in 8 bits both ways; the nearest is bnb-int8"),
            (("FLOAT_W8A8*",), ("torchao-fp8",), "its products are in 8 bits; the nearest is torchao-fp8"),
        ],
        [(("torchao-int8",), ("INT_8",)), (("torchao-fp8",), ("FLOAT_8",))],
        instead="has no such weight format",
    ),
    Rule(
        ("transformer.offload_fraction",),
        ("swapped_blocks",),
        lambda values, _: {"swapped_blocks": f"{100 * number(values['transformer.offload_fraction']):g}%"},
        lambda ours, context: {
            "transformer.offload_fraction": round(
                count_blocks(ours["swapped_blocks"], context.num_blocks or 1) / (context.num_blocks or 1), 5
            )
        },
    ),
    choice(
        "attention_mechanism",
        "attention",
        {"SDP": "native", "FLASH": "flash", "CUDNN": "_native_cudnn", "FLEX": "flex"},
    ),
    Rule(
        ("compile",),
        ("compile",),
        lambda values, _: {"compile": "block" if boolean(values["compile"]) else "off"},
        lambda ours, _: {"compile": ours["compile"] == "block"},
    ),
    ALLOCATOR,
    *equal(
        """
        data_workers=dataloader_threads
        rank=lora_rank lora_alpha=lora_alpha lora_dropout=dropout_probability data=concepts[].path
        resolution=resolution num_frames=frames learning_rate=learning_rate
        weight_decay=optimizer.weight_decay max_grad_norm=clip_grad_norm
        guidance_scale=transformer.guidance_scale
        """
    ),
)
DEFAULTS = settings(
    """
    lora_rank=16 lora_alpha=1.0 dropout_probability=0.0 layer_filter="" resolution="512" batch_size=1
    gradient_accumulation_steps=1 epochs=100 learning_rate=3e-6 learning_rate_scheduler="CONSTANT"
    learning_rate_warmup_steps=200 optimizer.optimizer="ADAMW" optimizer.weight_decay=0.01 clip_grad_norm=1.0
    timestep_distribution="UNIFORM" timestep_shift=1.0 dynamic_timestep_shifting=false train_dtype="FLOAT_16"
    transformer.gradient_checkpointing=true transformer.weight_dtype="FLOAT_32" transformer.offload_fraction=0.0
    attention_mechanism="SDP" compile=false
    """
)
FIXED = settings(
    """
    __version=10 training_method="LORA" peft_type="LORA" lora_decompose=false transformer.train=true
    text_encoder.train=false aspect_ratio_bucketing=true latent_caching=true ema="OFF" output_dtype="BFLOAT_16"
    output_model_format="DIFFUSERS_LORA" output_model_destination="output/lora.safetensors" masked_training=false
    concepts[].name="data" concepts[].type="STANDARD" concepts[].text.prompt_source="sample"
    concepts[].image.enable_crop_jitter=false concepts[].image.enable_random_flip=false
    """
)
DECIDED = {
    "latents and captions are always cached, then the encoders freed": "latent_caching clear_cache_before_training "
    "cache_dir only_cache text_encoder*.weight_dtype vae.weight_dtype",
    "images are always sorted into buckets by shape": "aspect_ratio_bucketing",
    "it names the run or says how it is saved and logged": "__version workspace_dir debug_* tensorboard* output_* "
    "backup_* rolling_* save_* samples* sample_* concept_file_name continue_last_backup prevent_overwrites "
    "include_train_config secrets* cloud* concepts[].name concepts[].type concepts[].seed *.uuid "
    "validation validate_* concepts[].concept_stats* concepts[].enabled launch.* offline_mode huggingface_*",
    "what stays on the device is decided by its memory": "train_device temp_device async_offloading "
    "*.activation_offloading quantization.* weight_dtype enable_autocast_cache fallback_train_dtype lora_weight_dtype",
    "it is for other models or other adapters": "unet.* prior.* effnet_encoder.* decoder* oft_* lokr_* embedding* "
    "additional_embeddings bundle_additional_embeddings force_* rescale_* vb_loss_strength text_encoder_*.* "
    "text_encoder.* vae.* transformer.include transformer.train transformer.model_name unconditional_transformer.* "
    "optimizer_defaults* *.stop_training_after_unit optimizer.beta* optimizer.eps optimizer.fused* optimizer.foreach",
    "the name of a choice of layers": "layer_filter_preset",
}
UNLEARNED = {
    "every weight is trained, or an embedding, not an adapter": "training_method=LORA",
    "another kind of adapter; autotune plans a plain LoRA": "peft_type=LORA lora_decompose",
    "an average of the weights over steps is kept; autotune keeps none": "ema=OFF ema_*",
    "the loss or its weights are others": "mse_strength=1.0 mae_strength log_cosh_strength huber_strength "
    "loss_weight_fn=CONSTANT loss_weight_strength=5.0 loss_scaler=NONE huber_delta=1.0",
    "masks weigh parts of images": "masked_training unmasked_* normalize_masked_area_loss masked_prior_*",
    "noise is drawn otherwise": "offset_noise_weight generalized_offset_noise perturbation_noise_weight "
    "min_noising_strength max_noising_strength=1.0",
    "the rate is multiplied": "learning_rate_scaler=NONE learning_rate_cycles=1.0 learning_rate_min_factor "
    "transformer.learning_rate text_encoder_learning_rate custom_learning_rate_scheduler scheduler_params",
    "weights are rounded at random": "optimizer.stochastic_rounding",
    "it changes the optimizer": "optimizer.*",
    "weights are corrected by a low rank": "quantization.svd_dtype=NONE quantization.svd_rank=16",
    "several processes train together in a way of its own": "multi_gpu device_indexes gradient_reduce_*",
    "another adapter is loaded first": "lora_model_name",
    "images are augmented": "concepts[].image.enable_* concepts[].image_variations=1",
    "captions are changed while it trains": "concepts[].text.enable_* concepts[].text.tag_dropout_enable "
    "concepts[].text.caps_randomize_enable concepts[].text.prompt_source=sample concepts[].text_variations=1",
    "a folder counts otherwise": "concepts[].balancing=1.0 concepts[].loss_weight=1.0 transformer.dropout_probability",
}


def _detect(document: Document) -> bool:
    keys = ("model_type", "training_method")
    return document.format == "json" and all(document.value(key) is not None for key in keys)


def _files(values: Values, head: str) -> Mapping[str, str]:
    values = {**values, **{key: str(values[key]) for key in ("resolution", "frames") if key in values}}
    run = ["python", f"{TRAINER}/scripts/train.py", "--config-path", "config.json"]
    return {
        "config.json": json_text(nest(in_file(values))),
        "run.sh": shell_text(values, run, head=head, title="OneTrainer"),
    }


ONETRAINER = Trainer(
    name="onetrainer",
    title="OneTrainer",
    version="23df3832",
    detect=_detect,
    models=(KnownModel("qwen-image", {"model_type": "QWEN"}), KnownModel("flux1-dev", {"model_type": "FLUX_DEV_1"})),
    rules=RULES,
    defaults=DEFAULTS,
    fixed=FIXED,
    decided=DECIDED,
    unlearned=UNLEARNED,
    files=_files,
    weights_keys=("base_model_name",),
    notes=("the adapter is trained in fp32, by autotune in bf16: memory and numbers differ a little",),
)
