"""Models that ship as packages, so that the first run needs no download from a hub."""
