"""EAGLE-3: a small draft head that reads the target's own hidden states, and drafts trees (arXiv 2503.01840)."""
