"""The decoding engine: acceptance rules, dropout heads, verification and the loop. Imports torch only."""
