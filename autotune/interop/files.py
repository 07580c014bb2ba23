"""Files of other trainers' configurations: read as flat settings, bounded, and written from them.

Nothing that a file names is executed. Keys are dotted, the first item of a list is `[]`, later ones
`[1]`, `[2]`: `config.process[].datasets[1].resolution`.
"""

import json
import re
import shlex
import tomllib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import InvalidInput, first_line
from autotune.interop import rules
from autotune.interop.rules import ConfigValue, Values
from autotune.plan.file import BoundedLoader
from autotune.system.files import decode_text, read_bounded

# Far above any real configuration; parsers take time that grows with the square of it.
MAX_BYTES = 1 << 18
MAX_SETTINGS = 5_000
MAX_SHOWN = 200  # characters of a value, or of a parser's words, in a message
FORMATS = {
    **{".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"},
    **{".bat": "batch", ".cmd": "batch", ".ps1": "PowerShell"},
}
# What stands where a key can, in scripts and in other files; whether it is one, the parser decides.
OPTION = r"(?:^|[\s\"'])(?:--|\$(?:env:)?)?([^\s\"'=]+)"
KEY = r"(?:^|[\s{,.\"'])(?:--)?([^\s{},.\[\]\"'=:]+)[\"']?\s*[:=]"
# More parts than any key has; Python's parser takes time that grows with their square.
LONG_TOML_KEY = re.compile(r"(?<![\w\"'-])(?:[\w\"'-]+[ \t]*\.[ \t]*){64}")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
HINT = "name a configuration file of one of the trainers that `autotune import-config --help` lists"
SWITCHES = {"true": True, "false": False}
FILL_IN = "FILL-IN"  # written for a path that a plan does not hold
TRAINER = "$TRAINER"  # in a command, the folder that the trainer is installed in
SCRIPT_HEAD = """\
#!/bin/sh
# Run it in the folder that holds it, with TRAINER set to the folder that {title} is installed in.
set -e
"""


def read_document(path: Path) -> list[ConfigValue]:
    """Read the settings of a file, in its order. Raises InvalidInput if it cannot be read."""
    try:
        content = read_bounded(path, MAX_BYTES)
        text = decode_text(content)
        if "\0" in text:
            raise UnicodeDecodeError("utf-8", content, content.index(0), len(content), "a NUL")
    except UnicodeDecodeError as error:
        usual = "UTF-16LE" if b"\0" in content else "CP1252"
        hint = f"if it is {usual}: iconv -f {usual} -t UTF-8 {path.name} > again{path.suffix}"
        raise InvalidInput(f"{path} is not UTF-8 text: {error}", hint=hint) from error
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}", hint=HINT) from error
    is_json = text.lstrip().startswith(("{", "["))
    kind = FORMATS.get(path.suffix.lower()) or ("json" if is_json else "shell")
    try:
        pairs = tuple(_flatten(PARSERS[kind](text)))
        if kind == "json":  # where switches are often written as text, and keys as options
            pairs = tuple((k.removeprefix("--"), SWITCHES.get(str(v).lower(), v)) for k, v in pairs)
        json.dumps(pairs, ensure_ascii=False, default=str).encode()  # halves of characters
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = first_line(error) if kind != "yaml" else " ".join(str(error).split())
        message = f"{path} is not {kind} that can be read: {reason[:MAX_SHOWN]}"
        raise InvalidInput(message, hint="correct what is named") from error
    if len(pairs) > MAX_SETTINGS:
        message = f"{path} has {len(pairs)} settings, too many for a configuration"
        raise InvalidInput(message, hint=HINT)
    searched = [value if key == "script" else key for key, value in pairs]
    numbered = zip(pairs, _line_numbers(text, searched, kind), strict=True)
    return [ConfigValue(*pair, line, path.name) for pair, line in numbered]


def with_references(
    settings: list[ConfigValue],
    folder: Path,
    references: Mapping[str, str],
    allow: Callable[[Path], object],
    depth: int = 2,
) -> tuple[list[ConfigValue], list[ConfigValue]]:
    """Return settings of files that `references` name, under its prefix, then the file's own, which
    win; and settings whose file is missing. `allow` refuses a file that is not to be read."""
    found: list[ConfigValue] = []
    missing: list[ConfigValue] = []
    for setting in settings if depth else ():
        if setting.key not in references or not isinstance(setting.value, str):
            continue
        named = Path(setting.value.replace("\\", "/"))
        places = (folder / named, named, folder / named.name, folder.parent / named.name)
        there = next(filter(is_file, places), None)
        if there is None:
            missing.append(setting)
            continue
        allow(there)
        own = read_document(there)
        inner, lost = with_references(own, there.parent, references, allow, depth - 1)
        found += [replace(one, key=references[setting.key] + one.key) for one in inner]
        missing += lost
    return [*found, *settings], missing


def is_file(path: Path) -> bool:
    """Tell if a file's text names a file that is here; some texts can name none."""
    try:
        return path.expanduser().is_file()
    except (OSError, RuntimeError):  # too long, or of an unknown user's home
        return False


def _flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flatten(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _flatten(item, f"{key}[{number or ''}]")
    else:
        yield key, value


@dataclass(frozen=True)
class Shell:
    """One language of scripts that start trainers."""

    joins: str  # a line that ends with it goes on
    escapes: str
    quotes: str
    variable: str
    rewrites: Mapping[str, str]  # a line's beginning, so that `NAME=VALUE` assigns and words follow


SHELLS = {
    "shell": Shell("\\", "\\", "\"'", r"\$(?:\{(\w+)\}|(\w+))", {r"export\s": ""}),
    "batch": Shell(
        *("^", "", '"', r"%(\w+)()%"),
        {
            r"(?:rem\b|::).*": "",
            r'set[ \t]+"?(\w+)=(.*?)"?[ \t\r]*$': r'\1="\2"',
            r'(?:start[ \t]+)?(?:"[^"\n]*"[ \t]+)?cmd(?:\.exe)?[ \t]+/[ck][ \t]+"(.*)"\s*?$': r"\1",
        },
    ),
    "PowerShell": Shell(
        *("`", "`", "\"'", r"\$(?:\{(?:env:)?(\w+)\}|(?:env:)?(\w+))"),
        {r"\$(?:env:)?(\w+)[ \t]*=[ \t]*": r"\1="},
    ),
}


def _parse_command(shell: Shell, text: str) -> dict[str, Any]:
    env: dict[str, str] = {}
    repeated: set[str] = set()  # by options or other variables
    options: dict[str, Any] = {}
    room = 4 * MAX_BYTES

    def expanded(match: re.Match[str]) -> str:
        nonlocal room
        repeated.add(match[1] or match[2])
        value = env.get(match[1] or match[2], match[0])
        room -= len(value)
        if room < 0:
            raise ValueError("its variables grow beyond any configuration")
        return value

    text = re.sub(rf"{re.escape(shell.joins)}\r?\n", " ", text)
    for beginning, meaning in shell.rewrites.items():
        text = re.sub(rf"(?im)^[ \t]*@?{beginning}", meaning, text)
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True)
        lexer.whitespace_split, lexer.escape, lexer.quotes = True, shell.escapes, shell.quotes
        lexer.commenters = "" if shell.joins == "^" else "#"
        words = [re.sub(shell.variable, expanded, word) for word in lexer]
        while words and (assigned := ASSIGNMENT.fullmatch(words[0])):
            env[assigned[1]] = assigned[2]
            words = words[1:]
        if any(word.startswith("--") for word in words):
            options |= _options(words)
    own = {f"env.{name}": value for name, value in env.items() if name not in repeated}
    return {**own, **options}


def _options(words: Sequence[str]) -> dict[str, Any]:
    # Before the script they belong to its launcher, and get `launch.` before their names.
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    options: dict[str, Any] = {}
    if script is not None:
        options["script"] = words[script].replace("\\", "/").split("/")[-1]
    name = None
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name if script is None or index > script else f"launch.{name}"
            options[name] = _typed(value) if equals else True
        elif name is None or index == script:
            name = None
        elif isinstance(before := options[name], list):
            before.append(_typed(word))
        else:
            options[name] = _typed(word) if before is True else [before, _typed(word)]
    return options


def _typed(word: str) -> Any:
    if word.lower() in SWITCHES:
        return SWITCHES[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _parse_toml(text: str) -> Any:
    if found := LONG_TOML_KEY.search(text):
        raise ValueError(f"a key of too many parts: {found[0][:80]}")
    return tomllib.loads(text)


PARSERS: Mapping[str, Callable[[str], Any]] = {
    "yaml": lambda text: yaml.load(text, Loader=BoundedLoader),
    **{"toml": _parse_toml, "json": json.loads},
    **{name: partial(_parse_command, shell) for name, shell in SHELLS.items()},
}


def _line_numbers(text: str, keys: Sequence[str], kind: str) -> list[int]:
    """Keys come in the order of the text, so each is searched from the one before."""
    ends: dict[str, list[int]] = {}
    for match in re.finditer(OPTION if kind in SHELLS else KEY, text, re.M):
        ends.setdefault(match[1], []).append(match.end())
    breaks = [match.start() for match in re.finditer("\n", text)]
    lines, start = [], 0
    for key in keys:
        plain = key.removeprefix("env.").removeprefix("launch.")
        last = plain if kind in SHELLS else key.rpartition(".")[2]
        if found := ends.get(re.sub(r"\[\d*\]$", "", last)):
            start = found[bisect_right(found, start) % len(found)]  # the first, if none follows
        lines.append(bisect_left(breaks, start) + 1)
    return lines


def _ai_toolkit(title: str, values: Values, head: str) -> Mapping[str, str]:
    own = _in_file(values)
    prompts = own.pop("sample.prompts", ())
    own |= {f"sample.samples[{i}].prompt": one for i, one in enumerate(prompts)}
    config = {"job": "extension", "config": {"name": "lora", "process": [_nest(own)]}}
    run = _launcher(values) if "launch.num_processes" in values else ["python"]
    return {
        "train.yaml": head + yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=110),
        "run.sh": _shell(title, values, [*run, f"{TRAINER}/run.py", "train.yaml"]),
    }


# By the end of `network_module`: how its scripts' names begin, the options for text encoders, and
# the option that stores them in fewer bits.
MUSUBI_SCRIPTS = {
    "qwen_image": ("qwen_image", "text_encoder", "fp8_vl"),
    "kandinsky": ("kandinsky5", "text_encoder_qwen text_encoder_clip", "quantized_qwen"),
    "zimage": ("zimage", "text_encoder", "fp8_llm"),
    "krea2": ("krea2", "text_encoder", ""),
    "flux_2": ("flux_2", "text_encoder", "fp8_text_encoder"),
    "wan": ("wan", "t5", "fp8_t5"),
}
# Swap as autotune does: blocks only arrive, from locked memory, the next beside the one that runs.
MUSUBI_SWAP: Values = {
    "block_swap_h2d_only": True,
    "block_swap_ring_size": 2,
    "use_pinned_memory_for_block_swap": True,
}


def _musubi(title: str, values: Values, head: str) -> Mapping[str, str]:
    name, encoders, flag = MUSUBI_SCRIPTS[values["network_module"].removeprefix("networks.lora_")]
    values, folder = dict(values), str(values["datasets[].image_directory"])
    if "datasets[].target_frames" in values:
        values["datasets[].video_directory"] = values.pop("datasets[].image_directory")
    values["datasets[].cache_directory"] = f"{folder.rstrip('/')}-cache"
    own = _in_file(values, of_data=False)
    stored = [f"--{flag}"] * any(own.pop(key, False) for key in ("fp8_te", "quantized_qwen"))
    if values["blocks_to_swap"]:
        own |= MUSUBI_SWAP
    version = values.get("model_version")
    model = ["--model_version", version] if version else []
    paths = [word for encoder in encoders.split() for word in (f"--{encoder}", FILL_IN)]

    def cache(what: str, *words: str) -> list[str]:
        script = f"{TRAINER}/src/musubi_tuner/{name}_cache_{what}.py"
        return ["python", script, "--dataset_config", "data.toml", *words, *model]

    train = dict.fromkeys(("dit", "vae", *encoders.split()), FILL_IN) | own
    encode = cache("text_encoder_outputs", *paths, *stored)
    before = [cache("latents", "--vae", FILL_IN), encode]
    script = f"src/musubi_tuner/{name}_train_network.py"
    return _kohya(title, values, head, script, train, *before)


def _sd_scripts(title: str, values: Values, head: str) -> Mapping[str, str]:
    side = max(values["general.resolution"])  # by default no side may be longer than 1024 px
    values = {**values, "general.max_bucket_reso": -(-2 * side // 64) * 64}
    if values["network_module"] != "networks.lora_flux":
        return _kohya(title, values, head, "sdxl_train_network.py", _in_file(values, of_data=False))
    files = dict.fromkeys(("pretrained_model_name_or_path", "clip_l", "t5xxl", "ae"), FILL_IN)
    train = {**files, **_in_file(values, of_data=False), **files}
    if values.get("model_type") == "chroma":  # which takes none; by default it is 3.5
        train["guidance_scale"] = 0.0
    return _kohya(title, values, head, "flux_train_network.py", train)


def _kohya(
    title: str, values: Values, head: str, script: str, train: Values, *before: list[str]
) -> Mapping[str, str]:
    words = ["--num_cpu_threads_per_process", "1", "--mixed_precision"]
    run = _launcher(values, *words, str(values["mixed_precision"]))
    run += [f"{TRAINER}/{script}", "--config_file", "train.toml"]
    given = {key: value for key, value in train.items() if value is not False}
    return {
        "train.toml": head + _toml_text(_nest(given)),
        "data.toml": _toml_text(_nest(_in_file(values, of_data=True))).lstrip(),
        "run.sh": _shell(title, values, *before, run),
    }


def _simpletuner(title: str, values: Values, head: str) -> Mapping[str, str]:
    own = _nest(_in_file(values))
    sections = own.pop("backends")
    if "video" in sections[0]:
        sections[0]["dataset_type"] = "video"
    own["resolution"] = sections[0]["resolution"]
    variables = {**values, "env.CONFIG_BACKEND": "json", "env.CONFIG_PATH": "config.json"}
    return {
        "config.json": _json_text(own),
        "multidatabackend.json": _json_text(sections),
        "run.sh": _shell(title, variables, ["simpletuner", "train"], head=head),
    }


def _diffusers(title: str, values: Values, head: str) -> Mapping[str, str]:
    own = _nest(_in_file(values))
    stored, script, words = own.pop("bnb", None), f"{TRAINER}/examples/dreambooth/", []
    script += own.pop("script")
    for key, value in own.items():
        if value is not False:
            items = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{key}", *map(str, items)]
    compiled = values["launch.dynamo_backend"] != "no"
    flags = ["--dynamo_backend", "inductor", "--dynamo_use_regional_compilation"] * compiled
    run = _shell(title, values, [*_launcher(values, *flags), script, *words], head=head)
    return {"run.sh": run, **({"quantization.json": _json_text(stored)} if stored else {})}


def _onetrainer(title: str, values: Values, head: str) -> Mapping[str, str]:
    own = _in_file(values)
    own |= {key: str(own[key]) for key in ("resolution", "frames") if key in own}
    run = ["python", f"{TRAINER}/scripts/train.py", "--config-path", "config.json"]
    script = _shell(title, values, run, head=head)
    return {"config.json": _json_text(_nest(own)), "run.sh": script}


WRITERS: Mapping[str, Callable[[str, Values, str], Mapping[str, str]]] = {
    **{"ai-toolkit": _ai_toolkit, "musubi": _musubi, "simpletuner": _simpletuner},
    **{"diffusers": _diffusers, "sd-scripts": _sd_scripts, "onetrainer": _onetrainer},
}


def _in_file(values: Values, *, of_data: bool | None = None) -> dict[str, Any]:
    own = {key: x for key, x in values.items() if not key.startswith(("env.", "launch."))}
    is_data = {key: key.startswith(("general.", "datasets[")) for key in own}
    return {key: x for key, x in own.items() if of_data in (None, is_data[key])}


def _nest(values: Values) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, value in values.items():
        if value is None:
            continue
        inner: Any = root
        *parents, last = key.split(".")
        for part in parents:
            name, bracket, index = part.partition("[")
            inner = inner.setdefault(name, [] if bracket else {})
            if bracket:
                position = int(index.rstrip("]") or 0)
                inner += [{} for _ in range(position + 1 - len(inner))]
                inner = inner[position]
        inner[last] = value
    return root


def _json_text(values: Any) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _toml_text(section: Mapping[str, Any], path: str = "") -> str:
    """Write plain values as JSON, which is TOML, too, except for escapes beyond the basic plane."""
    plain = inner = ""
    for name, value in section.items():
        tables = [one for one in rules.listed(value) if isinstance(one, dict)]
        title = f"[{path}{name}]" if isinstance(value, dict) else f"[[{path}{name}]]"
        inner += "".join(f"\n{title}\n{_toml_text(one, f'{path}{name}.')}" for one in tables)
        plain += "" if tables else f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
    return plain + inner


def _shell(title: str, values: Values, *commands: Sequence[str], head: str = "") -> str:
    text = SCRIPT_HEAD.format(title=title) + head
    for key, value in values.items():
        if key.startswith("env.") and value:
            text += f"export {key[4:]}={shlex.quote(str(value))}\n"
    for first, *words in commands:
        text += first
        for word in words:
            is_path = re.fullmatch(r"\$TRAINER/[\w./]+", word)
            text += " \\\n  " if word.startswith("--") else " "
            text += f'"{word}"' if is_path else shlex.quote(word)
        text += "\n"
    return text


def _launcher(values: Values, *words: str) -> list[str]:
    processes = values.get("launch.num_processes")
    several = ["--multi_gpu", "--num_processes", str(processes)] if processes else []
    return ["accelerate", "launch", *several, *words]
