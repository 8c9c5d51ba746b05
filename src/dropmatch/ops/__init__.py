"""Pure tensor functions without state. Imports torch only."""
