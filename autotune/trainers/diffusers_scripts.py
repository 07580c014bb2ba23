"""diffusers' DreamBooth scripts for LoRA: command lines, and a JSON file for quantization by
bitsandbytes.
"""

from collections.abc import Mapping
from typing import Any

from autotune.trainers import blocks, overheads, rules
from autotune.trainers.document import Document
from autotune.trainers.meanings import meanings
from autotune.trainers.parts import peft_targets
from autotune.trainers.rules import LOST, CannotExpress, Context, Rule, Values
from autotune.trainers.tables import ALLOCATOR, accelerate_compile, choice, precision
from autotune.trainers.texts import TRAINER, in_file, json_text, launcher, options, shell_text
from autotune.trainers.trainer import FILL_IN, KnownModel, Trainer

JOINT = "to_k to_q to_v to_out.0 add_k_proj add_q_proj add_v_proj to_add_out"
FLUX_MLP = "ff.net.0.proj ff.net.2 ff_context.net.0.proj ff_context.net.2"
KREA_REST = (
    "text_fusion.projector txt_in.linear_1 txt_in.linear_2 time_embed.linear_1 "
    "time_embed.linear_2 "
    "time_mod_proj"
)
DEFAULT_TARGETS: Mapping[str, str] = {
    "flux1": f"{' '.join(f'attn.{name}' for name in JOINT.split())} {FLUX_MLP}",
    "flux2": "to_k to_q to_v to_out.0 to_qkv_mlp_proj single_transformer_blocks.0.attn.to_out",
    "sd3.5": " ".join(f"attn.{name}" for name in JOINT.split()),
    "krea": f"img_in final_layer.linear to_q to_k to_v to_out.0 to_gate ff.up ff.down {KREA_REST}",
    "": "to_k to_q to_v to_out.0",
}
BNB = "bnb."
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
NF4_COMPUTE = {"bnb_4bit_compute_dtype": "bfloat16"}
QUANTIZATION_FILE = "quantization.json"
SHIFT = "scheduler.shift"
"""In no file: the shift of the model's own scheduler, if that does not depend on the resolution."""


def _quantization(values: Values, context: Context) -> Values:
    if values.get(f"{BNB}load_in_8bit"):
        return {"quantization": "torchao-int8"}
    if values.get(f"{BNB}load_in_4bit"):
        same_scales = all(values.get(BNB + key) == value for key, value in NF4.items())
        return {
            "quantization": "bnb-nf4",
            **({} if same_scales else {LOST: "the nearest is NF4 with double scales"}),
        }
    return {"quantization": "none"}


def _write_quantization(ours: Values, context: Context) -> Values:
    written: dict[str, Any] = {"bnb_quantization_config_path": QUANTIZATION_FILE}
    if ours["quantization"] == "none":
        return {"bnb_quantization_config_path": None}
    if context.family.name in ("flux1-dev", "sd3.5", "sdxl"):
        raise CannotExpress(
            "its scripts for FLUX.1, SD 3.5 and SDXL have no quantization; use --quality exact"
        )
    if ours["quantization"] == "bnb-nf4":
        return written | {BNB + key: value for key, value in {**NF4, **NF4_COMPUTE}.items()}
    return written | {f"{BNB}load_in_8bit": True}


def _noise(values: Values, context: Context) -> Values:
    scheme = values["weighting_scheme"]
    odd = values.get("logit_mean", 0) != 0 or values.get("logit_std", 1) != 1
    lost = (
        {LOST: "autotune draws from the standard normal"}
        if scheme == "logit_normal" and odd
        else {}
    )
    known = {"logit_normal": ("logit_normal", "none"), "none": ("uniform", "none")}
    known |= {name: ("uniform", name) for name in ("sigma_sqrt", "cosmap")}
    if scheme not in known:
        return {LOST: "autotune has no such weighting"}
    sampling, weighting = known[scheme]
    return {
        "timestep_sampling": sampling,
        "weighting_scheme": weighting,
        "timestep_shift": values.get(SHIFT, 1.0),
        **lost,
    }


def _write_noise(ours: Values, context: Context) -> Values:
    scheme = (
        "logit_normal" if ours["timestep_sampling"] == "logit_normal" else ours["weighting_scheme"]
    )
    normal = {"logit_mean": 0.0, "logit_std": 1.0} if scheme == "logit_normal" else {}
    return {"weighting_scheme": scheme, **normal}


NO_FILES = (
    "it reads no .txt files: one prompt for all, or --dataset_name and --caption_column of "
    "a "
    "metadata.jsonl"
)
RULES = (
    peft_targets("lora_layers", DEFAULT_TARGETS, joined=True),
    rules.alpha("lora_alpha", "rank"),
    rules.batch(["train_batch_size"], "gradient_accumulation_steps", "launch.num_processes"),
    rules.duration("max_train_steps", "num_train_epochs"),
    rules.schedule(
        "lr_scheduler", "lr_warmup_steps", "constant constant_with_warmup linear cosine"
    ),
    choice("optimizer", "optimizer", {"AdamW": "adamw"}, instead="trains with AdamW"),
    rules.by_noise(
        Rule(
            ("weighting_scheme", "logit_mean", "logit_std", SHIFT),
            ("timestep_sampling", "weighting_scheme", "timestep_shift"),
            _noise,
            _write_noise,
        ),
        rules.min_snr("snr_gamma"),
    ),
    precision("mixed_precision", bf16="bf16", fp32="no", fp16="fp16"),
    blocks.checkpointing("gradient_checkpointing"),
    Rule(
        (*(BNB + key for key in ("load_in_8bit", *NF4)), "bnb_quantization_config_path"),
        ("quantization",),
        _quantization,
        _write_quantization,
    ),
    Rule(
        ("instance_prompt",),
        ("caption",),
        lambda values, _: (
            {LOST: NO_FILES} if (own := values["instance_prompt"]) == FILL_IN else {"caption": own}
        ),
        lambda ours, _: {"instance_prompt": ours["caption"] or FILL_IN},
    ),
    accelerate_compile("launch."),
    *(ALLOCATOR, rules.VALIDATION_PROMPT),
    *rules.equal(
        """
        rank=rank lora_dropout=lora_dropout data=instance_data_dir|dataset_name caption_dropout=caption_dropout
        resolution=resolution learning_rate=learning_rate weight_decay=adam_weight_decay max_grad_norm=max_grad_norm
        guidance_scale=guidance_scale attention=env.DIFFUSERS_ATTN_BACKEND data_workers=dataloader_num_workers
        seed=seed checkpointing_steps=checkpointing_steps checkpoints_total_limit=checkpoints_total_limit
        """
    ),
)
DEFAULTS = rules.settings(
    """
    rank=4 lora_alpha=4 lora_dropout=0.0 lora_layers=null caption_dropout=0.0 resolution=512 train_batch_size=4
    gradient_accumulation_steps=1 num_train_epochs=1 learning_rate=0.0001 lr_scheduler="constant"
    lr_warmup_steps=500 optimizer="AdamW" adam_weight_decay=0.0001 max_grad_norm=1.0 weighting_scheme="none"
    mixed_precision="no" gradient_checkpointing=false bnb_quantization_config_path=null
    env.DIFFUSERS_ATTN_BACKEND="native" launch.dynamo_backend="no"
    """
)
FIXED = rules.settings(
    'output_dir="output" center_crop=true cache_latents=true report_to="tensorboard"'
)
DECIDED = meanings(
    """
    products are computed in bf16: bnb.bnb_4bit_compute_dtype
    cached: cache_latents offload
    buckets: aspect_ratio_buckets use_aspect_ratio_buckets center_crop
    repeats: repeats
    named: output_dir push_to_hub hub_* logging_dir report_to env.* resume_from_checkpoint local_rank launch.*
        upcast_before_saving sample_batch_size cache_dir variant output_kohya_format
    previews: validation_* num_validation_images skip_final_inference final_validation_prompt
    family: max_sequence_length text_encoder_out_layers allow_tf32 adam_beta1 adam_beta2 adam_epsilon
        pretrained_vae_model_name_or_path image_interpolation_mode enable_xformers_memory_efficient_attention
    """
)
UNLEARNED = meanings(
    """
    class: with_prior_preservation class_* num_class_images=100 prior_loss_weight=1.0
    adapter: use_dora
    states: use_8bit_adam
    it is for another optimizer: prodigy_*
    encoders: train_text_encoder text_encoder_lr
    augmented: random_flip
    noise: do_edm_style_training
    the rate is multiplied by batch and processes: scale_lr
    products: do_fp8_training
    loss: precondition_outputs
    schedule: lr_num_cycles=1 lr_power=1.0 mode_scale
    captions come from a column: caption_column image_column=image dataset_config_name
    """
)
SCRIPT, WEIGHTS = "train_dreambooth_lora_{}.py", "pretrained_model_name_or_path"
Z_IMAGE, TURBO = {"script": SCRIPT.format("z_image")}, "Tongyi-MAI/Z-Image-Turbo"
SD35: Mapping[str, Any] = {
    "defaults": {SHIFT: 3.0, "weighting_scheme": "logit_normal"},
    "fixed": {"precondition_outputs": 0, "max_sequence_length": 256},
    "lacks": ("lora_alpha", "caption_dropout", "guidance_scale"),
    "note": (
        "unless precondition_outputs is 0, it weighs each loss by the square of the noise level"
    ),
}
KREA = {"rank": 32, "lora_alpha": 32, "learning_rate": 3e-4}
NO_DROPOUT = ("caption_dropout",)
MODELS = (
    KnownModel(
        "qwen-image",
        {"script": SCRIPT.format("qwen_image")},
        lacks=("guidance_scale",),
        kept=overheads.STAYS,
    ),
    KnownModel(
        "flux1-dev",
        {"script": SCRIPT.format("flux")},
        lacks=NO_DROPOUT,
        kept=overheads.DIFFUSERS_FLUX,
    ),
    KnownModel(
        "sdxl",
        {"script": SCRIPT.format("sdxl")},
        defaults={"resolution": 1024, "snr_gamma": None},
        lacks=(
            "lora_alpha",
            "lora_layers",
            *NO_DROPOUT,
            "guidance_scale",
            "cache_latents",
            "weighting_scheme",
        ),
        note="it tells the model how each image was cut, autotune that it is whole",
        kept=overheads.DIFFUSERS_SDXL,
    ),
    KnownModel(
        "sd3.5", {"script": SCRIPT.format("sd3")}, assumes="of the SD 3 models 3.5 large", **SD35
    ),
    KnownModel(
        "sd3.5-medium",
        {"script": SCRIPT.format("sd3"), WEIGHTS: "stabilityai/stable-diffusion-3.5-medium"},
        **SD35,
    ),
    KnownModel("z-image", Z_IMAGE, {SHIFT: 6.0}, lacks=NO_DROPOUT, kept=overheads.STAYS),
    KnownModel(
        "z-image-turbo",
        {**Z_IMAGE, WEIGHTS: TURBO},
        {SHIFT: 3.0},
        lacks=NO_DROPOUT,
        kept=overheads.STAYS,
    ),
    KnownModel(
        "krea-2",
        {"script": SCRIPT.format("krea2")},
        KREA,
        lacks=("guidance_scale",),
        kept=overheads.STAYS,
    ),
    KnownModel("flux2-klein", {"script": SCRIPT.format("flux2_klein")}, kept=overheads.STAYS),
)


def _detect(document: Document) -> bool:
    return str(document.value("script", "")).startswith("train_dreambooth_lora_")


def _files(values: Values, head: str) -> Mapping[str, str]:
    stored = {key.removeprefix(BNB): value for key, value in values.items() if key.startswith(BNB)}
    words = options(
        in_file(values, lambda key: key not in ("script", SHIFT) and not key.startswith(BNB))
    )
    compiled = values["launch.dynamo_backend"] != "no"
    flags = (
        ["--dynamo_backend", "inductor", "--dynamo_use_regional_compilation"] if compiled else []
    )
    script = f"{TRAINER}/examples/dreambooth/{values['script']}"
    run = shell_text(
        values, [*launcher(values, *flags), script, *words], head=head, title="diffusers"
    )
    return {"run.sh": run, **({QUANTIZATION_FILE: json_text(stored)} if stored else {})}


TABLE = (MODELS, RULES, DEFAULTS, FIXED, DECIDED, UNLEARNED)
DIFFUSERS = Trainer(
    *("diffusers", "diffusers' scripts", "58eb52c08", _detect, *TABLE, _files),
    weights_keys=(WEIGHTS,),
    references={"bnb_quantization_config_path": BNB},
    notes=(
        "the adapter's first matrices are drawn from a normal distribution, autotune's as peft "
        "draws them",
    ),
    overheads=overheads.DIFFUSERS,
)
