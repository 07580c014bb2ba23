"""Measures which settings train a diffusion-model LoRA fastest on this machine, and freezes them into a plan."""

__version__ = "0.1.0"
