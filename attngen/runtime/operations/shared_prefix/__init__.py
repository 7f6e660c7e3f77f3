"""A prefix of pages that sequences of a batch share, whose keys are read once for all of them."""
