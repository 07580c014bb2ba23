"""The two families that are least alike, for tests that take seconds a family: a transformer and a
UNet.

The families' contract runs for all, and `make test-all` asks every family everything.
"""

KINDS = ("qwen-image", "sdxl")
