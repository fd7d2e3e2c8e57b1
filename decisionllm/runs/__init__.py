"""Run directories: what they hold, the weights of a checkpoint, and a run before its first step."""
