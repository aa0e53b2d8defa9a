"""Attention as two functions, forward and backward: kernels, patterns, groups of heads."""
