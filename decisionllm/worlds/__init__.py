"""Worlds: datasets with their environments, one folder each."""
