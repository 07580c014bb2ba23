"""Turns results into text. Pure: objects in, text out."""
