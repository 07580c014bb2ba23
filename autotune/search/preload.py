"""Imports that the fork server makes once, so that every trial starts warm. A parallel operation in
the parent would deadlock its children, and a started CUDA could not be forked.

Two libraries may start CUDA when they are imported: torchao asks for the GPU's capability, and
whether triton knows it; so the GPU is hidden meanwhile (torchao decides only about MX kernels by
it, which are unused here). bitsandbytes chooses its backend: it is left to the trial that needs it.
"""

import gc
import os
import sys
from unittest import mock

from autotune.system.process import OF_FORK_SERVER, silence_libraries, silence_progress_bars

if os.environ.get("PYTHONSAFEPATH") == OF_FORK_SERVER:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):  # else a pipe would stay open after the command's end
        os.dup2(nowhere, output)

silence_libraries()

import torch._inductor.config  # noqa: E402
import torch.utils._triton  # noqa: E402

IS_HIDDEN = "bitsandbytes" not in sys.modules  # with its submodules there it cannot be
if IS_HIDDEN:
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
with (
    mock.patch.object(torch.cuda, "is_available", return_value=False),
    torch._inductor.config.patch(triton_disable_device_detection=True),
):
    import peft  # noqa: F401
    import torchao.quantization  # noqa: F401
    import transformers  # noqa: F401
    from diffusers import DiffusionPipeline  # noqa: F401

if IS_HIDDEN:
    del sys.modules["bitsandbytes"]
for function in vars(torch.utils._triton).values():
    getattr(function, "cache_clear", lambda: None)()  # what was cached while the GPU was hidden

silence_progress_bars()
gc.collect()  # what is garbage by now would be kept for good
# a trial collects garbage often, and need not look through half a million objects each time
gc.freeze()

DONE = True  # read by the worker: the fork server itself would swallow a failing import
