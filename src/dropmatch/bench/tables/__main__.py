"""Rewrites the tables of the documents that are named."""

import sys

from dropmatch.bench.tables import main

main(sys.argv[1:])
