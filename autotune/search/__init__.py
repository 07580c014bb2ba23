"""Which candidate to try next, when to stop, which one wins."""
