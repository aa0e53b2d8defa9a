"""The interface to transformers' own code in a patched model: attention, masks, documents, ranks."""
