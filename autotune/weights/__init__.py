"""Loads and saves safetensors files."""
