"""diffusers' DreamBooth scripts for LoRA: command lines, and a JSON file for quantization by bitsandbytes."""

from collections.abc import Mapping
from typing import Any

from autotune.trainers.document import Document
from autotune.trainers.layers import Selects, by_ends, short_names
from autotune.trainers.rules import (
    ALLOCATOR,
    LOST,
    VALIDATION_PROMPT,
    CannotExpress,
    Context,
    Rule,
    Values,
    accelerate_compile,
    batch,
    checkpointing,
    choice,
    duration,
    equal,
    schedule,
    settings,
    targets,
)
from autotune.trainers.texts import TRAINER, in_file, json_text, launcher, options, shell_text
from autotune.trainers.trainer import KnownModel, Trainer

SCRIPTS = {"qwen-image": "train_dreambooth_lora_qwen_image.py", "flux1-dev": "train_dreambooth_lora_flux.py"}
DEFAULT_TARGETS: Mapping[str, tuple[str, ...]] = {
    "qwen-image": ("to_k", "to_q", "to_v", "to_out.0"),
    "flux1-dev": (
        *(f"attn.{name}" for name in ("to_k", "to_q", "to_v", "to_out.0")),
        *(f"attn.{name}" for name in ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    ),
}
BNB = "bnb."
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
NF4_COMPUTE = {"bnb_4bit_compute_dtype": "bfloat16"}
QUANTIZATION_FILE = "quantization.json"


def _selects(values: Values, context: Context) -> Selects:
    given = values.get("lora_layers")
    return by_ends([name.strip() for name in given.split(",")] if given else DEFAULT_TARGETS[context.family.name])


def _write_targets(ours: Values, context: Context) -> Values:
    exact = context.family.target_set(ours["targets"])
    names = short_names(context.family, ours["targets"]) if isinstance(exact, str) else list(exact)
    return {"lora_layers": ",".join(names)}


def _quantization(values: Values, context: Context) -> Values:
    if values.get(f"{BNB}load_in_8bit"):
        return {"quantization": "bnb-int8"}
    if values.get(f"{BNB}load_in_4bit"):
        same_scales = all(values.get(BNB + key) == value for key, value in NF4.items())
        return {"quantization": "bnb-nf4", **({} if same_scales else {LOST: "the nearest is NF4 with double scales"})}
    return {"quantization": "none"}


def _write_quantization(ours: Values, context: Context) -> Values:
    written: dict[str, Any] = {"bnb_quantization_config_path": QUANTIZATION_FILE}
    if ours["quantization"] == "none":
        return {"bnb_quantization_config_path": None}
    if context.family.name == "flux1-dev":
        raise CannotExpress("its script for FLUX.1 has no quantization; use --quality exact")
    if ours["quantization"] == "bnb-nf4":
        return written | {BNB + key: value for key, value in {**NF4, **NF4_COMPUTE}.items()}
    return written | {f"{BNB}load_in_8bit": True}


def _noise(values: Values, context: Context) -> Values:
    scheme = values["weighting_scheme"]
    odd = values.get("logit_mean", 0) != 0 or values.get("logit_std", 1) != 1
    lost = {LOST: "autotune draws from the standard normal"} if scheme == "logit_normal" and odd else {}
    known = {"logit_normal": ("logit_normal", "none"), "none": ("uniform", "none")}
    known |= {name: ("uniform", name) for name in ("sigma_sqrt", "cosmap")}
    if scheme not in known:
        return {LOST: "autotune has no such weighting"}
    sampling, weighting = known[scheme]
    return {"timestep_sampling": sampling, "weighting_scheme": weighting, "timestep_shift": 1.0, **lost}


def _write_noise(ours: Values, context: Context) -> Values:
    scheme = "logit_normal" if ours["timestep_sampling"] == "logit_normal" else ours["weighting_scheme"]
    normal = {"logit_mean": 0.0, "logit_std": 1.0} if scheme == "logit_normal" else {}
    return {"weighting_scheme": scheme, **normal}


RULES = (
    targets(["lora_layers"], _selects, _write_targets, in_blocks=False),
    batch(["train_batch_size"], "gradient_accumulation_steps", "launch.num_processes"),
    duration("max_train_steps", "num_train_epochs"),
    schedule(
        "lr_scheduler",
        "lr_warmup_steps",
        {name: name for name in ("constant", "constant_with_warmup", "linear", "cosine")},
    ),
    choice("optimizer", "optimizer", {"AdamW": "adamw"}, instead="trains with AdamW"),
    Rule(
        ("weighting_scheme", "logit_mean", "logit_std"),
        ("timestep_sampling", "weighting_scheme", "timestep_shift"),
        _noise,
        _write_noise,
    ),
    choice("mixed_precision", "precision", {"bf16": "bf16", "no": "fp32"}, instead="computes in bf16"),
    checkpointing("gradient_checkpointing"),
    Rule(
        (*(BNB + key for key in ("load_in_8bit", *NF4)), "bnb_quantization_config_path"),
        ("quantization",),
        _quantization,
        _write_quantization,
    ),
    accelerate_compile("launch."),
    ALLOCATOR,
    VALIDATION_PROMPT,
    *equal(
        """
        rank=rank lora_alpha=lora_alpha lora_dropout=lora_dropout data=instance_data_dir|dataset_name
        caption=instance_prompt caption_dropout=caption_dropout resolution=resolution
        learning_rate=learning_rate weight_decay=adam_weight_decay
        max_grad_norm=max_grad_norm guidance_scale=guidance_scale attention=env.DIFFUSERS_ATTN_BACKEND
        data_workers=dataloader_num_workers seed=seed checkpointing_steps=checkpointing_steps
        checkpoints_total_limit=checkpoints_total_limit
        """
    ),
)
DEFAULTS = settings(
    """
    rank=4 lora_alpha=4 lora_dropout=0.0 lora_layers=null caption_dropout=0.0 resolution=512 train_batch_size=4
    gradient_accumulation_steps=1 num_train_epochs=1 learning_rate=0.0001 lr_scheduler="constant"
    lr_warmup_steps=500 optimizer="AdamW" adam_weight_decay=0.0001 max_grad_norm=1.0 weighting_scheme="none"
    mixed_precision="no" gradient_checkpointing=false bnb_quantization_config_path=null
    env.DIFFUSERS_ATTN_BACKEND="native" launch.dynamo_backend="no"
    """
)
FIXED = settings('output_dir="output" cache_latents=true report_to="tensorboard"')
DECIDED = {
    "products are computed in bf16": "bnb.bnb_4bit_compute_dtype",
    "latents and captions are always cached, then the encoders freed": "cache_latents offload",
    "images are always sorted into buckets by shape": "aspect_ratio_buckets use_aspect_ratio_buckets center_crop",
    "the number of steps decides, not how often a folder is repeated": "repeats",
    "it names the run or says how it is saved and logged": "output_dir push_to_hub hub_* logging_dir report_to env.* "
    "resume_from_checkpoint local_rank launch.* upcast_before_saving sample_batch_size cache_dir variant",
    "previews are sampled as the family's pipeline does": "validation_* num_validation_images skip_final_inference "
    "final_validation_prompt",
    "the family decides": "max_sequence_length allow_tf32 adam_beta1 adam_beta2 adam_epsilon",
}
UNLEARNED = {
    "images of the class, beside those of the subject": "with_prior_preservation class_* num_class_images=100 "
    "prior_loss_weight=1.0",
    "8-bit states of the optimizer": "use_8bit_adam",
    "it is for another optimizer": "prodigy_*",
    "text encoders are trained, too": "train_text_encoder text_encoder_lr",
    "images are augmented": "random_flip",
    "the rate is multiplied by batch and processes": "scale_lr",
    "products are in 8 bits, too": "do_fp8_training",
    "another schedule's shape": "lr_num_cycles=1 lr_power=1.0 mode_scale",
    "captions come from a column": "caption_column image_column=image dataset_config_name",
}


def _detect(document: Document) -> bool:
    return str(document.value("script", "")).startswith("train_dreambooth_lora_")


def _files(values: Values, head: str) -> Mapping[str, str]:
    stored = {key.removeprefix(BNB): value for key, value in values.items() if key.startswith(BNB)}
    own = ("script", "caption_dropout", "checkpoints_total_limit")
    words = options(in_file(values, lambda key: key not in own and not key.startswith(BNB)))
    compiled = values["launch.dynamo_backend"] != "no"
    flags = ["--dynamo_backend", "inductor", "--dynamo_use_regional_compilation"] if compiled else []
    script = f"{TRAINER}/examples/dreambooth/{values['script']}"
    run = shell_text(values, [*launcher(values, *flags), script, *words], head=head, title="diffusers")
    return {"run.sh": run, **({QUANTIZATION_FILE: json_text(stored)} if stored else {})}


DIFFUSERS = Trainer(
    name="diffusers",
    title="diffusers' scripts",
    version="58eb52c08",
    detect=_detect,
    models=tuple(KnownModel(family, {"script": script}) for family, script in SCRIPTS.items()),
    rules=RULES,
    defaults=DEFAULTS,
    fixed=FIXED,
    decided=DECIDED,
    unlearned=UNLEARNED,
    files=_files,
    weights_keys=("pretrained_model_name_or_path",),
    references={"bnb_quantization_config_path": BNB},
    notes=("the adapter's first matrices are drawn from a normal distribution, autotune's as peft draws them",),
)
