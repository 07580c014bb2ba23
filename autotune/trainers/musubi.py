"""musubi-tuner: a TOML file of options, one of data sets, and scripts that cache before it
trains.
"""

import re
from collections.abc import Mapping
from typing import Any

from autotune.families import Family
from autotune.trainers import blocks, kohya, overheads, rules
from autotune.trainers.document import Document
from autotune.trainers.meanings import meanings
from autotune.trainers.rules import Context, Rule, Values
from autotune.trainers.tables import table
from autotune.trainers.texts import TRAINER, in_file, launcher, shell_text, toml_text
from autotune.trainers.trainer import FILL_IN, KnownModel, Trainer

MODULE = "networks.lora_"
SCRIPTS: Mapping[str, tuple[str, str, str]] = {
    "qwen_image": ("qwen_image", "text_encoder", "fp8_vl"),
    "kandinsky": ("kandinsky5", "text_encoder_qwen text_encoder_clip", "quantized_qwen"),
    "zimage": ("zimage", "text_encoder", "fp8_llm"),
    "krea2": ("krea2", "text_encoder", ""),
    "flux_2": ("flux_2", "text_encoder", "fp8_text_encoder"),
    "wan": ("wan", "t5", "fp8_t5"),
}
"""By the end of `network_module`: how its scripts' names begin, the options for text encoders,
and that which stores them in 8 bits, or 4 for Kandinsky."""
OTHERS = ("framepack", "hv_1_5", "ideogram4", "hidream_o1")
FAMILIES_OF = {
    "qwen": "qwen_image",
    "kandinsky": "kandinsky",
    "z-": "zimage",
    "krea": "krea2",
    "flux2": "flux_2",
}
DEFAULT_PATTERNS: Mapping[str, tuple[str, str]] = {
    "qwen_image": (r".*(_mod_).*", ""),  # dotted names have no `_mod_`: it excludes nothing
    "kandinsky": (r".*modulation.*", r".*(self|cross)_attention\..*|.*feed_forward\..*"),
    "zimage": (r".*(_modulation|_refiner).*", ""),
    "krea2": ("", ""),
    "flux_2": (r".*(norm|img_mod\.lin|txt_mod\.lin|modulation\.lin).*", ""),
    "wan": (r".*(patch_embedding|text_embedding|time_embedding|time_projection|norm|head).*", ""),
}
"""What is excluded, and included again, unless the file says otherwise."""
SWAP_LIMITS = {"z-image": 28, "krea-2": 26, "flux2-klein": 13, "qwen-image": 59}
STORED = tuple(dict.fromkeys(flag for _, _, flag in SCRIPTS.values() if flag))


def _kind(family: Family) -> str:
    return next((kind for name, kind in FAMILIES_OF.items() if family.name.startswith(name)), "wan")


def _stored(values: Values, context: Context) -> Values:
    on = [flag for flag in STORED if values.get(flag)]
    formats = ["bnb-nf4" if flag == "quantized_qwen" else "torchao-fp8" for flag in on]
    return {"caching.text_encoder_quantization": formats[0] if on else "none"}


def _write_stored(ours: Values, context: Context) -> Values:
    flag = SCRIPTS[_kind(context.family)][2]
    return {flag: True} if flag and ours["caching.text_encoder_quantization"] != "none" else {}


RULES = (
    *kohya.RULES,
    kohya.NOISE,
    kohya.patterns(lambda family: DEFAULT_PATTERNS[_kind(family)], everywhere=("krea-2",)),
    blocks.swapping("blocks_to_swap", SWAP_LIMITS),
    Rule(
        ("datasets[].target_frames",),
        ("num_frames",),
        lambda values, _: {"num_frames": max(map(rules.whole, values["datasets[].target_frames"]))},
        lambda ours, _: {
            "datasets[].target_frames": [ours["num_frames"]] if ours["num_frames"] > 1 else None
        },
    ),
    table(
        "fp8_base fp8_scaled",
        "quantization",
        """
        null *     | none
        false *    | none
        true true  | torchao-fp8
        true *     | torchao-fp8 | its float8 without scales; the nearest is torchao-fp8
        """,
        "torchao-int8 | true true",
    ),
    table(
        "sdpa flash_attn xformers split_attn",
        "attention",
        """
        true * * *     | native
        * true * true  | flash
        * * true true  | xformers
        * true * *     | flash
        * * true *     | xformers
        null null null * | native
        """,
        "* | true * * *",
    ),
    table(
        "compile compile_mode compile_dynamic",
        "compile",
        "true * * | block\n null * * | off\n false * * | off",
    ),
    Rule(STORED, ("caching.text_encoder_quantization",), _stored, _write_stored),
    *rules.equal(
        "data=datasets[].image_directory|datasets[].video_directory "
        "control=datasets[].control_directory"
    ),
)
DEFAULTS = rules.settings(
    """
    network_dim=4 network_alpha=1 network_dropout=0.0 network_args=null general.resolution=[960,544]
    general.batch_size=1 gradient_accumulation_steps=1 max_train_steps=1600 learning_rate=2e-6
    lr_scheduler="constant" lr_warmup_steps=0 optimizer_type="AdamW" optimizer_args=["weight_decay=0.01"]
    max_grad_norm=1.0 timestep_sampling="sigma" discrete_flow_shift=1.0 weighting_scheme="none"
    gradient_checkpointing=false mixed_precision="no" fp8_base=false blocks_to_swap=0 compile=false
    """
)
FIXED = rules.settings(
    """
    general.caption_extension=".txt" general.enable_bucket=true general.bucket_no_upscale=false
    datasets[].num_repeats=1 dataset_config="data.toml" output_dir="output" output_name="lora" save_precision="bf16"
    """
)
DECIDED = {
    **kohya.DECIDED,
    "it tunes kernels and compiling by itself": "cuda_* compile_* dynamo_* img_in_txt_in_*",
}
UNLEARNED = {
    **kohya.UNLEARNED,
    **meanings(
        """
        host: gradient_checkpointing_cpu_offload
        attention: sage_attn flash3
        clips: datasets[].frame_extraction=head datasets[].frame_s* datasets[].max_frames=129 datasets[].source_fps
        control images are resized otherwise: datasets[].no_resize_control datasets[].control_resolution
        captions and images are listed in a file: datasets[].image_jsonl_file datasets[].video_jsonl_file
        """
    ),
}
VERSIONS = """
    qwen-image=qwen_image:model_version:original qwen-image-edit=qwen_image:model_version:edit
    qwen-image-edit-plus=qwen_image:model_version:edit-2509 qwen-image-edit-2511=qwen_image:model_version:edit-2511
    qwen-image=qwen_image:model_version: kandinsky5-image-lite=kandinsky:task:k5-lite-t2i-hd
    kandinsky5-video-lite=kandinsky:task:k5-lite-t2v-5s-sd z-image=zimage:task: krea-2=krea2:task:
    flux2-klein=flux_2:model_version:klein-base-4b flux2-klein-9b=flux_2:model_version:klein-base-9b
    flux2-klein-4b-distilled=flux_2:model_version:klein-4b flux2-klein-9b-distilled=flux_2:model_version:klein-9b
    wan-2.1=wan:task:t2v-1.3B wan-2.1-14b=wan:task:t2v-14B wan-2.1-14b=wan:task:
"""
"""Models by the end of `network_module`, and another key with its value, or without it."""
FUSED = "queries, keys and values of a stream are one layer there, with one adapter"
MODELS = (
    *(
        KnownModel(
            name,
            {"network_module": MODULE + kind, key: value or None},
            note=FUSED if kind == "flux_2" else "",
        )
        for name, kind, key, value in (re.split("[=:]", word) for word in VERSIONS.split())
    ),
    KnownModel("qwen-image-edit", {"network_module": f"{MODULE}qwen_image", "edit": True}),
    KnownModel(
        "qwen-image-edit-plus", {"network_module": f"{MODULE}qwen_image", "edit_plus": True}
    ),
)


def _detect(document: Document) -> bool:
    known = {MODULE + kind for kind in (*SCRIPTS, *OTHERS)}
    scripts = {f"{name}_train_network.py" for name, _, _ in SCRIPTS.values()}
    return not known.isdisjoint(kohya.modules_of(document)) or document.value("script") in scripts


def _files(values: Values, head: str) -> Mapping[str, str]:
    name, encoders, flag = SCRIPTS[values["network_module"].removeprefix(MODULE)]
    weights = dict.fromkeys(("dit", "vae", *encoders.split()), FILL_IN)
    data: dict[str, Any] = {key: value for key, value in values.items() if kohya.kept(key)}
    folder = str(data.get("datasets[].image_directory"))
    if "datasets[].target_frames" in data:
        data["datasets[].video_directory"] = data.pop("datasets[].image_directory")
    data["datasets[].cache_directory"] = f"{folder.rstrip('/')}-cache"
    if values["blocks_to_swap"]:
        values = {**values, "block_swap_h2d_only": True, "block_swap_ring_size": 2}
    flags = {key: value for key, value in in_file(values).items() if value is not False}
    train = {
        key: value for key, value in flags.items() if not kohya.kept(key) and key not in STORED
    }
    place = f"{TRAINER}/src/musubi_tuner/{name}"
    version = values.get("model_version")
    model = ["--model_version", version] if version else []
    encode = [f"{place}_cache_text_encoder_outputs.py", "--dataset_config", "data.toml"]
    encode += [word for encoder in encoders.split() for word in (f"--{encoder}", FILL_IN)]
    encode += [f"--{flag}"] * bool(values.get(flag))
    run = launcher(
        values,
        "--num_cpu_threads_per_process",
        "1",
        "--mixed_precision",
        str(values["mixed_precision"]),
    )
    return {
        "train.toml": toml_text({**weights, **train}, head),
        "data.toml": toml_text(data, ""),
        "run.sh": shell_text(
            values,
            [
                "python",
                f"{place}_cache_latents.py",
                "--dataset_config",
                "data.toml",
                "--vae",
                FILL_IN,
                *model,
            ],
            ["python", *encode, *model],
            [*run, f"{place}_train_network.py", "--config_file", "train.toml"],
            title="musubi-tuner",
        ),
    }


MUSUBI = Trainer(
    *(
        "musubi",
        "musubi-tuner",
        "30c658c",
        _detect,
        MODELS,
        RULES,
        DEFAULTS,
        FIXED,
        DECIDED,
        UNLEARNED,
        _files,
    ),
    references={"dataset_config": "", "config_file": ""},
    sections_kept=("general.", "datasets["),
    notes=("fp8_scaled stores scales of its own, not torchao's by row",),
    overheads=overheads.MUSUBI,
)
