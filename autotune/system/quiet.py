"""The one place that silences libraries, whose warnings and progress bars would interfere with
ours.

Call `silence_libraries()` before the first import of torch, diffusers or transformers.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

NOISY_LOGGERS = (
    "torch",
    "torch.utils._pytree",
    "torchao",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "optuna",
    "huggingface_hub",
    "PIL",
)


def silence_libraries() -> None:
    """Let only the libraries' errors through. Safe to call twice.

    This also disables the kernels that torch 2.13 compiles at their first call on CUDA: triton
    fails at an outer product if there is no C compiler, or Python's headers are missing.
    """
    os.environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def silence_progress_bars() -> None:
    """Disable the progress bars of diffusers and transformers. Imports both."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


@contextlib.contextmanager
def redirect_output(file: str | Path) -> Iterator[None]:
    """Append to `file` what is written to descriptors 1 and 2, below Python, where no library's
    setting has effect."""
    handle, saved = (
        os.open(file, os.O_WRONLY | os.O_APPEND),
        {number: os.dup(number) for number in (1, 2)},
    )
    try:
        for number in saved:
            os.dup2(handle, number)
        yield
    finally:
        for number, before in saved.items():
            os.dup2(before, number)
            os.close(before)
        os.close(handle)
