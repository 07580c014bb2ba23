"""Two nodes of two processes each on this machine (CPU, gloo): what they learn, and what happens
when one is killed.

Each node has a network namespace if this is root on Linux, else both share the loopback; each has a
home and an output folder of its own. Reports how far the adapter is from one process's, then kills
every process of one node at a random step, several times: how long the other takes to stop, what it
says, and whether --resume ends with the same bytes.

    PYTHONPATH=. python benchmarks/nodes.py [--kills 5] [--folder FOLDER] [--seed 0] [--strategy
    fsdp2] [--whole-job]

With --whole-job images are held out, the best adapter is kept, and training goes on with an adapter
from a file.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from autotune.schema import write_plan
from tests.training.small import SETTINGS, machine, make_plan, write_model_and_images

NUM_STEPS = 24
PORT = 29417
NAMESPACES = ("autotune-node-0", "autotune-node-1")
ADDRESSES = ("10.231.7.1", "10.231.7.2")
ADAPTER = "pytorch_lora_weights.safetensors"


@contextlib.contextmanager
def namespaces() -> Iterator[bool]:
    """Two network namespaces joined by a cable, if this user may make them."""
    names = list(zip(NAMESPACES, ADDRESSES, ("autotune0", "autotune1"), strict=True))
    commands = [["ip", "netns", "add", name] for name in NAMESPACES]
    commands.append(["ip", "link", "add", names[0][2], "type", "veth", "peer", "name", names[1][2]])
    for name, address, link in names:
        commands.append(["ip", "link", "set", link, "netns", name])
        commands.append(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", link])
        commands += [["ip", "-n", name, "link", "set", one, "up"] for one in (link, "lo")]
    try:
        try:
            for command in commands:
                subprocess.run(command, check=True, capture_output=True)
            made = True
        except (OSError, subprocess.CalledProcessError):
            made = False
        yield made
    finally:
        for name in NAMESPACES:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


class Campaign:
    def __init__(self, folder: Path, isolated: bool, strategy: str, whole_job: bool) -> None:
        self.folder, self.isolated = folder, isolated
        model, images = write_model_and_images(folder)
        settings = SETTINGS.changed(micro_batch_size=1)
        job: dict[str, Any] = {}
        if whole_job:
            write_plan(
                folder / "plan-0.yaml",
                make_plan(model, images, machine(), num_steps=3, preview_every=0),
            )
            self.start("earlier", None, number=0).wait()
            job = {"validation": "20%", "validation_every": 4, "keep_best": True}
            job["from_adapter"] = str(folder / "earlier-0" / ADAPTER)
        for number in (1, 4):
            plan = make_plan(
                model, images, machine(), num_processes=number, num_steps=NUM_STEPS,
                checkpointing_steps=2,
                settings=settings, strategy=strategy if number > 1 else None, **job,
            )  # fmt: skip
            write_plan(folder / f"plan-{number}.yaml", plan)

    def start(
        self, name: str, node: int | None, *flags: str, number: int = 4
    ) -> subprocess.Popen[str]:
        """One node of two, or all processes on one if `node` is None."""
        home = self.folder / "homes" / str(node or 0)
        output = self.folder / f"{name}-{node or 0}"
        command = [
            sys.executable,
            "-m",
            "autotune",
            "--progress",
            "none",
            "train",
            f"{self.folder}/plan-{number}.yaml",
        ]
        command += ["--output", str(output), *flags]
        if node is not None:
            host = ADDRESSES[0] if self.isolated else "127.0.0.1"
            command += [
                "--nodes",
                "2",
                "--node-rank",
                str(node),
                "--rdzv-endpoint",
                f"{host}:{PORT}",
            ]
            if self.isolated:
                command = ["ip", "netns", "exec", NAMESPACES[node], *command]
        environment = {
            **os.environ,
            "XDG_CACHE_HOME": f"{home}/cache",
            "XDG_DATA_HOME": f"{home}/data",
        }
        log = (self.folder / f"{name}-{node or 0}.log").open("a")
        return subprocess.Popen(
            command, env={**environment, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log, text=True
        )

    def run_both(self, name: str, *flags: str) -> None:
        nodes = [self.start(name, node, *flags) for node in (0, 1)]
        for node, process in enumerate(nodes):
            if process.wait(timeout=600):
                raise SystemExit(
                    f"node {node} of {name} ended with {process.returncode}: {self.log(name, node)}"
                )

    def log(self, name: str, node: int) -> str:
        return (self.folder / f"{name}-{node}.log").read_text()[-2000:]

    def steps(self, name: str) -> list[float]:
        """The losses so far."""
        try:
            lines = (self.folder / f"{name}-0" / "metrics.jsonl").read_text().splitlines()
            return [json.loads(line)["loss"] for line in lines]
        except (OSError, ValueError):
            return []

    def held_out(self, name: str) -> list[float]:
        """The losses on held-out images."""
        text = (self.folder / f"{name}-0" / "metrics.jsonl").read_text()
        rows = map(json.loads, text.splitlines())
        return [row["validation_loss"] for row in rows if row.get("validation_loss") is not None]

    def adapter(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{name}-0" / ADAPTER)

    def kill_one(self, name: str, step: int, node: int) -> dict[str, object]:
        """Kill every process of a node after so many steps; what the other does."""
        nodes = [self.start(name, each) for each in (0, 1)]
        while len(self.steps(name)) < step:
            if any(process.poll() is not None for process in nodes):
                raise SystemExit(f"{name} ended before step {step}: {self.log(name, 0)}")
            time.sleep(0.005)
        tree = [
            psutil.Process(nodes[node].pid),
            *psutil.Process(nodes[node].pid).children(recursive=True),
        ]
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        survivor = nodes[1 - node]
        status = survivor.wait(timeout=120)
        seconds = time.monotonic() - killed
        nodes[node].wait()
        said = [
            line
            for line in self.log(name, 1 - node).splitlines()
            if line.startswith(("error", "hint"))
        ]
        return {
            "killed_node": node, "asked_step": step, "steps_taken": len(self.steps(name)),
            "exit_status": status,
            "survivor_stopped_seconds": round(seconds, 2), "said": said[-2:],
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--whole-job", action="store_true")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch, namespaces() as isolated:
        campaign = Campaign(
            options.folder or Path(scratch), isolated, options.strategy, options.whole_job
        )
        campaign.start("one", None, number=1).wait()
        campaign.run_both("two")
        one, two = campaign.adapter("one"), campaign.adapter("two")
        furthest = max(float((one[name] - two[name]).abs().max()) for name in one)
        losses = max(
            abs(a - b) for a, b in zip(campaign.steps("one"), campaign.steps("two"), strict=True)
        )
        warned = "find_unused_parameters" in campaign.log("two", 0) + campaign.log("two", 1)
        held_out = [
            abs(a - b)
            for a, b in zip(campaign.held_out("one"), campaign.held_out("two"), strict=True)
        ]
        facts = {"strategy": options.strategy, "held_out_difference": max(held_out, default=None)}
        facts |= {
            "namespaces": isolated,
            "adapter_difference": furthest,
            "loss_difference": losses,
            "warned": warned,
        }
        print(json.dumps(facts), flush=True)
        for number in range(options.kills):
            name = f"kill{number}"
            told = campaign.kill_one(name, draw.randint(3, NUM_STEPS - 4), draw.randint(0, 1))
            if number % 5 == 4:  # the last is resumed on one node
                campaign.start(name, None, "--resume").wait(timeout=600)
                told["resumed_on_nodes"] = 1
            else:
                campaign.run_both(name, "--resume")
            told["same_bytes"] = all(
                torch.equal(two[key], value) for key, value in campaign.adapter(name).items()
            )
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
