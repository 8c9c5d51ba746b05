"""The only place that imports transformers."""
