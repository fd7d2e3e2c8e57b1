"""The model: normaliser, tokenizer, backbone, heads and dynamics put together."""
