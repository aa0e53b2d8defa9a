"""One decoder layer in tiles: what runs, what is kept, and what its backward needs."""
