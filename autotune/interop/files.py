"""Settings by a trainer's keys as its files: the inverse of `documents`, and what only each trainer
has."""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from autotune.interop.rules import Values
from autotune.interop.trainer import FILL_IN, Trainer

TRAINER = "$TRAINER"
"""In a command, stands for the folder that the trainer is installed in."""
SCRIPT_HEAD = """\
#!/bin/sh
# Run it in the folder that holds it, with TRAINER set to the folder that {title} is installed in.
set -e
"""


def write_files(trainer: Trainer, values: Values, head: str) -> Mapping[str, str]:
    """Name and text of each file, from settings by key; `head` is a text in comments for one."""
    return WRITERS[trainer.name](trainer.title, values, head)


def _ai_toolkit(title: str, values: Values, head: str) -> Mapping[str, str]:
    root = "config.process[]."
    own = _in_file(values)
    prompts = own.pop("sample.prompts", ())
    inside = {root + key: value for key, value in own.items()}
    inside |= {f"{root}sample.samples[{i}].prompt": one for i, one in enumerate(prompts)}
    config = nest({"job": "extension", "config.name": "lora", **inside})
    run = _launcher(values) if "launch.num_processes" in values else ["python"]
    return {
        "train.yaml": head + yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=110),
        "run.sh": _shell(title, values, [*run, f"{TRAINER}/run.py", "train.yaml"]),
    }


MUSUBI_SCRIPTS: Mapping[str, tuple[str, str, str]] = {
    "qwen_image": ("qwen_image", "text_encoder", "fp8_vl"),
    "kandinsky": ("kandinsky5", "text_encoder_qwen text_encoder_clip", "quantized_qwen"),
    "zimage": ("zimage", "text_encoder", "fp8_llm"),
    "krea2": ("krea2", "text_encoder", ""),
    "flux_2": ("flux_2", "text_encoder", "fp8_text_encoder"),
    "wan": ("wan", "t5", "fp8_t5"),
}
"""By the end of `network_module`: how its scripts' names begin, the options for text encoders, and
that which stores them in fewer bits."""


def _musubi(title: str, values: Values, head: str) -> Mapping[str, str]:
    name, encoders, flag = MUSUBI_SCRIPTS[values["network_module"].removeprefix("networks.lora_")]
    data = _in_file(values, _is_data)
    folder = str(data["datasets[].image_directory"])
    if "datasets[].target_frames" in data:
        data["datasets[].video_directory"] = data.pop("datasets[].image_directory")
    data["datasets[].cache_directory"] = f"{folder.rstrip('/')}-cache"
    train = _in_file(values, lambda key: not _is_data(key) and key != flag)
    if values["blocks_to_swap"]:
        train |= {"block_swap_h2d_only": True, "block_swap_ring_size": 2}
    train = {key: value for key, value in train.items() if value is not False}
    place = f"{TRAINER}/src/musubi_tuner/{name}"
    sets, version = ["--dataset_config", "data.toml"], values.get("model_version")
    model = ["--model_version", version] if version else []
    cache = ["python", f"{place}_cache_latents.py", *sets, "--vae", FILL_IN, *model]
    paths = [word for encoder in encoders.split() for word in (f"--{encoder}", FILL_IN)]
    stored = [f"--{flag}"] * bool(values.get(flag))
    encode = ["python", f"{place}_cache_text_encoder_outputs.py", *sets, *paths, *stored, *model]
    run = [*_kohya_launcher(values), f"{place}_train_network.py", "--config_file", "train.toml"]
    weights = dict.fromkeys(("dit", "vae", *encoders.split()), FILL_IN)
    return {
        "train.toml": head + toml_text({**weights, **train}),
        "data.toml": toml_text(data),
        "run.sh": _shell(title, values, cache, encode, run),
    }


def _sd_scripts(title: str, values: Values, head: str) -> Mapping[str, str]:
    is_flux = values["network_module"] == "networks.lora_flux"
    script = "flux_train_network.py" if is_flux else "sdxl_train_network.py"
    files = ("pretrained_model_name_or_path", "clip_l", "t5xxl", "ae") if is_flux else ()
    own = _in_file(values, lambda key: not _is_data(key) and key not in files)
    train = {key: value for key, value in own.items() if value is not False}
    run = [*_kohya_launcher(values), f"{TRAINER}/{script}", "--config_file", "train.toml"]
    return {
        "train.toml": head + toml_text({**dict.fromkeys(files, FILL_IN), **train}),
        "data.toml": toml_text(_in_file(values, _is_data)),
        "run.sh": _shell(title, values, run),
    }


def _simpletuner(title: str, values: Values, head: str) -> Mapping[str, str]:
    is_section = "backends[".__eq__
    sections = nest(_in_file(values, lambda key: is_section(key[:9])))["backends"]
    sections[0]["resolution"] = values["resolution"]
    variables = {**values, "env.CONFIG_BACKEND": "json", "env.CONFIG_PATH": "config.json"}
    return {
        "config.json": json_text(_in_file(values, lambda key: not is_section(key[:9]))),
        "multidatabackend.json": json_text(sections),
        "run.sh": _shell(title, variables, ["simpletuner", "train"], head=head),
    }


def _diffusers(title: str, values: Values, head: str) -> Mapping[str, str]:
    stored = {key[4:]: value for key, value in values.items() if key.startswith("bnb.")}
    words = []
    for key, value in _in_file(values, lambda key: key != "script" and key[:4] != "bnb.").items():
        if value is not False:
            items = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{key}", *map(str, items)]
    compiled = values["launch.dynamo_backend"] != "no"
    flags = ["--dynamo_backend", "inductor", "--dynamo_use_regional_compilation"] * compiled
    script = f"{TRAINER}/examples/dreambooth/{values['script']}"
    run = _shell(title, values, [*_launcher(values, *flags), script, *words], head=head)
    return {"run.sh": run, **({"quantization.json": json_text(stored)} if stored else {})}


def _onetrainer(title: str, values: Values, head: str) -> Mapping[str, str]:
    own = _in_file(values)
    own |= {key: str(own[key]) for key in ("resolution", "frames") if key in own}
    run = ["python", f"{TRAINER}/scripts/train.py", "--config-path", "config.json"]
    script = _shell(title, values, run, head=head)
    return {"config.json": json_text(nest(own)), "run.sh": script}


WRITERS: Mapping[str, Callable[[str, Values, str], Mapping[str, str]]] = {
    "ai-toolkit": _ai_toolkit,
    "musubi": _musubi,
    "simpletuner": _simpletuner,
    "diffusers": _diffusers,
    "sd-scripts": _sd_scripts,
    "onetrainer": _onetrainer,
}


def _in_file(values: Values, wanted: Callable[[str], bool] = lambda key: True) -> dict[str, Any]:
    """The settings that are not given by the command that starts the trainer."""
    return {
        key: value
        for key, value in values.items()
        if not key.startswith(("env.", "launch.")) and wanted(key)
    }


def _is_data(key: str) -> bool:
    """Whether a key belongs to kohya's file of data sets."""
    return key.startswith(("general.", "datasets["))


def nest(values: Values) -> dict[str, Any]:
    """`{"a.b[].c": 1}` as `{"a": {"b": [{"c": 1}]}}`, without what is None."""
    root: dict[str, Any] = {}
    for key, value in values.items():
        if value is None:
            continue
        place: Any = root
        *parents, last = key.split(".")
        for part in parents:
            name, bracket, index = part.partition("[")
            if not bracket:
                place = place.setdefault(name, {})
                continue
            items = place.setdefault(name, [])
            position = int(index.rstrip("]") or 0)
            items += [{} for _ in range(position + 1 - len(items))]
            place = items[position]
        place[last] = value
    return root


def json_text(values: Any) -> str:
    """A JSON file; JSON has no comments."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def toml_text(values: Values) -> str:
    """A TOML file of plain values, tables and lists of tables."""
    lines: list[str] = []

    def add(section: Mapping[str, Any], path: str) -> None:
        inner = []
        for name, value in section.items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                inner += [(f"[[{path}{name}]]", one, name) for one in value]
            elif isinstance(value, dict):
                inner.append((f"[{path}{name}]", value, name))
            else:
                lines.append(f"{name} = {_toml(value)}")
        for title, one, name in inner:
            lines.extend(["", title])
            add(one, f"{path}{name}.")

    add(nest(values), "")
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml(value: Any) -> str:
    """JSON's texts are TOML's, but for characters beyond the basic plane, which TOML takes as
    they are."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, float) else repr(value)


def _shell(title: str, values: Values, *commands: Sequence[str], head: str = "") -> str:
    """A shell script: comments, the variables among the settings, then commands, a list of words
    each: an option and its values on a line."""
    text = SCRIPT_HEAD.format(title=title) + head
    for key, value in values.items():
        if key.startswith("env.") and value:
            text += f"export {key[4:]}={shlex.quote(str(value))}\n"
    for command in commands:
        lines: list[str] = []
        for word in command:
            is_place = re.fullmatch(r"\$TRAINER/[\w./]+", word)
            quoted = f'"{word}"' if is_place else shlex.quote(word)
            if not lines or word.startswith("--"):
                lines.append(quoted)
            else:
                lines[-1] += f" {quoted}"
        text += " \\\n  ".join(lines) + "\n"
    return text


def _launcher(values: Values, *words: str) -> list[str]:
    """`accelerate launch` with what the settings say of processes, before these words."""
    processes = values.get("launch.num_processes")
    several = ["--multi_gpu", "--num_processes", str(processes)] if processes else []
    return ["accelerate", "launch", *several, *words]


def _kohya_launcher(values: Values) -> list[str]:
    precision = str(values["mixed_precision"])
    return _launcher(values, "--num_cpu_threads_per_process", "1", "--mixed_precision", precision)
