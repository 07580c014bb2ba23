"""ai-toolkit: one YAML file; its settings are under `config.process[0]`."""

from collections.abc import Mapping

from autotune.trainers import blocks, overheads, rules
from autotune.trainers.document import Document
from autotune.trainers.meanings import meanings
from autotune.trainers.parts import PartKeys
from autotune.trainers.tables import ALLOCATOR, choice, precision, table
from autotune.trainers.texts import TRAINER, in_file, launcher, shell_text, yaml_text
from autotune.trainers.trainer import KnownModel, Trainer, models

ROOT = "config.process[]."
SWAP = ("model.layer_offloading_transformer_percent", "model.layer_offloading")
RULES = (
    PartKeys(
        "network.network_kwargs.only_if_contains",
        "network.network_kwargs.ignore_if_contains",
        "network.transformer_only",
        "ZImageTransformer2DModel=layers UNet2DConditionModel= "
        "Flux2Transformer2DModel=double_blocks|single_blocks "
        "WanTransformer3DModel=blocks Krea2Transformer2DModel=blocks",
        "Flux2Transformer2DModel Krea2Transformer2DModel",
        "network.conv",
    ).rule(),
    rules.one_of_list("datasets[].control_path", "control", "autotune takes one folder of them"),
    rules.one_of_list(
        "datasets[].resolution",
        "resolution",
        "each image is trained at every size; autotune at the largest",
    ),
    rules.batch(
        ["train.batch_size", "datasets[].batch_size"],
        "train.gradient_accumulation",
        "launch.num_processes",
    ),
    choice(
        "train.optimizer",
        "optimizer",
        {"adamw": "adamw"},
        instead="trains with AdamW in full precision",
    ),
    rules.schedule(
        "train.lr_scheduler",
        "train.lr_scheduler_params.num_warmup_steps",
        "constant cosine constant_with_warmup",
        always=False,
    ),
    rules.by_noise(
        table(
            "train.timestep_type",
            "timestep_sampling timestep_shift",
            """
            sigmoid    | logit_normal 1.0
            linear     | uniform 1.0
            flux_shift | uniform by_resolution
            shift      | uniform - | the shift is the scheduler's own; autotune takes the family's usual
            """,
            "logit_normal * | sigmoid\n uniform * | linear",
            instead="draws noise levels by its own usual density",
        ),
        rules.min_snr("train.min_snr_gamma"),
    ),
    precision("train.dtype", bf16="bf16 bfloat16", fp32="fp32 float32 float", fp16="fp16 float16"),
    blocks.checkpointing("train.gradient_checkpointing"),
    table(
        "model.quantize model.qtype",
        "quantization",
        """
        false *       | none
        true int8     | torchao-int8
        true float8   | torchao-fp8
        true qfloat8  | torchao-fp8  | quanto's float8 has scales of its own; the nearest is torchao-fp8
        true convrot8 | torchao-int8 | its products are 8-bit, too; the nearest is torchao-int8
        true uint3*   | bnb-nf4 | 3 bits, fewer than autotune has; the nearest is bnb-nf4, without a recovery adapter
        true uint4*   | bnb-nf4 | torchao's 4 bits are not NF4; the nearest is bnb-nf4, without a recovery adapter
        true convrot4 | bnb-nf4 | rotated 4-bit weights; the nearest is bnb-nf4
        true nvfp4    | bnb-nf4 | 4-bit float weights; the nearest is bnb-nf4
        """,
        "bnb-nf4 | true uint4",
    ),
    blocks.share_of_blocks(*SWAP),
    table(
        "model.quantize_te model.qtype_te",
        "caching.text_encoder_quantization",
        "false * | none\n null * | -\n true int8 | torchao-int8\n true float8 | torchao-fp8\n"
        "true qfloat8 | torchao-fp8 | quanto's float8 has scales of its own; the nearest is "
        "torchao-fp8",
        "bnb-nf4 | true uint4\n * | true int8",
    ),
    choice("model.te_device", "caching.text_encoder_device", {"cpu": "cpu"}),
    table(
        "model.compile model.block_compile",
        "compile",
        "false * | off\n true true | block\n true * | block | autotune compiles each block, not "
        "the whole model",
    ),
    ALLOCATOR,
    *rules.equal(
        """
        rank=network.linear|network.rank lora_alpha=network.linear_alpha|network.alpha lora_dropout=network.dropout
        data=datasets[].folder_path|datasets[].dataset_path caption=datasets[].default_caption trigger=trigger_word
        caption_dropout=datasets[].caption_dropout_rate num_frames=datasets[].num_frames
        data_workers=datasets[].num_workers num_steps=train.steps learning_rate=train.lr|train.unet_lr
        weight_decay=train.optimizer_params.weight_decay max_grad_norm=train.max_grad_norm
        attention=train.attention_backend seed=training_seed checkpointing_steps=save.save_every
        checkpoints_total_limit=save.max_step_saves_to_keep preview_every=sample.sample_every
        preview_steps=sample.sample_steps preview_prompts=sample.prompts|sample.samples[].prompt
        """
    ),
)
DEFAULTS = rules.settings(
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
FIXED = rules.settings(
    """
    type="diffusion_trainer" training_folder="output" device="cuda" network.type="lora" save.dtype="bf16"
    save.save_format="diffusers" datasets[].caption_ext="txt" datasets[].cache_latents_to_disk=true
    datasets[].buckets=true datasets[].num_repeats=1 train.noise_scheduler="flowmatch" train.cache_text_embeddings=true
    train.train_unet=true train.train_text_encoder=false train.bypass_guidance_embedding=false
    train.ema_config.use_ema=false model.dtype="bf16" model.low_vram=true sample.sampler="flowmatch"
    """
)
DECIDED = meanings(
    """
    cached: train.cache_text_embeddings train.unload_text_encoder datasets[].cache_*
        datasets[].load_image_when_caching_latents
    repeats: datasets[].num_repeats
    buckets: datasets[].buckets datasets[].bucket_tolerance
    device: model.low_vram model.auto_memory model.layer_offloading_text_encoder_percent model.split_model*
        datasets[].prefetch_factor
    blocks are compiled as autotune does: model.compile_* model.cache_size_limit
    previews: sample.* train.disable_sampling train.skip_first_sample
    named: type job config.name name meta.* logging.* performance_log_every training_folder device sqlite_db_path
        log_dir save.push_to_hub save.hf_*
    family: train.train_unet train.train_refiner model.dtype model.vae_dtype model.te_dtype network.conv_alpha
        save.dtype save.save_format network.split_multistage_loras train.noise_scheduler model.is_xl
    """
)
UNLEARNED = meanings(
    """
    average: train.ema_config.use_ema
    adapter: network.type=lora
    it describes that average, or that adapter: train.ema_config.ema_decay=0.99 train.ema_config.* network.lokr_*
        network.old_lokr_format
    merged: network.pretrained_lora_path model.lora_path model.assistant_lora_path train.merge_network_on_save
    a step is shown for each micro-batch; the effective batch is not carried: train.gradient_accumulation_steps=1
    loss: train.snr_gamma train.loss_type=mse train.loss_target=noise train.content_or_style=balanced train.do_*
        train.correct_pred_norm train.pred_scaler=1.0 train.linear_timesteps*
    noise: train.noise_offset train.noise_multiplier=1.0 train.random_noise_* train.min_denoising_steps
        train.max_denoising_steps=999 train.force_consistent_noise train.blended_blur_noise
    a further loss keeps what the model knew: train.diff_output_preservation* train.blank_prompt_preservation*
        train.inverted_mask_prior* train.reg_weight=1.0 datasets[].is_reg datasets[].prior_reg
    masks: datasets[].mask_path datasets[].alpha_mask datasets[].mask_* datasets[].invert_mask
    augmented: datasets[].flip_* datasets[].random_* datasets[].augment* datasets[].square_crop
    captions: datasets[].shuffle_tokens datasets[].token_dropout_rate datasets[].keep_tokens train.prompt_dropout_prob
        train.short_and_long_captions* train.negative_prompt
    a folder counts otherwise in the loss: datasets[].network_weight=1.0 datasets[].loss_multiplier=1.0
    encoders: train.train_text_encoder train.text_encoder_lr
    trained without the guidance embedding: train.bypass_guidance_embedding
    clips: datasets[].fps=24 datasets[].shrink_video_to_frames=true datasets[].auto_frame_count datasets[].do_i2v
    files: datasets[].caption_ext=txt datasets[].caption_ext=.txt
    """
)
WEIGHTS, SD35_MEDIUM = "model.name_or_path", "stabilityai/stable-diffusion-3.5-medium"
NO_FORMATS = ("model.quantize", "model.qtype", "model.quantize_te", "model.qtype_te")
OLD = {"train.noise_scheduler": "ddpm", "sample.sampler": "ddpm"}
MODELS = (
    *models(
        "model.arch",
        """
        qwen-image=qwen_image qwen-image-2512=qwen_image:2512 qwen-image-edit=qwen_image_edit
        qwen-image-edit-plus=qwen_image_edit_plus qwen-image-edit-2511=qwen_image_edit_plus:2511
        z-image=zimage z-image-turbo=zimage:turbo krea-2=krea2 krea-2-turbo=krea2:turbo flux2-klein=flux2_klein_4b
        flux2-klein-9b=flux2_klein_9b wan-2.1=wan21:1b wan-2.1-14b=wan21:14b wan-2.1=wan21 wan-2.2=wan22_5b
        """,
    ),
    *(
        KnownModel("flux1-dev", keys, lacks=SWAP)
        for keys in ({"model.arch": "flux"}, {"model.is_flux": True})
    ),
    *(
        KnownModel("sd3.5", keys, lacks=SWAP, assumes="of the SD 3 models 3.5 large")
        for keys in ({"model.arch": "sd3"}, {"model.is_v3": True})
    ),
    *(
        KnownModel("sd3.5-medium", {**keys, WEIGHTS: SD35_MEDIUM}, lacks=SWAP)
        for keys in ({"model.arch": "sd3"}, {"model.is_v3": True})
    ),
    KnownModel("sdxl", {"model.arch": "sdxl"}, fixed=OLD, lacks=(*SWAP, *NO_FORMATS)),
    KnownModel("sdxl", {"model.is_xl": True}, fixed=OLD, lacks=(*SWAP, *NO_FORMATS)),
)


def _detect(document: Document) -> bool:
    return str(document.value(ROOT + "type")) in ("sd_trainer", "ui_trainer", "diffusion_trainer")


def _files(values: rules.Values, head: str) -> Mapping[str, str]:
    inside = {
        ROOT + key: value for key, value in in_file(values).items() if key != "sample.prompts"
    }
    prompts = {
        f"{ROOT}sample.samples[{i}].prompt": p
        for i, p in enumerate(values.get("sample.prompts", ()))
    }
    run = launcher(values) if "launch.num_processes" in values else ["python"]
    return {
        "train.yaml": yaml_text(
            {"job": "extension", "config.name": "lora", **inside, **prompts}, head
        ),
        "run.sh": shell_text(values, [*run, f"{TRAINER}/run.py", "train.yaml"], title="ai-toolkit"),
    }


TABLE = (MODELS, RULES, DEFAULTS, FIXED, DECIDED, UNLEARNED)
AI_TOOLKIT = Trainer(
    *("ai-toolkit", "ai-toolkit", "27a03a91", _detect, *TABLE, _files),
    root=ROOT,
    weights_keys=(WEIGHTS,),
    gathered=("sample.samples[].prompt",),
    notes=("AdamW adds 1e-6 to its denominators, autotune 1e-8",),
    overheads=overheads.AI_TOOLKIT,
)
