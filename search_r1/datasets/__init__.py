"""Readers of conversation files, one module per format, all yielding ``Row``."""
