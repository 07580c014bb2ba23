"""The executor: data, caches, the step, the loop, checkpoints and the report."""
