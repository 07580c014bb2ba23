"""ai-toolkit: one YAML file; its settings are under `config.process[0]`."""

from collections.abc import Mapping

from autotune.trainers.document import Document
from autotune.trainers.layers import Selects, by_parts, short_names
from autotune.trainers.rules import (
    ALLOCATOR,
    ANY,
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
    one_of_list,
    schedule,
    settings,
    table,
    targets,
    whole,
)
from autotune.trainers.texts import TRAINER, in_file, launcher, shell_text, yaml_text
from autotune.trainers.trainer import KnownModel, Trainer

ROOT = "config.process[]."
PROCESSES = ("sd_trainer", "ui_trainer", "diffusion_trainer")
FLOAT8, FOUR_BITS = "the nearest is torchao-fp8", "the nearest is bnb-nf4"


def _swap(values: Values, context: Context) -> Values:
    share = number(values["model.layer_offloading_transformer_percent"])
    return {"swapped_blocks": f"{100 * share:g}%" if boolean(values["model.layer_offloading"]) else "0"}


def _write_swap(ours: Values, context: Context) -> Values:
    total = context.num_blocks or 1
    share = count_blocks(ours["swapped_blocks"], total) / total
    return {"model.layer_offloading": share > 0, "model.layer_offloading_transformer_percent": round(share, 5) or None}


NETWORK = "network.network_kwargs."


def _selects(values: Values, context: Context) -> Selects:
    only, ignored = (values.get(NETWORK + name) or () for name in ("only_if_contains", "ignore_if_contains"))
    return by_parts(only or ("",), ignored)


def _write_targets(ours: Values, context: Context) -> Values:
    key = NETWORK + "only_if_contains"
    return {key: None if ours["targets"] == "all-linear" else short_names(context.family, ours["targets"])}


RULES = (
    targets([NETWORK + "only_if_contains", NETWORK + "ignore_if_contains"], _selects, _write_targets),
    one_of_list("datasets[].control_path", "control", str, lambda paths: paths[0], "autotune takes one folder of them"),
    one_of_list(
        "datasets[].resolution",
        "resolution",
        whole,
        max,
        "each image is trained at every size; autotune at the largest",
    ),
    batch(["train.batch_size", "datasets[].batch_size"], "train.gradient_accumulation", "launch.num_processes"),
    choice("train.optimizer", "optimizer", {"adamw": "adamw"}, instead="trains with AdamW in full precision"),
    schedule(
        "train.lr_scheduler",
        "train.lr_scheduler_params.num_warmup_steps",
        {"constant": "constant", "cosine": "cosine", "constant_with_warmup": "constant_with_warmup"},
        always=False,
    ),
    table(
        ["train.timestep_type"],
        ["timestep_sampling", "timestep_shift"],
        [
            (("sigmoid",), ("logit_normal", 1.0)),
            (("linear",), ("uniform", 1.0)),
            (("flux_shift",), ("uniform", "by_resolution")),
            (("shift",), ("uniform", None), "the shift is the scheduler's own; autotune takes the family's usual"),
        ],
        [(("logit_normal", ANY), ("sigmoid",)), (("uniform", ANY), ("linear",))],
        instead="draws noise levels by its own usual density",
    ),
    choice(
        "train.dtype",
        "precision",
        {"bf16": "bf16", "bfloat16": "bf16", "fp32": "fp32", "float32": "fp32", "float": "fp32"},
        instead="computes in bf16",
    ),
    checkpointing("train.gradient_checkpointing"),
    table(
        ["model.quantize", "model.qtype"],
        ["quantization"],
        [
            ((False, ANY), ("none",)),
            ((True, "int8"), ("torchao-int8",)),
            ((True, "float8"), ("torchao-fp8",)),
            ((True, "qfloat8"), ("torchao-fp8",), f"quanto's float8 has scales of its own; {FLOAT8}"),
            ((True, "convrot8"), ("torchao-int8",), "its products are 8-bit, too; the nearest is torchao-int8"),
            (
                (True, "uint3*"),
                ("bnb-nf4",),
                f"3 bits, fewer than autotune has; {FOUR_BITS}, without a recovery adapter",
            ),
            ((True, "uint4*"), ("bnb-nf4",), f"torchao's 4 bits are not NF4; {FOUR_BITS}, without a recovery adapter"),
            ((True, "convrot4"), ("bnb-nf4",), f"rotated 4-bit weights; {FOUR_BITS}"),
            ((True, "nvfp4"), ("bnb-nf4",), f"4-bit float weights; {FOUR_BITS}"),
        ],
        [
            (("bnb-int8",), (True, "int8")),
            (("layerwise-fp8",), (True, "float8")),
            (("bnb-nf4",), (True, "uint4")),
        ],
    ),
    Rule(
        ("model.layer_offloading", "model.layer_offloading_transformer_percent"),
        ("swapped_blocks",),
        _swap,
        _write_swap,
    ),
    table(
        ["model.quantize_te", "model.qtype_te"],
        ["caching.text_encoder_quantization"],
        [
            ((False, ANY), ("none",)),
            ((None, ANY), (None,)),
            ((True, "int8"), ("torchao-int8",)),
            ((True, "float8"), ("torchao-fp8",)),
            ((True, "qfloat8"), ("torchao-fp8",), f"quanto's float8 has scales of its own; {FLOAT8}"),
        ],
        [(("bnb-nf4",), (True, "uint4")), ((ANY,), (True, "int8"))],
        instead="stores text encoders as its search finds best",
    ),
    choice("model.te_device", "caching.text_encoder_device", {"cpu": "cpu"}),
    table(
        ["model.compile", "model.block_compile"],
        ["compile"],
        [
            ((False, ANY), ("off",)),
            ((True, True), ("block",)),
            ((True, ANY), ("block",), "autotune compiles each block, not the whole model"),
        ],
    ),
    ALLOCATOR,
    *equal(
        """
        rank=network.linear|network.rank lora_alpha=network.linear_alpha|network.alpha
        lora_dropout=network.dropout data=datasets[].folder_path|datasets[].dataset_path
        caption=datasets[].default_caption trigger=trigger_word
        caption_dropout=datasets[].caption_dropout_rate num_frames=datasets[].num_frames
        data_workers=datasets[].num_workers num_steps=train.steps learning_rate=train.lr|train.unet_lr
        weight_decay=train.optimizer_params.weight_decay max_grad_norm=train.max_grad_norm
        attention=train.attention_backend seed=training_seed checkpointing_steps=save.save_every
        checkpoints_total_limit=save.max_step_saves_to_keep preview_every=sample.sample_every
        preview_steps=sample.sample_steps preview_prompts=sample.prompts|sample.samples[].prompt
        """
    ),
)

DEFAULTS = settings(
    """
    network.linear=4 network.linear_alpha=1.0 network.dropout=0.0 network.network_kwargs.only_if_contains=null
    datasets[].caption_dropout_rate=0.0 datasets[].resolution=512 datasets[].num_frames=1 train.batch_size=1
    train.gradient_accumulation=1 train.steps=1000 train.lr=1e-06 train.optimizer="adamw"
    train.optimizer_params.weight_decay=0.01 train.lr_scheduler="constant"
    train.lr_scheduler_params.num_warmup_steps=1000 train.max_grad_norm=1.0 train.timestep_type="sigmoid"
    train.dtype="fp32" train.attention_backend="native" train.gradient_checkpointing=true model.quantize=false
    model.qtype="qfloat8" model.qtype_te="qfloat8" model.layer_offloading=false
    model.layer_offloading_transformer_percent=1.0 model.compile=false
    """
)
FIXED = settings(
    """
    type="diffusion_trainer" training_folder="output" device="cuda" network.type="lora" save.dtype="bf16"
    save.save_format="diffusers" datasets[].caption_ext="txt" datasets[].cache_latents_to_disk=true
    datasets[].buckets=true datasets[].num_repeats=1 train.noise_scheduler="flowmatch"
    train.cache_text_embeddings=true train.train_unet=true train.train_text_encoder=false
    train.bypass_guidance_embedding=false train.ema_config.use_ema=false model.dtype="bf16" model.low_vram=false
    sample.sampler="flowmatch"
    """
)
DECIDED = {
    "latents and captions are always cached, then the encoders freed": "train.cache_text_embeddings "
    "train.unload_text_encoder datasets[].cache_* datasets[].load_image_when_caching_latents",
    "the number of steps decides, not how often a folder is repeated": "datasets[].num_repeats",
    "images are always sorted into buckets by shape": "datasets[].buckets datasets[].bucket_tolerance",
    "what stays on the device is decided by its memory": "model.low_vram model.auto_memory "
    "model.layer_offloading_text_encoder_percent model.split_model* datasets[].prefetch_factor",
    "blocks are compiled as autotune does": "model.compile_* model.cache_size_limit",
    "previews are sampled as the family's pipeline does": "sample.* train.disable_sampling train.skip_first_sample",
    "it names the run or says how it is logged": "type job config.name name meta.* logging.* performance_log_every "
    "training_folder device sqlite_db_path log_dir save.push_to_hub save.hf_*",
    "the family decides": "model.dtype model.vae_dtype model.te_dtype network.conv network.conv_alpha save.dtype "
    "save.save_format network.transformer_only network.split_multistage_loras train.noise_scheduler",
    "autotune trains the transformer": "train.train_unet train.train_refiner",
}
UNLEARNED = {
    "an average of the weights over steps is kept; autotune keeps none": "train.ema_config.use_ema",
    "it describes that average": "train.ema_config.ema_decay=0.99 train.ema_config.*",
    "another kind of adapter; autotune plans a plain LoRA": "network.type=lora",
    "it shapes that adapter": "network.lokr_* network.old_lokr_format",
    "another adapter is loaded or merged first": "network.pretrained_lora_path model.lora_path "
    "model.assistant_lora_path train.merge_network_on_save",
    "a step is shown for each micro-batch; the effective batch is not carried": "train.gradient_accumulation_steps=1",
    "the loss or its weights are others": "train.min_snr_gamma train.snr_gamma train.loss_type=mse "
    "train.loss_target=noise train.content_or_style=balanced train.do_* train.correct_pred_norm train.pred_scaler=1.0 "
    "train.linear_timesteps*",
    "noise is drawn otherwise": "train.noise_offset train.noise_multiplier=1.0 train.random_noise_* "
    "train.min_denoising_steps train.max_denoising_steps=999 train.force_consistent_noise train.blended_blur_noise",
    "a further loss keeps what the model knew": "train.diff_output_preservation* train.blank_prompt_preservation* "
    "train.inverted_mask_prior* train.reg_weight=1.0 datasets[].is_reg datasets[].prior_reg",
    "masks weigh parts of images": "datasets[].mask_path datasets[].alpha_mask datasets[].mask_* "
    "datasets[].invert_mask",
    "images are augmented": "datasets[].flip_* datasets[].random_* datasets[].augment* datasets[].square_crop",
    "captions are changed while it trains": "datasets[].shuffle_tokens datasets[].token_dropout_rate "
    "datasets[].keep_tokens train.prompt_dropout_prob train.short_and_long_captions* train.negative_prompt",
    "a folder counts otherwise in the loss": "datasets[].network_weight=1.0 datasets[].loss_multiplier=1.0",
    "text encoders are trained, too": "train.train_text_encoder train.text_encoder_lr",
    "trained without the guidance embedding": "train.bypass_guidance_embedding",
    "clips are cut otherwise": "datasets[].fps=24 datasets[].shrink_video_to_frames=true datasets[].auto_frame_count",
    "captions are read from other files": "datasets[].caption_ext=txt datasets[].caption_ext=.txt",
}


def _detect(document: Document) -> bool:
    return document.format == "yaml" and str(document.value(ROOT + "type")) in PROCESSES


def _files(values: Values, head: str) -> Mapping[str, str]:
    inside = {ROOT + key: value for key, value in in_file(values).items() if key != "sample.prompts"}
    prompts = {f"{ROOT}sample.samples[{i}].prompt": p for i, p in enumerate(values.get("sample.prompts", ()))}
    outside = {"job": "extension", "config.name": "autotune-lora"}
    run = launcher(values) if "launch.num_processes" in values else ["python"]
    return {
        "train.yaml": yaml_text({**outside, **inside, **prompts, "meta.name": "[name]", "meta.version": "1.0"}, head),
        "run.sh": shell_text(values, [*run, f"{TRAINER}/run.py", "train.yaml"], title="ai-toolkit"),
    }


AI_TOOLKIT = Trainer(
    name="ai-toolkit",
    title="ai-toolkit",
    version="27a03a91",
    detect=_detect,
    models=(
        KnownModel("qwen-image", {"model.arch": "qwen_image"}),
        KnownModel("qwen-image", {"model.arch": "qwen_image:2512"}),
        KnownModel("qwen-image-edit", {"model.arch": "qwen_image_edit"}),
        KnownModel("qwen-image-edit-plus", {"model.arch": "qwen_image_edit_plus"}),
        KnownModel("qwen-image-edit-plus", {"model.arch": "qwen_image_edit_plus:2511"}),
        KnownModel("flux1-dev", {"model.arch": "flux"}),
        KnownModel("flux1-dev", {"model.is_flux": True}),
    ),
    rules=RULES,
    defaults=DEFAULTS,
    fixed=FIXED,
    decided=DECIDED,
    unlearned=UNLEARNED,
    files=_files,
    root=ROOT,
    weights_keys=("model.name_or_path",),
    gathered=("sample.samples[].prompt",),
    notes=("AdamW adds 1e-6 to its denominators, autotune 1e-8",),
)
