"""Language models that read embedded tokens: their choices, LoRA, the forward pass with a shared
text and a key-value cache.
"""
