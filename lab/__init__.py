"""The notebook: scripts that made one table; `python -m lab.NAME`."""
