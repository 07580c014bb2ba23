"""What the fork server imports once, so that every trial starts warm. Imports only: no operation may run here.

A parallel operation in the parent would deadlock its children, and a started CUDA could not be forked.
"""

from autotune.quiet import silence_libraries, silence_progress_bars

silence_libraries()

import diffusers  # noqa: E402, F401
import peft  # noqa: E402, F401
import torch  # noqa: E402, F401
import torchao.quantization  # noqa: E402, F401
import transformers  # noqa: E402, F401
from diffusers import DiffusionPipeline  # noqa: E402, F401

import autotune.training.model  # noqa: E402, F401

silence_progress_bars()

DONE = True
"""Read by the worker: the fork server itself would swallow a failing import."""
