"""Settings by dotted key back to the text of a file: the inverse of `document`."""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from autotune.trainers.rules import Values


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


def yaml_text(values: Values, head: str) -> str:
    """A YAML file with comments at its head."""
    return head + yaml.safe_dump(nest(values), sort_keys=False, allow_unicode=True, width=110)


def json_text(values: Any) -> str:
    """A JSON file; JSON has no comments."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def toml_text(values: Values, head: str) -> str:
    """A TOML file of plain values, tables and lists of tables, with comments at its head."""
    nested = nest(values)
    lines = [f"{key} = {_toml(value)}" for key, value in nested.items() if not _is_section(value)]
    for key, value in nested.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]", *_table(value)]
        elif _is_section(value):
            for item in value:
                lines += ["", f"[[{key}]]", *_table(item)]
                for name, inner in item.items():
                    for one in inner if _is_section(inner) else ():
                        lines += ["", f"[[{key}.{name}]]", *_table(one)]
    return head + "\n".join(lines).lstrip("\n") + "\n"


def _table(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {_toml(value)}" for name, value in values.items() if not _is_section(value)]


def _is_section(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(item, dict) for item in value)
    )


def _toml(value: Any) -> str:
    """JSON's texts are TOML's, but for characters beyond the basic plane, which TOML takes as
    they are.
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, float) else repr(value)


TRAINER = "$TRAINER"
"""In a command, stands for the folder that the trainer is installed in."""
SCRIPT_HEAD = """\
#!/bin/sh
# Run it in the folder that holds it, with TRAINER set to the folder that {title} is installed in.
set -e
"""


def shell_text(
    values: Values, *commands: Sequence[str], head: str = "", title: str = "the trainer"
) -> str:
    """A shell script: comments, the variables among the settings, then commands, a list of words
    each.
    """
    env = [
        f"export {key[4:]}={shlex.quote(str(value))}"
        for key, value in values.items()
        if is_env(key) and value
    ]
    lines = [" \\\n  ".join(_grouped(command)) for command in commands]
    return SCRIPT_HEAD.format(title=title) + head + "\n".join([*env, *lines]) + "\n"


def _grouped(words: Sequence[str]) -> list[str]:
    """Words of a command in lines: an option and its values on one."""
    lines: list[str] = []
    for word in words:
        quoted = f'"{word}"' if re.fullmatch(r"\$TRAINER/[\w./]+", word) else shlex.quote(word)
        if not lines or word.startswith("--"):
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"
    return lines


def options(values: Values) -> list[str]:
    """Settings as words of a command line; true is an option without a value, false and None are
    left out.
    """
    words: list[str] = []
    for key, value in values.items():
        if value is None or value is False:
            continue
        words += [f"--{key}"]
        items = value if isinstance(value, list) else [] if value is True else [value]
        words += map(str, items)
    return words


def launcher(values: Values, *words: str) -> list[str]:
    """`accelerate launch` with what the settings say of processes, before these words."""
    processes = values.get("launch.num_processes")
    several = ["--multi_gpu", "--num_processes", str(processes)] if processes else []
    return ["accelerate", "launch", *several, *words]


def is_env(key: str) -> bool:
    """Whether a key is an environment variable."""
    return key.startswith("env.")


def in_file(values: Values, wanted: Callable[[str], bool] = lambda key: True) -> Values:
    """The settings that are written into a file, and not given by the command that starts the
    trainer.
    """
    return {
        key: value
        for key, value in values.items()
        if not key.startswith(("env.", "launch.")) and wanted(key)
    }
