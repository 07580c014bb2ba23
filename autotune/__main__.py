"""`python -m autotune` and `autotune` are the same command."""

import sys


def main() -> None:
    """Run the command line; without a library that it is made of, tell that alone."""
    try:
        from autotune.cli import app
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: the installation is broken: {error}\n")
        sys.exit("hint: pip install --upgrade --force-reinstall lora-autotune")
    app.main()


if __name__ == "__main__":
    main()
