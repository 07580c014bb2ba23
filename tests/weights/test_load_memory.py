"""Loading at its peak, sampled as the system counts it, in a fork of its own."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from autotune.weights.tensors import LOADERS
from tests.weights.conftest import save_model

NUM_BLOCKS, LINEARS = 5, 4
BLOCK_BYTES = LINEARS * (16 << 20)

MODEL = f"""
import torch
from torch import nn

def model():
    block = lambda: nn.Sequential(*(nn.Linear(2048, 4096, bias=False) for _ in range({LINEARS})))
    return nn.Sequential(*(block() for _ in range({NUM_BLOCKS})))
"""

PEAK = """
import json, os, sys, threading, torch
from pathlib import Path

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    counted = [line for line in lines if line.startswith(("RssAnon", "RssShmem"))]
    return sum(int(line.split()[1]) for line in counted) * 1024

def peak(call):
    base, most, stop = anonymous(), [0], threading.Event()
    def watch():
        while not stop.wait(0.001):
            most[0] = max(most[0], anonymous() - base)
    thread = threading.Thread(target=watch)
    thread.start()
    call()
    stop.set()
    thread.join()
    return most[0]

torch.set_num_threads(1)
"""

LOAD = """
import torchao.quantization
from autotune.knobs.quantized_layers import quantize_inside
from autotune.weights.empty import build_empty
from autotune.weights.files import open_weights
from autotune.weights.stream import load_into

source, cases = open_weights(Path(sys.argv[1])), json.loads(sys.argv[2])
for storage, _ in cases:
    one = nn.Linear(8, 8)
    quantize_inside([one], storage)("", one)  # imports what it needs

def measure(storage, loader):
    small = build_empty(model, dtype=torch.bfloat16)

    def load():
        load_into(small, source, loader=loader, transform=quantize_inside([small], storage))

    print(peak(load), flush=True)

for storage, loader in cases:
    if os.fork() == 0:
        measure(storage, loader)
        os._exit(0)
    os.wait()
"""


CASES = [
    *(("torchao-int8", name) for name in LOADERS),
    *([("bnb-nf4", "pread")] if find_spec("bitsandbytes") else []),  # a map would hide copies
]


@pytest.fixture(scope="module")
def peaks_of_cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    weight = torch.randn(4096, 2048).to(torch.bfloat16)
    names = [f"{block}.{linear}.weight" for block in range(NUM_BLOCKS) for linear in range(LINEARS)]
    save_model(folder, {name: weight.clone() for name in names}, max_shard_bytes=2 * BLOCK_BYTES)
    command = [sys.executable, "-c", MODEL + PEAK + LOAD, str(folder), json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(int, done.stdout.split()), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("storage", "name"), CASES)
def test_loading_takes_final_model_and_block(storage, name, peaks_of_cases):
    held = LOADERS[name].overhead_bytes(NUM_BLOCKS * BLOCK_BYTES, shares_memory=False)
    final = round(NUM_BLOCKS * BLOCK_BYTES / 2 * (0.516 if storage == "bnb-nf4" else 1))
    limit = final + BLOCK_BYTES + (held if name == "fastsafetensors" else 0)
    assert 0.97 * final < peaks_of_cases[storage, name] <= limit
