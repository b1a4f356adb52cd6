"""Showing numbers to people. Nothing here imports torch: plain lists and arrays come in."""
