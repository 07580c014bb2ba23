"""What each trainer takes of a device otherwise than autotune's executor: read in its source, where
it is written.

Parts of the pipeline that it keeps, the precision of its adapter, what its AdamW keeps and needs,
and how it stores and multiplies by frozen layers. Commits are those of the tables. Nothing here was
measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.schema import AdapterPractice, KeptPart, Overheads, ProductPractice

Practices = tuple[tuple[str, AdapterPractice], ...]


@dataclass(frozen=True)
class OverheadTable:
    """The facts about one trainer. A condition is empty, or `if KEY` or `unless KEY` by the
    trainer's keys, of which several may stand with bars between; `KEY=VALUE` asks for a value."""

    source: str
    """Where in the trainer they were read: files and lines."""
    adapters: Practices
    """With the condition of each: the first that holds counts."""
    by_format: Mapping[str, AdapterPractice] = field(default_factory=dict)
    """What differs by the weight format of the adapted layers."""
    products: Mapping[str, ProductPractice] = field(default_factory=dict)
    """By the weight format of frozen layers."""
    kept: str = ""
    """A part in a line: `phase | part | precision | condition`, as fields of `KeptPart`."""

    def resolve(
        self, program: str, version: str, written: Mapping[str, Any], kept: str = ""
    ) -> Overheads:
        """What holds for settings.

        Args:
            program: the trainer's name.
            version: its commit.
            written: the settings by the trainer's keys, with its defaults.
            kept: lines for the model alone, as `kept`.
        """
        found: dict[tuple[str, str], KeptPart] = {}
        for line in filter(str.strip, (self.kept + "\n" + kept).splitlines()):
            phase, part, precision, condition = (word.strip() for word in line.split("|", 3))
            if _holds(condition, written) and (precision == "fp32" or (phase, part) not in found):
                found[phase, part] = KeptPart.model_validate(
                    {"phase": phase, "part": part, "precision": precision}
                )
        return Overheads(
            program=program,
            version=version,
            source=self.source,
            adapter=next(
                practice for condition, practice in self.adapters if _holds(condition, written)
            ),
            adapter_by_format=dict(self.by_format),
            products=dict(self.products),
            kept=tuple(found.values()),
        )


def _holds(condition: str, written: Mapping[str, Any]) -> bool:
    word, _, keys = condition.partition(" ")
    return not word or any(_is_on(key, written) for key in keys.split("|")) == (word == "if")


def _is_on(key: str, written: Mapping[str, Any]) -> bool:
    name, _, value = key.partition("=")
    own = written.get(name)
    return str(own).lower() == value.lower() if value else bool(own)


IN_BF16 = AdapterPractice(precision="bf16", autocasts=True, optimizer_bytes=4, step_bytes=2)
"""Of programs that accelerate or they themselves put under autocast: all of these but
ai-toolkit. torch's AdamW keeps moments in the precision of parameters; its usual implementation
takes square roots of all of them at once (torch/optim/adamw.py)."""
IN_FP32 = AdapterPractice(precision="fp32", optimizer_bytes=8, step_bytes=4)
AUTOCAST = AdapterPractice(precision="fp32", autocasts=True, optimizer_bytes=8, step_bytes=4)
EIGHT_BITS = {"optimizer_bytes": 2, "step_bytes": 0}
"""bitsandbytes' moments of matrices with 4,096 entries or more."""
ON_INTEGERS = {"bnb-nf4": AUTOCAST}
"""peft gives an adapter the precision of the weights that it adapts, unless those are integers."""
KEEPS_WEIGHTS = ProductPractice(keeps="weights")
"""A weight is converted outside of a function with a backward pass of its own, by a layer or by
autocast.
"""
OF_ALL_LAYERS = KEEPS_WEIGHTS.changed(everywhere=True)

AI_TOOLKIT = OverheadTable(
    "jobs/process/BaseSDTrainProcess.py 1983, toolkit/network_mixins.py 288-291, "
    "toolkit/sd_device_states_presets.py, "
    "extensions_built_in/sd_trainer/SDTrainer.py 312-318, 351-384, toolkit/util/quantize.py 42-49, "
    "424-476, and "
    "load_model of the models",
    (("if train.optimizer=adamw8bit", IN_FP32.changed(**EIGHT_BITS)), ("", IN_FP32)),
    # torchao's weight-only formats, of blocks and then of the rest
    products=dict.fromkeys(("torchao-int8", "torchao-fp8"), OF_ALL_LAYERS),
    kept="""
    load  | text_encoders | bf16 | unless model.low_vram
    train | text_encoders | bf16 | unless train.cache_text_embeddings|train.unload_text_encoder
    train | vae           | bf16 | unless datasets[].cache_latents_to_disk|datasets[].cache_latents
    """,
)
MUSUBI = OverheadTable(
    "src/musubi_tuner/training/trainer_base.py 1319-1320, 1475, 1681-1696, "
    "modules/fp8_optimization_utils.py 416-437; "
    "encoders run in programs of their own",
    (("if optimizer_type=AdamW8bit", AUTOCAST.changed(**EIGHT_BITS)), ("", AUTOCAST)),
    products={"torchao-fp8": KEEPS_WEIGHTS},
)
SIMPLETUNER = OverheadTable(
    "simpletuner/helpers/training/trainer.py 1946-1972, 2930-2944, 4642-4651, 5505-5515, "
    "models/common.py 1117, "
    "quantisation/__init__.py 654-739, torchao_workarounds.py 9-32",
    # its own AdamW keeps what rounding lost beside the moments
    (("if optimizer=adamw_bf16", IN_BF16.changed(optimizer_bytes=6)), ("", IN_BF16)),
    by_format={"bnb-nf4": AUTOCAST},
    products={
        "torchao-int8": ProductPractice(
            keeps="inputs", everywhere=True
        ),  # torchao's format for training all weights
        "torchao-fp8": OF_ALL_LAYERS,
    },
    kept="""
    train | text_encoders | bf16 | if text_cache_disable|text_cache_ondemand
    train | vae           | bf16 | if keep_vae_loaded|vae_cache_disable|vae_cache_ondemand
    """,
)
DIFFUSERS = OverheadTable(
    "examples/dreambooth: _qwen_image 1256-1265, 1381-1384, 1586-1593, _flux 1244-1247, 1520-1522, "
    "1564, 1903, "
    "_sdxl 1178-1184, 1512-1516",
    (("if use_8bit_adam", IN_BF16.changed(**EIGHT_BITS)), ("", IN_BF16)),
    by_format=ON_INTEGERS,
    kept="""
    cache | transformer | bf16 |
    train | vae         | bf16 | unless cache_latents
    """,
)
STAYS = "cache | text_encoders | bf16 | unless offload"
"""Of diffusers' scripts but FLUX.1's, which deletes its encoders before images are encoded."""
DIFFUSERS_FLUX = """
    train   | vae           | bf16 | if validation_prompt
    train   | text_encoders | bf16 | if caption_column
    preview | text_encoders | bf16 | if validation_prompt
"""
DIFFUSERS_SDXL = """
    cache | text_encoders | bf16 |
    train | text_encoders | bf16 |
    train | vae           | fp32 |
"""
"""What it deletes is a list of the encoders; the variables that hold them stay."""
SD_SCRIPTS = OverheadTable(
    "train_network.py 286, 611-635, 817-850, 922-923, flux_train_network.py 179-230, "
    "sdxl_train_network.py 90-122",
    (
        ("if full_bf16|full_fp16", IN_BF16),
        ("if optimizer_type=AdamW8bit|use_8bit_adam", AUTOCAST.changed(**EIGHT_BITS)),
        ("", AUTOCAST),
    ),
    products={"torchao-fp8": OF_ALL_LAYERS},
    kept="""
    train | text_encoders | bf16 | unless cache_text_encoder_outputs|cache_text_encoder_outputs_to_disk
    train | vae           | bf16 | unless cache_latents|cache_latents_to_disk
    """,
)
ONETRAINER = OverheadTable(
    "modules/model/BaseModel.py 119-127, modules/modelSetup/*LoRASetup.py setup_train_device, "
    "util/dtype_util.py 19, "
    "util/create.py 205-223, util/config/TrainConfig.py 1236, module/quantized/LinearFp8.py 54-62",
    (
        ("if lora_weight_dtype=BFLOAT_16", IN_BF16.changed(step_bytes=0)),
        ("if optimizer.optimizer=ADAMW_8BIT", AUTOCAST.changed(**EIGHT_BITS)),
        ("", AUTOCAST.changed(step_bytes=0)),  # it steps each matrix by itself
    ),
    products={"torchao-fp8": KEEPS_WEIGHTS},
    kept="""
    train | text_encoders | bf16 | if latent_caching=false
    train | vae           | bf16 | if latent_caching=false
    """,
)
