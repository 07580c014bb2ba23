"""Every key is accounted for, at its line, and means what its trainer means by it."""

import contextlib
import json
import re
import time
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings, strategies as st

from autotune.errors import InvalidInput
from autotune.interop.files import read_document
from autotune.interop.importing import import_config, read_settings
from autotune.interop.rules import ConfigValue, Context
from autotune.interop.trainer import get_trainer, trainers
from autotune.models.adapter import LISTS, convolutions, find_target_set, layers_of, linear_layers
from autotune.models.family import build_on_meta
from autotune.models.registry import FAMILIES
from autotune.plan.request import PlanRequest
from autotune.search.request import complete

CONFIGS = Path(__file__).parent / "configs"
CHANGES = yaml.safe_load((Path(__file__).parent / "changes.yaml").read_text())
MAIN_FILES = {
    "ai_toolkit.yaml": "ai-toolkit",
    "musubi.toml": "musubi",
    "simpletuner.json": "simpletuner",
    "diffusers.sh": "diffusers",
    "sd_scripts.toml": "sd-scripts",
    "kohya_gui.json": "sd-scripts",
    "onetrainer.json": "onetrainer",
}


def lost(config):
    return {line.key: line.meaning for line in config.not_carried}


@pytest.mark.parametrize("name", MAIN_FILES)
def test_every_setting_has_an_account(name):
    config = import_config(CONFIGS / name)
    told = (*config.carried, *config.pinned, *config.decided, *config.not_carried)
    told = [line for line in told if line.line]
    for line in told:
        words = (CONFIGS / line.file).read_text().splitlines()[line.line - 1]
        last = line.key.rpartition(".")[2].partition("[")[0]
        assert last in words or line.value in words, line
    for setting in read_document(CONFIGS / name):
        assert any(line.line == setting.line for line in told), setting


def test_an_import_is_exact():
    config = import_config(CONFIGS / "ai_toolkit.yaml")
    assert (config.model, config.data) == ("Qwen/Qwen-Image", "photos")
    learned, pins = yaml.safe_load((CONFIGS.parent / "imported.yaml").read_text())
    assert {**config.options, "preview_prompts": [*config.options["preview_prompts"]]} == learned
    assert config.pins == pins
    assert lost(config).keys() == {"datasets[].resolution", "train.ema_config.ema_decay"}


def changed(folder, name, old, new):
    """The configurations in another folder, with that of this name changed."""
    for path in CONFIGS.iterdir():
        text = path.read_text()
        (folder / path.name).write_text(text.replace(old, new, 1) if path.name == name else text)
    return folder / name


@pytest.mark.parametrize(("name", "old", "new", "words"), CHANGES["REFUSED"])
def test_unusable_values_are_refused(tmp_path, name, old, new, words):
    with pytest.raises(InvalidInput) as refused:
        import_config(changed(tmp_path, name, old, new))
    assert words in refused.value.message


@pytest.mark.parametrize(("name", "old", "new", "expected"), CHANGES["IMPORTED"])
def test_adapters_and_optimizers_are_imported(tmp_path, name, old, new, expected):
    config = import_config(changed(tmp_path, name, old, new))
    assert {key: config.options.get(key) for key in expected} == expected
    assert "optimizer" not in config.pins or "optimizer" not in expected
    told = {"network.type", "peft_type"} & lost(config).keys()
    assert not told | {key for key in lost(config) if "lokr" in key}


def test_numbers_may_be_written_as_text(tmp_path):
    plain, quoted = (tmp_path / f"{name}.json" for name in ("plain", "quoted"))
    written = json.loads((CONFIGS / "simpletuner.json").read_text())
    written |= {"--gradient_checkpointing": True, "--use_ema": False, "--lora_rank": 8}
    plain.write_text(json.dumps(written))
    as_text = {
        key: json.dumps(x) if isinstance(x, int | float) else x for key, x in written.items()
    }
    quoted.write_text(json.dumps(as_text))
    one, other = import_config(plain), import_config(quoted)
    assert (one.options, one.pins) == (other.options, other.pins)
    assert lost(one) == lost(other)


@pytest.mark.parametrize(("written", "expected"), CHANGES["DEFAULTS"])
def test_defaults_are_the_trainers_own(tmp_path, written, expected):
    learned = read(tmp_path, written).options
    assert {key: learned[key] for key in expected} == expected


def test_rates_of_other_optimizers_are_not_adamws(tmp_path):
    script = {"script": "train_dreambooth_lora_qwen_image.py"}
    config = read(tmp_path, {**script, "optimizer": "dadapt", "learning_rate": 1.0})
    assert "learning_rate" not in config.options
    assert {"optimizer", "learning_rate"} <= lost(config).keys()


ODD = st.sampled_from(
    [None, True, False, -1, 0, 1.5, float("nan"), float("inf"), 10**400, "", "x", "1e999", "(", []]
)


@pytest.mark.parametrize("name", MAIN_FILES)
@settings(max_examples=25)
@given(odd=st.lists(ODD | st.lists(ODD, max_size=3), min_size=1, max_size=5), data=st.data())
def test_odd_values_never_crash(name, odd, data):
    trainer = get_trainer(MAIN_FILES[name])
    context = Context(trainer.models[0].family)
    own = read_document(CONFIGS / name)
    of_section = r".*\." if trainer.sections_kept else re.escape(trainer.root)
    written = {re.sub(f"^{of_section}", "", one.key): one for one in own}
    keys = st.sampled_from(sorted({key for rule in trainer.rules for key in rule.keys}))
    for value in odd:
        key = data.draw(keys)
        written[key] = ConfigValue(key, value, 1, name)
    with contextlib.suppress(InvalidInput):
        assert read_settings(trainer, written, context)[1]


def test_lines_are_found_in_one_pass(tmp_path):
    """Of keys that the text does not show as they are, too."""
    path = tmp_path / "config.json"
    pairs = [f'"\\u006bey{number:04}": "{"x" * 30}"' for number in range(4900)]
    path.write_text("{" + ",\n".join(pairs) + "}")
    started = time.process_time()
    assert len(read_document(path)) == 4900
    assert time.process_time() - started < 2.0
    path.write_text('{"a": 1, "b": {"c": 2,\n"a": 3},\n"list": [{"a": 4,\n"e": 5}], "--d":\n6}')
    found = {one.key: one.line for one in read_document(path)}
    assert found == {"a": 1, "b.c": 1, "b.a": 2, "list[].a": 3, "list[].e": 4, "d": 4}


@pytest.mark.parametrize("content", ["", "[1, 2", "{" * 3000, "a = 'b", "\x00", "--x"])
@pytest.mark.parametrize("suffix", [".yaml", ".toml", ".json", ".sh", ""])
def test_damaged_files_are_refused(tmp_path, content, suffix):
    path = tmp_path / f"config{suffix}"
    path.write_text(content)
    with pytest.raises(InvalidInput):
        import_config(path)


WINDOWS = sorted((CONFIGS.parent / "windows").iterdir())
QWEN = "accelerate launch train_dreambooth_lora_qwen_image.py"


@pytest.mark.parametrize("path", WINDOWS, ids=lambda path: path.name)
def test_scripts_of_windows_are_read(path):
    config = import_config(path)
    found = (config.model, config.data, config.trainer)
    assert found == ("Qwen/Qwen-Image", "C:\\a b", "diffusers")
    assert not [line for line in config.not_carried if line.key in ("MODEL", "model", "DATA")]


HOSTILE = {
    "variables.sh": "X=aa\n" + "X=$X$X\n" * 40 + "launch train.py --a $X",
    "many.sh": "launch train.py --a " + "$X " * 80_000,
    "keys.json": "{" + ",".join(f'"k\\u0065y{n}":1' for n in range(17_000)) + "}",
    "parts.toml": ".".join("a" * 100_000) + "=1",
    "half.json": '{"model_family":"qwen_image","output_dir":"\\ud800"}',
    "number.json": '{"model_family":"qwen_image","lora_rank":1e30}',
    "digits.json": '{"model_family":"qwen_image","lora_rank":' + "9" * 4000 + "}",
    "home.json": '{"model_family":"qwen_image","model_type":"lora",'
    '"pretrained_model_name_or_path":"~nobody-/x"}',
    "path.sh": f"{QWEN} --pretrained_model_name_or_path " + "a/" * 20_000,
    "model.yaml": (CONFIGS / "ai_toolkit.yaml").read_text().replace("qwen_image", "q" * 200_000),
    "pattern.json": '{"model_type":"QWEN","training_method":"LORA","layer_filter_regex":true,'
    '"layer_filter":"(.|..)+(.|..)+(.|..)+(.|..)+X"}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_bounded(tmp_path, name):
    path = tmp_path / name
    path.write_text(HOSTILE[name])
    started_at, message = time.process_time(), ""
    try:
        import_config(path).model_dump_json()
    except InvalidInput as error:
        message = error.message
    assert bool(message) != (name in ("home.json", "path.sh", "pattern.json"))
    assert len(message) < 1000
    assert time.process_time() - started_at < 3


@pytest.mark.parametrize("trainer", trainers().values(), ids=lambda one: one.name)
def test_import_knows_what_export_writes(trainer):
    keys = [key for rule in trainer.rules for key in rule.keys]
    assert {known.family.name for known in trainer.models} <= FAMILIES.keys()
    known = {*keys, *trainer.references}
    others = [key for key in trainer.fixed if key not in known and "backends[1]" not in key]
    assert [key for key in others if trainer.account(key, None) is None] == []


@pytest.mark.parametrize(
    "wrong", ["linear: 0", "linear: .nan", "steps: 0", "lr: -1", "resolution: [0]"]
)
def test_impossible_values_name_their_line(tmp_path, wrong):
    path, (key, _, value) = tmp_path / "config.yaml", wrong.partition(": ")
    text = re.sub(rf"\b{key}: .*", wrong, (CONFIGS / "ai_toolkit.yaml").read_text())
    path.write_text(text)
    number = text[: text.index(wrong)].count("\n") + 1
    where = rf"config.yaml, line {number}: .*\b{key} cannot be {re.escape(value.strip('.'))}"
    with pytest.raises(InvalidInput, match=where):
        import_config(path)


def read(folder, content):
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return import_config(path)


def test_onetrainer_s_unet_has_its_settings(tmp_path):
    written = {"model_type": "STABLE_DIFFUSION_XL_10_BASE", "training_method": "LORA"}
    written["layer_filter"] = "attentions"
    own = {"unet": {"weight_dtype": "NFLOAT_4"}, "transformer": {"weight_dtype": "FLOAT_32"}}
    config = read(tmp_path, {**written, **own, "gradient_checkpointing": "OFF"})
    assert (config.pins["quantization"], config.pins["checkpointed_blocks"]) == ("bnb-nf4", "0")
    assert config.options["targets"] == "attention+mlp+proj"
    assert {"text_encoder.train", "text_encoder_2.train"} <= lost(config).keys()
    full = read(tmp_path, {**written, **own, "layer_filter": ""})
    assert "does not adapt" in lost(full)["layer_filter"]
    assert "conv1" in lost(full)["layer_filter"]


def test_targets_suit_the_trainer():
    for trainer, targets in (("sd-scripts", "attention+mlp+proj"), ("onetrainer", "attention")):
        assert complete(PlanRequest(model="sdxl", for_trainer=trainer)).targets == targets
    with pytest.raises(InvalidInput, match="cannot adapt the layers 'attention'") as told:
        complete(PlanRequest(model="flux1-dev", for_trainer="sd-scripts", targets="attention"))
    assert "attention+mlp" in str(told.value.hint)


KNOWN = sorted({known.family.name for trainer in trainers().values() for known in trainer.models})


@pytest.mark.parametrize("name", KNOWN)
def test_layer_tables_are_whole(name):
    family = FAMILIES[name]
    model = build_on_meta(family, {**family.transformer_config, **family.tiny_config})
    for kind, layers in ((torch.nn.Linear, linear_layers), (torch.nn.Conv2d, convolutions)):
        names = {name for name, module in model.named_modules() if isinstance(module, kind)}
        names -= {name for name in names if "guidance_embed.guidance" in name}  # FLUX.2 dev's alone
        unlike = {name for name in names if name.startswith("mid_block.resnets.")}  # of a UNet
        general = {LISTS.sub(r"\1.0.", name) for name in names - unlike}
        assert layers(family) == unlike | general


@pytest.mark.parametrize("name", KNOWN)
def test_target_sets_are_found(name):
    family = FAMILIES[name]
    for targets in family.target_sets:
        named, difference = find_target_set(family, layers_of(family, targets))
        assert (layers_of(family, named), difference) == (layers_of(family, targets), "")
    fewer = layers_of(family, "attention") - {min(layers_of(family, "attention"))}
    patterns, difference = find_target_set(family, fewer)
    assert (layers_of(family, patterns), difference) == (fewer, "")


QUANTIZES_ENCODERS = "        quantize_te: true\n"
SD3 = {"model_type": "STABLE_DIFFUSION_35", "training_method": "LORA"}
FLUX = {"model_family": "flux", "model_type": "lora"}


def test_text_encoders_are_stored_as_written(tmp_path):
    follows = import_config(changed(tmp_path, "ai_toolkit.yaml", QUANTIZES_ENCODERS, ""))
    sd3 = read(tmp_path, {**SD3, "text_encoder_3": {"weight_dtype": "FLOAT_8"}})
    flux = read(tmp_path, {**FLUX, "text_encoder_2_precision": "int8-quanto"})
    stored = [one.pins["caching.text_encoder_quantization"] for one in (follows, sd3, flux)]
    assert stored == ["torchao-fp8", "torchao-fp8", "torchao-int8"]
