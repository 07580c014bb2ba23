"""The command line: parses options, calls one function of the front door, prints."""

from autotune.cli.app import main

__all__ = ["main"]
