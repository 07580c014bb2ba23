"""Kohya's sd-scripts, and the JSON of its GUI: options in TOML or JSON, data sets in another
TOML.
"""

from collections.abc import Mapping
from typing import Any

from autotune.trainers import blocks, kohya, overheads, rules
from autotune.trainers.document import Document
from autotune.trainers.layers import Selects, in_block, layers_of, linear_layers
from autotune.trainers.meanings import meanings
from autotune.trainers.rules import LOST, CannotExpress, Context, Rule, Values
from autotune.trainers.tables import choice, table
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
"""Ranks of parts in `network_args`, and the layers that each is for; 0 adapts none of them. In
single blocks query, key, value and the first half of the MLP are one layer there."""
CONVOLUTIONS = ("conv_dim", "conv_alpha")


def _selects(values: Values, context: Context) -> Selects:
    given = kohya.network_arguments(values)
    if rules.is_discrete(context):
        return lambda layer: (
            ".attentions." in layer
            or (bool(given.get("conv_dim")) and (".resnets." in layer or "samplers." in layer))
        )
    off = {name for name, dim in given.items() if name in PARTS and dim == 0}

    def selects(layer: str) -> bool:
        single = layer.startswith("single_")
        name = in_block(layer)
        return name != layer and any(
            name in PARTS[part]
            for part in PARTS.keys() - off
            if part.startswith("single_") == single
        )

    return selects


def _write_targets(ours: Values, context: Context) -> Values:
    family, targets = context.family, ours["targets"]
    if rules.is_discrete(context):
        own = {layer for layer in linear_layers(family) if ".attentions." in layer}
        if layers_of(family, targets) != own:
            raise CannotExpress(
                "it adapts all layers of the UNet's transformers; use --targets attention+mlp+proj"
            )
        return {"network_args": None}
    if targets == "attention":
        raise CannotExpress(
            "in its single blocks attention and MLP are one layer; use --targets attention+mlp"
        )
    off = (
        ["img_mod_dim=0", "txt_mod_dim=0", "single_mod_dim=0"] if targets == "attention+mlp" else []
    )
    return {"network_args": off or None}


def _text_encoders(values: Values, context: Context) -> Values:
    given = values.get("text_encoder_lr")
    rates = given if isinstance(given, list) else [] if given in (None, "") else [given]
    still = values.get("network_train_unet_only") is True or (
        rates and not any(map(rules.number, rates))
    )
    return (
        {}
        if still
        else {LOST: "text encoders are trained, too; autotune trains the denoiser alone"}
    )


def _write_dropout(ours: Values, context: Context) -> Values:
    """Captions that are sometimes dropped cannot be cached there."""
    share, cached = (
        ours["caption_dropout"],
        ("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"),
    )
    return {DROPOUT[0]: share, **(dict.fromkeys(cached) if share else {})}


DROPOUT = (
    "datasets[].subsets[].caption_dropout_rate",
    "general.caption_dropout_rate",
    "caption_dropout_rate",
)
RULES = (
    *kohya.RULES,
    rules.by_noise(kohya.NOISE, rules.min_snr("min_snr_gamma")),
    kohya.network_targets((*PARTS, *CONVOLUTIONS), _selects, _write_targets),
    Rule(
        ("network_train_unet_only", "text_encoder_lr"),
        (),
        _text_encoders,
        lambda ours, context: {"network_train_unet_only": True},
    ),
    Rule(
        DROPOUT,
        ("caption_dropout",),
        lambda values, _: {
            "caption_dropout": rules.number(next(values[key] for key in DROPOUT if key in values))
        },
        _write_dropout,
        synonyms=DROPOUT,
    ),
    blocks.swapping("blocks_to_swap", {"flux1-dev": 34}),
    table(
        "fp8_base fp8_base_unet",
        "quantization",
        "true * | torchao-fp8\n * true | torchao-fp8\n * * | none",
        "torchao-int8 | true *",
    ),
    table(
        "sdpa xformers",
        "attention",
        "true * | native\n * true | xformers\n * sdpa | native\n * xformers | xformers",
        "* | true *",
    ),
    choice(
        "torch_compile",
        "compile",
        {False: "off"},
        instead="compiles each block, not the whole model",
    ),
    *rules.equal(
        "data=datasets[].subsets[].image_dir|train_data_dir guidance_scale=guidance_scale"
    ),
    *rules.equal("flip=datasets[].subsets[].flip_aug|general.flip_aug|flip_aug"),
)
DEFAULTS = rules.settings(
    """
    network_dim=4 network_alpha=1 network_dropout=0.0 network_args=null general.resolution=[512,512]
    general.batch_size=1 gradient_accumulation_steps=1 max_train_steps=1600 learning_rate=2e-6
    lr_scheduler="constant" lr_warmup_steps=0 optimizer_type="AdamW" optimizer_args=["weight_decay=0.01"]
    max_grad_norm=1.0 timestep_sampling="sigma" discrete_flow_shift=3.0 gradient_checkpointing=false
    mixed_precision="no" fp8_base=false blocks_to_swap=0 guidance_scale=3.5 torch_compile=false
    datasets[].subsets[].caption_dropout_rate=0.0 network_train_unet_only=false
    """
)
FIXED = rules.settings(
    """
    general.caption_extension=".txt" general.enable_bucket=true general.bucket_no_upscale=false
    datasets[].subsets[].num_repeats=1 dataset_config="data.toml" output_dir="output" output_name="lora"
    model_prediction_type="raw" cache_latents=true cache_latents_to_disk=true cache_text_encoder_outputs=true
    cache_text_encoder_outputs_to_disk=true save_precision="bf16"
    """
)
DECIDED = {
    **kohya.DECIDED,
    **meanings(
        """
        family: save_model_as v2 sdxl sdxl_* apply_t5_attn_mask t5xxl_max_token_length max_token_length clip_skip
            dynamo_backend lowram highvram no_half_vae flux1_checkbox mem_eff_attn model_type
        """
    ),
}
UNLEARNED = {
    **kohya.UNLEARNED,
    **meanings(
        """
        adapter: LoRA_type=flux1 LoRA_type=standard
        loss: model_prediction_type=raw loss_type=l2 debiased_estimation_loss masked_loss alpha_mask
            prior_loss_weight=1.0 scale_v_pred_loss_like_noise_pred v_pred_like_loss
        host: cpu_offload_checkpointing
        states: use_8bit_adam
        encoders: train_t5xxl
        v: v_parameterization zero_terminal_snr
        augmented: *.color_aug *.random_crop *.face_crop_aug_range color_aug random_crop
        captions: *.shuffle_caption *.keep_tokens *.caption_tag_dropout_rate shuffle_caption keep_tokens
            *.caption_prefix *.caption_suffix *.caption_dropout_every_n_epochs *.class_tokens weighted_captions
        class: *.is_reg reg_data_dir
        validation: *.validation_split validation_split validate_* max_validation_steps
        """
    ),
}
FLUX, XL = "flux_train_network.py", "sdxl_train_network.py"
FLOW = (
    "timestep_sampling",
    "discrete_flow_shift",
    "sigmoid_scale",
    "weighting_scheme",
    "guidance_scale",
)
SDXL: Mapping[str, Any] = {
    "defaults": {"min_snr_gamma": None},
    "lacks": (*FLOW, "model_prediction_type", "blocks_to_swap"),
    "note": "it tells the model each image's own size and crop, autotune the size that it trains "
    "at; if the model "
    "predicts v, add v_parameterization = true",
}
MODULES = {"networks.lora_flux": FLUX, "networks.lora": XL}
ASSUMED = f"by {XL}: the file does not name its script"
MODELS = (
    *(
        KnownModel("flux1-dev", keys)
        for keys in ({"network_module": "networks.lora_flux"}, {"LoRA_type": "Flux1"})
    ),
    KnownModel("flux1-dev", {"script": FLUX}),
    KnownModel(
        "sdxl", {"network_module": "networks.lora", "script": None}, assumes=ASSUMED, **SDXL
    ),
    KnownModel("sdxl", {"network_module": "networks.lora", "script": XL}, **SDXL),
    KnownModel("sdxl", {"LoRA_type": "Standard", "sdxl": True}, **SDXL),
)


def _detect(document: Document) -> bool:
    is_gui = document.value("LoRA_type") is not None and document.has(
        "pretrained_model_name_or_path"
    )
    has_module = any(module.startswith("networks.") for module in kohya.modules_of(document))
    return is_gui or has_module or document.value("script") in (FLUX, XL)


def _files(values: Values, head: str) -> Mapping[str, str]:
    script = MODULES[values["network_module"]]
    files = ("pretrained_model_name_or_path", "clip_l", "t5xxl", "ae") if script == FLUX else ()
    flags = {
        key: value
        for key, value in in_file(values).items()
        if value is not False and key not in files
    }
    train = {
        **dict.fromkeys(files, FILL_IN),
        **{key: value for key, value in flags.items() if not kohya.kept(key)},
    }
    run = launcher(
        values,
        "--num_cpu_threads_per_process",
        "1",
        "--mixed_precision",
        str(values["mixed_precision"]),
    )
    return {
        "train.toml": toml_text(train, head),
        "data.toml": toml_text(
            {key: value for key, value in values.items() if kohya.kept(key)}, ""
        ),
        "run.sh": shell_text(
            values, [*run, f"{TRAINER}/{script}", "--config_file", "train.toml"], title="sd-scripts"
        ),
    }


SD_SCRIPTS = Trainer(
    *(
        "sd-scripts",
        "sd-scripts",
        "48d368fa",
        _detect,
        MODELS,
        RULES,
        DEFAULTS,
        FIXED,
        DECIDED,
        UNLEARNED,
        _files,
    ),
    weights_keys=("pretrained_model_name_or_path",),
    references={"dataset_config": "", "config_file": ""},
    sections_kept=("general.", "datasets["),
    aliases={
        "optimizer": "optimizer_type",
        "max_resolution": "resolution",
        "epoch": "max_train_epochs",
    },
    overheads=overheads.SD_SCRIPTS,
)
