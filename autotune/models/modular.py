"""Families whose pipeline diffusers has as blocks. It is called as a classic one: blocks that
encode text are its `encode_prompt`, which caching, previews and tests may replace, and the others
follow in its call."""

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from autotune.models.family import Family, Pixels, Sample
from autotune.system.lazy import Tensor, diffusers, nn, torch


class ModularFamily(Family):
    """A family on a `ModularPipeline`; all else is as in a classic one."""

    workflow: ClassVar[str]  # of the pipeline's blocks
    text_blocks: ClassVar[tuple[str, ...]]  # those of it that encode a prompt, before all others
    unused_blocks: ClassVar[tuple[str, ...]] = ()  # which are taken out

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        """Load the pipeline in `folder`. Parts are loaded by the classes that its blocks name and
        from nowhere else, whatever its index says."""
        dtype = components.pop("torch_dtype", None)
        how = self.workflow, self.text_blocks, self.unused_blocks
        pipeline = classic(self.pipeline_class)(*how)
        for name in pipeline.pretrained_component_names:
            if name not in components:
                kind = pipeline.get_component_spec(name).type_hint
                options = {"torch_dtype": dtype} if dtype and issubclass(kind, nn.Module) else {}
                components[name] = kind.from_pretrained(folder / name, **options)
        pipeline.update_components(**components)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def loading_code(self, base: str) -> list[str]:
        lines = super().loading_code(base)
        lines = [line.replace("DiffusionPipeline", "ModularPipeline") for line in lines]
        return [*lines, "pipeline.load_components()"]

    def encode_caption(self, pipeline: Any, caption: str, controls: Pixels = ()) -> Sample:
        if guider := getattr(pipeline, "guider", None):
            guider.disable()  # or an empty prompt would be encoded each time
        try:
            encoded = pipeline.encode_prompt(prompt=caption)
        finally:
            if guider:
                guider.enable()
        return {"prompt_embeds": encoded["prompt_embeds"][0]}


@cache
def classic(name: str) -> Any:
    """Make a class of diffusers' modular pipeline `name` that is called as a classic one."""
    stock = getattr(diffusers, name)

    class Classic(stock):  # type: ignore[misc, valid-type]
        _blocks: Any
        transformer: Any
        _working_device: torch.device | None = None

        def __init__(
            self, workflow: str, text_blocks: tuple[str, ...], unused: tuple[str, ...] = ()
        ) -> None:
            blocks = getattr(diffusers, stock.default_blocks_name)().get_workflow(workflow)
            for each in unused:
                blocks.sub_blocks.pop(each)
            super().__init__(blocks)
            parts, join = blocks.sub_blocks, diffusers.SequentialPipelineBlocks.from_blocks_dict
            self._of_text = join({name: parts[name] for name in text_blocks})
            self._others = join({name: parts[name] for name in parts if name not in text_blocks})

        @property
        def _execution_device(self) -> torch.device:
            return self._working_device or super()._execution_device

        def encode_prompt(
            self, prompt: str, device: torch.device | None = None
        ) -> dict[str, Tensor | None]:
            """Run the blocks that encode text; return the inputs of the other blocks."""
            with self._running(self._of_text, device):
                made = super().__call__(prompt=prompt)
            names = {each.name for each in self._of_text.intermediate_outputs}
            taken = names & {each.name for each in self._others.inputs}
            return {name: made.get(name) for name in sorted(taken)}

        def __call__(self, *, prompt: str, return_dict: bool = True, **inputs: Any) -> tuple[Any]:
            if (guidance := inputs.pop("guidance_scale", None)) is not None:
                self.guider.guidance_scale = guidance
            # What is no embedding, as the kinds of tokens, is made on the host, and read there.
            encoded = {
                name: each if each is None or each.is_floating_point() else each.cpu()
                for name, each in self.encode_prompt(prompt=prompt).items()
            }
            with self._running(self._others):
                made = super().__call__(**encoded, **inputs)
            return (made.get("images", made.get("videos")),)

        @contextlib.contextmanager
        def _running(self, blocks: Any, device: torch.device | None = None) -> Iterator[None]:
            before = self._blocks, self._working_device, self.transformer
            try:
                self._blocks, self._working_device = blocks, device
                if self.transformer is None:  # which blocks of text ask for its dtype
                    self.transformer = SimpleNamespace(dtype=self.text_encoder.dtype)
                yield
            finally:
                self._blocks, self._working_device, self.transformer = before

    return Classic
