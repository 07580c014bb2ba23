"""Do the tests of a room notice a wrong number? Counts mutants of its modules that they kill.

    python -m venv --system-site-packages ENV; ENV/bin/pip install cosmic-ray
    nice ENV/bin/python benchmarks/mutants.py [MODULE...] [--number 12] [--seed 45] >> RESULTS

Draws places of each module by the seed, and one mutant for each by cosmic-ray's operators. Words of
messages and hints are no places, nor what changes nothing by its kind (`SAME`). Tests run in a fork
of a process that has imported torch, on a copy of the tree: the room's fast ones. Writes one JSON
line for each mutant; a survivor's diff says what no test sees.
"""

import argparse
import ast
import difflib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The tests that are to notice, those nearest to the module first; together at most a minute.
TESTS = {
    "cost/memory.py": "cost/test_golden.py cost/test_predict.py interop/test_overheads.py "
    "cost/test_exactness.py",
    "cost/timing.py": "cost/test_golden.py cost/test_kernels.py knobs/test_block_swap.py",
    "cost/predict.py": "cost/test_golden.py cost/test_predict.py interop/test_overheads.py "
    "search/test_golden.py",
    "cost/tables.py": "cost/test_golden.py cost/test_predict.py cost/test_exactness.py "
    "interop/test_overheads.py",
    "cost/estimate.py": "cost/test_golden.py cost/test_predict.py",
    "cost/calibration.py": "cost/test_golden.py cost/test_predict.py search/test_search.py",
    "search/winner.py": "search/test_confirming.py search/test_compiling.py search/test_golden.py "
    "search/test_search.py interop/test_overheads.py",
    "plan/file.py": "plan search/test_golden.py",
    "train/folder.py": "train/test_resume.py train/test_adapters.py train/test_loop.py "
    "train/test_run.py "
    "--deselect=tests/train/test_resume.py::test_sigkill_and_resume_as_processes",
    "share/store.py": "share/test_record.py share/test_plans_with_records.py share/test_stores.py",
    "share/warm_start.py": "share",
    "train/step.py": "train/test_loop.py train/test_modulation.py models/test_experts.py "
    "train/test_slider.py",
    "knobs/blocks.py": "knobs/test_block_swap.py train/test_model.py train/test_compile.py",
}
# Annotations (`int | None`) alone use the first: a mutant fails at the import. Texts that are equal
# are one object.
LEFT_OUT = ("BinaryOperator_BitOr", "NoOp", "Variable", "_Eq_Is", "_NotEq_IsNot")
# Arguments whose other value changes no result, or a message's words alone.
SAME = ("frozen", "strict", "non_blocking", "hint", "message", "maxsize")
IMPORTED: tuple[str, ...] = (
    "torch",
    "pytest",
    "hypothesis",
    "pydantic",
    "optuna",
    "PIL.Image",
    "safetensors.torch",
)
IMPORTED += ("diffusers.models", "transformers.modeling_utils", "peft", "torchao.quantization")
MAX_SECONDS = 300


def list_words(text: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """List from where to where a module holds words for people, or what changes nothing."""
    nodes = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Raise | ast.JoinedStr)
        or (isinstance(node, ast.keyword) and node.arg in SAME)
    ]
    ends = ((node.end_lineno or 0, node.end_col_offset or 0) for node in nodes)
    return [((node.lineno, node.col_offset), end) for node, end in zip(nodes, ends, strict=True)]


def draw_mutants(module: str, number: int, seed: int) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the operator and the mutated text of `number` places of a module."""
    from cosmic_ray import plugins  # type: ignore[import-not-found]
    from cosmic_ray.ast import ast_nodes, get_ast  # type: ignore[import-not-found]
    from cosmic_ray.mutating import mutate_code  # type: ignore[import-not-found]

    text = (ROOT / "autotune" / module).read_text()
    places, words = defaultdict(list), list_words(text)
    for name in sorted(plugins.operator_names()):
        operator = plugins.get_operator(name)
        if operator.arguments() or any(each in name for each in LEFT_OUT):
            continue
        nodes = ast_nodes(get_ast(text))
        positions = (at for node in nodes for at in operator().mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            if not any(first <= start <= last for first, last in words):
                places[start].append((name.removeprefix("core/"), operator(), occurrence))
    chance = random.Random(f"{seed} {module}")
    for start in chance.sample(sorted(places), min(number, len(places))):
        name, operator, occurrence = chance.choice(places[start])
        try:
            mutated = mutate_code(text, operator, occurrence)
            is_other = ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text))
        except (AttributeError, SyntaxError):  # cosmic-ray replaces no exception's dotted name
            continue
        if is_other:  # 2e16 + 1 is 2e16
            yield start[0], name, mutated


def run_tests(tree: Path, tests: str) -> str:
    """Run in a fork; return the first test that failed, `no end`, or nothing if all passed."""
    told = tree.with_suffix(".told")
    if (child := os.fork()) == 0:
        os.setsid()
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        os.environ["PYTHONPATH"] = str(tree)
        for number in (1, 2):
            os.dup2(os.open(told, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
        import pytest

        words = [name if name[0] == "-" else f"tests/{name}" for name in tests.split()]
        os._exit(pytest.main([*words, "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE"]))
    ends = time.monotonic() + MAX_SECONDS
    while (found := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < ends:
        time.sleep(0.2)
    if found[0] == 0:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "no end"
    lines = told.read_text(errors="replace").splitlines()
    failed = (line.split()[1] for line in lines if line.startswith(("FAILED", "ERROR")))
    return "" if found[1] == 0 else next(failed, "at the import")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(TESTS))
    parser.add_argument("--number", type=int, default=12)
    parser.add_argument("--seed", type=int, default=45)
    parser.add_argument("--lines", type=int, nargs="*", help="only these mutants of the sample")
    asked = parser.parse_args()
    sys.dont_write_bytecode = True
    sys.path.pop(0)  # else transformers takes `kernels.py` beside this for a library
    for name in IMPORTED:
        importlib.import_module(name)
    assert "autotune" not in sys.modules, "forks would have it without its mutants"
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        tree = Path(scratch, "tree")
        listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", "autotune", "tests"], cwd=tree, check=True
        )
        for module in asked.modules:
            file = tree / "autotune" / module
            sound = file.read_text()
            if failed := run_tests(tree, TESTS[module]):
                sys.exit(f"the tests of {module} fail without a mutant: {failed}")
            for line, operator, text in draw_mutants(module, asked.number, asked.seed):
                if asked.lines and line not in asked.lines:
                    continue
                file.write_text(text)
                began = time.monotonic()
                killer = run_tests(tree, TESTS[module])
                diff = difflib.unified_diff(sound.splitlines(), text.splitlines(), lineterm="", n=0)
                row = {"module": module, "line": line, "operator": operator, "killed_by": killer}
                row |= {"seed": asked.seed, "seconds": round(time.monotonic() - began, 1)}
                print(json.dumps(row | {"diff": list(diff)[3:]}), flush=True)
            file.write_text(sound)


if __name__ == "__main__":
    main()
