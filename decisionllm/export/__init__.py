"""Policies as files that act without torch."""
