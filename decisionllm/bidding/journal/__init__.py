"""The journal of a server: its rows, checks and copies."""
