"""The interface of a patched model to transformers' code: attention, masks, documents, ranks."""
