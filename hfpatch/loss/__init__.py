"""The loss without logits: head, cross-entropy, log-probabilities, router loss."""
