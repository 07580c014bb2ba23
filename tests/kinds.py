"""The two families that are least alike, a transformer and a UNet, for tests of seconds each."""

KINDS = ("qwen-image", "sdxl")
