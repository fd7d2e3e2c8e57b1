"""Histories to actions: policies, sessions of running episodes, planning, and run directories."""
