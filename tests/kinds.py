"""One family of each kind, for tests that take seconds a family: two streams, one, a UNet, video."""

KINDS = ("qwen-image", "flux1-dev", "sdxl", "wan-2.1")
