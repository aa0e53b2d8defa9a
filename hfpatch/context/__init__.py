"""What transformers' own code meets while a patched model runs: attention, masks, documents,
ranks.
"""
