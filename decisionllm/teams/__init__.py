"""Many agents in one world: their logs, worlds and models."""
