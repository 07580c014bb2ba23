"""The parts of making a plan: what is asked, what it stands on, what is frozen, how it is replayed and sealed."""
