"""A corridor whose first sight says where to turn at its end: a test of memory."""
