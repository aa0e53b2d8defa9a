"""Fused norms, MLPs, rotations and embeddings, and whose values nobody reads."""
