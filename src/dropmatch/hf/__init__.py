"""The only place that imports transformers: models, caches, loading, and the `generate` seam."""

from dropmatch.hf.generate import GenerateDecoder, decoder
from dropmatch.hf.model import HFModel

__all__ = ["GenerateDecoder", "HFModel", "decoder"]
