"""Groups of commands beside the main road of `cli.py`, one module each; as light to import."""
