"""Finds the decoder in a model and learns from a small instance of it what its layers are."""
