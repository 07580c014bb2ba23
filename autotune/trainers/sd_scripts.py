"""Kohya's sd-scripts, and the JSON of its GUI: options in TOML or JSON, data sets in another TOML. FLUX.1-dev."""

from collections.abc import Mapping
from typing import Any

from autotune.trainers import kohya
from autotune.trainers.document import Document
from autotune.trainers.layers import Selects, in_block
from autotune.trainers.rules import ANY, CannotExpress, Context, Values, choice, equal, settings, table, targets
from autotune.trainers.texts import TRAINER, in_file, launcher, shell_text, toml_text
from autotune.trainers.trainer import FILL_IN, KnownModel, Trainer

PARTS: Mapping[str, tuple[str, ...]] = {
    "img_attn_dim": ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    "txt_attn_dim": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    "img_mlp_dim": ("ff.net.0.proj", "ff.net.2"),
    "txt_mlp_dim": ("ff_context.net.0.proj", "ff_context.net.2"),
    "img_mod_dim": ("norm1.linear",),
    "txt_mod_dim": ("norm1_context.linear",),
    "single_dim": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out"),
    "single_mod_dim": ("norm.linear",),
}
"""Ranks of parts in `network_args`, and the layers that each is for; 0 adapts none of them. In single blocks query,
key, value and the first half of the MLP are one layer there."""


def _selects(values: Values, context: Context) -> Selects:
    off = {name for name, dim in kohya.network_arguments(values).items() if name in PARTS and dim == 0}

    def selects(layer: str) -> bool:
        single = layer.startswith("single_")
        name = in_block(layer)
        return any(name in PARTS[part] for part in PARTS.keys() - off if part.startswith("single_") == single)

    return selects


def _write_targets(ours: Values, context: Context) -> Values:
    if ours["targets"] == "attention":
        raise CannotExpress("in its single blocks attention and MLP are one layer; use --targets attention+mlp")
    off = ["img_mod_dim=0", "txt_mod_dim=0", "single_mod_dim=0"] if ours["targets"] == "attention+mlp" else []
    return {"network_args": off or None}


SDPA = (
    ((True, ANY), ("native",)),
    ((ANY, True), ("xformers",)),
    ((ANY, "sdpa"), ("native",)),
    ((ANY, "xformers"), ("xformers",)),
)
RULES = (
    *kohya.RULES,
    targets(["network_args"], _selects, _write_targets),
    table(
        ["fp8_base", "fp8_base_unet"],
        ["quantization"],
        [
            ((True, ANY), ("layerwise-fp8",)),
            ((ANY, True), ("layerwise-fp8",)),
            ((ANY, ANY), ("none",)),
        ],
        [((name,), (True, ANY)) for name in ("torchao-fp8", "torchao-int8", "bnb-int8")],
    ),
    table(kohya.ATTENTION_FLAGS[:3:2], ["attention"], SDPA),
    choice("torch_compile", "compile", {False: "off"}, instead="compiles each block, not the whole model"),
    *equal(
        """
        data=datasets[].subsets[].image_dir|train_data_dir
        caption_dropout=datasets[].subsets[].caption_dropout_rate|general.caption_dropout_rate
        guidance_scale=guidance_scale
        """
    ),
)
DEFAULTS = settings(
    """
    network_dim=4 network_alpha=1 network_dropout=0.0 network_args=null general.resolution=[512,512]
    general.batch_size=1 gradient_accumulation_steps=1 max_train_steps=1600 learning_rate=2e-6
    lr_scheduler="constant" lr_warmup_steps=0 optimizer_type="AdamW" optimizer_args=["weight_decay=0.01"]
    max_grad_norm=1.0 timestep_sampling="sigma" discrete_flow_shift=3.0 gradient_checkpointing=false
    mixed_precision="no" fp8_base=false blocks_to_swap=0 guidance_scale=3.5 torch_compile=false
    datasets[].subsets[].caption_dropout_rate=0.0
    """
)
FIXED = settings(
    """
    general.caption_extension=".txt" general.enable_bucket=true general.bucket_no_upscale=false
    datasets[].subsets[].num_repeats=1 dataset_config="data.toml" output_dir="output" output_name="lora"
    model_prediction_type="raw" cache_latents=true cache_latents_to_disk=true cache_text_encoder_outputs=true
    cache_text_encoder_outputs_to_disk=true network_train_unet_only=true save_precision="bf16"
    """
)
DECIDED = {
    **kohya.DECIDED,
    "the family decides": "save_model_as v2 v_parameterization sdxl apply_t5_attn_mask t5xxl_max_token_length "
    "max_token_length clip_skip dynamo_backend lowram highvram no_half_vae network_train_unet_only "
    "flux1_checkbox mem_eff_attn model_type",
}
UNLEARNED = {
    **kohya.UNLEARNED,
    "another kind of adapter; autotune plans a plain LoRA": "LoRA_type=flux1 LoRA_type=standard",
    "the loss or its weights are others": "model_prediction_type=raw loss_type=l2 min_snr_gamma "
    "debiased_estimation_loss masked_loss alpha_mask prior_loss_weight=1.0",
    "activations wait on the host; autotune recomputes them": "cpu_offload_checkpointing",
    "8-bit states of the optimizer": "use_8bit_adam",
    "text encoders are trained, too": "text_encoder_lr train_t5xxl",
    "images are augmented": "*.flip_aug *.color_aug *.random_crop *.face_crop_aug_range flip_aug color_aug random_crop",
    "captions are changed while it trains": "*.shuffle_caption *.keep_tokens *.caption_tag_dropout_rate "
    "shuffle_caption keep_tokens *.caption_prefix *.caption_suffix *.caption_dropout_every_n_epochs *.class_tokens",
    "images of the class, beside those of the subject": "*.is_reg reg_data_dir",
    "part of the images is left for validation": "*.validation_split validation_split validate_* max_validation_steps",
}


def _detect(document: Document) -> bool:
    is_gui = document.value("LoRA_type") is not None and document.has("pretrained_model_name_or_path")
    return is_gui or kohya.names_module(document, "networks.lora_flux") or document.value("script") == SCRIPT


SCRIPT = "flux_train_network.py"


def _files(values: Values, head: str) -> Mapping[str, str]:
    weights: dict[str, Any] = dict.fromkeys(("pretrained_model_name_or_path", "clip_l", "t5xxl", "ae"), FILL_IN)
    flags = {key: value for key, value in in_file(values).items() if value is not False}
    train = {key: value for key, value in flags.items() if not kohya.kept(key)}
    run = launcher(values, "--num_cpu_threads_per_process", "1", "--mixed_precision", str(values["mixed_precision"]))
    return {
        "train.toml": toml_text({**weights, **train}, head),
        "data.toml": toml_text({key: value for key, value in values.items() if kohya.kept(key)}, ""),
        "run.sh": shell_text(values, [*run, f"{TRAINER}/{SCRIPT}", "--config_file", "train.toml"], title="sd-scripts"),
    }


SD_SCRIPTS = Trainer(
    name="sd-scripts",
    title="sd-scripts",
    version="48d368fa",
    detect=_detect,
    models=(
        KnownModel("flux1-dev", {"network_module": "networks.lora_flux"}),
        KnownModel("flux1-dev", {"LoRA_type": "Flux1"}),
        KnownModel("flux1-dev", {"script": SCRIPT}),
    ),
    rules=RULES,
    defaults=DEFAULTS,
    fixed=FIXED,
    decided=DECIDED,
    unlearned=UNLEARNED,
    files=_files,
    references={"dataset_config": "", "config_file": ""},
    sections_kept=("general.", "datasets["),
    aliases={"optimizer": "optimizer_type", "max_resolution": "resolution", "epoch": "max_train_epochs"},
)
