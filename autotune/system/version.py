"""The version of autotune, which plans and records name."""

__version__ = "0.2.0"
