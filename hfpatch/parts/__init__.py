"""Fused norms, MLPs, rotations and embeddings; values kept inside a layer, and values unread."""
