"""Holds exported files and tables of defaults against what the programs themselves declare.

    python benchmarks/trainer_options.py CHECKOUTS

CHECKOUTS is that of `trainer_examples.py`. Nothing of a program runs: what its parsers and
configuration classes declare is read from their syntax trees. Of every model that a trainer and
autotune know, three plans with each set of layers are exported. Printed are a key that the program
does not declare, a value that is none of its choices or not of its type, and a default in
`autotune/interop/data` that is not the program's.
"""

import argparse
import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from autotune.errors import InvalidInput
from autotune.interop.exporting import export_plan
from autotune.interop.files import read_document
from autotune.interop.trainer import KnownModel, Trainer, trainers
from tests.interop.plans import plan_of

PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"checkpointed_blocks": 2, "quantization": "torchao-int8", "lr_scheduler": "cosine"},
    {"quantization": "bnb-nf4", "attention": "flash", "compile": "block", "caption_dropout": 0.1},
)
UNKNOWN = object()  # a default that is computed
AI_TOOLKIT = {
    **{"network.": "NetworkConfig", "train.": "TrainConfig", "model.": "ModelConfig"},
    **{"datasets[].": "DatasetConfig", "sample.": "SampleConfig", "save.": "SaveConfig"},
    **{"train.ema_config.": "EMAConfig", "sample.samples[].": "SampleItem"},
}
PARTS = ("transformer.", "unet.", "text_encoder.", "text_encoder_2.", "text_encoder_3.", "vae.")
ONETRAINER = {
    **{"": "TrainConfig", "optimizer.": "TrainOptimizerConfig", "concepts[].": "ConceptConfig"},
    **{"concepts[].image.": "ConceptImageConfig", "concepts[].text.": "ConceptTextConfig"},
    **dict.fromkeys(PARTS, "TrainModelPartConfig"),
}
OF_STARTERS = ("launch.", "env.", "config.", "job", "script", "type", "__version")


@dataclass
class Options:
    """What a program declares, by key."""

    defaults: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, list[Any]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def find(self, key: str) -> str | None:
        """Return the name that a key has here: its own, one of any section, or of its mapping."""
        parent, _, last = re.sub(r"\[\d+\]", "[]", key).rpartition(".")
        whole = f"{parent}.{last}" if parent else last
        names = [whole, f"*.{last}", re.sub(r"\d", "*", whole)]
        names += [parent] if "." in parent else []
        return next((name for name in names if name in self.defaults), None)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def literal(node: ast.expr | None) -> Any:
    """Return a node's value, a name for a member of an enumeration."""
    if isinstance(node, ast.JoinedStr):  # one option for each of several numbers
        parts = (one.value if isinstance(one, ast.Constant) else "*" for one in node.values)
        return "".join(map(str, parts))
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return node.attr if isinstance(node, ast.Attribute) else UNKNOWN


def calls(node: ast.AST, name: str) -> Iterator[ast.Call]:
    for each in ast.walk(node):
        function = each.func if isinstance(each, ast.Call) else None
        if name in (getattr(function, "attr", ""), getattr(function, "id", "")):
            yield cast(ast.Call, each)


def read_arguments(found: Options, paths: Iterable[Path]) -> Options:
    """Add what `add_argument` declares; the last file counts."""
    for call in chain.from_iterable(calls(parse(path), "add_argument") for path in paths):
        given = {str(one.arg): one.value for one in call.keywords}
        name = next((x[2:] for x in map(literal, call.args) if str(x).startswith("--")), None)
        if name is None:
            continue
        is_switch = literal(given.get("action")) == "store_true"
        found.defaults[name] = False if is_switch else literal(given.get("default"))
        found.kinds[name] = "bool" if is_switch else getattr(given.get("type"), "id", "")
        if isinstance(among := literal(given.get("choices")), list):
            found.choices[name] = among
    return found


def read_sections(path: Path) -> Options:
    """Read the keys of the dictionaries that a schema is made of, whose defaults are elsewhere."""
    keys = [
        one for node in ast.walk(parse(path)) if isinstance(node, ast.Dict) for one in node.keys
    ]
    return Options({f"*.{literal(one)}": UNKNOWN for one in keys if one})


def read_classes(paths: Iterable[Path], sections: dict[str, str]) -> Options:
    """Read `kwargs.get("key", default)` and `data.append(("key", default, type, ...))` of the class
    that each section is of."""
    found = Options()
    bodies = chain.from_iterable(parse(path).body for path in paths)
    for node in (one for one in bodies if isinstance(one, ast.ClassDef)):
        pairs = [tuple(call.args) for call in calls(node, "get")]
        rows = [call.args[0] for call in calls(node, "append")]
        pairs += [tuple(row.elts) for row in rows if isinstance(row, ast.Tuple)]
        for prefix in (prefix for prefix, name in sections.items() if name == node.name):
            for key, *others in (pair for pair in pairs if pair):
                name = f"{prefix}{literal(key)}"
                found.defaults[name] = literal(others[0] if others else None)
                found.kinds[name] = getattr(others[1], "id", "") if others[1:] else ""
    return found


def read_onetrainer(root: Path) -> Options:
    found = read_classes(sorted((root / "modules/util/config").glob("*.py")), ONETRAINER)
    members: dict[str, list[Any]] = {}
    for path in sorted((root / "modules/util/enum").glob("*.py")):
        for node in (one for one in parse(path).body if isinstance(one, ast.ClassDef)):
            own = [one for one in node.body if isinstance(one, ast.Assign)]
            members[node.name] = [getattr(one.targets[0], "id", "") for one in own]
    kinds = found.kinds.items()
    found.choices = {key: members[kind] for key, kind in kinds if members.get(kind)}
    return found


def read_ai_toolkit(root: Path) -> Options:
    found = read_classes([root / "toolkit/config_modules.py"], AI_TOOLKIT)
    for path in sorted(root.glob("jobs/process/*.py")):
        keys = (literal(call.args[0]) for call in calls(parse(path), "get_conf") if call.args)
        found.defaults |= dict.fromkeys(map(str, keys), UNKNOWN)
    return found


def read_simpletuner(root: Path) -> Options:
    found = Options()
    fields = "simpletuner_sdk/server/services/field_registry/sections/*.py"
    for path in (*root.glob(fields), *root.glob("helpers/models/field_registry/*.py")):
        for call in calls(parse(path), "ConfigField"):
            given = {one.arg: one.value for one in call.keywords}
            name = str(literal(given.get("arg_name"))).removeprefix("--")
            found.defaults[name] = literal(given.get("default_value"))
            among = literal(given.get("choices"))
            if isinstance(among, list) and all(isinstance(one, dict) for one in among):
                found.choices[name] = [one["value"] for one in among]
    for path in sorted((root / "helpers/data_backend").rglob("*.py")):  # which declares no keys
        words = re.findall(r"[\"'](\w+)[\"']", path.read_text(encoding="utf-8"))
        found.defaults |= {f"*.{word}": UNKNOWN for word in words}
    return found


def read_musubi(root: Path, known: KnownModel) -> Options:
    module = str(known.keys["network_module"]).removeprefix("networks.lora_")
    script = {"kandinsky": "kandinsky5"}.get(module, module)
    own = [root / f"{script}_train_network.py", *sorted(root.glob(f"{script}/*_utils.py"))]
    found = read_sections(root / "dataset/config_utils.py")
    return read_arguments(found, [*sorted(root.glob("training/*.py")), *own])


def read_sd_scripts(root: Path, known: KnownModel) -> Options:
    names = ["library/train_util.py", "library/config_util.py", "library/custom_train_functions.py"]
    names += ["library/sd3_train_utils.py", "train_network.py"]
    names += ["flux_train_network.py", "library/flux_train_utils.py"]
    if known.family.name == "sdxl":
        names[-2:] = ["sdxl_train_network.py", "library/sdxl_train_util.py"]
    found = read_sections(root / "library/config_util.py")
    return read_arguments(found, [root / name for name in names])


def read_options(trainer: str, known: KnownModel, checkouts: Path) -> Options:
    if trainer == "musubi":
        return read_musubi(checkouts / "kohya-ss+musubi-tuner/src/musubi_tuner", known)
    if trainer == "sd-scripts":
        return read_sd_scripts(checkouts / "kohya-ss+sd-scripts", known)
    if trainer == "onetrainer":
        return read_onetrainer(checkouts / "Nerogar+OneTrainer")
    if trainer == "ai-toolkit":
        return read_ai_toolkit(checkouts / "ostris+ai-toolkit")
    if trainer == "simpletuner":
        return read_simpletuner(checkouts / "bghira+SimpleTuner/simpletuner")
    scripts = checkouts / "huggingface+diffusers/examples/dreambooth"
    return read_arguments(Options(), [scripts / str(known.keys["script"])])


def differ(ours: Any, theirs: Any) -> bool:
    if theirs is UNKNOWN or theirs in (None, "", {}, "alpha", "auto_memory"):  # or as another
        return False
    try:
        return float(ours) != float(theirs)
    except (TypeError, ValueError):
        return str(ours).lower() != str(theirs).lower()


def is_of_kind(value: Any, kind: str) -> bool:
    kinds = {"int": int, "float": (int, float), "bool": bool}
    items = value if isinstance(value, list) else [value]
    return kind not in kinds or all(isinstance(one, kinds[kind]) for one in items)  # type: ignore[arg-type]


def export(trainer: Trainer, known: KnownModel) -> Iterator[Mapping[str, str]]:
    """Yield the files of each plan with each target set, if it can be expressed."""
    for changes, targets in product(PLANS, known.family.target_sets):
        with suppress(InvalidInput):
            yield export_plan(plan_of(known.name, **changes, targets=targets), trainer).files


def check(trainer: Trainer, known: KnownModel, checkouts: Path, folder: Path) -> Iterator[str]:
    options = read_options(trainer.name, known, checkouts)
    own, usual = known.prefix or ("\0", "\0")
    for key, ours in trainer.for_model(known).defaults.items():
        name = options.find(re.sub(f"^{re.escape(usual)}", own, key))
        if name and differ(ours, options.defaults[name]):
            yield f"default of {key} is {ours} here, {options.defaults[name]} there"
    exported = list(export(trainer, known))
    if not exported:
        yield "no plan can be exported"
    for files in exported:
        for file, text in files.items():
            path = folder / file
            path.write_text(text, encoding="utf-8")
            is_command = file == "run.sh" and trainer.name != "diffusers"
            for one in () if is_command or file == "quantization.json" else read_document(path):
                key = one.key.removeprefix(trainer.root)
                key = f"backends{key}" if file == "multidatabackend.json" else key
                if key.startswith(OF_STARTERS):
                    continue
                name = options.find(key)
                if name is None:
                    yield f"{key} is no option"
                elif (among := options.choices.get(name)) and one.value not in among:
                    yield f"{key} {one.value} is none of {among}"
                elif not is_of_kind(one.value, options.kinds.get(name, "")):
                    yield f"{key} {one.value!r} is no {options.kinds[name]}"


def main() -> None:
    """Print what each program would not take, or say that there is nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", type=Path)
    checkouts = parser.parse_args().checkouts
    for trainer in trainers().values():
        firsts = {known.name: known for known in reversed(trainer.models)}
        found: dict[str, list[str]] = {}
        with TemporaryDirectory() as folder:
            for name, known in firsts.items():
                for told in check(trainer, known, checkouts, Path(folder)):
                    found.setdefault(told, []).append(name)
        print(
            f"{trainer.name} at {trainer.version}: {len(firsts)} models, {len(found)} differences"
        )
        for told, names in found.items():
            print(f"    {told} ({', '.join(dict.fromkeys(names))})")


if __name__ == "__main__":
    main()
