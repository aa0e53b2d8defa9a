"""Finds the decoder in a model and probes a small instance of it for the traits of its layers."""
