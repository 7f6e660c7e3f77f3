"""Kernel families, a folder for each; ``attngen.plan.catalogue`` has their order."""
