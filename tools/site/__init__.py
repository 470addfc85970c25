"""The documentation's site: its links, its diagrams and the pages that are generated from the code."""
