"""One file per model family; `base.py` says what a family must answer."""
