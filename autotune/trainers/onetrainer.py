"""OneTrainer: one JSON file, with the folders of images in it or in another."""

from collections.abc import Mapping

from autotune.trainers import blocks, overheads, rules
from autotune.trainers.document import Document
from autotune.trainers.layers import (
    Selects,
    convolutions,
    in_any_block,
    layers_of,
    linear_layers,
    short_names,
)
from autotune.trainers.meanings import meanings
from autotune.trainers.parts import by_filter
from autotune.trainers.rules import LOST, Context, Rule, Values
from autotune.trainers.tables import ALLOCATOR, choice, precision, table
from autotune.trainers.texts import TRAINER, in_file, json_text, nest, shell_text
from autotune.trainers.trainer import KnownModel, Trainer


def _selects(values: Values, context: Context) -> Selects:
    return by_filter(
        str(values.get("layer_filter") or ""), is_pattern=bool(values.get("layer_filter_regex"))
    )


def _write_targets(ours: Values, context: Context) -> Values:
    family, wanted = context.family, layers_of(context.family, ours["targets"])
    parts = ",".join(short_names(family, ours["targets"]))
    found = set(
        filter(by_filter(parts, is_pattern=False), linear_layers(family) | convolutions(family))
    )
    patterns = ",".join(f"^{in_any_block(layer)}$" for layer in sorted(wanted))
    chosen = parts if found == wanted else patterns
    return {
        "layer_filter": chosen,
        "layer_filter_regex": chosen == patterns,
        "layer_filter_preset": "custom",
    }


def _noise(values: Values, context: Context) -> Values:
    kind = str(values["timestep_distribution"]).lower()
    shift = (
        "by_resolution"
        if values.get("dynamic_timestep_shifting")
        else rules.number(values["timestep_shift"])
    )
    if kind not in ("logit_normal", "uniform"):
        return {
            "timestep_shift": shift,
            LOST: "autotune cannot draw noise levels so; it takes its usual density",
        }
    odd = any(values.get(name) for name in ("noising_weight", "noising_bias"))
    lost = {LOST: "autotune draws from the standard normal"} if odd else {}
    return {"timestep_sampling": kind, "timestep_shift": shift, **lost}


def _write_noise(ours: Values, context: Context) -> Values:
    by_resolution = ours["timestep_shift"] == "by_resolution"
    shift = {"timestep_shift": 1.0 if by_resolution else ours["timestep_shift"]}
    kind = ours["timestep_sampling"].upper()
    return {"timestep_distribution": kind, "dynamic_timestep_shifting": by_resolution, **shift}


TEXT_ENCODERS = tuple(f"text_encoder{number}.train" for number in ("", "_2", "_3"))
RULES = (
    rules.targets(
        ["layer_filter", "layer_filter_regex"], _selects, _write_targets, in_blocks=False
    ),
    rules.batch(["batch_size"], "gradient_accumulation_steps", "launch.num_processes"),
    rules.epochs_only("epochs"),
    rules.schedule(
        "learning_rate_scheduler",
        "learning_rate_warmup_steps",
        "CONSTANT=constant LINEAR=linear COSINE=cosine",
    ),
    choice(
        "optimizer.optimizer",
        "optimizer",
        {"ADAMW": "adamw"},
        instead="trains with AdamW in full precision",
    ),
    Rule(
        (
            "timestep_distribution",
            "timestep_shift",
            "dynamic_timestep_shifting",
            "noising_weight",
            "noising_bias",
        ),
        ("timestep_sampling", "timestep_shift"),
        _noise,
        _write_noise,
    ),
    table(
        "loss_weight_fn loss_weight_strength",
        "weighting_scheme",
        "CONSTANT * | none\n MIN_SNR_GAMMA 5.0 | min_snr\n MIN_SNR_GAMMA * | min_snr | autotune's "
        "limit is 5",
        "* | CONSTANT *",
        instead="has no such weights of the loss",
    ),
    *(rules.required(key, False, "text encoders are trained, too") for key in TEXT_ENCODERS),
    precision("train_dtype", bf16="BFLOAT_16", fp32="FLOAT_32 TFLOAT_32", fp16="FLOAT_16"),
    blocks.checkpointing(
        "transformer.gradient_checkpointing", {"ON": True, "CPU_OFFLOADED": True, "OFF": False}
    ),
    table(
        "transformer.weight_dtype",
        "quantization",
        """
        BFLOAT_16    | none
        FLOAT_32     | none
        FLOAT_16     | none | its weights are in fp16, whatever it trains in
        NFLOAT_4     | bnb-nf4
        INT_8        | torchao-int8
        FLOAT_8      | torchao-fp8
        INT_W8A8*    | torchao-int8 | its products are in 8 bits both ways; the nearest is torchao-int8
        FLOAT_W8A8*  | torchao-fp8 | its products are in 8 bits; the nearest is torchao-fp8
        """,
        instead="has no such weight format",
    ),
    blocks.share_of_blocks("transformer.offload_fraction"),
    table(
        "attention_mechanism",
        "attention",
        "SDP | native\n FLASH | flash\n CUDNN | _native_cudnn\n FLEX | flex",
        "* | -",
    ),
    table("compile", "compile", "true | block\n false | off"),
    ALLOCATOR,
    *rules.equal(
        """
        data_workers=dataloader_threads rank=lora_rank lora_alpha=lora_alpha lora_dropout=dropout_probability
        data=concepts[].path resolution=resolution num_frames=frames learning_rate=learning_rate
        weight_decay=optimizer.weight_decay max_grad_norm=clip_grad_norm guidance_scale=transformer.guidance_scale
        """
    ),
)
DEFAULTS = rules.settings(
    """
    lora_rank=16 lora_alpha=1.0 dropout_probability=0.0 layer_filter="" resolution="512" batch_size=1
    gradient_accumulation_steps=1 epochs=100 learning_rate=3e-6 learning_rate_scheduler="CONSTANT"
    learning_rate_warmup_steps=200 optimizer.optimizer="ADAMW" optimizer.weight_decay=0.01 clip_grad_norm=1.0
    timestep_distribution="UNIFORM" timestep_shift=1.0 dynamic_timestep_shifting=false train_dtype="FLOAT_16"
    loss_weight_fn="CONSTANT" loss_weight_strength=5.0 text_encoder.train=true text_encoder_2.train=true
    text_encoder_3.train=true
    transformer.gradient_checkpointing=true transformer.weight_dtype="FLOAT_32" transformer.offload_fraction=0.0
    attention_mechanism="SDP" compile=false
    """
)
FIXED = rules.settings(
    """
    __version=11 training_method="LORA" peft_type="LORA" lora_decompose=false transformer.train=true
    aspect_ratio_bucketing=true latent_caching=true ema="OFF" output_dtype="BFLOAT_16"
    output_model_format="DIFFUSERS_LORA" output_model_destination="output/lora.safetensors" masked_training=false
    concepts[].name="data" concepts[].type="STANDARD" concepts[].text.prompt_source="sample"
    concepts[].image.enable_crop_jitter=false concepts[].image.enable_random_flip=false
    """
)
DECIDED = meanings(
    """
    cached: latent_caching clear_cache_before_training cache_dir only_cache text_encoder*.weight_dtype vae.weight_dtype
    buckets: aspect_ratio_bucketing
    named: __version workspace_dir debug_* tensorboard* output_* backup_* rolling_* save_* samples* sample_*
        concept_file_name continue_last_backup prevent_overwrites include_train_config secrets* cloud* concepts[].name
        concepts[].type concepts[].seed *.uuid validation validate_* concepts[].concept_stats* concepts[].enabled
        launch.* offline_mode huggingface_*
    device: train_device temp_device async_offloading *.activation_offloading quantization.* weight_dtype
        enable_autocast_cache fallback_train_dtype lora_weight_dtype
    it is for other models or other adapters: unet.* prior.* effnet_encoder.* decoder* oft_* lokr_* embedding*
        additional_embeddings bundle_additional_embeddings force_circular_padding vb_loss_strength text_encoder_*.*
        text_encoder.* vae.* transformer.include transformer.train transformer.model_name unconditional_transformer.*
        optimizer_defaults* *.stop_training_after_unit optimizer.beta* optimizer.eps optimizer.fused* optimizer.foreach
    the name of a choice of layers: layer_filter_preset
    """
)
UNLEARNED = meanings(
    """
    every weight is trained, or an embedding, not an adapter: training_method=LORA
    adapter: peft_type=LORA lora_decompose
    average: ema=OFF ema_*
    loss: mse_strength=1.0 mae_strength log_cosh_strength huber_strength loss_scaler=NONE huber_delta=1.0
    masks: masked_training unmasked_* normalize_masked_area_loss masked_prior_*
    noise: offset_noise_weight generalized_offset_noise perturbation_noise_weight min_noising_strength
        max_noising_strength=1.0 rescale_noise_scheduler_to_zero_terminal_snr
    v: force_v_prediction force_epsilon_prediction
    rate: learning_rate_scaler=NONE learning_rate_cycles=1.0 learning_rate_min_factor transformer.learning_rate
        text_encoder_learning_rate custom_learning_rate_scheduler scheduler_params
    weights are rounded at random: optimizer.stochastic_rounding
    it changes the optimizer: optimizer.*
    weights are corrected by a low rank: quantization.svd_dtype=NONE quantization.svd_rank=16
    several processes train together in a way of its own: multi_gpu device_indexes gradient_reduce_*
    another adapter is loaded first: lora_model_name
    augmented: concepts[].image.enable_* concepts[].image_variations=1
    captions: concepts[].text.enable_* concepts[].text.tag_dropout_enable concepts[].text.caps_randomize_enable
        concepts[].text.prompt_source=sample concepts[].text_variations=1
    a folder counts otherwise: concepts[].balancing=1.0 concepts[].loss_weight=1.0 transformer.dropout_probability
    """
)
SD35, WEIGHTS = {"model_type": "STABLE_DIFFUSION_35"}, "base_model_name"
MODELS = (
    KnownModel("qwen-image", {"model_type": "QWEN"}, lacks=TEXT_ENCODERS[1:]),
    KnownModel("flux1-dev", {"model_type": "FLUX_DEV_1"}, lacks=TEXT_ENCODERS[2:]),
    KnownModel("sd3.5", SD35, assumes="of the SD 3 models 3.5 large"),
    KnownModel("sd3.5-medium", {**SD35, WEIGHTS: "stabilityai/stable-diffusion-3.5-medium"}),
    KnownModel(
        "flux2-klein",
        {"model_type": "FLUX_2"},
        lacks=TEXT_ENCODERS,
        assumes="of the [klein] models",
    ),
    KnownModel("krea-2", {"model_type": "KREA_2"}, lacks=TEXT_ENCODERS),
    KnownModel("z-image", {"model_type": "Z_IMAGE"}, lacks=TEXT_ENCODERS),
    KnownModel(
        "sdxl",
        {"model_type": "STABLE_DIFFUSION_XL_10_BASE"},
        lacks=("transformer.offload_fraction", "frames", *TEXT_ENCODERS[2:]),
        part=("unet.", "transformer."),
    ),
)


def _detect(document: Document) -> bool:
    return all(
        document.format == "json" and document.value(key)
        for key in ("model_type", "training_method")
    )


def _files(values: Values, head: str) -> Mapping[str, str]:
    values = {
        **values,
        **{key: str(values[key]) for key in ("resolution", "frames") if key in values},
    }
    run = ["python", f"{TRAINER}/scripts/train.py", "--config-path", "config.json"]
    script = shell_text(values, run, head=head, title="OneTrainer")
    return {"config.json": json_text(nest(in_file(values))), "run.sh": script}


TABLE = (MODELS, RULES, DEFAULTS, FIXED, DECIDED, UNLEARNED)
ONETRAINER = Trainer(
    *("onetrainer", "OneTrainer", "23df3832", _detect, *TABLE, _files),
    weights_keys=(WEIGHTS,),
    aliases={  # until version 10
        "gradient_checkpointing": "transformer.gradient_checkpointing",
        "layer_offload_fraction": "transformer.offload_fraction",
    },
    overheads=overheads.ONETRAINER,
)
