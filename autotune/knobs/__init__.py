"""One file per tunable dimension: its choices here, why others are excluded, how to apply one."""
