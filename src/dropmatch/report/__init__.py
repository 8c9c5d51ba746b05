"""Results files as tables and pictures. Reads JSON only."""
