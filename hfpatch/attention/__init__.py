"""Attention whose two directions are called apart: kernels, patterns, groups of heads."""
