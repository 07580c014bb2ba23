"""What do threads that wait busily cost beside another program? Steps of a small network, alone and
two at once.

python benchmarks/threads.py [--turns default 12000 6000 3000 1000]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

LAYERS, WIDTH = 12, 256


def steps(rows: int, seconds: float) -> None:
    """Print the median milliseconds of a forward and backward pass."""
    import torch
    from torch.nn import functional

    layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
    inputs, end = torch.randn(rows, WIDTH), time.monotonic() + seconds
    times: list[float] = []
    while len(times) < 6 or time.monotonic() < end:
        started, values = time.perf_counter(), inputs
        for layer in layers:
            values = functional.gelu(functional.layer_norm(layer(values), (WIDTH,))) + values
        values.square().mean().backward()
        layers.zero_grad()
        times.append(time.perf_counter() - started)
    print(f"{1e3 * statistics.median(times[5:]):.1f}")


def measured(turns: str, rows: int, processes: int) -> str:
    """Medians of so many processes at once."""
    own = {} if turns == "default" else {"GOMP_SPINCOUNT": turns}
    command = [sys.executable, __file__, "--rows", str(rows)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | own)
        for _ in range(processes)
    ]
    return " ".join(process.communicate()[0].strip() for process in running)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", nargs="+", default=["default", "12000", "6000", "3000", "1000"])
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows:
        steps(options.rows, 4.0)
        return
    for turns in options.turns:
        alone, small, beside = (
            measured(turns, rows, processes) for rows, processes in ((512, 1), (64, 1), (512, 2))
        )
        print(f"{turns}: alone {alone} ms, 64 rows {small} ms, two at once {beside} ms", flush=True)


if __name__ == "__main__":
    main()
