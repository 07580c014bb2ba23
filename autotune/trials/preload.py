"""What the fork server imports once, so that every trial starts warm. Imports only: no operation may run here.

A parallel operation in the parent would deadlock its children, and a started CUDA could not be forked. torchao asks
for the GPU's compute capability when it is imported, which starts CUDA; so the GPU is hidden until all is imported.
(What torchao decides by that answer are its MX kernels, which are not used here.)
"""

from unittest import mock

from autotune.quiet import silence_libraries, silence_progress_bars

silence_libraries()

import torch  # noqa: E402

with mock.patch.object(torch.cuda, "is_available", return_value=False):
    import diffusers  # noqa: F401
    import peft  # noqa: F401
    import torchao.quantization  # noqa: F401
    import transformers  # noqa: F401
    from diffusers import DiffusionPipeline  # noqa: F401

    import autotune.training.model  # noqa: F401

silence_progress_bars()

DONE = True
"""Read by the worker: the fork server itself would swallow a failing import."""
