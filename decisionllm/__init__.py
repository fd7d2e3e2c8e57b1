"""Offline decision-sequence modelling: a trajectory is a modality, read by a language model beside a text."""

__version__ = "0.2.0"
