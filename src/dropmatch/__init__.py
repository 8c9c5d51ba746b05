"""Training-free speculative decoding that keeps more drafted tokens."""
