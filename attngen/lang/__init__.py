"""The expression language of masks and scores: one IR, one parser, tables per target."""
