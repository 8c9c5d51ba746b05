"""The analyses of the DropMatch paper (arXiv 2603.03333, Tables 1-4, Figure 3) on any pair, one a module."""
