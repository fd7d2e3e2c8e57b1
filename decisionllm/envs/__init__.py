"""Simulators without scores."""
