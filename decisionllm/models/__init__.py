"""The model: normaliser, tokenizer, backbone, heads and values of plans put together."""
