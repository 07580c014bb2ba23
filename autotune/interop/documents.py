"""Reads another trainer's configuration as flat settings: YAML, TOML, JSON, or a command line. Data
only, bounded.

Nothing that a file names is executed; a file that it refers to is read by the same rules. Keys are
dotted, the first item of a list is `[]`, later ones `[1]`, `[2]`:
`config.process[].datasets[1].resolution`.
"""

import json
import re
import shlex
import tomllib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from autotune.errors import InvalidInput, first_line
from autotune.plan.plan_file import BoundedLoader
from autotune.system.files import read_bounded

MAX_BYTES = 1 << 18
"""Far above any real configuration; parsers take time that grows with the square of it."""
MAX_SETTINGS = 5_000
Format = Literal["yaml", "toml", "json", "shell"]
FORMATS: Mapping[str, Format] = {".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}
KEY_PATTERNS: Mapping[Format, re.Pattern[str]] = {
    "yaml": re.compile(
        r"(?m)(?:^|[\s{,\-])[\"']?([^\s\-\"'{},:#\[\]][^\"'{},:#\[\]\n]{0,80}?)[\"']?[ \t]*:"
    ),
    "json": re.compile(r"\"(?:--)?([^\"\n]*)\"\s*:"),
    "toml": re.compile(r"(?m)(?:^|[\s{,.\[\"'])([^\s{},.\[\]\"'=]+)[\"']?[ \t]*[=\]]"),
    "shell": re.compile(r"(?:^|[\s\"'])(?:--)?([^\s\"'=]+)"),
}
"""What stands where a key can; whether it is one, the parser has told."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
HINT = "name a configuration file of one of the trainers that `autotune import-config --help` lists"


@dataclass(frozen=True)
class ConfigValue:
    """One value of a configuration, and where it is written."""

    key: str
    value: Any
    """A boolean, number or text, a list of them, or None."""
    line: int = 0
    """From 1; 0 for a trainer's default, which is written nowhere."""
    file: str = ""


@dataclass(frozen=True)
class Document:
    """A configuration as written, in its order."""

    path: Path
    format: Format
    settings: tuple[ConfigValue, ...]

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key, the last if it is repeated; `default` if the file lacks it."""
        return next((one.value for one in reversed(self.settings) if one.key == key), default)

    def has(self, prefix: str) -> bool:
        """Whether any key begins so."""
        return any(one.key.startswith(prefix) for one in self.settings)

    def below(self, root: str) -> "Document":
        """The same settings, with `root` taken from the keys that begin with it."""
        return replace(
            self, settings=tuple(replace(s, key=s.key.removeprefix(root)) for s in self.settings)
        )


def read_document(path: Path) -> Document:
    """Read a configuration file.

    Raises:
        InvalidInput: there is no such file, or it is too large, or not of its format.
    """
    text = _read(path)
    kind = FORMATS.get(path.suffix.lower()) or (
        "json" if text.lstrip().startswith(("{", "[")) else "shell"
    )
    try:
        pairs = tuple(_flatten(_parse(kind, text)))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = first_line(error) if kind != "yaml" else " ".join(str(error).split())
        raise InvalidInput(
            f"{path} is not {kind} that can be read: {reason}", hint="correct what is named"
        ) from error
    if len(pairs) > MAX_SETTINGS:
        raise InvalidInput(
            f"{path} has {len(pairs)} settings, too many for a configuration", hint=HINT
        )
    searched = [value if key == "script" else key for key, value in pairs]
    lines = _line_numbers(text, searched, kind)
    settings = tuple(
        ConfigValue(key, value, line, path.name)
        for (key, value), line in zip(pairs, lines, strict=True)
    )
    return Document(path, kind, settings)


def with_references(
    document: Document, references: Mapping[str, str], depth: int = 2
) -> tuple[Document, tuple[ConfigValue, ...]]:
    """The document with the settings of the files that it names, and the settings whose file is not
    there.

    Its own settings come last: they win.

    Args:
        document: what names the files.
        references: for each key that names a file, the prefix for the keys of that file.
        depth: how many files may stand between.
    """
    found: list[ConfigValue] = []
    missing: list[ConfigValue] = []
    for setting in document.settings if depth else ():
        if setting.key not in references or not isinstance(setting.value, str):
            continue
        named = Path(setting.value)
        places = (document.path.parent / named, named, document.path.parent / named.name)
        there = next((place for place in places if place.is_file()), None)
        if there is None:
            missing.append(setting)
            continue
        inner, lost = with_references(read_document(there), references, depth - 1)
        found += [replace(one, key=references[setting.key] + one.key) for one in inner.settings]
        missing += lost
    return replace(document, settings=(*found, *document.settings)), tuple(missing)


def _read(path: Path) -> str:
    try:
        return read_bounded(path, MAX_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"cannot read {path}: {reason}", hint=HINT) from error


def _parse(kind: Format, text: str) -> Any:
    if kind == "yaml":
        return yaml.load(text, Loader=BoundedLoader)
    if kind == "toml":
        return tomllib.loads(text)
    if kind == "json":
        data = json.loads(text)
        return (
            {str(key).removeprefix("--"): value for key, value in data.items()}
            if isinstance(data, dict)
            else data
        )
    return _parse_command(text)


def _flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flatten(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _flatten(item, f"{key}[{number or ''}]")
    else:
        yield key, value


def _parse_command(text: str) -> dict[str, Any]:
    """Options of the last command with any, its `script` and its variables (`env.NAME`); earlier
    options are kept.

    Raises ValueError for an open quote, and for variables that double and double again.
    """
    env: dict[str, str] = {}
    options: dict[str, Any] = {}
    room = 4 * MAX_BYTES

    def expanded(match: re.Match[str]) -> str:
        nonlocal room
        value = env.get(match[1] or match[2], match[0])
        room -= len(value)
        if room < 0:
            raise ValueError("its variables grow beyond any configuration")
        return value

    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        words = [VARIABLE.sub(expanded, word) for word in shlex.split(line, comments=True)]
        while words and (words[0] == "export" or (assigned := ASSIGNMENT.fullmatch(words[0]))):
            if words[0] != "export" and assigned:
                env[assigned[1]] = assigned[2]
            words = words[1:]
        if any(word.startswith("--") for word in words):
            options |= _options(words)
    return {**{f"env.{name}": value for name, value in env.items()}, **options}


def _options(words: Sequence[str]) -> dict[str, Any]:
    """Options before the script belong to its launcher: their names get `launch.` before them."""
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    options: dict[str, Any] = (
        {} if script is None else {"script": words[script].replace("\\", "/").split("/")[-1]}
    )
    name = None
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name if script is None or index > script else f"launch.{name}"
            options[name] = _typed(value) if equals else True
        elif name is not None and index != script:
            before = options[name]
            if isinstance(before, list):
                before.append(_typed(word))
            else:
                options[name] = _typed(word) if before is True else [before, _typed(word)]
        else:
            name = None
    return options


def _typed(word: str) -> Any:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _line_numbers(text: str, keys: Sequence[str], kind: Format) -> list[int]:
    """The line that each key is on; keys come in the order of the text, so each is searched from
    the one before."""
    ends: dict[str, list[int]] = {}
    for match in KEY_PATTERNS[kind].finditer(text):
        ends.setdefault(match[1], []).append(match.end())
    breaks = [match.start() for match in re.finditer("\n", text)]
    lines, start, seen = [], 0, ""
    for key in keys:
        parts = (
            key.split(".")
            if kind != "shell"
            else [key.removeprefix("env.").removeprefix("launch.")]
        )
        fresh = [
            part
            for depth, part in enumerate(parts)
            if parts[: depth + 1] != seen.split(".")[: depth + 1]
        ]
        for part in fresh or parts[-1:]:
            if found := ends.get(re.sub(r"\[\d*\]$", "", part)):
                start = found[
                    bisect_right(found, start) % len(found)
                ]  # the first one, if none follows
        lines.append(bisect_left(breaks, start) + 1)
        seen = key
    return lines
