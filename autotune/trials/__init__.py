"""Runs one candidate for a few real steps in a child process and classifies what happened."""
