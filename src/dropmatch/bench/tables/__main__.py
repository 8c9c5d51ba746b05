"""Rewrites the tables of the documents that are named."""

import sys

from dropmatch.bench.tables import main
from dropmatch.errors import DropMatchError

try:
    main(sys.argv[1:])
except DropMatchError as error:
    sys.exit(f"error: {error}")
