"""Ours against a peer, in one alternating run: `python -m benchmarks` for all, `python -m
benchmarks.windows` for one.
"""
