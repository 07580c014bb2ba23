"""musubi-tuner: a TOML file of options, one of data sets, and scripts that cache before it trains."""

import re
from collections.abc import Mapping

from autotune.trainers import kohya
from autotune.trainers.document import Document
from autotune.trainers.layers import Selects, by_pattern, layers_of, linear_layers
from autotune.trainers.rules import ANY, Context, Rule, Values, equal, settings, table, targets, whole
from autotune.trainers.texts import TRAINER, in_file, launcher, shell_text, toml_text
from autotune.trainers.trainer import FILL_IN, KnownModel, Trainer

MODULES = ("networks.lora_qwen_image", "networks.lora_kandinsky")
DEFAULT_PATTERNS: Mapping[str, tuple[str, str]] = {
    "qwen": (r".*(_mod_).*", ""),  # dotted names have no `_mod_`: it excludes nothing
    "kandinsky": (r".*modulation.*", r".*(self|cross)_attention\..*|.*feed_forward\..*"),
}


def _selects(values: Values, context: Context) -> Selects:
    """Excluded by any pattern and included by none is left out (networks/lora.py, `create_modules`)."""
    given = kohya.network_arguments(values)
    own = next(found for name, found in DEFAULT_PATTERNS.items() if context.family.name.startswith(name))
    excluded = [own[0], *given.get("exclude_patterns", ())]
    included = given.get("include_patterns", [own[1]])
    return lambda name: not _any(excluded, name) or _any(included, name)


def _any(patterns: list[str], name: str) -> bool:
    return any(by_pattern(str(pattern))(name) for pattern in patterns)


def _write_targets(ours: Values, context: Context) -> Values:
    blocks = linear_layers(context.family, in_blocks=True)
    wanted = layers_of(context.family, ours["targets"])
    names = sorted({re.escape(re.sub(r"^(\w+_blocks)\.0\.", "", name)) for name in wanted})
    exact = [rf".*\.{name}" for name in names if not any(re.fullmatch(rf".*\.{name}", b) for b in blocks - wanted)]
    included = "', r'".join(exact)
    return {"network_args": ["exclude_patterns=[r'.*']", f"include_patterns=[r'{included}']"]}


RULES = (
    *kohya.RULES,
    targets(["network_args"], _selects, _write_targets),
    Rule(
        ("datasets[].target_frames",),
        ("num_frames",),
        lambda values, _: {"num_frames": max(map(whole, values["datasets[].target_frames"]))},
        lambda ours, _: {"datasets[].target_frames": [ours["num_frames"]] if ours["num_frames"] > 1 else None},
    ),
    table(
        ["fp8_base", "fp8_scaled"],
        ["quantization"],
        [
            ((None, ANY), ("none",)),
            ((False, ANY), ("none",)),
            ((True, None), ("layerwise-fp8",)),
            ((True, False), ("layerwise-fp8",)),
            ((True, True), ("torchao-fp8",)),
        ],
        [((name,), (True, True)) for name in ("torchao-int8", "bnb-int8")],
    ),
    table(kohya.ATTENTION_FLAGS, ["attention"], kohya.ATTENTION, [((ANY,), (True, ANY, ANY, ANY))]),
    table(
        ["compile", "compile_mode", "compile_dynamic"],
        ["compile"],
        [((True, ANY, ANY), ("block",)), ((None, ANY, ANY), ("off",)), ((False, ANY, ANY), ("off",))],
    ),
    table(
        ["fp8_vl", "quantized_qwen"],
        ["caching.text_encoder_quantization"],
        [((None, None), ("none",)), ((True, ANY), ("torchao-fp8",)), ((ANY, True), ("bnb-nf4",))],
        [((ANY,), (True, ANY))],
    ),
    *equal(
        """
        data=datasets[].image_directory|datasets[].video_directory control=datasets[].control_directory
        """
    ),
)
DEFAULTS = settings(
    """
    network_dim=4 network_alpha=1 network_dropout=0.0 network_args=null general.resolution=[960,544]
    general.batch_size=1 gradient_accumulation_steps=1 max_train_steps=1600 learning_rate=2e-6
    lr_scheduler="constant" lr_warmup_steps=0 optimizer_type="AdamW" optimizer_args=["weight_decay=0.01"]
    max_grad_norm=1.0 timestep_sampling="sigma" discrete_flow_shift=1.0 weighting_scheme="none"
    gradient_checkpointing=false mixed_precision="no" fp8_base=false blocks_to_swap=0 compile=false
    """
)
FIXED = settings(
    """
    general.caption_extension=".txt" general.enable_bucket=true general.bucket_no_upscale=false
    datasets[].num_repeats=1 dataset_config="data.toml" output_dir="output" output_name="lora" save_precision="bf16"
    """
)
DECIDED = {**kohya.DECIDED, "it tunes kernels and compiling by itself": "cuda_* compile_* dynamo_* img_in_txt_in_*"}
UNLEARNED = {
    **kohya.UNLEARNED,
    "activations wait on the host; autotune recomputes them": "gradient_checkpointing_cpu_offload",
    "attention that has no backward, or that autotune does not offer": "sage_attn flash3",
    "clips are cut otherwise": "datasets[].frame_extraction=head datasets[].frame_s* datasets[].max_frames=129 "
    "datasets[].source_fps",
    "control images are resized otherwise": "datasets[].no_resize_control datasets[].control_resolution",
    "captions and images are listed in a file": "datasets[].image_jsonl_file datasets[].video_jsonl_file",
}
QWEN, KANDINSKY = "qwen_image", "kandinsky5"
QWEN_KEYS = {"network_module": "networks.lora_qwen_image"}
KANDINSKY_KEYS = {"network_module": "networks.lora_kandinsky"}
MODELS = (
    KnownModel("qwen-image", {**QWEN_KEYS, "model_version": "original"}),
    KnownModel("qwen-image-edit", {**QWEN_KEYS, "model_version": "edit"}),
    KnownModel("qwen-image-edit-plus", {**QWEN_KEYS, "model_version": "edit-2509"}),
    KnownModel("qwen-image-edit-plus", {**QWEN_KEYS, "model_version": "edit-2511"}),
    KnownModel("qwen-image-edit", {**QWEN_KEYS, "edit": True}),
    KnownModel("qwen-image-edit-plus", {**QWEN_KEYS, "edit_plus": True}),
    KnownModel("qwen-image", QWEN_KEYS),
    KnownModel("kandinsky5-image-lite", {**KANDINSKY_KEYS, "task": "k5-lite-t2i-hd"}),
    KnownModel("kandinsky5-video-lite", {**KANDINSKY_KEYS, "task": "k5-lite-t2v-5s-sd"}),
)


def _detect(document: Document) -> bool:
    script = str(document.value("script", ""))
    return kohya.names_module(document, *MODULES) or script in (
        f"{QWEN}_train_network.py",
        f"{KANDINSKY}_train_network.py",
    )


def _files(values: Values, head: str) -> Mapping[str, str]:
    family = QWEN if values["network_module"] == QWEN_KEYS["network_module"] else KANDINSKY
    encoders = ["text_encoder"] if family == QWEN else ["text_encoder_qwen", "text_encoder_clip"]
    weights = dict.fromkeys(("dit", "vae", *encoders), FILL_IN)
    caching = {name: values.get(name) for name in ("fp8_vl", "quantized_qwen")}
    data = {key: value for key, value in values.items() if kohya.kept(key)}
    name = str(data.get("datasets[].image_directory"))
    if "datasets[].target_frames" in data:
        data["datasets[].video_directory"] = data.pop("datasets[].image_directory")
    data["datasets[].cache_directory"] = f"{name.rstrip('/')}-cache"
    if values["blocks_to_swap"]:
        values = {**values, "block_swap_h2d_only": True, "block_swap_ring_size": 2}
    flags = {key: value for key, value in in_file(values).items() if value is not False}
    train = {key: value for key, value in flags.items() if not kohya.kept(key) and key not in caching}
    place = f"{TRAINER}/src/musubi_tuner/{family}"
    model = [word for word in ("--model_version", str(values.get("model_version"))) if "model_version" in values]
    encode = [f"{place}_cache_text_encoder_outputs.py", "--dataset_config", "data.toml"]
    encode += [word for encoder in encoders for word in (f"--{encoder}", FILL_IN)]
    encode += [f"--{flag}" for flag, value in caching.items() if value]
    run = launcher(values, "--num_cpu_threads_per_process", "1", "--mixed_precision", str(values["mixed_precision"]))
    return {
        "train.toml": toml_text({**weights, **train}, head),
        "data.toml": toml_text(data, ""),
        "run.sh": shell_text(
            values,
            ["python", f"{place}_cache_latents.py", "--dataset_config", "data.toml", "--vae", FILL_IN, *model],
            ["python", *encode, *model],
            [*run, f"{place}_train_network.py", "--config_file", "train.toml"],
            title="musubi-tuner",
        ),
    }


MUSUBI = Trainer(
    name="musubi",
    title="musubi-tuner",
    version="30c658c",
    detect=_detect,
    models=MODELS,
    rules=RULES,
    defaults=DEFAULTS,
    fixed=FIXED,
    decided=DECIDED,
    unlearned=UNLEARNED,
    files=_files,
    references={"dataset_config": "", "config_file": ""},
    sections_kept=("general.", "datasets["),
    notes=(
        "the adapter is trained in fp32, by autotune in bf16: memory and numbers differ a little",
        "fp8_scaled stores scales of its own, not torchao's by row",
    ),
)
